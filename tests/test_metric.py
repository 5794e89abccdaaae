"""Oracle: the metric materialised in float64, and ``torch.linalg.qr``."""

import pytest
import torch
from torch.testing import assert_close

from foveate.diagnosis import sensitivity
from foveate.scoring.metric import PredictedMetric, SpectralPullbackNetwork
from foveate.scoring.orthonormal import cholesky_qr
from foveate.training.measures import alignment, energy_error, metric_error
from foveate.training.objectives import metric_loss

B, P, K, C, R, EPS = 2, 2, 5, 4, 3, 0.25
T = P + K


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def make_network(**options):
    return SpectralPullbackNetwork(
        C, R, hidden=8, num_heads=2, eps=EPS, generator=seeded(), **options
    )


@pytest.fixture
def network():
    return make_network().double()


@pytest.fixture
def tokens():
    return normal(B, T, C)


@pytest.fixture
def metric():
    rows = torch.linalg.qr(normal(B, T * C, R, seed=2)).Q.mT
    energies = torch.tensor([[9.0, 4.0, 0.5], [2.0, 1.0, 0.1]]).double()
    return PredictedMetric(rows.unflatten(2, (T, C)), energies, EPS, P)


def materialise(metric):
    """Form g of every image, ``(B, T * C, T * C)``."""
    rows = metric.directions.flatten(2)
    eye = torch.eye(rows.shape[2], dtype=rows.dtype)
    return rows.mT @ torch.diag_embed(metric.energies) @ rows + metric.eps * eye


def test_length_is_that_of_the_materialised_metric(metric, tokens):
    flat = tokens.flatten(1)
    expected = torch.einsum("bi,bij,bj->b", flat, materialise(metric), flat)
    assert_close(metric.apply(tokens), expected)


def test_distance_is_that_of_the_materialised_metric(metric, tokens):
    other = normal(B, T, C, seed=3)
    flat = (tokens - other).flatten(1)
    expected = torch.einsum("bi,bij,bj->b", flat, materialise(metric), flat).sqrt()
    assert_close(metric.distance(tokens, other), expected)
    assert_close(metric.distance(other, tokens), expected)


def test_token_distances_use_the_blocks_of_single_tokens(metric, tokens):
    g = materialise(metric).unflatten(2, (T, C)).unflatten(1, (T, C))
    shifted = tokens + 3.0
    distances = metric.token_distances(shifted)
    assert distances.shape == (B, K, K)
    for image in range(B):
        for i in range(K):
            for j in range(K):
                d = tokens[image, P + i] - tokens[image, P + j]
                block = g[image, P + i, :, P + i] + g[image, P + j, :, P + j]
                expected = (d @ block @ d / 2).sqrt()
                assert_close(distances[image, i, j], expected)


def test_importance_is_that_of_the_diagnosis(metric):
    leading = metric.energies.sqrt()[..., None, None] * metric.directions
    expected = torch.stack([sensitivity.importance(image) for image in leading])
    assert_close(metric.importance(), expected)


def test_the_sketch_has_the_metric_of_the_patches_as_its_sum(metric):
    rows = metric.sketch()
    assert rows.shape == (B, K, R, C)
    flat = rows.transpose(1, 2).flatten(2)  # (B, r, K * C)
    patches = materialise(metric)[:, P * C :, P * C :]
    eye = torch.eye(K * C, dtype=torch.float64)
    assert_close(flat.mT @ flat, patches - EPS * eye)


def test_the_sketch_of_all_tokens_is_the_whole_metric(metric):
    whole = PredictedMetric(metric.directions, metric.energies, EPS)
    flat = whole.sketch().transpose(1, 2).flatten(2)
    eye = torch.eye(T * C, dtype=torch.float64)
    assert_close(flat.mT @ flat, materialise(metric) - EPS * eye)


@pytest.mark.parametrize("shape", [(2, 40, 5), (3, 6, 6), (1, 9, 1)])
def test_cholesky_qr_is_qr_with_a_positive_diagonal(shape):
    columns = normal(*shape)
    q, r = torch.linalg.qr(columns)
    found = cholesky_qr(columns)
    assert_close(found, q * r.diagonal(dim1=1, dim2=2).sign()[:, None])
    assert_close(found @ found.mT, q @ q.mT)


