"""COCO instances: boxes and masks of objects, with category ids that have gaps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from foveate.data.checked import field, json_object, must_exist, picture_in

NUM_CLASSES = 80
NUM_VALIDATION = 5000
NUMBER = int | float


class Objects(NamedTuple):
    """What is to be found in one image, n objects.

    Attributes:
        boxes: Left, top, right, bottom in pixels, ``(n, 4)``, float64.
        labels: Classes from 0 without gaps, ``(n,)``, int64.
        crowd: Whether it stands for many objects, ``(n,)``, bool; such a one is neither to
            be found nor wrong to find.
        masks: ``(n, H, W)``, bool.
    """

    boxes: Tensor
    labels: Tensor
    crowd: Tensor
    masks: Tensor


class Detected(NamedTuple):
    """A picture with the objects in it."""

    file: Path
    picture: Image.Image
    objects: Objects


@dataclass(frozen=True)
class COCO:
    """Pictures with their objects; those without any are kept.

    Attributes:
        files: Pictures, by ascending id.
        image_ids: Id of each.
        category_ids: Id of class 0, 1, ...; ascending, with gaps.
        classes: Names of the classes.
        annotations: Annotations of each picture, as in the file.
        sizes: Width and height of each picture, as in the file.
        source: The annotation file, for messages.
    """

    files: tuple[Path, ...]
    image_ids: tuple[int, ...]
    category_ids: tuple[int, ...]
    classes: tuple[str, ...]
    annotations: tuple[tuple[Mapping[str, Any], ...], ...]
    sizes: tuple[tuple[int, int], ...]
    source: Path

    @property
    def is_official(self) -> bool:
        """Whether there are as many pictures and classes as in val2017."""
        return (len(self), len(self.classes)) == (NUM_VALIDATION, NUM_CLASSES)

    def __len__(self) -> int:
        """Pictures."""
        return len(self.files)

    def __getitem__(self, index: int) -> Detected:
        """Read picture ``index``, and draw the masks of its objects.

        Args:
            index: From 0 to below the number of pictures.

        Returns:
            The picture in RGB, and its objects in the order of the file.

        Raises:
            ValueError: If it cannot be read, is of another size than the file says, or a
                mask cannot be decoded.
        """
        picture = picture_in(self.files[index])
        if picture.size != self.sizes[index]:
            width, height = self.sizes[index]
            raise ValueError(
                f"'{self.files[index]}' must be {width} x {height}, as '{self.source}' "
                f"says; got {picture.width} x {picture.height}."
            )
        found = self.annotations[index]
        return Detected(self.files[index], picture, self._objects(found, picture.size))

    def _objects(
        self, found: Sequence[Mapping[str, Any]], size: tuple[int, int]
    ) -> Objects:
        label = {category: index for index, category in enumerate(self.category_ids)}
        boxes = torch.tensor([a["bbox"] for a in found], dtype=torch.float64).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        masks = [self._mask(a, size) for a in found]
        empty = torch.zeros((0, *size[::-1]), dtype=torch.bool)
        return Objects(
            boxes,
            torch.tensor([label[a["category_id"]] for a in found], dtype=torch.int64),
            torch.tensor([a.get("iscrowd", 0) == 1 for a in found], dtype=torch.bool),
            torch.stack(masks) if masks else empty,
        )

    def _mask(self, annotation: Mapping[str, Any], size: tuple[int, int]) -> Tensor:
        try:
            return draw_mask(annotation["segmentation"], size)
        except ValueError as error:
            raise ValueError(
                f"'{self.source}', annotation {annotation.get('id')}: field 'segmentation' "
                f"must be a mask of the image; {error}"
            ) from error


def open_coco(images: str | Path, annotations: str | Path) -> COCO:
    """Read and check a file of COCO instances.

    Args:
        images: Folder with the pictures, as ``val2017``.
        annotations: JSON, as ``annotations/instances_val2017.json``.

    Returns:
        The data set; pictures are read one by one.

    Raises:
        ValueError: If the file is missing, is not of this form, lists a picture that is
            absent or none, names an image or category it does not list, or has a mask of
            another size; the message names file, annotation and field.
    """
    source, folder = Path(annotations), Path(images)
    record = json_object(source)
    listed, found, kinds = (
        field(record, name, list, f"'{source}'")
        for name in ("images", "annotations", "categories")
    )
    sizes = {
        field(i, "id", int, f"'{source}', images"): _size(i, f"'{source}', image {i['id']}")
        for i in listed
    }
    names = {
        field(k, "id", int, f"'{source}', categories"): field(
            k, "name", str, f"'{source}', category {k['id']}"
        )
        for k in kinds
    }
    if not sizes or not names:
        raise ValueError(
            f"'{source}' must list images and categories; got {len(sizes)} and "
            f"{len(names)}."
        )
    by_image = defaultdict(list)
    for each in found:
        _check(each, sizes, names, source)
        by_image[each["image_id"]].append(each)
    where = f"'{source}', images"
    file_of = {i["id"]: folder / field(i, "file_name", str, where) for i in listed}
    must_exist(file_of.values(), f"'{source}' lists under images")
    ids, categories = sorted(sizes), sorted(names)
    return COCO(
        tuple(file_of[i] for i in ids),
        tuple(ids),
        tuple(categories),
        tuple(names[c] for c in categories),
        tuple(tuple(by_image[i]) for i in ids),
        tuple(sizes[i] for i in ids),
        source,
    )


def draw_mask(segmentation: Any, size: tuple[int, int]) -> Tensor:  # noqa: ANN401 - JSON
    """Draw a mask with COCO's own rules.

    Args:
        segmentation: Polygons, or run lengths, compressed or not.
        size: Width and height of the image.

    Returns:
        ``(H, W)``, bool.

    Raises:
        ModuleNotFoundError: If faster-coco-eval is not installed.
        ValueError: If it is no mask of that size.
    """
    mask = mask_api()
    width, height = size
    code = mask.segmToRle(segmentation, width, height)
    return torch.from_numpy(np.ascontiguousarray(mask.decode(code)).astype(bool))


def mask_api() -> Any:  # noqa: ANN401 - a module without types
    """Give faster-coco-eval's module for masks.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        from faster_coco_eval.core import mask  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "COCO's masks and scores need faster-coco-eval: pip install 'foveate[train]'."
        ) from error
    return mask


