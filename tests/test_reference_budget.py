"""Oracle: all allocations of a small budget, tried one by one; hand-made cases."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from tests import reference_reduction as ref
from tests.reference_budget import bounded_quotas


def test_macs_by_hand():
    block = 4 * 2 * 9 + 2 * 4 * 3 + 2 * 1 * 3 * 4
    assert ref.macs([2], [1], 3, 4) == block
    assert ref.macs([2, 2], [1, 1], 3, 4) == 2 * block


def test_hamilton_has_the_alabama_paradox_and_webster_has_not():
    free = {"lower": [0] * 3, "upper": [99] * 3}
    assert ref.hamilton([6, 6, 2], 10, **free) == [4, 4, 2]
    assert ref.hamilton([6, 6, 2], 11, **free) == [5, 5, 1]
    for total in range(40):
        less, more = (ref.webster([6, 6, 2], t, **free) for t in (total, total + 1))
        assert sorted(np.subtract(more, less)) == [0, 0, 1]


def test_webster_is_not_dhondt():
    # Priorities 53, 24, 23, 53/3, 53/5, 24/3, 23/3; D'Hondt would give 4, 2, 1.
    assert ref.webster([53, 24, 23], 7, [0] * 3, [9] * 3) == [3, 2, 2]


def test_bounds_that_bind_on_both_sides():
    assert ref.hamilton([10, 1, 1], 12, [0, 3, 0], [5, 9, 9]) == [5, 4, 3]
    assert ref.hamilton([1, 10, 1], 12, [5, 0, 0], [20, 9, 20]) == [5, 6, 1]
    assert ref.hamilton([0, 0, 0], 7, [0] * 3, [9] * 3) == [3, 2, 2]
    assert ref.webster([0, 0, 0], 7, [0] * 3, [9] * 3) == [3, 2, 2]
    assert ref.hamilton([0, 1], 5, [0, 0], [5, 3]) == [2, 3]


def random_budget(seed):
    """Weights, total, lower and upper bounds of four items; a solution exists."""
    draw = np.random.default_rng(seed)
    weights = [int(w) for w in draw.integers(1, 9, 4)]
    lower = [int(v) for v in draw.integers(0, 3, 4)]
    upper = [v + int(d) for v, d in zip(lower, draw.integers(0, 5, 4), strict=True)]
    total = int(draw.integers(sum(lower), sum(upper) + 1))
    return weights, total, lower, upper


@pytest.mark.parametrize("seed", range(12))
def test_budgets_against_all_allocations(seed):
    weights, total, lower, upper = random_budget(seed)
    boxes = (range(a, b + 1) for a, b in zip(lower, upper, strict=True))
    allocations = [k for k in itertools.product(*boxes) if sum(k) == total]
    quotas = bounded_quotas(weights, total, lower, upper)

    def from_quota(k):
        return sum((a - q) ** 2 for a, q in zip(k, quotas, strict=True))

    def from_weight(k):
        return sum(Fraction(a * a, w) for a, w in zip(k, weights, strict=True))

    largest_remainder = ref.hamilton(weights, total, lower, upper)
    sainte_lague = ref.webster(weights, total, lower, upper)
    assert tuple(largest_remainder) in allocations
    assert tuple(sainte_lague) in allocations
    assert from_quota(largest_remainder) == min(map(from_quota, allocations))
    assert from_weight(sainte_lague) == min(map(from_weight, allocations))


@pytest.mark.parametrize("seed", range(12))
def test_quotas_are_one_multiple_of_the_weights_clamped_to_the_bounds(seed):
    weights, total, lower, upper = random_budget(seed)
    quotas = bounded_quotas(weights, total, lower, upper)
    items = list(zip(quotas, weights, lower, upper, strict=True))
    assert sum(quotas) == total
    assert all(low <= q <= high for q, _, low, high in items)
    at_least = max((q / Fraction(w) for q, w, low, _ in items if q > low), default=0)
    at_most = min((q / Fraction(w) for q, w, _, high in items if q < high), default=99)
    assert at_least <= at_most  # some multiple t satisfies every item


def test_impossible_budgets_are_refused():
    with pytest.raises(ValueError, match=r"total must be between 1 and 4; got 5\."):
        ref.hamilton([1, 1], 5, [1, 0], [2, 2])
    with pytest.raises(ValueError, match=r"weights must not be negative; got \[1, -1\]\."):
        ref.webster([1, -1], 1, [0, 0], [2, 2])
    with pytest.raises(ValueError, match=r"lower must not exceed upper; got \[3\] and"):
        ref.webster([1], 3, [3], [2])
