"""DiffRate: prune the patches of lowest class attention, and merge the next lowest."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveate.forward import Block
from foveate.reduction.matching import best_partner, nearest_leads
from foveate.reduction.plan import Plan
from foveate.reduction.regroup import Grouping, lead_groups, pick, sum_groups
from foveate.scoring.criteria import class_attention
from foveate.tokens import Tokens, widen

__all__ = ["DiffRate", "prune_count"]


@dataclass(frozen=True)
class DiffRate:
    """Prune the patches of lowest class attention, and merge the next lowest.

    A merged patch joins the kept patch of highest feature cosine, never a prefix token, by
    a plain mean. Sizes add up exactly, where the publication adds size times similarity;
    what is pruned is lost in both. Cost beside the attention row: K K' C.

    Attributes:
        keep_prune: Patches left by pruning, from ``keep`` to K.
        stand_in: Whether the kept patch of most similar key speaks for a pruned one; if
            not, nobody does.

    References:
        Chen et al., "DiffRate: differentiable compression rate for efficient vision
        transformers", ICCV 2023.
    """

    keep_prune: int
    stand_in: bool = False

    def __call__(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep``.

        Args:
            tokens: Tokens with K patches.
            block: Their block.
            keep: Patches after the step.

        Returns:
            The grouping.

        Raises:
            ValueError: If ``keep_prune`` is not from ``keep`` to K.
        """
        num_patches = tokens.num_patches
        if not keep <= self.keep_prune <= num_patches:
            raise ValueError(
                f"keep_prune must be from {keep} to {num_patches} patches at depth "
                f"{block.depth}; got {self.keep_prune}."
            )
        score = class_attention(tokens, block)
        rank = score.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
        is_lead, heard = rank < keep, rank < self.keep_prune
        lead, group = _nearest_features(tokens, is_lead, keep)
        spoken = nearest_leads(tokens, block, is_lead, keep)[1] if self.stand_in else -1
        ones = heard.to(widen(tokens.x).dtype)[..., None]
        count = sum_groups(ones, group, keep)[..., 0].gather(1, group)
        return Grouping(lead, torch.where(heard, group, spoken), 1 / count, heard)


def prune_count(plan: Plan, depth: int, before: int, options: Mapping[str, Any]) -> int:
    """Patches left by pruning at one step of a plan.

    Args:
        plan: The plan.
        depth: Depth of the step.
        before: Patches before it.
        options: ``keep_prune`` lists the counts, one for every step of the schedule; if it
            is None, ``prune_share`` of the patches that go are pruned, rounded half up.

    Returns:
        The count.

    Raises:
        ValueError: If there is not one integer for every step, or the share is not in
            [0, 1].
    """
    listed, share = options["keep_prune"], options["prune_share"]
    if listed is not None:
        whole = isinstance(listed, list | tuple) and all(type(k) is int for k in listed)
        if not whole or len(listed) != len(plan.schedule):
            raise ValueError(
                f"keep_prune must list one integer for each of {len(plan.schedule)} steps; "
                f"got {listed!r}."
            )
        return listed[[d for d, _ in plan.schedule].index(depth)]
    if not 0 <= share <= 1:
        raise ValueError(f"prune_share must be in [0, 1]; got {share}.")
    return before - floor(share * (before - plan.counts[depth]) + 0.5)


def _nearest_features(tokens: Tokens, is_lead: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Leads, and for every patch the group of the lead of highest feature cosine."""
    unit = normalize(widen(tokens.patches), dim=-1)
    here = torch.arange(unit.shape[1], device=unit.device)
    lead, _ = lead_groups(is_lead, here.expand(len(unit), -1), keep)
    _, nearest = best_partner(unit, pick(unit, lead))
    return lead_groups(is_lead, torch.where(is_lead, here, lead.gather(1, nearest)), keep)
