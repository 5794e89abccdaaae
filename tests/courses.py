"""Short trainings of pruned models on a few scenes."""

import torch

from foveate.adaptive.controller import Pruning
from foveate.models.checkpoint import HeadSpec
from foveate.training.loop import Recipe
from foveate.training.pruned import TapCourse
from tests import labelled

FORMS = ("tap-j", "tap-f")
TASKS = ("label", "mask", "objects")
PRUNING = Pruning((0, 1), 32, least=(8, 0))
GRID = (8, 8)


def course(form="tap-f", task="label", pruning=PRUNING, steps=6, **changes):
    recipe = Recipe(steps, 3, 5e-3, validate_every=2)
    return TapCourse(form, task, recipe, pruning, rank=2, calibrate=4, **changes)


def spec(task):
    kind, num, settings = labelled.HEADS[task]
    return HeadSpec(kind, tuple(str(i) for i in range(num)), settings)


def images(num=3, seed=1):
    return torch.randn(num, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
