"""The command ``distill``."""

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from foveate.cli.inputs import open_model
from foveate.cli.options import Common, Images

if TYPE_CHECKING:
    from foveate.training.distill import Distilled
    from foveate.training.loop import Training

Kind = Annotated[
    Literal["importance", "metric", "factors"],
    Argument(
        help="importance of patches; metric, a spectral pullback network; factors, what "
        "the method foveate merges by.",
        show_default=False,
    ),
]
Val = Annotated[Path, Option(help="Photographs to validate on.", show_default=False)]
Depth = Annotated[int, Option(help="Block whose tokens the head reads, from 0.")]
Save = Annotated[Path, Option(help="File for the head.", show_default=False)]
Source = Annotated[
    Literal["modes", "norms"],
    Option(help="Learn importance from leading modes, or from norms without JVPs."),
]
Crops = Annotated[int, Option(min=1, help="Random crops to learn from.")]
Rank = Annotated[int, Option(min=1, help="Modes of a metric or an importance.")]
Probes = Annotated[int, Option(min=1, help="Probes an image, for norms and factors.")]
Steps = Annotated[int, Option(min=1, help="Updates.")]
Rate = Annotated[float, Option(min=0, help="Peak of the learning rate.")]
Patience = Annotated[
    int | None, Option(min=1, help="Stop after so many validations without a better one.")
]
Cache = Annotated[Path | None, Option(help="Folder for targets; OUT/targets if not given.")]


def distill(  # noqa: PLR0913 - options of a command
    common: Common,
    kind: Kind,
    images: Images,
    val: Val,
    depth: Depth,
    save: Save,
    source: Source = "modes",
    crops: Crops = 500,
    rank: Rank = 20,
    probes: Probes = 8,
    steps: Steps = 1500,
    learning_rate: Rate = 2e-3,
    patience: Patience = None,
    cache: Cache = None,
) -> None:
    """Teach a small head what the model's Jacobian says, from unlabelled photographs."""
    from foveate.data.folder import find_images
    from foveate.report import terminal
    from foveate.report.records import check_directory, write_record
    from foveate.scoring.heads import save_head
    from foveate.training.distill import Course
    from foveate.training.distill import distill as run
    from foveate.training.loop import Recipe

    check_directory(common.out)
    _check_file(save)
    recipe = Recipe(
        steps, common.batch_size, learning_rate, seed=common.seed, patience=patience
    )
    course = Course(kind, common.task, depth, source, crops, rank, probes, recipe=recipe)
    train, held = find_images(images), _named("val", find_images, val)
    model = open_model(common)
    with terminal.progress_bar("targets") as progress:
        where = cache or common.out / "targets"
        found = run(model, course, train, held, where, progress, _print_state)
    save_head(found.head, save)
    record = write_record(common.out / "distill.json", make_record(found, len(held), save))
    _print(found, save)
    terminal.print_text(f"Wrote {record}")


def make_record(found: "Distilled", num_val: int, save: Path) -> dict[str, Any]:
    """What ``distill.json`` holds.

    Args:
        found: The taught head.
        num_val: Validation photographs.
        save: Where the head is.

    Returns:
        Finite numbers, texts and lists.
    """
    head, training = found.head, found.training
    course = head.provenance["course"]
    return {
        "model": head.model,
        "task": head.task,
        "depth": head.depth,
        "place": head.place,
        "kind": head.kind,
        "file": str(save),
        "num_parameters": sum(p.numel() for p in head.network.parameters()),
        "num_crops": course["num_crops"],
        "num_val": num_val,
        **{name: _estimate(values) for name, values in found.measures.items()},
        "per_image": {
            name: [value if isfinite(value) else None for value in values]
            for name, values in found.measures.items()
        },
        "steps": training.step,
        "best_step": training.best_step,
        "losses": training.losses,
        "scores": training.scores,
        "stopped": training.stopped,
        "seconds": sum(found.seconds.values()),
        "seconds_of": found.seconds,
    }


def _estimate(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard error over the images of which the measure is defined."""
    from foveate.evaluation.compare import mean_and_error

    defined = [value for value in values if isfinite(value)]
    return mean_and_error(defined) if defined else {"mean": None, "standard_error": None}


def _named(name: str, function: Callable[..., Any], path: Path) -> Any:  # noqa: ANN401
    """Let a refusal name the option it is about."""
    try:
        return function(path)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_file(save: Path) -> None:
    from foveate.report.records import check_directory

    _named("save", check_directory, save.parent)
    if save.is_dir():
        raise ValueError(f"save must be a file; got the folder '{save}'.")


def _print_state(now: "Training") -> None:
    from foveate.report import terminal

    terminal.print_text(
        f"step {now.step}: loss {now.losses[-1]:.4f}, validation {now.scores[-1]:.4f}"
    )


def _print(found: "Distilled", save: Path) -> None:
    from foveate.report import terminal
    from foveate.report.statistics import in_figures

    head = found.head
    title = f"{head.kind} of {head.model}, {head.task}, depth {head.depth}: {save}"
    rows = [
        (name, in_figures(_estimate(values))) for name, values in found.measures.items()
    ]
    terminal.print_table(title, ("on validation photographs", ""), rows)
