"""Share a whole number in proportion to weights, in whole numbers, exactly."""

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import floor, inf
from operator import index

__all__ = ["hamilton", "webster"]

Weights = Sequence[float | Fraction]
Bounds = Sequence[int] | None


def hamilton(
    weights: Weights, total: int, lower: Bounds = None, upper: Bounds = None
) -> list[int]:
    r"""Largest remainder: share ``total`` in proportion to weights, in integers.

    The quotas :math:`q_i = \mathrm{clamp}(\lambda w_i, l_i, u_i)` with
    :math:`\sum_i q_i = \mathrm{total}` are rounded down and what is left goes, one each, to
    the largest fractions; ties to the larger weight, then to the lower index. Each count is
    its quota rounded down or up, but a larger total can give an item less (the Alabama
    paradox): use :func:`webster` where budgets must nest. Weights that are negative or not
    finite, and bounds that no counts can meet, raise :class:`ValueError`.

    Args:
        weights: Nonnegative. Items of weight zero get their lower bound until all others
            are full, then equal shares.
        total: What to share.
        lower: Least count of each item; zeros if None.
        upper: Largest count of each item; ``total`` if None.

    Returns:
        Counts that sum to ``total``.

    References:
        Balinski and Young, "Fair representation", 1982.
    """
    exact, low, high = _problem(weights, total, lower, upper)
    quotas = _bounded_quotas(exact, total, low, high)
    counts = [floor(q) for q in quotas]
    order = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], -exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def webster(
    weights: Weights, total: int, lower: Bounds = None, upper: Bounds = None
) -> list[int]:
    r"""Webster's divisor method: units one by one to the largest :math:`w_i / (2 k_i + 1)`.

    A larger total never gives an item less, so budgets nest; in return a count can stray
    from its quota by more than one. Ties go to the larger weight, then to the lower count,
    then to the lower index. Errors as for :func:`hamilton`.

    Args:
        weights: Nonnegative. Items of weight zero get their lower bound until all others
            are full, then equal shares.
        total: What to share.
        lower: Least count of each item; zeros if None.
        upper: Largest count of each item; ``total`` if None.

    Returns:
        Counts that sum to ``total``.

    References:
        Balinski and Young, "Fair representation", 1982.
    """
    exact, counts, high = _problem(weights, total, lower, upper)

    def claim(i: int) -> tuple[Fraction, Fraction, int, int]:
        return (-exact[i] / (2 * counts[i] + 1), -exact[i], counts[i], i)

    heap = [claim(i) for i in range(len(exact)) if counts[i] < high[i]]
    heapify(heap)
    for _ in range(total - sum(counts)):
        i = heappop(heap)[-1]
        counts[i] += 1
        if counts[i] < high[i]:
            heappush(heap, claim(i))
    return counts


def _problem(
    weights: Weights, total: int, lower: Bounds, upper: Bounds
) -> tuple[list[Fraction], list[int], list[int]]:
    """Exact weights and both bounds, after checking that a solution exists."""
    count = len(weights)
    low = [0] * count if lower is None else [index(bound) for bound in lower]
    high = [total] * count if upper is None else [index(bound) for bound in upper]
    for name, bound in (("lower", low), ("upper", high)):
        if len(bound) != count:
            raise ValueError(f"{name} must have {count} bounds; got {len(bound)}.")
    for i, (weight, least, most) in enumerate(zip(weights, low, high, strict=True)):
        if not 0 <= weight < inf:
            raise ValueError(
                f"weights must be finite and nonnegative; got {weight} at {i}."
            )
        if not 0 <= least <= most:
            raise ValueError(f"bounds must ascend from 0; got {least} to {most} at {i}.")
    if not sum(low) <= total <= sum(high):
        raise ValueError(
            f"total must be in {sum(low)} to {sum(high)}, the sums of bounds; got {total}."
        )
    return [Fraction(w) for w in weights], low, high


def _bounded_quotas(
    weights: list[Fraction], total: int, lower: list[int], upper: list[int]
) -> list[Fraction]:
    """Exact ``clamp(scale x weight, lower, upper)`` that sum to ``total``."""

    def clamped(scale: Fraction) -> list[Fraction]:
        bounds = zip(weights, lower, upper, strict=True)
        return [
            min(max(scale * w, Fraction(low)), Fraction(high)) for w, low, high in bounds
        ]

    def spent(scale: Fraction) -> Fraction:
        return sum(clamped(scale), Fraction(0))

    # It rises with the scale, linearly between the scales at which an item meets a bound.
    both = [*zip(weights, lower, strict=True), *zip(weights, upper, strict=True)]
    edges = [Fraction(0), *sorted({bound / w for w, bound in both if w > 0})]
    after = bisect_left(edges, Fraction(total), key=spent)
    if after == len(edges):  # all items with a weight are full: the others share equally
        items = zip(weights, lower, upper, strict=True)
        filled = [high if w > 0 else low for w, low, high in items]
        return _bounded_quotas([Fraction(w == 0) for w in weights], total, filled, upper)
    if after == 0:
        return clamped(edges[0])
    a, b = edges[after - 1], edges[after]
    return clamped(a + (b - a) * (total - spent(a)) / (spent(b) - spent(a)))
