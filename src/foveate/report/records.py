"""Results on disk: written whole or not at all."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(file: Path, text: str) -> Path:
    """Write a text file so that a reader never sees half of it.

    Args:
        file: Where to; its folder is made if need be.
        text: All of it.

    Returns:
        The file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def write_record(file: Path, record: Mapping[str, Any]) -> Path:
    """Write a result as JSON.

    Args:
        file: Where to.
        record: Finite numbers, texts, lists and mappings.

    Returns:
        The file.

    Raises:
        ValueError: If a number is infinite or not a number, since JSON has neither.
    """
    try:
        text = json.dumps(record, indent=1, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{file.name} must hold finite numbers; {error}.") from error
    return write_whole(file, text + "\n")


def read_record(file: Path) -> dict[str, Any]:
    """Read a result.

    Args:
        file: JSON that a command wrote.

    Returns:
        The result.

    Raises:
        ValueError: If it is not a JSON object.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{file}' must be a JSON record; {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"'{file}' must be a JSON object; got {type(record).__name__}.")
    return record


def check_directory(directory: Path) -> Path:
    """Make sure before a long computation that its results can be written.

    Args:
        directory: A folder, or a place where one can be made.

    Returns:
        The folder, which need not exist yet.

    Raises:
        ValueError: If something else has that name, or nothing can be written there.
    """
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"out must be a folder that can be written to; got '{directory}'.")
    return directory
