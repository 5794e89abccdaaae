"""Train pruned models under one recipe, and hold each against the unpruned one.

    python benchmarks/tap.py --data DATA --model out/heads --form tap-f \
        --tasks classification --rows teacher,unpruned,register --distill 1 --out out/tap

A row named after another, as register@images, scores that one's network with counts that
differ between the images of a batch and sum to as many. A row such as redundancy+detection
uses the controller of that row's network of another task, as it is.

Every row starts from the same heads, sees the same views in the same order for the same
number of steps, and removes as many patches; rows differ in what removes them, and those
that learn no counts remove as many at each depth. The row teacher learns from labels alone,
and removes nothing; with --distill every other row learns from its outputs as well.
Networks are kept in OUT, the record is written after every row, and a row in it is not
trained again; --rescore scores it again, on more scenes say.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch

import foveate as fv
from foveate.adaptive.checkpoint import open_pruned, save_pruned
from foveate.cli.train import pruned_record
from foveate.evaluation.evaluate import collect, open_trial
from foveate.evaluation.metrics import paired_intervals
from foveate.evaluation.pruned import pruned_macs, time_pruned
from foveate.models.checkpoint import HeadSpec, read_checkpoint
from foveate.reduction.reduced_vit import reduce
from foveate.report.records import write_record
from foveate.training.config import Source
from foveate.training.pruned import train_pruned
from foveate.training.views import Views
from tap_rows import LEARNED, STATIC, UNTRAINED, WHOLE, course_of

SAME = ("num", "keep", "depths", "steps", "batch_size", "learning_rate", "distill")


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
    return {name: clock.record()[name] for name in names} if clock else None


def scores_of(full, found) -> dict:
    """A row's scores, and their differences from the unpruned row once there is one."""
    sides = paired_intervals(full or found, found, 0)
    return {
        side: {name: each.record() for name, each in scores.items()}
        for side, scores in sides.items()
        if full or side == "reduced"
    }


def ratio_of(network, image) -> float | None:
    """Multiply-adds of the unpruned model over the network's; None if it is by batch."""
    if isinstance(network, ByImage):
        return None
    whole, fewer = pruned_macs(network, image)
    return whole / fewer


class Bench:
    """Rows under one recipe, and their record."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = fv.open_model(options.model)
        self.size = self.model.transform.size
        data = _scenes(options.data, "train", options.num, 0).open(self.size)
        self.val = _scenes(options.data, "val", options.val, 1).open(self.size)
        self.views = Views(data, self.model.transform)
        self.file = options.out / "tap.json"
        found = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.records: dict[str, dict] = found
        self.settings = {name: getattr(options, name) for name in SAME}
        if any(record["settings"] != self.settings for record in found.values()):
            raise SystemExit(f"--out must be new or of the same settings; got {self.file}.")
        options.out.mkdir(parents=True, exist_ok=True)

    def key(self, task: str, row: str) -> str:
        """Name of a row in the record."""
        return f"{self.options.form}/{task}/{row}/{self.options.seed}"

    def folder(self, task: str, row: str) -> Path:
        """Where a row's network is kept."""
        return self.options.out / "networks" / self.key(task, row).replace("/", "-")

    def time(self, task: str, row: str) -> None:
        """Time a network that is kept; its frozen counts, that is."""
        if "@" not in row and row not in UNTRAINED:
            clock = clock_of(self.folder(task, row), self.views)
            self.records[self.key(task, row)]["clock"] = clock
            write_record(self.file, self.records)

    def rows(self, task: str) -> None:
        """Train and score rows; the unpruned one is scored whenever others are."""
        said = read_checkpoint(self.options.model)["tasks"][task]
        spec = HeadSpec(**{**said, "classes": tuple(said["classes"])})
        trial = open_trial(self.model, task, self.val)
        full = teacher = None
        for row in self.options.rows.split(","):
            if full is None and row not in WHOLE:
                raise SystemExit("--rows must have unpruned before what is pruned.")
            known = self.key(task, row) in self.records and not self.options.rescore
            if known and row != "unpruned":
                continue
            if row != "teacher" and self.options.distill and teacher is None:
                teacher = Remembered(open_pruned(self.folder(task, "teacher")))
            network, record = self.network(task, row, spec, teacher)
            like = next(self.model.parameters())
            found = collect([network], trial, self.val, 16, like)[0]
            full = found if row == "unpruned" else full
            self.records[self.key(task, row)] = {
                "clock": None,
                **record,
                "scores": scores_of(full, found),
                "mac_ratio": ratio_of(network, self.views[0].image[None]),
                "num_val": len(self.val),
                "size": self.size,
                "settings": self.settings,
            }
            write_record(self.file, self.records)
            print(task, row, json.dumps(scores_of(full, found)), flush=True)

    def network(self, task: str, row: str, spec: HeadSpec, teacher):
        """The network of a row, kept or trained now, and what is known of its training."""
        record = self.records.get(self.key(task, row.partition("@")[0]))
        if record is not None:
            known = {k: v for k, v in record.items() if k != "clock" or "@" not in row}
            return kept(self.folder(task, row)), known
        course = course_of(row, task, self.model, self.options)
        folder = self.folder(task, row)
        return trained(self.model, course, self.views, folder, spec, teacher)


def arguments() -> argparse.Namespace:
    """Read the command line."""
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
    parser.add_argument("--rescore", action="store_true", help="score kept networks again")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Train, score, and write the record after each row; or time what is kept."""
    options = arguments()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    for task in options.tasks.split(","):
        if options.clock:
            for row in options.rows.split(","):
                bench.time(task, row)
        else:
            bench.rows(task)


if __name__ == "__main__":
    main()
