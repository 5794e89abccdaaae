"""The rows of tap.py: what removes patches in each, and how it is trained."""

from dataclasses import replace

from foveate.adaptive.allocation import split_evenly
from foveate.adaptive.checkpoint import open_controller
from foveate.adaptive.controller import Pruning
from foveate.reduction.presets import plan_for
from foveate.training.loop import Recipe
from foveate.training.pruned import TapCourse

STATIC = {
    "evit": {},
    "tome": {},
    "random": {},
    "coverage": {},
    "diffrate": {},
    "cropr": {"fuse_last": 1},
    "foveate-oracle": {"options": {"num_probes": 16}},
}
LEARNED = {
    "register": {},
    "register-merge": {"action": "merge"},
    "redundancy": {"redundancy": True},
    "redundancy-merge": {"redundancy": True, "action": "merge"},
    "register-merge-fuse": {"action": "merge", "fuse_last": 1},
    "register-fuse": {"fuse_last": 1},
    "redundancy-static": {"redundancy": True, "allocation": "static"},
    "redundancy-merge-static": {
        "redundancy": True,
        "action": "merge",
        "allocation": "static",
    },
    "redundancy-stand-ins": {"redundancy": True, "stand_ins": 4},
    "one-way": {"one_way": True},
    "static-allocation": {"allocation": "static"},
    "alpha-0": {"recovery": 0.0},
    "alpha-1": {"recovery": 1.0},
    "class-token": {"selection": "class"},
    "class-token-static": {"selection": "class", "allocation": "static"},
}
UNTRAINED = ("foveate-oracle",)
WHOLE = ("teacher", "unpruned")


def course_of(row: str, task: str, model, options) -> TapCourse:
    """What a row trains."""
    recipe = Recipe(
        options.steps,
        options.batch_size,
        options.learning_rate,
        seed=options.seed,
        validate_every=max(1, options.steps // 6),
        weight_decay=0.05,
    )
    course = TapCourse(
        options.form,
        task,
        recipe,
        backbone_rate=options.backbone_rate,
        rank=options.rank,
        distill=0.0 if row == "teacher" else options.distill,
    )
    if row in WHOLE:
        return course
    depths = tuple(int(d) for d in options.depths.split(","))
    high, wide = model.backbone.patch_size
    patches = (model.transform.size // high) * (model.transform.size // wide)
    remove = patches - round(patches * options.keep)
    row, plus, other = row.partition("+")
    if plus:
        known = f"{options.form}-{other}-{row}-{options.seed}"
        held = open_controller(options.out / "networks" / known)
        return replace(course, pruning=held.pruning, controller=held)
    if row in LEARNED:
        even = LEARNED[row].get("allocation") == "static"
        least = () if even else (remove // 4,) * (len(depths) - 1) + (0,)
        pruning = Pruning(depths, remove, least, **LEARNED[row])
        return replace(course, pruning=pruning)
    left, counts = patches, {}
    for depth, count in zip(
        depths, split_evenly(Pruning(depths, remove).limits), strict=True
    ):
        left -= count
        counts[depth] = left
    side = model.transform.size
    grid = (side // high, side // wide)
    settings = {"alpha": options.alpha, **STATIC[row]}
    return replace(course, plan=plan_for(model, row, task, grid, counts, **settings))
