"""Random signs at a task's output, pulled back to several cuts of the network at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from foveate.forward import Block, Place, Step, run
from foveate.models import Model
from foveate.tokens import Tokens

__all__ = ["Cut", "pull_back"]


@dataclass(frozen=True)
class Cut:
    """Where tokens are taken.

    Attributes:
        depth: Block.
        place: ``before`` it, or ``between`` its attention and its MLP.
    """

    depth: int
    place: Place = "between"

    def __str__(self) -> str:
        """For the names of tensors."""
        return f"{self.depth}.{self.place}"


def pull_back(
    model: Model,
    task: str,
    images: Tensor,
    cuts: Sequence[Cut],
    num_probes: int,
    seed: int,
) -> dict[str, Tensor]:
    r"""Pull random signs back to the patches of every cut in one backward pass each.

    What the task reads from before the first cut is held constant. Cost: one forward pass,
    and for each probe one backward pass to the first cut.

    Args:
        model: The model.
        task: Name of a task.
        images: ``(B, 3, H, W)``.
        cuts: Where the tokens are taken, within what the task reads.
        num_probes: Probes, R; each image has its own.
        seed: Source of the signs.

    Returns:
        For each cut, under ``NAME.DEPTH.PLACE``: ``tokens`` ``(B, P + N, C)`` float16;
        ``rows`` :math:`J_n^\top u_k`, ``(B, N, R, C)``, float16, divided by ``unit``, their
        root mean square, ``(B,)``; and ``norm``
        :math:`\sqrt{\mathrm{mean}_k \lVert J_n^\top u_k \rVert^2}`, ``(B, N)``.

    Raises:
        ValueError: If a cut lies behind what the task reads, or nothing depends on one.
    """
    with torch.enable_grad():
        output, leaves = _run(model, task, images, cuts)
        generator = Generator().manual_seed(seed)
        pulled: dict[Cut, list[Tensor]] = {cut: [] for cut in leaves}
        for probe in range(num_probes):
            bits = torch.randint(0, 2, output.shape, generator=generator)
            sign = (2 * bits - 1).to(output)
            more = probe + 1 < num_probes
            at = [tokens.x for tokens in leaves.values()]
            found = torch.autograd.grad(output, at, sign, retain_graph=more)
            for cut, gradient in zip(leaves, found, strict=True):
                pulled[cut].append(gradient.detach())
    result: dict[str, Tensor] = {}
    for cut, gradients in pulled.items():
        prefix = leaves[cut].layout.num_prefix
        rows = torch.stack(gradients, 2)[:, prefix:]  # (B, N, R, C)
        unit = rows.square().mean((1, 2, 3)).sqrt()
        if not (unit > 0).all():
            raise ValueError(f"output of '{task}' must depend on the patches at {cut}.")
        result |= {
            f"tokens.{cut}": leaves[cut].x.detach().half(),
            f"rows.{cut}": (rows / unit[:, None, None, None]).half(),
            f"unit.{cut}": unit,
            f"norm.{cut}": rows.square().sum(-1).mean(-1).sqrt(),
        }
    return result


def _run(
    model: Model, name: str, images: Tensor, cuts: Sequence[Cut]
) -> tuple[Tensor, dict[Cut, Tokens]]:
    """Output of the task, and the tokens at the cuts, with a graph from the first on."""
    backbone, task = model.backbone, model.task(name)
    taps = task.taps(backbone.num_blocks)
    wrong = [str(cut) for cut in cuts if not 0 <= cut.depth < taps[-1]]
    if wrong:
        raise ValueError(
            f"cuts must lie before depth {taps[-1]}, the last that '{name}' reads; got "
            f"{', '.join(wrong)}."
        )
    first = min(cut.depth for cut in cuts)
    with torch.no_grad():
        tokens, early = run(backbone, backbone.embed(images), 0, first, taps=taps)
    tokens = tokens.with_(x=tokens.x.detach().requires_grad_(True))
    leaves: dict[Cut, Tokens] = {}
    steps: dict[int, list[Step]] = {}
    for cut in cuts:
        steps.setdefault(cut.depth, []).append(_Leaf(cut, leaves))
    _, late = run(backbone, tokens, first, taps[-1], steps, taps)
    kept = early | late  # what is read at the first cut itself depends on it
    features = tuple(kept[d].x for d in taps)
    return task.decode(backbone, features, tokens.layout).flatten(1), leaves


class _Leaf:
    """A step that changes nothing and keeps the tokens."""

    def __init__(self, cut: Cut, leaves: dict[Cut, Tokens]) -> None:
        self.cut, self.leaves = cut, leaves
        self.place: Place = cut.place

    def __call__(self, tokens: Tokens, block: Block) -> Tokens:
        self.leaves[self.cut] = tokens
        return tokens
