"""The command ``evaluate``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Option

from foveate.cli.inputs import open_model
from foveate.cli.options import Common

Checkpoint = Annotated[
    Path | None, Option(help="Folder of a training, in place of --model.")
]
Data = Annotated[
    Path, Option(help="Data set, as of COCO, ADE20K, ImageNet, NYU.", show_default=False)
]
ThePlan = Annotated[Path | None, Option(help="Plan to hold against the full model.")]
Number = Annotated[int, Option(min=0, help="First pictures of the data; all if 0.")]


def evaluate(
    common: Common,
    data: Data,
    checkpoint: Checkpoint = None,
    plan: ThePlan = None,
    num: Number = 0,
) -> None:
    """Score a task on labelled pictures, the full and the reduced model side by side."""
    from foveate.data.labelled import open_labelled
    from foveate.evaluation.evaluate import evaluate as run
    from foveate.reduction.plan import Plan
    from foveate.report import terminal
    from foveate.report.records import check_directory, write_record
    from foveate.report.scores import print_evaluation

    check_directory(common.out)
    wanted = Plan.load(plan) if plan else None
    common = replace(common, task=wanted.task) if wanted else common
    if checkpoint is not None:
        common = replace(common, model=str(checkpoint))
    labelled = open_labelled(data).first(num)
    model = open_model(common)
    with terminal.progress_bar("evaluate") as progress:
        settings = (common.task, wanted, common.batch_size, common.seed, progress)
        record = run(model, labelled, *settings).record()
    file = write_record(common.out / "evaluate.json", record)
    print_evaluation(record)
    terminal.print_text(f"Wrote {file}")
