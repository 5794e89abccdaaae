"""Pruned models on disk: head, controller, and what was trained of the backbone."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foveate.adaptive.controller import Controller, Pruning
from foveate.adaptive.full_vit import FullViT
from foveate.adaptive.lora import add_lora, load_lora, lora_state, share, without_lora
from foveate.adaptive.task_vit import TaskViT
from foveate.backbones.recomputed import innermost
from foveate.models import Model, check_weights, open_model
from foveate.models.checkpoint import (
    HeadSpec,
    add_heads,
    load_tasks,
    read_checkpoint,
    read_weights,
    write_checkpoint,
)
from foveate.models.digest import weights_hash
from foveate.reduction.plan import Plan
from foveate.reduction.reduced_vit import ReducedViT

__all__ = ["KINDS", "Network", "open_controller", "open_pruned", "save_pruned"]

KINDS = ("tap-j", "tap-f")
Network = TaskViT | ReducedViT | FullViT


def save_pruned(
    folder: Path, kind: str, network: Network, base: Model, spec: HeadSpec, rank: int = 0
) -> None:
    """Write a pruned model.

    Args:
        folder: Where to; files of the same names are replaced.
        kind: ``tap-j`` keeps the whole backbone, ``tap-f`` its low-rank update.
        network: What was trained.
        base: The model that training started from.
        spec: Its head.
        rank: Of the low-rank update.
    """
    model, task = network.model, _task(network)
    weights = _prefixed(task, model.tasks[task].state_dict())
    record: dict[str, Any] = {
        "kind": kind,
        "model": base.name,
        "model_hash": weights_hash(without_lora(base.backbone)),  # type: ignore[arg-type]
        "size": base.transform.size,
        "task": task,
        "tasks": {task: asdict(spec)},
        "rank": rank,
    }
    if kind == "tap-f":
        weights |= _prefixed("lora", lora_state(model, task))
    else:
        backbone: Any = innermost(model.backbone)
        weights |= _prefixed("backbone", backbone.state_dict())
    if isinstance(network, TaskViT):
        record["grid"] = list(network.grid)
        record["channels"] = model.backbone.num_channels
        record["pruning"] = asdict(network.controller.pruning)
        record["counts"] = network.controller.counts.tolist()
        weights |= _prefixed("controller", network.controller.state_dict())
    elif isinstance(network, ReducedViT):
        record["plan"] = network.plan.record()
    write_checkpoint(folder, record, weights)


def open_pruned(folder: Path, base: Model | None = None) -> Network:
    """Open a pruned model, frozen, in eval mode.

    Args:
        folder: Written by :func:`save_pruned`.
        base: The model that training started from, or one that already holds low-rank
            updates of it, so that several tasks share one backbone; opened by its name if
            None.

    Returns:
        Called with images, gives the raw output of its task.

    Raises:
        ValueError: If it is no such checkpoint, or of other weights, or ``base`` holds a
            low-rank update for its task already.
    """
    record = read_checkpoint(folder)
    kind, task = record.get("kind"), str(record.get("task"))
    if kind not in KINDS:
        raise ValueError(
            f"checkpoint must be of {' or '.join(KINDS)}; '{folder}' is of {kind}."
        )
    base = base or open_model(record["model"], record["size"])
    weights = read_weights(folder)
    model, lora = _with_backbone(base, record, weights, folder)
    device = next(model.parameters()).device
    heads: dict[str, Any] = dict(load_tasks(folder, model, record["tasks"]))
    model = add_heads(model, {name: head.to(device) for name, head in heads.items()}).eval()
    if record.get("plan") is not None:
        return ReducedViT(model, Plan.from_record(record["plan"])).eval()
    if record.get("pruning") is None:
        return FullViT(model, task, lora).eval()
    controller = open_controller(folder).to(device)
    return TaskViT(model, task, controller, tuple(record["grid"]), lora).eval()


def open_controller(folder: Path) -> Controller:
    """Open what removes patches in a pruned model, without the model.

    Args:
        folder: Written by :func:`save_pruned`.

    Returns:
        The controller, with its frozen counts; it requires no gradients.

    Raises:
        ValueError: If it is no such checkpoint, or has no controller.
    """
    record, weights = read_checkpoint(folder), read_weights(folder)
    if record.get("pruning") is None:
        raise ValueError(f"checkpoint must have a controller; '{folder}' has none.")
    own = _part("controller", weights)
    pruning = _pruning(record["pruning"])
    controller = Controller(record["channels"], pruning, own.get("register"))
    _load(controller, own, folder)
    return controller.requires_grad_(False)


def _with_backbone(
    base: Model, record: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path
) -> tuple[Model, str | None]:
    """Model with the backbone as it was trained, and the name of its low-rank update."""
    if record["kind"] == "tap-f":
        task = record["task"]
        _check_hash(base, record, folder)
        model = share(base)
        add_lora(model, task, record["rank"])
        load_lora(model, task, _part("lora", weights))
        return model.requires_grad_(False), task
    model = copy.deepcopy(base)
    own: Any = model.backbone
    _load(own, _part("backbone", weights), folder)
    return model.requires_grad_(False), None


def _check_hash(base: Model, record: Mapping[str, Any], folder: Path) -> None:
    backbone: Any = base.backbone
    found = weights_hash(without_lora(backbone))
    if found != record["model_hash"]:
        raise ValueError(
            f"checkpoint must be of the weights of {base.name} (hash {found[:12]}); "
            f"'{folder}' is of {str(record['model_hash'])[:12]}."
        )


def _pruning(said: Mapping[str, Any]) -> Pruning:
    known = {f.name for f in fields(Pruning)}
    if set(said) - known:
        raise ValueError(
            f"pruning must have fields from {', '.join(sorted(known))}; got "
            f"{', '.join(sorted(set(said) - known))}."
        )
    lists: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in said.items()
    }
    return Pruning(**lists)


def _task(network: Network) -> str:
    return network.plan.task if isinstance(network, ReducedViT) else network.task


def _prefixed(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{key}": value for key, value in state.items()}


def _part(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}


def _load(module: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    try:
        with torch.no_grad():
            module.load_state_dict(dict(state))
    except RuntimeError as error:
        raise ValueError(
            f"checkpoint must hold all weights; '{folder}': {error}"
        ) from error
    check_weights(module)
