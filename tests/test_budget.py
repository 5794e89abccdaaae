"""Oracle: slow apportionment in ``reference_budget``; invariants; decimals by hand."""

from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foveate.backbones import open_backbone
from foveate.reduction.budget import (
    constant_schedule,
    hamilton,
    keep_count,
    linear_schedule,
    list_schedule,
    macs_schedule,
    ratio_schedule,
    webster,
)
from foveate.reduction.macs import encoder_macs, token_counts
from foveate.tokens import Layout
from tests import reference_budget as reference
from tests import tiny

METHODS = {"hamilton": hamilton, "webster": webster}
both = pytest.mark.parametrize("name", METHODS)
quick = settings(deadline=None, max_examples=150, derandomize=True)


@st.composite
def problems(draw, floats=False):
    """Weights, a feasible total, and bounds."""
    number = st.floats(0, 10, allow_subnormal=False) if floats else st.integers(0, 6)
    items = draw(
        st.lists(st.tuples(number, st.integers(0, 5), st.integers(0, 9)), min_size=1)
    )
    weights, lower, room = (list(column) for column in zip(*items, strict=True))
    upper = [a + b for a, b in zip(lower, room, strict=True)]
    total = draw(st.integers(sum(lower), sum(upper)))
    return weights, total, lower, upper


@pytest.mark.parametrize(
    ("num_patches", "ratio", "count"),
    [
        (256, 0.95, 243),  # 243.2
        (685, 0.5, 343),  # 342.5 rounds up
        (1369, 0.5, 685),  # 684.5
        (10, 0.35, 4),  # exactly 3.5, though the float is below
        (100, 0.285, 29),  # 28.5; 0.285 * 100 is 28.499999999999996
        (100, 0.145, 15),  # 14.5; 0.145 * 100 is 14.499999999999998
        (10, 0.15, 2),
        (7, 1, 7),
        (3, Fraction(1, 2), 2),
        (3, Decimal("0.49"), 1),
    ],
)
def test_ratio_is_rounded_half_up_as_it_is_written(num_patches, ratio, count):
    assert keep_count(num_patches, ratio) == count


@pytest.mark.parametrize("ratio", [0, -0.5, 1.0001, float("nan"), float("inf")])
def test_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(ValueError, match=rf"in \(0, 1\]; got {ratio}\."):
        keep_count(10, ratio)


def test_ratio_that_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match=r"at least 1 of 10 patches; got 0\.04\."):
        keep_count(10, 0.04)


@both
@quick
@given(problem=problems())
def test_counts_equal_the_reference(name, problem):
    assert METHODS[name](*problem) == getattr(reference, name)(*problem)


@both
@quick
@given(problem=problems(floats=True))
def test_counts_equal_the_reference_for_real_weights(name, problem):
    assert METHODS[name](*problem) == getattr(reference, name)(*problem)


@both
@quick
@given(problem=problems(floats=True))
def test_sum_is_exact_and_bounds_hold(name, problem):
    _, total, lower, upper = problem
    counts = METHODS[name](*problem)
    assert sum(counts) == total
    assert all(a <= k <= b for a, k, b in zip(lower, counts, upper, strict=True))


@quick
@given(
    weights=st.lists(st.integers(0, 20), min_size=1, max_size=8), total=st.integers(0, 60)
)
def test_hamilton_stays_within_its_quota(weights, total):
    assume(sum(weights) > 0)
    quotas = [Fraction(total * w, sum(weights)) for w in weights]
    counts = hamilton(weights, total)
    assert all(floor(q) <= k <= ceil(q) for q, k in zip(quotas, counts, strict=True))


@quick
@given(problem=problems())
def test_webster_never_takes_back(problem):
    weights, total, lower, upper = problem
    assume(total < sum(upper))
    fewer = webster(weights, total, lower, upper)
    more = webster(weights, total + 1, lower, upper)
    assert all(a <= b for a, b in zip(fewer, more, strict=True))


