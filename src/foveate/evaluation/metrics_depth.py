"""Errors of a depth map, per image."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from foveate.data.nyu import MAX_DEPTH, MIN_DEPTH
from foveate.evaluation.metrics import Means

NAMES = ("abs_rel", "rmse", "delta1", "log10", "silog")
MIN_DISPARITY = 1e-3  # 1/m; what an aligned disparity is cut off at before it is inverted
LIMITS = (MIN_DEPTH, MAX_DEPTH)


def depth_errors(
    predicted: Tensor,
    target: Tensor,
    valid: Tensor,
    limits: tuple[float, float] = LIMITS,
    variance_focus: float = 1.0,
) -> Tensor:
    r"""Errors of metric depth in one image.

    With :math:`d` and :math:`d^*` the predicted and true depth of a pixel and
    :math:`e = \ln d - \ln d^*`, means over the valid pixels: ``abs_rel``
    :math:`|d - d^*| / d^*`; ``rmse`` :math:`\sqrt{(d - d^*)^2}` in metres; ``delta1``, the
    share with :math:`\max(d / d^*, d^* / d) < 1.25`; ``log10``
    :math:`|\log_{10} d - \log_{10} d^*|`; ``silog``
    :math:`100 \sqrt{\overline{e^2} - \lambda \bar e^2}`.

    Args:
        predicted: Depth in metres, ``(h, w)``; resized to the target (bilinear, corners
            aligned), then infinite becomes the upper limit, not a number the lower one,
            and what is outside the limits is set to them, as ZoeDepth does.
        target: True depth in metres, ``(H, W)``.
        valid: Pixels that count, ``(H, W)``, bool; there the target is positive.
        limits: Smallest and largest depth in metres.
        variance_focus: Lambda of ``silog``. 1 is BTS's and ZoeDepth's; Depth Anything V2
            trains with 0.5, and without the factor 100.

    Returns:
        The five in the order of ``NAMES``, ``(5,)``, float64; not a number if no pixel is
        valid.

    Raises:
        ValueError: If shapes do not fit, a valid target is not positive, the limits are
            not ascending and positive, or lambda is not within [0, 1].
    """
    _check(predicted, target, valid)
    if not 0 < limits[0] < limits[1]:
        raise ValueError(f"limits must be positive and ascending; got {limits}.")
    if not 0 <= variance_focus <= 1:
        raise ValueError(f"variance_focus must be within [0, 1]; got {variance_focus}.")
    resized = resize(predicted, target.shape).nan_to_num(*_ends(limits)).clamp(*limits)
    d, truth = resized[valid], target.double()[valid]
    e = d.log() - truth.log()
    spread = (e - e.mean()).square().mean() + (1 - variance_focus) * e.mean().square()
    return torch.stack([
        ((d - truth).abs() / truth).mean(),
        (d - truth).square().mean().sqrt(),
        (torch.maximum(d / truth, truth / d) < 1.25).double().mean(),
        e.abs().mean() / np.log(10),
        100 * spread.sqrt(),
    ])


def align_disparity(
    predicted: Tensor,
    target: Tensor,
    valid: Tensor,
    limits: tuple[float, float] = LIMITS,
) -> Tensor:
    r"""Turn relative disparity into depth by the best scale and shift for the image.

    Least squares for :math:`1 / d^* \approx s p + t` over the valid pixels with
    :math:`p > 0`, then :math:`d = 1 / \max(s p + t, 0.001)`, within the limits.

    Args:
        predicted: Disparity up to scale and shift, ``(h, w)``; resized to the target.
        target: True depth in metres, ``(H, W)``.
        valid: Pixels that count, ``(H, W)``, bool.
        limits: Smallest and largest depth in metres.

    Returns:
        Depth in metres, ``(H, W)``, float64. Without a valid pixel, the resized
        prediction, of which no error is defined.

    Raises:
        ValueError: If shapes do not fit, a number is not finite, or fewer than 2 valid
            pixels are positive.

    References:
        Ke et al., "Repurposing diffusion-based image generators for monocular depth
        estimation" (Marigold), CVPR 2024; Depth Anything V2, issue 157.
    """
    _check(predicted, target, valid)
    if not predicted.isfinite().all():
        raise ValueError("predicted must be finite to be aligned; a pixel is not.")
    p = resize(predicted, target.shape)
    if not valid.any():
        return p
    used = valid & (p > 0)
    if used.sum() < 2:
        raise ValueError(
            "predicted must be positive on at least 2 valid pixels to be aligned; got "
            f"{int(used.sum())}."
        )
    columns = torch.stack([p[used], torch.ones_like(p[used])], dim=1)
    disparity = 1 / target.double()[used]
    scale, shift = np.linalg.lstsq(columns.numpy(), disparity.numpy(), rcond=None)[0]
    return (1 / (scale * p + shift).clamp(min=MIN_DISPARITY)).clamp(*limits)


def gather(errors: list[Tensor]) -> Means:
    """Put the images of a data set together in their order, by name."""
    return Means(dict(zip(NAMES, torch.stack(errors).T, strict=True)))


def resize(depth: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize a map, ``(h, w) -> (H, W)``, float64; one of that size is left as it is."""
    if depth.shape == size:
        return depth.double().cpu()
    shown = depth.double().cpu()[None, None]
    return interpolate(shown, size, mode="bilinear", align_corners=True)[0, 0]


def _ends(limits: tuple[float, float]) -> tuple[float, float, float]:
    """What not a number, infinity and minus infinity become."""
    return limits[0], limits[1], limits[0]


def _check(predicted: Tensor, target: Tensor, valid: Tensor) -> None:
    if predicted.ndim != 2 or target.ndim != 2 or valid.shape != target.shape:
        raise ValueError(
            "predicted must be (h, w), target and valid (H, W); got "
            f"{tuple(predicted.shape)}, {tuple(target.shape)} and {tuple(valid.shape)}."
        )
    if not (target[valid] > 0).all():
        raise ValueError("target must be positive where it is valid; a pixel is not.")
