"""What a plan costs in multiply-adds."""

from foveate.models import Model
from foveate.reduction.macs import block_macs, token_counts
from foveate.reduction.plan import Plan
from foveate.reduction.presets import PRESETS
from foveate.tokens import Layout

__all__ = ["back_propagates", "plan_macs", "restore_depth"]


def plan_macs(model: Model, plan: Plan, layout: Layout) -> tuple[int, int]:
    """Multiply-adds of the blocks, for one image: full, and by a plan.

    They are those of :mod:`foveate.reduction.macs`, of the blocks that the task needs.
    Scoring, matching and recovery are not in them; ``benchmark`` times them apart.

    Args:
        model: The model.
        plan: The plan.
        layout: Geometry of the unreduced sequence.

    Returns:
        Both counts.
    """
    backbone, task = model.backbone, model.task(plan.task)
    stop = task.taps(backbone.num_blocks)[-1]
    full = token_counts(backbone.num_blocks, layout, {})
    restore = restore_depth(model, plan.task, plan.fuse_last) if plan.schedule else None
    reduced = token_counts(backbone.num_blocks, layout, plan.counts, plan.place, restore)

    def total(counts: list[tuple[int, int]]) -> int:
        return sum(block_macs(backbone, d, *pair) for d, pair in enumerate(counts[:stop]))

    return total(full), total(reduced)


def back_propagates(plan: Plan) -> bool:
    """Whether a plan's method asks the Jacobian at inference: an oracle, not a saving."""
    return plan.method in PRESETS and "num_probes" in PRESETS[plan.method].options


def restore_depth(model: Model, task: str, fuse_last: int) -> int | None:
    """First block that runs on the full grid again.

    Args:
        model: The model.
        task: Name of one of its tasks.
        fuse_last: Blocks at the end of those the task needs.

    Returns:
        Its index; None if there is no such block, or the task reads no grid.

    Raises:
        ValueError: If there are not so many blocks.
    """
    decoder = model.task(task)
    last = decoder.taps(model.backbone.num_blocks)[-1]
    if not 0 <= fuse_last <= last:
        raise ValueError(f"fuse_last must be from 0 to {last}; got {fuse_last}.")
    return last - fuse_last if decoder.needs_grid and fuse_last else None
