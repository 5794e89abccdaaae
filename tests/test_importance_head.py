"""Oracle: counts in closed form, invariants, copies in place of a merged token."""

import math

import pytest
import torch
from torch.testing import assert_close

from foveate.scoring.attention import Standardise, log_softplus
from foveate.scoring.importance import ImportanceHead
from foveate.training.measures import spearman
from foveate.training.objectives import draw_pairs, importance_loss

B, P, K, C = 2, 2, 7, 6


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def head():
    return ImportanceHead(C, hidden=8, num_heads=2, generator=seeded()).double()


@pytest.fixture
def tokens():
    return torch.randn(B, P + K, C, dtype=torch.float64, generator=seeded(1))


def count(network):
    return sum(p.numel() for p in network.parameters())


def test_it_has_about_310_thousand_parameters():
    assert count(ImportanceHead(768)) == pytest.approx(310_000, rel=0.05)


@pytest.mark.parametrize(("channels", "hidden"), [(768, 160), (6, 8)])
def test_its_parameters_have_a_closed_form(channels, hidden):
    head = ImportanceHead(channels, hidden)
    expected = 7 * hidden**2 + hidden * (channels + 15) + 2 * channels + 1
    assert count(head) == expected


@pytest.mark.parametrize("num_patches", [1, 3, 12])
def test_the_number_of_patches_is_free(head, num_patches):
    tokens = torch.randn(3, P + num_patches, C, dtype=torch.float64, generator=seeded(2))
    assert head(tokens, P).shape == (3, num_patches)


def test_permuting_patches_permutes_their_scores(head, tokens):
    order = torch.randperm(K, generator=seeded(3))
    moved = torch.cat([tokens[:, :P], tokens[:, P:][:, order]], 1)
    assert_close(head(moved, P), head(tokens, P)[:, order])


def test_patches_see_each_other_and_the_prefix(head, tokens):
    before = head(tokens, P)
    for token in (0, P):
        other = tokens.clone()
        other[:, token] = tokens[:, token].flip(-1)
        assert (head(other, P)[:, 1:] - before[:, 1:]).abs().max() > 1e-4


def test_images_do_not_mix(head, tokens):
    other = torch.stack([tokens[0], tokens[1].flip(-1)])
    before, after = head(tokens, P), head(other, P)
    assert_close(after[0], before[0])
    assert not torch.allclose(after[1], before[1])


def test_a_merged_token_counts_as_its_copies(head, tokens):
    copies = torch.cat([tokens, tokens[:, -1:], tokens[:, -1:]], 1)
    bias = torch.zeros(B, 1, 1, P + K, dtype=torch.float64)
    bias[..., -1] = math.log(3)
    assert_close(head(tokens, P, bias), head(copies, P)[:, :K])
    assert not torch.allclose(head(tokens, P), head(copies, P)[:, :K])


def test_calibration_makes_it_blind_to_the_scale_of_channels(head, tokens):
    target = torch.randn(B, K, dtype=torch.float64, generator=seeded(4))
    head.calibrate(tokens, target)
    before = head(tokens, P)
    scale = torch.logspace(-3, 2, C, dtype=torch.float64)
    stretched = scale * tokens + 10 * scale.flip(0)
    assert not torch.allclose(head(stretched, P), before, atol=1e-2)
    head.calibrate(stretched, target)
    assert_close(head(stretched, P), before)


def test_calibration_starts_scores_at_the_unit_of_the_targets(head, tokens):
    head.calibrate(tokens, torch.full((B, K), 9.0))
    with torch.no_grad():
        head.mlp[-1].weight.zero_()
    assert_close(head(tokens, P), torch.full((B, K), 9.0, dtype=torch.float64))


def test_standardised_channels_have_mean_zero_and_spread_one(tokens):
    tokens = tokens * torch.logspace(-3, 2, C) + 5
    tokens[..., 2] = 7.0  # a channel without spread
    standardise = Standardise(C).double()
    standardise.fit(tokens)
    flat = standardise(tokens).flatten(0, 1)
    expected = torch.ones(C, dtype=torch.float64)
    expected[2] = 0
    assert_close(flat.mean(0), torch.zeros_like(expected), atol=1e-12, rtol=0)
    assert_close(flat.std(0, correction=0), expected)


def test_log_softplus_is_its_name_and_stays_finite():
    x = torch.tensor([-800.0, -40.0, -31.0, -29.0, -1.0, 0.0, 3.0, 500.0]).double()
    expected = [v if v < -40 else math.log(math.log1p(math.exp(v))) for v in x[:-1]]
    expected = torch.tensor([*expected, math.log(500)], dtype=torch.float64)
    assert_close(log_softplus(x), expected, rtol=1e-12, atol=1e-12)


def test_log_softplus_has_its_gradient():
    x = torch.tensor([-800.0, -29.0, -1.0, 0.0, 3.0]).double().requires_grad_()
    assert torch.autograd.gradcheck(log_softplus, x)


def test_it_has_its_gradient(head, tokens):
    assert torch.autograd.gradcheck(
        lambda x: head(x, P), tokens[:, : P + 3].requires_grad_()
    )


def test_the_same_seed_gives_the_same_bits(tokens):
    first, second, other = (
        ImportanceHead(C, 8, 2, generator=seeded(s))(tokens.float(), P) for s in (5, 5, 6)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_works_under_autocast(tokens, dtype):
    head = ImportanceHead(C, 8, 2, generator=seeded())
    bias = torch.zeros(B, 1, 1, P + K)
    exact = head(tokens.float(), P)
    with torch.autocast("cpu", torch.bfloat16):
        scores = head(tokens.to(dtype), P, bias)
        importance_loss(scores, torch.zeros(B, K)).backward()
    assert scores.dtype == torch.float32
    assert_close(scores, exact, atol=0.1, rtol=0)
    assert all(p.grad.isfinite().all() for p in head.parameters())


def test_it_learns_from_a_raw_residual_stream():
    """The target hides in channels a thousand times smaller than others."""
    channels, hidden = 64, 3
    scale = torch.logspace(2, -2, channels)
    sharp = torch.randn(64, P + 24, channels, generator=seeded(7))
    target = sharp[:, P:, -hidden:].sum(2) + 4
    tokens = scale * sharp + 20 * scale.flip(0)
    head = ImportanceHead(channels, 32, 4, generator=seeded(8))
    head.calibrate(tokens[:48], target[:48])
    optimiser = torch.optim.AdamW(head.parameters(), 5e-3)
    for step in range(150):
        index = torch.randint(48, (8,), generator=seeded(step))
        pairs = draw_pairs(24, 64, seeded(step))
        loss = importance_loss(head(tokens[index], P), target[index], pairs)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        assert spearman(head(tokens[48:], P), target[48:]).mean() > 0.9


def test_it_rejects_what_does_not_fit(head, tokens):
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 6\); got \(2, 9, 5\)"):
        head(tokens[..., :5], P)
    with pytest.raises(ValueError, match=r"num_prefix must be from 0 to 8, .* got 9\."):
        head(tokens, P + K)
    with pytest.raises(ValueError, match=r"num_heads must divide the 8 .* got 3\."):
        ImportanceHead(C, 8, 3)


def test_calibration_rejects_what_is_not_finite(head, tokens):
    with pytest.raises(ValueError, match="log_target must be finite"):
        head.calibrate(tokens, torch.full((B, K), -torch.inf))
    tokens[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="tokens must be finite; got NaN"):
        head.calibrate(tokens, torch.zeros(B, K))
