"""What scenes are made of: objects cut out with an alpha matte, and photographs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps

from foveate.data.folder import find_images, read_picture

OPAQUE = 128  # a pixel belongs to an object if its alpha is at least this, of 255


class Cutout(NamedTuple):
    """One object: its pixels in mode ``RGBA``, without empty margins, and its file."""

    picture: Image.Image
    file: Path


@dataclass(frozen=True)
class Cutouts:
    """Objects by class.

    Attributes:
        classes: Names of the classes, sorted.
        by_class: The objects of each, at least one.
    """

    classes: tuple[str, ...]
    by_class: tuple[tuple[Cutout, ...], ...]


def load_cutouts(folder: str | Path, longest: int, smallest: int) -> Cutouts:
    """Read all objects, one sub-folder a class, and keep them at a working resolution.

    Args:
        folder: Holds sub-folders, whose names are the classes; hidden ones are left out.
        longest: Longer objects are shrunk to this many pixels (bicubic, antialias).
        smallest: Longest side at which each object must still have an opaque pixel.

    Returns:
        The objects. Memory: at most ``4 * longest ** 2`` bytes each.

    Raises:
        ValueError: If there is no such folder, it has no class, a class has no picture, or
            a picture cannot be read, has no alpha channel, or no opaque pixel.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"cutouts must be a folder with a folder for each class; got '{folder}'."
        )
    classes = sorted(
        f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")
    )
    if not 0 < len(classes) < 255:  # a mask of classes has eight bits
        raise ValueError(
            f"cutouts must hold 1 to 254 folders, one a class; got {len(classes)} in "
            f"'{folder}'."
        )
    objects = (
        tuple(_read_cutout(file, longest, smallest) for file in find_images(each))
        for each in classes
    )
    return Cutouts(tuple(each.name for each in classes), tuple(objects))


def load_photographs(folder: str | Path, shortest: int) -> tuple[Image.Image, ...]:
    """Read photographs, and keep them at a working resolution.

    Args:
        folder: A picture, or a folder of pictures.
        shortest: Larger ones are shrunk until their shorter side has this many pixels.

    Returns:
        The pictures in mode ``RGB``, sorted by name. Memory: three bytes a pixel.

    Raises:
        ValueError: If there is none, or one cannot be read.
    """
    return tuple(_read_photograph(file, shortest) for file in find_images(folder))


def scaled(picture: Image.Image, side: int, reference: int) -> Image.Image:
    """Scale a picture by ``side / reference``, at least one pixel a side."""
    width, height = (max(1, round(n * side / reference)) for n in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def opaque(picture: Image.Image) -> Image.Image:
    """Pixels of an object in mode ``L``: 255 where it is opaque, 0 elsewhere."""
    return picture.getchannel("A").point(OPACITY)


OPACITY: Sequence[int] = [255 * (alpha >= OPAQUE) for alpha in range(256)]


def _read_cutout(file: Path, longest: int, smallest: int) -> Cutout:
    try:
        with Image.open(file) as picture:
            upright = ImageOps.exif_transpose(picture)
            has_alpha = upright.has_transparency_data
            colours = upright.convert("RGBA")
    except Exception as error:  # Pillow's parsers raise whatever broken data makes them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"cutouts must be readable; '{file}': {reason}.") from error
    if not has_alpha:
        raise ValueError(
            f"cutouts must have an alpha channel; '{file}' has mode {upright.mode}."
        )
    box = opaque(colours).getbbox()
    trimmed = colours.crop(box)
    if box is None or opaque(_at_most(trimmed, smallest)).getbbox() is None:
        raise ValueError(
            f"cutouts must have an opaque pixel (alpha >= {OPAQUE}) at {smallest} pixels; "
            f"'{file}' has none."
        )
    return Cutout(_at_most(trimmed, longest), file)


def _at_most(picture: Image.Image, longest: int) -> Image.Image:
    side = max(picture.size)
    return scaled(picture, longest, side) if side > longest else picture


def _read_photograph(file: Path, shortest: int) -> Image.Image:
    try:
        picture = read_picture(file)
    except ValueError as error:
        raise ValueError(f"photos must be readable; '{file}' {error}.") from error
    side = min(picture.size)
    return scaled(picture, shortest, side) if side > shortest else picture
