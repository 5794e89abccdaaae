"""Labelled scenes: objects pasted onto photographs; an index always gives the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from foveate.data.cutouts import Cutouts, load_cutouts, load_photographs, opaque, scaled

MAX_OBJECTS = 254  # the mask of instances has eight bits, and 0 is the background


@dataclass(frozen=True)
class Ranges:
    """What is drawn uniformly for a scene, from the first number to the second.

    Attributes:
        objects: How many are pasted.
        scale: Longest side of an object, as a share of the image's side.
        crop: Side of the square cut out of the photograph, as a share of its shorter side.
        gamma: Exponent of the pixel values, in logarithm; one for the photograph, one for
            each object.
        gain: Factor of each channel's pixel values, likewise.

    Raises:
        ValueError: If a range is empty or not within its limits.
    """

    objects: tuple[int, int] = (1, 4)
    scale: tuple[float, float] = (0.2, 0.6)
    crop: tuple[float, float] = (0.6, 1.0)
    gamma: tuple[float, float] = (0.7, 1.4)
    gain: tuple[float, float] = (0.85, 1.15)

    def __post_init__(self) -> None:
        """Check the numbers."""
        tops = {"objects": MAX_OBJECTS, "scale": 1, "crop": 1, "gamma": 10, "gain": 10}
        for name, top in tops.items():
            low, high = getattr(self, name)
            if not 0 < low <= high <= top:
                raise ValueError(
                    f"{name} must be two numbers within (0, {top}]; got {(low, high)}."
                )


@dataclass(frozen=True)
class Scene:
    """An image and what is true of it.

    Attributes:
        picture: The image in mode ``RGB``.
        instances: ``(H, W)``, uint8: 0 on the photograph, i + 1 where object i is seen.
        classes: Class of each object, ``(n,)``, int64, from 0; back to front.
        visible: Seen share of each object's pixels, ``(n,)``, float64, in (0, 1].
    """

    picture: Image.Image
    instances: Tensor
    classes: Tensor
    visible: Tensor

    @property
    def masks(self) -> Tensor:
        """Pixels where each object is seen, ``(n, H, W)``, bool; they are disjoint."""
        return self.instances == torch.arange(1, len(self.classes) + 1)[:, None, None]

    @property
    def areas(self) -> Tensor:
        """Seen pixels of each object, ``(n,)``, int64, at least one."""
        counts = torch.bincount(self.instances.flatten(), minlength=len(self.classes) + 1)
        return counts[1:]

    @property
    def boxes(self) -> Tensor:
        """Tight boxes of the masks, ``(n, 4)``, float64.

        Left, top, right, bottom at the edges of pixels, so that a box of one pixel is one
        wide.
        """
        masks = self.masks
        (left, right), (top, bottom) = (_ends(masks.any(dim=dim)) for dim in (1, 2))
        return torch.stack([left, top, right, bottom], dim=1).double()

    @property
    def semantic(self) -> Tensor:
        """``(H, W)``, int64: 0 on the photograph, c + 1 where an object of class c is."""
        table = torch.cat([torch.zeros(1, dtype=torch.int64), self.classes + 1])
        return table[self.instances.long()]

    @property
    def label(self) -> int:
        """Class of the object with the most seen pixels; of equals, the one behind."""
        return int(self.classes[self.areas.argmax()])


@dataclass(frozen=True)
class Composites:
    """Scenes, deterministic in the seed and the index.

    A square is cut out of a photograph and resized. Then objects are pasted, back to front:
    a uniform class, a uniform object of it, a uniform scale, mirrored or not; gamma and
    gains are drawn for the photograph and for each object. The frontmost object lies inside
    the image, so a scene has at least one object; the centres of all others are uniform in
    the image, so they may be cut off at its border and covered. Objects of which nothing is
    seen are left out. A pixel belongs to the frontmost object whose alpha is at least
    128 of 255 there.

    Attributes:
        cutouts: Objects.
        photographs: Backgrounds.
        num: Scenes.
        size: Side of the images in pixels.
        seed: A longer list begins with a shorter one of the same seed.
        ranges: What is drawn.

    Raises:
        ValueError: If there is no photograph or scene, the size is not at least 8, or the
            seed is negative.
    """

    cutouts: Cutouts
    photographs: Sequence[Image.Image]
    num: int
    size: int = 224
    seed: int = 0
    ranges: Ranges = Ranges()

    def __post_init__(self) -> None:
        """Check the numbers."""
        found = {"photographs": len(self.photographs), "num": self.num, "size": self.size}
        for name, least in (("photographs", 1), ("num", 1), ("size", 8)):
            if found[name] < least:
                raise ValueError(f"{name} must be at least {least}; got {found[name]}.")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0; got {self.seed}.")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.cutouts.classes

    def __len__(self) -> int:
        """Scenes."""
        return self.num

    def __getitem__(self, index: int) -> Scene:
        """Draw scene ``index``.

        Args:
            index: From 0 to below the number of scenes.

        Returns:
            The scene.

        Raises:
            IndexError: If there is no such scene.
        """
        if not 0 <= index < self.num:
            raise IndexError(f"index must be from 0 to {self.num - 1}; got {index}.")
        random = np.random.default_rng((self.seed, index))
        picture = self._background(random)
        instances = Image.new("L", picture.size)
        num = int(random.integers(*self.ranges.objects, endpoint=True))
        classes = random.integers(len(self.classes), size=num)
        areas = [
            self._paste(picture, instances, int(classes[i]), i + 1, num, random)
            for i in range(num)
        ]
        return _seen(picture, np.array(instances), classes, np.array(areas))

    def _background(self, random: np.random.Generator) -> Image.Image:
        photograph = self.photographs[int(random.integers(len(self.photographs)))]
        side = random.uniform(*self.ranges.crop) * min(photograph.size)
        x, y = (random.uniform(0, length - side) for length in photograph.size)
        square = photograph.resize(
            (self.size, self.size), Image.Resampling.BICUBIC, box=(x, y, x + side, y + side)
        )
        lit = square.point(self._lighting(random))
        return ImageOps.mirror(lit) if random.random() < 0.5 else lit

    def _paste(
        self,
        picture: Image.Image,
        instances: Image.Image,
        class_index: int,
        number: int,
        last: int,
        random: np.random.Generator,
    ) -> int:
        """Paste one object, and return the pixels it has, seen or not."""
        choice = self.cutouts.by_class[class_index]
        drawn = choice[random.integers(len(choice))].picture
        longest = max(1, round(random.uniform(*self.ranges.scale) * self.size))
        sized = scaled(drawn, longest, max(drawn.size))
        shown = ImageOps.mirror(sized) if random.random() < 0.5 else sized
        place = self._place(shown.size, number == last, random)
        lit = shown.point([*self._lighting(random), *range(256)])
        mask = opaque(shown)
        picture.paste(lit, place, lit)
        instances.paste(number, place, mask)
        return mask.histogram()[255]

    def _place(
        self, size: tuple[int, int], is_front: bool, random: np.random.Generator
    ) -> tuple[int, int]:
        """Left and top of an object of this width and height, in pixels."""
        if is_front:
            left, top = (random.integers(self.size - n, endpoint=True) for n in size)
        else:
            left, top = (random.integers(self.size) - n // 2 for n in size)
        return int(left), int(top)

    def _lighting(self, random: np.random.Generator) -> list[int]:
        """Table of 3 x 256 values: 255 * gain * (v / 255) ** gamma, at most 255."""
        gamma = _log_uniform(random, self.ranges.gamma)
        ramp = 255 * (np.arange(256) / 255) ** gamma
        gains = [_log_uniform(random, self.ranges.gain) for _ in range(3)]
        return np.rint(np.outer(gains, ramp)).clip(0, 255).astype(int).ravel().tolist()


def open_composites(
    cutouts: str | Path,
    photos: str | Path,
    num: int,
    size: int = 224,
    seed: int = 0,
    ranges: Ranges | None = None,
) -> Composites:
    """Read objects and photographs, and make scenes of them.

    Args:
        cutouts: Folder of pictures with an alpha channel, one sub-folder a class.
        photos: Folder of photographs.
        num: Scenes.
        size: Side of the images in pixels.
        seed: The same seed gives the same scenes.
        ranges: What is drawn; the defaults if None.

    Returns:
        The scenes. Everything is decoded once and kept in memory at the resolution it is
        used at: per photograph about ``10 * size ** 2`` bytes.

    Raises:
        ValueError: If a number is out of range, or a folder does not hold what it should.
    """
    ranges = ranges or Ranges()
    if size < 8:
        raise ValueError(f"size must be at least 8; got {size}.")
    smallest, largest = (max(1, round(share * size)) for share in ranges.scale)
    objects = load_cutouts(cutouts, largest, smallest)
    backgrounds = load_photographs(photos, math.ceil(size / ranges.crop[0]))
    return Composites(objects, backgrounds, num, size, seed, ranges)


def _seen(
    picture: Image.Image, instances: np.ndarray, classes: np.ndarray, areas: np.ndarray
) -> Scene:
    """Leave out the objects of which nothing is seen, and number the others anew."""
    counts = np.bincount(instances.ravel(), minlength=len(classes) + 1)[1:]
    seen = counts > 0
    if not seen.any():
        raise ValueError(
            "cutouts must have an opaque pixel at every scale; got a scene without any."
        )
    number = np.zeros(len(classes) + 1, dtype=np.uint8)
    number[1:][seen] = np.arange(1, seen.sum() + 1)
    visible = counts[seen] / areas[seen]
    parts = (number[instances], classes[seen], visible)
    return Scene(picture, *(torch.from_numpy(part) for part in parts))


def _ends(hits: Tensor) -> tuple[Tensor, Tensor]:
    """First hit, and the one after the last, of each row of ``(n, length)``."""
    numbers = hits.to(torch.uint8)
    return numbers.argmax(dim=1), hits.shape[1] - numbers.flip(1).argmax(dim=1)


def _log_uniform(random: np.random.Generator, ends: tuple[float, float]) -> float:
    return math.exp(random.uniform(math.log(ends[0]), math.log(ends[1])))
