"""The commands under ``train``: heads, and task registers."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, Typer

from foveate.cli.inputs import find_device
from foveate.cli.options import Common, laid_flat
from foveate.cli.training_log import Log, is_main_process

if TYPE_CHECKING:
    from torch import device

    from foveate.models import Model
    from foveate.models.checkpoint import HeadSpec
    from foveate.training.loop import Training
    from foveate.training.pruned import Form, Pruned, TapCourse

Config = Annotated[Path, Option(help="What to train, as TOML.", show_default=False)]

train = Typer(name="train", help="Train on labelled pictures.", no_args_is_help=False)


@train.callback()
def _train() -> None:
    """Train on labelled pictures."""


def heads(common: Common, config: Config) -> None:
    """Train heads on a frozen model, as a checkpoint that --model takes."""
    from foveate.models.checkpoint import save_heads
    from foveate.report import terminal
    from foveate.report.records import check_directory, write_record
    from foveate.training.config import HeadsConfig, read_config
    from foveate.training.heads import train_heads, with_heads

    check_directory(common.out)
    wanted = read_config(config, HeadsConfig)
    courses = {
        name: replace(course, recipe=replace(course.recipe, seed=common.seed))
        for name, course in wanted.tasks.items()
    }
    model = _open(common, wanted.model, wanted.size)
    data = wanted.data.open(model.transform.size)
    val = wanted.val.open(model.transform.size) if wanted.val else None
    views = wanted.views(data, model.transform, common.seed)
    started = time.perf_counter()
    with terminal.progress_bar("features") as progress:
        state = common.out / "state"
        found = train_heads(model, data, courses, views, state, progress, _print_state)
    if not is_main_process():
        return
    trained = with_heads(model, found)
    save_heads(common.out, trained, {name: each.spec for name, each in found.items()})
    record: dict[str, Any] = {
        "kind": "heads",
        "model": wanted.model,
        "size": model.transform.size,
        "seed": common.seed,
        "num_views": len(views),
        "tasks": {
            name: {
                "kind": each.spec.kind,
                "num_classes": len(each.spec.classes),
                "num_parameters": _count(trained.tasks[name]),
                "steps": each.training.step,
                "losses": each.training.losses,
                "seconds": each.seconds,
                "scores": None,
            }
            for name, each in found.items()
        },
        "seconds": time.perf_counter() - started,
        "num_val": len(val) if val else 0,
        "checkpoint": str(common.out),
    }
    if val is not None:
        from foveate.evaluation.evaluate import evaluate

        for name, row in record["tasks"].items():
            with terminal.progress_bar(name) as progress:
                scored = evaluate(
                    trained, val, name, None, common.batch_size, common.seed, progress
                )
            row["scores"] = scored.record()["scores"]["full"]
    file = write_record(common.out / "train.json", record)
    _print(record)
    terminal.print_text(f"Wrote {file}")


def _open(common: Common, name: str, size: int) -> "Model":
    from foveate.models import open_model

    if common.dtype != "float32":
        raise ValueError(
            f'dtype must be float32 in training; got {common.dtype}: precision = "bf16" of '
            "a recipe computes in bfloat16."
        )
    return open_model(name, size or None).to(_device(common))


def _device(common: Common) -> "device":
    """Where to train: of several processes, each has an accelerator of its own."""
    import torch
    from accelerate import PartialState

    asked = find_device(common.device)
    if asked.type == "cpu":
        return asked
    if PartialState().num_processes > 1:
        return PartialState().device
    if asked.index is not None:
        torch.accelerator.set_device_index(asked.index)
    return asked


def _count(module: Any) -> int:  # noqa: ANN401 - a module
    return sum(p.numel() for p in module.parameters())


def _print_state(name: str, now: "Training") -> None:
    from foveate.report import terminal

    terminal.print_text(f"{name}, step {now.step}: loss {now.losses[-1]:.4f}")


def _print(record: Mapping[str, Any]) -> None:
    from foveate.report import terminal
    from foveate.report.scores import in_interval

    title = "{model}, {num_views} views, {num_val} pictures to score on".format_map(record)
    rows = []
    for name, task in record["tasks"].items():
        shown = [(name, str(task["num_parameters"]), "", "")]
        for score, estimate in (task["scores"] or {}).items():
            shown.append(("", "", score, in_interval(estimate)))
        rows += shown
    terminal.print_table(title, ("task", "parameters", "score", "95 % interval"), rows)


def tap_j(common: Common, config: Config) -> None:
    """Fine-tune a backbone for one task, pruned by its register."""
    _train_pruned(common, config, "tap-j")


def tap_f(common: Common, config: Config) -> None:
    """Train register, low-rank update and head of one task on a frozen backbone."""
    _train_pruned(common, config, "tap-f")


def _train_pruned(common: Common, config: Path, form: "Form") -> None:
    from foveate.adaptive.checkpoint import save_pruned
    from foveate.report import terminal
    from foveate.report.records import check_directory, write_record
    from foveate.training.config import TapConfig, read_config
    from foveate.training.digest import training_digest
    from foveate.training.pruned import train_pruned

    check_directory(common.out)
    wanted = read_config(config, TapConfig)
    base = _open(common, wanted.model, wanted.size)
    spec = _head_spec(Path(wanted.model), wanted.task)
    course = wanted.course(form, base, common.seed)
    data = wanted.data.open(base.transform.size)
    classes = data.classes_for(spec.kind)
    if classes != spec.classes:
        raise ValueError(
            f"data must have the {len(spec.classes)} classes of the head of "
            f"'{wanted.task}'; {data.name} has {len(classes)}, or others."
        )
    val = wanted.val.open(base.transform.size) if wanted.val else None
    views = wanted.views(data, base.transform, common.seed)
    log = Log(common.out / "train.jsonl", course.recipe.steps)
    digest = training_digest(base, views, course.record())
    state = common.out / "state" / f"{digest}.state"
    with terminal.progress_bar("train") as log.progress:
        found = train_pruned(base, course, views, state, log)
    if not is_main_process():
        return
    save_pruned(common.out, form, found.network, base, spec, course.rank)
    record = pruned_record(found, form, course, len(views))
    if val is not None:
        from foveate.evaluation.pruned import evaluate_pruned

        settings = (val, base, common.batch_size, common.seed)
        with terminal.progress_bar("evaluate") as progress:
            record |= evaluate_pruned(found.network, *settings, progress).record()
    file = write_record(
        common.out / "train.json", {**record, "checkpoint": str(common.out)}
    )
    _print_pruned(record)
    terminal.print_text(f"Wrote {file}")


def pruned_record(
    found: "Pruned", form: str, course: "TapCourse", num_views: int
) -> dict[str, Any]:
    """What ``train.json`` holds of a pruned model, beside its scores.

    Args:
        found: The trained model.
        form: ``tap-j`` or ``tap-f``.
        course: What was trained.
        num_views: Views it was trained on.

    Returns:
        Finite numbers, texts and lists.
    """
    from foveate.adaptive.task_vit import TaskViT

    network = found.network
    record: dict[str, Any] = {
        "kind": form,
        "task": course.task,
        "method": course.plan.method if course.plan else None,
        "num_views": num_views,
        "steps": found.training.step,
        "losses": found.training.losses,
        "seconds": found.seconds,
        "parameters": dict(found.parameters),
        "masked_difference": found.difference,
        "counts": None,
        "depths": None,
        "alpha": None,
    }
    if isinstance(network, TaskViT):
        record["depths"] = list(network.controller.pruning.depths)
        record["counts"] = network.controller.counts.tolist()
        record["alpha"] = found.alphas
    return record


def _head_spec(folder: Path, task: str) -> "HeadSpec":
    from foveate.models.checkpoint import HeadSpec, read_checkpoint

    said = read_checkpoint(folder, "heads")["tasks"]
    if task not in said:
        raise ValueError(
            f"task must be one that '{folder}' has a head for ({', '.join(said)}); got "
            f"'{task}'."
        )
    return HeadSpec(**{**said[task], "classes": tuple(said[task]["classes"])})


def _print_pruned(record: Mapping[str, Any]) -> None:
    from foveate.report import terminal
    from foveate.report.scores import print_evaluation

    parts = [(name, str(number)) for name, number in record["parameters"].items()]
    terminal.print_table(f"Trained for {record['task']}", ("part", "numbers"), parts)
    if record["counts"]:
        alphas = record["alpha"] or ["-"] * len(record["counts"])
        rows = [
            (str(depth), str(count), alpha if isinstance(alpha, str) else f"{alpha:.3f}")
            for depth, count, alpha in zip(
                record["depths"], record["counts"], alphas, strict=True
            )
        ]
        terminal.print_table("Removed", ("depth", "patches", "alpha"), rows)
    if "scores" in record:
        print_evaluation(record)


train.command()(laid_flat(heads))
train.command(name="tap-j")(laid_flat(tap_j))
train.command(name="tap-f")(laid_flat(tap_f))
