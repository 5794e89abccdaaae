"""A task's score on labelled data: one model, or the full and the reduced side by side."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.data.labelled import Example, LabelledImages
from foveate.evaluation.benchmark import Benchmark, benchmark
from foveate.evaluation.metrics import Estimate, Statistics, intervals, paired_intervals
from foveate.evaluation.schedule import check_plan
from foveate.evaluation.scorers import Scorer, find_scorer
from foveate.models import Model
from foveate.reduction.plan import Plan
from foveate.reduction.reduced_vit import reduce
from foveate.tasks import LabelledTask
from foveate.tokens import Layout

__all__ = [
    "Batch",
    "Evaluation",
    "Trial",
    "collect",
    "evaluate",
    "labelled_task",
    "open_trial",
    "pack",
]

Progress = Callable[[int, int], None]
Call = Callable[[Tensor], Tensor]
Scores = Mapping[str, Mapping[str, Estimate]]


@dataclass(frozen=True)
class Evaluation:
    """Scores of a task on a data set.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        data: The data set.
        num_images: Images.
        scores: For ``full`` and, with a plan, ``reduced`` and ``difference`` (reduced minus
            full, paired), each score with its interval.
        clock: What the plan saves on this machine; None without a plan.
    """

    model: str
    task: str
    data: str
    num_images: int
    scores: Scores
    clock: Benchmark | None = None

    def record(self) -> dict[str, Any]:
        """Everything as JSON; without a plan there is nothing but the full model's."""
        record: dict[str, Any] = {
            "model": self.model,
            "task": self.task,
            "data": self.data,
            "num_images": self.num_images,
            "scores": {
                side: {name: estimate.record() for name, estimate in found.items()}
                for side, found in self.scores.items()
            },
        }
        if self.clock is None:
            return record
        timed = self.clock.record()
        shared = (
            "speedup",
            "model_speedup",
            "mac_ratio",
            "realised",
            "overhead_share",
            "peak_memory_ratio",
            "images_per_second",
            "plan",
        )
        return {**record, **{name: timed[name] for name in shared}, "benchmark": timed}


class Trial(NamedTuple):
    """What a data set is scored with.

    Attributes:
        task: The task.
        scorer: Its protocol.
        layout: Gives the geometry of a batch of images.
    """

    task: LabelledTask
    scorer: Scorer
    layout: Callable[[Tensor], Layout]


def labelled_task(model: Model, name: str) -> LabelledTask:
    """Look up a task that labels can be held against.

    Args:
        model: The model.
        name: The task.

    Returns:
        The task.

    Raises:
        ValueError: If there is none of that name, or labels say nothing of it.
    """
    task = model.task(name)
    if not isinstance(task, LabelledTask):
        known = [n for n, t in model.tasks.items() if isinstance(t, LabelledTask)]
        raise ValueError(
            f"task must be one that labels exist for ({', '.join(known) or 'none'} of "
            f"{model.name}; foveate train heads adds some); got '{name}'."
        )
    return task


def open_trial(model: Model, task: str, data: LabelledImages) -> Trial:
    """Protocol of a model's task on a data set.

    Args:
        model: The model.
        task: Name of its task.
        data: The data set.

    Returns:
        What to score with.

    Raises:
        ValueError: If the model has no such task, or the data no such labels.
    """
    decoder = labelled_task(model, task)
    scorer = find_scorer(decoder, model.transform, data, model.backbone.patch_size)
    return Trial(decoder, scorer, lambda images: model.backbone.embed(images[:1]).layout)