@pytest.mark.parametrize("gap", [1.0, 1e-2, 1e-4, 1e-6])
def test_columns_that_nearly_coincide_give_orthonormal_ones_and_finite_gradients(gap):
    columns = normal(2, 3000, 20).float()
    columns[:, :, 7] = columns[:, :, 2] + gap * columns[:, :, 7]
    columns[:, :, 4] *= 1e-12
    found = cholesky_qr(columns.requires_grad_())
    assert_close(found.mT @ found, torch.eye(20).expand(2, -1, -1), atol=1e-5, rtol=0)
    (found * normal(2, 3000, 20, seed=3).float()).sum().backward()
    assert columns.grad.isfinite().all()
    if gap >= 1e-4:
        q = torch.linalg.qr(columns.detach().double()).Q
        assert_close(
            alignment(found.mT.double(), q.mT), torch.ones(2).double(), atol=1e-5, rtol=0
        )


def test_cholesky_qr_has_its_gradient():
    columns = normal(2, 7, 3)
    columns[:, :, 1] = columns[:, :, 0] + 0.1 * columns[:, :, 1]
    assert torch.autograd.gradcheck(cholesky_qr, columns.requires_grad_())


@pytest.mark.parametrize("broken", ["equal", "sum", "zero", "wide", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dependent_columns_are_refused(broken, dtype):
    columns = normal(2, 500, 12).to(dtype)
    if broken == "equal":
        columns[1, :, 2] = columns[1, :, 0]
    elif broken == "zero":
        columns[0, :, 1] = 0
    elif broken == "wide":
        columns = columns[:, :11]
    elif broken == "sum":
        columns[1, :, 2] = columns[1, :, 0] - 2 * columns[1, :, 5]
    else:
        columns[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="columns must be finite and independent"):
        cholesky_qr(columns)


@pytest.mark.parametrize("reach", ["all", "patches"])
def test_its_directions_are_orthonormal_and_its_energies_positive(tokens, reach):
    metric = make_network(reach=reach).double()(tokens, P)
    assert metric.directions.shape == (B, R, T, C)
    assert (metric.eps, metric.num_prefix) == (EPS, P)
    rows = metric.directions.flatten(2)
    assert_close(rows @ rows.mT, torch.eye(R).double().expand(B, -1, -1))
    assert (metric.energies > 0).all()
    at_prefix = metric.directions[:, :, :P].abs().amax((1, 2, 3))
    assert ((at_prefix > 1e-3) == (reach == "all")).all()


def test_patches_are_read_with_the_prefix_whatever_the_reach(tokens):
    network = make_network(reach="patches").double()
    other = tokens.clone()
    other[:, 0] = tokens[:, 0].flip(-1)
    before, after = (network(x, P).sketch() for x in (tokens, other))
    assert (after - before).abs().max() > 1e-3


def test_its_parameters_have_a_closed_form():
    channels, rank, hidden = 384, 20, 128
    network = SpectralPullbackNetwork(channels, rank, hidden)
    read = 2 * channels + (channels + 1) * hidden
    blocks = 2 * (8 * hidden**2 + 11 * hidden) + 2 * hidden
    write = (hidden + 1) * channels * rank + (hidden + 1) * (hidden + rank)
    assert sum(p.numel() for p in network.parameters()) == read + blocks + write


def test_permuting_patches_permutes_directions_and_leaves_energies(network, tokens):
    order = torch.cat([torch.arange(P), P + torch.randperm(K, generator=seeded(3))])
    before, after = network(tokens, P), network(tokens[:, order], P)
    assert_close(after.directions, before.directions[:, :, order])
    assert_close(after.energies, before.energies)


def test_images_do_not_mix(network, tokens):
    other = torch.stack([tokens[0], tokens[1].flip(-1)])
    before, after = network(tokens, P), network(other, P)
    assert_close(after.directions[0], before.directions[0])
    assert_close(after.energies[0], before.energies[0])
    assert not torch.allclose(after.directions[1], before.directions[1], atol=1e-3)
    assert not torch.allclose(after.energies[1], before.energies[1], atol=1e-3)


def test_calibration_makes_it_blind_to_the_scale_of_channels(network, tokens):
    energies = torch.tensor([[9.0, 4.0, 1.0]]).double()
    network.calibrate(tokens, energies)
    before = network(tokens, P)
    scale = torch.logspace(-3, 2, C, dtype=torch.float64)
    stretched = scale * tokens + 10 * scale.flip(0)
    network.calibrate(stretched, energies)
    assert_close(network(stretched, P).directions, before.directions)


def test_calibration_starts_energies_at_their_geometric_means(network, tokens):
    network.calibrate(tokens, torch.tensor([[900.0, 4.0, 1e-3], [100.0, 9.0, 1e-5]]))
    with torch.no_grad():
        network.to_energies.weight.zero_()
    expected = torch.tensor([300.0, 6.0, 1e-4], dtype=torch.float64).expand(B, -1)
    assert_close(network(tokens, P).energies, expected, rtol=1e-6, atol=0)


def test_it_has_its_gradient(network):
    def both(x):
        metric = network(x, 1)
        return metric.directions, metric.energies

    assert torch.autograd.gradcheck(both, normal(1, 3, C).requires_grad_())


def test_the_same_seed_gives_the_same_bits(tokens):
    first, second = (make_network()(tokens.float(), P).directions for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_leaves_directions_orthonormal_and_gradients_finite(tokens, dtype):
    network = make_network()
    vectors = torch.linalg.qr(normal(B, T * C, R)).Q.mT.unflatten(2, (T, C)).float()
    energies = torch.tensor([[9.0, 4.0, 1.0]]).expand(B, -1)
    with torch.autocast("cpu", torch.bfloat16):
        metric = network(tokens.to(dtype), P)
        loss = metric_loss(metric, vectors, energies, coupling=1.0)
        loss.backward()
        length = metric.apply(tokens.float())
    rows = metric.directions.detach().flatten(2)
    assert rows.dtype == metric.energies.dtype == torch.float32
    assert_close(rows @ rows.mT, torch.eye(R).expand(B, -1, -1), atol=1e-5, rtol=0)
    assert all(p.grad.isfinite().all() for p in network.parameters())
    assert_close(length, metric.apply(tokens.float()), rtol=1e-5, atol=0)


def test_a_tiny_network_learns_the_metric_of_an_image():
    vectors = torch.linalg.qr(normal(1, T * C, R, seed=4)).Q.mT.unflatten(2, (T, C)).float()
    energies, tokens = torch.tensor([[90.0, 20.0, 5.0]]), normal(1, T, C).float()
    network = SpectralPullbackNetwork(C, R, hidden=16, num_heads=2, generator=seeded())
    network.calibrate(tokens, 3 * energies)
    start = network(tokens, P)
    assert alignment(start.directions, vectors) < 0.5
    optimiser = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        metric_loss(network(tokens, P), vectors, energies, coupling=0.5).backward()
        optimiser.step()
    with torch.no_grad():
        found = network(tokens, P)
    assert alignment(found.directions, vectors) > 0.95
    assert energy_error(found, energies) < 0.1
    assert metric_error(found, vectors, energies) < 0.2


def test_it_rejects_what_does_not_fit(network, metric, tokens):
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 4\); got \(2, 7, 3\)"):
        network(tokens[..., :3], P)
    with pytest.raises(ValueError, match=r"num_prefix must be from 0 to 6, .* got 7\."):
        network(tokens, T)
    with pytest.raises(ValueError, match=r"v must have shape \(2, 7, 4\); got \(2, 6, 4\)"):
        metric.apply(tokens[:, 1:])
    with pytest.raises(ValueError, match="columns must be finite and independent"):
        network(tokens * torch.nan, P)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 0}, r"rank must be at least 1; got 0\."),
        ({"eps": -1.0}, r"eps must not be negative; got -1\.0\."),
        ({"reach": "prefix"}, r"reach must be one of .* got 'prefix'\."),
        ({"num_heads": 3}, r"num_heads must divide the 128 .* got 3\."),
    ],
)
def test_it_rejects_options_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        SpectralPullbackNetwork(C, **options)


def test_calibration_rejects_energies_without_a_logarithm(network, tokens):
    with pytest.raises(
        ValueError, match=r"energies must have shape \(S, 3\); got \(2, 2\)"
    ):
        network.calibrate(tokens, torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"energies must be positive .* from 0\.0 to 1\.0"):
        network.calibrate(tokens, torch.tensor([[1.0, 1.0, 0.0]]))
