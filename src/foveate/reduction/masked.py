r"""Removing patches without removing them: the differentiable form of pruning and merging.

All N patches stay in the sequence, and those to be removed are masked. A mask m needs
nothing new, since proportional attention adds the log size of a key to its logits: a patch
of size :math:`s m` with m tending to 0 is a patch that no token sees, and the gradient in m
is that of a masked softmax. Masks are straight-through: 0 or 1 forwards, a probability
backwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from foveate.backbones import Backbone
from foveate.forward import Block, Place, Step, run
from foveate.reduction.matching import mean_keys
from foveate.reduction.recover import recover
from foveate.reduction.regroup import follow, speak, stand_ins, sum_groups
from foveate.scoring.criteria import class_attention
from foveate.tasks import Task
from foveate.tokens import Tokens, widen

__all__ = [
    "ABSENT",
    "MaskedRestore",
    "MaskedStep",
    "Masks",
    "Rate",
    "Rates",
    "masked_output",
    "nearest_lead",
    "read_masked",
    "remember",
]

_SPACING = 4  # between candidate counts
ABSENT = 1e-30  # size of a masked patch: its log is finite, and so are the gradients


@dataclass(frozen=True)
class Rate:
    """A number of patches, as a mask over ranks; differentiable.

    Attributes:
        count: Expected number, scalar.
        mask: Whether a patch of each rank is among them, ``(N,)``; 0 or 1 forwards, 1 for
            as many as are expected, rounded up, and the probability backwards.
    """

    count: Tensor
    mask: Tensor


Masks = Mapping[int, tuple[Rate, Rate]]
"""For every depth the rates of pruning and of merging."""


class Rates(nn.Module):
    """Logits of the candidate counts, of pruning and merging at every depth.

    Candidates go from all patches down in steps of four. The expectations start at the
    counts given, for pruning half-way to the count before, and are as open as can be.

    Args:
        num_patches: Patches of the full model, N.
        start: Patches left at every depth.
    """

    def __init__(self, num_patches: int, start: Mapping[int, int]) -> None:
        super().__init__()
        before = [num_patches, *start.values()]
        mean = [[(b + k) / 2, k] for b, k in zip(before, start.values(), strict=False)]
        candidates = torch.arange(num_patches, 0, -_SPACING, dtype=torch.float32)
        self.depths = list(start)
        self.register_buffer("candidates", candidates)
        self.logits = nn.Parameter(widest_logits(candidates, torch.tensor(mean)))

    def forward(self) -> Masks:
        """Rates of every depth, differentiable in the logits."""
        return {
            depth: (self._rate(prune), self._rate(merge))
            for depth, (prune, merge) in zip(self.depths, self.logits, strict=True)
        }

    def _rate(self, logits: Tensor) -> Rate:
        candidates = self.get_buffer("candidates")
        share = logits.softmax(0)
        mean = share @ candidates
        rank = torch.arange(int(candidates[0]), device=share.device)
        soft = share @ (candidates[:, None] > rank).to(share)  # (N,)
        hard = (rank < mean).to(share)
        return Rate(mean, soft + (hard - soft).detach())


def widest_logits(candidates: Tensor, mean: Tensor) -> Tensor:
    """Logits of the distribution of highest entropy with a given mean.

    Args:
        candidates: Its values, ``(n,)``.
        mean: Within them, any shape.

    Returns:
        Logits in ``candidates``, the mean's shape and ``(n,)``.
    """
    low, high = torch.full_like(mean, -50.0), torch.full_like(mean, 50.0)
    unit = candidates / candidates.max()
    for _ in range(40):
        slope = (low + high) / 2
        above = (slope[..., None] * unit).softmax(-1) @ candidates > mean
        low, high = torch.where(above, low, slope), torch.where(above, slope, high)
    return low[..., None] * unit


@dataclass
class MaskedStep:
    """DiffRate's step with masks: the forward values are those of the true step.

    Patches are ranked by class attention. Those in reach of ``merge`` stay; of the others,
    those in reach of ``prune`` join the kept patch of highest cosine, by a plain mean, and
    the rest vanish.

    Attributes:
        prune: Patches left by pruning.
        merge: Patches left by merging.
        alpha: Share of its offset that a removed patch gets back; None if the task does not
            read patches.
    """

    prune: Rate
    merge: Rate
    alpha: float | None = None
    place: Place = "between"

    def __call__(self, tokens: Tokens, block: Block) -> Tokens:
        """Mask what is removed. N patches come and go, ``(B, P + N, C)``."""
        x, size = widen(tokens.patches), tokens.sizes()
        alive = size > 0.5
        with torch.no_grad():
            score = class_attention(tokens, block).masked_fill(~alive, -1.0)
            order = score.sort(dim=1, descending=True, stable=True).indices
            rank = order.argsort(dim=1)  # those removed before come last
            mask = (self.prune.mask * self.merge.mask)[rank]
            lead = alive & (mask > 0.5)
            near = nearest_lead(x, lead)
        mask = (self.prune.mask * self.merge.mask)[rank]
        joins = torch.where(alive & ~lead, self.prune.mask[rank], 0.0)  # (B, N)
        added = torch.stack([joins, joins * size], dim=-1)
        number, mass = sum_groups(added, near, x.shape[1]).unbind(-1)
        moved = x + sum_groups(x * joins[..., None], near, x.shape[1])
        moved = (moved / (1 + number[..., None])).to(tokens.x.dtype)
        floor = torch.where(alive, ABSENT, 1.0) * size.detach()
        changed = tokens.with_(
            x=torch.cat([tokens.prefix, moved], dim=1),
            size=(size + mass) * mask + (1 - mask.detach()) * floor,
            proportional=True,
        )
        if self.alpha is None:
            return changed
        with torch.no_grad():
            merged = joins.detach() > 0.5
            speaker = torch.where(
                merged, near, nearest_lead(mean_keys(tokens, block), lead)
            )
            here = torch.arange(x.shape[1], device=x.device)
            speaker = torch.where(alive & ~lead, speaker, here)
        return remember(tokens, changed, speaker[..., None], self.alpha)


@dataclass
class MaskedRestore:
    """The step that fills the grid before a block."""

    place: Place = "before"

    def __call__(self, tokens: Tokens, block: Block) -> Tokens:
        """Tokens on the full grid, nothing masked."""
        return read_masked(tokens)


def masked_output(
    backbone: Backbone, task: Task, images: Tensor, masks: Masks, restore: int | None
) -> Tensor:
    """Raw task output with the patches masked that would be gone.

    Args:
        backbone: The network.
        task: Its task.
        images: ``(B, 3, H, W)``.
        masks: Rates by depth.
        restore: First block on the full grid again; None if the task does not read it.

    Returns:
        ``(B, ...)``, differentiable in the rates.
    """
    alpha = 1.0 if task.needs_grid else None
    steps: dict[int, list[Step]] = {
        depth: [MaskedStep(prune, merge, alpha)] for depth, (prune, merge) in masks.items()
    }
    taps = task.taps(backbone.num_blocks)
    if restore is not None:
        steps[restore] = [MaskedRestore()]
    tokens = backbone.embed(images)
    _, kept = run(backbone, tokens, 0, taps[-1], steps, taps)
    features = tuple(read_masked(kept[d]).x for d in taps)
    return task.decode(backbone, features, tokens.layout)


def read_masked(tokens: Tokens) -> Tokens:
    """What a decoder reads: removed patches through their stand-ins, as after true steps.

    Backwards, a removed patch is also worth what it would have been if it had stayed.

    Args:
        tokens: N patches, some of them masked.

    Returns:
        N patches on the full grid.
    """
    if tokens.stand_in is None:
        return tokens
    full = recover(tokens)
    size, held = tokens.sizes(), tokens.sizes().detach()
    # A masked patch is as small as ABSENT times its size before, the unit of its mask.
    gone = (size - held) * (ABSENT / held)
    mask = torch.where(held > 0.5, 0.0, gone)[..., None]
    patches = full.patches + mask * (tokens.patches - full.patches)
    x = torch.cat([tokens.prefix, patches.to(full.x.dtype)], dim=1)
    return full.with_(x=x)


def nearest_lead(vectors: Tensor, lead: Tensor) -> Tensor:
    """Lead of highest cosine to every patch.

    Args:
        vectors: ``(B, N, d)``.
        lead: Whether a patch leads, ``(B, N)``, at least one an image.

    Returns:
        Index of the lead, ``(B, N)``.
    """
    unit = normalize(vectors, dim=-1)
    cosine = (unit @ unit.mT).masked_fill(~lead[:, None], -2.0)
    return cosine.argmax(-1)


def remember(
    before: Tokens,
    after: Tokens,
    voices: Tensor,
    alpha: float | Tensor,
    weight: Tensor | None = None,
) -> Tokens:
    """Note who speaks for every patch, and what it then lacks.

    Args:
        before: N patches before a step.
        after: The same patches after it.
        voices: Patches that speak for each from now on, ``(B, N, S)``.
        alpha: Share of what it lacks that is stored, a number or ``(B, 1, 1)``.
        weight: How much each of them says, ``(B, N, S)``; None for S = 1.

    Returns:
        ``after`` with stand-ins and offsets.
    """
    lost = alpha * (before.patches - speak(after.patches, voices, weight))
    lost = speak(lost, stand_ins(before), before.weight)
    stand_in, shares = follow(before, voices, weight, before.num_patches)
    return after.with_(
        stand_in=stand_in,
        weight=shares,
        offset=lost if before.offset is None else before.offset + lost,
        grid_position=(
            before.position if before.grid_position is None else before.grid_position
        ),
    )
