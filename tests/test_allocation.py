"""Oracle: invariants over thousands of random states; a naive way of settling; autograd."""

import random
from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from foveate.adaptive.allocation import Limits, among_images, settle, split_evenly


def random_limits(source, total, number):
    """Least and most at ``number`` depths that leave a way to ``total``."""
    split = sorted(source.randint(0, total) for _ in range(number - 1))
    way = [b - a for a, b in zip([0, *split], [*split, total], strict=True)]
    least = tuple(source.randint(0, count) for count in way)
    most = tuple(source.randint(count, total) for count in way)
    return Limits(total, least, most)


def random_shares(source, number, batch):
    """Shares, a third of them exactly 0 or exactly 1."""

    def draw():
        return source.choice([0.0, 1.0, source.random(), source.random()])

    return torch.tensor([[draw() for _ in range(batch)] for _ in range(number)])


def settle_all(limits, shares):
    """Counts at every depth, ``(depths, B)``."""
    remaining = torch.full(shares.shape[1:], float(limits.total))
    counts = []
    for index, share in enumerate(shares):
        counts.append(settle(limits, index, remaining, share))
        remaining = remaining - counts[-1]
    assert torch.equal(remaining, torch.zeros_like(remaining))
    return torch.stack(counts)


def naive(limits, shares):
    """One image, in Python's integers."""
    left, counts = limits.total, []
    for index, share in enumerate(shares):
        low = max(limits.least[index], left - sum(limits.most[index + 1 :]))
        high = min(limits.most[index], left - sum(limits.least[index + 1 :]))
        assert low <= high
        wanted = round(float(torch.tensor(share) * float(left)))  # half to even
        counts.append(min(max(wanted, low), high))
        left -= counts[-1]
    return counts


def check(limits, counts):
    """Whole, within bounds, exactly the budget, image by image."""
    assert torch.equal(counts, counts.round())
    assert bool((counts.sum(0) == limits.total).all())
    for index, count in enumerate(counts):
        assert bool((count >= limits.least[index]).all())
        assert bool((count <= limits.most[index]).all())


@pytest.mark.parametrize("number", [256, 1369])
def test_ten_thousand_states_meet_the_budget_exactly(number):
    source, images = random.Random(number), 0
    while images < 10_000:
        limits = random_limits(source, number // 2, source.randint(1, 7))
        counts = settle_all(limits, random_shares(source, len(limits.least), 25))
        check(limits, counts)
        images += 25


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 1500))
def test_counts_are_those_of_a_naive_way(seed, depths, total):
    source = random.Random(seed)
    limits = random_limits(source, total, depths)
    shares = random_shares(source, depths, 4)
    counts = settle_all(limits, shares)
    check(limits, counts)
    for image in range(4):
        assert counts[:, image].tolist() == naive(limits, shares[:, image].tolist())


@pytest.mark.parametrize(("share", "counts"), [(0.0, [0, 0, 10]), (1.0, [10, 0, 0])])
def test_shares_of_nothing_and_of_all(share, counts):
    limits = Limits(10, (0, 0, 0), (10, 10, 10))
    assert settle_all(limits, torch.full((3, 1), share))[:, 0].tolist() == counts


@pytest.mark.parametrize(("share", "counts"), [(0.0, [1, 4, 5]), (1.0, [6, 3, 1])])
def test_bounds_keep_a_way_open(share, counts):
    limits = Limits(10, (0, 2, 1), (6, 4, 5))
    assert settle_all(limits, torch.full((3, 1), share))[:, 0].tolist() == counts


def test_halves_are_rounded_to_even():
    limits = Limits(5, (0, 0), (5, 5))
    found = settle(limits, 0, torch.tensor([5.0, 3.0]), torch.tensor([0.5, 0.5]))
    assert found.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.4, 1.0])
def test_gradient_is_that_of_share_times_remaining(share):
    """Also where bounds hold the count."""
    limits = Limits(20, (2, 0), (12, 18))
    shares = torch.tensor([share, 0.3], requires_grad=True)
    remaining = torch.tensor([20.0, 20.0], requires_grad=True)
    count = settle(limits, 0, remaining, shares)
    weight = torch.tensor([1.0, -3.0])
    found = torch.autograd.grad((weight * count).sum(), (shares, remaining))
    assert_close(found[0], weight * 20)
    assert_close(found[1], weight * shares.detach())


