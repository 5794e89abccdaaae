"""What to compare: methods by name on equal terms, and plans as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foveate.forward import Place
from foveate.models import Model
from foveate.reduction.budget import Ratio, macs_schedule, ratio_schedule
from foveate.reduction.macs import block_macs, token_counts
from foveate.reduction.plan import Plan, Schedule
from foveate.reduction.presets import find_preset, plan_for
from foveate.tokens import Layout

__all__ = [
    "DEFAULT_KEEPS",
    "DEFAULT_METHODS",
    "Case",
    "Terms",
    "back_propagates",
    "check_plan",
    "make_cases",
    "plan_for_terms",
    "plan_macs",
]

DEFAULT_METHODS = (
    "random",
    "norm",
    "coverage",
    "evit",
    "tome",
    "tome-plain",
    "pitome",
    "agglomerate",
    "sensitivity",
    "freeze",
    "foveate-oracle",
)
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
    """

    depths: Sequence[int] | None = None
    keeps: Sequence[Ratio] | None = None
    mac_ratios: Sequence[Ratio] | None = None
    place: Place | None = None
    fuse_last: int = 1
    alpha: float = 1.0
    num_probes: int = 48
    seed: int = 0

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
class Case:
    """One method at one budget.

    Attributes:
        plan: What is done.
        keep: Share of the original patches after the last step, as asked for or as it is.
        target: Ratio of multiply-adds that was asked for; None if none was.
    """

    plan: Plan
    keep: float
    target: float | None = None


@dataclass(frozen=True)
class _Budget:
    """What all methods share."""

    schedule: Schedule
    keep: float
    target: float | None
    place: Place
    fuse_last: int
    alpha: float


def make_cases(
    model: Model, layout: Layout, task: str, methods: Sequence[str | Plan], terms: Terms
) -> list[Case]:
    """Plans of methods at the same budgets.

    Args:
        model: The model.
        layout: Geometry of its unreduced sequence.
        task: Name of one of its tasks.
        methods: Names of presets, and plans, which are taken as they are.
        terms: How the presets are run.

    Returns:
        For every name in turn all budgets, and every plan in its place.

    Raises:
        ValueError: If there is no method, one is unknown, a depth or budget is out of
            reach, no depths are given, or a plan is for something else.
    """
    if not methods:
        raise ValueError("methods must name at least one; got none.")
    plans = [m for m in methods if isinstance(m, Plan)]
    names = [m for m in methods if not isinstance(m, Plan)]
    for plan in plans:
        check_plan(plan, task, layout.grid)
    for name in names:
        find_preset(name)
    budgets = _budgets(model, layout, task, plans, terms) if names else []
    cases: list[Case] = []
    for method in methods:
        if isinstance(method, Plan):
            cases.append(Case(method, _last_share(method.schedule, layout.num_patches)))
        else:
            cases += [_case(model, layout, task, method, b, terms) for b in budgets]
    return cases


def plan_for_terms(
    model: Model,
    images: Tensor,
    task: str,
    method: str,
    **terms: Any,  # noqa: ANN401 - fields of Terms
) -> Plan:
    """Plan of one method at one budget.

    Args:
        model: The model.
        images: ``(B, 3, H, W)``; the plan is for their size.
        task: Name of one of its tasks.
        method: Name of a preset.
        **terms: Fields of :class:`Terms`, with one number in ``keeps`` or ``mac_ratios``.

    Returns:
        The plan.

    Raises:
        ValueError: As :func:`make_cases`, or if there is not exactly one budget.
    """
    layout = model.backbone.embed(images[:1]).layout
    cases = make_cases(model, layout, task, [method], Terms(**terms))
    if len(cases) != 1:
        raise ValueError(f"keep must be one number here; got {[c.keep for c in cases]}.")
    return cases[0].plan


def check_plan(plan: Plan, task: str, grid: tuple[int, int]) -> None:
    """Refuse a plan for another task or another size of images.

    Args:
        plan: The plan.
        task: Name of the task it is used for.
        grid: Patch grid of the images.

    Raises:
        ValueError: If it does not fit.
    """
    if plan.task != task:
        raise ValueError(f"task must be the plan's '{plan.task}'; got '{task}'.")
    if plan.grid != grid:
        raise ValueError(f"images must have the plan's patch grid {plan.grid}; got {grid}.")


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
    restore = _restore_depth(model, plan.task, plan.fuse_last)
    full = token_counts(backbone.num_blocks, layout, {})
    reduced = token_counts(backbone.num_blocks, layout, plan.counts, plan.place, restore)

    def total(counts: list[tuple[int, int]]) -> int:
        return sum(block_macs(backbone, d, *pair) for d, pair in enumerate(counts[:stop]))

    return total(full), total(reduced)


def back_propagates(plan: Plan) -> bool:
    """Whether a plan's method asks the Jacobian at inference: an oracle, not a saving."""
    return "num_probes" in find_preset(plan.method).options


def _restore_depth(model: Model, task: str, fuse_last: int) -> int | None:
    if not model.task(task).needs_grid or not fuse_last:
        return None
    return model.backbone.num_blocks - fuse_last


def _last_share(schedule: Schedule, num_patches: int) -> float:
    return (schedule[-1][1] if schedule else num_patches) / num_patches


def _budgets(
    model: Model, layout: Layout, task: str, plans: Sequence[Plan], terms: Terms
) -> list[_Budget]:
    """What every named method has to do: as asked for, else as the plans do."""
    if terms.depths is None:
        return _budgets_of_plans(plans, layout.num_patches, terms)
    depths, place = terms.depths, terms.place or "between"
    restore = _restore_depth(model, task, terms.fuse_last)
    n = layout.num_patches
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
        share = _last_share(schedule, n) if keep is None else keep
        ratio = None if target is None else float(target)
        budgets.append(_Budget(schedule, share, ratio, place, terms.fuse_last, terms.alpha))
    return budgets


def _budgets_of_plans(
    plans: Sequence[Plan], num_patches: int, terms: Terms
) -> list[_Budget]:
    if not plans or terms.keeps is not None or terms.mac_ratios is not None:
        raise ValueError(
            "depths must be given for methods by name, unless plans say all; got none."
        )
    found = [
        _Budget(p.schedule, _last_share(p.schedule, num_patches), None, *shared)
        for p in plans
        for shared in [(terms.place or p.place, p.fuse_last, p.alpha)]
    ]
    return list(dict.fromkeys(found))


def _case(
    model: Model, layout: Layout, task: str, method: str, budget: _Budget, terms: Terms
) -> Case:
    known = find_preset(method).options
    given = {"seed": terms.seed, "num_probes": terms.num_probes}
    options = {name: value for name, value in given.items() if name in known}
    settings = {"fuse_last": budget.fuse_last, "alpha": budget.alpha, "options": options}
    counts = dict(budget.schedule)
    plan = plan_for(
        model, method, task, layout.grid, counts, place=budget.place, **settings
    )
    return Case(plan, budget.keep, budget.target)
