"""Pictures with what is true of them, whatever data set they come from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from foveate.data.ade20k import IGNORED, open_ade20k
from foveate.data.coco import COCO, Objects, open_coco
from foveate.data.composites import Composites, Scene
from foveate.data.imagenet import NUM_CLASSES, open_imagenet
from foveate.data.nyu import LABELLED, open_nyu

__all__ = [
    "IGNORED",
    "Example",
    "LabelledImages",
    "Target",
    "label_composites",
    "open_labelled",
]

Kind = Literal["classification", "segmentation", "detection", "depth"]
BACKGROUND = "background"
ADE20K, SPLITS = ("images", "annotations"), ("validation", "training")


@dataclass(frozen=True)
class Target:
    """What is true of one image; None where the data set does not say.

    Attributes:
        label: Class of the image, from 0.
        mask: Class of each pixel, ``(H, W)``, int64; 255 is ignored.
        objects: Objects in it.
        depth: Depth of each pixel in metres, ``(H, W)``.
        valid: Where the depth counts, ``(H, W)``, bool.
    """

    label: int | None = None
    mask: Tensor | None = None
    objects: Objects | None = None
    depth: Tensor | None = None
    valid: Tensor | None = None


class Example(NamedTuple):
    """A picture in RGB and what is true of it."""

    picture: Image.Image
    target: Target


@dataclass(frozen=True)
class LabelledImages(Sequence[Example]):
    """A data set as tasks see it.

    Attributes:
        name: Where it is from, for messages.
        source: The pictures, as their own reader gives them.
        read: Turns what that reader gives into an example.
        classes: For each kind of task that there are labels for, its classes by name; of
            depth none.
        files: Name of each picture.
    """

    name: str
    source: Any
    read: Callable[[Any], Example]
    classes: Mapping[str, tuple[str, ...]]
    files: Sequence[str] = field(repr=False)

    def __len__(self) -> int:
        """Pictures."""
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - as of a sequence
        """Read picture ``index`` with what is true of it.

        Args:
            index: From 0 to below the number of pictures.

        Returns:
            The example.

        Raises:
            IndexError: If there is no such picture.
            ValueError: If it, or its label, cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}; got {index}.")
        return self.read(self.source[index])

    def first(self, num: int) -> "LabelledImages":
        """The first pictures, all of them if ``num`` is 0 or more than there are."""
        return replace(self, files=self.files[: num or None])

    def classes_for(self, kind: str) -> tuple[str, ...]:
        """Classes of a kind of task.

        Args:
            kind: ``classification``, ``segmentation``, ``detection`` or ``depth``.

        Returns:
            Their names.

        Raises:
            ValueError: If there are no labels of that kind.
        """
        if kind not in self.classes:
            raise ValueError(
                f"data must have labels for {kind}; '{self.name}' has them for "
                f"{', '.join(self.classes)}."
            )
        return self.classes[kind]


def label_composites(composites: Composites) -> LabelledImages:
    """Scenes as examples: the class of the largest object, all pixels, all objects."""
    files = [str(index) for index in range(len(composites))]
    return LabelledImages(
        "composites", composites, _read_scene, _object_classes(composites.classes), files
    )


