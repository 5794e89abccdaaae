"""Labelled scenes of coloured blocks, and a tiny model with a head for each kind of task.

Images are 32 x 32 pixels, 8 x 8 patches of 4 pixels; everything is drawn in memory.
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from foveate.data.composites import Composites, Ranges
from foveate.data.cutouts import Cutout, Cutouts
from foveate.data.folder import ImageTransform
from foveate.data.labelled import LabelledImages, label_composites
from foveate.models import Model
from foveate.tasks.heads import build_head
from tests import tiny

SIDE = 32
COLOURS = {"cup": (250, 40, 40), "key": (40, 250, 40), "leaf": (40, 40, 250)}
CLASSES = tuple(COLOURS)
STILL = Ranges(objects=(1, 2), scale=(0.3, 0.6), gamma=(1.0, 1.0), gain=(1.0, 1.0))


def block(colour, size=(16, 20)) -> Image.Image:
    """An opaque block of one colour."""
    return Image.new("RGBA", size, (*colour, 255))


def composites(num: int, side: int = SIDE, seed: int = 0) -> Composites:
    """Blocks of three classes on grey noise."""
    noise = np.random.default_rng(5).integers(90, 160, (40, 56, 1), dtype=np.uint8)
    photograph = Image.fromarray(noise.repeat(3, axis=2))
    objects = tuple((Cutout(block(c), Path(name)),) for name, c in COLOURS.items())
    return Composites(Cutouts(CLASSES, objects), [photograph], num, side, seed, STILL)


def scenes(num: int, side: int = SIDE, seed: int = 0) -> LabelledImages:
    """The same as examples."""
    return label_composites(composites(num, side, seed))


def write_cutouts(folder: Path) -> tuple[Path, Path]:
    """Cut-outs and a photograph on disk; their folders."""
    for name, colour in COLOURS.items():
        (folder / "cutouts" / name).mkdir(parents=True)
        block(colour).save(folder / "cutouts" / name / "a.png")
    (folder / "photos").mkdir()
    Image.new("RGB", (60, 40), (120, 120, 120)).save(folder / "photos" / "a.png")
    return folder / "cutouts", folder / "photos"


def bare_model(side: int = SIDE) -> Model:
    """The tiny DINOv2 with its class token as only task."""
    from foveate.backbones import open_backbone
    from foveate.tasks.embedding import ClassToken

    backbone = open_backbone(tiny.hf_dinov2())
    model = Model("tiny", backbone, {"cls": ClassToken()}, ImageTransform(side))
    return model.eval()


HEADS = {
    "label": ("classification", 3, {}),
    "mean": ("classification", 3, {"pool": "class+patches"}),
    "mask": ("segmentation", 4, {"head": "linear", "depths": [1, 3]}),
    "objects": (
        "detection",
        3,
        {"width": 32, "hidden": 32, "proposals": 20, "with_masks": True},
    ),
}


def model_with_heads(side: int = SIDE) -> Model:
    """The tiny DINOv2 with random heads; the detector is as torch initialises it."""
    from foveate.models.checkpoint import add_heads

    model, heads = bare_model(side), {}
    for name, (kind, num_classes, settings) in HEADS.items():
        torch.manual_seed(3)
        head = build_head(kind, tiny.WIDTH, num_classes, settings)
        heads[name] = head if kind == "detection" else tiny.randomise(head)
    return add_heads(model, heads).eval().requires_grad_(False)


@cache
def taught_model() -> Model:
    """The same, its heads taught on twelve scenes: it gets some right and some wrong."""
    from foveate.training.heads import HeadCourse, train_heads, with_heads
    from foveate.training.loop import Recipe
    from foveate.training.views import Views

    model, data = bare_model(), scenes(12)
    steps = {"classification": 60, "segmentation": 60, "detection": 60}
    courses = {
        name: HeadCourse(
            kind, settings, Recipe(steps[kind], 4, 5e-3, validate_every=steps[kind])
        )
        for name, (kind, _, settings) in HEADS.items()
    }
    found = train_heads(model, data, courses, Views(data, model.transform))
    return with_heads(model, found).eval().requires_grad_(False)
