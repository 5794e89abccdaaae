"""Oracle: sorting, finite differences, invariants, and brute-force root finding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.testing import assert_close

from foveate.adaptive.soft_top_k import (
    chance_to_stay,
    hard_top_k,
    soft_top_k,
    straight_through_top_k,
)

DEAD = torch.tensor([
    [1, 1, 0, 1, 1, 1, 0, 1, 1],
    [1, 1, 1, 1, 1, 1, 1, 1, 1],
]).bool()  # fmt: skip
COUNT = torch.tensor([2.0, 5.5], dtype=torch.float64)


def random_scores(shape=(2, 9), dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alive", [DEAD, torch.ones(2, 9).bool()])
def test_sums_to_the_count(alive, dtype, temperature):
    scores, count = random_scores(dtype=dtype), COUNT.to(dtype)
    soft = soft_top_k(scores, count, alive, temperature)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert_close(soft.sum(1), count, rtol=0, atol=tolerance)
    assert bool((soft[~alive] == 0).all())
    assert 0 <= float(soft.min()) <= float(soft.max()) <= 1


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    number=st.integers(2, 400),
    share=st.floats(0.01, 0.99),
    spread=st.floats(0.01, 100),
)
def test_sums_to_any_count(seed, number, share, spread):
    scores = spread * random_scores((1, number), seed=seed)
    count = torch.tensor([share * number], dtype=torch.float64)
    soft = soft_top_k(scores, count, torch.ones(1, number).bool(), 0.5)
    assert_close(soft.sum(1), count, rtol=1e-10, atol=1e-10)


def test_a_thousand_close_scores_in_single_precision():
    """Sums of 1,369 gates round to 1e-4; the threshold must not run off."""
    scores = 3 * random_scores((1, 1369), torch.float32)
    for count in (1.0, 684.0, 1368.0):
        soft = soft_top_k(scores, torch.tensor([count]), torch.ones(1, 1369).bool(), 0.5)
        assert_close(soft.sum(1), torch.tensor([count]), rtol=2e-6, atol=2e-6)


def test_the_threshold_is_where_a_grid_search_finds_it():
    scores = random_scores()
    soft = soft_top_k(scores, COUNT, DEAD, 0.5)
    for row in range(2):
        grid = torch.linspace(-6, 6, 600_001, dtype=torch.float64)
        gates = ((scores[row][DEAD[row]] - grid[:, None]) / 0.5).sigmoid()
        best = (gates.sum(1) - COUNT[row]).abs().argmin()
        assert_close(soft[row][DEAD[row]], gates[best], rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_derivatives_in_scores_and_count(temperature):
    scores = random_scores().requires_grad_()
    count = COUNT.clone().requires_grad_()
    assert gradcheck(lambda s, k: soft_top_k(s, k, DEAD, temperature), (scores, count))


def test_derivatives_of_the_threshold_have_their_closed_form():
    r""":math:`dm_i/dk = m_i (1 - m_i) / \sum_j m_j (1 - m_j)`, which sums to one."""
    scores, count = random_scores().requires_grad_(), COUNT.clone().requires_grad_()
    soft = soft_top_k(scores, count, DEAD, 0.7)
    slope = soft * (1 - soft)
    (found,) = torch.autograd.grad(soft[0, 4], count, retain_graph=True)
    assert_close(found[0], slope[0, 4].detach() / slope[0].sum().detach())
    assert found[1] == 0
    (of_sum,) = torch.autograd.grad(soft.sum(), count, retain_graph=True)
    assert_close(of_sum, torch.ones(2, dtype=torch.float64))
    (still,) = torch.autograd.grad(soft.sum(), scores)
    assert_close(still, torch.zeros_like(still), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", [-37.5, 1000.0])
def test_only_differences_of_scores_count(shift):
    scores = random_scores()
    mine = soft_top_k(scores, COUNT, DEAD, 0.5)
    assert_close(soft_top_k(scores + shift, COUNT, DEAD, 0.5), mine, rtol=0, atol=1e-10)
    assert_close(soft_top_k(3 * scores, COUNT, DEAD, 1.5), mine, rtol=0, atol=1e-10)


def test_a_low_temperature_is_the_hard_choice():
    scores, count = random_scores(), torch.tensor([2.0, 5.0], dtype=torch.float64)
    hard = hard_top_k(scores, count, DEAD)
    soft = soft_top_k(scores, count, DEAD, 1e-3)
    assert_close(soft, hard.to(soft), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_kept_is_all_ones_with_finite_gradients(dtype):
    """A depth that takes nothing: the count is the number alive."""
    scores = random_scores(dtype=dtype).requires_grad_()
    count = DEAD.sum(1).to(dtype).requires_grad_()
    mask = straight_through_top_k(scores, count, DEAD, 0.5)
    assert torch.equal(mask.detach(), DEAD.to(dtype))
    (random_scores(dtype=dtype, seed=4) * mask).sum().backward()
    assert bool(scores.grad.isfinite().all())
    assert bool(count.grad.isfinite().all())


@pytest.mark.parametrize("ties", [False, True])
def test_hard_is_a_sort_with_ties_to_the_lower_index(ties):
    scores = random_scores((4, 30), seed=7)
    scores = scores.round() if ties else scores
    alive = random_scores((4, 30), seed=8) > -1
    count = torch.tensor([1.0, 5.0, 12.0, 20.0])
    found = hard_top_k(scores, count, alive)
    for row in range(4):
        there = [i for i in range(30) if alive[row, i]]
        best = sorted(there, key=lambda i: (-float(scores[row, i]), i))
        assert set(found[row].nonzero()[:, 0].tolist()) == set(best[: int(count[row])])


def test_hard_ranks_the_lowest_number_above_dead_patches():
    lowest = torch.finfo(torch.float32).min
    scores = torch.tensor([[lowest, 5.0, lowest, 1.0]])
    alive = torch.tensor([[False, True, True, False]])
    found = hard_top_k(scores, torch.tensor([2.0]), alive)
    assert found.tolist() == [[False, True, True, False]]


def test_straight_through_is_hard_forwards_and_soft_backwards():
    scores = random_scores().requires_grad_()
    count = torch.tensor([2.0, 5.0], dtype=torch.float64).requires_grad_()
    weight = random_scores(seed=2)
    mask = straight_through_top_k(scores, count, DEAD, 0.5)
    assert torch.equal(mask.detach(), hard_top_k(scores, count, DEAD).double())
    found = torch.autograd.grad((weight * mask).sum(), (scores, count))
    soft = soft_top_k(scores, count, DEAD, 0.5)
    truth = torch.autograd.grad((weight * soft).sum(), (scores, count))
    for mine, theirs in zip(found, truth, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.abs().max() > 1e-3
    assert bool((found[0][~DEAD] == 0).all())


def test_a_chance_to_stay_is_that_of_patches_that_are_there():
    """Patches that are gone get theirs by the threshold of the others."""
    scores = random_scores().requires_grad_()
    chance = chance_to_stay(scores, COUNT, DEAD, 0.5)
    soft = soft_top_k(scores, COUNT, DEAD, 0.5).detach()
    assert_close(chance[DEAD], soft[DEAD], rtol=0, atol=1e-12)
    threshold = scores[0, 0] - 0.5 * soft[0, 0].logit()
    truth = ((scores[0, 2] - threshold) / 0.5).sigmoid().detach()
    assert_close(chance[0, 2], truth)
    assert not chance.requires_grad
