"""Rows of the Jacobian at the tokens of one block: what the oracle presets know."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from foveate.diagnosis.jacobian import Tail, TokenJacobian
from foveate.forward import Block, Place, run
from foveate.reduction.recover import recover
from foveate.tasks import Task
from foveate.tokens import Tokens, widen


@dataclass(frozen=True)
class PulledProbes:
    r"""Random signs at the task's output, pulled back to the tokens of a block.

    Row k of patch n is :math:`(J^\top u_k)_n / s_n`, for one copy of a patch that stands
    for :math:`s_n`. What follows the block is the model as it would go on from here,
    without further reduction, on the recovered grid if the task reads one; what the task
    has read before is held constant. All images share the probes, so that none depends on
    its batch-mates. Cost: ``num_probes`` VJPs an image. Works under ``no_grad``, gives no
    gradients, does not compile.

    The u have independent signs as entries: :math:`\frac1R \sum_k (u_k^\top v)^2` then
    estimates :math:`\lVert v \rVert^2` without bias and with a relative standard error of
    at most :math:`\sqrt{2 / R}`, where normal entries always have that much; for a single
    output it is exact.

    Attributes:
        task: The decoder.
        place: Where at the block the tokens are taken.
        num_probes: Rows, R.
        seed: The same seed gives the same probes; each depth draws its own.
        chunk_size: Probes pulled back at once, which bounds the memory.

    Raises:
        ValueError: If ``num_probes`` or ``chunk_size`` is not positive.
    """

    task: Task
    place: Place = "between"
    num_probes: int = 48
    seed: int = 0
    chunk_size: int = 16
    basis: ClassVar[None] = None  # rows are in the features' own coordinates

    def __post_init__(self) -> None:
        """Check the number of probes."""
        for name in ("num_probes", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")

    def __call__(self, tokens: Tokens, block: Block) -> Tensor:
        """Pull the probes back.

        Args:
            tokens: Tokens with K patches, at ``place`` of the block.
            block: The block; if the task reads tokens from before it, they are in ``kept``.

        Returns:
            Sketch of every patch, ``(B, K, R, C)``, in float32 at least.

        Raises:
            ValueError: If tokens that the task reads have not been kept.
        """
        with torch.no_grad():
            jacobian = TokenJacobian(self._tail(tokens, block), tokens.x, self.chunk_size)
            pulled = jacobian.vjp(self._probes(jacobian.output, block.depth))
        rows = pulled[:, :, tokens.layout.num_prefix :].permute(1, 2, 0, 3)
        return widen(rows) / tokens.sizes()[..., None, None]

    def _probes(self, output: Tensor, depth: int) -> Tensor:
        """Signs, the same for all images and on every device, ``(R, B, M)``."""
        generator = Generator().manual_seed(self.seed + 7919 * depth)
        shape = (self.num_probes, 1, output.shape[1])
        bits = torch.randint(0, 2, shape, generator=generator)
        return (2 * bits - 1).to(output).expand(-1, len(output), -1)

    def _tail(self, tokens: Tokens, block: Block) -> Tail:
        """Task output of the tokens, ``(B, P + K, C) -> (B, M)``."""
        backbone, task, depth = block.backbone, self.task, block.depth
        taps = task.taps(backbone.num_blocks)
        start = depth + (self.place == "between")
        missing = [d for d in taps if d < start and d not in block.kept]
        if missing:
            raise ValueError(
                f"taps must hold the depths {missing}, which the task reads before block "
                f"{depth}; got the tokens kept at {sorted(block.kept)}."
            )

        def tail(x: Tensor) -> Tensor:
            now = tokens.with_(x=x)
            if self.place == "between":
                now = backbone.transform(depth, now)
            _, late = run(backbone, now, start, taps[-1], taps=taps)
            # A tap at this very depth was kept before any step, hence what is kept wins.
            read = [{**late, **block.kept}[d] for d in taps]
            features = tuple((recover(t) if task.needs_grid else t).x for t in read)
            return task.decode(backbone, features, tokens.layout).flatten(1)

        return tail


@dataclass(frozen=True)
class Sensitivity:
    r"""The oracle of all scores: how much the task output moves when one patch moves.

    :math:`\sqrt{\frac1R \sum_k \lVert (J^\top u_k)_n \rVert^2}` estimates the Frobenius
    norm of a patch's block of the Jacobian; the relative standard error of its square is at
    most :math:`\sqrt{2 / R}`. Cost: that of the probes.

    Attributes:
        probes: What is pulled back.
    """

    probes: PulledProbes

    def __call__(self, tokens: Tokens, block: Block) -> Tensor:
        """Scores, ``(B, K)``, nonnegative; comparable between the patches of one call."""
        rows = self.probes(tokens, block) * tokens.sizes()[..., None, None]
        return rows.square().sum(-1).mean(-1).sqrt()
