"""The command ``diagnose``."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from foveate.cli.inputs import load_pictures, open_model
from foveate.cli.options import Common, Images

if TYPE_CHECKING:
    from foveate.data.folder import LoadedImages
    from foveate.models import Model

Depth = Annotated[int, Option(help="Look at the tokens that enter this block, from 0.")]
Rank = Annotated[int, Option(min=1, help="Directions of the output to look for.")]
Probes = Annotated[int, Option(min=1, help="Random probes an image, if not exact.")]
Iterations = Annotated[int, Option(min=0, help="Power iterations, if not exact.")]
Exact = Annotated[
    Literal["auto", "always", "never"],
    Option(help="Form the whole Jacobian: if cheap, always, never."),
]


def diagnose(
    common: Common,
    images: Images,
    depth: Depth,
    rank: Rank = 20,
    probes: Probes = 100,
    iterations: Iterations = 2,
    exact: Exact = "auto",
) -> None:
    """Measure which tokens and directions a task depends on, on your own pictures."""
    from foveate.data.folder import find_images
    from foveate.report.records import check_directory

    check_directory(common.out)
    files = find_images(images)
    model = open_model(common)
    settings = {"rank": rank, "probes": probes, "iterations": iterations, "exact": exact}
    write_diagnosis(common, model, load_pictures(files, model), depth, **settings)


def write_diagnosis(
    common: Common,
    model: "Model",
    loaded: "LoadedImages",
    depth: int,
    **settings: Any,  # noqa: ANN401 - passed on to the library
) -> None:
    """Diagnose, print the table and write ``diagnose.json``.

    Args:
        common: Options.
        model: The model.
        loaded: Pictures.
        depth: Where to look.
        **settings: Further arguments of the library.
    """
    from foveate.diagnosis.diagnose import diagnose as run
    from foveate.report import terminal
    from foveate.report.records import write_record

    with terminal.progress_bar("diagnose") as progress:
        found = run(
            model,
            loaded.images,
            task=common.task,
            depth=depth,
            seed=common.seed,
            batch_size=common.batch_size,
            progress=progress,
            **settings,
        )
    record = found.record([str(file) for file in loaded.files])
    record["skipped"] = [{"file": str(s.file), "reason": s.reason} for s in loaded.skipped]
    file = write_record(common.out / "diagnose.json", record)
    terminal.print_diagnosis(record)
    terminal.print_skipped(loaded.skipped, len(loaded.files) + len(loaded.skipped))
    terminal.print_text(f"Wrote {file}")
