"""Train pruned models under one recipe, and hold each against the unpruned one.

    python benchmarks/tap.py --data DATA --model out/heads --form tap-f \
        --tasks classification --rows teacher,unpruned,register --distill 1 --out out/tap

A row named after another, as register@images, scores that one's network with counts that
differ between the images of a batch and sum to as many. A row such as redundancy+detection
uses the controller of that row's network of another task, as it is.

Every row starts from the same heads, sees the same views in the same order for the same
number of steps, and removes as many patches; rows differ in what removes them, and those
that learn no counts remove as many at each depth. The row
teacher learns from labels alone, and removes nothing; with --distill every other row learns
from its outputs as well. Networks are kept in OUT, the record is written after every row,
and a row in it is not trained again.
"""

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch

import foveate as fv
from foveate.adaptive.allocation import split_evenly
from foveate.adaptive.checkpoint import open_controller, open_pruned, save_pruned
from foveate.adaptive.controller import Pruning
from foveate.cli.train import pruned_record
from foveate.evaluation.evaluate import collect, open_trial
from foveate.evaluation.metrics import paired_intervals
from foveate.evaluation.pruned import pruned_macs, time_pruned
from foveate.models.checkpoint import HeadSpec, read_checkpoint
from foveate.reduction.presets import plan_for
from foveate.reduction.reduced_vit import reduce
from foveate.training.config import Source
from foveate.training.loop import Recipe
from foveate.training.pruned import TapCourse, train_pruned
from foveate.training.views import Views

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


class ByImage(torch.nn.Module):
    """A pruned model whose images share the budget of their batch, padded."""

    def __init__(self, vit) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images):
        """Raw output."""
        return self.vit(images, "padded")


class Remembered(torch.nn.Module):
    """A teacher asked once about each image; every row sees the same."""

    def __init__(self, network) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)
        self.known = {}

    def forward(self, images):
        """Raw output."""
        keys = [hashlib.sha256(image.numpy().tobytes()).digest() for image in images]
        new = [i for i, key in enumerate(keys) if key not in self.known]
        if new:
            for i, raw in zip(new, self.network(images[new]), strict=True):
                self.known[keys[i]] = raw.half()
        return torch.stack([self.known[key] for key in keys]).float()


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


def _scenes(data: Path, part: str, num: int, seed: int) -> Source:
    cutouts, photos = (str(data / kind / part) for kind in ("cutouts", "photos"))
    return Source(cutouts=cutouts, photos=photos, num=num, seed=seed)


def trained(model, course, views, folder, spec, teacher):
    """The network of a row, and what is known of its training."""
    if course.plan is not None and course.plan.method in UNTRAINED:
        return reduce(model, course.plan).eval(), {"steps": 0}
    found = train_pruned(model, course, views, teacher=teacher)
    save_pruned(folder, course.form, found.network, model, spec, course.rank)
    return found.network, pruned_record(found, course.form, course, len(views))


def kept(folder):
    """A network that has been trained, with other counts if its name asks for them."""
    row, at, rest = folder.name.partition("@")
    if not at:
        return open_pruned(folder)
    seed = rest.rpartition("-")[2]
    return ByImage(open_pruned(folder.with_name(f"{row}-{seed}"))).eval()


def clock_of(folder, views):
    """Time and memory against the unpruned model; nothing for that model itself."""
    clock = time_pruned(kept(folder), views[0].image.expand(8, -1, -1, -1))
    names = (
        "speedup",
        "mac_ratio",
        "overhead_share",
        "peak_memory_ratio",
        "images_per_second",
    )
    return {name: clock.record()[name] for name in names} if clock else {}


def main() -> None:
    """Train, score, and write the record after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--form", default="tap-f")
    parser.add_argument("--tasks", default="classification,segmentation")
    parser.add_argument("--rows", default=",".join([*WHOLE, *LEARNED, *STATIC]))
    parser.add_argument("--depths", default="2,5,8")
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--val", type=int, default=500)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--backbone-rate", type=float, default=0.1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--distill", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", action="store_true", help="time kept networks, no more")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = fv.open_model(options.model)
    size = model.transform.size
    data = _scenes(options.data, "train", options.num, 0).open(size)
    val = _scenes(options.data, "val", options.val, 1).open(size)
    views = Views(data, model.transform)
    file = options.out / "tap.json"
    records = json.loads(file.read_text()) if file.exists() else {}
    for task in options.tasks.split(","):
        said = read_checkpoint(options.model)["tasks"][task]
        spec = HeadSpec(**{**said, "classes": tuple(said["classes"])})
        trial = open_trial(model, task, val)
        like = next(model.parameters())
        full = teacher = None
        for row in options.rows.split(","):
            key = f"{options.form}/{task}/{row}/{options.seed}"
            folder = options.out / "networks" / key.replace("/", "-")
            if options.clock:
                records[key]["clock"] = clock_of(folder, views)
                file.write_text(json.dumps(records, indent=1))
                continue
            if row != "teacher" and options.distill and teacher is None:
                known = folder.with_name(f"{options.form}-{task}-teacher-{options.seed}")
                teacher = Remembered(open_pruned(known))
            if key in records and row != "unpruned":
                continue
            record = records.get(key.split("@")[0] + f"/{options.seed}" * ("@" in key))
            if record is None:
                course = course_of(row, task, model, options)
                network, record = trained(model, course, views, folder, spec, teacher)
            else:
                network = kept(folder)
            found = collect([network], trial, val, 16, like)[0]
            full = found if row in WHOLE else full
            scores = paired_intervals(full, found, 0)
            sides = {k: {n: e.record() for n, e in v.items()} for k, v in scores.items()}
            inner = network.vit if isinstance(network, ByImage) else network
            whole, fewer = pruned_macs(inner, views[0].image[None])
            rest = {"num_val": len(val), "size": size, "mac_ratio": whole / fewer}
            records[key] = {**record, "scores": sides, **rest}
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(records, indent=1))
            print(key, record.get("seconds"), record.get("counts"), record.get("alpha"),
                  {k: round(100 * v["value"], 2) for k, v in sides["difference"].items()},
                  {k: round(100 * v["value"], 2) for k, v in sides["reduced"].items()},
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
