"""Teach a head what a frozen model's Jacobian says, from unlabelled photographs."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Generator, Tensor, nn

from foveate.data.crops import Crops, Photographs
from foveate.models import Model
from foveate.scoring.heads import Head, Kind, build_network
from foveate.training.loop import Recipe, Training, Watch, fit
from foveate.training.pupils import Pupil, pupil
from foveate.training.targets import (
    Cut,
    Progress,
    Targets,
    TargetSpec,
    compute_targets,
    model_hash,
)

__all__ = ["Course", "Distilled", "distill", "measure_head"]

CALIBRATE = 64  # images that the units of a head are taken from


@dataclass(frozen=True)
class Course:
    """What to teach, from what, and for how long.

    Attributes:
        kind: What the head predicts: ``importance``, ``metric`` or ``factors``.
        task: Name of a task of the model.
        depth: Block whose tokens it reads.
        source: Of an importance: ``modes`` for the exact target, the leading singular
            vectors; ``norms`` for the norms of pulled probes, which need no JVP.
        num_crops: Random crops to learn from.
        rank: Modes of a metric or an importance.
        num_probes: Probes an image, where they are used.
        depths: All depths whose targets one pass computes; the head's own if empty.
        recipe: Steps, batch size, rates.
        config: Arguments of the network beyond its channels.

    Raises:
        ValueError: If there is no such kind, or ``depths`` leaves out the head's own.
    """

    kind: Kind
    task: str = "cls"
    depth: int = 8
    source: Literal["modes", "norms"] = "modes"
    num_crops: int = 500
    rank: int = 20
    num_probes: int = 8
    depths: tuple[int, ...] = ()
    recipe: Recipe = field(default_factory=lambda: Recipe(1500, learning_rate=2e-3))
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what goes together."""
        if self.depths and self.depth not in self.depths:
            raise ValueError(f"depths must hold {self.depth}; got {self.depths}.")
        if self.source == "norms" and self.kind == "metric":
            raise ValueError("source must be 'modes' for a metric; got 'norms'.")

    @property
    def cut(self) -> Cut:
        """Where the tokens are taken: factors price merges, which happen between."""
        return Cut(self.depth, "between" if self.kind == "factors" else "before")

    def spec(self, exact: bool = False) -> TargetSpec:
        """What is computed of every image; for validation, what a head is measured by."""
        cuts = tuple(replace(self.cut, depth=d) for d in self.depths or (self.depth,))
        if self.kind == "factors":
            return TargetSpec("probes", self.task, cuts, self.num_probes)
        if self.source == "norms" and not exact:
            return TargetSpec("norms", self.task, cuts, self.num_probes)
        return TargetSpec("modes", self.task, (self.cut,), self.rank)


@dataclass(frozen=True)
class Distilled:
    """A taught head and how well it does.

    Attributes:
        head: The head.
        training: Losses and validation scores.
        measures: Its measures on the validation photographs, each a number an image.
        seconds: Seconds spent on ``targets`` and on ``training``.
    """

    head: Head
    training: Training
    measures: dict[str, list[float]]
    seconds: dict[str, float]


