"""NYU-Depth-V2: photographs of rooms with the depth of every pixel."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from foveate.data.checked import labels_in, must_exist, picture_in
from foveate.data.folder import SUFFIXES

NUM_TEST = 654
SIZE = (480, 640)  # rows, columns
EIGEN_ROWS, EIGEN_COLUMNS = slice(45, 471), slice(41, 601)
MIN_DEPTH, MAX_DEPTH = 1e-3, 10.0  # metres; the first is not counted, the second is
MILLIMETRES = 1000
FORMS = (("rgb_", "", "sync_depth_", ""), ("", "_colors", "", "_depth"))


class Measured(NamedTuple):
    """A picture with its depth in metres and where it counts, ``(H, W)`` both."""

    file: Path
    picture: Image.Image
    depth: Tensor
    valid: Tensor


@dataclass(frozen=True)
class NYU:
    """Pictures with depth; a pixel counts inside Eigen's crop and from 1 mm to 10 m.

    Attributes:
        files: Pictures, sorted by path.
        depths: Depth of each, sixteen bits a pixel, in millimetres; 0 is unknown.
    """

    files: tuple[Path, ...]
    depths: tuple[Path, ...]

    @property
    def is_official(self) -> bool:
        """Whether there are as many pictures as in the test set, 654."""
        return len(self) == NUM_TEST

    def __len__(self) -> int:
        """Pictures."""
        return len(self.files)

    def __getitem__(self, index: int) -> Measured:
        """Read picture ``index`` and its depth.

        Args:
            index: From 0 to below the number of pictures.

        Returns:
            The picture in RGB, the depth in metres, float32, and the pixels that count:
            0.001 < depth <= 10 in rows 45 to 470 and columns 41 to 600.

        Raises:
            ValueError: If one cannot be read, is not 640 x 480, or the depth has not
                sixteen bits.
        """
        file, annotation = self.files[index], self.depths[index]
        picture = picture_in(file)
        if picture.size != SIZE[::-1]:
            raise ValueError(
                f"'{file}' must be 640 x 480, since Eigen's crop is for that size; got "
                f"{picture.width} x {picture.height}."
            )
        millimetres = labels_in(annotation, ("I;16", "I;16B", "I"), picture.size)
        depth = millimetres.float() / MILLIMETRES
        return Measured(file, picture, depth, eigen_crop() & is_measured(depth))


def open_nyu(folder: str | Path) -> NYU:
    """List pairs of files, in the folder and all below it.

    The names are those of the two distributions of the test set as PNG files:
    ``SCENE/rgb_00045.jpg`` with ``SCENE/sync_depth_00045.png``, or ``00000_colors.png``
    with ``00000_depth.png``.

    Args:
        folder: Holds the files.

    Returns:
        The data set; files are read one by one.

    Raises:
        ValueError: If there is no such folder, it holds no picture of such a name, or a
            picture has no depth.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"data must be a folder with NYU-Depth-V2; got '{folder}'.")
    pairs = [(f, depth) for f in sorted(folder.rglob("*")) if (depth := _depth_of(f))]
    if not pairs:
        raise ValueError(
            "data must hold rgb_*.jpg with sync_depth_*.png, or *_colors.png with "
            f"*_depth.png; '{folder}' holds none."
        )
    files, depths = zip(*pairs, strict=True)
    must_exist(depths, f"belongs to a picture in '{folder}'")
    return NYU(files, depths)


def eigen_crop() -> Tensor:
    """Pixels inside Eigen's crop, ``(480, 640)``, bool."""
    crop = torch.zeros(SIZE, dtype=torch.bool)
    crop[EIGEN_ROWS, EIGEN_COLUMNS] = True
    return crop


def is_measured(depth: Tensor) -> Tensor:
    """Whether depths in metres lie above 1 mm and are at most 10 m."""
    return (depth > MIN_DEPTH) & (depth <= MAX_DEPTH)


def _depth_of(file: Path) -> Path | None:
    """Where the depth of a picture should be; None if it is no picture of such a name."""
    if file.suffix.lower() not in SUFFIXES:
        return None
    for begin, end, depth_begin, depth_end in FORMS:
        if file.stem.startswith(begin) and file.stem.endswith(end):
            middle = file.stem.removeprefix(begin).removesuffix(end)
            return file.with_name(f"{depth_begin}{middle}{depth_end}.png")
    return None
