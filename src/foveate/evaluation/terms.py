"""The same terms for all methods: where they reduce, and down to what."""

from collections.abc import Sequence
from dataclasses import dataclass

from foveate.evaluation.cost import restore_depth
from foveate.forward import Place
from foveate.models import Model
from foveate.reduction.budget import Ratio, macs_schedule, ratio_schedule
from foveate.reduction.plan import Plan, Schedule
from foveate.tokens import Layout

__all__ = ["DEFAULT_KEEPS", "Budget", "Terms", "find_budgets", "last_share"]

DEFAULT_KEEPS = (0.95, 0.75, 0.5)


@dataclass(frozen=True)
class Terms:
    """How methods given by name are run, all of them alike.

    Attributes:
        depths: Blocks with a step, ascending; without them, what the given plans do.
        keeps: Shares of the original patches after the last step.
        mac_ratios: Multiply-adds of the full encoder over those of the reduced, at least;
            in place of ``keeps``.
        place: Where the steps stand; ``between`` if None.
        fuse_last: Blocks at the end that run on the full grid again.
        alpha: Share of its offset from its stand-in that a removed patch gets back.
        num_probes: Probes an image of methods that back-propagate.
        seed: Source of all random choices of a method.
        head: File of a learned head, or folder of heads, for methods that have one; those
            of the package if empty.
    """

    depths: Sequence[int] | None = None
    keeps: Sequence[Ratio] | None = None
    mac_ratios: Sequence[Ratio] | None = None
    place: Place | None = None
    fuse_last: int = 1
    alpha: float = 1.0
    num_probes: int = 48
    seed: int = 0
    head: str = ""

    def __post_init__(self) -> None:
        """Refuse two kinds of budget at once, empty lists, and no probes.

        Raises:
            ValueError: If that is asked for.
        """
        if self.keeps is not None and self.mac_ratios is not None:
            raise ValueError(
                "keep and mac_ratio cannot both be given; got "
                f"{list(self.keeps)} and {list(self.mac_ratios)}."
            )
        for name, values in (("depths", self.depths), ("keep", self.keeps)):
            if values is not None and not len(values):
                raise ValueError(f"{name} must have at least one number; got none.")
        if self.num_probes < 1:
            raise ValueError(f"num_probes must be at least 1; got {self.num_probes}.")


@dataclass(frozen=True)
class Budget:
    """What all methods share."""

    schedule: Schedule
    keep: float
    target: float | None
    place: Place
    fuse_last: int
    alpha: float


def find_budgets(
    model: Model, layout: Layout, task: str, plans: Sequence[Plan], terms: Terms
) -> list[Budget]:
    """What every named method has to do: as asked for, else as the plans do.

    Args:
        model: The model.
        layout: Geometry of its unreduced sequence.
        task: Name of one of its tasks.
        plans: Plans to go by if the terms name no depths.
        terms: What is asked for.

    Returns:
        Budgets, in the order asked for.

    Raises:
        ValueError: If one is out of reach, or there are neither depths nor plans.
    """
    if terms.depths is None:
        return _budgets_of_plans(plans, layout.num_patches, terms)
    depths, place = terms.depths, terms.place or "between"
    restore = restore_depth(model, task, terms.fuse_last)
    n = layout.num_patches
    asked: list[tuple[dict[int, int], float | None, Ratio | None]]
    if terms.mac_ratios is None:
        asked = [
            (ratio_schedule(n, depths, keep), float(keep), None)
            for keep in (DEFAULT_KEEPS if terms.keeps is None else terms.keeps)
        ]
    else:
        asked = [
            (macs_schedule(model.backbone, layout, depths, r, place, restore), None, r)
            for r in terms.mac_ratios
        ]
    budgets = []
    for counts, keep, target in asked:
        schedule = tuple(counts.items())
        share = last_share(schedule, n) if keep is None else keep
        ratio = None if target is None else float(target)
        budgets.append(Budget(schedule, share, ratio, place, terms.fuse_last, terms.alpha))
    return budgets


def _budgets_of_plans(
    plans: Sequence[Plan], num_patches: int, terms: Terms
) -> list[Budget]:
    if not plans or terms.keeps is not None or terms.mac_ratios is not None:
        raise ValueError(
            "depths must be given for methods by name, unless plans say all; got none."
        )
    found = [
        Budget(p.schedule, last_share(p.schedule, num_patches), None, *shared)
        for p in plans
        for shared in [(terms.place or p.place, p.fuse_last, p.alpha)]
    ]
    return list(dict.fromkeys(found))


def last_share(schedule: Schedule, num_patches: int) -> float:
    """Share of the original patches after the last step; 1 without steps."""
    return (schedule[-1][1] if schedule else num_patches) / num_patches