def test_hamilton_has_the_alabama_paradox_and_webster_not():
    weights = [6, 6, 2]
    assert hamilton(weights, 10) == [4, 4, 2]
    assert hamilton(weights, 11) == [5, 5, 1]
    assert webster(weights, 10)[2] <= webster(weights, 11)[2]


@both
def test_weights_of_zero_share_equally(name):
    assert METHODS[name]([0, 0, 0], 7) == [3, 2, 2]
    assert METHODS[name]([0, 5, 0], 8, None, [9, 4, 9]) == [2, 4, 2]


@both
def test_ties_go_to_the_larger_weight_then_the_lower_index(name):
    assert METHODS[name]([1, 1, 1], 1) == [1, 0, 0]
    assert METHODS[name]([1, 3], 2) == [0, 2]  # quotas 1/2 and 3/2; priorities 1/1 and 3/3


@both
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 1], 9, [0, 0], [4, 4]), r"total must be in 0 to 8, .*; got 9\."),
        (
            ([1, 1], 1, [2, 1], None),
            r"bounds must ascend from 0; got 2 to 1 at 0\.",
        ),
        (([1, -2], 3), r"finite and nonnegative; got -2 at 1\."),
        (([1, float("nan")], 3), r"finite and nonnegative; got nan at 1\."),
        (([float("inf"), 1], 3), r"finite and nonnegative; got inf at 0\."),
        (([1, 1], 3, [0, 3], [3, 2]), r"bounds must ascend from 0; got 3 to 2 at 1\."),
        (([1, 1], 3, [-1, 0], [3, 2]), r"bounds must ascend from 0; got -1 to 3 at 0\."),
        (([1, 1], 3, [0]), r"lower must have 2 bounds; got 1\."),
        (([1, 1], 3, None, [1, 2, 3]), r"upper must have 2 bounds; got 3\."),
        (([], 3), r"total must be in 0 to 0, .*; got 3\."),
        (([1, 1], -1), r"bounds must ascend from 0; got 0 to -1 at 0\."),
    ],
)
def test_impossible_budgets_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        METHODS[name](*arguments)


def test_constant_schedule_removes_the_same_everywhere():
    assert constant_schedule(35, [0, 1, 4], 8) == {0: 27, 1: 19, 4: 11}


@quick
@given(
    depths=st.lists(st.integers(0, 11), min_size=2, unique=True).map(sorted),
    removed=st.integers(0, 16),
    inflection=st.integers(-10, 10).map(lambda i: i / 10),
)
def test_linear_schedule_spends_the_mean_and_follows_its_line(depths, removed, inflection):
    schedule = linear_schedule(197, depths, removed, inflection)
    left = [197, *schedule.values()]
    gone = [a - b for a, b in pairwise(left)]
    assert list(schedule) == depths
    assert sum(gone) == removed * len(depths)
    ends = (removed * (1 - inflection), removed * (1 + inflection))
    for i, number in enumerate(gone):
        line = ends[0] + (ends[1] - ends[0]) * i / (len(gone) - 1)
        assert abs(number - line) < 1 + 1e-9
    assert gone == sorted(gone, reverse=inflection < 0)


def test_linear_schedule_ends_at_zero_and_at_twice_the_mean():
    schedule = linear_schedule(197, range(12), 16, -1)
    assert schedule[0] == 197 - 32
    assert schedule[10] == schedule[11] == 197 - 192


@pytest.mark.parametrize("size", [37, 256, 1369])
@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.95, 1])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_ratio_schedule_steps_geometrically(size, ratio, steps):
    depths = list(range(1, steps + 1))
    schedule = ratio_schedule(size, depths, ratio)
    counts = list(schedule.values())
    assert list(schedule) == depths
    assert counts[-1] == keep_count(size, ratio)
    assert counts == sorted(counts, reverse=True)
    for i, count in enumerate(counts, 1):
        assert abs(count - size * ratio ** (i / steps)) <= 0.5 + 1e-9


