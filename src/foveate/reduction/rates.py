"""DiffRate: prune, then merge, at counts that are learned for every block."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import normalize

from foveate.backbones import Backbone
from foveate.forward import Step, run
from foveate.forward import Block
from foveate.models import Model
from foveate.reduction.budget import Ratio, macs_schedule
from foveate.reduction.macs import block_macs, encoder_macs, token_counts
from foveate.reduction.masked import MaskedRestore, MaskedStep, Rate, read_masked
from foveate.reduction.matching import best_partner, nearest_leads
from foveate.reduction.plan import Plan
from foveate.reduction.regroup import Grouping, lead_groups, pick, sum_groups, widen
from foveate.scoring.criteria import class_attention
from foveate.tokens import Layout, Tokens

__all__ = ["DiffRate", "fit_counts", "learn_rates", "prune_count"]

_BATCH = 8  # images a step
_SPACING = 4  # between candidate counts
_BUDGET_WEIGHT = 100.0  # of the squared deviation from the budget, in shares of full MACs


@dataclass(frozen=True)
class DiffRate:
    """Prune the patches of lowest class attention, and merge the next lowest.

    A merged patch joins the kept patch of highest feature cosine, never a prefix token, by a
    plain mean. Sizes add up exactly, where the publication adds size times similarity; what
    is pruned is lost in both. Cost beside the attention row: K K' C.

    Attributes:
        keep_prune: Patches left by pruning, from ``keep`` to K.
        stand_in: Whether the kept patch of most similar key speaks for a pruned one; if not,
            nobody does.

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
        options: ``keep_prune`` lists the counts, one for every step of the schedule; if it is
            None, ``prune_share`` of the patches that go are pruned, rounded half up.

    Returns:
        The count.

    Raises:
        ValueError: If there is not one count for every step, or the share is not in [0, 1].
    """
    listed, share = options["keep_prune"], options["prune_share"]
    if listed is not None:
        if len(listed) != len(plan.schedule):
            raise ValueError(
                f"keep_prune must have one count for each of {len(plan.schedule)} steps; "
                f"got {len(listed)}."
            )
        return int(listed[[d for d, _ in plan.schedule].index(depth)])
    if not 0 <= share <= 1:
        raise ValueError(f"prune_share must be in [0, 1]; got {share}.")
    return before - floor(share * (before - plan.counts[depth]) + 0.5)


def learn_rates(
    model: Model,
    images: Tensor,
    task: str,
    mac_ratio: Ratio,
    steps: int = 300,
    seed: int = 0,
    fuse_last: int = 1,
) -> Plan:
    r"""Learn on unlabelled images how many patches to prune and to merge at which block.

    Every block but the first, and but the last ones on the full grid, gets two logits for
    each candidate count. They alone learn, by AdamW from 0.01 down to 0.001, to minimise

    .. math::
        \frac{\lVert y - y^* \rVert^2}{\lVert y^* \rVert^2} + 100 \, (G - G^*)^2

    where y is the raw output with the patches masked that would be gone, :math:`y^*` the
    full model's, and G the share of its multiply-adds, :math:`G^*` being the target. They
    start around the schedule of equal relative steps. The counts found are then moved onto
    the budget by :func:`fit_counts`. Cost: ``steps`` forward and backward passes of the full
    model on 8 images, and as many forward passes.

    Args:
        model: The frozen model, with a class token.
        images: Unlabelled, ``(images, 3, H, W)``, transformed.
        task: Whose output error counts.
        mac_ratio: Multiply-adds of the full encoder over those of the reduced, at least.
        steps: Batches to learn on.
        seed: The same seed gives the same plan.
        fuse_last: Blocks at the end on the full grid, for a task that reads it.

    Returns:
        A plan of the method ``diffrate`` that costs at most the budget.

    Raises:
        ValueError: If the budget is out of reach, or ``steps`` is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}.")
    search = _Search.open(model, images, task, fuse_last)
    layout, depths = search.layout, search.depths
    start = macs_schedule(
        model.backbone, layout, depths, mac_ratio, "between", search.restore
    )
    rates = Rates(layout.num_patches, start).to(images.device)
    _learn(rates, search, images, 1 / float(mac_ratio), (steps, seed))
    prune, keep = rates.counts()
    budget = (model.backbone, layout, mac_ratio, search.restore)
    return search.plan(prune, keep, fit_counts(keep, *budget))
