"""The command ``compare``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foveate.cli.inputs import load_pictures, open_model
from foveate.cli.options import Common, Images, Reduction, between_commas

if TYPE_CHECKING:
    from foveate.data.folder import LoadedImages
    from foveate.models import Model
    from foveate.reduction.plan import Plan

Methods = Annotated[
    str | None, Option(help="Names, as tome,evit; all if there is no plan.")
]
Plans = Annotated[list[Path] | None, Option(help="Plan to run as it is; may be repeated.")]


def compare(
    common: Common,
    reduction: Reduction,
    images: Images,
    methods: Methods = None,
    plan: Plans = None,
) -> None:
    """Run methods on the same pictures, and measure how far each moves the output."""
    from foveate.data.folder import find_images
    from foveate.evaluation.schedule import DEFAULT_METHODS
    from foveate.reduction.plan import Plan
    from foveate.report.records import check_directory

    check_directory(common.out)
    plans = [Plan.load(file) for file in plan or ()]
    names = between_commas("methods", methods, str)
    wanted = [*plans, *(names or (() if plans else DEFAULT_METHODS))]
    terms = reduction.terms(common.seed)
    files = find_images(images)
    model = open_model(common)
    write_comparison(common, model, load_pictures(files, model), wanted, **terms)


def write_comparison(
    common: Common,
    model: "Model",
    loaded: "LoadedImages",
    methods: "Sequence[str | Plan]",
    **terms: Any,  # noqa: ANN401 - passed on to the library
) -> None:
    """Compare, print the table and write ``compare.json``.

    Args:
        common: Options.
        model: The model.
        loaded: Pictures.
        methods: Names of presets, and plans.
        **terms: How those by name are run.
    """
    from foveate.evaluation.compare import compare as run
    from foveate.report import terminal
    from foveate.report.compare import print_comparison
    from foveate.report.records import write_record

    with terminal.progress_bar("compare") as progress:
        settings = (common.task, common.batch_size, progress)
        found = run(model, methods, loaded.images, *settings, **terms)
    record = found.record([str(file) for file in loaded.files])
    record["skipped_files"] = [
        {"file": str(s.file), "reason": s.reason} for s in loaded.skipped
    ]
    file = write_record(common.out / "compare.json", record)
    print_comparison(record)
    terminal.print_skipped(loaded.skipped, len(loaded.files) + len(loaded.skipped))
    terminal.print_text(f"Wrote {file}")
