"""Seconds of one call, by its parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

__all__ = ["Clock"]


class Clock:
    """Adds up what the spans of one call take.

    On a CPU it reads the process's clock; elsewhere it leaves events in the stream, so that
    nothing waits in between, and waits once at the end.

    Args:
        device: Where the call computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what runs inside, under a name; spans of one name add up."""
        start = self._mark()
        yield
        self.marks.append((name, start, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Seconds by name, once all has been computed."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        total: dict[str, float] = {}
        for name, start, end in self.marks:
            total[name] = total.get(name, 0.0) + self._between(start, end)
        return total

    def _mark(self) -> Any:  # noqa: ANN401 - a number or an event
        if self.device.type == "cpu":
            return perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def _between(self, start: Any, end: Any) -> float:  # noqa: ANN401
        if self.device.type == "cpu":
            return end - start
        return start.elapsed_time(end) / 1000  # from milliseconds
