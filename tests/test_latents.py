"""Oracle: quadrature of the densities, closed-form moments, ``torch.distributions``."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import normalize
from torch.testing import assert_close

from foveate.bottleneck.latents import LATENTS, Gaussian, PowerSpherical

CASES = [(2, 0.5), (3, 0.0), (3, 4.0), (5, 30.0), (128, 90.0), (128, 2000.0)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def unit(*shape, seed=1):
    noise = torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)
    return normalize(noise, dim=-1)


def around(direction, concentration):
    """A Power Spherical distribution with the same concentration at each direction."""
    value = torch.full(direction.shape[:-1], concentration, dtype=direction.dtype)
    return PowerSpherical(direction, value)


def divergence_from_uniform(d, concentration):
    """Quadrature of E log((1 + t)^k / N) minus the log density of the uniform distribution.

    With t = sin(a) the surface measure (1 - t^2)^((d - 3) / 2) dt is cos(a)^(d - 2) da.
    """
    half_way = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    angle = torch.pi * (half_way - 0.5)
    log_one_plus_t = (2 * (torch.pi / 4 + angle / 2).sin().square()).log()
    log_measure = (d - 2) * angle.cos().log()
    log_density = concentration * log_one_plus_t
    log_mass = (log_measure + log_density).logsumexp(0)
    share = (log_measure + log_density - log_mass).exp()
    mean_log = (share * log_density).sum()
    return float(mean_log - log_mass + log_measure.logsumexp(0))


# --- Power Spherical ----------------------------------------------------------------------


@pytest.mark.parametrize(("d", "concentration"), CASES)
def test_divergence_from_uniform_is_that_of_quadrature(d, concentration):
    found = around(unit(1, d), concentration).kl()
    truth = divergence_from_uniform(d, concentration)
    assert_close(float(found), truth, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("d", "concentration"), CASES)
def test_entropy_and_divergence_add_up_to_the_log_area(d, concentration):
    latent = around(unit(1, d), concentration)
    half = {
        2: 1,
        4: math.pi,
        3: 2,
        5: 4 * math.pi / 3,
        128: math.pi**63 / math.factorial(63),
    }
    area = math.log(2 * math.pi * half[d])
    assert_close(float(latent.entropy() + latent.kl()), area)
    if concentration == 0.0:  # the distribution is the prior
        assert_close(float(latent.entropy()), area)


def test_large_concentrations_keep_their_digits_in_float32():
    exact = around(unit(1, 128), 1e5).kl()
    found = around(unit(1, 128).float(), 1e5).kl()
    assert found.dtype == torch.float32
    assert_close(found.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("d", "concentration"), CASES)
def test_samples_have_the_moments_of_the_cosine(d, concentration):
    num_samples = 20_000
    direction = unit(1, d).expand(num_samples, d)
    x = around(direction, concentration).sample(seeded())
    cosine = (x * direction).sum(-1)
    beta = (d - 1) / 2
    alpha = beta + concentration
    mean = (alpha - beta) / (alpha + beta)
    variance = 4 * alpha * beta / ((alpha + beta) ** 2 * (alpha + beta + 1))
    assert_close(x.norm(dim=-1), torch.ones(num_samples, dtype=torch.float64))
    error = (variance / num_samples) ** 0.5
    assert abs(float(cosine.mean()) - mean) < 4 * error
    # The variance of a variance is at most (kurtosis - 1) / n of its square; below 10 here.
    assert abs(float(cosine.var()) / variance - 1) < 4 * (10 / num_samples) ** 0.5


@pytest.mark.parametrize("first", [0.9, -0.9])
def test_samples_are_spread_evenly_around_the_direction(first):
    """Second moments across the direction are (1 - E t^2) / (d - 1), and zero beside it."""
    d, num_samples = 4, 40_000
    rest = (1 - first**2) ** 0.5
    direction = torch.tensor([first, 0.6 * rest, -0.8 * rest, 0.0], dtype=torch.float64)
    x = around(direction.expand(num_samples, d), 5.0).sample(seeded())
    cosine = x @ direction
    moments = x.T @ x / num_samples
    along = cosine.square().mean()
    across = (1 - along) / (d - 1)
    expected = across * torch.eye(d) + (along - across) * direction.outer(direction)
    assert_close(moments, expected.double(), rtol=0, atol=4 * num_samples**-0.5)
    mean = cosine.mean() * direction
    assert_close(x.mean(0), mean, rtol=0, atol=4 * num_samples**-0.5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_directions_on_the_axis_of_the_reflection_are_met(sign):
    direction = sign * torch.eye(6)[:1]
    x = around(direction, 1e6).sample(seeded())
    assert float((x * direction).sum()) > 1 - 1e-4
    assert_close(x.norm(dim=-1), torch.ones(1))


def test_gradient_in_the_direction_is_that_of_finite_differences():
    raw = unit(3, 5).requires_grad_(True)

    def draw(x):  # the same noise in every call
        return around(normalize(x, dim=-1), 7.0).sample(seeded())

    assert torch.autograd.gradcheck(draw, raw)


def test_gradient_of_the_divergence_is_that_of_finite_differences():
    concentration = torch.tensor([0.3, 4.0, 200.0], dtype=torch.float64, requires_grad=True)
    direction = unit(3, 16)
    assert torch.autograd.gradcheck(
        lambda k: PowerSpherical(direction, k).kl(), concentration
    )


@pytest.mark.parametrize(("d", "concentration"), [(3, 4.0), (128, 90.0)])
def test_gradient_in_the_concentration_is_unbiased(d, concentration):
    """The slope of E cos is (alpha + beta - alpha + beta) / (alpha + beta)^2."""
    num_samples = 20_000
    direction = unit(1, d).expand(num_samples, d)
    value = torch.full((num_samples,), concentration, dtype=torch.float64)
    value.requires_grad_(True)
    cosine = (PowerSpherical(direction, value).sample(seeded()) * direction).sum()
    (slopes,) = torch.autograd.grad(cosine, value)
    truth = (d - 1) / (d - 1 + concentration) ** 2
    error = float(slopes.std()) / num_samples**0.5
    # The implicit derivative of a gamma variable is itself good to about 1e-3.
    assert abs(float(slopes.mean()) - truth) < 4 * error + 2e-3 * truth


def test_placing_leaves_unit_vectors_and_takes_the_radial_derivative_away():
    z = unit(2, 3, 5)
    assert_close(PowerSpherical.place(z), z)
    assert_close(PowerSpherical.place(3 * z), z)
    _, slope = torch.func.jvp(PowerSpherical.place, (z,), (z,))
    assert float(slope.abs().max()) < 1e-14


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3, 5\) and \(2,\)"):
        PowerSpherical(unit(2, 3, 5), torch.ones(2))
    with pytest.raises(ValueError, match=r"d >= 2"):
        PowerSpherical(torch.ones(2, 1), torch.ones(2))


# --- Gaussian -----------------------------------------------------------------------------


def test_gaussian_divergence_is_that_of_torch_distributions():
    parameters = torch.randn(2, 3, 10, generator=seeded(), dtype=torch.float64)
    latent = Gaussian.read(parameters)
    prior = Normal(torch.zeros(1).double(), torch.ones(1).double())
    truth = kl_divergence(Normal(latent.mean, latent.log_std.exp()), prior).sum(-1)
    assert_close(latent.kl(), truth)
    assert_close(latent.mode(), parameters[..., :5])


def test_gaussian_samples_have_its_moments():
    num_samples = 20_000
    mean = torch.tensor([[[0.5, -2.0]]], dtype=torch.float64).expand(num_samples, 1, 2)
    log_std = torch.tensor([[[0.1, -1.0]]], dtype=torch.float64).expand(num_samples, 1, 2)
    x = Gaussian(mean, log_std).sample(seeded())
    std = log_std[0, 0].exp()
    assert ((x.mean((0, 1)) - mean[0, 0]).abs() < 4 * std / num_samples**0.5).all()
    assert ((x.std((0, 1)) / std - 1).abs() < 4 / (2 * num_samples) ** 0.5).all()


def test_gaussian_gradients_are_those_of_finite_differences():
    parameters = torch.randn(2, 3, 8, generator=seeded(), dtype=torch.float64)
    parameters.requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda p: Gaussian.read(p).sample(seeded(3)), parameters
    )
    assert torch.autograd.gradcheck(lambda p: Gaussian.read(p).kl(), parameters)


# --- both ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LATENTS)
def test_the_seed_decides_the_draw_and_parameters_decide_the_mode(name):
    kind, channels = LATENTS[name], 6
    shape = (2, 3, kind.num_parameters(channels))
    latent = kind.read(torch.randn(shape, generator=seeded()))
    first, second, other = (latent.sample(seeded(s)) for s in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)
    assert first.shape == latent.mode().shape == (2, 3, channels)
    assert first.dtype == torch.float32
    assert latent.kl().shape == (2, 3)
    assert (latent.kl() > 0).all()
    assert_close(kind.place(latent.sample(seeded())), latent.sample(seeded()))


@pytest.mark.parametrize("name", LATENTS)
def test_entries_times_the_scale_have_variance_one_under_the_prior(name):
    kind, channels = LATENTS[name], 16
    if name == "gaussian":
        prior = Gaussian(torch.zeros(4000, 1, channels), torch.zeros(4000, 1, channels))
    else:
        prior = around(unit(4000, channels), 0.0)
    z = kind.scale(channels) * prior.sample(seeded())
    assert abs(float(z.square().mean()) - 1) < 4 * (2 / z.numel()) ** 0.5
