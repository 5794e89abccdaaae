"""Trained heads on disk: what was trained and nothing else, and what it belongs to."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foveate.models import Model, check_weights, open_model
from foveate.models.digest import model_hash
from foveate.tasks import TrainableTask
from foveate.tasks.heads import build_head

__all__ = [
    "FORMAT",
    "VERSION",
    "HeadSpec",
    "add_heads",
    "open_heads",
    "read_checkpoint",
    "read_weights",
    "save_heads",
    "write_checkpoint",
]

FORMAT, VERSION = "foveate-checkpoint", 1
RECORD, WEIGHTS = "checkpoint.json", "weights.safetensors"


@dataclass(frozen=True)
class HeadSpec:
    """A head without its weights.

    Attributes:
        kind: As of :func:`~foveate.tasks.heads.build_head`.
        classes: Names of its classes.
        settings: Its settings.
        provenance: How it was trained and how well it did, as JSON.
    """

    kind: str
    classes: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def build(self, model: Model) -> TrainableTask:
        """Untrained head for a model."""
        channels = model.backbone.num_channels
        return build_head(self.kind, channels, len(self.classes), self.settings)


def add_heads(model: Model, heads: Mapping[str, TrainableTask]) -> Model:
    """Model with further tasks; backbone and tasks are shared, the given one is not edited.

    Args:
        model: The model.
        heads: Tasks by name; one of the same name is replaced.

    Returns:
        Another model.
    """
    tasks = {**dict(model.tasks.items()), **heads}
    more = Model(model.name, model.backbone, tasks, model.transform)  # type: ignore[arg-type]
    return more.train(model.training)


def save_heads(folder: Path, model: Model, specs: Mapping[str, HeadSpec]) -> None:
    """Write heads of a model.

    Args:
        folder: Where to; files of the same names are replaced.
        model: The model, which has a task of each name.
        specs: What the heads are.
    """
    weights = {
        f"{name}.{key}": value
        for name in specs
        for key, value in model.tasks[name].state_dict().items()
    }
    record = {
        "kind": "heads",
        "model": model.name,
        "model_hash": model_hash(model.backbone),  # type: ignore[arg-type]  # a module
        "size": model.transform.size,
        "tasks": {name: asdict(spec) for name, spec in specs.items()},
    }
    write_checkpoint(folder, record, weights)


def open_heads(folder: Path) -> Model:
    """Open heads with the model that they were trained on.

    Args:
        folder: Written by :func:`save_heads`.

    Returns:
        The model, frozen, with the heads among its tasks.

    Raises:
        ValueError: If it is no checkpoint of heads, or the model now has other weights.
    """
    record = read_checkpoint(folder, "heads")
    model = open_model(record["model"], record["size"])
    found = model_hash(model.backbone)  # type: ignore[arg-type]  # a module
    if found != record["model_hash"]:
        raise ValueError(
            f"checkpoint must be of the weights of {model.name} (hash {found[:12]}); "
            f"'{folder}' is of {str(record['model_hash'])[:12]}."
        )
    return add_heads(model, load_tasks(folder, model, record["tasks"]))


def load_tasks(
    folder: Path, model: Model, described: Mapping[str, Any]
) -> dict[str, TrainableTask]:
    """Build heads and give them their weights.

    Args:
        folder: A checkpoint, in which the weights of task T begin with ``T.``.
        model: What they are for.
        described: Fields of each :class:`HeadSpec`.

    Returns:
        Heads by name, frozen, in eval mode.

    Raises:
        ValueError: If weights do not fit, or are not finite.
    """
    weights = read_weights(folder)
    tasks = {}
    for name, said in described.items():
        spec = HeadSpec(**{**said, "classes": tuple(said["classes"])})
        head: Any = spec.build(model)
        own = {
            key.removeprefix(f"{name}."): value
            for key, value in weights.items()
            if key.startswith(f"{name}.")
        }
        _load(head, own, folder)
        tasks[name] = head.eval().requires_grad_(False)
    return tasks


def write_checkpoint(
    folder: Path, record: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Write both files of a checkpoint, the record last, so that half a one has none.

    Args:
        folder: Where to.
        record: JSON.
        weights: By name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{WEIGHTS}.partial"
    save_file({k: v.detach().cpu().contiguous() for k, v in weights.items()}, partial)
    partial.replace(folder / WEIGHTS)
    text = json.dumps({"format": FORMAT, "version": VERSION, **record}, indent=1)
    partial = folder / f"{RECORD}.partial"
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(folder / RECORD)


def read_checkpoint(folder: Path, kind: str | None = None) -> dict[str, Any]:
    """Read the record of a checkpoint.

    Args:
        folder: Written by :func:`write_checkpoint`.
        kind: What it must be of; anything if None.

    Returns:
        The record.

    Raises:
        ValueError: If it is no checkpoint of this version and kind.
    """
    file = folder / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint must hold {RECORD}; '{file}': {error}.") from error
    head = (record.get("format"), record.get("version")) if isinstance(record, dict) else 0
    if head != (FORMAT, VERSION):
        raise ValueError(
            f"checkpoint must have format '{FORMAT}' and version {VERSION}; '{file}' has "
            f"{head}."
        )
    if kind is not None and record.get("kind") != kind:
        raise ValueError(
            f"checkpoint must be of {kind}; '{folder}' is of {record.get('kind')}."
        )
    return record


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint.

    Args:
        folder: Written by :func:`write_checkpoint`.

    Returns:
        Weights by name.

    Raises:
        ValueError: If there are none.
    """
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint must hold {WEIGHTS}; '{folder}': {error}.") from error


def _load(head: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"checkpoint must hold the weights of its heads; '{folder}': {error}"
        ) from error
    check_weights(head)
