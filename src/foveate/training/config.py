"""Configuration files of training: TOML, checked key by key."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from string import Template
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from foveate.adaptive.checkpoint import open_controller
from foveate.adaptive.controller import Pruning
from foveate.data.composites import open_composites
from foveate.data.folder import ImageTransform
from foveate.data.labelled import LabelledImages, label_composites, open_labelled
from foveate.models import Model
from foveate.reduction.budget import ratio_schedule
from foveate.reduction.plan import Plan
from foveate.reduction.presets import plan_for
from foveate.training.heads import HeadCourse
from foveate.training.loop import Recipe
from foveate.training.pruned import Form, TapCourse
from foveate.training.views import Views

__all__ = ["HeadsConfig", "Method", "Source", "TapConfig", "from_table", "read_config"]

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Labelled pictures: a data set's folder, or cut-outs on photographs.

    Attributes:
        folder: As of :func:`~foveate.data.labelled.open_labelled`.
        split: Which part of that folder, likewise.
        cutouts: Pictures with an alpha channel, one sub-folder a class.
        photos: Photographs.
        num: Scenes; of a data set, its first pictures, all of them if 0.
        seed: Of the scenes.
        size: Side of the scenes in pixels; the model's input if 0.

    Raises:
        ValueError: If neither or both are given, or scenes without a number.
    """

    folder: str = ""
    split: str = ""
    cutouts: str = ""
    photos: str = ""
    num: int = 0
    seed: int = 0
    size: int = 0

    def __post_init__(self) -> None:
        """Check that it is one of the two."""
        scenes = bool(self.cutouts and self.photos and self.num > 0)
        mixed = bool(self.cutouts or self.photos)
        if bool(self.folder) == mixed or (mixed and not scenes):
            raise ValueError(
                "data must have a folder, or else cutouts, photos and num; got folder "
                f"'{self.folder}', cutouts '{self.cutouts}', photos '{self.photos}' and "
                f"num {self.num}."
            )

    def open(self, size: int) -> LabelledImages:
        """Open the pictures.

        Args:
            size: Side of the model's input.

        Returns:
            Labelled pictures.
        """
        if self.folder:
            return open_labelled(self.folder, self.split).first(self.num)
        side = self.size or size
        return label_composites(
            open_composites(self.cutouts, self.photos, self.num, side, self.seed)
        )


@dataclass(frozen=True)
class HeadsConfig:
    """What ``foveate train heads`` does.

    Attributes:
        model: Name of the model, as of :func:`~foveate.models.open_model`.
        data: What to learn from.
        val: What to score on; nothing is scored without.
        tasks: Heads by name of the task.
        size: Side of the images; the model's own if 0.
        num_views: Views to learn from; each picture once if 0.
        augment: Whether views are changed at random.
    """

    model: str
    data: Source
    tasks: Mapping[str, HeadCourse]
    val: Source | None = None
    size: int = 0
    num_views: int = 0
    augment: bool = False

    def views(self, data: LabelledImages, transform: ImageTransform, seed: int) -> Views:
        """Views of the data."""
        return Views(data, transform, self.num_views, self.augment, seed=seed)


