"""Photographs to learn from: random crops, or whole; an index always gives the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from PIL import Image, ImageOps
from torch import Generator, Tensor

from foveate.data.folder import ImageTransform, read_picture


@dataclass(frozen=True)
class Crops:
    """Random resized crops with flips, deterministic in the seed and the index.

    Crop i is of file i modulo the number of files. Its area is a uniform share of the
    picture's, its aspect ratio log-uniform from 3/4 to 4/3, its place uniform, and every
    second one, at random, is mirrored; it is resized to a square (bicubic, antialias).

    Attributes:
        files: Pictures, of any size.
        transform: Turns a square picture into the model's input.
        num: Crops.
        seed: The same seed gives the same crops; a longer list begins with a shorter one.
        scale: Smallest and largest share of the area.

    Raises:
        ValueError: If there is no file or no crop, or the scale is not within (0, 1].
    """

    files: Sequence[Path]
    transform: ImageTransform
    num: int
    seed: int = 0
    scale: tuple[float, float] = (0.25, 1.0)

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not self.files or self.num < 1:
            raise ValueError(
                "files and num must be at least 1; got "
                f"{len(self.files)} files and num {self.num}."
            )
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be two shares within (0, 1]; got {self.scale}.")

    def __len__(self) -> int:
        """Crops."""
        return self.num

    def __getitem__(self, index: int) -> Tensor:
        """Crop ``index`` as the model's input, ``(3, size, size)``.

        Args:
            index: From 0 to below the number of crops.

        Returns:
            The crop, resized and normalised.

        Raises:
            IndexError: If there is no such crop.
            ValueError: If its file cannot be read.
        """
        if not 0 <= index < self.num:
            raise IndexError(f"index must be from 0 to {self.num - 1}; got {index}.")
        picture = _read(self.files[index % len(self.files)])
        # The largest seeds outgrow 64 bits here.
        generator = Generator().manual_seed((1_000_003 * self.seed + index) % 2**64)
        area, aspect, left, top, flip = torch.rand(5, generator=generator).tolist()
        width, height = crop_size(picture.size, self.scale, area, aspect)
        x, y = left * (picture.width - width), top * (picture.height - height)
        side = (self.transform.size, self.transform.size)
        box = (x, y, x + width, y + height)
        square = picture.resize(side, Image.Resampling.BICUBIC, box=box)
        return self.transform(ImageOps.mirror(square) if flip < 0.5 else square)

    def batch(self, first: int, last: int) -> Tensor:
        """Crops ``first`` to ``last - 1``, ``(B, 3, size, size)``."""
        return torch.stack([self[index] for index in range(first, last)])


@dataclass(frozen=True)
class Photographs:
    """Pictures as the model's transform prepares them, each once.

    Attributes:
        files: Pictures.
        transform: Turns a picture into the model's input.

    Raises:
        ValueError: If there is no file.
    """

    files: Sequence[Path]
    transform: ImageTransform
    seed: ClassVar[int] = 0
    scale: ClassVar[None] = None

    def __post_init__(self) -> None:
        """Check that there is a file."""
        if not self.files:
            raise ValueError("files must name at least one picture; got none.")

    def __len__(self) -> int:
        """Pictures."""
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        """Picture ``index`` as the model's input, ``(3, size, size)``.

        Args:
            index: From 0 to below the number of pictures.

        Returns:
            The picture, prepared.

        Raises:
            IndexError: If there is no such picture.
            ValueError: If its file cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}; got {index}.")
        return self.transform(_read(self.files[index]))

    def batch(self, first: int, last: int) -> Tensor:
        """Pictures ``first`` to ``last - 1``, ``(B, 3, size, size)``."""
        return torch.stack([self[index] for index in range(first, last)])


def _read(file: Path) -> Image.Image:
    try:
        return read_picture(file)
    except ValueError as error:
        raise ValueError(f"files must be readable; '{file}' {error}") from error


def crop_size(
    size: tuple[int, int], scale: tuple[float, float], area: float, aspect: float
) -> tuple[float, float]:
    """Width and height of a crop; what would stick out is shortened to the picture.

    Args:
        size: Width and height of the picture in pixels.
        scale: Smallest and largest share of its area.
        area: Where between them, from 0 to 1.
        aspect: Where between an aspect ratio of 3/4 (0) and 4/3 (1), in logarithm.

    Returns:
        Width and height in pixels, at least one each.
    """
    share = scale[0] + (scale[1] - scale[0]) * area
    ratio = math.exp(math.log(3 / 4) * (1 - 2 * aspect))  # width over height
    pixels = share * size[0] * size[1]
    width, height = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
    return max(1.0, min(size[0], width)), max(1.0, min(size[1], height))
