"""Heads trained on the features of a frozen backbone, which are computed once."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from foveate.data.labelled import LabelledImages, Target
from foveate.forward import run
from foveate.models import Model
from foveate.models.checkpoint import HeadSpec, add_heads
from foveate.tasks import TrainableTask
from foveate.tokens import Layout
from foveate.training.digest import training_digest
from foveate.training.loop import Batch, Recipe, Training, fit
from foveate.training.views import Views

__all__ = ["Features", "HeadCourse", "TrainedHead", "compute_features", "train_heads"]

Progress = Callable[[int, int], None]
Watch = Callable[[str, Training], None]


@dataclass(frozen=True)
class HeadCourse:
    """What head to train, and how.

    Attributes:
        kind: As of :func:`~foveate.tasks.heads.build_head`.
        settings: Its settings.
        recipe: Steps, batch size, rates.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe = field(default_factory=lambda: Recipe(1000, 32, 2e-3))


class TrainedHead(NamedTuple):
    """A head, what it is, and how its training went."""

    head: TrainableTask
    spec: HeadSpec
    training: Training
    seconds: float


@dataclass(frozen=True)
class Features:
    """What a frozen backbone makes of views, and what is true of them.

    Attributes:
        taps: For each depth the tokens that enter its block, ``(M, P + N, C)``, float16.
        targets: Of each view.
        layout: Geometry of the sequences.
    """

    taps: Mapping[int, Tensor]
    targets: Sequence[Target]
    layout: Layout

    def __len__(self) -> int:
        """Views."""
        return len(self.targets)

    def batch(self, index: Tensor) -> Batch:
        """Features by index, in float32, and the index itself."""
        taps = {str(depth): x[index].float() for depth, x in self.taps.items()}
        return {"index": index, **taps}


@torch.no_grad()
def compute_features(
    model: Model,
    views: Views,
    depths: Sequence[int],
    batch_size: int = 8,
    progress: Progress | None = None,
    needs_grid: bool = True,
) -> Features:
    """Run a frozen backbone over views.

    Args:
        model: The model.
        views: What it sees.
        depths: Taps.
        batch_size: Views at a time.
        progress: Told how many are done, and of how many.
        needs_grid: Whether patches are kept; if not, prefix tokens are all there is.

    Returns:
        Its features. Memory: ``2 * M * (P + N) * C`` bytes a tap.
    """
    like = next(model.parameters())
    depths = sorted(set(depths))
    taps: dict[int, list[Tensor]] = {depth: [] for depth in depths}
    targets: list[Target] = []
    layout = None
    for first in range(0, len(views), batch_size):
        seen = [views[i] for i in range(first, min(first + batch_size, len(views)))]
        tokens = model.backbone.embed(torch.stack([v.image for v in seen]).to(like))
        layout = tokens.layout
        _, kept = run(model.backbone, tokens, 0, depths[-1], taps=depths)
        for depth in depths:
            x = kept[depth].x if needs_grid else kept[depth].prefix
            taps[depth].append(x.half().cpu())
        targets += [v.target for v in seen]
        if progress:
            progress(len(targets), len(views))
    assert layout is not None  # there is at least one view
    return Features({d: torch.cat(parts) for d, parts in taps.items()}, targets, layout)


def train_heads(
    model: Model,
    data: LabelledImages,
    courses: Mapping[str, HeadCourse],
    views: Views,
    state: Path | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> dict[str, TrainedHead]:
    """Train heads on a frozen backbone.

    Features are computed once for all of them and kept in memory. A run that is killed goes
    on with the head and the step it was at, but computes the features again.

    Args:
        model: The model; it is not changed.
        data: Labels; names the classes.
        courses: What to train, by name of the task.
        views: Views of ``data``.
        state: Folder for the states of training.
        progress: Told how many views have their features, and of how many.
        watch: Told the task and where its training stands.

    Returns:
        Heads by name, in eval mode.

    Raises:
        ValueError: If the data set lacks labels of a kind, or a setting is out of range.
    """
    specs = {
        name: HeadSpec(course.kind, data.classes_for(course.kind), dict(course.settings))
        for name, course in courses.items()
    }
    heads = {name: _seeded(spec, model, courses[name]) for name, spec in specs.items()}
    blocks = model.backbone.num_blocks
    taps = {depth for head in heads.values() for depth in head.taps(blocks)}
    grid = any(head.needs_grid for head in heads.values())
    features = compute_features(model, views, sorted(taps), 8, progress, grid)
    found = {}
    for name, head in heads.items():
        started = time.perf_counter()
        course, own = courses[name], heads[name].taps(blocks)
        network = HeadLoss(model, head, features, own)
        training = fit(
            network,
            features,
            _loss,
            course.recipe,
            state=state and state / f"{name}-{_digest(model, views, course)}.state",
            watch=None if watch is None else _named(watch, name),
        )
        spec = HeadSpec(
            course.kind,
            specs[name].classes,
            dict(course.settings),
            {
                "data": data.name,
                "num_views": len(views),
                "recipe": asdict(course.recipe),
                "loss": training.losses[-1],
            },
        )
        network.head.requires_grad_(False)
        seconds = time.perf_counter() - started
        found[name] = TrainedHead(head, spec, training, seconds)
    return found


class HeadLoss(nn.Module):
    """A head as the training loop sees it: from features to its loss.

    Args:
        model: Gives the final norm.
        head: What is trained.
        features: Of all views.
        taps: Depths that the head reads.
    """

    def __init__(
        self, model: Model, head: TrainableTask, features: Features, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.head: Any = head
        self._model = [model]  # in a list, so that it is no part of what is trained
        self.features, self.depths = features, taps

    def forward(self, batch: Batch, seed: int) -> Tensor:
        """Mean loss of a batch; what the head draws follows from the seed."""
        backbone, layout = self._model[0].backbone, self.features.layout
        taps = tuple(batch[str(depth)] for depth in self.depths)
        targets = [self.features.targets[int(i)] for i in batch["index"]]
        devices = [taps[0].device] if taps[0].is_cuda else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            output = self.head.decode(backbone, taps, layout)
            return self.head.loss(output, targets, layout)


def with_heads(model: Model, found: Mapping[str, TrainedHead]) -> Model:
    """Model with trained heads among its tasks."""
    return add_heads(model, {name: trained.head for name, trained in found.items()})


def _loss(network: nn.Module, batch: Batch, generator: Generator) -> Tensor:
    return network(batch, generator.initial_seed() % 2**63)


def _seeded(spec: HeadSpec, model: Model, course: HeadCourse) -> TrainableTask:
    """Untrained head on the model's device; its weights follow from the recipe's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(course.recipe.seed)
        head: Any = spec.build(model)
    return head.to(next(model.parameters()).device)


def _named(watch: Watch, name: str) -> Callable[[Training], None]:
    return lambda training: watch(name, training)


def _digest(model: Model, views: Views, course: HeadCourse) -> str:
    return training_digest(model, views, asdict(course))