def open_labelled(folder: str | Path, split: str = "") -> LabelledImages:
    """Open a data set by the layout of its folder.

    A file ``annotations.json`` beside ``images``, or ``annotations/instances_SPLIT.json``
    with the folder ``SPLIT`` or ``images/SPLIT``, is COCO's, and serves three tasks: a
    picture's class is that of its largest object, and where masks overlap a pixel is of the
    smaller object, on a background of class 0. Folders ``images/validation`` and
    ``annotations/validation`` are ADE20K's. Pairs of colours and depth, or
    ``nyu_depth_v2_labeled.mat``, are NYU-Depth-V2's. Otherwise sub-folders must be named by
    ImageNet's synsets.

    Args:
        folder: The data set.
        split: As the files name it: ``train2017``, ``training``, ``train``; that for
            validation if there are several and none is named.

    Returns:
        Its examples.

    Raises:
        ValueError: If there is no such folder or split, or what it holds is not as it
            should be.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"data must be a folder with a data set; got no such '{folder}'.")
    if any((folder / kind / split).is_dir() for kind in ADE20K for split in SPLITS):
        return _open_ade20k(folder, split)
    pair = _coco_files(folder, split)
    if pair is not None:
        return _open_coco(folder, *pair)
    if (folder / LABELLED).is_file() or any(folder.rglob("*depth*.png")):
        nyu = open_nyu(folder)
        files = [str(file) for file in nyu.files]
        return LabelledImages(str(folder), nyu, _read_depth, {"depth": ()}, files)
    if not any(f.is_dir() for f in folder.iterdir()):
        raise ValueError(
            "data must be laid out as COCO, ADE20K, NYU-Depth-V2 or ImageNet; "
            f"'{folder}' holds no file or folder of theirs."
        )
    return _open_imagenet(folder / split)


def _coco_files(folder: Path, wanted: str) -> tuple[Path, Path] | None:
    """Folder of the pictures and annotation file; None if it is not of this form."""
    files = (folder / "annotations").glob(f"instances_{wanted or '*'}.json")
    for file in sorted(files, key=lambda f: (not f.stem.startswith("instances_val"), f)):
        split = file.stem.removeprefix("instances_")
        for images in (folder / split, folder / "images" / split):
            if images.is_dir():
                return images, file
    if (folder / "annotations.json").exists() or (folder / "images").is_dir():
        return folder / "images", folder / "annotations.json"
    return None


def _open_coco(folder: Path, images: Path, annotations: Path) -> LabelledImages:
    coco: COCO = open_coco(images, annotations)
    files = [str(file) for file in coco.files]
    return LabelledImages(
        str(folder), coco, _read_objects, _object_classes(coco.classes), files
    )


def _open_ade20k(folder: Path, split: str) -> LabelledImages:
    found = (s for s in SPLITS if (folder / "images" / s).is_dir())
    ade = open_ade20k(folder, split or next(found, SPLITS[0]))
    classes = {"segmentation": tuple(str(k + 1) for k in range(ade.num_classes))}
    files = [str(file) for file in ade.files]
    return LabelledImages(str(folder), ade, _read_mask, classes, files)


def _open_imagenet(folder: Path) -> LabelledImages:
    found = open_imagenet(folder)
    classes = {"classification": tuple(str(k) for k in range(NUM_CLASSES))}
    files = [str(file) for file in found.files]
    return LabelledImages(str(folder), found, _read_label, classes, files)


def _object_classes(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {
        "classification": names,
        "segmentation": (BACKGROUND, *names),
        "detection": names,
    }


def _read_scene(scene: Scene) -> Example:
    crowd = torch.zeros(len(scene.classes), dtype=torch.bool)
    objects = Objects(scene.boxes, scene.classes, crowd, scene.masks)
    return Example(scene.picture, Target(scene.label, scene.semantic, objects))


def _read_objects(found: Any) -> Example:  # noqa: ANN401 - a Detected
    objects: Objects = found.objects
    areas = objects.masks.flatten(1).sum(1)
    mask = torch.zeros(found.picture.size[::-1], dtype=torch.int64)
    for index in areas.argsort(descending=True, stable=True).tolist():
        mask[objects.masks[index]] = (
            IGNORED if objects.crowd[index] else 1 + int(objects.labels[index])
        )
    plain = torch.where(objects.crowd, -1, areas)
    largest = int(plain.argmax()) if len(plain) and plain.max() >= 0 else None
    label = None if largest is None else int(objects.labels[largest])
    return Example(found.picture, Target(label, mask, objects))


def _read_mask(found: Any) -> Example:  # noqa: ANN401 - a Segmented
    return Example(found.picture, Target(mask=found.mask))


def _read_label(found: Any) -> Example:  # noqa: ANN401 - a Labelled
    return Example(found.picture, Target(label=found.label))


def _read_depth(found: Any) -> Example:  # noqa: ANN401 - a Measured
    return Example(found.picture, Target(depth=found.depth, valid=found.valid))
