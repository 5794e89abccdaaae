"""Oracle: the materialised Jacobian; counts of products; expectations over many seeds."""

import pytest
import torch
from torch.testing import assert_close

from foveate.diagnosis.findings import examine
from foveate.diagnosis.jacobian import TokenJacobian
from foveate.diagnosis.sensitivity import block_norm
from foveate.diagnosis.sketch import (
    exact_sketch,
    randomised_sketch,
    row_products,
    split_budget,
)
from foveate.diagnosis.subspace import START, Basis, orthonormalise
from foveate.diagnosis.trace import estimate_missed
from tests.reference_jacobian import Bend, linear_jacobian, materialise, matrix_with

M, TOKENS, CHANNELS, P, RANK = 60, 9, 10, 2, 4


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def seeds(count, first=0):
    return [seeded(first + i) for i in range(count)]


def slow_matrix(seed=0):
    """Singular values i^-1/2, and prefix columns that hold most of the energy."""
    matrix = matrix_with(torch.arange(1, M + 1) ** -0.5, TOKENS * CHANNELS, seed)
    matrix[:, : P * CHANNELS] *= 3
    return matrix


def dense(sketch):
    """Rows as a matrix, ``(B, D, T * C)``."""
    return sketch.rows.flatten(2)


# --- budget -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "probes", "iterations", "num_outputs"),
    [
        (20, 100, 2, 384),
        (20, 100, 2, 3000),
        (20, 100, 2, 100),
        (8, 20, 1, 150),
        (3, 6, 2, 500),
        (20, 4, 1, 1000),
        (1, 1, 3, 50),
        (5, 100, 2, 3),
    ],
)
def test_no_more_products_are_spent_than_the_budget_has(
    rank, probes, iterations, num_outputs
):
    budget = split_budget(rank, probes, iterations, num_outputs)
    assert budget.total == rank * iterations + probes
    assert budget.search + budget.probes == min(budget.total - 1, num_outputs)
    assert budget.search >= min(rank, num_outputs)
    generator = seeded(0)
    matrix = torch.randn(1, num_outputs, 12, generator=generator)
    jacobian = linear_jacobian(matrix, 4)
    for num_prefix in (0, 1):
        jacobian.products.jvp = jacobian.products.vjp = 0
        randomised_sketch(jacobian, num_prefix, rank, budget, seeds(1))
        assert jacobian.products.jvp <= budget.total - 1
        assert jacobian.products.vjp <= budget.total - 1


def test_the_default_spends_140_of_each_with_the_adjoint_check():
    budget = split_budget(20, 100, 2, 384)
    assert (budget.total, budget.search, budget.probes) == (140, 99, 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 0, 1), "probes must be at least 1; got 0"),
        ((5, 10, 0), "iterations must be at least 1; got 0"),
        ((5, 2, 1), "probes must be at least 3 for rank 5 and 1 iterations; got 2"),
    ],
)
def test_rejects_a_budget_that_is_too_small(arguments, message):
    with pytest.raises(ValueError, match=message):
        split_budget(*arguments, num_outputs=100)


# --- exact --------------------------------------------------------------------------------


def test_rows_of_the_exact_route_are_the_jacobian():
    tail = Bend(4, 5, 7)
    tokens = torch.randn(3, 4, 5, generator=seeded(1), dtype=torch.float64)
    jacobian = TokenJacobian(tail, tokens)
    assert_close(exact_sketch(jacobian, 1).rows, materialise(tail, tokens))
    assert (jacobian.products.jvp, jacobian.products.vjp) == (0, 7)


def test_columns_are_taken_where_there_are_fewer():
    tail = Bend(4, 5, 33)
    tokens = torch.randn(3, 4, 5, generator=seeded(1), dtype=torch.float64)
    jacobian = TokenJacobian(tail, tokens)
    sketch = exact_sketch(jacobian, 1)
    truth = materialise(tail, tokens).flatten(2)
    assert sketch.rows.shape == (3, 20, 4, 5)
    assert_close(dense(sketch).mT @ dense(sketch), truth.mT @ truth)
    assert (jacobian.products.jvp, jacobian.products.vjp) == (20, 0)


def test_products_of_rows_leave_out_the_prefix():
    rows = torch.randn(2, 6, 35, 4, generator=seeded(1))
    patches = rows[:, :, 3:].flatten(2).double()
    assert_close(row_products(rows, 3), patches @ patches.mT)


