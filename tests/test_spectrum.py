"""Oracle: SVD of the materialised float64 Jacobian; closed forms; prescribed spectra."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from foveate.diagnosis.findings import examine
from foveate.diagnosis.jacobian import TokenJacobian
from foveate.diagnosis.sketch import exact_sketch, randomised_sketch, split_budget
from foveate.diagnosis.statistics import (
    kappa_cap,
    rank_90,
    rank_entropy,
    rank_participation,
    rank_roy_vetterli,
    rank_stable,
    take_statistics,
)
from tests.reference_jacobian import (
    Bend,
    linear_jacobian,
    materialise,
    matrix_with,
    singular,
)

ASCENDING = (
    rank_stable,
    rank_participation,
    rank_entropy,
    rank_roy_vetterli,
)
RANKS = (*ASCENDING, rank_90)


def energies(*values):
    return torch.tensor(values, dtype=torch.float64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# --- statistics ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("rank", ASCENDING)
def test_equal_directions_are_counted_and_zeros_are_not(rank, count):
    assert rank(energies(*[2.0] * count, 0, 0)) == pytest.approx(count)


def test_the_definitions_differ_as_they_should():
    spectrum = 1 / torch.arange(1, 201, dtype=torch.float64) ** 2  # sigma = 1 / i
    values = [rank(spectrum) for rank in ASCENDING]
    assert values == pytest.approx([1.64, 2.48, 4.95, 63.4], rel=0.01)


def test_rank_90_is_the_fewest_directions_with_90_percent():
    assert rank_90(energies(6, 3, 0.5, 0.5)) == 2
    assert rank_90(energies(6, 2.99, 0.51, 0.5)) == 3
    assert rank_90(energies(*[1.0] * 10)) == 9
    assert rank_90(energies(*[0.1] * 10)) == 9  # which add up to 0.8999999999999999
    assert rank_90(energies(1)) == 1


def test_kappa_cap_is_a_share():
    assert kappa_cap(energies(4, 3, 2, 1), 2) == pytest.approx(0.7)
    assert kappa_cap(energies(4, 3, 2, 1), 20) == 1


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.floats(0.1, 10))
def test_ranks_are_ordered_and_know_no_scale(values, scale):
    spectrum = energies(*sorted(values, reverse=True))
    ranks = [rank(spectrum) for rank in ASCENDING]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(ranks))
    assert ranks[0] >= 1 - 1e-9
    assert ranks[-1] <= len(values) * (1 + 1e-9)
    assert [r(spectrum * scale) for r in ASCENDING] == pytest.approx(ranks)


# --- the exact route ----------------------------------------------------------------------


@pytest.mark.parametrize("num_outputs", [3, 9, 70])  # fewer and more than 5 x 4 columns
def test_exact_spectra_are_those_of_the_svd(num_outputs):
    tail = Bend(5, 4, num_outputs)
    tokens = torch.randn(2, 5, 4, generator=seeded(1), dtype=torch.float64)
    found = examine(exact_sketch(TokenJacobian(tail, tokens), 2), rank=4)
    for image, dense in enumerate(materialise(tail, tokens)):
        for name, first in (("all", 0), ("patches", 2)):
            spectrum = found[image][name].spectrum
            exact = singular(dense[:, first:])[0]
            assert_close(
                spectrum.energies[: len(exact)].sqrt(), exact, rtol=1e-7, atol=1e-7
            )
            for statistic, value in take_statistics(exact**2, 4).items():
                assert spectrum.statistics[statistic].value == pytest.approx(value)
                assert spectrum.statistics[statistic].standard_error == 0
            assert spectrum.energy.value == pytest.approx(float(exact.square().sum()))


def test_small_singular_values_survive_float32():
    values = torch.logspace(0, -6, 8, dtype=torch.float64)
    jacobian = linear_jacobian(matrix_with(values, 30)[None], 5, torch.float32)
    found = examine(exact_sketch(jacobian, 1), 3)[0]["all"].spectrum
    assert_close(found.energies.sqrt()[:7], values[:7], rtol=0.05, atol=0)


def test_a_jacobian_that_ignores_the_patches_is_refused():
    matrix = matrix_with(torch.ones(3), 30)
    matrix[:, 6:] = 0  # the first token alone, of five with six channels
    sketch = exact_sketch(linear_jacobian(matrix[None], 5), 1)
    with pytest.raises(ValueError, match="image 0 of the batch is zero from token 1 on"):
        examine(sketch, 2)


# --- the randomised route -----------------------------------------------------------------

# Law of the singular values, and share of the leading energy that the search may lose.
SPECTRA = {
    "i^-1/2": (lambda i: i**-0.5, 2e-4),
    "1/i": (lambda i: 1 / i, 1e-7),
    "i^-2": (lambda i: i**-2.0, 1e-12),
}
M, TOKENS, CHANNELS, RANK = 150, 20, 10, 8


def sketch(values, seeds, budget=(RANK, 50, 2), dtype=torch.float64):
    """One matrix sketched from several seeds, as images of one batch."""
    matrices = matrix_with(values, TOKENS * CHANNELS).expand(len(seeds), -1, -1)
    jacobian = linear_jacobian(matrices, TOKENS, dtype)
    generators = [seeded(s) for s in seeds]
    split = split_budget(*budget, num_outputs=len(values))
    return randomised_sketch(jacobian, 0, budget[0], split, generators)


def estimate(values, seeds=range(4), budget=(RANK, 50, 2), dtype=torch.float64):
    """Spectra of one matrix from several seeds."""
    found = examine(sketch(values, seeds, budget, dtype), RANK)
    return [image["all"].spectrum for image in found]


@pytest.mark.parametrize("name", SPECTRA)
def test_known_spectra_are_found_within_the_stated_errors(name):
    law, loss = SPECTRA[name]
    values = law(torch.arange(1, M + 1, dtype=torch.float64))
    exact = take_statistics(values**2, RANK)
    energy = float(values.square().sum())
    for spectrum in estimate(values, budget=(RANK, 30, 1)):  # 25 directions, 12 outside
        leading = spectrum.energies[:RANK]
        assert (leading <= values[:RANK] ** 2 * (1 + 1e-9)).all()  # Ritz values
        assert float(leading.sum()) >= (1 - loss) * float(values[:RANK].square().sum())
        assert abs(spectrum.energy.value - energy) <= 4 * spectrum.energy.standard_error
        assert float(spectrum.energies.sum()) == pytest.approx(spectrum.energy.value)
        assert len(spectrum.energies) == M
        for statistic in ("kappa_cap", "rank_stable", "rank_participation"):
            found = spectrum.statistics[statistic]
            gap = abs(found.value - exact[statistic])
            assert gap <= 4 * found.standard_error + 2 * loss * exact[statistic]


@pytest.mark.parametrize("name", SPECTRA)
def test_completed_ranks_are_within_their_stated_errors(name):
    values = SPECTRA[name][0](torch.arange(1, M + 1, dtype=torch.float64))
    exact = take_statistics(values**2, RANK)
    for spectrum in estimate(values):
        found = spectrum.statistics
        for rank in ("rank_entropy", "rank_90", "rank_roy_vetterli"):
            gap = abs(found[rank].value - exact[rank])
            assert gap <= 4 * found[rank].standard_error + (rank == "rank_90")
        assert found["rank_entropy"].value == pytest.approx(exact["rank_entropy"], rel=0.06)


def test_stated_errors_are_neither_too_small_nor_too_large():
    values = torch.arange(1, M + 1, dtype=torch.float64) ** -0.5
    exact = float(values.square().sum())
    part = sketch(values, range(60)).parts["all"]
    energy = part.gram.diagonal(dim1=1, dim2=2).sum(1) + part.missed.energy
    scores = (energy - exact) / part.missed.standard_error
    assert abs(float(scores.mean())) < 4 / 60**0.5  # unbiased
    assert 0.7 < float(scores.square().mean().sqrt()) < 1.3


def test_a_low_rank_is_found_exactly():
    values = torch.zeros(M)
    values[:5] = torch.tensor([5.0, 4, 3, 2, 1])
    for dtype in (torch.float32, torch.float64):
        for spectrum in estimate(values, seeds=[0, 1], dtype=dtype):
            exact = take_statistics(values.double() ** 2, RANK)
            for statistic, value in exact.items():
                found = spectrum.statistics[statistic]
                tolerance = 1e-2 if statistic == "rank_roy_vetterli" else 1e-5
                assert found.value == pytest.approx(value, rel=tolerance)


def test_more_products_find_more():
    values = torch.arange(1, M + 1, dtype=torch.float64) ** -0.5

    def shortfall(*budget):
        part = sketch(values, range(6), budget).parts["all"]
        leading = torch.linalg.eigvalsh(part.gram)[:, -RANK:].sum(1)
        missing = 1 - leading / values[:RANK].square().sum()
        return float(missing.mean()), float(part.missed.standard_error.mean())

    by_iterations = [shortfall(8, 20, q) for q in (1, 2, 4)]
    by_probes = [shortfall(8, m, 1) for m in (20, 40, 80)]
    assert by_iterations[0][0] > by_iterations[1][0] > by_iterations[2][0]
    assert by_probes[0][0] > by_probes[1][0] > by_probes[2][0]
    assert by_probes[0][1] > by_probes[1][1] > by_probes[2][1]
