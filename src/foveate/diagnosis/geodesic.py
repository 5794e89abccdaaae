"""Length of a path between two feature maps, by the metric of the task's output."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.diagnosis.jacobian import Tail

__all__ = ["PathLength", "path_length", "straight"]

Path = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PathLength:
    """Length of a path for each image, all ``(B,)``, float64.

    Attributes:
        length: Length of the path. The shortest path is no longer than any path.
        error: Estimated discretisation error of ``length``.
        chord: Distance of the outputs at the ends; under a constant metric, no path is
            shorter. With a factor it is measured by that of the start, and bounds nothing.
        speeds: ``||J dF/ds||`` at evenly spaced s from 0 to 1, ``(B, 2 * intervals + 1)``.
    """

    length: Tensor
    error: Tensor
    chord: Tensor
    speeds: Tensor


def straight(start: Tensor, end: Tensor) -> Path:
    """The straight path, ``s -> start + s (end - start)``."""
    return lambda s: start + s * (end - start)


def path_length(
    tail: Tail,
    path: Path,
    intervals: int = 8,
    factor: Callable[[Tensor], Tensor] | None = None,
) -> PathLength:
    r"""Integrate :math:`\lVert J \, dF \rVert` along a path, by Simpson's rule.

    .. math:: \ell = \int_0^1 \lVert L(y) \, J(F(s)) \, F'(s) \rVert \, ds

    The rule is applied to n and, on the same points and those between them, to 2 n
    intervals; ``length`` is that of 2 n, and ``error`` is the distance of the two. Where
    the speed is smooth the true error is about a fifteenth of it; at a kink, as of a ReLU
    or where the speed touches zero, it is a part of it that is no longer known.

    Cost: ``2 * intervals + 1`` JVPs, each with a forward pass. Memory: that of one.

    Args:
        tail: What follows the tap, ``(B, T, C) -> (B, M)``.
        path: Feature maps ``(B, T, C)`` for a number s from 0 to 1, differentiable, as
            :func:`straight`.
        intervals: n, even, at least 2.
        factor: Factor L of a metric on the output, ``(B, M) -> (B, M', M)``, as
            :func:`foveate.diagnosis.pose_metric.pose_factor`; Euclidean if None.

    Returns:
        The length for each image.

    Raises:
        ValueError: If ``intervals`` is odd or below 2.

    Example:
        >>> ends = torch.zeros(1, 2, 1), torch.ones(1, 2, 1)
        >>> found = path_length(lambda x: 3 * x.flatten(1), straight(*ends))
        >>> round(found.length.item(), 4)  # of (3, 3)
        4.2426
    """
    if intervals < 2 or intervals % 2:
        raise ValueError(f"intervals must be even and at least 2; got {intervals}.")
    # A float64 number leaves the dtype of the tensors it is multiplied with alone.
    steps = torch.linspace(0, 1, 2 * intervals + 1, dtype=torch.float64)
    outputs, speeds = [], []
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        for s in steps:
            y, dy, *_ = jvp(lambda at: tail(path(at)), (s,), (torch.ones_like(s),))
            outputs.append(y)
            speeds.append(_length(y, dy, factor))
    speed = torch.stack(speeds, dim=1)  # (B, 2 n + 1)
    fine, coarse = simpson(speed), simpson(speed[:, ::2])
    chord = _length(outputs[0], outputs[-1] - outputs[0], factor)
    return PathLength(fine, (fine - coarse).abs(), chord, speed)


def simpson(values: Tensor) -> Tensor:
    """Integral from 0 to 1 of values at evenly spaced points, ``(B, 2 n + 1) -> (B,)``."""
    ends, odd, even = values[:, [0, -1]], values[:, 1::2], values[:, 2:-1:2]
    return (ends.sum(1) + 4 * odd.sum(1) + 2 * even.sum(1)) / (3 * (values.shape[1] - 1))


def _length(
    output: Tensor, change: Tensor, factor: Callable[[Tensor], Tensor] | None
) -> Tensor:
    if factor is not None:
        change = (factor(output) @ change[..., None])[..., 0]
    return change.double().norm(dim=1)
