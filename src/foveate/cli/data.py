"""The commands under ``data``: labelled pictures to train and evaluate on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option, Typer

from foveate.cli.options import Common, laid_flat

Objects = Annotated[
    Path,
    Option(
        help="Pictures with an alpha channel, one sub-folder a class.", show_default=False
    ),
]
Photos = Annotated[Path, Option(help="Folder of photographs.", show_default=False)]
Number = Annotated[int, Option(min=1, help="Scenes to make.", show_default=False)]
Size = Annotated[int, Option(min=8, max=4096, help="Side of the images in pixels.")]
Format = Annotated[Literal["coco", "ade20k"], Option(help="How labels are written.")]

data = Typer(name="data", help="Make labelled pictures.", no_args_is_help=False)


@data.callback()
def _data() -> None:
    """Make labelled pictures."""


def composites(
    common: Common,
    cutouts: Objects,
    photos: Photos,
    num: Number,
    size: Size = 224,
    format: Format = "coco",
) -> None:
    """Paste objects onto photographs: class, boxes and masks are exact. Runs no model."""
    from foveate.data.composites import open_composites
    from foveate.data.scene_files import write_ade20k, write_coco
    from foveate.report import terminal
    from foveate.report.records import check_directory, write_record

    check_directory(common.out)
    scenes = open_composites(cutouts, photos, num, size, common.seed)
    write = {"coco": write_coco, "ade20k": write_ade20k}[format]
    with terminal.progress_bar("composites") as progress:
        counts = write(scenes, common.out, progress)
    record = {
        "format": format,
        "cutouts": str(cutouts),
        "photos": str(photos),
        **counts,
    }
    file = write_record(common.out / "composites.json", record)
    _print(record)
    terminal.print_text(f"Wrote {file}")


def _print(record: Mapping[str, Any]) -> None:
    from foveate.report import terminal

    title = "{num_images} images of {size} pixels, seed {seed}".format_map(record)
    images, objects = record["images_of_class"], record["objects_of_class"]
    rows = [(name, str(objects[name]), str(images[name])) for name in record["classes"]]
    terminal.print_table(title, ("class", "objects", "images where largest"), rows)


data.command()(laid_flat(composites))
