"""Oracle: a linear decoder, whose output change is computed outright; hand-made cases."""

import itertools

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from tests import reference_reduction as ref
from tests.reference_agglomeration import cheapest_disjoint_pairs


def linear_state(seed=0):
    """Six patches with a linear decoder y = sum_t W_t f_t of four outputs."""
    draw = np.random.default_rng(seed)
    size = draw.integers(1, 4, 6).astype(float)
    return draw.normal(size=(6, 3)), size, draw.normal(size=(6, 4, 3))


def test_pair_cost_is_the_mean_squared_output_change_of_a_linear_decoder():
    feature, size, weight = linear_state()
    costs = ref.pair_costs(feature, size, weight)
    assert_allclose(costs, costs.T)
    for a, b in itertools.combinations(range(6), 2):
        merged = feature.copy()
        merged[[a, b]] = np.average(feature[[a, b]], axis=0, weights=size[[a, b]])
        change = np.einsum("tmc,tc->m", weight, merged - feature)
        assert_allclose(costs[a, b], np.mean(change**2))


def test_patches_that_share_a_jacobian_merge_for_nothing():
    feature, size, weight = linear_state()
    sketch = size[:, None, None] * weight[0]  # a patch of size s holds s copies' blocks
    assert_allclose(ref.pair_costs(feature, size, sketch), 0, atol=1e-24)


def test_agglomeration_adds_jacobians_up():
    feature, size, weight = linear_state()
    found = ref.greedy_agglomeration(feature, size, weight, 2, 2)
    spread = np.einsum("tmc,tc->m", weight, found.feature[found.group])
    assert_allclose(np.einsum("gmc,gc->m", found.sketch, found.feature), spread)
    assert_allclose(found.size, [size[found.group == g].sum() for g in range(2)])
    for g in range(2):
        mean = np.average(feature[found.group == g], 0, size[found.group == g])
        assert_allclose(found.feature[g], mean)
    assert found.group[0] == 0  # groups are in the order of their smallest member


def test_one_merge_takes_the_cheapest_pair():
    feature, size, weight = linear_state()
    costs = ref.pair_costs(feature, size, weight)
    best = min(itertools.combinations(range(6), 2), key=lambda pair: costs[pair])
    group = ref.greedy_agglomeration(feature, size, weight, 5, 4).group
    assert group[best[0]] == group[best[1]]
    assert sorted(np.bincount(group)) == [1, 1, 1, 1, 2]


def test_pairs_of_a_round_are_disjoint():
    costs = np.full((5, 5), 9.0)
    costs[0, 1], costs[1, 2], costs[2, 3], costs[3, 4] = 1, 0, 2, 3
    assert cheapest_disjoint_pairs(costs, 3) == [(1, 2), (3, 4)]
    assert cheapest_disjoint_pairs(costs, 1) == [(1, 2)]


def test_a_round_updates_costs_before_the_next():
    feature = np.array([[0.0], [2.0], [4.1], [20.0]])
    sketch = np.array([[[1.0]], [[-1.0]], [[-1.0]], [[-1.0]]])
    # 1 and 2 share a Jacobian, so they go first at no cost; with 3 it is the same again.
    group = ref.greedy_agglomeration(feature, np.ones(4), sketch, 2, 1).group
    assert_array_equal(group, [0, 1, 1, 1])


def test_cosine_agglomeration_by_hand():
    angles = np.radians([0, 50, 4, 55])
    feature = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    found = ref.cosine_agglomeration(feature, [1, 1, 3, 1], 2, 1)
    assert_array_equal(found.group, [0, 1, 0, 1])
    assert_allclose(found.feature[0], (feature[0] + 3 * feature[2]) / 4)
    assert found.sketch is None


def test_recovery_follows_the_chain():
    first = ref.Step([0, 1, 1], [[1.0], [2.0], [4.0]], [[1.0], [3.0]])
    second = ref.Step([0, 0], [[10.0], [30.0]], [[15.0]])
    x = [[7.0], [50.0]]
    assert_allclose(ref.recover(x, [first, second], 1, 0.0), [[50]] * 3)
    offsets = np.array([[0 - 5], [-1 + 15], [1 + 15]])
    assert_allclose(ref.recover(x, [first, second], 1, 0.5), 50 + 0.5 * offsets)
