"""A folder of pictures, and how a picture becomes a model's input."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageMath, ImageOps
from torch import Tensor, stack, tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
MIN_SIDE = 8
MAX_ASPECT = 32


@dataclass(frozen=True)
class ImageTransform:
    """Resize the shorter side, crop the centre, normalise.

    Attributes:
        size: Side of the square input in pixels.
        mean: Mean of each channel, of values in [0, 1].
        std: Standard deviation of each channel.
    """

    size: int
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __call__(self, picture: Image.Image) -> Tensor:
        """Prepare one picture, ``(3, size, size)``; one of that size passes unresampled."""
        from torchvision.transforms.v2 import functional

        image = functional.pil_to_tensor(to_rgb(picture)).float() / 255
        bicubic = functional.InterpolationMode.BICUBIC
        image = functional.resize(image, [self.size], interpolation=bicubic, antialias=True)
        image = functional.center_crop(image.clamp(0, 1), [self.size, self.size])
        return self.normalise(image)

    def normalise(self, image: Tensor) -> Tensor:
        """Shift and scale the channels of values in [0, 1], ``(3, H, W)``."""
        mean, std = (tensor(v).view(3, 1, 1) for v in (self.mean, self.std))
        return (image - mean) / std

    def whole(self, picture: Image.Image, size: tuple[int, int]) -> Tensor:
        """Prepare all of a picture.

        Args:
            picture: The picture.
            size: Height and width to resize it to (bicubic, antialias).

        Returns:
            ``(3, *size)``; a picture of that size passes unresampled.
        """
        from torchvision.transforms.v2 import functional

        image = functional.pil_to_tensor(to_rgb(picture)).float() / 255
        bicubic = functional.InterpolationMode.BICUBIC
        image = functional.resize(image, [*size], interpolation=bicubic, antialias=True)
        return self.normalise(image.clamp(0, 1))


class Skipped(NamedTuple):
    """A file that was left out, and why."""

    file: Path
    reason: str


class LoadedImages(NamedTuple):
    """Pictures that could be read, ``(B, 3, H, W)``, their files, and what was left out."""

    images: Tensor
    files: list[Path]
    skipped: list[Skipped]


def to_rgb(picture: Image.Image) -> Image.Image:
    """Turn a picture of any mode into eight-bit RGB, upright.

    The EXIF orientation is applied; transparency is laid over white; sixteen-bit grey is
    scaled to eight bits (v / 257, rounded) and not cut off; CMYK is converted by Pillow's
    formula, without colour profiles.

    Args:
        picture: Any picture; of an animation, the current frame.

    Returns:
        The picture in mode ``RGB``.

    Raises:
        ValueError: If its pixels are 32-bit numbers, whose white no standard defines.
    """
    upright = ImageOps.exif_transpose(picture)
    if upright.mode in {"I", "F"}:
        raise ValueError(
            f"pixels must have at most 16 bits; got mode {upright.mode} (32 bits)"
        )
    if upright.mode.startswith("I;16"):
        deep = ImageMath.lambda_eval(
            lambda args: args["convert"]((args["v"] * 2 + 257) / 514, "L"),
            v=upright.convert("I"),
        )
        return deep.convert("RGB")
    if upright.has_transparency_data:
        colours = upright.convert("RGBA")
        white = Image.new("RGBA", colours.size, "white")
        return Image.alpha_composite(white, colours).convert("RGB")
    return upright.convert("RGB")


def find_images(path: str | Path) -> list[Path]:
    """List pictures: one file, or all in a folder and the folders below it.

    Args:
        path: A file of any name, or a folder, in which names decide (``jpg jpeg png webp
            bmp tif tiff gif``, in either case).

    Returns:
        Files in sorted order, at least one.

    Raises:
        ValueError: If there is no such path, or the folder holds no picture.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"images must be a picture or a folder of pictures; got no such path '{path}'."
        )
    found = sorted(
        f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file()
    )
    if not found:
        kinds = " ".join(s.removeprefix(".") for s in SUFFIXES)
        raise ValueError(
            f"images must be a folder with pictures ({kinds}); got none in '{path}'."
        )
    return found


def read_picture(file: Path) -> Image.Image:
    """Read one file completely, upright and in RGB.

    Args:
        file: The picture.

    Returns:
        The picture in mode ``RGB``; of an animation, the first frame.

    Raises:
        ValueError: If it cannot be decoded, if a side is shorter than 8 pixels, or if it is
            more than 32 times as long as wide, so that the central square says nothing.
    """
    try:
        with Image.open(file) as picture:
            rgb = to_rgb(picture)
    except Exception as error:  # Pillow's parsers raise whatever broken data makes them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"cannot be read: {reason}") from error
    short, long = sorted(rgb.size)
    if short < MIN_SIDE:
        raise ValueError(
            f"sides must be at least {MIN_SIDE} pixels; got {rgb.width} x {rgb.height}"
        )
    if long > MAX_ASPECT * short:
        raise ValueError(
            f"sides must be at most 1 : {MAX_ASPECT}; got {rgb.width} x {rgb.height} pixels"
        )
    return rgb


def read_images(
    files: Iterable[Path], transform: ImageTransform
) -> Iterator[tuple[Path, Tensor | Skipped]]:
    """Read pictures one at a time, so that a large folder need not fit into memory.

    Args:
        files: The pictures.
        transform: Turns a picture into the model's input.

    Yields:
        The file, and the image ``(3, H, W)``, or why it was left out.
    """
    for file in files:
        try:
            yield file, transform(read_picture(file))
        except ValueError as error:
            yield file, Skipped(file, str(error))


def load_images(files: Iterable[Path], transform: ImageTransform) -> LoadedImages:
    """Read pictures into one batch; broken files are left out, with the reason.

    Args:
        files: The pictures.
        transform: Turns a picture into the model's input.

    Returns:
        The images, their files in the given order, and the files left out.

    Raises:
        ValueError: If no picture could be read.
    """
    images, kept, skipped = [], [], []
    for file, image in read_images(files, transform):
        if isinstance(image, Skipped):
            skipped.append(image)
        else:
            images.append(image)
            kept.append(file)
    if not images:
        first = f"; the first: '{skipped[0].file}' {skipped[0].reason}" if skipped else ""
        raise ValueError(
            f"images must hold a usable picture; got {len(skipped)} unusable{first}."
        )
    return LoadedImages(stack(images), kept, skipped)
