"""Heads to be trained on a frozen backbone, by kind and settings."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from foveate.tasks import TrainableTask
from foveate.tasks.classification import (
    Logits,
    Pool,
    class_token,
    class_token_and_mean_patch,
    mean_patch,
)
from foveate.tasks.detection import SCALES, Detection
from foveate.tasks.segmentation import LinearSegmenter, MultiScaleSegmenter, Segmentation

__all__ = ["DEFAULTS", "build_head"]

_POOLS: dict[str, tuple[Pool, int, bool]] = {
    "class": (class_token, 1, False),
    "patches": (mean_patch, 1, True),
    "class+patches": (class_token_and_mean_patch, 2, True),
}
_SEGMENTERS = {"linear": LinearSegmenter, "multiscale": MultiScaleSegmenter}

DEFAULTS: dict[str, dict[str, Any]] = {
    "classification": {"pool": "class"},
    "segmentation": {"head": "linear", "depths": []},
    "detection": {
        "width": 96,
        "scales": list(SCALES),
        "hidden": 256,
        "proposals": 100,
        "with_masks": True,
    },
}
"""For each kind its settings."""


def build_head(
    kind: str, channels: int, num_classes: int, settings: Mapping[str, Any] | None = None
) -> TrainableTask:
    """Untrained head of a kind.

    Args:
        kind: ``classification`` (a linear layer on ``pool``: ``class``, ``patches`` or
            ``class+patches``), ``segmentation`` (``head``: ``linear`` or ``multiscale``, on
            the maps at ``depths``) or ``detection`` (see
            :class:`~foveate.tasks.detection.Detection`).
        channels: Channels of a token.
        num_classes: Classes; of segmentation with the background if it is one.
        settings: What differs from :data:`DEFAULTS`.

    Returns:
        The head, which is a task.

    Raises:
        ValueError: If there is no such kind or setting.
    """
    if kind not in DEFAULTS:
        raise ValueError(f"kind must be one of {', '.join(DEFAULTS)}; got '{kind}'.")
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1; got {num_classes}.")
    unknown = sorted(set(settings or {}) - set(DEFAULTS[kind]))
    if unknown:
        known = ", ".join(DEFAULTS[kind])
        raise ValueError(f"settings of {kind} are {known}; got {', '.join(unknown)}.")
    given = {**DEFAULTS[kind], **(settings or {})}
    return _BUILDERS[kind](channels, num_classes, given)


def _classification(channels: int, num_classes: int, given: dict[str, Any]) -> Logits:
    pool, parts, needs_grid = _choose(_POOLS, given["pool"], "pool")
    classifier = nn.Linear(parts * channels, num_classes)
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)
    return Logits(classifier, pool, needs_grid=needs_grid)


def _segmentation(channels: int, num_classes: int, given: dict[str, Any]) -> Segmentation:
    decoder = _choose(_SEGMENTERS, given["head"], "head")
    depths = tuple(given["depths"])
    return Segmentation(decoder(channels, max(1, len(depths)), num_classes), depths)


def _detection(channels: int, num_classes: int, given: dict[str, Any]) -> Detection:
    return Detection(channels, num_classes, **given)


def _choose(table: Mapping[str, Any], name: str, setting: str) -> Any:  # noqa: ANN401
    if name not in table:
        raise ValueError(f"{setting} must be one of {', '.join(table)}; got '{name}'.")
    return table[name]


_BUILDERS: dict[str, Callable[[int, int, dict[str, Any]], TrainableTask]] = {
    "classification": _classification,
    "segmentation": _segmentation,
    "detection": _detection,
}
