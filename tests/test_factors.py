"""Oracle: naive loops over pairs and groups in float64; permutations; repeated tokens."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from foveate.reduction.agglomerate import agglomerate, random_halves, round_counts
from foveate.reduction.costs import Clusters, cosine_cost
from foveate.scoring.factors import FactorNetwork
from foveate.training import factors
from foveate.training.factors import factor_loss, merge_costs
from tests import tiny

C, P, K, B = 12, 2, 16, 2


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=seeded(seed), dtype=dtype)


@pytest.fixture
def network():
    return tiny.randomise(
        FactorNetwork(C, rows=3, dims=5, hidden=16, blocks=2, num_heads=2)
    ).double()


# --- the network --------------------------------------------------------------------------


def test_permuting_patches_permutes_their_factors(network):
    x, order = normal(B, P + K, C), torch.randperm(K, generator=seeded(1))
    found = network(x, P)
    shuffled = torch.cat([x[:, :P], x[:, P:][:, order]], 1)
    assert found.shape == (B, K, 3, 5)
    assert_close(network(shuffled, P), found[:, order])
    assert not torch.allclose(found, found[:, order])


def test_prefix_tokens_are_read_and_have_no_factor(network):
    x = normal(B, P + K, C)
    other = x.clone()
    other[:, 0] = x[:, 0].flip(1)
    assert not torch.allclose(network(x, P), network(other, P))
    assert network(x, 1).shape[1] == K + 1


def test_images_of_a_batch_do_not_see_each_other(network):
    x = normal(B, P + K, C)
    assert_close(network(x[1:], P)[0], network(x, P)[1])


def test_a_merged_token_is_read_as_its_copies(network):
    x, size = normal(B, P + K, C), torch.tensor([1.0, 2, 3, 1] * 4).double()
    bias = torch.cat([torch.zeros(P).double(), size.log()])[None, None, None]
    copies = torch.cat([x[:, :P], x[:, P:].repeat_interleave(size.long(), 1)], 1)
    truth = network(copies, P)  # one factor a copy
    first = size.long().cumsum(0) - size.long()
    found = network(x, P, bias.expand(B, -1, -1, -1))
    assert_close(found, truth[:, first])
    assert not torch.allclose(found, network(x, P), rtol=1e-3)


def test_the_basis_is_orthonormal_and_spans_the_columns(network):
    basis = network.basis
    assert basis.shape == (C, 5)
    assert_close(basis.T @ basis, torch.eye(5).double())
    columns = network.columns.detach()
    assert_close(basis @ (basis.T @ columns), columns)


def test_the_basis_has_the_gradient_of_finite_differences(network):
    weight, step = normal(C, 5, seed=3), normal(C, 5, seed=4)
    network.columns.requires_grad_(True)
    (network.basis * weight).sum().backward()
    ends = []
    start = network.columns.detach().clone()
    for sign in (1, -1):
        with torch.no_grad():
            network.columns.copy_(start + sign * 1e-5 * step)
            ends.append((network.basis * weight).sum())
    assert_close((network.columns.grad * step).sum(), (ends[0] - ends[1]) / 2e-5)


def test_rows_start_with_the_length_of_pulled_probes():
    """Entries of mean square one, in C channels: a squared length of C."""
    network = FactorNetwork(C, rows=4, dims=6, hidden=64, generator=seeded())
    x = normal(40, P + K, C, dtype=torch.float32)
    network.calibrate(x)
    squares = network(x, P).square().sum(3).mean()
    assert 0.5 * C < squares < 2 * C


def test_the_same_generator_gives_the_same_network():
    nets = [FactorNetwork(C, dims=4, hidden=8, generator=seeded(s)) for s in (1, 1, 2)]
    states = [torch.cat([w.flatten() for w in n.state_dict().values()]) for n in nets]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_in_half_precision(network, dtype):
    single = network.float()
    x = normal(B, P + K, C).to(dtype)
    assert_close(single(x, P), single(x.float(), P))
    assert single(x, P).dtype == torch.float32
    low = FactorNetwork(C, dims=5, hidden=16, generator=seeded()).to(dtype)
    found = low(x, P)
    assert found.dtype == low.basis.dtype == torch.float32
    assert found.isfinite().all()


def test_calibration_takes_out_the_unit_of_each_channel(network):
    x, unit = normal(B, P + K, C), torch.logspace(-2, 2, C).double()
    network.calibrate(x)
    truth = network(x, P)
    network.calibrate(3 + unit * x)
    assert_close(network(3 + unit * x, P), truth)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"rows": 0}, "rows and blocks must be at least 1 .* got 0, 1 and 4"),
        ({"blocks": 0}, "rows and blocks must be at least 1 .* got 8, 0 and 4"),
        ({"dims": 13}, "dims from 1 to 12; got 8, 1 and 13"),
        ({"dims": 0}, "dims from 1 to 12; got 8, 1 and 0"),
        ({"num_heads": 3}, "num_heads must divide the 8 hidden channels; got 3"),
    ],
)
def test_numbers_out_of_range_are_refused(change, wrong):
    with pytest.raises(ValueError, match=wrong):
        FactorNetwork(C, **{"dims": 4, "hidden": 8, **change})


def test_tokens_that_do_not_fit_are_refused(network):
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 12\)"):
        network(normal(B, 5, C + 1), 1)
    with pytest.raises(ValueError, match=r"num_prefix must be from 0 to 4, .* got 5"):
        network(normal(B, 5, C), 5)


# --- the loss -----------------------------------------------------------------------------


class Stub(nn.Module):
    """A network that says what it is told, in a basis of all channels."""

    def __init__(self, rows, basis=None):
        super().__init__()
        self.rows = nn.Parameter(rows)
        full = torch.linalg.qr(normal(C, C, seed=9)).Q
        self.basis = full if basis is None else basis

    def forward(self, tokens, num_prefix):
        assert num_prefix == P
        return self.rows @ self.basis


@pytest.fixture
def batch():
    return {"tokens": normal(B, P + K, C), "rows": normal(B, K, 3, C, seed=5)}


def with_share(monkeypatch, share):
    monkeypatch.setattr(factors, "SHARES", (share,))


def grouped(batch, share, seed):
    """Groups of the patches, as the loss draws them, and the anchors."""
    generator = seeded(seed)
    draw = int(torch.randint(1 << 30, (1,), generator=generator))
    keep = round(share * K)
    feature = batch["tokens"][:, P:]
    if keep == K:
        return None, torch.randperm(keep, generator=generator)[:64]
    clusters = Clusters(feature, torch.ones_like(feature[..., 0]))
    counts = round_counts(K, keep, 4)
    halves = random_halves(K, counts, draw)
    group = agglomerate(clusters, counts, halves, cosine_cost).group
    return group, torch.randperm(keep, generator=generator)[:64]


def means(values, group, keep):
    return torch.stack([
        torch.stack([values[b][group[b] == k].mean(0) for k in range(keep)])
        for b in range(len(values))
    ])


def pair_costs(feature, rows, anchors):
    """One number at a time, ``(B, A, K)``."""
    costs = torch.zeros(len(feature), len(anchors), feature.shape[1]).double()
    for b in range(len(feature)):
        for i, a in enumerate(anchors.tolist()):
            for k in range(feature.shape[1]):
                effect = (rows[b, a] - rows[b, k]) @ (feature[b, a] - feature[b, k])
                costs[b, i, k] = effect.square().mean()
    return costs


def pair_term(true, found, anchors):
    total = weights = 0.0
    for b in range(len(true)):
        floor = 1e-5 * float(true[b].mean())
        for i, a in enumerate(anchors.tolist()):
            levels = [
                float(quantile(costs[b, i].tolist(), 0.15)) for costs in (true, found)
            ]
            for k in range(true.shape[2]):
                if k == a:
                    continue
                t, f = float(true[b, i, k]), float(found[b, i, k])
                weight = 1 / (1 + t / levels[0]) + 1 / (1 + f / levels[1])
                total += weight * (math.log(t + floor) - math.log(f + floor)) ** 2
                weights += weight
    return total / weights


def quantile(values, share):
    """Linear between the two values around it."""
    ordered, at = sorted(values), share * (len(values) - 1)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[low + 1] - ordered[low])


def cancel_term(batch, predicted, group, keep):
    feature, rows, logs = batch["tokens"][:, P:], batch["rows"], []
    mean = means(feature, group, keep)
    for b in range(len(feature)):
        levels, systems = [], []
        before = left = 0.0
        for k in range(keep):
            members = (group[b] == k).nonzero()[:, 0].tolist()
            true_sum = sum(rows[b, i] for i in members)
            said_sum = sum(predicted[b, i] for i in members)
            move = {i: mean[b, k] - feature[b, i] for i in members}
            true_effect = sum(rows[b, i] @ move[i] for i in members)
            said_effect = sum(predicted[b, i] @ move[i] for i in members)
            gram = said_sum @ said_sum.T
            levels.append(gram.diagonal().mean())
            systems.append((gram, said_sum, said_effect, true_sum, true_effect))
        for level, (gram, said, said_effect, true, true_effect) in zip(
            levels, systems, strict=True
        ):
            solved = torch.linalg.solve(gram + level * torch.eye(3), said_effect)
            left += (true_effect - true @ said.T @ solved).square().sum()
            before += true_effect.square().sum()
        logs.append(math.log(float(left / before) + 1e-6))
    return sum(logs) / len(logs)


def test_the_pair_term_is_that_of_naive_loops(batch, monkeypatch):
    with_share(monkeypatch, 1.0)
    predicted = normal(B, K, 3, C, seed=6)
    _, anchors = grouped(batch, 1.0, 4)
    assert len(anchors) == K
    feature = batch["tokens"][:, P:]
    true = pair_costs(feature, batch["rows"], anchors)
    found = pair_costs(feature, predicted, anchors)
    loss = factor_loss(Stub(predicted), batch, seeded(4))
    assert loss.item() == pytest.approx(pair_term(true, found, anchors), rel=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_both_terms_for_clusters_are_those_of_naive_loops(batch, monkeypatch, share):
    with_share(monkeypatch, share)
    predicted, keep = normal(B, K, 3, C, seed=6), round(share * K)
    group, anchors = grouped(batch, share, 2)
    feature = means(batch["tokens"][:, P:], group, keep)
    true = pair_costs(feature, means(batch["rows"], group, keep), anchors)
    found = pair_costs(feature, means(predicted, group, keep), anchors)
    expected = pair_term(true, found, anchors)
    expected += 0.5 * cancel_term(batch, predicted, group, keep)
    loss = factor_loss(Stub(predicted), batch, seeded(2))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_truth_leaves_nothing_of_the_pair_term(batch, monkeypatch):
    with_share(monkeypatch, 1.0)
    assert factor_loss(Stub(batch["rows"]), batch, seeded()).item() < 1e-12
    turned = torch.linalg.qr(normal(3, 3, seed=8)).Q @ batch["rows"]  # of output space
    assert factor_loss(Stub(turned), batch, seeded()).item() < 1e-12
    assert factor_loss(Stub(1.1 * batch["rows"]), batch, seeded()).item() > 0.02


def test_the_truth_is_a_minimum_of_the_whole_loss(batch, monkeypatch):
    with_share(monkeypatch, 0.5)
    best = factor_loss(Stub(batch["rows"]), batch, seeded())
    for seed in range(5):
        noise = 0.5 * normal(B, K, 3, C, seed=seed)
        assert factor_loss(Stub(batch["rows"] + noise), batch, seeded()) > best


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_no_unit_of_an_image_matters(batch, monkeypatch, share):
    """Rows, true and predicted, in another unit; so may be the features."""
    with_share(monkeypatch, share)
    predicted, unit = normal(B, K, 3, C, seed=6), torch.tensor([1e-2, 50.0]).double()
    truth = factor_loss(Stub(predicted), batch, seeded())
    unit = unit[:, None, None, None]
    scaled = {**batch, "rows": unit * batch["rows"]}
    assert_close(factor_loss(Stub(unit * predicted), scaled, seeded()), truth)


def test_the_loss_has_a_finite_gradient_for_every_parameter(batch, monkeypatch):
    network = FactorNetwork(C, rows=3, dims=5, hidden=16, generator=seeded()).double()
    for share in (1.0, 0.5):
        with_share(monkeypatch, share)
        network.zero_grad()
        factor_loss(network, batch, seeded()).backward()
        for name, p in network.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            # The bias of keys turns no attention.
            assert p.grad.abs().max() > 0 or name.endswith("bias"), name


def test_the_loss_is_a_function_of_the_generator(batch):
    stub = Stub(normal(B, K, 3, C, seed=6))
    losses = [factor_loss(stub, batch, seeded(s)).item() for s in (0, 0, 1, 2, 3)]
    assert losses[0] == losses[1]
    assert len(set(losses)) > 2


def test_autocast_leaves_the_costs_alone(batch, monkeypatch):
    """Costs are differences of products that half precision would round away."""
    single = {name: value.float() for name, value in batch.items()}
    single["tokens"] = single["tokens"] + 30  # far from zero, as real features are
    stub = Stub(normal(B, K, 3, C, seed=6).float())
    stub.basis = stub.basis.float()
    for share in (1.0, 0.5):
        with_share(monkeypatch, share)
        truth = factor_loss(stub, single, seeded())
        with torch.autocast("cpu", torch.bfloat16):
            stub.rows.data = normal(B, K, 3, C, seed=6).float()
            found = factor_loss(Exact(stub), single, seeded())
        assert_close(found, truth, rtol=1e-4, atol=0)


class Exact(nn.Module):
    """A network whose own products are exact, so that the others show."""

    def __init__(self, stub):
        super().__init__()
        self.stub, self.basis = stub, stub.basis

    def forward(self, tokens, num_prefix):
        with torch.autocast("cpu", enabled=False):
            return self.stub(tokens, num_prefix)


def test_costs_of_merges_are_those_of_naive_loops(batch):
    predicted = normal(B, K, 3, C, seed=6)
    true, found = merge_costs(Stub(predicted), batch)
    anchors = torch.arange(0, K, 4)
    feature = batch["tokens"][:, P:]
    expected = [pair_costs(feature, g, anchors) for g in (batch["rows"], predicted)]
    assert_close(true, expected[0].flatten(1), rtol=1e-6, atol=1e-9)
    assert_close(found, expected[1].flatten(1), rtol=1e-6, atol=1e-9)


def test_the_wrapper_of_several_processes_is_looked_through(batch, monkeypatch):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *given):
            return self.module(*given)

    with_share(monkeypatch, 0.5)
    stub = Stub(normal(B, K, 3, C, seed=6))
    truth = factor_loss(stub, batch, seeded())
    assert_close(factor_loss(Wrapper(stub), batch, seeded()), truth)
