"""The command ``probe``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Option

from foveate.cli.inputs import open_model
from foveate.cli.options import Common, between_commas

Tasks = Annotated[
    str, Option(help="Tasks of the model, as label,mask,objects.", show_default=False)
]
Depths = Annotated[str, Option(help="Blocks to prune at, each by itself.")]
Criteria = Annotated[str, Option(help="What patches are kept by; sensitivity is another.")]
Keep = Annotated[float, Option(help="Share of the patches that stay.")]
Resamples = Annotated[int, Option(min=2, help="Resamples of the images for intervals.")]
Probes = Annotated[int, Option(min=1, help="Back-propagations of sensitivity.")]


@dataclass(frozen=True)
class Labelled:
    """Options about labelled pictures: a data set, or scenes made on the fly."""

    data: Annotated[
        Path | None, Option(help="Data set, as of COCO, ADE20K, ImageNet, NYU.")
    ] = None
    cutouts: Annotated[
        Path | None, Option(help="In place of --data: objects, one sub-folder a class.")
    ] = None
    photos: Annotated[Path | None, Option(help="Photographs that they are pasted on.")] = (
        None
    )
    num: Annotated[
        int, Option(min=0, help="Scenes; of a data set the first pictures, all if 0.")
    ] = 0


def probe(  # noqa: PLR0913 - options of a command
    common: Common,
    labelled: Labelled,
    tasks: Tasks,
    depths: Depths = "2,4,6,8",
    criteria: Criteria = "random,norm,attention,received,coverage,redundancy",
    keep: Keep = 0.5,
    num_resamples: Resamples = 200,
    probes: Probes = 16,
) -> None:
    """Prune at one block at a time, and measure what every criterion costs every task."""
    from foveate.evaluation.conditions import Conditions
    from foveate.evaluation.probe import probe as run
    from foveate.report import terminal
    from foveate.report.probe import print_probe
    from foveate.report.records import check_directory, write_record
    from foveate.training.config import Source

    check_directory(common.out)
    names = between_commas("tasks", tasks, str) or []
    where = between_commas("depths", depths, int) or []
    wanted = tuple(between_commas("criteria", criteria, str) or ())
    conditions = Conditions(wanted, keep, common.seed, num_resamples, probes)
    folder, cutouts, photos = (
        str(f) if f else "" for f in (labelled.data, labelled.cutouts, labelled.photos)
    )
    source = Source(
        folder, cutouts=cutouts, photos=photos, num=labelled.num, seed=common.seed
    )
    model = open_model(replace(common, task=names[0]))
    pictures = source.open(model.transform.size)
    with terminal.progress_bar("probe") as progress:
        settings = (common.batch_size, progress)
        found = run(model, pictures, names, where, *settings, **vars(conditions))
    record = found.record()
    file = write_record(common.out / "probe.json", record)
    print_probe(record)
    terminal.print_text(f"Wrote {file}")
