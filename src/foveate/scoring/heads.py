"""Learned heads as files: weights, what they are for, and where they come from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from foveate.forward import Place
from foveate.models import check_weights
from foveate.scoring.factors import FactorNetwork
from foveate.scoring.importance import ImportanceHead
from foveate.scoring.metric import SpectralPullbackNetwork

__all__ = [
    "Head",
    "Kind",
    "build_network",
    "find_head",
    "head_name",
    "load_head",
    "save_head",
]

Kind = Literal["importance", "metric", "factors"]

FORMAT, VERSION = "foveate-head", 1
_NETWORKS: dict[str, type[nn.Module]] = {
    "importance": ImportanceHead,
    "metric": SpectralPullbackNetwork,
    "factors": FactorNetwork,
}


@dataclass(frozen=True)
class Head:
    """A learned network, and what it may be used for.

    Attributes:
        network: In eval mode, without gradients.
        kind: What it predicts.
        model: Name of the model it was trained on.
        task: Name of its task.
        depth: Block whose tokens it reads.
        place: Where at the block.
        config: Arguments its network is built from.
        provenance: How it was trained and how well it did, as JSON.
    """

    network: nn.Module
    kind: Kind
    model: str
    task: str
    depth: int
    place: Place
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]


def build_network(kind: str, config: Mapping[str, Any]) -> nn.Module:
    """Untrained network of a kind.

    Args:
        kind: One of the kinds.
        config: Its arguments.

    Returns:
        The network.

    Raises:
        ValueError: If there is no such kind, or an argument is unknown or out of range.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {get_args(Kind)}; got '{kind}'.")
    try:
        return _NETWORKS[kind](**config)
    except TypeError as error:
        raise ValueError(f"config must fit a head for {kind}: {error}.") from error


def save_head(head: Head, file: Path, half: bool = False) -> None:
    """Write a head as safetensors, in one move.

    Args:
        head: The head.
        file: Where to.
        half: Keep matrices in float16, which halves the file and rounds to three digits.
    """
    state = {
        name: weight.detach().cpu().contiguous()
        for name, weight in head.network.state_dict().items()
    }
    if half:
        state = {k: v.half() if v.ndim > 1 else v for k, v in state.items()}
    metadata = {"format": FORMAT, "version": str(VERSION), "head": json.dumps(_said(head))}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    save_file(state, partial, metadata)
    partial.replace(file)


def load_head(file: Path) -> Head:
    """Read a head.

    Args:
        file: Written by :func:`save_head`.

    Returns:
        The head, in float32.

    Raises:
        ValueError: If it is not a head of this version, or its weights do not fit.
    """
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            names = list(opened.keys())
            state = {name: opened.get_tensor(name).float() for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"head must be a safetensors file; {file}: {error}.") from error
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, str(VERSION)):
        raise ValueError(
            f"head must have format '{FORMAT}' and version {VERSION}; {file} has "
            f"'{metadata.get('format')}' and {metadata.get('version')}."
        )
    said = _read_said(metadata.get("head", ""), file)
    network = build_network(said["kind"], said["config"])
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"head must hold the weights of its kind; {file}: {error}"
        ) from error
    check_weights(network)
    return Head(network.eval().requires_grad_(False), **said)


def head_name(task: str, depth: int, kind: str) -> str:
    """File name of a head within a folder of heads."""
    return f"{task}-{depth}-{kind}.safetensors"


def find_head(source: str, model: str, task: str, depth: int, kind: Kind) -> Head:
    """Head for a model, a task and a block.

    Args:
        source: A file; a folder with files named by :func:`head_name`; or nothing for the
            heads that come with the package.
        model: Name of the model.
        task: Name of its task.
        depth: Block.
        kind: What it should predict.

    Returns:
        The head.

    Raises:
        ValueError: If there is none, or it was trained for something else.
    """
    file = _locate(source, model, task, depth, kind)
    head = load_head(file)
    asked = {"kind": kind, "model": model, "task": task, "depth": depth}
    for name, value in asked.items():
        if getattr(head, name) != value:
            raise ValueError(
                f"head must be for {name} {value!r}; {file} is for {getattr(head, name)!r}."
            )
    return head


def _locate(source: str, model: str, task: str, depth: int, kind: Kind) -> Path:
    if source and not Path(source).is_dir():
        return Path(source)
    folder = Path(source) if source else Path(str(files("foveate"))) / "heads"
    folder = folder if source else folder / model.replace("/", "-").replace(":", "-")
    file = folder / head_name(task, depth, kind)
    if not file.exists():
        where = f"folder '{source}'" if source else "package"
        raise ValueError(
            f"head must be given for '{task}' at depth {depth} of {model}, of kind {kind}; "
            f"the {where} has none (train one with foveate distill {kind})."
        )
    return file


def _said(head: Head) -> dict[str, Any]:
    return {f.name: getattr(head, f.name) for f in fields(Head) if f.name != "network"}


def _read_said(text: str, file: Path) -> dict[str, Any]:
    expected = [f.name for f in fields(Head) if f.name != "network"]
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict) or set(said) != set(expected):
        raise ValueError(
            f"head must say what it is for ({', '.join(expected)}); {file} has '{text}'."
        )
    return said
