"""How many patches to prune and to merge at which block, learned on unlabelled images.

Each count is the expectation of a softmax over candidates, and the model runs on all its
patches, those to be removed masked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import torch
from torch import Generator, Tensor

from foveate.backbones import Backbone
from foveate.models import Model
from foveate.reduction.budget import Ratio, macs_schedule
from foveate.reduction.macs import block_macs, encoder_macs, token_counts
from foveate.reduction.masked import Masks, Rates, masked_output
from foveate.reduction.plan import Plan
from foveate.tasks import Task
from foveate.tokens import Layout

__all__ = ["Budget", "fit_counts", "learn_rates"]

_BATCH = 8  # images a step
_BUDGET_WEIGHT = 10.0  # of the squared deviation from the budget, in shares of full MACs


@torch.enable_grad()
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
    each candidate count. They alone learn, by AdamW from 0.03 down to 0.003 (three times
    the published rates, for a tenth of the steps), to minimise

    .. math::
        \frac{\lVert y - y^* \rVert^2}{\lVert y^* \rVert^2} + 10 \, (G - G^*)^2

    where y is the raw output with the patches masked that would be gone, :math:`y^*` the
    full model's, and G the expected share of its multiply-adds, :math:`G^*` being the
    target. They start at the schedule of equal relative steps. The counts found are then
    moved onto the budget by :func:`fit_counts`. Cost: ``steps`` forward and backward passes
    of the full model on 8 images, and as many forward passes.

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
    with torch.no_grad():
        layout = model.backbone.embed(images[:1]).layout
    search = _Search(model, task, layout, fuse_last)
    budget = Budget(model.backbone, layout, mac_ratio, search.restore)
    rates = Rates(layout.num_patches, budget.equal_steps(search.depths)).to(images.device)
    optimiser = torch.optim.AdamW([rates.logits], 0.03, (0.9, 0.95), weight_decay=0.0)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=0.003)
    generator = Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randperm(len(images), generator=generator)[:_BATCH]
        masks = rates()
        excess = macs_share(budget, masks) - 1 / float(mac_ratio)
        loss = search.error(images[batch.to(images.device)], masks)
        loss = loss + _BUDGET_WEIGHT * excess.square()
        gradients = torch.autograd.grad(loss, rates.logits)  # nothing else learns
        rates.logits.grad = gradients[0]
        optimiser.step()
        decay.step()
    return search.plan(rates, budget)


@dataclass(frozen=True)
class Budget:
    """Multiply-adds that a schedule may take.

    Attributes:
        backbone: The network.
        layout: Geometry of the unreduced sequence.
        mac_ratio: Multiply-adds of the full encoder over those of the reduced, at least.
        restore: First block on the full grid again; None if none is.
    """

    backbone: Backbone
    layout: Layout
    mac_ratio: Ratio
    restore: int | None = None

    def macs(self, counts: Mapping[int, int]) -> int:
        """Multiply-adds of the encoder under a schedule."""
        num_blocks = self.backbone.num_blocks
        pairs = token_counts(num_blocks, self.layout, counts, restore_depth=self.restore)
        return encoder_macs(self.backbone, pairs)

    def fits(self, counts: Mapping[int, int]) -> bool:
        """Whether a schedule is within the budget, exactly."""
        return self.macs(counts) * Fraction(str(self.mac_ratio)) <= self.macs({})

    def equal_steps(self, depths: list[int]) -> dict[int, int]:
        """Schedule of equal relative steps that takes the budget."""
        return macs_schedule(
            self.backbone, self.layout, depths, self.mac_ratio, "between", self.restore
        )


def fit_counts(counts: Mapping[int, float], budget: Budget) -> dict[int, int]:
    """Move counts onto a budget: at most its multiply-adds, and no patch more would fit.

    All counts are scaled by the largest factor that fits, rounded down, and what is left is
    spent patch by patch where rounding took most.

    Args:
        counts: Patches wanted at every depth, never growing.
        budget: What may be spent.

    Returns:
        Schedule of whole numbers from 1 to all patches, never growing.

    Raises:
        ValueError: If one patch everywhere is still too much.
    """
    most = budget.layout.num_patches

    def scaled(factor: float) -> dict[int, int]:
        return {d: min(most, max(1, floor(factor * c))) for d, c in counts.items()}

    if not budget.fits(scaled(0.0)):
        raise ValueError(
            f"mac_ratio must be within reach of 1 patch at depths {list(counts)}; "
            f"got {budget.mac_ratio}."
        )
    low, high = 0.0, most / min(counts.values())
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if budget.fits(scaled(middle)) else (low, middle)
    fitted = scaled(low)
    while True:
        limit = dict(zip(fitted, [most, *fitted.values()], strict=False))
        more = [{**fitted, d: k + 1} for d, k in fitted.items() if k < limit[d]]
        more = [candidate for candidate in more if budget.fits(candidate)]
        if not more:
            return fitted
        fitted = min(more, key=lambda c: sum(abs(c[d] - low * counts[d]) for d in c))


def macs_share(budget: Budget, masks: Masks) -> Tensor:
    """Multiply-adds as a share of the full encoder's, differentiable in the counts.

    The gradient goes to the count that takes effect. The publication passes it to both
    rates of a depth, which makes pruning pay for what merging saves.

    Args:
        budget: Of which network.
        masks: Rates by depth.

    Returns:
        The share, a scalar.
    """
    backbone, layout = budget.backbone, budget.layout
    full = torch.tensor(layout.num_patches, dtype=torch.float64)
    now, total = full, torch.zeros(())
    for depth in range(backbone.num_blocks):
        now = full if depth == budget.restore else now
        attended = now
        if depth in masks:
            prune, merge = masks[depth]
            now = torch.minimum(now, torch.minimum(prune.count, merge.count).to(now))
        pair = (layout.num_prefix + attended, layout.num_prefix + now)
        total = total + block_macs(backbone, depth, *pair)  # type: ignore[arg-type]
    return total / budget.macs({})


@dataclass(frozen=True)
class _Search:
    """What rates are learned for."""

    model: Model
    task: str
    layout: Layout
    fuse_last: int

    @property
    def decoder(self) -> Task:
        """The task."""
        return self.model.task(self.task)

    @property
    def last(self) -> int:
        """Blocks that run."""
        return self.decoder.taps(self.model.backbone.num_blocks)[-1]

    @property
    def restore(self) -> int | None:
        """First block on the full grid again; None if the task does not read it."""
        return self.last - self.fuse_last if self.decoder.needs_grid else None

    @property
    def depths(self) -> list[int]:
        """All reduced blocks but the first."""
        return list(range(1, self.last if self.restore is None else self.restore))

    def error(self, images: Tensor, masks: Masks) -> Tensor:
        """Squared error of the masked model's output, relative, mean over the images."""
        with torch.no_grad():
            target = self.model(images, self.task).flatten(1)
        output = masked_output(
            self.model.backbone, self.decoder, images, masks, self.restore
        )
        error = (output.flatten(1) - target).square().sum(1) / target.square().sum(1)
        return error.mean()

    def plan(self, rates: Rates, budget: Budget) -> Plan:
        """Plan of the learned counts, within the budget."""
        before: float = self.layout.num_patches
        share: list[float] = []
        keeps: dict[int, float] = {}
        with torch.no_grad():
            learned = rates()
        for depth, (prune, merge) in learned.items():
            pruned = min(before, float(prune.count))
            keeps[depth] = min(pruned, float(merge.count))
            gone = before - keeps[depth]
            share.append((before - pruned) / gone if gone else 0.0)
            before = keeps[depth]
        fitted = fit_counts(keeps, budget)
        left = [self.layout.num_patches, *fitted.values()]
        listed = [
            b - floor(s * (b - k) + 0.5)
            for s, b, k in zip(share, left, left[1:], strict=False)
        ]
        return Plan(
            "diffrate",
            self.task,
            self.layout.grid,
            tuple(fitted.items()),
            fuse_last=self.fuse_last,
            options={"keep_prune": listed},
        )
