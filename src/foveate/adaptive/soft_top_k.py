"""Keeping the best k, differentiable in the scores and in k."""

import torch
from torch import Tensor

from foveate.reduction.masked import ABSENT

__all__ = ["chance_to_stay", "hard_top_k", "soft_top_k", "straight_through_top_k"]

_BISECTIONS = 60


def soft_top_k(
    scores: Tensor, count: Tensor, alive: Tensor, temperature: float = 1.0
) -> Tensor:
    r"""Probability that a patch is among the best, summing to a count.

    :math:`m_i = \sigma((s_i - t) / \tau)` with the threshold t at which
    :math:`\sum_i m_i = k`. The threshold is found by bisection; one step of Newton's
    method from there, which changes nothing but rounding, gives it the derivatives of the
    implicit function: :math:`\partial t / \partial s_j = w_j` and
    :math:`\partial t / \partial k = -\tau / \sum_i m_i (1 - m_i)` with
    :math:`w_j \propto m_j (1 - m_j)`.

    Args:
        scores: ``(B, N)``; higher = keep.
        count: How many to keep, ``(B,)``, real, above 0 and below the number alive.
        alive: Which patches there are, ``(B, N)``, bool; the others have probability 0.
        temperature: In units of the scores; the lower, the harder.

    Returns:
        ``(B, N)``, in [0, 1]. Cost: 60 passes over the scores, without gradient, and two
        with it.
    """
    with torch.no_grad():
        start = _threshold(scores, count, alive, temperature)
    soft = _gate(scores, start, alive, temperature)
    slope = (soft * (1 - soft)).sum(1, keepdim=True).detach().clamp(min=ABSENT)
    excess = soft.sum(1, keepdim=True) - count[:, None]
    threshold = start + temperature * excess / slope
    return _gate(scores, threshold, alive, temperature)


def hard_top_k(scores: Tensor, count: Tensor, alive: Tensor) -> Tensor:
    """Mark the best patches, ties to the lower index.

    Args:
        scores: ``(B, N)``; higher = keep.
        count: How many to keep, ``(B,)``, whole numbers.
        alive: Which patches there are, ``(B, N)``, bool.

    Returns:
        ``(B, N)``, bool.
    """
    order = scores.masked_fill(~alive, -torch.inf).sort(dim=1, descending=True, stable=True)
    rank = order.indices.argsort(dim=1)
    return (rank < count[:, None]) & alive


def straight_through_top_k(
    scores: Tensor, count: Tensor, alive: Tensor, temperature: float = 1.0
) -> Tensor:
    """Exactly the best forwards, their probabilities backwards.

    Args:
        scores: ``(B, N)``; higher = keep.
        count: How many to keep, ``(B,)``; whole forwards, any gradient backwards.
        alive: Which patches there are, ``(B, N)``, bool.
        temperature: Of the probabilities.

    Returns:
        ``(B, N)``: 0 or 1 by value.
    """
    hard = hard_top_k(scores.detach(), count.detach().round(), alive).to(scores.dtype)
    soft = soft_top_k(scores, count, alive, temperature)
    return hard + (soft - soft.detach())


@torch.no_grad()
def chance_to_stay(
    scores: Tensor, count: Tensor, alive: Tensor, temperature: float = 1.0
) -> Tensor:
    """Probability that a patch would stay, whether it is still there or not.

    Args:
        scores: ``(B, N)``; of a patch that is gone, what it would score.
        count: How many of those alive to keep, ``(B,)``.
        alive: Which patches there are, ``(B, N)``, bool; they alone set the threshold.
        temperature: Of the probabilities.

    Returns:
        ``(B, N)``, in [0, 1], without gradient; that of :func:`soft_top_k` if alive.
    """
    threshold = _threshold(scores, count, alive, temperature)
    return _gate(scores, threshold, torch.ones_like(alive), temperature)


def _gate(scores: Tensor, threshold: Tensor, alive: Tensor, temperature: float) -> Tensor:
    return ((scores - threshold) / temperature).sigmoid() * alive


def _threshold(scores: Tensor, count: Tensor, alive: Tensor, temperature: float) -> Tensor:
    """Threshold at which the probabilities sum to the count, ``(B, 1)``."""
    edge = 40 * temperature  # beyond it a probability is 0 or 1 in float64
    low = scores.masked_fill(~alive, torch.inf).amin(1, keepdim=True) - edge
    high = scores.masked_fill(~alive, -torch.inf).amax(1, keepdim=True) + edge
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        total = _gate(scores, middle, alive, temperature).sum(1, keepdim=True)
        above = total > count[:, None]
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2
