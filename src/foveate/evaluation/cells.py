"""A frozen model pruned at one block at a time, and what is measured of every image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foveate.evaluation.agreement import ALPHAS
from foveate.evaluation.conditions import SENSITIVITY, Conditions, score_of
from foveate.evaluation.evaluate import Batch, Trial
from foveate.evaluation.metrics import Statistics
from foveate.forward import Block, run
from foveate.models import Model
from foveate.reduction.budget import keep_count
from foveate.reduction.matching import Prune
from foveate.reduction.recover import recover
from foveate.reduction.regroup import Memory
from foveate.reduction.step import Reduce
from foveate.tasks.detection import Detection
from foveate.tokens import Layout, Tokens

__all__ = ["FULL", "Cell", "Cells"]

Cell = tuple[str, int, float]  # criterion, depth, alpha
FULL: Cell = ("", -1, 1.0)


@dataclass
class Cells:
    """A model that is pruned in every way, and what is kept of each image.

    Attributes:
        model: The model.
        trials: What its tasks are scored with.
        depths: Blocks to prune at, each by itself.
        conditions: How.
        parts: What has been measured, by task and cell, image after image.
    """

    model: Model
    trials: Mapping[str, Trial]
    depths: tuple[int, ...]
    conditions: Conditions
    parts: dict[tuple[str, Cell], list[Any]] = field(default_factory=dict)

    def see(self, names: Sequence[str], batch: Batch) -> None:
        """Run tasks that share these inputs, in full and pruned in every way."""
        backbone = self.model.backbone
        tokens = backbone.embed(batch.images.to(next(self.model.parameters())))
        stop, taps = self._taps(names)
        _, full = run(backbone, tokens, 0, stop, taps=sorted({*taps, *self.depths}))
        for name in names:
            self._score(name, FULL, full, batch)
        for depth in self.depths:
            between, block = self._at(depth, full)
            for criterion in self.conditions.criteria:
                alone = criterion == SENSITIVITY
                for group in [[name] for name in names] if alone else [names]:
                    step = self._step(criterion, group[0], tokens.layout)
                    kept = self._finish(step(between, block), block, group)
                    for name in group:
                        for alpha in self.endpoints(name):
                            self._score(name, (criterion, depth, alpha), kept, batch)

    def _taps(self, names: Sequence[str]) -> tuple[int, list[int]]:
        """Last depth that some tasks read, and all of them."""
        blocks = self.model.backbone.num_blocks
        taps = {d for name in names for d in self.trials[name].task.taps(blocks)}
        return max(taps), sorted(taps)

    def _at(self, depth: int, full: Mapping[int, Tokens]) -> tuple[Tokens, Block]:
        """Tokens between attention and MLP, and the block as a step sees it."""
        backbone, entering = self.model.backbone, full[depth]
        heads = backbone.project(depth, entering)
        before = {d: kept for d, kept in full.items() if d <= depth}
        block = Block(backbone, depth, heads, before, entering)
        return backbone.attend(depth, entering, heads), block

    def _step(self, criterion: str, name: str, layout: Layout) -> Reduce:
        keep = keep_count(layout.num_patches, self.conditions.keep)
        action = Prune(
            score_of(criterion, self.trials[name].task, self.conditions), stand_in=True
        )
        return Reduce(action, keep, memory=Memory(1.0))

    def _finish(
        self, pruned: Tokens, block: Block, names: Sequence[str]
    ) -> dict[int, Tokens]:
        """The rest of the blocks; what the tasks read before is as it was."""
        stop, taps = self._taps(names)
        tokens = block.backbone.transform(block.depth, pruned)
        _, late = run(block.backbone, tokens, block.depth + 1, stop, taps=taps)
        return {**late, **block.kept}

    def _score(
        self, name: str, cell: Cell, kept: Mapping[int, Tokens], batch: Batch
    ) -> None:
        """Decode, and keep what matters of each image."""
        trial, backbone = self.trials[name], self.model.backbone
        read = [kept[d] for d in trial.task.taps(backbone.num_blocks)]
        if trial.task.needs_grid:
            read = [recover(_scaled(tokens, cell[2])) for tokens in read]
        layout = read[0].layout
        output = trial.task.decode(backbone, tuple(t.x for t in read), layout)
        boxes = isinstance(trial.task, Detection)
        predict: Any = trial.task.boxes if boxes else trial.task.predict  # type: ignore[attr-defined]
        predicted = predict(output, layout)
        measured = self.parts.setdefault((name, cell), [])
        for example, rows in batch.examples:
            outputs = [predicted[row] for row in rows]
            measured.append(trial.scorer.measure(outputs, example))

    def endpoints(self, name: str) -> tuple[float, ...]:
        """Endpoints that differ: one for a task that reads no grid."""
        return ALPHAS if self.trials[name].task.needs_grid else ALPHAS[:1]

    def of(self, name: str) -> list[Cell]:
        """Cells of a task, by endpoint, depth and criterion."""
        return [
            (criterion, depth, alpha)
            for alpha in self.endpoints(name)
            for depth in self.depths
            for criterion in self.conditions.criteria
        ]

    def statistics(self, name: str, cell: Cell) -> Statistics:
        """All images of a cell."""
        return self.trials[name].scorer.gather(self.parts[name, cell])


def _scaled(tokens: Tokens, alpha: float) -> Tokens:
    """Tokens with a share of the stored offsets."""
    offset = tokens.offset
    return tokens.with_(offset=None if offset is None or not alpha else alpha * offset)