def _size(image: Mapping[str, Any], where: str) -> tuple[int, int]:
    return field(image, "width", int, where), field(image, "height", int, where)


def _check(
    annotation: Any,  # noqa: ANN401 - JSON
    sizes: Mapping[int, tuple[int, int]],
    names: Mapping[int, str],
    source: Path,
) -> None:
    """Refuse an annotation that is not of the form."""
    number = annotation.get("id") if isinstance(annotation, Mapping) else None
    where = f"'{source}', annotation {number}"
    for name, known, listing in (
        ("image_id", sizes, "images"),
        ("category_id", names, "categories"),
    ):
        if field(annotation, name, int, where) not in known:
            raise ValueError(
                f"{where}: field '{name}' must be an id under {listing}; got "
                f"{annotation[name]}."
            )
    box = field(annotation, "bbox", list, where)
    is_box = len(box) == 4 and all(isinstance(v, NUMBER) and isfinite(v) for v in box)
    if not is_box or min(box[2:]) < 0:
        raise ValueError(
            f"{where}: field 'bbox' must be left, top, width and height, the last two not "
            f"negative; got {box}."
        )
    shape = field(annotation, "segmentation", list | dict, where)
    _check_mask(shape, sizes[annotation["image_id"]], where)


def _check_mask(
    shape: list[Any] | dict[str, Any], size: tuple[int, int], where: str
) -> None:
    """Refuse run lengths of another size, and polygons that are none."""
    if isinstance(shape, list):
        sound = (isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0 for p in shape)
        if not shape or not all(sound):
            raise ValueError(
                f"{where}: field 'segmentation' must be polygons of at least 3 points."
            )
        return
    got = field(shape, "size", list, f"{where}, segmentation")
    counts = field(shape, "counts", list | str, f"{where}, segmentation")
    if tuple(got) != size[::-1]:
        raise ValueError(
            f"{where}: field 'segmentation' must have the image's size [height, width] = "
            f"{[*size[::-1]]}; got {got}."
        )
    if isinstance(counts, list) and sum(counts) != size[0] * size[1]:
        raise ValueError(
            f"{where}: field 'segmentation' must count {size[0] * size[1]} pixels; got "
            f"{sum(counts)}."
        )
