"""What pruning at one block costs each task, by every criterion: the controlled probe."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foveate.data.labelled import Example, LabelledImages
from foveate.evaluation.agreement import ALPHAS, Drops, score_draws
from foveate.evaluation.cells import FULL, Cells
from foveate.evaluation.conditions import CRITERIA, Conditions, must_differ
from foveate.evaluation.evaluate import Batch, Trial, open_trial, pack
from foveate.evaluation.metrics import Estimate, estimate, once, resamples
from foveate.evaluation.scorers_detection import ObjectScorer
from foveate.evaluation.verdict import Verdict, judge
from foveate.models import Model

__all__ = ["CRITERIA", "MEASURES", "Conditions", "Probe", "ProbedTask", "probe"]

Progress = Callable[[int, int], None]

MEASURES = {
    "classification": "top1",
    "segmentation": "miou",
    "detection": "box_ap",
    "depth": "delta1",
}
"""Score that a drop is of, by kind of task; all are shares, and higher is better."""


@dataclass(frozen=True)
class ProbedTask:
    """A task as it is before any pruning.

    Attributes:
        name: Its name.
        kind: ``classification``, ``segmentation``, ``detection`` or ``depth``.
        score: Name of the score that drops are of.
        full: That score of the full model.
    """

    name: str
    kind: str
    score: str
    full: Estimate


@dataclass(frozen=True)
class Probe:
    """What pruning costs, by criterion, depth, task and endpoint of recovery.

    Attributes:
        model: Name of the model.
        data: Name of the data set.
        num_images: Images.
        conditions: How it was done.
        tasks: The tasks, unpruned.
        drops: What pruning costs them.
    """

    model: str
    data: str
    num_images: int
    conditions: Conditions
    tasks: tuple[ProbedTask, ...]
    drops: Drops

    def verdict(self) -> tuple[Verdict, Verdict, Verdict]:
        """Whether tasks rank differently, depth matters, and tasks disagree on recovery."""
        return judge(self.drops, self.drops.pairs())

    def record(self) -> dict[str, Any]:
        """Everything as JSON; what is undefined is None."""
        drops, pairs = self.drops, self.drops.pairs()
        recovers = dict(zip(drops.tasks, drops.recovers, strict=True))
        return {
            "model": self.model,
            "data": self.data,
            "num_images": self.num_images,
            **asdict(self.conditions),
            "criteria": list(drops.criteria),
            "depths": list(drops.depths),
            "alphas": list(ALPHAS),
            "level": 0.95,
            "tasks": [
                {
                    "name": task.name,
                    "kind": task.kind,
                    "score": task.score,
                    "recovers": recovers[task.name],
                    "full": task.full.record(),
                }
                for task in self.tasks
            ],
            "cells": drops.cells(),
            "between_tasks": drops.between_tasks(),
            "between_depths": drops.between_depths(),
            "pairs": [drops.record_pair(pair) for pair in pairs],
            "recovery": drops.recovery(),
            "verdict": [each._asdict() for each in judge(drops, pairs)],
        }


@torch.no_grad()
def probe(
    model: Model,
    data: LabelledImages,
    tasks: Sequence[str],
    depths: Sequence[int],
    batch_size: int = 8,
    progress: Progress | None = None,
    **conditions: Any,  # noqa: ANN401 - fields of Conditions
) -> Probe:
    """Prune a model that never saw pruning, at one block at a time, and score every task.

    Between attention and MLP of a block, the patches of highest score stay; the kept patch
    of most similar key stands in for each of the others. Where a task reads the grid, they
    are filled in after the last block that it reads: with a copy of the stand-in
    (alpha = 0), or with the whole stored offset on top (alpha = 1). No block runs on the
    full grid again. Detection is scored on boxes.

    Images are resampled jointly: all cells of all tasks see the same resamples, so that
    every difference and rank correlation is paired.

    Cost: tasks whose inputs are the same, as they are for square pictures, share one pass
    of the blocks to the end, and one from each depth for each criterion; ``sensitivity``
    takes one for each task, and back-propagates. Every cell decodes once for each endpoint.

    Args:
        model: The model.
        data: Pictures with labels for all tasks.
        tasks: Names of its tasks.
        depths: Blocks to prune at, each by itself, ascending.
        batch_size: Images at a time.
        progress: Told how many images are done, and of how many.
        **conditions: Fields of :class:`Conditions`: ``criteria``, ``keep``, ``seed``,
            ``num_resamples``, ``num_probes``.

    Returns:
        Drops with joint intervals.

    Raises:
        ValueError: If a setting is out of range, or model, tasks and labels do not fit
            together.
    """
    wanted = Conditions(**conditions)
    trials = {name: _open(model, name, data) for name in tasks}
    _check(model, trials, tasks, depths, wanted)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
    cells = Cells(model, trials, tuple(depths), wanted)
    for first in range(0, len(data), batch_size):
        last = min(first + batch_size, len(data))
        for names, batch in _shared([data[i] for i in range(first, last)], trials):
            cells.see(names, batch)
        if progress:
            progress(last, len(data))
    return _summarise(cells, data)


def _shared(
    examples: Sequence[Example], trials: Mapping[str, Trial]
) -> Iterator[tuple[list[str], Batch]]:
    """Batches with the tasks that see the same inputs of all these pictures."""
    groups: list[tuple[list[str], list[Tensor]]] = []
    for name, trial in trials.items():
        inputs = [trial.scorer.inputs(example.picture) for example in examples]
        same = (names for names, seen in groups if all(map(torch.equal, seen, inputs)))
        found = next(same, None)
        if found is None:
            groups.append(([name], inputs))
        else:
            found.append(name)
    for names, inputs in groups:
        for batch in pack(zip(examples, inputs, strict=True), len(examples)):
            yield names, batch


def _open(model: Model, name: str, data: LabelledImages) -> Trial:
    trial = open_trial(model, name, data)
    if isinstance(trial.scorer, ObjectScorer):
        trial = trial._replace(scorer=replace(trial.scorer, kinds=("box",)))
    return trial


def _summarise(cells: Cells, data: LabelledImages) -> Probe:
    wanted, num = cells.conditions, len(data)
    weights = [once(num), *resamples(num, wanted.num_resamples, wanted.seed)]
    tasks, columns = [], []
    for name, trial in cells.trials.items():
        score = MEASURES[trial.task.kind]
        full = score_draws(cells.statistics(name, FULL), score, weights)
        tasks.append(ProbedTask(name, trial.task.kind, score, estimate(full[0], full[1:])))
        drawn = [
            full - score_draws(cells.statistics(name, cell), score, weights)
            for cell in cells.of(name)
        ]
        shape = (-1, len(cells.depths), len(wanted.criteria))
        column = torch.stack(drawn, dim=1).unflatten(1, shape)  # (1 + R, 1 or 2, D, C)
        columns.append(column.expand(-1, len(ALPHAS), -1, -1))
    recovers = tuple(trial.task.needs_grid for trial in cells.trials.values())
    names = (tuple(cells.trials), recovers, cells.depths, wanted.criteria)
    drops = Drops(torch.stack(columns, dim=1), *names)
    return Probe(cells.model.name, data.name, num, wanted, tuple(tasks), drops)


def _check(
    model: Model,
    trials: Mapping[str, Trial],
    tasks: Sequence[str],
    depths: Sequence[int],
    wanted: Conditions,
) -> None:
    must_differ("tasks", tasks)
    must_differ("depths", depths)
    blocks = model.backbone.num_blocks
    last = min(trial.task.taps(blocks)[-1] for trial in trials.values())
    if [*depths] != sorted(depths) or not 0 <= depths[0] <= depths[-1] < last:
        raise ValueError(
            f"depths must ascend, from 0 to {last - 1} for these tasks; got {[*depths]}."
        )
    if "attention" in wanted.criteria and not model.backbone.has_class_token:
        raise ValueError(
            "criteria must not hold attention for a model without a class token, as "
            f"{model.name} (received needs none)."
        )
