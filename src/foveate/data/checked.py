"""Reading labels: what is wrong is named, with its file and its field."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from foveate.data.folder import SUFFIXES, read_picture


def pictures_in(folder: Path) -> list[Path]:
    """List the pictures that lie in a folder, not in folders below it.

    Args:
        folder: The folder.

    Returns:
        Files, sorted by name, at least one.

    Raises:
        ValueError: If there is no such folder, or it holds no picture.
    """
    if not folder.is_dir():
        raise ValueError(f"data must hold the folder '{folder}'; there is none.")
    found = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES)
    if not found:
        raise ValueError(f"data must hold pictures in '{folder}'; it holds none.")
    return found


def must_exist(files: Iterable[Path], why: str) -> None:
    """Refuse a data set in which files are missing.

    Args:
        files: What there should be.
        why: Who asks for them, for the message.

    Raises:
        ValueError: If one is missing; the message counts them and names the first.
    """
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"data must hold every file that {why}; {len(missing)} missing, the first "
            f"'{missing[0]}'."
        )


def picture_in(file: Path) -> Image.Image:
    """Read a picture of a data set, in RGB.

    Args:
        file: The picture.

    Returns:
        The picture.

    Raises:
        ValueError: If it cannot be read.
    """
    try:
        return read_picture(file)
    except ValueError as error:
        raise ValueError(f"data must be readable; '{file}' {error}.") from error


def labels_in(file: Path, modes: tuple[str, ...], size: tuple[int, int]) -> Tensor:
    """Read a map with one integer a pixel.

    Args:
        file: The map.
        modes: Pillow's modes that it may have; a palette's indices are the integers.
        size: Width and height that it must have.

    Returns:
        ``(H, W)``, int64.

    Raises:
        ValueError: If it cannot be read, or has another mode or size.
    """
    try:
        with Image.open(file) as picture:
            values, mode = np.array(picture), picture.mode
    except Exception as error:  # Pillow's parsers raise whatever broken data makes them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"data must be readable; '{file}': {reason}.") from error
    if mode not in modes:
        raise ValueError(f"'{file}' must have mode {' or '.join(modes)}; got {mode}.")
    if values.shape != size[::-1]:
        height, width = values.shape
        raise ValueError(
            f"'{file}' must be as large as its image, {size[0]} x {size[1]}; got "
            f"{width} x {height}."
        )
    return torch.from_numpy(values.astype(np.int64))


def json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        file: The file.

    Returns:
        The object.

    Raises:
        ValueError: If there is no such file, or it holds something else.
    """
    if not file.is_file():
        raise ValueError(f"data must hold the file '{file}'; there is none.")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{file}' must be JSON; {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"'{file}' must be a JSON object; got {type(found).__name__}.")
    return found


def field(record: Any, name: str, kind: Any, where: str) -> Any:  # noqa: ANN401 - JSON
    """Look a field of a JSON object up.

    Args:
        record: The object.
        name: The field.
        kind: Type, or a union of types, that it must have.
        where: File and place in it, for the message.

    Returns:
        Its value.

    Raises:
        ValueError: If the object has no such field, or it has another type.
    """
    if not isinstance(record, Mapping) or name not in record:
        raise ValueError(f"{where} must have the field '{name}'; it has none.")
    value = record[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = getattr(kind, "__name__", kind)
        raise ValueError(
            f"{where}: field '{name}' must be of type {wanted}; got {type(value).__name__}."
        )
    return value
