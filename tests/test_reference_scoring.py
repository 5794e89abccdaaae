"""Oracle: cases worked out by hand, and torch's scaled dot-product attention."""

import numpy as np
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.nn.functional import scaled_dot_product_attention

from tests import reference_reduction as ref
from tests.test_reference_reduction import P, attention_by_keys, example, tiny_key


def test_class_attention_is_the_share_of_the_key_weight():
    query, key = attention_by_keys([2, 3, 4, 1])
    assert_allclose(ref.class_attention(query, key, 2), [0.4, 0.1])
    sized = ref.class_attention(query, key, 2, size=[2, 7])  # 2 + 3 + 2 x 4 + 7 x 1 = 20
    assert_allclose(sized, [0.4, 0.35])


def test_class_attention_is_the_mean_over_heads_of_sdpa():
    data = example()
    query, key = (torch.from_numpy(data[name]) for name in ("query", "key"))
    identity = torch.eye(key.shape[1], dtype=torch.float64).expand(3, -1, -1)
    rows = scaled_dot_product_attention(query, key, identity).mean(dim=0)
    assert_allclose(ref.class_attention(query, key, P), rows[0, P:])
    assert_allclose(ref.received_attention(query, key, P), rows[P:, P:].mean(dim=0))


def test_received_attention_leaves_prefix_queries_out():
    query, key = attention_by_keys([5, 3, 2])
    query[0, 0] = 1e3
    assert_allclose(ref.received_attention(query, key, 1), [0.3, 0.2])


def test_norm_and_redundancy_and_cropr_by_hand():
    assert_allclose(ref.feature_norm([[9.0, 9.0], [3.0, 4.0], [0.0, 2.0]], 1), [5, 2])
    redundancy = ref.key_redundancy(tiny_key([0, 90, 120]), 1)
    assert_allclose(redundancy, [1, 1 - np.sqrt(0.75), 1 - np.sqrt(0.75)])
    key = [[[9.0], [1.0], [2.0]], [[9.0], [3.0], [-1.0]]]
    scores = ref.cropr_scores([[[1.0], [2.0]], [[10.0], [0.0]]], key, 1)
    assert_allclose(scores, [1 + 6 + 10, 2 - 2 + 20])


def test_redundancy_averages_heads_before_it_normalises():
    key = np.array([[[0, 0], [4, 0], [1, 0]], [[0, 0], [-3, 0], [0, 1]]], dtype=float)
    assert_allclose(ref.key_redundancy(key, 1), [1 - np.sqrt(0.5)] * 2)


def test_farthest_point_by_hand():
    assert_array_equal(ref.farthest_point((1, 5)), [-1, -3, 0, -4, -2])
    assert_array_equal(ref.farthest_point((2, 3)), [-3, 0, -4, -1, -5, -2])


def test_a_token_of_size_s_attends_as_s_copies():
    data = example(num_patches=3)
    sizes = [1, 3, 2]
    copies = [0, 1, *np.repeat([2, 3, 4], sizes)]
    spread = {name: data[name][:, copies] for name in ("query", "key", "value")}
    full = ref.proportional_attention(**spread, size=np.ones(6), num_prefix=P)
    query, key, value = data["query"], data["key"], data["value"]
    merged = ref.proportional_attention(query, key, value, sizes, P)
    assert_allclose(merged[:, copies], full)
