"""Oracle: the factor times the materialised float64 Jacobian."""

import pytest
import torch
from torch.testing import assert_close

from foveate.diagnosis.findings import examine
from foveate.diagnosis.jacobian import TokenJacobian
from foveate.diagnosis.output_metric import OutputMetric
from foveate.diagnosis.sketch import exact_sketch
from tests.reference_jacobian import Bend, materialise, singular

B, T, C, M = 2, 3, 4, 5


def normal(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


FACTORS = {
    "matrix": (normal(7, M, seed=2), lambda f: f.expand(B, -1, -1)),
    "matrix of each image": (normal(B, 3, M, seed=3), lambda f: f),
    "diagonal": (normal(M, seed=4), lambda f: torch.diag(f).expand(B, -1, -1)),
}


@pytest.fixture(params=FACTORS)
def case(request):
    """A Jacobian seen through a factor, and the dense product."""
    factor, dense = FACTORS[request.param]
    tail, tokens = Bend(T, C, M), normal(B, T, C)
    seen = OutputMetric(TokenJacobian(tail, tokens), factor)
    return seen, torch.einsum("bnm,bmtc->bntc", dense(factor), materialise(tail, tokens))


def test_products_are_those_of_the_dense_matrix(case):
    seen, dense = case
    v, u = normal(6, B, T, C, seed=5), normal(6, B, seen.num_outputs, seed=6)
    assert_close(seen.jvp(v), torch.einsum("bmtc,rbtc->rbm", dense, v))
    assert_close(seen.vjp(u), torch.einsum("bmtc,rbm->rbtc", dense, u))
    assert (seen.products.jvp, seen.products.vjp) == (6, 6)


def test_shape_of_the_output_is_that_of_the_factor(case):
    seen, dense = case
    assert seen.output.shape == (B, seen.num_outputs) == dense.shape[:2]


def test_a_diagnosis_through_a_metric_is_that_of_the_dense_matrix(case):
    seen, dense = case
    for image, found in enumerate(examine(exact_sketch(seen, 1), rank=2)):
        values, _ = singular(dense[image])
        energies = found["all"].spectrum.energies[: len(values)]
        assert_close(energies.sqrt(), values, rtol=1e-6, atol=1e-7)


def test_the_length_of_an_output_change_is_that_of_the_metric():
    h = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
    jacobian = TokenJacobian(lambda x: x.flatten(1), torch.zeros(1, 2, 1).double())
    delta = torch.tensor([1.0, -2.0], dtype=torch.float64)
    seen = OutputMetric(jacobian, torch.linalg.cholesky(h).T)
    moved = seen.jvp(delta.view(1, 1, 2, 1))[0, 0]
    assert_close(moved @ moved, delta @ h @ delta)


@pytest.mark.parametrize("shape", [(M + 1,), (M, M + 1), (B + 1, M, M), (1, 1, 1, M), ()])
def test_rejects_a_factor_that_does_not_fit(shape):
    jacobian = TokenJacobian(Bend(T, C, M), normal(B, T, C))
    with pytest.raises(ValueError, match=r"factor must have shape \(5,\), \(M', 5\)"):
        OutputMetric(jacobian, torch.zeros(shape))
