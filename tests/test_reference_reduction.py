"""Oracle: cases small enough to work out by hand, and invariants.

The references are what other tests compare with, so they are tested against nothing that
the package computes.
"""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from tests import reference_reduction as ref

P = 2


def example(seed=0, num_patches=9):
    """Two prefix tokens, nine patches of unequal sizes, C = 5, three heads of d = 4."""
    draw = np.random.default_rng(seed)
    n = P + num_patches
    x, size = draw.normal(size=(n, 5)), draw.integers(1, 5, num_patches).astype(float)
    query, key, value = (draw.normal(size=(3, n, 4)) for _ in range(3))
    return {"x": x, "size": size, "query": query, "key": key, "value": value}


def tiny_key(directions):
    """One head, one prefix token, and a two-dimensional key a patch at these degrees."""
    angles = np.radians([0.0, *directions])
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)[None]


def tiny_x(num_patches):
    """One prefix token 100 and patches 1, 2, ..., with one channel."""
    return np.array([[100.0], *([float(i + 1)] for i in range(num_patches))])


def attention_by_keys(weights):
    """Query 1 and key log(weight), d = 1: attention is proportional to the weights."""
    key = np.log(np.array(weights, dtype=float))[None, :, None]
    return np.ones_like(key), key


def merges(data, keep):
    """Every size-weighted merge of the example."""
    x, key, size = data["x"], data["key"], data["size"]
    scores = np.arange(len(size)) % 4
    return {
        "tome": ref.tome(x, key, size, keep, P),
        "pitome": ref.pitome(x, key, size, keep, 0.3),
        "many_to_one": ref.many_to_one(x, key, scores, size, keep, P),
    }


def test_tome_by_hand():
    # A = patches 0, 2, 4 and B = 1, 3; the best edges are 4-3 (5 degrees), 2-1 (10).
    key, size = tiny_key([60, 20, 30, 90, 95]), [1, 3, 1, 2, 6]
    reduced = ref.tome(tiny_x(5), key, size, 3, 1)
    assert_allclose(reduced.x[:, 0], [100, 1, (3 * 2 + 3) / 4, (2 * 4 + 6 * 5) / 8])
    assert_array_equal(reduced.size, [1, 4, 8])
    assert_array_equal(reduced.group, [0, 1, 1, 2, 2])


def test_tome_ties_go_to_the_lowest_index_and_may_share_a_destination():
    reduced = ref.tome(tiny_x(5), tiny_key([40] * 5), np.ones(5), 3, 1)
    assert_allclose(reduced.x[:, 0], [100, 2, 4, 5])
    assert_array_equal(reduced.group, [0, 0, 0, 1, 2])


def test_tofu_keeps_the_largest_norm_and_the_direction_of_the_mean():
    x = [[7.0, 7.0], [3.0, 0.0], [0.0, 4.0], [1.0, 1.0]]
    reduced = ref.tofu(x, tiny_key([0, 0, 90]), [1, 1, 1], 2, 1)
    assert_allclose(reduced.x, [[7, 7], [4 * 3 / 5, 4 * 4 / 5], [1, 1]])
    assert_array_equal(reduced.size, [2, 1])


def test_pitome_energy_in_closed_form():
    energy = ref.pitome_energy(tiny_key([0, 0, 90]), 1, margin=0.4)
    away = np.exp(-0.4) - 1
    assert_allclose(energy, [(1.2 + away) / 3, (1.2 + away) / 3, (0.6 + 2 * away) / 3])


def test_pitome_by_hand():
    # Energies fall 25, 10, 0, 90, 200 degrees: A = patches 4 and 0, B = patches 2 and 1.
    key, size = tiny_key([0, 90, 10, 200, 25]), [1, 1, 3, 1, 1]
    energy = ref.pitome_energy(key, 1, 0.0)
    assert_array_equal(np.argsort(-energy), [4, 2, 0, 1, 3])
    reduced = ref.pitome(tiny_x(5), key, size, 3, 0.0)
    assert_allclose(reduced.x[:, 0], [100, 2, (1 + 3 * 3 + 5) / 5, 4])
    assert_array_equal(reduced.group, [1, 0, 1, 2, 1])


def test_prune_and_many_to_one_by_hand():
    key, size, scores = tiny_key([0, 10, 80, 90]), [1, 2, 1, 5], [3, 1, 7, 1]
    pruned = ref.prune(tiny_x(4), key, scores, size, 2)
    assert_allclose(pruned.x[:, 0], [100, 1, 3])
    assert_array_equal(pruned.size, [1, 1])
    assert_array_equal(pruned.group, [0, 0, 1, 1])
    merged = ref.many_to_one(tiny_x(4), key, scores, size, 2, 1)
    assert_allclose(merged.x[:, 0], [100, (1 + 2 * 2) / 3, (3 + 5 * 4) / 6])
    assert_array_equal(merged.size, [3, 6])
    assert_array_equal(merged.group, pruned.group)


