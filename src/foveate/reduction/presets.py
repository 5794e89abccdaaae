"""Every method is four choices: what it scores by, what it does, where it stands, what returns.

A preset is one line of the table at the end of this file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foveate.forward import Step
from foveate.models import Model
from foveate.reduction.agglomerate import Agglomerate
from foveate.reduction.matching import Action, Fuse, ManyToOne, PiToMe, Prune, bipartite
from foveate.reduction.plan import Plan
from foveate.reduction.recover import Restore
from foveate.reduction.regroup import NOTHING, Memory
from foveate.reduction.sketch import PulledProbes, Sensitivity
from foveate.reduction.spectral import LeadsOnly, PullbackPairs
from foveate.reduction.step import Reduce
from foveate.scoring import criteria


@dataclass(frozen=True)
class Setting:
    """What an action of a preset is built from.

    Attributes:
        model: The model.
        plan: The plan.
        depth: Block of the step.
        before: Patches before the step.
        keep: Patches after it.
        options: The preset's options, with the plan's own on top.
    """

    model: Model
    plan: Plan
    depth: int
    before: int
    keep: int
    options: Mapping[str, Any]

    @property
    def needs_grid(self) -> bool:
        """Whether the task reads patches, so that removed ones need a stand-in."""
        return self.model.task(self.plan.task).needs_grid

    def probes(self) -> PulledProbes:
        """Pulled probes for the plan's task."""
        task = self.model.task(self.plan.task)
        settings = (self.options["num_probes"], self.options["seed"])
        return PulledProbes(self.model.backbone, task, self.plan.place, *settings)


@dataclass(frozen=True)
class Preset:
    """One method.

    Attributes:
        action: Builds the action of one step.
        proportional: Whether attention weighs merged patches by their size.
        freeze: Whether a removed patch comes back with the feature it had.
        options: Defaults of what a plan may set.
    """

    action: Callable[[Setting], Action]
    proportional: bool = False
    freeze: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def plan_for(
    model: Model,
    method: str,
    task: str,
    grid: tuple[int, int],
    counts: Mapping[int, int],
    **settings: Any,  # noqa: ANN401 - fields of a plan
) -> Plan:
    """Plan of a method, checked against the model.

    Args:
        model: The model.
        method: Name of a preset.
        task: Name of a task of the model.
        grid: Patch grid of the images.
        counts: Patches left after the step at each depth.
        **settings: Further fields of :class:`~foveate.reduction.plan.Plan`.

    Returns:
        The plan.

    Raises:
        ValueError: If the model has no such task or block, or there is no such method or
            option.
    """
    plan = Plan(method, task, grid, tuple(sorted(counts.items())), **settings)
    build_steps(model, plan)
    return plan


def build_steps(model: Model, plan: Plan) -> dict[int, list[Step]]:
    """Steps of a plan, for :func:`foveate.forward.run`.

    Args:
        model: The model.
        plan: The plan.

    Returns:
        Steps by depth.

    Raises:
        ValueError: As :func:`plan_for`.
    """
    preset = find_preset(plan.method)
    unknown = sorted(plan.options.keys() - preset.options.keys())
    if unknown:
        raise ValueError(
            f"options of '{plan.method}' must be among {sorted(preset.options)}; got {unknown}."
        )
    needs_grid = model.task(plan.task).needs_grid
    restore = model.backbone.num_blocks - plan.fuse_last if needs_grid else None
    check_depths(plan, model.backbone.num_blocks, restore)
    memory = Memory(plan.alpha, preset.freeze) if needs_grid else NOTHING
    steps: dict[int, list[Step]] = {}
    before = plan.num_patches
    for depth, keep in plan.schedule:
        options = {**preset.options, **plan.options}
        if keep < before:
            action = preset.action(Setting(model, plan, depth, before, keep, options))
            step = Reduce(action, keep, plan.place, preset.proportional, memory)
            steps[depth] = [step]
        before = keep
    if restore is not None and plan.fuse_last and steps:
        steps.setdefault(restore, []).append(Restore())
    return steps


def find_preset(method: str) -> Preset:
    """Look a method up by name.

    Args:
        method: Its name.

    Returns:
        The preset.

    Raises:
        ValueError: If there is none; the message lists them.
    """
    if method not in PRESETS:
        raise ValueError(f"method must be one of {', '.join(PRESETS)}; got '{method}'.")
    return PRESETS[method]


def check_depths(plan: Plan, num_blocks: int, restore: int | None) -> None:
    """Refuse steps that the backbone has no block for, or that stand after the grid is full.

    Args:
        plan: The plan.
        num_blocks: Blocks of the backbone.
        restore: First block on the full grid again; None if the task does not read it.

    Raises:
        ValueError: If a depth is out of range.
    """
    if not 0 <= plan.fuse_last <= num_blocks:
        raise ValueError(f"fuse_last must be from 0 to {num_blocks}; got {plan.fuse_last}.")
    deepest = num_blocks if restore is None else restore
    for depth, _ in plan.schedule:
        if not 0 <= depth < deepest:
            raise ValueError(
                f"depths must be from 0 to {deepest - 1} for task '{plan.task}' with the last "
                f"{num_blocks - deepest} blocks on the full grid; got {depth}."
            )


def _prune(score: Callable[[Setting], Any]) -> Callable[[Setting], Action]:
    return lambda s: Prune(score(s), stand_in=s.needs_grid)


def _rounds(s: Setting) -> int:
    return int(s.options["rounds"])


_SEED = {"seed": 0}
_PROBES = {"num_probes": 48, "seed": 0}

PRESETS: dict[str, Preset] = {
    "random": Preset(_prune(lambda s: criteria.Random(s.options["seed"])), options=_SEED),
    "norm": Preset(_prune(lambda s: criteria.feature_norm)),
    "coverage": Preset(_prune(lambda s: criteria.coverage)),
    "attention": Preset(_prune(lambda s: criteria.class_attention)),
    "received": Preset(_prune(lambda s: criteria.received_attention)),
    "redundancy": Preset(_prune(lambda s: criteria.key_redundancy)),
    "evit": Preset(lambda s: Fuse(criteria.class_attention)),
    "tome": Preset(lambda s: bipartite, proportional=True),
    "tome-plain": Preset(lambda s: bipartite),
    "pitome": Preset(
        lambda s: PiToMe(s.options["margin"]), proportional=True, options={"margin": 0.9}
    ),
    "agglomerate": Preset(
        lambda s: Agglomerate(s.before, s.keep, _rounds(s), None, s.options["seed"]),
        proportional=True,
        options={"rounds": 8, "seed": 0},
    ),
    "sensitivity": Preset(
        lambda s: ManyToOne(Sensitivity(s.probes())), proportional=True, options=_PROBES
    ),
    "freeze": Preset(
        lambda s: Prune(Sensitivity(s.probes())), freeze=True, options=_PROBES
    ),
    "freeze-random": Preset(
        lambda s: Prune(criteria.Random(s.options["seed"])), freeze=True, options=_SEED
    ),
    "freeze-tome": Preset(lambda s: LeadsOnly(bipartite), freeze=True),
    "pullback": Preset(
        lambda s: PullbackPairs(s.probes(), s.options["mean"], s.options["cost"]),
        proportional=True,
        options={"mean": "importance", "cost": "merge", **_PROBES},
    ),
    "foveate-oracle": Preset(
        lambda s: Agglomerate(s.before, s.keep, _rounds(s), s.probes(), s.options["seed"]),
        proportional=True,
        options={"rounds": 8, **_PROBES},
    ),
}
