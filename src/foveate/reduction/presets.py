"""A method is a few choices: score, action, attention, and what comes back of a patch.

A preset is an entry of the table at the end of this file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foveate.forward import Step
from foveate.models import Model
from foveate.reduction.agglomerate import Agglomerate, Sketch
from foveate.reduction.matching import (
    Action,
    Fuse,
    ManyToOne,
    PiToMe,
    Prune,
    bipartite,
    check_pairwise,
)
from foveate.reduction.plan import Plan, check_depths, check_options
from foveate.reduction.predicted import (
    LearnedImportance,
    PredictedFactors,
    PredictedModes,
)
from foveate.reduction.rates import DiffRate, prune_count
from foveate.reduction.recover import Restore
from foveate.reduction.regroup import NOTHING, Memory
from foveate.reduction.resolution import RESOLUTION, refuse_steps, resolution_plan
from foveate.reduction.sketch import PulledProbes, Sensitivity
from foveate.reduction.spectral import LeadsOnly, PullbackPairs
from foveate.reduction.step import Reduce
from foveate.scoring import Score, criteria
from foveate.scoring.cropr import Cropr, load_queries
from foveate.scoring.heads import Head, Kind, find_head


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
        num_probes, seed = self.options["num_probes"], self.options["seed"]
        return PulledProbes(task, self.plan.place, num_probes, seed)

    def head(self, kind: Kind) -> Head:
        """Learned head for the plan's task at this depth, on the model's device."""
        source, task = self.options["head"], self.plan.task
        head = find_head(source, self.model.name, task, self.depth, kind)
        device = next(self.model.parameters()).device
        return replace(head, network=head.network.to(device))


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
            option, or the method cannot reach the counts.
    """
    plan = Plan(method, task, grid, tuple(sorted(counts.items())), **settings)
    if method == RESOLUTION:
        return resolution_plan(model, plan)
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
    preset, task = find_preset(plan.method), model.task(plan.task)
    check_options(plan, preset.options)
    last = task.taps(model.backbone.num_blocks)[-1]
    full_from = last - plan.fuse_last if task.needs_grid else last
    check_depths(plan, last, full_from)
    memory = Memory(plan.alpha, preset.freeze) if task.needs_grid else NOTHING
    steps: dict[int, list[Step]] = {}
    before, options = plan.num_patches, {**preset.options, **plan.options}
    for depth, keep in plan.schedule:
        if keep < before:
            action = preset.action(Setting(model, plan, depth, before, keep, options))
            step = Reduce(action, keep, plan.place, preset.proportional, memory)
            steps[depth] = [step]
        before = keep
    if steps and full_from < last:
        steps[full_from] = [Restore()]
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


def _prune(score: Callable[[Setting], Score]) -> Callable[[Setting], Action]:
    return lambda s: Prune(score(s), stand_in=s.needs_grid)


def _class_attention(s: Setting) -> Score:
    if not s.model.backbone.has_class_token:
        raise ValueError(
            f"method '{s.plan.method}' must be given a model with a class token; got "
            f"{s.model.name} without one (method 'received' needs none)."
        )
    return criteria.class_attention


def _pairwise(action: Callable[[Setting], Action]) -> Callable[[Setting], Action]:
    """Let the plan be refused, and not the first image."""

    def build(s: Setting) -> Action:
        check_pairwise(s.before, s.keep)
        return action(s)

    return build


def _diffrate(s: Setting) -> Action:
    _class_attention(s)  # what patches are ranked by
    return DiffRate(prune_count(s.plan, s.depth, s.before, s.options), s.needs_grid)


def _cropr(s: Setting) -> Action:
    if file := s.options["queries"]:
        return Prune(Cropr(load_queries(file, s.depth)))
    _class_attention(s)  # the query is the class token's
    return Prune(Cropr())


def _agglomerate(sketch: Callable[[Setting], Sketch]) -> Callable[[Setting], Action]:
    """Pullback agglomeration with a sketch from anywhere."""
    return lambda s: Agglomerate(
        s.before,
        s.keep,
        s.options["rounds"],
        sketch(s),
        s.options["seed"],
        s.options["damping"],
        s.options["ridge"],
    )


_SEED = {"seed": 0}
_PROBES = {"num_probes": 48, "seed": 0}
_HEAD = {"head": ""}
_ROUNDS = {"rounds": 8, "damping": 0.3, "ridge": 1.0, "seed": 0}

PRESETS: dict[str, Preset] = {
    "random": Preset(_prune(lambda s: criteria.Random(s.options["seed"])), options=_SEED),
    "norm": Preset(_prune(lambda s: criteria.feature_norm)),
    "coverage": Preset(_prune(lambda s: criteria.coverage)),
    "attention": Preset(_prune(_class_attention)),
    "received": Preset(_prune(lambda s: criteria.received_attention)),
    "redundancy": Preset(_prune(lambda s: criteria.key_redundancy)),
    "norm-merge": Preset(lambda s: ManyToOne(criteria.feature_norm), proportional=True),
    "attention-merge": Preset(lambda s: ManyToOne(_class_attention(s)), proportional=True),
    "evit": Preset(lambda s: Fuse(_class_attention(s))),
    "tome": Preset(_pairwise(lambda s: bipartite), proportional=True),
    "tome-plain": Preset(_pairwise(lambda s: bipartite)),
    "pitome": Preset(
        _pairwise(lambda s: PiToMe(s.options["margin"])),
        proportional=True,
        options={"margin": 0.9},
    ),
    "agglomerate": Preset(
        lambda s: Agglomerate(
            s.before, s.keep, s.options["rounds"], None, s.options["seed"]
        ),
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
    "freeze-tome": Preset(_pairwise(lambda s: LeadsOnly(bipartite)), freeze=True),
    "pullback": Preset(
        _pairwise(
            lambda s: PullbackPairs(s.probes(), s.options["mean"], s.options["cost"])
        ),
        proportional=True,
        options={"mean": "importance", "cost": "merge", **_PROBES},
    ),
    "diffrate": Preset(
        _diffrate, proportional=True, options={"prune_share": 0.5, "keep_prune": None}
    ),
    "cropr": Preset(_cropr, freeze=True, options={"queries": ""}),
    RESOLUTION: Preset(refuse_steps),
    "importance": Preset(
        lambda s: ManyToOne(LearnedImportance(s.head("importance"), s.plan.place)),
        proportional=True,
        options=_HEAD,
    ),
    "spn": Preset(
        _agglomerate(lambda s: PredictedModes(s.head("metric"), s.plan.place)),
        proportional=True,
        options={**_ROUNDS, **_HEAD},
    ),
    "foveate": Preset(
        _agglomerate(lambda s: PredictedFactors(s.head("factors"), s.plan.place)),
        proportional=True,
        options={**_ROUNDS, **_HEAD},
    ),
    "foveate-oracle": Preset(
        _agglomerate(Setting.probes), proportional=True, options={**_ROUNDS, **_PROBES}
    ),
}