@torch.no_grad()
def evaluate(
    model: Model,
    data: LabelledImages,
    task: str,
    plan: Plan | None = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Score a model on labelled data, in full and by a plan.

    Both models see the same batches. Intervals are percentile bootstraps over images, at
    95 %, paired for the difference. With a plan, clock and memory are measured afterwards
    as :func:`~foveate.evaluation.benchmark.benchmark` does.

    Args:
        model: The model.
        data: The data set.
        task: Name of a task with labels.
        plan: What to do to the tokens.
        batch_size: Images at a time.
        seed: Of the resamples.
        progress: Told how many images are done, and of how many.

    Returns:
        Scores, and what was saved.

    Raises:
        ValueError: If the task, the labels, the plan and the model do not fit together.
    """
    trial = open_trial(model, task, data)
    calls: list[Call] = [lambda images: model(images, task)]
    if plan is not None:
        check_plan(plan, task, plan.grid)
        calls.append(reduce(model, plan))
    device = next(model.parameters())
    found = collect(calls, trial, data, batch_size, device, progress)
    if plan is None:
        scores: Scores = {"full": intervals(found[0], seed)}
        return Evaluation(model.name, task, data.name, len(data), scores)
    pair = paired_intervals(found[0], found[1], seed)
    images = trial.scorer.inputs(data[0].picture)[:1].to(device)
    clock = benchmark(model, plan, images, batch_size)
    return Evaluation(model.name, task, data.name, len(data), pair, clock)


def collect(
    calls: Sequence[Call],
    trial: Trial,
    data: LabelledImages,
    batch_size: int,
    like: Tensor,
    progress: Progress | None = None,
) -> list[Statistics]:
    """Run models over a data set, each on the same batches.

    Args:
        calls: Images to raw outputs of the task.
        trial: What to score with.
        data: The data set.
        batch_size: Images at a time.
        like: A tensor of the precision and on the device of the models.
        progress: Told how many images are done, and of how many.

    Returns:
        What is kept of each image, for every model.
    """
    parts: list[list[Any]] = [[] for _ in calls]
    done = 0
    for batch in pack(_inputs(data, trial.scorer), batch_size):
        images = batch.images.to(like)
        layout = trial.layout(images)
        for call, kept in zip(calls, parts, strict=True):
            predicted = trial.task.predict(call(images), layout)
            for example, rows in batch.examples:
                outputs = [predicted[row] for row in rows]
                kept.append(trial.scorer.measure(outputs, example))
        done += len(batch.examples)
        if progress:
            progress(done, len(data))
    return [trial.scorer.gather(kept) for kept in parts]


@dataclass
class Batch:
    """Inputs of some pictures, all of one shape, and which rows are whose.

    Attributes:
        inputs: Of each picture, ``(W, 3, h, w)``.
        examples: Each picture with its rows.
    """

    inputs: list[Tensor] = field(default_factory=list)
    examples: list[tuple[Example, range]] = field(default_factory=list)

    @property
    def images(self) -> Tensor:
        """All inputs, ``(B, 3, h, w)``."""
        return torch.cat(self.inputs)

    @property
    def count(self) -> int:
        """Inputs, B."""
        return sum(len(x) for x in self.inputs)

    def add(self, example: Example, inputs: Tensor) -> None:
        """Add a picture."""
        self.examples.append((example, range(self.count, self.count + len(inputs))))
        self.inputs.append(inputs)


def pack(pictures: Iterable[tuple[Example, Tensor]], batch_size: int) -> Iterator[Batch]:
    """Put pictures together in their order, cut where the shape changes or a batch is full.

    Args:
        pictures: Examples, each with its inputs.
        batch_size: Most inputs of a batch, unless a single picture has more.

    Yields:
        Batches of at least one picture.
    """
    batch = Batch()
    for example, inputs in pictures:
        fits = not batch.inputs or batch.inputs[0].shape[1:] == inputs.shape[1:]
        if batch.inputs and (not fits or batch.count + len(inputs) > batch_size):
            yield batch
            batch = Batch()
        batch.add(example, inputs)
    if batch.inputs:
        yield batch


def _inputs(data: LabelledImages, scorer: Scorer) -> Iterator[tuple[Example, Tensor]]:
    for index in range(len(data)):
        example = data[index]
        yield example, scorer.inputs(example.picture)
