"""What a plan saves on this machine: clock and memory, full and reduced side by side."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from foveate.evaluation.clock import Clock
from foveate.evaluation.cost import plan_macs
from foveate.evaluation.memory import held_bytes, peak_bytes
from foveate.evaluation.savings import Benchmark, Conditions, Memory, Seconds
from foveate.evaluation.schedule import check_plan
from foveate.evaluation.timed import TimedCall
from foveate.models import Model
from foveate.reduction.plan import Plan

__all__ = ["Benchmark", "Conditions", "Memory", "benchmark", "noise"]

Progress = Callable[[int, int], None]


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
