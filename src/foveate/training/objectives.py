r"""Losses of the learned heads.

Targets come from a Jacobian: importances of patches, or its r leading right singular
vectors V with their energies :math:`S_j^2`. All is taken in float32 at least.
"""

import torch
from torch import Generator, Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from foveate.scoring.metric import PredictedMetric
from foveate.tokens import widen
from foveate.training.measures import (
    alignment,
    check_modes,
    check_scores,
    is_separated,
    log_ratio,
    squared_error,
)

__all__ = ["draw_pairs", "importance_loss", "log_importance", "metric_loss", "ranking_loss"]

TEMPERATURE = 0.25  # log-importances closer than this ask for more than their order


def log_importance(importance: Tensor, floor: float = 1e-3) -> Tensor:
    """Logarithm of importances, none below a share of the image's mean.

    A patch that a task ignores has importance zero and no logarithm: it counts as
    ``floor`` times the mean of its image, so that no image is ruled by how far below
    everything else its dead patches are.

    Args:
        importance: Nonnegative, ``(B, K)``.
        floor: Share of the mean over patches, positive.

    Returns:
        ``(B, K)``, finite.

    Raises:
        ValueError: If a value is negative or not finite, or all of an image are zero.
    """
    if not floor > 0:
        raise ValueError(f"floor must be positive; got {floor}.")
    importance = widen(importance)
    if not ((importance >= 0) & importance.isfinite()).all():
        raise ValueError("importance must be nonnegative and finite; got other values.")
    mean = importance.mean(1, keepdim=True)
    if not (mean > 0).all():
        dead = (mean[:, 0] == 0).nonzero()[:, 0].tolist()
        raise ValueError(
            f"importance must not be zero for a whole image; images {dead} are."
        )
    return torch.maximum(importance, floor * mean).log()


def draw_pairs(num_patches: int, num_pairs: int, generator: Generator) -> Tensor:
    """Draw pairs of different patches, with replacement.

    Args:
        num_patches: Patches, K, at least 2.
        num_pairs: Pairs, Q.
        generator: Source of the pairs, on the CPU.

    Returns:
        Indices of the first and of the second, ``(2, Q)``.

    Raises:
        ValueError: If there are fewer than two patches or no pair.
    """
    if num_patches < 2 or num_pairs < 1:
        raise ValueError(
            "num_patches must be at least 2 and num_pairs at least 1; got "
            f"{num_patches} and {num_pairs}."
        )
    first = torch.randint(num_patches, (num_pairs,), generator=generator)
    step = torch.randint(1, num_patches, (num_pairs,), generator=generator)
    return torch.stack([first, (first + step) % num_patches])


def ranking_loss(
    log_pred: Tensor, log_target: Tensor, pairs: Tensor | None = None
) -> Tensor:
    r"""Pairwise logistic loss (RankNet) that the true log-importances minimise.

    With :math:`p_{ij} = \mathrm{sigmoid}((s_i - s_j) / T)` for the target, T = 1/4, and
    :math:`\hat p_{ij}` for the prediction, it is the mean over pairs of
    :math:`\mathrm{KL}(p_{ij} \,\Vert\, \hat p_{ij})`: zero if and only if all differences
    agree. Pairs further apart than a few T have :math:`p \approx 1` and ask for nothing but
    their order; close ones ask for their difference, in which a tie is one like any other.
    Labels of 0 and 1 instead would be minimised at infinite differences, against the
    regression beside them.

    Args:
        log_pred: Predicted log-importance, ``(B, K)``.
        log_target: True log-importance, ``(B, K)``.
        pairs: Indices of the patches to compare, ``(2, Q)``; None for all pairs, with a
            memory of K^2 / 2 numbers an image.

    Returns:
        A nonnegative number.

    Raises:
        ValueError: If the shapes differ, or there are no two patches to compare.

    References:
        Burges et al., "Learning to rank using gradient descent", ICML 2005.
    """
    check_scores(log_pred, log_target)
    if pairs is None:
        size = log_pred.shape[1]
        pairs = torch.triu_indices(size, size, 1, device=log_pred.device)
    if not pairs.numel():
        raise ValueError("pairs must hold at least one pair of patches; got none.")
    first, second = pairs.to(log_pred.device)
    predicted, true = (
        (widen(s)[:, first] - widen(s)[:, second]) / TEMPERATURE
        for s in (log_pred, log_target)
    )
    true = true.to(predicted)
    likely = true.sigmoid()
    return binary_cross_entropy_with_logits(
        predicted, likely
    ) - binary_cross_entropy_with_logits(true, likely)


def importance_loss(
    log_pred: Tensor, log_target: Tensor, pairs: Tensor | None = None
) -> Tensor:
    r"""Loss of the importance head: MSE of the logs + 0.5 x ranking loss.

    Args:
        log_pred: Predicted log-importance, ``(B, K)``.
        log_target: True log-importance, ``(B, K)``, from :func:`log_importance`.
        pairs: As of :func:`ranking_loss`.

    Returns:
        A nonnegative number.

    Raises:
        ValueError: If the shapes differ or a target is not finite, as the log of zero is.
    """
    check_scores(log_pred, log_target)
    if not log_target.isfinite().all():
        raise ValueError(
            "log_target must be finite, with zeros replaced by a floor; got NaN or "
            "infinity."
        )
    regression = mse_loss(widen(log_pred), log_target.to(widen(log_pred)))
    return regression + 0.5 * ranking_loss(log_pred, log_target, pairs)


def metric_loss(
    predicted: PredictedMetric,
    vectors: Tensor,
    energies: Tensor,
    coupling: float = 0.0,
) -> Tensor:
    r"""Loss of the metric network.

    .. math::
        1 - \tfrac1r \lVert U^\top V \rVert_F^2
        + \mathrm{MSE}(\log \lambda, \log S^2) ,

    the first term averaged over images, the second over all separated modes of the batch
    (:func:`~foveate.training.measures.is_separated`), and zero if there is none. It does
    not change when directions turn within their span, hence leaves open which direction an
    energy belongs to; a positive ``coupling`` adds that multiple of the squared
    :func:`~foveate.training.measures.metric_error`, which settles it.

    Args:
        predicted: Metrics of B images, of rank r.
        vectors: Leading right singular vectors, orthonormal rows, ``(B, r, T, C)``.
        energies: Their energies, descending and positive, ``(B, r)``.
        coupling: Weight of the squared error of the metric as a whole; 0 is the paper's
            loss.

    Returns:
        A nonnegative number.

    Raises:
        ValueError: If the shapes differ, or an energy is not positive, as those beyond the
            rank of a Jacobian are: ask for a smaller rank.
    """
    check_modes(predicted, vectors, energies)
    aligned = alignment(predicted.directions, vectors).mean()
    counts = is_separated(energies)
    squares = log_ratio(predicted, energies).square()
    fit = torch.where(counts, squares, 0.0).sum() / counts.sum().clamp(min=1)
    loss = 1 - aligned + fit
    if coupling:
        loss = loss + coupling * squared_error(predicted, vectors, energies).mean()
    return loss