# --- randomised ---------------------------------------------------------------------------


@pytest.fixture
def sketch():
    """A sketch of two images with 3 prefix-heavy questions' worth of products."""
    matrices = torch.stack([slow_matrix(0), slow_matrix(1)])
    budget = split_budget(RANK, 26, 2, M)
    jacobian = linear_jacobian(matrices, TOKENS)
    return matrices, randomised_sketch(jacobian, P, RANK, budget, seeds(2))


def test_rows_are_the_jacobian_in_an_orthonormal_basis(sketch):
    matrices, found = sketch
    rows = dense(found)
    # B = Q^T J with orthonormal Q: recover Q by least squares, as J has full row rank.
    q = torch.linalg.lstsq(matrices.mT, rows.mT).solution  # (B, M, D)
    identity = torch.eye(q.shape[2], dtype=torch.float64).expand(2, -1, -1)
    assert_close(q.mT @ q, identity, atol=1e-9, rtol=0)
    assert_close(q.mT @ matrices, rows, atol=1e-9, rtol=0)


def test_both_questions_find_their_leading_directions(sketch):
    matrices, found = sketch
    for image, seen in enumerate(examine(found, RANK)):
        for name, first in (("all", 0), ("patches", P * CHANNELS)):
            exact = torch.linalg.svdvals(matrices[image][:, first:])[:RANK].square()
            caught = seen[name].spectrum.energies[:RANK]
            assert (caught <= exact * (1 + 1e-9)).all()
            assert float(caught.sum()) > 0.98 * float(exact.sum())


def test_a_basis_that_holds_all_outputs_is_exact():
    matrices = torch.stack([slow_matrix(0), slow_matrix(1)])
    jacobian = linear_jacobian(matrices, TOKENS)
    budget = split_budget(RANK, 100, 2, M)
    found = randomised_sketch(jacobian, P, RANK, budget, seeds(2))
    assert jacobian.products.jvp == budget.search - START  # none for what is missed
    exact = exact_sketch(jacobian, P)
    for a, b in zip(examine(found, RANK), examine(exact, RANK), strict=True):
        for name in ("all", "patches"):
            assert_close(a[name].spectrum.energies, b[name].spectrum.energies)
            assert_close(a[name].importance, b[name].importance)
            assert_close(a[name].block_norm, b[name].block_norm)
            assert a[name].spectrum.statistics["rank_90"].standard_error == 0


def test_without_prefix_tokens_there_is_one_question():
    jacobian = linear_jacobian(slow_matrix()[None], TOKENS)
    found = randomised_sketch(jacobian, 0, RANK, split_budget(RANK, 26, 2, M), seeds(1))
    assert found.parts["all"] is found.parts["patches"]


def test_images_do_not_mix_and_draw_from_their_own_source():
    budget = split_budget(RANK, 26, 2, M)
    matrices = torch.stack([slow_matrix(i) for i in range(3)])
    together = randomised_sketch(
        linear_jacobian(matrices, TOKENS), P, RANK, budget, seeds(3)
    )
    alone = randomised_sketch(
        linear_jacobian(matrices[1:2], TOKENS), P, RANK, budget, seeds(1, first=1)
    )
    assert_close(together.rows[1:2], alone.rows, rtol=1e-7, atol=1e-9)
    missed = [s.parts["patches"].missed.energy for s in (together, alone)]
    assert_close(missed[0][1:2], missed[1])


def repeated(count):
    """Sketches of one matrix from ``count`` seeds, small so that much is missed."""
    matrix = slow_matrix()
    jacobian = linear_jacobian(matrix.expand(count, -1, -1), TOKENS)
    budget = split_budget(RANK, 14, 1, M)
    return matrix, randomised_sketch(jacobian, P, RANK, budget, seeds(count))


def test_block_norms_are_unbiased():
    count = 300
    matrix, found = repeated(count)
    norms = [block_norm(rows, found.weight) for rows in found.rows]
    squares = torch.stack(norms).square()
    exact = matrix.view(M, TOKENS, CHANNELS).square().sum((0, 2))
    error = squares.std(0) / count**0.5
    assert (error < 0.05 * exact).all()
    assert ((squares.mean(0) - exact).abs() < 4 * error).all()


