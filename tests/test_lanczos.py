"""Oracle: traces of polynomials of a dense matrix; sums and bounds by construction."""

import pytest
import torch
from torch.testing import assert_close

from foveate.diagnosis.lanczos import (
    complete_spectrum,
    geometric_spectrum,
    quadrature_weights,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def krylov_basis(matrix, start, steps):
    """Orthonormal basis of the block Krylov space, the start block first."""
    blocks = [start]
    for _ in range(steps - 1):
        blocks.append(matrix @ blocks[-1])
        blocks[-1] = torch.linalg.qr(blocks[-1]).Q
    return torch.linalg.qr(torch.cat(blocks, 1)).Q


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_rule_is_exact_up_to_its_degree(steps):
    size, probes = 40, 3
    half = torch.randn(size, size, generator=seeded(), dtype=torch.float64)
    matrix = half @ half.T / size
    start = torch.linalg.qr(torch.randn(size, probes, generator=seeded(1)).double()).Q
    basis = krylov_basis(matrix, start, steps)
    nodes, vectors = torch.linalg.eigh(basis.T @ matrix @ basis)
    weights = quadrature_weights(vectors, probes, size)
    assert_close(weights.sum(1), torch.full((probes,), float(size), dtype=torch.float64))

    def gap(degree):
        power = torch.linalg.matrix_power(matrix, degree)
        first = basis[:, :probes]
        exact = size * torch.einsum("ip,ij,jp->p", first, power, first)
        return float(((weights * nodes**degree).sum(1) / exact - 1).abs().max())

    assert max(gap(degree) for degree in range(2 * steps)) < 1e-10
    assert gap(2 * steps) > 1e-3  # and not beyond


@pytest.fixture
def nodes():
    """Ten energies whose tail stands for 90 directions."""
    energies = torch.tensor([9, 7, 5, 4, 3, 2.5, 2, 1, 0.5, 0.1], dtype=torch.float64)
    weights = torch.tensor([1, 1, 1, 1, 2, 4, 8, 16, 32, 34], dtype=torch.float64)
    return energies, 0.7 * weights  # as a finite sample may have it


@pytest.mark.parametrize("total", [25.1, 40.0, 90.0, 300.0])
def test_a_completed_spectrum_keeps_number_energy_and_leading_part(nodes, total):
    energies, weights = nodes
    spectrum = complete_spectrum(energies, weights, 4, total, 100)
    assert len(spectrum) == 100
    assert float(spectrum.sum()) == pytest.approx(total)
    assert torch.equal(spectrum[:4], energies[:4])
    assert (spectrum.diff() <= 0).all()
    assert (spectrum > 0).all()


def test_weights_count_relative_to_each_other(nodes):
    energies, weights = nodes
    spectra = [complete_spectrum(energies, f * weights, 4, 40.0, 100) for f in (1, 3)]
    assert_close(spectra[0], spectra[1])


def test_a_rule_that_knows_every_direction_gives_the_spectrum_back():
    energies = torch.linspace(5, 1, 30).double()
    spectrum = complete_spectrum(energies, torch.ones(30), 6, float(energies.sum()), 30)
    assert_close(spectrum, energies)


def test_without_energy_left_the_tail_is_zero(nodes):
    energies, weights = nodes
    total = float(energies[:4].sum())
    spectrum = complete_spectrum(energies, weights, 4, total, 100)
    assert torch.equal(spectrum[4:], torch.zeros(96, dtype=torch.float64))
    spectrum = complete_spectrum(energies, weights, 10, float(energies.sum()), 100)
    assert torch.equal(spectrum[:10], energies)
    assert float(spectrum[10:].sum()) == 0


def test_a_geometric_tail_has_one_rate_and_the_same_energy():
    spectrum = torch.tensor([8.0, 4, 3, 3, 2, 2, 1, 1], dtype=torch.float64)
    geometric = geometric_spectrum(spectrum, 2)
    assert float(geometric.sum()) == pytest.approx(24)
    rates = geometric[2:] / geometric[1:-1]
    assert_close(rates, rates[:1].expand(6))
    assert torch.equal(geometric[:2], spectrum[:2])
    assert torch.equal(geometric_spectrum(spectrum, 8), spectrum)
