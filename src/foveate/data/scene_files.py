"""Scenes on disk, in the formats of COCO instances and of ADE20K."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from foveate.data.composites import Composites, Scene

SPLIT = "validation"
Progress = Callable[[int, int], None]


def write_coco(
    composites: Composites, out: str | Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Write ``OUT/images/*.png`` and ``OUT/annotations.json`` with COCO instances.

    Masks are uncompressed run lengths of the visible pixels; boxes are theirs. Ids of
    images, annotations and categories begin at 1; category c + 1 is class c.

    Args:
        composites: The scenes.
        out: Folder; files of the same name are replaced.
        progress: Is told how many scenes are done, and of how many.

    Returns:
        Counts, as :meth:`Tally.record`.

    Raises:
        ValueError: If the folder holds pictures of other scenes.
    """
    out = Path(out)
    images = _make_folder(out / "images", _names(composites))
    annotations: list[dict[str, Any]] = []
    tally = Tally(composites)
    for index, scene in tally.over(progress):
        save_png(scene.picture, images / _name(index))
        annotations += _annotations(scene, index + 1, len(annotations) + 1)
    record = {
        "info": {"description": "objects pasted onto photographs", "version": "1.0"},
        "licenses": [],
        "images": [
            {
                "id": index + 1,
                "file_name": _name(index),
                "width": composites.size,
                "height": composites.size,
            }
            for index in range(len(composites))
        ],
        "annotations": annotations,
        "categories": [
            {"id": index + 1, "name": name, "supercategory": "object"}
            for index, name in enumerate(composites.classes)
        ],
    }
    with _whole(out / "annotations.json") as partial:
        partial.write_text(json.dumps(record), encoding="utf-8")
    return tally.record()


def write_ade20k(
    composites: Composites, out: str | Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Write ``OUT/images/validation/*.png`` and ``OUT/annotations/validation/*.png``.

    In an annotation, 0 is the photograph, which ADE20K's protocol ignores, and c + 1 is
    class c.

    Args:
        composites: The scenes.
        out: Folder; files of the same name are replaced.
        progress: Is told how many scenes are done, and of how many.

    Returns:
        Counts, as :meth:`Tally.record`.

    Raises:
        ValueError: If the folder holds pictures of other scenes.
    """
    names = _names(composites)
    images, annotations = (
        _make_folder(Path(out) / kind / SPLIT, names) for kind in ("images", "annotations")
    )
    tally = Tally(composites)
    for index, scene in tally.over(progress):
        save_png(scene.picture, images / _name(index))
        mask = scene.semantic.numpy().astype(np.uint8)
        save_png(Image.fromarray(mask), annotations / _name(index))
    return tally.record()


class Tally:
    """Counts of scenes while they are drawn, each once.

    Args:
        composites: The scenes.
    """

    def __init__(self, composites: Composites) -> None:
        self.composites = composites
        self.labels: list[int] = []
        self.objects: Counter[int] = Counter()
        self.visible: list[float] = []
        self.covered = 0

    def over(self, progress: Progress | None = None) -> Iterator[tuple[int, Scene]]:
        """Draw all scenes.

        Args:
            progress: Is told how many scenes are done, and of how many.

        Yields:
            Index and scene.
        """
        for index in range(len(self.composites)):
            scene = self.composites[index]
            yield index, scene
            self.labels.append(scene.label)
            self.objects.update(scene.classes.tolist())
            self.visible += scene.visible.tolist()
            self.covered += int((scene.instances > 0).sum())
            if progress:
                progress(index + 1, len(self.composites))

    def record(self) -> dict[str, Any]:
        """Counts of the scenes that were drawn.

        Returns:
            ``num_images``, ``num_objects``, ``size``, ``seed``, ``ranges``, ``classes``,
            ``objects_of_class``, ``images_of_class`` (by the largest object), ``labels``
            (class of the largest object of every image), ``mean_visible`` (share of an
            object's pixels), ``mean_covered`` (share of an image's pixels).
        """
        scenes, largest = self.composites, Counter(self.labels)
        return {
            "num_images": len(self.labels),
            "num_objects": self.objects.total(),
            "size": scenes.size,
            "seed": scenes.seed,
            "ranges": {name: list(ends) for name, ends in vars(scenes.ranges).items()},
            "num_cutouts": sum(map(len, scenes.cutouts.by_class)),
            "num_photos": len(scenes.photographs),
            "classes": list(scenes.classes),
            "objects_of_class": _by_name(self.objects, scenes.classes),
            "images_of_class": _by_name(largest, scenes.classes),
            "labels": self.labels,
            "mean_visible": sum(self.visible) / len(self.visible),
            "mean_covered": self.covered / (len(self.labels) * scenes.size**2),
        }


def run_lengths(mask: Tensor) -> list[int]:
    """Run-length code of a mask, uncompressed, as COCO has it.

    Args:
        mask: ``(H, W)``, bool.

    Returns:
        Lengths of the runs down the columns, column by column; the first is of zeros, and
        0 if the mask begins with a one.
    """
    flat = mask.T.reshape(-1).numpy()
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    runs = np.diff(changes, prepend=0, append=flat.size).tolist()
    return [0, *runs] if flat[0] else runs


def save_png(picture: Image.Image, file: Path) -> None:
    """Write a picture without loss, whole or not at all.

    Args:
        picture: The picture.
        file: Where to; its folder exists.
    """
    with _whole(file) as partial:
        picture.save(partial, format="png", compress_level=1)  # three times as fast as 6


def _annotations(scene: Scene, image_id: int, first_id: int) -> list[dict[str, Any]]:
    height, width = scene.instances.shape
    corners, areas = scene.boxes, scene.areas.tolist()
    sides = corners[:, 2:] - corners[:, :2]
    boxes = [*zip(corners[:, :2].tolist(), sides.tolist(), strict=True)]
    return [
        {
            "id": first_id + i,
            "image_id": image_id,
            "category_id": int(scene.classes[i]) + 1,
            "bbox": [*boxes[i][0], *boxes[i][1]],
            "area": areas[i],
            "iscrowd": 0,
            "segmentation": {"size": [height, width], "counts": run_lengths(mask)},
            "visible": float(scene.visible[i]),
        }
        for i, mask in enumerate(scene.masks)
    ]


def _by_name(counts: Counter[int], names: Sequence[str]) -> dict[str, int]:
    return {name: counts[index] for index, name in enumerate(names)}


def _name(index: int) -> str:
    return f"{index:06d}.png"


def _names(composites: Composites) -> set[str]:
    return {_name(index) for index in range(len(composites))}


def _make_folder(folder: Path, names: set[str]) -> Path:
    """Make a folder; refuse one with pictures that would be taken for these scenes'."""
    others = sorted({f.name for f in folder.glob("[!.]*")} - names)
    if others:
        raise ValueError(
            f"out must not hold other pictures; got {len(others)} in '{folder}', the first "
            f"'{others[0]}'."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Give a place to write to; what is there takes the file's name at the end."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