@pytest.mark.parametrize("part", ["all", "patches"])
def test_missed_energy_is_unbiased_and_knows_its_error(part):
    count = 300
    matrix, found = repeated(count)
    first = 0 if part == "all" else P * CHANNELS
    rows = dense(found)[:, :, first:]
    exact = float(matrix[:, first:].square().sum()) - rows.square().sum((1, 2))
    missed = found.parts[part].missed
    gap = missed.energy - exact
    assert abs(float(gap.mean())) < 4 * float(gap.std()) / count**0.5
    stated = float(missed.standard_error.square().mean().sqrt())
    assert 0.85 < float(gap.std()) / stated < 1.15


@pytest.mark.parametrize("k", [3, 20])
def test_missed_energy_without_signs_is_unbiased_too(k):
    count, n = 400, 30
    half = torch.randn(n, n, generator=seeded(3), dtype=torch.float64)
    matrix = half @ half.T
    frames = torch.linalg.qr(
        torch.randn(count, n, k, generator=seeded(4), dtype=torch.float64)
    ).Q
    gram = frames.mT @ matrix @ frames
    missed = estimate_missed(gram, k, n, torch.zeros(count, 0))
    exact = float(matrix.trace()) - gram.diagonal(dim1=1, dim2=2).sum(1)
    gap = missed.energy - exact
    assert abs(float(gap.mean())) < 4 * float(gap.std()) / count**0.5
    stated = float(missed.standard_error.square().mean().sqrt())
    assert 0.85 < float(gap.std()) / stated < 1.15


def test_two_images_never_share_their_draws():
    _, found = repeated(2)
    missed = found.parts["all"].missed.energy
    assert float(missed[0]) != pytest.approx(float(missed[1]), rel=1e-6)


def test_fewer_columns_than_outputs_are_all_there_is():
    matrix = matrix_with(torch.arange(1, 41) ** -0.5, M).T  # 60 x 40
    jacobian = linear_jacobian(matrix[None], 10)
    found = randomised_sketch(jacobian, 1, RANK, split_budget(RANK, 14, 1, M), seeds(1))
    seen = examine(found, RANK)[0]
    assert len(seen["all"].spectrum.energies) == 40
    assert len(seen["patches"].spectrum.energies) == 36


# --- basis --------------------------------------------------------------------------------


def test_candidates_in_the_span_are_replaced_and_others_kept():
    basis = torch.linalg.qr(torch.randn(1, 12, 4, generator=seeded(0)).double()).Q.mT
    new = torch.randn(1, 1, 12, generator=seeded(1)).double()
    candidates = torch.cat([basis[:, :1] * 5, new, new * 2, torch.zeros(1, 1, 12)], 1)
    spare = torch.randn(1, 4, 12, generator=seeded(2)).double()
    found = orthonormalise(candidates, basis, spare)
    every = torch.cat([basis, found], 1)[0]
    assert_close(every @ every.T, torch.eye(8, dtype=torch.float64))
    outside = new - new @ basis.mT @ basis
    caught = (outside @ found.mT).norm() / outside.norm()
    assert float(caught) == pytest.approx(1)


def test_rounding_does_not_choose_directions():
    basis = torch.linalg.qr(torch.randn(1, 12, 4, generator=seeded(0)).double()).Q.mT
    spare = torch.randn(1, 3, 12, generator=seeded(2)).double()
    noise = [1e-10 * torch.randn(1, 3, 12, generator=seeded(s)).double() for s in (3, 4)]
    found = [orthonormalise(basis[:, :3] + n, basis, spare) for n in noise]
    assert_close(found[0], found[1])


def test_a_basis_in_float32_stays_orthonormal():
    matrix = matrix_with(torch.logspace(0, -5, M), TOKENS * CHANNELS)
    basis = Basis(linear_jacobian(matrix[None], TOKENS, torch.float32), [0], 30, seeds(1))
    basis.add(basis.draw(START))
    for _ in range(6):
        basis.add(basis.multiply(basis.ritz(0)[1][:, :, :START], 0))
    q = basis.directions[0]
    assert_close(q @ q.T, torch.eye(basis.size), atol=2e-6, rtol=0)
    assert_close(basis.rows.flatten(2)[0], q @ matrix.float(), atol=2e-6, rtol=0)
