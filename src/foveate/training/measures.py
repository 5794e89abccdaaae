r"""How well the learned heads agree with the Jacobian they learn from.

The truth is importances of patches, or the r leading right singular vectors V of a Jacobian
with their energies :math:`S_j^2`. All is taken in float32 at least.
"""

import torch
from torch import Tensor
from torchmetrics.functional import spearman_corrcoef

from foveate.scoring.metric import PredictedMetric
from foveate.scoring.orthonormal import full_precision

__all__ = ["alignment", "energy_error", "is_separated", "metric_error", "spearman"]

GAP = 1.05  # singular values closer than this ratio swap from image to image


def spearman(pred: Tensor, target: Tensor) -> Tensor:
    """Rank correlation of each image's scores with the true ones.

    Args:
        pred: Scores, ``(B, K)``.
        target: True scores, ``(B, K)``; ties share the mean of their ranks.

    Returns:
        ``(B,)``, from -1 to 1; 0 where one of the two is constant and orders nothing.

    Raises:
        ValueError: If the shapes differ or a score is not finite.
    """
    check_scores(pred, target)
    if not (pred.isfinite().all() and target.isfinite().all()):
        raise ValueError("pred and target must be finite; got NaN or infinity.")
    both = torch.stack([pred.double(), target.double()]).to(pred.device)
    return spearman_corrcoef(both[0].T, both[1].T)  # one image a column


def alignment(directions: Tensor, vectors: Tensor) -> Tensor:
    r"""Share of one subspace in another, :math:`V_1 = \frac1r \lVert U^\top V \rVert_F^2`.

    Args:
        directions: Orthonormal rows U, ``(B, r, ...)``.
        vectors: Orthonormal rows V of the same shape.

    Returns:
        ``(B,)``, 1 for equal subspaces, r / n in the mean for random ones of n dimensions.

    Raises:
        ValueError: If the shapes differ.
    """
    return _overlap(directions, vectors).square().sum((1, 2)) / directions.shape[1]


def is_separated(energies: Tensor) -> Tensor:
    r"""Which modes have no neighbour that nearly coincides with them.

    Mode j is separated if :math:`\sigma_{j-1} / \sigma_j` and
    :math:`\sigma_j / \sigma_{j+1}` are at least 1.05. The first mode is judged by the
    second alone, and the last by the one before it alone, since the target does not hold
    the mode after it. Modes out of order are not separated.

    Args:
        energies: :math:`\sigma_j^2`, descending, ``(B, r)``.

    Returns:
        ``(B, r)``, bool.
    """
    has_gap = energies[:, :-1] >= GAP**2 * energies[:, 1:]  # (B, r - 1)
    edge = has_gap.new_ones(len(energies), 1)
    return torch.cat([edge, has_gap], 1) & torch.cat([has_gap, edge], 1)


def energy_error(predicted: PredictedMetric, energies: Tensor) -> Tensor:
    r"""Mean :math:`\lvert \log \lambda_j - \log S_j^2 \rvert` over the separated modes.

    Args:
        predicted: Metrics of B images.
        energies: True energies, descending and positive, ``(B, r)``.

    Returns:
        ``(B,)``; NaN for an image none of whose modes is separated.

    Raises:
        ValueError: If the shapes differ or an energy is not positive.
    """
    check_energies(predicted, energies)
    counts = is_separated(energies)
    errors = log_ratio(predicted, energies).abs()
    return torch.where(counts, errors, 0.0).sum(1) / counts.sum(1)


def metric_error(predicted: PredictedMetric, vectors: Tensor, energies: Tensor) -> Tensor:
    r"""Relative error of the metric as a whole, without its eps.

    :math:`\lVert \sum_j \lambda_j u_j u_j^\top - \sum_k S_k^2 v_k v_k^\top \rVert_F /
    \lVert \sum_k S_k^2 v_k v_k^\top \rVert_F`, which depends on no order of the modes.
    In float32 it is not resolved below about 1e-3. Cost: r^2 T C.

    Args:
        predicted: Metrics of B images, of rank r.
        vectors: Leading right singular vectors, orthonormal rows, ``(B, r, T, C)``.
        energies: Their energies, positive, ``(B, r)``.

    Returns:
        ``(B,)``, 0 for equal metrics.

    Raises:
        ValueError: If the shapes differ or an energy is not positive.
    """
    check_modes(predicted, vectors, energies)
    return squared_error(predicted, vectors, energies).clamp(min=0).sqrt()


def log_ratio(predicted: PredictedMetric, energies: Tensor) -> Tensor:
    """Predicted over true energies, ``(B, r)``, as a logarithm."""
    return predicted.energies.log() - energies.to(predicted.energies).log()


def _overlap(directions: Tensor, vectors: Tensor) -> Tensor:
    """Products of all rows, ``(B, r, ...)`` twice to ``(B, r, r)``."""
    if directions.shape != vectors.shape:
        raise ValueError(
            f"vectors must have the shape of the directions, {tuple(directions.shape)}; "
            f"got {tuple(vectors.shape)}."
        )
    with full_precision(directions):
        return directions.flatten(2) @ vectors.to(directions).flatten(2).mT


def squared_error(predicted: PredictedMetric, vectors: Tensor, energies: Tensor) -> Tensor:
    """Square of :func:`metric_error`, which may be a rounding error below zero."""
    found, true = predicted.energies, energies.to(predicted.energies)
    squares = _overlap(predicted.directions, vectors).square()  # (B, r, r)
    both = (found[:, :, None] * squares * true[:, None]).sum((1, 2))
    size = true.square().sum(1)
    return (found.square().sum(1) - 2 * both + size) / size


def check_scores(pred: Tensor, target: Tensor) -> None:
    """Refuse scores of different shapes."""
    if pred.ndim != 2 or pred.shape != target.shape:
        raise ValueError(
            "predicted and true scores must have one shape (B, K); got "
            f"{tuple(pred.shape)} and {tuple(target.shape)}."
        )


def check_modes(predicted: PredictedMetric, vectors: Tensor, energies: Tensor) -> None:
    """Refuse a target that does not fit the prediction."""
    check_energies(predicted, energies)
    if vectors.shape != predicted.directions.shape:
        raise ValueError(
            "vectors must have the shape of the directions, "
            f"{tuple(predicted.directions.shape)}; got {tuple(vectors.shape)}."
        )


def check_energies(predicted: PredictedMetric, energies: Tensor) -> None:
    """Refuse energies that do not fit the prediction or have no logarithm."""
    expected = tuple(predicted.energies.shape)
    if energies.shape != expected:
        raise ValueError(
            f"energies must have shape {expected}; got {tuple(energies.shape)}."
        )
    if not ((energies > 0) & energies.isfinite()).all():
        raise ValueError(
            "energies must be positive and finite, which those beyond the rank of a "
            f"Jacobian are not; got values from {float(energies.min()):.3g} to "
            f"{float(energies.max()):.3g}."
        )