def test_equal_scores_keep_the_lowest_index():
    pruned = ref.prune(tiny_x(4), tiny_key([0, 90, 60, 10]), [1, 2, 2, 1], np.ones(4), 3)
    assert_array_equal(pruned.x[:, 0], [100, 1, 2, 3])
    assert_array_equal(pruned.group, [0, 1, 2, 0])


def test_evit_by_hand():
    query, key = attention_by_keys([2, 1, 4, 3])
    kept = ref.evit(tiny_x(3), query, key, [1, 1, 1], 2, fuse=False)
    assert_allclose(kept.x[:, 0], [100, 2, 3])
    fused = ref.evit(tiny_x(3), query, key, [1, 2, 4], 2, fuse=True)
    assert_allclose(fused.x[:, 0], [100, 2, 0.1 * 1 + 0.3 * 3])
    assert_array_equal(fused.size, [2, 5])
    assert_array_equal(fused.group, [1, 0, 1])


def test_diffrate_by_hand():
    # Kept 0 and 2; patch 3 merges by FEATURE into 2, plainly; 1 is pruned, near 0 by key.
    x = np.array([[9, 9], [1, 0], [5, 6], [0, 1], [1, 3]], dtype=float)
    scores, key, size = [8, 1, 9, 2], tiny_key([0, 10, 60, 5]), [1, 1, 2, 4]
    reduced = ref.diffrate_by_scores(x, key, scores, size, 3, 2)
    assert_allclose(reduced.x, [[9, 9], [1, 0], [0.5, 2]])
    assert_array_equal(reduced.size, [1, 6])
    assert_array_equal(reduced.group, [0, 0, 1, 1])


def test_diffrate_ranks_by_class_attention():
    data = example()
    x, query, key, size = (data[name] for name in ("x", "query", "key", "size"))
    scores = ref.class_attention(query, key, P)
    one = ref.diffrate(x, query, key, size, 7, 4)
    other = ref.diffrate_by_scores(x, key, scores, size, 7, 4)
    assert_array_equal(one.x, other.x)
    kept = sorted(np.argsort(-scores)[:7])
    assert one.size.sum() == size[kept].sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["tome", "pitome", "many_to_one"])
def test_merges_conserve_mass_and_leave_the_prefix(method, seed):
    data = example(seed)
    reduced = merges(data, 6)[method]
    assert len(reduced.size) == 6
    assert_array_equal(reduced.x[:P], data["x"][:P])
    for g in range(6):
        members = reduced.group == g
        size, patches = data["size"][members], data["x"][P:][members]
        assert_allclose(reduced.size[g], size.sum())
        assert_allclose(reduced.size[g] * reduced.x[P + g], size @ patches)


@pytest.mark.parametrize("method", ["tome", "pitome", "many_to_one"])
def test_keeping_all_changes_no_bit(method):
    data = example()
    reduced = merges(data, 9)[method]
    assert_array_equal(reduced.x, data["x"])
    assert_array_equal(reduced.group, np.arange(9))


def test_tensors_give_what_arrays_give():
    data = example()
    x, key, size = (torch.from_numpy(data[name]) for name in ("x", "key", "size"))
    assert_array_equal(ref.tome(x, key, size, 5, P).x, merges(data, 5)["tome"].x)


def test_counts_that_do_not_fit_are_refused():
    data = example()
    x, key, size = data["x"], data["key"], data["size"]
    with pytest.raises(ValueError, match=r"merges must be between 0 and 4; got 5\."):
        ref.tome(x, key, size, 4, P)
    with pytest.raises(ValueError, match=r"merges must be between 0 and 4; got 5\."):
        ref.pitome(x, key, size, 4, 0.0)
    with pytest.raises(ValueError, match=r"keep must be between 1 and 9; got 0\."):
        ref.many_to_one(x, key, np.ones(9), size, 0, P)
    with pytest.raises(ValueError, match=r"x must have 10 tokens; got 11\."):
        ref.tome(x, key, size, 8, 1)


def test_full_offset_undoes_a_merge():
    data = example()
    reduced = merges(data, 5)["tome"]
    step = ref.Step(reduced.group, data["x"][P:], reduced.x[P:])
    assert_allclose(ref.recover(reduced.x, [step], P, 1.0), data["x"][P:])
