"""Open a VGGT: its aggregator, its camera and its depth head."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from foveate.backbones import UnsupportedModelError
from foveate.backbones.vggt import VggtBackbone
from foveate.data.folder import ImageTransform
from foveate.models import Model
from foveate.models.loading import one_line_errors
from foveate.tasks import Task
from foveate.tasks.pose import CameraPose, FrameDepth

__all__ = ["load_vggt", "open_vggt"]

_NATIVE_SIZE = 518


def load_vggt(source: str) -> nn.Module:
    """Load a VGGT with the package of its authors, which must be installed.

    Args:
        source: Name of a repository or a directory, for its ``from_pretrained``.

    Returns:
        The network.

    Raises:
        ValueError: If the package is missing, or the weights cannot be had.
    """
    if find_spec("vggt") is None:
        raise ValueError(
            f"model 'vggt:{source}' needs the package vggt, which is not installed; it is "
            "not on PyPI: install it from the repository of its authors."
        )
    with one_line_errors(f"vggt:{source}"):
        return import_module("vggt.models.vggt").VGGT.from_pretrained(source)


def open_vggt(name: str, network: nn.Module) -> Model:
    """Open a network of VGGT's layout for single frames.

    Args:
        name: What it was opened from.
        network: Has an ``aggregator``, and a ``camera_head``, a ``depth_head`` or both;
            one that is None is left out. Other heads are not used.

    Returns:
        A model with the tasks ``camera`` and ``depth``, as far as there are heads. Images
        are in [0, 1], since the network normalises them itself.

    Raises:
        UnsupportedModelError: If a part is missing or unknown.
    """
    parts: Any = network
    backbone = VggtBackbone(parts.aggregator)
    tasks: dict[str, Task] = {}
    if getattr(parts, "camera_head", None) is not None:
        tasks["camera"] = CameraPose(parts.camera_head)
    if getattr(parts, "depth_head", None) is not None:
        tasks["depth"] = FrameDepth(
            parts.depth_head, parts.depth_head.intermediate_layer_idx
        )
    if not tasks:
        raise UnsupportedModelError(
            "network must have a 'camera_head' or a 'depth_head' beside its aggregator; "
            f"got a {type(network).__name__} with neither."
        )
    patch, _ = backbone.patch_size
    size = _NATIVE_SIZE - _NATIVE_SIZE % patch
    return Model(name, backbone, tasks, ImageTransform(size, (0.0,) * 3, (1.0,) * 3))
