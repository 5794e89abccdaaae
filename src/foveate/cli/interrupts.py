"""Ctrl-C, which libraries turn into errors of their own while they are imported."""

from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT, default_int_handler, getsignal, signal
from types import FrameType

EXIT_CODE = 130


@contextmanager
def heeded_interrupts() -> Iterator[None]:
    """Once Ctrl-C has come, whatever error ends the block is a ``KeyboardInterrupt``.

    A process that ignores Ctrl-C, or handles it in another way, goes on doing so.

    Yields:
        Nothing.

    Raises:
        KeyboardInterrupt: If Ctrl-C has come.
    """
    if getsignal(SIGINT) is not default_int_handler:
        yield
        return
    has_come = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        default_int_handler(number, frame)

    signal(SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        if has_come:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal(SIGINT, default_int_handler)