def test_ratio_schedule_rounds_a_rational_power_half_up():
    assert ratio_schedule(50, [2, 5], Decimal("0.1225")) == {2: 18, 5: 6}  # 17.5, 6.125


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: list_schedule(9, [2, 1], [1, 1]), r"ascend; got \[2, 1\]\."),
        (lambda: list_schedule(9, [1, 1], [1, 1]), r"ascend; got \[1, 1\]\."),
        (lambda: list_schedule(9, [-1], [1]), r"nonnegative and ascend; got \[-1\]\."),
        (lambda: list_schedule(9, [], []), r"ascend; got \[\]\."),
        (lambda: list_schedule(9, [1, 2], [1]), r"each of 2 depths; got 1\."),
        (lambda: list_schedule(9, [1, 2], [1, -1]), r"negative; got -1\."),
        (
            lambda: list_schedule(9, [1, 2], [5, 4]),
            r"at least 1 of 9 patches; got 9 in all",
        ),
        (lambda: constant_schedule(9, [1, 2, 3], 3), r"at least 1 of 9 patches; got 9"),
        (lambda: linear_schedule(9, [1, 2], 1, 1.5), r"in \[-1, 1\]; got 1\.5\."),
        (lambda: linear_schedule(9, [1], 1, 0), r"at least two for a slope; got \[1\]\."),
        (lambda: linear_schedule(9, [1, 2], -1, 0), r"negative; got -1\."),
        (lambda: ratio_schedule(9, [1, 2], 1.5), r"in \(0, 1\]; got 1\.5\."),
        (lambda: ratio_schedule(9, [1, 2], 0.01), r"at least 1 of 9 patches; got 0\.01"),
        (lambda: ratio_schedule(9, [3, 2], 0.5), r"ascend; got \[3, 2\]\."),
    ],
)
def test_impossible_schedules_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.fixture(scope="module")
def backbone():
    return open_backbone(tiny.hf_dinov2())


LAYOUT = Layout(1, (5, 7), (20, 28))


def cost(backbone, schedule, place="between", restore_depth=None):
    counts = token_counts(backbone.num_blocks, LAYOUT, schedule, place, restore_depth)
    return encoder_macs(backbone, counts)


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize(
    ("depths", "restore_depth", "ratio"),
    [([1], None, 1.2), ([0, 2], None, 1.5), ([0], 2, 1.3), ([0, 1, 2], None, 1)],
)
def test_macs_schedule_is_the_dearest_that_fits(
    backbone, place, depths, restore_depth, ratio
):
    schedule = macs_schedule(backbone, LAYOUT, depths, ratio, place, restore_depth)
    limit = cost(backbone, {}) / ratio
    candidates = [ratio_schedule(35, depths, Fraction(c, 35)) for c in range(1, 36)]
    costs = {c[depths[-1]]: cost(backbone, c, place, restore_depth) for c in candidates}
    best = max(last for last, spent in costs.items() if spent <= limit)
    assert schedule == candidates[best - 1]


def test_macs_schedule_counts_what_scoring_costs(backbone):
    full = cost(backbone, {})
    extra = full // 5
    schedule = macs_schedule(backbone, LAYOUT, [0, 2], 1.3, extra=extra)
    one_more = ratio_schedule(35, [0, 2], Fraction(schedule[2] + 1, 35))
    assert cost(backbone, schedule) + extra <= full / 1.3 < cost(backbone, one_more) + extra


@pytest.mark.parametrize("ratio", [0.9, 9])
def test_macs_schedule_out_of_reach_names_the_range(backbone, ratio):
    most = cost(backbone, {}) / cost(backbone, {2: 1})
    message = rf"in \[1\.0000, {most:.4f}\] for depths \[2\]; got {ratio}\."
    with pytest.raises(ValueError, match=message):
        macs_schedule(backbone, LAYOUT, [2], ratio)
