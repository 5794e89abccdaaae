"""What to compare: methods by name on equal terms, and plans as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foveate.evaluation.terms import Budget, Terms, find_budgets, last_share
from foveate.models import Model
from foveate.reduction.plan import Plan
from foveate.reduction.presets import find_preset, plan_for
from foveate.tokens import Layout

__all__ = [
    "DEFAULT_METHODS",
    "Case",
    "Refusal",
    "check_plan",
    "make_cases",
    "plan_for_terms",
]

DEFAULT_METHODS = (  # all that the user has to learn nothing for
    "random",
    "resolution",
    "norm",
    "coverage",
    "evit",
    "tome",
    "tome-plain",
    "pitome",
    "agglomerate",
    "sensitivity",
    "pullback",
    "freeze",
    "foveate",
    "foveate-oracle",
)


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
class Refusal:
    """A method that cannot do what was asked.

    Attributes:
        method: Its name.
        keep: Share of the original patches it should have kept.
        reason: Why it cannot.
    """

    method: str
    keep: float
    reason: str


def make_cases(
    model: Model, layout: Layout, task: str, methods: Sequence[str | Plan], terms: Terms
) -> list[Case | Refusal]:
    """Plans of methods at the same budgets.

    Args:
        model: The model.
        layout: Geometry of its unreduced sequence.
        task: Name of one of its tasks.
        methods: Names of presets, and plans, which are taken as they are.
        terms: How the presets are run.

    Returns:
        For every name in turn all budgets, and every plan in its place. What a method
        cannot do, though others can, is a refusal.

    Raises:
        ValueError: If there is no method, one is unknown, a depth or budget is out of
            reach of all methods, no depths are given, or a plan is for something else.
    """
    if not methods:
        raise ValueError("methods must name at least one; got none.")
    plans = [m for m in methods if isinstance(m, Plan)]
    names = [m for m in methods if not isinstance(m, Plan)]
    for plan in plans:
        check_plan(plan, task, layout.grid)
    for name in names:
        find_preset(name)
    budgets = find_budgets(model, layout, task, plans, terms) if names else []
    for budget in budgets:  # what a random choice cannot do is wrong in the terms
        _case(model, layout, task, "random", budget, terms)
    found: list[Case | Refusal] = []
    for method in methods:
        if isinstance(method, Plan):
            found.append(Case(method, last_share(method.schedule, layout.num_patches)))
        else:
            found += [_attempt(model, layout, task, method, b, terms) for b in budgets]
    return found


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
    found = make_cases(model, layout, task, [method], Terms(**terms))
    if len(found) != 1:
        raise ValueError(f"keep must be one number here; got {[f.keep for f in found]}.")
    if isinstance(found[0], Refusal):
        raise ValueError(found[0].reason)
    return found[0].plan


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


def _attempt(
    model: Model, layout: Layout, task: str, method: str, budget: Budget, terms: Terms
) -> Case | Refusal:
    try:
        return _case(model, layout, task, method, budget, terms)
    except ValueError as error:
        return Refusal(method, budget.keep, str(error))


def _case(
    model: Model, layout: Layout, task: str, method: str, budget: Budget, terms: Terms
) -> Case:
    known = find_preset(method).options
    given = {"seed": terms.seed, "num_probes": terms.num_probes, "head": terms.head}
    options = {name: value for name, value in given.items() if name in known}
    settings = {"fuse_last": budget.fuse_last, "alpha": budget.alpha, "options": options}
    counts = dict(budget.schedule)
    plan = plan_for(
        model, method, task, layout.grid, counts, place=budget.place, **settings
    )
    return Case(plan, budget.keep, budget.target)
