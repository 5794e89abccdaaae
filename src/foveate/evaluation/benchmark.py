"""What a plan saves on this machine: clock and memory, full and reduced side by side."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foveate.evaluation.clock import Clock
from foveate.evaluation.cost import back_propagates, plan_macs
from foveate.evaluation.memory import held_bytes, peak_bytes
from foveate.evaluation.schedule import check_plan
from foveate.evaluation.timed import TimedCall
from foveate.models import Model
from foveate.reduction.plan import Plan

__all__ = ["Benchmark", "Conditions", "Memory", "benchmark", "noise"]

Progress = Callable[[int, int], None]
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


@torch.no_grad()
def benchmark(
    model: Model,
    plan: Plan,
    images: Tensor,
    batch_size: int = 8,
    rounds: int = 20,
    warmup: int = 3,
    progress: Progress | None = None,
) -> Benchmark:
    """Run a model in full and by a plan, in turn, and compare clock and memory.

    Every round is one call of each, in changing order, in this process, so that what slows
    the machine down slows both. Beside the whole call, the blocks are timed by themselves,
    since only they are reduced: ``speedup`` is theirs and can be held against the ratio of
    their multiply-adds, ``model_speedup`` has embedding and decoder in it. The steps are
    timed inside the same calls.

    Cost: ``rounds + warmup + 1`` calls of each model; the last is for memory.

    Args:
        model: The model.
        plan: What to do.
        images: ``(n, 3, H, W)``; the first ``batch_size`` of them are used, over again if
            there are fewer. Speed does not depend on what they show.
        batch_size: Images of a call.
        rounds: Pairs of calls that count, at least 2.
        warmup: Pairs before them.
        progress: Told how much is done, and how much there is.

    Returns:
        Seconds, bytes and what follows from them.

    Raises:
        ValueError: If the plan does not fit the model or the images, its method cannot do
            it, or a number is out of range.
    """
    if batch_size < 1 or rounds < 2 or warmup < 0 or not len(images):
        raise ValueError(
            "images and batch_size must be at least 1, rounds 2 and warmup 0; got "
            f"{len(images)}, {batch_size}, {rounds} and {warmup}."
        )
    layout = model.backbone.embed(images[:1]).layout
    check_plan(plan, plan.task, layout.grid)
    calls = (TimedCall(model, plan.task), TimedCall.by_plan(model, plan))
    batch = images[torch.arange(batch_size) % len(images)]
    macs = plan_macs(model, plan, layout)
    return time_pair(calls, plan, macs, batch, rounds, warmup, progress)


def time_pair(
    calls: tuple[TimedCall, TimedCall],
    plan: Plan,
    macs: tuple[int, int],
    batch: Tensor,
    rounds: int = 20,
    warmup: int = 3,
    progress: Progress | None = None,
) -> Benchmark:
    """Run two models in turn, as :func:`benchmark` does.

    Args:
        calls: The full and the reduced model.
        plan: What the reduced one does.
        macs: Multiply-adds of their blocks for one image.
        batch: Images, ``(B, 3, H, W)``.
        rounds: Pairs of calls that count.
        warmup: Pairs before them.
        progress: Told how much is done, and how much there is.

    Returns:
        Seconds, bytes and what follows from them.
    """
    pairs = []
    for done in range(warmup + rounds):
        pairs.append(_pair(*calls, batch, full_first=bool(done % 2)))
        if progress:
            progress(done + 1, warmup + rounds)
    conditions = Conditions(
        str(batch.device),
        torch.get_num_threads(),
        str(batch.dtype).removeprefix("torch."),
        len(batch),
        (batch.shape[-2], batch.shape[-1]),
        rounds,
        warmup,
    )
    full, reduced = (tuple(seconds) for seconds in zip(*pairs[warmup:], strict=True))
    peaks = [
        peak_bytes(partial(call, batch, Clock(batch.device)), batch.device)
        for call in calls
    ]
    model = calls[0].model
    memory = _memory(held_bytes(model) + batch.nbytes, *peaks)
    ratio = macs[0] / macs[1]
    return Benchmark(model.name, plan, conditions, ratio, full, reduced, memory)


def noise(
    model: Model, batch_size: int, grid: tuple[int, int] | None = None, seed: int = 0
) -> Tensor:
    """Images of normal noise, where no pictures are at hand: speed does not depend on them.

    Args:
        model: The model they are for.
        batch_size: How many.
        grid: Rows and columns of patches; those of the model's own input if None.
        seed: The same seed gives the same images.

    Returns:
        ``(batch_size, 3, H, W)``, of the model's precision and on its device.
    """
    size = model.transform.size
    height, width = size, size
    if grid is not None:
        high, wide = model.backbone.patch_size
        height, width = grid[0] * high, grid[1] * wide
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch_size, 3, height, width, generator=generator)
    return images.to(next(model.parameters()))


def _pair(
    full: TimedCall, reduced: TimedCall, images: Tensor, *, full_first: bool
) -> tuple[Seconds, Seconds]:
    """Time both models once; full, reduced."""

    def time(call: TimedCall) -> Seconds:
        clock = Clock(images.device)
        call(images, clock)
        return {"steps": 0.0, **clock.seconds()}

    if full_first:
        return time(full), time(reduced)
    second = time(reduced)
    return time(full), second


def _memory(held: int, full: int | None, reduced: int | None) -> Memory | None:
    return None if full is None or reduced is None else Memory(held, full, reduced)


def _values(rounds: tuple[Seconds, ...], part: str) -> np.ndarray:
    return np.array([seconds[part] for seconds in rounds])
