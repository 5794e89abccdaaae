"""The command ``evaluate``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foveate.cli.inputs import find_device, open_model
from foveate.cli.options import Common

if TYPE_CHECKING:
    from foveate.data.labelled import LabelledImages
    from foveate.evaluation.evaluate import Evaluation

Checkpoint = Annotated[
    Path | None,
    Option(help="Folder of a training, in place of --model; of heads, --task says which."),
]
Data = Annotated[
    Path, Option(help="Data set, as of COCO, ADE20K, ImageNet, NYU.", show_default=False)
]
ThePlan = Annotated[Path | None, Option(help="Plan to hold against the full model.")]
Split = Annotated[str, Option(help="Part of the data, as val2017; that to validate on.")]
Number = Annotated[int, Option(min=0, help="First pictures of the data; all if 0.")]


def evaluate(
    common: Common,
    data: Data,
    checkpoint: Checkpoint = None,
    plan: ThePlan = None,
    num: Number = 0,
    split: Split = "",
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
    labelled = open_labelled(data, split).first(num)
    with terminal.progress_bar("evaluate") as progress:
        settings = (common.batch_size, common.seed, progress)
        if checkpoint is not None and _is_pruned(checkpoint):
            if wanted is not None:
                raise ValueError(
                    f"plan must not be given for a checkpoint that is pruned; got '{plan}' "
                    f"for '{checkpoint}'."
                )
            found = _of_pruned(common, checkpoint, labelled, *settings)
        else:
            model = open_model(common)
            found = run(model, labelled, common.task, wanted, *settings)
    record = found.record()
    file = write_record(common.out / "evaluate.json", record)
    print_evaluation(record)
    terminal.print_text(f"Wrote {file}")


def _is_pruned(folder: Path) -> bool:
    from foveate.adaptive.checkpoint import KINDS
    from foveate.models.checkpoint import read_checkpoint

    return read_checkpoint(folder).get("kind") in KINDS


def _of_pruned(
    common: Common,
    folder: Path,
    data: "LabelledImages",
    *settings: Any,  # noqa: ANN401 - batch size, seed, progress
) -> "Evaluation":
    """Score a pruned checkpoint beside its own weights with nothing removed."""
    import torch

    from foveate.adaptive.checkpoint import open_pruned
    from foveate.evaluation.pruned import evaluate_pruned

    network = open_pruned(folder)
    network.to(find_device(common.device), getattr(torch, common.dtype))
    batch_size, seed, progress = settings
    return evaluate_pruned(network, data, None, batch_size, seed, progress)
