"""Oracle: naive loops over pairs and modes, materialised metrics, scipy's Spearman."""

import math

import pytest
import torch
from scipy.stats import spearmanr
from torch.testing import assert_close

from foveate.scoring.metric import PredictedMetric
from foveate.training.measures import (
    alignment,
    energy_error,
    is_separated,
    metric_error,
    spearman,
)
from foveate.training.objectives import (
    draw_pairs,
    importance_loss,
    log_importance,
    metric_loss,
    ranking_loss,
)

B, K, T, C, R = 2, 6, 5, 4, 4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def orthonormal(seed):
    return torch.linalg.qr(normal(B, T * C, R, seed=seed)).Q.mT.unflatten(2, (T, C))


@pytest.fixture
def energies():
    """Modes 1 and 2 of the first image nearly coincide, as do the last two of the other."""
    return torch.tensor([[8.0, 4.0, 3.9, 1.0], [50.0, 9.0, 2.1, 2.0]]).double()


@pytest.fixture
def predicted():
    found = torch.tensor([[7.0, 5.0, 3.0, 2.0], [40.0, 9.5, 2.0, 1.0]]).double()
    return PredictedMetric(orthonormal(2), found)


def naive_divergence(predicted, true):
    """Mean over all pairs and images of KL between Bernoulli orders."""
    terms = []
    for image in range(len(true)):
        for i in range(true.shape[1]):
            for j in range(i):
                p, q = (
                    1 / (1 + math.exp(-float(s[image, i] - s[image, j]) / 0.25))
                    for s in (true, predicted)
                )
                terms.append(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    return sum(terms) / len(terms)


def naive_energy_terms(found, true):
    """Absolute log ratios of the modes with a gap on both sides, by image."""
    rows = []
    for image in range(len(true)):
        sigma, terms = true[image].sqrt().tolist(), []
        for j in range(len(sigma)):
            coincides = (j + 1 < len(sigma) and sigma[j] / sigma[j + 1] < 1.05) or (
                j > 0 and sigma[j - 1] / sigma[j] < 1.05
            )
            if not coincides:
                terms.append(abs(math.log(found[image, j] / true[image, j])))
        rows.append(terms)
    return rows


def materialise(vectors, energies):
    rows = vectors.flatten(2)
    return rows.mT @ torch.diag_embed(energies) @ rows


def test_the_ranking_loss_is_a_mean_divergence_over_pairs():
    log_pred, log_target = normal(B, K), normal(B, K, seed=2)
    loss = ranking_loss(log_pred, log_target)
    assert float(loss) == pytest.approx(naive_divergence(log_pred, log_target))


def test_the_ranking_loss_vanishes_for_equal_differences_and_nowhere_else():
    log_target = normal(B, K)
    assert float(ranking_loss(log_target + 7, log_target)) == pytest.approx(0, abs=1e-12)
    assert float(ranking_loss(log_target * 1.1, log_target)) > 1e-4
    swapped = log_target.clone()
    swapped[:, [0, 1]] = log_target[:, [1, 0]]
    assert float(ranking_loss(swapped, log_target)) > 1e-2


def test_chosen_pairs_are_the_ones_compared():
    log_pred, log_target = normal(B, K), normal(B, K, seed=2)
    pairs = torch.tensor([[0, 4], [3, 1]])
    expected = [
        naive_divergence(log_pred[:, pair], log_target[:, pair]) for pair in pairs.T
    ]
    loss = ranking_loss(log_pred, log_target, pairs)
    assert float(loss) == pytest.approx(sum(expected) / 2)


def test_drawn_pairs_are_of_different_patches_and_reach_all():
    pairs = draw_pairs(5, 2000, seeded())
    assert pairs.shape == (2, 2000)
    assert {tuple(p) for p in pairs.T.tolist()} == {
        (i, j) for i in range(5) for j in range(5) if i != j
    }
    assert torch.equal(pairs, draw_pairs(5, 2000, seeded()))


def test_the_importance_loss_is_regression_and_half_the_ranking():
    log_pred, log_target = normal(B, K), normal(B, K, seed=2)
    mean = sum(
        (float(a) - float(b)) ** 2
        for a, b in zip(log_pred.flatten(), log_target.flatten(), strict=True)
    ) / (B * K)
    expected = mean + 0.5 * naive_divergence(log_pred, log_target)
    assert float(importance_loss(log_pred, log_target)) == pytest.approx(expected)


def test_the_importance_loss_has_its_gradient():
    log_target = normal(B, K, seed=2)
    assert torch.autograd.gradcheck(
        lambda x: importance_loss(x, log_target), normal(B, K).requires_grad_()
    )


def test_far_apart_scores_give_finite_gradients():
    log_pred = torch.tensor([[-1e4, 1e4, 0.0]]).requires_grad_()
    loss = importance_loss(log_pred, torch.tensor([[50.0, -50.0, 0.0]]))
    loss.backward()
    assert loss.isfinite()
    assert log_pred.grad.isfinite().all()


def test_log_importance_is_the_log_with_a_floor_at_a_share_of_the_mean():
    importance = torch.tensor([[1.0, 3.0, 0.0, 4e-6], [0.5, 0.5, 0.5, 0.5]])
    found = log_importance(importance, floor=1e-3)
    mean = (4 + 4e-6) / 4
    expected = [[0, math.log(3), math.log(1e-3 * mean), math.log(1e-3 * mean)]]
    assert_close(found, torch.tensor([*expected, [math.log(0.5)] * 4]))


def test_log_importance_rejects_what_has_no_order():
    with pytest.raises(ValueError, match=r"zero for a whole image; images \[1\] are\."):
        log_importance(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="nonnegative and finite"):
        log_importance(torch.tensor([[1.0, -1.0]]))
    with pytest.raises(ValueError, match="nonnegative and finite"):
        log_importance(torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(ValueError, match=r"floor must be positive; got 0\."):
        log_importance(torch.ones(1, 2), floor=0)


def test_a_zero_importance_cannot_slip_into_the_loss():
    log_target = torch.tensor([[1.0, 0.0]]).log()
    with pytest.raises(ValueError, match="log_target must be finite, with zeros replaced"):
        importance_loss(torch.zeros(1, 2), log_target)


def test_scores_have_to_fit():
    with pytest.raises(ValueError, match=r"one shape \(B, K\); got \(2, 6\) and \(2, 5\)"):
        importance_loss(normal(B, K), normal(B, 5))
    with pytest.raises(ValueError, match="at least one pair of patches; got none"):
        ranking_loss(normal(B, 1), normal(B, 1))
    with pytest.raises(ValueError, match="got 1 and 5"):
        draw_pairs(1, 5, seeded())


def test_modes_that_nearly_coincide_are_not_separated():
    sigma = torch.tensor([[2.0, 1.0, 0.96, 0.5, 0.25], [1.0, 1.0, 0.5, 0.2, 0.195]])
    expected = [[True, False, False, True, True], [False, False, True, False, False]]
    assert is_separated(sigma.square()).tolist() == expected


@pytest.mark.parametrize(("ratio", "expected"), [(1.049, False), (1.051, True)])
def test_modes_are_separated_from_a_ratio_of_105_percent(ratio, expected):
    energies = torch.tensor([[ratio**2, 1.0]])
    assert is_separated(energies).tolist() == [[expected, expected]]


def test_a_single_mode_is_separated_and_modes_out_of_order_are_not():
    assert is_separated(torch.tensor([[3.0]])).tolist() == [[True]]
    found = is_separated(torch.tensor([[9.0, 1.0, 4.0, 0.5]])).tolist()
    assert found == [[True, False, False, True]]


def test_the_metric_loss_is_misalignment_and_mean_squares_of_the_logs(predicted, energies):
    vectors = orthonormal(3)
    u, v = predicted.directions.flatten(2), vectors.flatten(2)
    aligned = sum(
        float(u[b, i] @ v[b, j]) ** 2 for b in range(B) for i in range(R) for j in range(R)
    ) / (R * B)
    rows = naive_energy_terms(predicted.energies, energies)
    terms = [e**2 for row in rows for e in row]
    assert [len(row) for row in rows] == [2, 2]
    expected = 1 - aligned + sum(terms) / len(terms)
    assert float(metric_loss(predicted, vectors, energies)) == pytest.approx(expected)


def test_coupling_adds_the_squared_error_of_the_metric(predicted, energies):
    vectors = orthonormal(3)
    plain, coupled = (metric_loss(predicted, vectors, energies, c) for c in (0.0, 0.7))
    error = metric_error(predicted, vectors, energies).square().mean()
    assert_close(coupled, plain + 0.7 * error)


def test_the_metric_error_is_that_of_materialised_metrics(predicted, energies):
    vectors = orthonormal(3)
    true = materialise(vectors, energies)
    found = materialise(predicted.directions, predicted.energies)
    expected = (found - true).norm(dim=(1, 2)) / true.norm(dim=(1, 2))
    assert_close(metric_error(predicted, vectors, energies), expected)


def test_only_the_metric_error_sees_directions_turn_within_their_span(energies):
    vectors = orthonormal(3)
    turn = torch.linalg.qr(normal(R, R, seed=5)).Q
    turned = (turn @ vectors.flatten(2)).unflatten(2, (T, C))
    exact, other = PredictedMetric(vectors, energies), PredictedMetric(turned, energies)
    for metric in (exact, other):
        assert float(metric_loss(metric, vectors, energies)) == pytest.approx(0, abs=1e-12)
    assert metric_error(exact, vectors, energies).max() < 1e-6
    assert metric_error(other, vectors, energies).min() > 0.1


def test_without_a_separated_mode_only_alignment_counts(predicted):
    vectors, flat = orthonormal(3), torch.ones(B, R).double()
    expected = 1 - alignment(predicted.directions, vectors).mean()
    assert_close(metric_loss(predicted, vectors, flat), expected)
    assert energy_error(predicted, flat).isnan().all()


def test_the_metric_loss_has_its_gradient(energies):
    vectors, rows = orthonormal(3), orthonormal(2)

    def loss(directions, log_energies):
        metric = PredictedMetric(directions, log_energies.exp())
        return metric_loss(metric, vectors, energies, coupling=0.5)

    inputs = (rows.requires_grad_(), normal(B, R).requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)


def test_energies_that_coincide_have_no_gradient(predicted, energies):
    found = predicted.energies.requires_grad_()
    metric_loss(predicted, orthonormal(3), energies).backward()
    assert torch.equal(found.grad != 0, is_separated(energies))


def test_energy_error_is_the_mean_of_the_separated_modes(predicted, energies):
    rows = naive_energy_terms(predicted.energies, energies)
    expected = torch.tensor([sum(r) / len(r) for r in rows]).double()
    assert_close(energy_error(predicted, energies), expected, rtol=1e-6, atol=0)


def test_alignment_is_1_in_the_span_and_0_outside():
    every = torch.linalg.qr(normal(B, T * C, T * C)).Q.mT
    turn = torch.linalg.qr(normal(R, R, seed=5)).Q
    assert_close(alignment(turn @ every[:, :R], every[:, :R]), torch.ones(B).double())
    outside = alignment(every[:, :R], every[:, R : 2 * R])
    assert_close(outside, torch.zeros(B).double(), atol=1e-12, rtol=0)
    half = alignment(every[:, :R], every[:, R // 2 : R // 2 + R])
    assert_close(half, torch.full((B,), 0.5).double())


def test_targets_have_to_fit(predicted, energies):
    vectors = orthonormal(3)
    with pytest.raises(
        ValueError, match=r"energies must have shape \(2, 4\); got \(2, 3\)"
    ):
        metric_loss(predicted, vectors, energies[:, :3])
    with pytest.raises(ValueError, match=r"directions, \(2, 4, 5, 4\); got \(2, 4, 4, 4\)"):
        metric_loss(predicted, vectors[:, :, 1:], energies)
    with pytest.raises(ValueError, match=r"directions, \(2, 4, 5, 4\); got \(2, 3, 5, 4\)"):
        alignment(predicted.directions, vectors[:, :3])
    energies[1, 3] = 0
    for function in (metric_loss, metric_error):
        with pytest.raises(ValueError, match=r"energies must be positive .* from 0 to 50"):
            function(predicted, vectors, energies)
    with pytest.raises(ValueError, match=r"energies must be positive .* from 0 to 50"):
        energy_error(predicted, energies)


def test_spearman_is_that_of_scipy_with_ties():
    pred, target = normal(3, 40), (2 * normal(3, 40, seed=2)).round()
    expected = [spearmanr(p, t).statistic for p, t in zip(pred, target, strict=True)]
    found = spearman(pred, target)
    assert_close(found.double(), torch.tensor(expected), atol=1e-6, rtol=0)
    assert_close(spearman(pred[:1], target[:1]), found[:1])


def test_spearman_of_a_monotone_map_is_1_and_of_a_constant_0():
    target = normal(B, K)
    found = spearman(target.exp(), target).double()
    assert_close(found, torch.ones(B).double(), atol=1e-6, rtol=0)
    assert spearman(torch.ones(B, K), target.float()).tolist() == [0, 0]


def test_spearman_rejects_what_has_no_rank():
    with pytest.raises(ValueError, match="pred and target must be finite; got NaN"):
        spearman(torch.full((1, 3), torch.nan), torch.ones(1, 3))
