"""ADE20K as the scene-parsing benchmark has it: a class for every pixel."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from foveate.data.checked import labels_in, must_exist, picture_in, pictures_in

NUM_CLASSES = 150
NUM_VALIDATION = 2000
IGNORED = 255


class Segmented(NamedTuple):
    """A picture with its mask of classes, ``(H, W)``, int64; 255 is ignored."""

    file: Path
    picture: Image.Image
    mask: Tensor


@dataclass(frozen=True)
class ADE20K:
    """Pictures and their annotations, in which k stands for class k - 1, and 0 is ignored.

    Attributes:
        files: Pictures, sorted by name.
        annotations: The mask of each, eight bits a pixel.
        num_classes: Classes; a mask may hold 0 to this number.
    """

    files: tuple[Path, ...]
    annotations: tuple[Path, ...]
    num_classes: int = NUM_CLASSES

    @property
    def is_official(self) -> bool:
        """Whether there are as many pictures and classes as in the validation set."""
        return (len(self), self.num_classes) == (NUM_VALIDATION, NUM_CLASSES)

    def __len__(self) -> int:
        """Pictures."""
        return len(self.files)

    def __getitem__(self, index: int) -> Segmented:
        """Read picture ``index`` and its mask, at their own size.

        Args:
            index: From 0 to below the number of pictures.

        Returns:
            The picture in RGB, and its mask: 255 where the annotation has 0, else the
            class, from 0.

        Raises:
            ValueError: If one cannot be read, or the mask is of another size or holds a
                number above the number of classes.
        """
        file, annotation = self.files[index], self.annotations[index]
        picture = picture_in(file)
        numbers = labels_in(annotation, ("L", "P"), picture.size)
        if numbers.max() > self.num_classes:
            raise ValueError(
                f"'{annotation}' must hold classes 0 to {self.num_classes}; got "
                f"{int(numbers.max())}."
            )
        return Segmented(file, picture, torch.where(numbers == 0, IGNORED, numbers - 1))


def open_ade20k(
    folder: str | Path, split: str = "validation", num_classes: int = NUM_CLASSES
) -> ADE20K:
    """List ``images/SPLIT/*.jpg`` and ``annotations/SPLIT/*.png`` of the same names.

    Args:
        folder: ``ADEChallengeData2016``, or another of that form.
        split: ``validation`` or ``training``.
        num_classes: Classes, 1 to 254.

    Returns:
        The data set; files are read one by one.

    Raises:
        ValueError: If a folder is missing or empty, a picture has no annotation or an
            annotation no picture, or the number of classes is out of range.
    """
    if not 1 <= num_classes < IGNORED:
        raise ValueError(f"num_classes must be 1 to {IGNORED - 1}; got {num_classes}.")
    images, masks = (Path(folder) / kind / split for kind in ("images", "annotations"))
    files = pictures_in(images)
    annotations = [masks / f"{file.stem}.png" for file in files]
    must_exist(annotations, f"belongs to a picture in '{images}'")
    others = sorted({f.stem for f in pictures_in(masks)} - {f.stem for f in files})
    if others:
        raise ValueError(
            f"data must hold a picture for every annotation; '{images}' has none for "
            f"{len(others)} in '{masks}', the first '{others[0]}'."
        )
    return ADE20K(tuple(files), tuple(annotations), num_classes)
