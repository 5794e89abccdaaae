"""What the commands under ``train`` write while they train."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foveate.training.loop import Training


def is_main_process() -> bool:
    """Whether this process, of those that accelerate has launched, writes and scores."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


class Log:
    """Follows a training: a line of JSON at every validation, and the progress bar.

    Args:
        file: Lines go there, after those of the run that this one continues.
        steps: Updates in all.
    """

    def __init__(self, file: Path, steps: int) -> None:
        self.file, self.steps = file, steps
        self.progress: Callable[[int, int], None] | None = None
        self.started = time.perf_counter()

    def __call__(self, now: "Training") -> None:
        """Note where training stands."""
        if not is_main_process():
            return
        seconds = time.perf_counter() - self.started
        line = {"step": now.step, "loss": now.losses[-1], "seconds": seconds}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        if self.progress is not None:
            self.progress(now.step, self.steps)
