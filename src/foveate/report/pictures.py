"""Photographs and values on the patch grid, as pictures inside a page."""

from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from foveate.data.folder import read_picture

LONG_SIDE = 420
# Dark to bright, even in lightness, readable without colour: eight stops of "inferno".
STOPS = np.array(
    [
        (0, 0, 4), (40, 11, 84), (101, 21, 110), (159, 42, 99),
        (212, 72, 66), (245, 125, 21), (250, 193, 39), (252, 255, 164),
    ],
    dtype=float,
)  # fmt: skip
OPACITY = (0.35, 0.85)


def find_photograph(file: str, directory: Path) -> Path | None:
    """Look a recorded file up: as recorded, then as seen from the folder of the record."""
    candidates = (Path(file), directory / file)
    return next((path for path in candidates if path.is_file()), None)


def photograph_uri(file: Path, grid: tuple[int, int]) -> str:
    """Embed what the model sees of a photograph.

    Args:
        file: The photograph.
        grid: Rows and columns of patches; the central part of that shape is kept.

    Returns:
        JPEG as a data URI, 420 pixels long; empty if the file cannot be read.
    """
    try:
        picture = read_picture(file)
    except ValueError:
        return ""
    central = crop_to(picture, grid)
    central.thumbnail((LONG_SIDE, LONG_SIDE))
    return _data_uri(central, "jpeg", quality=85)


def crop_to(picture: Image.Image, grid: tuple[int, int]) -> Image.Image:
    """Cut out the largest central part with the shape of a grid (rows, columns)."""
    rows, columns = grid
    width, height = picture.size
    scale = min(width / columns, height / rows)
    w, h = round(scale * columns), round(scale * rows)
    left, top = (width - w) // 2, (height - h) // 2
    return picture.crop((left, top, left + w, top + h))


def heat_map(values: Sequence[float], grid: tuple[int, int]) -> Image.Image:
    """Colour values from zero (dark, see-through) to their maximum (bright, opaque).

    Args:
        values: One nonnegative number per patch, row by row.
        grid: Rows and columns of patches.

    Returns:
        A picture of ``columns`` x ``rows`` pixels, mode RGBA.

    Raises:
        ValueError: If there is not one value per patch.
    """
    rows, columns = grid
    if len(values) != rows * columns:
        raise ValueError(f"values must be {rows} x {columns} numbers; got {len(values)}.")
    heat = np.reshape(np.asarray(values, dtype=float), (rows, columns))
    heat = heat / max(heat.max(), np.finfo(float).tiny)
    stops = np.linspace(0, 1, len(STOPS))
    channels = [np.interp(heat, stops, STOPS[:, c]) for c in range(3)]
    opacity = 255 * np.interp(heat, (0, 1), OPACITY)
    rgba = np.stack([*channels, opacity], axis=-1).round().astype(np.uint8)
    return Image.fromarray(rgba)


def heat_map_uri(values: Sequence[float], grid: tuple[int, int]) -> str:
    """Embed a heat-map as PNG, one pixel per patch."""
    return _data_uri(heat_map(values, grid), "png")


def _data_uri(picture: Image.Image, kind: str, **options: int) -> str:
    stream = BytesIO()
    picture.save(stream, format=kind, **options)
    return f"data:image/{kind};base64,{b64encode(stream.getvalue()).decode('ascii')}"
