"""The commands under ``train``: heads, and task registers."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, Typer

from foveate.cli.inputs import find_device
from foveate.cli.options import Common, laid_flat

if TYPE_CHECKING:
    from foveate.models import Model
    from foveate.training.loop import Training

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
    import torch

    from foveate.models import open_model

    model = open_model(name, size or None)
    return model.to(find_device(common.device), getattr(torch, common.dtype))


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


train.command()(laid_flat(heads))