def distill(
    model: Model,
    course: Course,
    images: Sequence[Path],
    val: Sequence[Path],
    cache: Path,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Distilled:
    """Teach a head, from targets that are computed once and kept on disk.

    A run that is killed and started again computes no target twice and goes on training
    from its last validation, to the same head.

    Args:
        model: The frozen model.
        course: What to teach.
        images: Unlabelled photographs to crop from.
        val: Photographs to validate on, each once and whole.
        cache: Folder for targets and the state of training.
        progress: Told how many images have their targets, and of how many.
        watch: Told where training stands after every validation.

    Returns:
        The head at its best validation, and its measures.

    Raises:
        ValueError: If an argument is out of range, a picture cannot be read, or the cache
            holds something else.
    """
    started = time.perf_counter()
    crops = Crops(images, model.transform, course.num_crops, course.recipe.seed)
    learn = pupil(course.kind)
    train = _targets(model, course, crops, cache, False, progress)
    seen = _targets(model, course, Photographs(val, model.transform), cache, True, progress)
    computed = time.perf_counter()
    network = _network(model, course, learn, train)
    held = learn.prepare(seen.batch(torch.arange(len(seen))))
    training = fit(
        network,
        _Prepared(train, learn),
        learn.objective,
        course.recipe,
        validate=lambda n: float(_measure(n, learn, held)[learn.score].mean()),
        state=cache / f"{_state_name(model, course, [*images, *val])}.state",
        watch=watch,
    )
    trained = time.perf_counter()
    head = _head(model, course, network, training)
    seconds = {"targets": computed - started, "training": trained - computed}
    measures = {k: v.tolist() for k, v in measure_head(head, learn, held).items()}
    return Distilled(head, training, measures, seconds)


@torch.no_grad()
def measure_head(head: Head, learn: Pupil, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Measures of a head on validation targets, ``(B,)`` each, NaN where undefined."""
    return _measure(head.network, learn, held)


def _measure(
    network: nn.Module, learn: Pupil, held: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Measures where the network is, which training may have put on an accelerator."""
    device = next(network.parameters()).device
    return learn.measure(network, {name: value.to(device) for name, value in held.items()})


def _targets(
    model: Model,
    course: Course,
    pictures: Crops | Photographs,
    cache: Path,
    exact: bool,
    progress: Progress | None,
) -> Targets:
    spec = course.spec(exact)
    depths = "-".join(str(cut.depth) for cut in spec.cuts)
    part = "val" if isinstance(pictures, Photographs) else "train"
    rest = f"{spec.kind}-{spec.task}-{depths}-{spec.cuts[0].place}-{spec.rows}"
    folder = compute_targets(model, pictures, spec, cache / f"{part}-{rest}", progress)
    # An importance is learned from no vector, and they are nearly all of the shards.
    unread = () if course.kind == "metric" else ("vectors", "energies")
    names = [name for name in spec.names if name not in unread]
    return Targets(folder, len(pictures), course.cut, names)


def _network(model: Model, course: Course, learn: Pupil, train: Targets) -> nn.Module:
    some = learn.prepare(train.batch(torch.arange(min(CALIBRATE, len(train)))))
    config = _config(course, some["tokens"].shape[2])
    generator = Generator().manual_seed(course.recipe.seed)
    network = build_network(course.kind, {**config, "generator": generator})
    learn.calibrate(network, some)
    return network.to(next(model.parameters()).device)


def _config(course: Course, channels: int) -> dict[str, Any]:
    """Arguments of the network."""
    config = {"channels": channels, **course.config}
    if course.kind == "metric":
        config = {"rank": course.rank, "reach": "patches", **config}
    return config


@dataclass(frozen=True)
class _Prepared:
    """Targets as the objective wants them."""

    targets: Targets
    pupil: Pupil

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, index: Tensor) -> Mapping[str, Tensor]:
        return self.pupil.prepare(self.targets.batch(index))


def _state_name(model: Model, course: Course, files: Sequence[Path]) -> str:
    """Name that no other course shares, nor the same one on other photographs."""
    seen = [[file.name, file.stat().st_size] for file in files]
    said = json.dumps([model_hash(model), asdict(course), seen], default=str)
    return f"{course.kind}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def _head(model: Model, course: Course, network: nn.Module, training: Training) -> Head:
    config = _config(course, cast(int, network.channels))
    provenance = {
        "model_hash": model_hash(model),
        "course": json.loads(json.dumps(asdict(course))),
        "steps": training.step,
        "best_step": training.best_step,
        "best_score": training.best_score,
    }
    network.requires_grad_(False)
    cut = course.cut
    where = (model.name, course.task, cut.depth, cut.place)
    return Head(network, course.kind, *where, config, provenance)
