"""Fewer patches, and where they went: the one move that every action is made of."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from foveate.tokens import Tokens, widen


@dataclass(frozen=True)
class Grouping:
    """Which patches stay, and who speaks for the others. K patches become K'.

    Attributes:
        lead: One patch of every group, ascending, ``(B, K')``. Its place on the grid, and
            its rotary position, become the group's.
        group: Group of every patch, index below K', ``(B, K)``; -1 if nobody speaks for it.
        share: How a group's feature is made: ``mean`` weighs its members by size, ``lead``
            takes the lead's feature as it is, and numbers ``(B, K)`` are weights of a sum.
        heard: Which patches go into their group's feature and size, ``(B, K)``; the others
            are spoken for and nothing else. None for all.
        shift: Added to the features of the groups, ``(B, K', C)``; None for nothing.
        voices: The S groups that speak for each patch, ``(B, K, S)``; None if its own does.
        weight: How much each of them says, ``(B, K, S)``; None without ``voices``.
    """

    lead: Tensor
    group: Tensor
    share: Literal["mean", "lead"] | Tensor = "mean"
    heard: Tensor | None = None
    shift: Tensor | None = None
    voices: Tensor | None = None
    weight: Tensor | None = None


@dataclass(frozen=True)
class Memory:
    """What is stored of a removed patch, for the day the grid is filled again.

    Attributes:
        alpha: Share of what the stand-in lacks, a number or ``(B, 1, 1)``; the number 0
            stores nothing.
        freeze: Store the whole feature instead; the patch then has no stand-in.
    """

    alpha: float | Tensor = 0.0
    freeze: bool = False

    @property
    def stores(self) -> bool:
        """Whether anything is stored."""
        return self.freeze or isinstance(self.alpha, Tensor) or self.alpha != 0


NOTHING = Memory()


def regroup(tokens: Tokens, grouping: Grouping, memory: Memory = NOTHING) -> Tokens:
    r"""Replace every group of patches by one.

    With ``share="mean"`` the feature is
    :math:`m_g = \sum_{i \in g} s_i x_i / \sum_{i \in g} s_i`, accumulated in float32 at
    least. Sizes add up in every case, so that a group's size is the number of original
    patches it is made of. Prefix tokens are untouched, and the groups keep the order of the
    grid. Cost: one pass over the patches.

    Args:
        tokens: Tokens with K patches.
        grouping: Which patches stay.
        memory: What to store of the others.

    Returns:
        Tokens with K' patches.
    """
    x, size = _features(tokens, grouping)
    offset = tokens.offset
    if memory.stores:
        lost = _lost(tokens.patches, x, grouping, memory)
        mine = speak(lost, stand_ins(tokens), tokens.weight)  # (B, K, C) -> (B, N, C)
        offset = mine if offset is None else offset + mine
    position = tokens.position
    voices, weight = grouping.voices, grouping.weight
    if voices is None or memory.freeze:
        voices, weight = nobody_if_frozen(grouping, memory)[..., None], None
    stand_in, weight = follow(tokens, voices, weight, x.shape[1])
    return tokens.with_(
        x=torch.cat([tokens.prefix, x], dim=1),
        size=size,
        stand_in=stand_in,
        weight=weight,
        offset=offset,
        position=None if position is None else pick(position, grouping.lead),
        grid_position=position if tokens.grid_position is None else tokens.grid_position,
    )


def lead_groups(is_lead: Tensor, target: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Number the groups that patches form by pointing at a lead.

    Args:
        is_lead: Whether a patch leads a group, ``(B, K)``; true ``keep`` times an image.
        target: For every patch the index of its lead, or -1, ``(B, K)``.
        keep: Groups in every image, K'.

    Returns:
        Leads, ascending, ``(B, keep)``, and the group of every patch, ``(B, K)``.
    """
    # A stable sort of the flags keeps the order of the grid, and its shape is static.
    lead = is_lead.byte().sort(dim=1, descending=True, stable=True).indices[:, :keep]
    number = is_lead.cumsum(1) - 1  # right at leads, which is where it is read
    group = number.gather(1, target.clamp(min=0))
    return lead, torch.where(target < 0, -1, group)


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Rows by index: ``(B, K, C)`` at ``(B, K')`` gives ``(B, K', C)``."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


def sum_groups(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Sum over the members of every group, ``(B, K, C)`` to ``(B, num_groups, C)``."""
    batch, _, channels = values.shape
    first = num_groups * torch.arange(batch, device=group.device)[:, None]
    total = values.new_zeros(batch * num_groups, channels)
    total = total.index_add(0, (group + first).flatten(), values.flatten(0, 1))
    return total.unflatten(0, (batch, num_groups))


def speak(values: Tensor, stand_in: Tensor, weight: Tensor | None) -> Tensor:
    """What the stand-ins of every original patch say, ``(B, K, C)`` to ``(B, N, C)``.

    Args:
        values: One row for every patch there is.
        stand_in: Who speaks for each original patch, ``(B, N, S)``; -1 says nothing.
        weight: Weight of each of the S stand-ins, ``(B, N, S)``; None for S = 1.

    Returns:
        Weighted sums over the stand-ins.
    """
    if weight is None:
        index = stand_in[..., 0]
        return torch.where(index[..., None] < 0, 0.0, pick(values, index.clamp(min=0)))
    # One product, as S grows with every step; K rows are few beside S of C channels.
    mix = _mix(stand_in, weight.to(widen(values).dtype), values.shape[1])
    with torch.autocast(values.device.type, enabled=False):
        return mix @ widen(values)


def _mix(stand_in: Tensor, weight: Tensor, number: int) -> Tensor:
    """Weight of each of so many patches in every original one, ``(B, N, number)``."""
    said = torch.where(stand_in < 0, 0.0, weight)
    mix = said.new_zeros(*said.shape[:2], number)
    return mix.scatter_add(2, stand_in.clamp(min=0), said)


def stand_ins(tokens: Tokens) -> Tensor:
    """Who speaks for the original patches, ``(B, N, S)``: each for itself at first."""
    if tokens.stand_in is not None:
        return tokens.stand_in
    here = torch.arange(tokens.num_patches, device=tokens.x.device)
    return here.expand(tokens.x.shape[0], -1)[..., None]


def follow(
    before: Tokens, voices: Tensor, weight: Tensor | None, number: int
) -> tuple[Tensor, Tensor | None]:
    """Stand-ins of the original patches after the stand-ins themselves have moved.

    Chains are exact: a patch of S stand-ins, each with S' of its own, has S S' of them, or
    all that are left, if these are fewer.

    Args:
        before: Tokens with K patches, before a step.
        voices: Who speaks for each of them from now on, ``(B, K, S')``; -1 for nobody.
        weight: How much each says, ``(B, K, S')``; None for S' = 1.
        number: Patches there are from now on.

    Returns:
        Stand-ins and their weights, ``(B, N, S S')``; no weights while S and S' are 1.
    """
    old = stand_ins(before)
    at, shape = old.clamp(min=0).flatten(1), (old.shape[1], -1)
    moved = pick(voices, at).unflatten(1, shape)  # (B, N, S, S')
    moved = torch.where(old[..., None] < 0, -1, moved).flatten(2)
    if weight is None:
        return moved, before.weight
    new = pick(weight, at).unflatten(1, shape)
    share = 1.0 if before.weight is None else before.weight[..., None]
    loud = (new * share).flatten(2)
    if moved.shape[2] <= number:
        return moved, loud
    mix = _mix(moved, loud, number)
    return torch.arange(number, device=mix.device).expand_as(mix), mix


def _features(tokens: Tokens, grouping: Grouping) -> tuple[Tensor, Tensor]:
    """Features and sizes of the groups, ``(B, K', C)`` and ``(B, K')``."""
    lead, share, heard = grouping.lead, grouping.share, grouping.group >= 0
    if grouping.heard is not None:
        heard = heard & grouping.heard
    group, keep = grouping.group.clamp(min=0), lead.shape[1]
    size = torch.where(heard, tokens.sizes(), 0.0)[..., None]  # (B, K, 1)
    total = sum_groups(size, group, keep)  # (B, K', 1)
    if isinstance(share, Tensor):
        weight = torch.where(heard, share, 0.0)[..., None]
        x = sum_groups(widen(tokens.patches) * weight, group, keep)
    elif share == "mean":
        x = sum_groups(widen(tokens.patches) * size, group, keep) / total
    else:
        x = pick(tokens.patches, lead)
    if grouping.shift is not None:
        x = x + grouping.shift
    return x.to(tokens.x.dtype), total[..., 0]


def _lost(patches: Tensor, x: Tensor, grouping: Grouping, memory: Memory) -> Tensor:
    """What each patch loses in this step, ``(B, K, C)``; nothing if it stays as it is."""
    if memory.freeze:
        gone = nobody_if_frozen(grouping, memory) < 0
        return torch.where(gone[..., None], patches, 0.0)
    voices = grouping.group[..., None] if grouping.voices is None else grouping.voices
    return memory.alpha * (patches - speak(x, voices, grouping.weight))


def nobody_if_frozen(grouping: Grouping, memory: Memory) -> Tensor:
    """Groups of the patches, where a frozen patch belongs to none, ``(B, K)``."""
    if not memory.freeze:
        return grouping.group
    index = torch.arange(grouping.group.shape[1], device=grouping.group.device)
    leads = grouping.lead.gather(1, grouping.group.clamp(min=0))
    return torch.where(leads == index, grouping.group, -1)
