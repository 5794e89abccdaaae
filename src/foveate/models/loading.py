"""One line for the many ways in which other libraries fail to load a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_line_errors(name: str | Path) -> Iterator[None]:
    """Turn whatever goes wrong inside into a ValueError of one line.

    Args:
        name: What is being loaded, for the message.

    Yields:
        Nothing.

    Raises:
        ValueError: For any error inside: no network, no such repository, broken files.
    """
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"model '{name}' could not be loaded: {lines[0]}") from None
