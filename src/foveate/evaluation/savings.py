"""What was saved: clock and memory of a full and a reduced model, side by side."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foveate.evaluation.cost import back_propagates
from foveate.reduction.plan import Plan

Seconds = Mapping[str, float]

LOW, HIGH = 0.1, 0.9  # quantiles of the ratios of single pairs


@dataclass(frozen=True)
class Conditions:
    """Under what conditions the clock ran.

    Attributes:
        device: Where.
        threads: Threads of one operator on a CPU.
        dtype: Precision.
        batch_size: Images of a call.
        image_size: Height and width in pixels.
        rounds: Pairs of a full and a reduced call.
        warmup: Pairs before them that do not count.
    """

    device: str
    threads: int
    dtype: str
    batch_size: int
    image_size: tuple[int, int]
    rounds: int
    warmup: int


@dataclass(frozen=True)
class Memory:
    """Bytes, as :func:`~foveate.evaluation.memory.peak_bytes` finds them.

    Attributes:
        held: Weights, buffers and images, which both models share.
        full: Most that a call of the full model holds beyond them.
        reduced: The same of the reduced model.
    """

    held: int
    full: int
    reduced: int

    @property
    def ratio(self) -> float:
        """Peak of the full model over that of the reduced, with what both hold."""
        return (self.held + self.full) / (self.held + self.reduced)


@dataclass(frozen=True)
class Benchmark:
    """Clock and memory of a plan. All ratios are full over reduced: above 1 is a saving.

    Attributes:
        model: Name of the model.
        plan: What was measured.
        conditions: Under what conditions.
        mac_ratio: Multiply-adds of the blocks, full over reduced.
        full: Seconds of each round of the full model: ``model`` is the whole call,
            ``encoder`` the blocks in it.
        reduced: The same of the reduced model, and ``steps`` within ``encoder``.
        memory: Bytes; None on a device that keeps no record.
    """

    model: str
    plan: Plan
    conditions: Conditions
    mac_ratio: float
    full: tuple[Seconds, ...]
    reduced: tuple[Seconds, ...]
    memory: Memory | None

    def speedup(self, part: str = "encoder") -> dict[str, float]:
        """Ratio of the seconds of each pair: its median, 10 % and 90 % quantile."""
        ratios = _values(self.full, part) / _values(self.reduced, part)
        low, median, high = np.quantile(ratios, (LOW, 0.5, HIGH)).tolist()
        return {"median": median, "low": low, "high": high}

    @property
    def realised(self) -> float:
        """Share of the saved multiply-adds that the clock confirms: speedup / MAC ratio."""
        return self.speedup()["median"] / self.mac_ratio

    @property
    def overhead_share(self) -> float:
        """Median share of the reduced blocks' time that the steps take.

        Scoring, matching, gathering and recovery, and whatever a method computes in them:
        of methods that back-propagate the forward and backward passes of that too.
        """
        steps, encoder = (_values(self.reduced, part) for part in ("steps", "encoder"))
        return float(np.median(steps / encoder))

    @property
    def pays(self) -> bool:
        """Whether the blocks are faster in at least 90 % of the pairs."""
        return self.speedup()["low"] >= 1

    @property
    def verdict(self) -> str:
        """One line on whether reduction pays here."""
        word = "pays" if self.pays else "does not pay"
        height, width = self.conditions.image_size
        ratio = "{median:.2f} ({low:.2f} to {high:.2f})".format_map(self.speedup())
        return (
            f"Reduction {word} at batch size {self.conditions.batch_size} and {height} x "
            f"{width} pixels: the blocks run {ratio} times as fast as the full model's."
        )

    def record(self) -> dict[str, Any]:
        """Everything as JSON.

        Returns:
            Lists, texts and finite numbers. ``quantiles`` says what ``low`` and ``high``
            are; ``peak_memory`` and its ratio are null on a device that keeps no record.
        """
        return {
            "model": self.model,
            "task": self.plan.task,
            "method": self.plan.method,
            "back_propagates": back_propagates(self.plan),
            **asdict(self.conditions),
            "image_size": list(self.conditions.image_size),
            "speedup": self.speedup(),
            "model_speedup": self.speedup("model"),
            "quantiles": {"low": LOW, "high": HIGH},
            "mac_ratio": self.mac_ratio,
            "realised": self.realised,
            "overhead_share": self.overhead_share,
            "peak_memory_ratio": self.memory.ratio if self.memory else None,
            "peak_memory": asdict(self.memory) if self.memory else None,
            "images_per_second": {
                name: self.conditions.batch_size
                / float(np.median(_values(rounds, "model")))
                for name, rounds in (("full", self.full), ("reduced", self.reduced))
            },
            "pays": self.pays,
            "verdict": self.verdict,
            "seconds": {
                "full": [dict(seconds) for seconds in self.full],
                "reduced": [dict(seconds) for seconds in self.reduced],
            },
            "plan": self.plan.record(),
        }


def _values(rounds: tuple[Seconds, ...], part: str) -> np.ndarray:
    return np.array([seconds[part] for seconds in rounds])
