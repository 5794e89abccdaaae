"""Oracle: materialised float64 Jacobians, power iteration, scipy, constructed decoders."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch.testing import assert_close

from foveate.diagnosis.bounds import (
    captured,
    factorised_length,
    power_iteration_bound,
    pullback_length,
    rank_match,
    replacement_bound,
    subspace_tangent,
)
from foveate.diagnosis.findings import examine
from foveate.diagnosis.jacobian import TokenJacobian, open_tap
from foveate.diagnosis.regime import Regime, decide
from foveate.diagnosis.sensitivity import leading_rows
from foveate.diagnosis.sketch import exact_sketch
from foveate.diagnosis.statistics import kappa_cap
from tests.reference_jacobian import Bend, linear_jacobian, materialise, matrix_with

B, T, C, M = 2, 5, 3, 7


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# --- Theorem 1: no metric of rank r catches more than kappa_cap ---------------------------


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 12))
def test_no_random_metric_catches_more_than_kappa_cap(seed, rank, num_outputs):
    rows = normal(num_outputs, 8, seed=seed)
    energies = torch.linalg.svdvals(rows) ** 2
    metric = normal(8, rank, seed=seed + 1)
    assert 0 <= captured(rows, metric) <= kappa_cap(energies, rank) + 1e-12


@given(st.integers(0, 10_000), st.floats(0, 0.3), st.integers(1, 5))
def test_no_metric_near_the_best_catches_more(seed, distance, rank):
    rows = normal(6, 8, seed=seed)
    _, values, right = torch.linalg.svd(rows)
    best = right[:rank].T
    near = best * normal(rank, seed=seed + 1).exp() + distance * normal(8, rank, seed=seed)
    bound = kappa_cap(values**2, rank)
    assert captured(rows, near) <= bound + 1e-12
    assert captured(rows, best) == pytest.approx(bound, abs=1e-12)


def test_climbing_towards_more_ends_at_kappa_cap():
    """The worst that an adversary can do: gradient ascent on the share itself."""
    rows = matrix_with(torch.tensor([3.0, 2.5, 1.0, 0.8, 0.1]), 9)
    metric = normal(9, 2, seed=1).requires_grad_(True)
    for _ in range(300):
        basis = torch.linalg.qr(metric).Q
        (slope,) = torch.autograd.grad((rows @ basis).square().sum(), metric)
        metric = (basis + 0.1 * slope).detach().requires_grad_(True)
    bound = kappa_cap(torch.linalg.svdvals(rows) ** 2, 2)
    found = captured(rows, metric.detach())
    assert found <= bound + 1e-12
    assert found == pytest.approx(bound, rel=1e-9)


def test_columns_that_repeat_add_no_rank():
    rows, one = normal(4, 6), normal(6, 1, seed=1)
    doubled = torch.cat([one, 3 * one, -one], dim=1)
    assert captured(rows, doubled) == pytest.approx(captured(rows, one))
    assert captured(rows, torch.eye(6).double()) == pytest.approx(1)


def test_it_is_the_definition_by_a_projector():
    rows, metric = normal(4, 6), normal(6, 2, seed=1)
    projector = metric @ torch.linalg.pinv(metric)
    truth = torch.trace(projector @ rows.T @ rows) / torch.trace(rows.T @ rows)
    assert captured(rows, metric) == pytest.approx(float(truth))


@pytest.mark.parametrize(
    ("rows", "metric", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 1), r"got \(2, 3\) and \(4, 1\)"),
        (torch.zeros(2, 3), torch.ones(3, 1), "rows must not be zero"),
        (torch.ones(2, 3), torch.zeros(3, 1), "metric must not be zero"),
    ],
)
def test_refuses_what_catches_nothing(rows, metric, message):
    with pytest.raises(ValueError, match=message):
        captured(rows, metric)


# --- Theorem 3: power iteration converges at (sigma_{r+1} / sigma_r)^(2 q) ----------------


@pytest.mark.parametrize("ratio", [0.9, 0.6])
def test_power_iteration_converges_at_the_predicted_rate(ratio):
    rank, values = 3, torch.tensor([4.0, 3.0, 2.0, 2.0 * ratio, ratio, 0.3 * ratio])
    rows = matrix_with(values, 12)
    truth = torch.linalg.svd(rows).Vh[:rank].T
    block = torch.linalg.qr(normal(12, rank, seed=2)).Q
    tangents = [subspace_tangent(block, truth)]
    for _ in range(14):
        block = torch.linalg.qr(rows.T @ (rows @ block)).Q
        tangents.append(subspace_tangent(block, truth))
    for iterations, tangent in enumerate(tangents):
        bound = power_iteration_bound(values, rank, iterations, tangents[0])
        assert tangent <= bound * (1 + 1e-9)
    late = [b / a for a, b in pairwise(tangents[8:])]
    assert late == pytest.approx([ratio**2] * len(late), rel=0.1)  # it is not faster


def test_the_tangent_is_that_of_the_angle():
    angle = torch.tensor(0.4).double()
    truth = torch.eye(4).double()[:, :2]
    tilted = torch.stack([truth[:, 0], torch.zeros(4).double()], dim=1)
    tilted[1, 1], tilted[2, 1] = angle.cos(), angle.sin()
    mix = torch.tensor([[2.0, 1.0], [0.0, -3.0]]).double()
    assert subspace_tangent(tilted @ mix, truth) == pytest.approx(float(angle.tan()))
    away = torch.eye(4).double()[:, 1:3]
    assert subspace_tangent(away, truth) == float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "rank must be from 1 to 2 for 3 singular values; got 0"),
        ((3, 1), "rank must be from 1 to 2 for 3 singular values; got 3"),
        ((1, -1), "iterations must be at least 0; got -1"),
        ((2, 1), "singular value 2 must be positive; got 0"),
    ],
)
def test_refuses_numbers_without_a_rate(arguments, message):
    with pytest.raises(ValueError, match=message):
        power_iteration_bound(torch.tensor([1.0, 0.0, 0.0]), *arguments)


# --- Theorem 4: replacing a token costs at most its block's norm times the residual -------


def test_every_number_is_that_of_the_materialised_jacobian():
    tail, x = Bend(T, C, M), normal(B, T, C)
    replacement = x + 0.1 * normal(B, T, C, seed=1)
    dense = materialise(tail, x)
    frobenius = dense.square().sum((1, 3)).sqrt()
    operator = torch.linalg.matrix_norm(dense.transpose(1, 2), 2)
    residual = (replacement - x).norm(dim=2)
    first = torch.einsum("bmtc,btc->bmt", dense, replacement - x)
    for norm, blocks in (("frobenius", frobenius), ("operator", operator)):
        found = replacement_bound(TokenJacobian(tail, x), replacement, norm=norm)
        assert_close(found.bound, blocks * residual)
        assert_close(found.first_order, first.norm(dim=1))
        for t in range(T):
            y = x.clone()
            y[:, t] = replacement[:, t]
            moved = tail(y) - tail(x)
            assert_close(found.measured[:, t], moved.norm(dim=1))
            assert_close(found.remainder[:, t], (moved - first[:, :, t]).norm(dim=1))


def test_a_network_stays_within_the_bound_up_to_a_remainder_of_second_order(
    double_model, double_images
):
    tap = open_tap(double_model.backbone, double_model.task("cls"), double_images, 1)
    jacobian, x = TokenJacobian(tap.tail, tap.tokens.x), tap.tokens.x
    rows = exact_sketch(jacobian, 1).rows
    tokens = [1, 4, 9, 20, 35]
    found = [
        replacement_bound(jacobian, x + h * normal(*x.shape), tokens, "operator", rows)
        for h in (2e-3, 1e-3)
    ]
    for one in found:
        assert (one.first_order <= one.bound * (1 + 1e-9)).all()
        assert (one.measured <= one.bound + one.remainder).all()
        assert (one.measured <= 1.01 * one.bound).all()
    shrunk = found[0].remainder / found[1].remainder
    assert_close(shrunk, torch.full_like(shrunk, 4), rtol=0.05, atol=0)


def test_the_operator_norm_is_tight_for_its_own_direction():
    tail, x = Bend(T, C, M), normal(B, T, C)
    dense = materialise(tail, x)
    worst = torch.linalg.svd(dense.transpose(1, 2))[2][:, :, 0]  # (B, T, C)
    found = replacement_bound(TokenJacobian(tail, x), x + 1e-6 * worst, norm="operator")
    assert_close(found.measured, found.bound, rtol=1e-4, atol=0)


def test_more_outputs_than_columns_change_nothing():
    tail, x = Bend(2, C, 9), normal(B, 2, C)
    dense = materialise(tail, x)
    found = replacement_bound(TokenJacobian(tail, x), x + 1)
    assert_close(found.bound, dense.square().sum((1, 3)).sqrt() * C**0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "nuclear"}, "norm must be frobenius or operator; got 'nuclear'"),
        (
            {"replacement": torch.zeros(B, T)},
            r"shape of the tokens, \(2, 5, 3\); got \(2, 5",
        ),
        ({"tokens": [0, 5]}, r"tokens must be from 0 to 4, .*; got \[0, 5\]"),
        ({"tokens": []}, r"at least one; got \[\]"),
    ],
)
def test_refuses_replacements_that_do_not_fit(change, message):
    jacobian = TokenJacobian(Bend(T, C, M), normal(B, T, C))
    with pytest.raises(ValueError, match=message):
        replacement_bound(jacobian, **{"replacement": normal(B, T, C), **change})


# --- Theorem 2: no metric of single tokens stands for a delocalised decoder ---------------

TOKENS, RANK = 32, 4


@pytest.fixture(scope="module")
def delocalised():
    """Four outputs that sum one channel over all tokens, with signs; and noise below.

    The read-outs of the tokens are unit vectors in random directions, so that all block
    norms are nearly equal, and what a change of several tokens does is decided by how
    their read-outs cancel.
    """
    rows = 0.01 * normal(12, TOKENS, C)
    readout = normal(RANK, TOKENS, seed=1)
    rows[:RANK, :, 0] += readout / readout.norm(dim=0)
    return rows


def merges(size, seed=3):
    """Subsets of tokens that move by the same length in the channel that is read."""
    if size == 2:
        subsets = torch.tensor(list(combinations(range(TOKENS), 2)))
    else:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(400, TOKENS, generator=generator)
        subsets = draws.argsort(1)[:, :size]
    changes = torch.zeros(len(subsets), TOKENS, C).double()
    changes[torch.arange(len(subsets))[:, None], subsets, 0] = 1.0
    return changes + 0.02 * normal(len(subsets), TOKENS, C) * (changes[:, :, :1] != 0)


@pytest.mark.parametrize("size", [2, 6])
def test_scores_of_tokens_fail_where_leading_directions_do_not(delocalised, size):
    rows, changes = delocalised, merges(size)
    truth = pullback_length(rows, changes)
    _, vectors = torch.linalg.eigh(rows.flatten(1) @ rows.flatten(1).T)
    leading = leading_rows(rows, vectors.flip(1), RANK)
    across = pullback_length(leading, changes)
    alone = factorised_length(rows, changes)
    # Theorem 4's costs, importance times residual, added up:
    scores = (rows.square().sum((0, 2)) * changes.square().sum(2)).sum(1)
    assert rank_match(truth, across) > 0.95
    assert abs(float(rank_match(truth, alone))) < 0.15
    assert abs(float(rank_match(truth, scores))) < 0.15


def test_the_same_decoder_is_called_delocalised(delocalised):
    sketch = exact_sketch(linear_jacobian(delocalised.flatten(1)[None], TOKENS), 0)
    found = examine(sketch, RANK)[0]["all"].statistics()
    regime = decide(found["kappa_cap"], found["cv"], found["rank_entropy"])
    assert regime is Regime.LOW_RANK_DELOCALISED
    assert found["kappa_cap"] > 0.98
    assert found["cv"] < 0.3


def test_without_cancellation_scores_of_tokens_are_enough(delocalised):
    """The same decoder with outputs that read disjoint tokens: the control."""
    rows = torch.zeros(TOKENS, TOKENS, C).double()
    rows[range(TOKENS), range(TOKENS), 0] = torch.linspace(0.5, 3, TOKENS).double()
    changes = merges(6)
    assert_close(factorised_length(rows, changes), pullback_length(rows, changes))


def test_lengths_are_those_of_the_dense_metric():
    rows, changes = normal(M, T, C), normal(4, T, C, seed=1)
    metric = (rows.flatten(1).T @ rows.flatten(1)).view(T, C, T, C)
    whole = torch.einsum("ksa,satb,ktb->k", changes, metric, changes)
    blocks = torch.einsum("kta,tatb,ktb->k", changes, metric, changes)
    assert_close(pullback_length(rows, changes), whole.sqrt())
    assert_close(factorised_length(rows, changes), blocks.sqrt())


@given(st.lists(st.integers(0, 5), min_size=3, max_size=12), st.integers(0, 1000))
def test_the_rank_correlation_is_scipys_ties_included(values, seed):
    a = torch.tensor(values)
    b = torch.randint(0, 4, a.shape, generator=torch.Generator().manual_seed(seed))
    if len(a.unique()) == 1 or len(b.unique()) == 1:
        assert rank_match(a, b).isnan()
    else:
        assert float(rank_match(a, b)) == pytest.approx(spearmanr(a, b).statistic)
