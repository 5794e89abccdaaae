"""The command ``benchmark``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foveate.cli.inputs import load_pictures, open_model
from foveate.cli.options import Common, Reduction, Timing

if TYPE_CHECKING:
    from foveate.data.folder import LoadedImages
    from foveate.models import Model
    from foveate.reduction.plan import Plan

OnePlan = Annotated[Path | None, Option(help="Plan to run, or else --method.")]
Method = Annotated[str | None, Option(help="Name of one method.")]
SomeImages = Annotated[Path | None, Option(help="Pictures to run on; noise without.")]


def benchmark(
    common: Common,
    timing: Timing,
    reduction: Reduction,
    plan: OnePlan = None,
    method: Method = None,
    images: SomeImages = None,
) -> None:
    """Time a method against the full model, in turn, and measure memory."""
    import torch

    from foveate.data.folder import LoadedImages, find_images
    from foveate.evaluation.benchmark import noise
    from foveate.evaluation.schedule import plan_for_terms
    from foveate.reduction.plan import Plan
    from foveate.report.records import check_directory

    check_directory(common.out)
    terms = reduction.terms(common.seed)
    wanted = Plan.load(plan) if plan else None
    _check_choice(plan, method, reduction)
    files = find_images(images)[: common.batch_size] if images else []
    torch.set_num_threads(timing.threads or torch.get_num_threads())
    common = replace(common, task=wanted.task) if wanted else common
    model = open_model(common, timing.size)
    grid = wanted.grid if wanted and timing.size is None else None
    pictures = noise(model, common.batch_size, grid, common.seed)
    loaded = load_pictures(files, model) if files else LoadedImages(pictures, [], [])
    run_on = (model, loaded.images, common.task)
    wanted = wanted or plan_for_terms(*run_on, str(method), **terms)
    write_benchmark(common, timing, model, wanted, loaded)


def write_benchmark(
    common: Common, timing: Timing, model: "Model", plan: "Plan", loaded: "LoadedImages"
) -> dict[str, Any]:
    """Benchmark, print the table and write ``benchmark.json``.

    Args:
        common: Options.
        timing: Options.
        model: The model.
        plan: What to do.
        loaded: Pictures.

    Returns:
        What was written.
    """
    from foveate.evaluation.benchmark import benchmark as run
    from foveate.report import terminal
    from foveate.report.benchmark import print_benchmark
    from foveate.report.records import write_record

    with terminal.progress_bar("benchmark") as progress:
        calls = (common.batch_size, timing.rounds, timing.warmup, progress)
        record = run(model, plan, loaded.images, *calls).record()
    file = write_record(common.out / "benchmark.json", record)
    print_benchmark(record)
    terminal.print_skipped(loaded.skipped, len(loaded.files) + len(loaded.skipped))
    terminal.print_text(f"Wrote {file}")
    return record


def _check_choice(plan: Path | None, method: str | None, reduction: Reduction) -> None:
    if (plan is None) == (method is None):
        raise ValueError(
            f"plan or method must be given, not both; got plan {plan} and method {method}."
        )
    if plan is not None and reduction != Reduction():
        raise ValueError(f"plan must stand alone, for it says all; got {reduction}.")
