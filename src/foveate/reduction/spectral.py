r"""Merge pairs by the pullback metric of single patches; prune what another method merges.

The structure is ToMe's: every even patch proposes its best odd one. What is best is told by
the Jacobian of the task instead of the cosine of keys. With
:math:`G_t \in \mathbb{R}^{R \times C}` the pulled probes of patch t, for all of its
:math:`s_t` copies, moving the patch by v moves the sketched output by :math:`G_t v`.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from foveate.forward import Block
from foveate.reduction.matching import Action, check_pairwise, join
from foveate.reduction.regroup import Grouping, sum_groups
from foveate.reduction.sketch import PulledProbes
from foveate.tokens import Tokens, widen

__all__ = ["Cost", "LeadsOnly", "Mean", "PullbackPairs", "important_leads", "pair_costs"]

Mean = Literal["importance", "size"]
Cost = Literal["merge", "metric"]


@dataclass(frozen=True)
class PullbackPairs:
    r"""Merge even and odd patches along the pairs that cost the task least.

    The importance of a patch is :math:`\lVert G_t \rVert_F / \sqrt R`. The most important
    member leads a group, that is, it gives its place; the feature is the members' mean,
    weighted by importance or by size. Cost: that of the probes, and R K^2 C / 2.

    Attributes:
        probes: Rows of the Jacobian.
        mean: ``importance``, or ``size``, for which the theory of sizes holds to first
            order.
        cost: ``merge`` or ``metric``; see :func:`pair_costs`.

    Raises:
        ValueError: If ``mean`` or ``cost`` is none of these.
    """

    probes: PulledProbes
    mean: Mean = "importance"
    cost: Cost = "merge"

    def __post_init__(self) -> None:
        """Check the names."""
        for name, known in (("mean", get_args(Mean)), ("cost", get_args(Cost))):
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {known}; got '{given}'.")

    def __call__(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep``.

        Args:
            tokens: Tokens with K patches.
            block: Their block.
            keep: Patches after the step, at least K / 2.

        Returns:
            The grouping.

        Raises:
            ValueError: If ``keep`` is less than half of the patches.
        """
        index = torch.arange(tokens.num_patches, device=tokens.x.device)
        even, odd = index[0::2], index[1::2]
        check_pairwise(len(index), keep)
        sizes = tokens.sizes()
        sketch = self.probes(tokens, block) * sizes[..., None, None]  # (B, K, R, C)
        importance = sketch.square().sum(-1).mean(-1).sqrt()  # (B, K)
        weight = importance if self.mean == "importance" else sizes.to(importance)
        cost = pair_costs(widen(tokens.patches), sketch, weight, self.cost)
        best = cost.min(-1)
        grouping = join(even, odd, -best.values, best.indices, keep)
        grouping = important_leads(grouping.group, importance, keep)
        if self.mean == "size":
            return grouping
        return replace(grouping, share=shares(weight, grouping.group, keep))


def pair_costs(feature: Tensor, sketch: Tensor, weight: Tensor, cost: Cost) -> Tensor:
    r"""Price every pair of an even patch a and an odd patch b.

    ``merge`` is the first-order cost of replacing both by
    :math:`m = (w_a f_a + w_b f_b) / (w_a + w_b)`, with all cancellation,

    .. math::
        \frac1R \lVert G_a (m - f_a) + G_b (m - f_b) \rVert^2 ,

    and ``metric`` their squared distance in the mean of their two metrics,
    :math:`\frac1{2R} (\lVert G_a (f_a - f_b) \rVert^2 + \lVert G_b (f_a - f_b) \rVert^2)`.
    Cost: R K^2 C / 2.

    Args:
        feature: Features f, ``(B, K, C)``.
        sketch: Pulled probes G for all copies of a patch, ``(B, K, R, C)``.
        weight: Weights w, ``(B, K)``, nonnegative; two zeros count as equal.
        cost: Which of the two.

    Returns:
        Costs, ``(B, A, T)`` for A even and T odd patches, in squared output units.
    """
    (f_a, f_b), (g_a, g_b) = _halves(feature), _halves(sketch)
    w_a, w_b = weight[:, 0::2, None], weight[:, None, 1::2]
    share = torch.where(w_a + w_b > 0, w_a / (w_a + w_b), 0.5)  # (B, A, T), of a
    total = torch.zeros_like(share)
    for row in range(sketch.shape[2]):
        p_a, p_b = g_a[:, :, row], g_b[:, :, row]  # (B, A, C), (B, T, C)
        by_a = (p_a * f_a).sum(-1)[:, :, None] - p_a @ f_b.mT  # G_a (f_a - f_b)
        by_b = f_a @ p_b.mT - (p_b * f_b).sum(-1)[:, None]  # G_b (f_a - f_b)
        if cost == "metric":
            total = total + (by_a.square() + by_b.square()) / 2
        else:
            total = total + (share * by_b - (1 - share) * by_a).square()
    return total / sketch.shape[2]


def important_leads(group: Tensor, importance: Tensor, keep: int) -> Grouping:
    """Let the most important patch of every group lead it, ties to the lower index.

    Args:
        group: Group of every patch in any numbering below ``keep``, ``(B, K)``.
        importance: ``(B, K)``.
        keep: Number of groups.

    Returns:
        The grouping, in the order of its leads.
    """
    order = importance.sort(dim=1, descending=True, stable=True).indices
    rank = order.argsort(dim=1)
    best = rank.new_full((len(group), keep), group.shape[1])
    best = best.scatter_reduce(1, group, rank, "amin")
    lead, place = order.gather(1, best).sort(dim=1)
    here = torch.arange(keep, device=group.device).expand_as(place)
    return Grouping(lead, torch.empty_like(place).scatter(1, place, here).gather(1, group))


def shares(weight: Tensor, group: Tensor, keep: int) -> Tensor:
    """Weights of a weighted mean, which sum to 1 in every group.

    Args:
        weight: Nonnegative, ``(B, K)``; members of a group where all are 0 share equally.
        group: Group of every patch, ``(B, K)``.
        keep: Number of groups.

    Returns:
        ``(B, K)``.
    """
    both = torch.stack([weight, torch.ones_like(weight)], dim=-1)
    total, count = sum_groups(both, group, keep).unbind(-1)  # (B, K') each
    total, count = total.gather(1, group), count.gather(1, group)
    return torch.where(total > 0, weight / total, 1 / count)


@dataclass(frozen=True)
class LeadsOnly:
    """Drop the patches that another action would merge, and leave its leads as they are.

    Attributes:
        action: The other action.
    """

    action: Action

    def __call__(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep``; nobody speaks for the others."""
        chosen = self.action(tokens, block, keep)
        here = torch.arange(tokens.num_patches, device=chosen.group.device)
        is_lead = chosen.lead.gather(1, chosen.group.clamp(min=0)) == here
        return Grouping(chosen.lead, torch.where(is_lead, chosen.group, -1), "lead")


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    return values[:, 0::2], values[:, 1::2]
