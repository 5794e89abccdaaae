"""Slow and obvious agglomeration of ONE image's patches, float64. Only tests import this.

State of a patch: feature (C,), size, and sketch (R, C), the rows of R output probes pulled
back to it. A merge takes the size-weighted mean of the features and the SUM of sizes and of
sketches, since under proportional attention a merged token acts as its copies.
"""

from typing import NamedTuple

import numpy as np

from tests.reference_scoring import array, check_index_range, cosine


class Agglomerated(NamedTuple):
    """Patches after agglomeration, in ascending order of their lead.

    The lead of a group is its smallest original index.

    Attributes:
        feature: (keep, C).
        size: (keep,).
        sketch: (keep, R, C); None if there was none.
        group: (K,), index below ``keep`` of the patch that each original one is in.
    """

    feature: np.ndarray
    size: np.ndarray
    sketch: np.ndarray | None
    group: np.ndarray


def pair_costs(feature, size, sketch):
    """First-order cost of merging each pair: (K, K), symmetric, zero on the diagonal.

    With m = (s_a f_a + s_b f_b) / (s_a + s_b),
    e_ab = (1/R) sum_k [G_ak . (m - f_a) + G_bk . (m - f_b)]^2.
    """
    feature, size, sketch = array(feature), array(size), array(sketch)
    costs = np.zeros((len(size), len(size)))
    for a in range(len(size)):
        for b in range(len(size)):
            costs[a, b] = _pair_cost(feature, size, sketch, a, b)
    return costs


def greedy_agglomeration(feature, size, sketch, keep, merges_per_round):
    """Merge the cheapest disjoint pairs by first-order cost, round by round."""

    def costs(state):
        return pair_costs(state.feature, state.size, state.sketch)

    return _agglomerate(feature, size, sketch, keep, (merges_per_round, costs))


def cosine_agglomeration(feature, size, keep, merges_per_round):
    """The task-free control: the same loop with cost 1 - cosine of the features."""

    def costs(state):
        return [[1 - cosine(f, g) for g in state.feature] for f in state.feature]

    return _agglomerate(feature, size, None, keep, (merges_per_round, costs))


def cheapest_disjoint_pairs(costs, num_pairs):
    """At most ``num_pairs`` pairs a < b, cheapest first, no index used twice.

    Equal costs: lowest a, then lowest b. Fewer pairs come back when indices run out.
    """
    k = len(costs)
    pairs = sorted((costs[a][b], a, b) for a in range(k) for b in range(a + 1, k))
    chosen, used = [], set()
    for _, a, b in pairs:
        if len(chosen) < num_pairs and a not in used and b not in used:
            chosen.append((a, b))
            used |= {a, b}
    return chosen


def _pair_cost(feature, size, sketch, a, b):
    mean = (size[a] * feature[a] + size[b] * feature[b]) / (size[a] + size[b])
    total = 0.0
    for k in range(sketch.shape[1]):
        change_a = float(sketch[a, k] @ (mean - feature[a]))
        change_b = float(sketch[b, k] @ (mean - feature[b]))
        total += (change_a + change_b) ** 2
    return total / sketch.shape[1] if a != b else 0.0


def _agglomerate(feature, size, sketch, keep, rule):
    merges_per_round, costs = rule
    check_index_range("keep", keep, 1, len(size))
    check_index_range("merges_per_round", merges_per_round, 1, np.inf)
    sketch = None if sketch is None else array(sketch)
    state = Agglomerated(array(feature), array(size), sketch, np.arange(len(size)))
    while len(state.size) > keep:
        num_pairs = min(merges_per_round, len(state.size) - keep)
        state = _merge_pairs(state, cheapest_disjoint_pairs(costs(state), num_pairs))
    return state


def _merge_pairs(state, pairs):
    """Merge b into a of every pair a < b; a keeps its place, so leads stay in order."""
    feature, size = state.feature.copy(), state.size.copy()
    sketch = None if state.sketch is None else state.sketch.copy()
    place = list(range(len(size)))
    for a, b in pairs:
        feature[a] = (size[a] * feature[a] + size[b] * feature[b]) / (size[a] + size[b])
        size[a] = size[a] + size[b]
        if sketch is not None:
            sketch[a] = sketch[a] + sketch[b]
        place[b] = a
    left = [i for i in range(len(size)) if place[i] == i]
    return Agglomerated(
        feature=feature[left],
        size=size[left],
        sketch=None if sketch is None else sketch[left],
        group=np.array([left.index(place[g]) for g in state.group]),
    )