@dataclass(frozen=True)
class Method:
    """A method of ``foveate compare`` that is not learned.

    Attributes:
        name: The method.
        depths: Blocks with a step.
        keep: Share of the patches after the last.
        fuse_last: Blocks at the end on the full grid again.
        alpha: Share of its offset that a removed patch gets back.
        options: Its options.
    """

    name: str
    depths: tuple[int, ...]
    keep: float
    fuse_last: int = 0
    alpha: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, model: Model, task: str) -> Plan:
        """Plan for a model at its own input size."""
        side = model.transform.size
        high, wide = model.backbone.patch_size
        grid = (side // high, side // wide)
        counts = ratio_schedule(grid[0] * grid[1], self.depths, self.keep)
        rest = {"fuse_last": self.fuse_last, "alpha": self.alpha, "options": self.options}
        return plan_for(model, self.name, task, grid, counts, **rest)


@dataclass(frozen=True)
class TapConfig:
    """What ``foveate train tap-j`` and ``tap-f`` do.

    Attributes:
        model: A model with a trained head, as ``foveate train heads`` leaves it.
        task: Name of the task.
        data: What to learn from.
        recipe: Steps, batch size, rates.
        pruning: What a task register removes.
        method: What another method removes, in place of ``pruning``; with neither, nothing
            is removed.
        controller: Folder of a pruned model whose controller removes, as it is, in place of
            ``pruning``: one register for several tasks.
        val: What to score on; nothing is scored without.
        size: Side of the images; the model's own if 0.
        num_views: Views to learn from; each picture once if 0.
        augment: Whether views are changed at random.
        rank: Of the low-rank update of ``tap-f``.
        backbone_rate: Of ``tap-j``, factor of the learning rate for the backbone.
        calibrate: Views whose mean counts are frozen.
        distill: Weight of distillation from the model with nothing removed; 0 for none.
        recompute: Whether activations are computed again backwards, to save memory.
    """

    model: str
    task: str
    data: Source
    recipe: Recipe
    pruning: Pruning | None = None
    method: Method | None = None
    controller: str = ""
    val: Source | None = None
    size: int = 0
    num_views: int = 0
    augment: bool = False
    rank: int = 16
    backbone_rate: float = 0.1
    calibrate: int = 64
    distill: float = 0.0
    recompute: bool = False

    def course(self, form: Form, model: Model, seed: int) -> TapCourse:
        """What to train of a model."""
        if self.controller and self.pruning is not None:
            raise ValueError("controller and pruning cannot both be given; got both.")
        held = open_controller(Path(self.controller)) if self.controller else None
        return TapCourse(
            form,
            self.task,
            replace(self.recipe, seed=seed),
            self.pruning if held is None else held.pruning,
            None if self.method is None else self.method.plan(model, self.task),
            self.rank,
            self.backbone_rate,
            self.calibrate,
            self.distill,
            self.recompute,
            held,
        )

    def views(self, data: LabelledImages, transform: ImageTransform, seed: int) -> Views:
        """Views of the data."""
        return Views(data, transform, self.num_views, self.augment, seed=seed)


def read_config(file: Path, kind: type[T]) -> T:
    """Read a configuration.

    In texts, ``$NAME`` is replaced by the environment variable of that name.

    Args:
        file: TOML.
        kind: Dataclass that it describes.

    Returns:
        The configuration.

    Raises:
        ValueError: If it cannot be read, a key is unknown or missing, a value is of the
            wrong type or out of range, or a variable is not set; the message names it.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"config must be a TOML file; '{file}': {error}.") from error
    return from_table(kind, table, f"'{file}'")


def from_table(kind: type[T], table: Any, where: str) -> T:  # noqa: ANN401 - any TOML
    """Build a dataclass from a table, and what is inside it likewise.

    Args:
        kind: The dataclass.
        table: Values by field.
        where: For messages.

    Returns:
        The dataclass.

    Raises:
        ValueError: As :func:`read_config`.
    """
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table; got {table!r}.")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    unknown = sorted(table.keys() - known.keys())
    needed = [
        n
        for n, f in known.items()
        if f.default is MISSING and f.default_factory is MISSING and n not in table
    ]
    if unknown or needed:
        what = f"unknown {', '.join(unknown)}" if unknown else f"no {', '.join(needed)}"
        raise ValueError(f"{where} must have keys from {', '.join(known)}; it has {what}.")
    hints = get_type_hints(kind)
    values = {n: _value(hints[n], v, f"{where}, {n}") for n, v in table.items()}
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _value(kind: Any, value: Any, where: str) -> Any:  # noqa: ANN401 - any type, any TOML
    if kind == Mapping[str, HeadCourse]:
        table = value if isinstance(value, dict) else {}
        if not table:
            raise ValueError(f"{where} must be tables by task; got {value!r}.")
        return {n: from_table(HeadCourse, v, f"{where}.{n}") for n, v in table.items()}
    kind = _without_none(kind)
    if hasattr(kind, "__dataclass_fields__"):
        return from_table(kind, value, where)
    if get_origin(kind) is not None or kind is Any:
        return value if not isinstance(value, list) else tuple(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} must be of type {kind.__name__}; got {value!r}.")
    return _expanded(value, where) if kind is str else value


def _without_none(kind: Any) -> Any:  # noqa: ANN401 - any type
    """What a value that may be left out is if it is not."""
    parts = [part for part in get_args(kind) if part is not type(None)]
    return parts[0] if type(None) in get_args(kind) and len(parts) == 1 else kind


def _expanded(text: str, where: str) -> str:
    try:
        return Template(text).substitute(os.environ)
    except KeyError as error:
        raise ValueError(
            f"{where} needs the environment variable {error.args[0]}, which is not set."
        ) from error
    except ValueError as error:
        raise ValueError(f"{where} must name variables as $NAME; got '{text}'.") from error
