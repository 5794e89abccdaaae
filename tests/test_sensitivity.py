"""Oracle: closed forms, and the definitions on materialised float64 Jacobians."""

import pytest
import torch
from torch.testing import assert_close

from foveate.diagnosis.findings import examine
from foveate.diagnosis.jacobian import TokenJacobian
from foveate.diagnosis.sensitivity import block_norm, concentration, importance
from foveate.diagnosis.sketch import exact_sketch
from tests.reference_jacobian import Bend, cv_of, importance_of, materialise

B, T, C, M, P = 2, 5, 3, 7, 2


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, T, C, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_both_scores_and_cv_are_their_definitions(tokens, rank):
    tail = Bend(T, C, M)
    found = examine(exact_sketch(TokenJacobian(tail, tokens), P), rank)
    for image, dense in enumerate(materialise(tail, tokens)):
        for name, first in (("all", 0), ("patches", P)):
            seen, part = found[image][name], dense[:, first:]
            assert_close(seen.importance, importance_of(part, rank))
            assert_close(seen.block_norm, part.square().sum((0, 2)).sqrt())
            assert seen.cv == pytest.approx(cv_of(part, rank))


def test_at_full_rank_importance_is_the_block_norm(tokens):
    found = examine(exact_sketch(TokenJacobian(Bend(T, C, M), tokens), P), M)
    assert_close(found[0]["all"].importance, found[0]["all"].block_norm)


def test_directions_shared_equally_have_no_spread():
    assert concentration(torch.ones(3, 6, 2)) == pytest.approx(0, abs=1e-12)


def test_one_token_with_everything_has_the_largest_spread():
    leading = torch.zeros(2, 10, 3)
    leading[:, 4] = torch.tensor([[1.0, 0, 0], [0, 0.1, 0]])
    assert concentration(leading) == pytest.approx(3.0)  # sqrt(10 - 1)


def test_the_spread_counts_directions_alike_and_skips_those_without_energy():
    leading = torch.zeros(3, 2, 1)
    leading[0, 0], leading[1, 1] = 100.0, 0.01  # strong and weak, one token each
    assert concentration(leading) == pytest.approx(0, abs=1e-6)


def test_importance_weighs_directions_by_their_energy():
    leading = torch.zeros(2, 2, 2)
    leading[0, 0], leading[1, 0] = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert_close(importance(leading), torch.tensor([5.0, 0.0], dtype=torch.float64))


def test_a_random_row_counts_for_all_it_stands_for():
    rows = torch.tensor([[[3.0], [0.0]], [[2.0], [1.0]]])  # two rows, two tokens
    norms = block_norm(rows, torch.tensor([1.0, 4.0]))
    assert_close(norms, torch.tensor([5.0, 2.0], dtype=torch.float64))