def test_a_share_that_decides_nothing_has_no_gradient():
    """At the last depth, or where the others leave one count."""
    limits = Limits(20, (0, 0), (15, 15))
    share = torch.tensor([0.3], requires_grad=True)
    for index, left, slope in ((1, 7.0, 1.0), (0, 30.0, 1.0), (0, 20.0, 0.3)):
        remaining = torch.tensor([left], requires_grad=True)
        count = settle(limits, index, remaining, share)
        found = torch.autograd.grad(count.sum(), (share, remaining))
        decides = (index, left) == (0, 20.0)
        assert found[0].item() == (20.0 if decides else 0.0)
        assert found[1].item() == pytest.approx(slope)


def test_gradients_of_counts_sum_to_zero():
    """A budget that is met by construction cannot change with the shares."""
    limits = Limits(30, (0, 0, 0), (30, 30, 30))
    shares = torch.tensor([0.31, 0.52, 0.9], requires_grad=True)
    remaining, total = torch.tensor([30.0]), 0
    for index in range(3):
        count = settle(limits, index, remaining, shares[index : index + 1])
        remaining, total = remaining - count, total + count
    (found,) = torch.autograd.grad(total.sum(), shares)
    assert_close(found, torch.zeros(3), rtol=0, atol=1e-5)


def test_gradient_through_what_remains():
    """Of stick-breaking without rounding: the second count is s2 (T - T s1)."""
    limits = Limits(30, (0, 0, 0), (30, 30, 30))
    shares = torch.tensor([0.31, 0.52], requires_grad=True)
    remaining = torch.tensor([30.0])
    first = settle(limits, 0, remaining, shares[:1])
    second = settle(limits, 1, remaining - first, shares[1:])
    assert first.item() == 9
    (found,) = torch.autograd.grad(second.sum(), shares)
    assert_close(found, torch.tensor([-0.52 * 30, 21.0]))


@pytest.mark.parametrize(
    ("total", "least", "most", "message"),
    [
        (5, (), (), "a number for every depth; got 0 and 0"),
        (5, (0,), (5, 5), "a number for every depth; got 1 and 2"),
        (5, (3, 0), (2, 5), "least must be from 0 to most"),
        (5, (-1, 0), (5, 5), "least must be from 0 to most"),
        (11, (0, 0), (5, 5), "total must be from 0 to 10 .*; got 11"),
        (3, (2, 2), (5, 5), "total must be from 4 to 10 .*; got 3"),
    ],
)
def test_limits_that_nothing_meets_are_refused(total, least, most, message):
    with pytest.raises(ValueError, match=message):
        Limits(total, least, most)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 1500))
def test_an_even_split_differs_by_one_unless_bounds_say_otherwise(seed, depths, total):
    free = split_evenly(Limits(total, (0,) * depths, (total,) * depths))
    assert sum(free) == total
    assert max(free) - min(free) <= 1
    limits = random_limits(random.Random(seed), total, depths)
    counts = split_evenly(limits)
    check(limits, torch.tensor(counts)[:, None].float())
    for a in range(depths):
        for b in range(depths):  # nobody could hand one on and make them more even
            could = counts[a] > limits.least[a] and counts[b] < limits.most[b]
            assert not could or counts[a] - counts[b] <= 1


def naive_deal(shares, count):
    """Largest remainders without bounds, in exact fractions."""
    exact = [Fraction(float(s)) for s in shares]
    total = count * len(exact)
    quotas = [total * s / sum(exact) for s in exact]
    dealt = [floor(q) for q in quotas]
    order = sorted(range(len(exact)), key=lambda i: (dealt[i] - quotas[i], -exact[i], i))
    for i in order[: total - sum(dealt)]:
        dealt[i] += 1
    return dealt


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 100))
def test_images_share_a_batch_exactly(seed, batch, count):
    draw = torch.Generator().manual_seed(seed)
    shares = torch.rand(batch, generator=draw) + 0.01
    loose = among_images(shares, count, [count * batch] * batch)
    assert loose.tolist() == naive_deal(shares, count)
    tight = among_images(shares, count, [count + 2] * batch)
    assert tight.sum() == loose.sum() == count * batch
    assert torch.equal(tight, tight.round())
    assert tight.max() <= count + 2
    assert tight.dtype == shares.dtype


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 60))
def test_the_order_of_images_does_not_matter(seed, batch, count):
    source = random.Random(seed)
    shares = torch.tensor(source.sample(range(1, 1000), batch)) / 1000  # no two alike
    most = [source.randint(count, 2 * count) for _ in range(batch)]
    order = source.sample(range(batch), batch)
    there = among_images(shares, count, most)
    back = among_images(shares[order], count, [most[i] for i in order])
    assert there[order].tolist() == back.tolist()


def test_images_that_cannot_spare_so_many_are_refused():
    with pytest.raises(ValueError, match="total must be in 0 to 5"):
        among_images(torch.tensor([0.5, 0.5]), 3, [2, 3])
