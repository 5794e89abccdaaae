"""Scores from learned queries: what a small auxiliary head would look at (Cropr)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, nn
from torch.nn.functional import normalize

from foveate.backbones import Heads, attention
from foveate.forward import Block, run
from foveate.models import Model
from foveate.tokens import Tokens, widen

__all__ = ["Cropr", "load_queries", "save_queries", "train_queries"]

_MOST_TARGETS = 256  # numbers that the auxiliary head regresses


@dataclass(frozen=True)
class Cropr:
    r"""Sum of the products of queries with each patch's key.

    :math:`\sum_{q=1}^{Q} \sum_a q^a \cdot k^a_j` over the heads a, before scaling and
    softmax. The keys are the block's own, normalised and rotated where the network does so.
    Cost: K h d.

    Attributes:
        queries: Trained by :func:`train_queries` at this depth, ``(Q, heads, d)``. None
            takes the class token's own query instead, which has no parameters.

    References:
        Bergner et al., "Token cropr: faster ViTs for quite a few tasks", CVPR 2025.
    """

    queries: Tensor | None = None

    def __call__(self, tokens: Tokens, block: Block) -> Tensor:
        """Rate the patches.

        Args:
            tokens: Tokens with K patches.
            block: The block whose keys are read.

        Returns:
            Scores, ``(B, K)``.

        Raises:
            ValueError: If the queries do not fit the block's heads, or there are none and
                the backbone has no class token.
        """
        heads = block.project(tokens)
        key = widen(heads.key[:, :, tokens.layout.num_prefix :])  # (B, h, K, d)
        if self.queries is None:
            if not block.backbone.has_class_token:
                raise ValueError(
                    "queries must be given to cropr for a backbone without a class token; "
                    "got None."
                )
            query = heads.query[:, :, :1].to(key)  # (B, h, 1, d)
        else:
            query = self._summed(key)
        return (query * key).sum((1, 3))

    def _summed(self, key: Tensor) -> Tensor:
        """All queries in one, since the score is linear in them, ``(h, 1, d)``."""
        assert self.queries is not None
        expected = (key.shape[1], key.shape[3])
        if self.queries.ndim != 3 or self.queries.shape[1:] != expected:
            raise ValueError(
                f"queries must have shape (Q, {expected[0]}, {expected[1]}), for the heads "
                f"of the block; got {tuple(self.queries.shape)}."
            )
        return self.queries.to(key).sum(0)[:, None]


class AuxiliaryHead(nn.Module):
    """Queries that attend over the patches of one block, and a read-out.

    Cross-attention of Q queries, an MLP with a residual, LayerNorm, the mean over queries
    and a linear map. Queries start as unit vectors in every head.

    Args:
        num_queries: Queries, Q.
        heads: Heads of the block, and channels of each.
        num_outputs: Numbers it regresses.
        generator: Source of the initial weights.
    """

    def __init__(
        self,
        num_queries: int,
        heads: tuple[int, int],
        num_outputs: int,
        generator: Generator,
    ) -> None:
        super().__init__()
        channels = heads[0] * heads[1]
        start = torch.randn(num_queries, *heads, generator=generator)
        self.queries = nn.Parameter(normalize(start, dim=-1))
        self.mlp = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
        )
        self.norm = nn.LayerNorm(channels)
        self.read = nn.Linear(channels, num_outputs)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
                nn.init.zeros_(layer.bias)

    def forward(self, key: Tensor, value: Tensor) -> Tensor:
        """Regress from keys and values of the patches, ``(B, h, K, d) -> (B, M)``."""
        query = self.queries.transpose(0, 1).expand(len(key), -1, -1, -1)  # (B, h, Q, d)
        x = attention(Heads(query, key, value), None)  # (B, Q, h d)
        x = x + self.mlp(x)
        return self.read(self.norm(x).mean(1))


@torch.enable_grad()
def train_queries(
    model: Model,
    images: Tensor,
    task: str,
    depth: int,
    num_queries: int = 1,
    steps: int = 300,
    seed: int = 0,
) -> Tensor:
    r"""Learn on unlabelled images which patches of one block tell the task's output.

    An auxiliary head (cross-attention of the queries over the patches of the block, its
    own MLP and read-out) regresses the raw output of the frozen model on batches of at
    most 16 images, by AdamW at 1e-2 for the queries and 1e-3 for the rest, with a cosine
    decay. Only the queries are returned; the head is forgotten. Its input is detached, so
    that the model is not touched. An output of more than 256 numbers is projected onto
    256 random directions first, which keeps squared distances in the mean. Cost:
    ``steps`` forward passes of the model.

    Args:
        model: The frozen model.
        images: Unlabelled, ``(images, 3, H, W)``, transformed.
        task: Whose output to regress.
        depth: Block whose keys will be scored.
        num_queries: Queries, Q.
        steps: Batches to train on.
        seed: The same seed gives the same queries.

    Returns:
        Queries, ``(Q, heads, d)``, in the dtype of the model.

    Raises:
        ValueError: If there is no such block, or a number is not positive.
    """
    for name, number in (("num_queries", num_queries), ("steps", steps)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1; got {number}.")
    if not 0 <= depth < model.backbone.num_blocks:
        raise ValueError(
            f"depth must be from 0 to {model.backbone.num_blocks - 1}; got {depth}."
        )
    generator = Generator().manual_seed(seed)
    observe = _Observer(model, task, depth)
    heads, output = observe(images[:16])
    directions = _directions(output.shape[1], generator)
    first = project(output, directions)
    centre, scale = first.mean(0), first.square().mean().sqrt()
    shape = (heads.key.shape[1], heads.key.shape[3])
    head = AuxiliaryHead(num_queries, shape, len(centre), generator).to(output)
    layers = [p for p in head.parameters() if p is not head.queries]
    groups = [{"params": [head.queries], "lr": 1e-2}, {"params": layers, "lr": 1e-3}]
    optimiser = torch.optim.AdamW(groups)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        batch = torch.randperm(len(images), generator=generator)[:16].to(images.device)
        heads, output = observe(images[batch])
        target = (project(output, directions) - centre) / scale
        optimiser.zero_grad()
        (head(heads.key, heads.value) - target).square().mean().backward()
        optimiser.step()
        decay.step()
    return head.queries.detach()


def save_queries(queries: Mapping[int, Tensor], file: str | Path) -> None:
    """Write the queries of some depths as safetensors, one tensor a depth."""
    save_file({str(depth): q.contiguous() for depth, q in queries.items()}, file)


def load_queries(file: str | Path, depth: int) -> Tensor:
    """Read the queries of one depth.

    Args:
        file: Written by :func:`save_queries`.
        depth: Block they were trained at.

    Returns:
        Queries, ``(Q, heads, d)``.

    Raises:
        ValueError: If the file cannot be read or has no queries for this depth.
    """
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"queries must be a safetensors file; {file}: {error}.") from error
    if str(depth) not in found:
        raise ValueError(
            f"queries must be trained for depth {depth}; {file} has {sorted(found)}."
        )
    return found[str(depth)]


def project(output: Tensor, directions: Tensor | None) -> Tensor:
    """Raw output along random directions, ``(B, M) -> (B, 256)``; as it is without them."""
    return output if directions is None else output @ directions.to(output)


def _directions(num_outputs: int, generator: Generator) -> Tensor | None:
    """Random directions that keep squared norms in the mean; None if M is small enough."""
    if num_outputs <= _MOST_TARGETS:
        return None
    shape = (num_outputs, _MOST_TARGETS)
    return torch.randn(shape, generator=generator) / _MOST_TARGETS**0.5


@dataclass(frozen=True)
class _Observer:
    """What a frozen model computes: heads of the patches at one block, and its output."""

    model: Model
    task: str
    depth: int

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Heads, Tensor]:
        """Heads ``(B, h, K, d)`` of the patches alone, and output ``(B, M)``."""
        backbone, task = self.model.backbone, self.model.task(self.task)
        tokens, taps = backbone.embed(images), task.taps(backbone.num_blocks)
        last = max(taps[-1], self.depth)
        _, kept = run(backbone, tokens, 0, last, taps=(*taps, self.depth))
        output = task.decode(backbone, tuple(kept[d].x for d in taps), tokens.layout)
        every = backbone.project(self.depth, kept[self.depth])
        num_prefix = tokens.layout.num_prefix
        return Heads(*(h[:, :, num_prefix:] for h in every)), output.flatten(1)
