"""Oracle: ``reference_agglomeration``; the rule of the rounds in plain loops."""

import copy

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from foveate.reduction.agglomerate import (
    Agglomerate,
    agglomerate,
    first_leads,
    random_halves,
    round_counts,
)
from foveate.reduction.costs import Clusters, PullbackCost, cancel, cosine_cost
from foveate.reduction.regroup import regroup
from tests import handmade
from tests import reference_reduction as ref

FIRST_ORDER = PullbackCost(torch.zeros(2, 1, 1), 0.0)


def problem(num_patches=14, rows=3, channels=5, seed=0):
    """Clusters of two images: float64, unequal sizes, neighbours alike as in an image."""
    draw = torch.Generator().manual_seed(seed)
    shape = (2, num_patches, channels)
    feature = torch.randn(shape, generator=draw, dtype=torch.float64).cumsum(1)
    sketch = torch.randn(2, num_patches, rows, channels, generator=draw).double()
    size = torch.randint(1, 4, (2, num_patches), generator=draw).double()
    return Clusters(feature, size, sketch.cumsum(1))


def told(clusters, b):
    """One image for the references, which know the sketch of all copies of a patch."""
    sketch = clusters.sketch[b] * clusters.size[b][:, None, None]
    return clusters.feature[b].numpy(), clusters.size[b].numpy(), sketch.numpy()


def total_cost(clusters, b, group):
    """Sum over groups of the mean squared first-order effect of merging their members."""
    feature, size, sketch = told(clusters, b)
    total = 0.0
    for g in set(group):
        members = [i for i in range(len(group)) if group[i] == g]
        mean = sum(size[i] * feature[i] for i in members) / sum(size[i] for i in members)
        effect = sum(sketch[i] @ (mean - feature[i]) for i in members)
        total += float((effect**2).mean())
    return total


def test_first_order_cost_equals_the_reference():
    clusters = problem()
    found = FIRST_ORDER(clusters, clusters)
    for b in range(2):
        assert_close(found[b], torch.from_numpy(ref.pair_costs(*told(clusters, b))))


def test_first_order_cost_is_the_change_of_a_linear_model(generator):
    """Outputs are u . (sum over patches of size x block x feature)."""
    clusters = problem(num_patches=6)
    searching, waiting = torch.tensor([4, 1]), torch.tensor([0, 5, 2])
    costs = FIRST_ORDER(clusters.select(searching), clusters.select(waiting))
    for b in range(2):
        feature, _, sketch = told(clusters, b)
        before = np.einsum("krc,kc->r", sketch, feature)
        for i, a in enumerate(searching.tolist()):
            for j, t in enumerate(waiting.tolist()):
                group = torch.tensor([k if k != t else a for k in range(6)])
                joined = clusters.join(group.expand(2, -1), 6).feature[b].numpy()
                merged = feature.copy()
                merged[[a, t]] = joined[a]
                change = np.einsum("krc,kc->r", sketch, merged) - before
                assert costs[b, i, j].item() == pytest.approx((change**2).mean())


def test_damping_adds_the_fourth_power_of_the_move():
    clusters, stiffness = problem(), torch.tensor([0.5, 2.0]).view(2, 1, 1)
    found = PullbackCost(stiffness, 0.3)(clusters, clusters)
    found = found - FIRST_ORDER(clusters, clusters)
    for b, a, t in [(0, 3, 9), (1, 0, 13), (1, 5, 6)]:
        s, f = clusters.size[b], clusters.feature[b]
        truth = s[a] * s[t] / (s[a] + s[t]) * (f[a] - f[t]).norm() ** 4
        assert_close(found[b, a, t], 0.3 * stiffness[b, 0, 0].double() * truth)


def test_stiffness_is_the_energy_of_the_rows_over_the_spread_of_the_patches():
    clusters = problem()
    found = PullbackCost.of(clusters, 0.3)
    assert found.damping == 0.3
    for b in range(2):
        feature, rows = clusters.feature[b].numpy(), clusters.sketch[b].numpy()
        spread = np.mean([np.sum((f - feature.mean(0)) ** 2) for f in feature])
        assert found.stiffness[b, 0, 0].item() == pytest.approx(np.mean(rows**2) / spread)


def test_patches_that_are_all_alike_cost_nothing():
    alike = Clusters(torch.ones(2, 6, 5), torch.ones(2, 6), problem(6).sketch.float())
    costs = PullbackCost.of(alike, 0.3)(alike, alike)
    assert_close(costs, torch.zeros(2, 6, 6), rtol=0, atol=1e-6)


def test_cosine_cost_equals_the_reference():
    clusters = problem()
    found = cosine_cost(clusters, clusters)
    for b, a, t in [(0, 3, 9), (1, 0, 13), (1, 5, 5)]:
        feature = clusters.feature[b].tolist()
        truth = 1 - ref.cosine(feature[a], feature[t])
        assert found[b, a, t].item() == pytest.approx(truth, abs=1e-12)


def test_joined_clusters_keep_their_totals():
    clusters = problem()
    group = torch.arange(14).expand(2, -1) % 4
    joined = clusters.join(group, 4)
    assert_close(joined.size.sum(1), clusters.size.sum(1))
    for name in ("feature", "sketch"):
        before, after = (
            (getattr(c, name).flatten(2) * c.size[..., None]).sum(1)
            for c in (clusters, joined)
        )
        assert_close(after, before)


def test_cancelling_solves_for_the_first_order_effect():
    clusters, ridge = problem(rows=2), 0.25
    group = torch.arange(14).expand(2, -1) // 3  # the last group has two members
    grouping = first_leads(group, 5)
    shift = cancel(clusters, grouping, ridge)
    for b in range(2):
        feature, size, sketch = told(clusters, b)
        for g in range(5):
            members = [i for i in range(14) if i // 3 == g]
            mean = sum(size[i] * feature[i] for i in members) / size[members].sum()
            effect = sum(sketch[i] @ (mean - feature[i]) for i in members)
            summed = sketch[members].sum(0)  # (R, C)
            gram = summed @ summed.T
            gram = gram + ridge * np.trace(gram) / 2 * np.eye(2)
            truth = -summed.T @ np.linalg.solve(gram, effect)
            assert_close(shift[b, g], torch.from_numpy(truth))


@pytest.mark.parametrize(
    ("num_patches", "keep", "rounds", "counts"),
    [
        (16, 8, 4, [14, 12, 10, 8]),
        (35, 9, 1, [18, 9]),  # half of the patches is not enough
        (35, 1, 2, [18, 9, 5, 3, 2, 1]),
        (10, 8, 5, [9, 8]),  # fewer removals than rounds
        (7, 7, 3, []),
        (2, 1, 8, [1]),
    ],
)
def test_round_counts_by_hand(num_patches, keep, rounds, counts):
    assert round_counts(num_patches, keep, rounds) == counts


@pytest.mark.parametrize("rounds", [1, 3, 8, 100])
def test_round_counts_end_exactly_and_never_ask_for_more_than_half(rounds):
    for num_patches in range(1, 40):
        for keep in range(1, num_patches + 1):
            counts = round_counts(num_patches, keep, rounds)
            steps = list(zip([num_patches, *counts], counts, strict=False))
            assert all(1 <= before - after <= before // 2 for before, after in steps)
            assert [num_patches, *counts][-1] == keep


@pytest.mark.parametrize(("keep", "rounds"), [(0, 2), (10, 2), (4, 0)])
def test_impossible_rounds_are_refused(keep, rounds):
    wrong = "rounds must be at least 1; got 0" if rounds == 0 else f"patches; got {keep}"
    with pytest.raises(ValueError, match=wrong):
        round_counts(9, keep, rounds)


def test_halves_are_shuffles_of_what_is_left():
    halves = random_halves(9, [7, 4], seed=3)
    assert [sorted(h.tolist()) for h in halves] == [list(range(9)), list(range(7))]
    again, other = random_halves(9, [7, 4], seed=3), random_halves(9, [7, 4], seed=4)
    assert all(torch.equal(a, b) for a, b in zip(halves, again, strict=True))
    assert not torch.equal(halves[0], other[0])


def naive_round(state, order, keep):
    """One round for one image; ``state`` lists (feature, size, sketch of all, members)."""
    half = len(order) // 2
    searching, waiting, best = order[:half], order[half:], {}
    for a in searching:
        best[a] = min(
            (naive_cost(state[a], state[t]), place) for place, t in enumerate(waiting)
        )
    ranked = sorted(searching, key=lambda a: (best[a][0], searching.index(a)))
    into = {a: waiting[best[a][1]] for a in ranked[: len(order) - keep]}
    joined = []
    for t in range(len(state)):
        if t not in into:
            group = [state[t], *(state[a] for a in searching if into.get(a) == t)]
            size = sum(m[1] for m in group)
            feature = sum(m[1] * m[0] for m in group) / size
            members = [i for m in group for i in m[3]]
            joined.append((feature, size, sum(m[2] for m in group), members))
    return joined


def naive_cost(a, t):
    mean = (a[1] * a[0] + t[1] * t[0]) / (a[1] + t[1])
    return float(((a[2] @ (mean - a[0]) + t[2] @ (mean - t[0])) ** 2).mean())


@pytest.mark.parametrize(("keep", "rounds"), [(10, 1), (7, 3), (3, 4), (1, 2)])
def test_rounds_equal_the_same_rule_in_plain_loops(keep, rounds):
    clusters = problem(num_patches=15)
    counts = round_counts(15, keep, rounds)
    halves = random_halves(15, counts, seed=2)
    found = agglomerate(clusters, counts, halves, FIRST_ORDER)
    for b in range(2):
        feature, size, sketch = told(clusters, b)
        state = [(feature[i], size[i], sketch[i], [i]) for i in range(15)]
        for order, left in zip(halves, counts, strict=True):
            state = naive_round(state, order.tolist(), left)
        truth = sorted(sorted(members) for _, _, _, members in state)
        groups = [[i for i in range(15) if found.group[b, i] == g] for g in range(keep)]
        assert groups == truth
        assert found.lead[b].tolist() == [members[0] for members in truth]


def test_many_rounds_are_close_to_the_greedy_choice_among_all_pairs():
    spent, greedy, arbitrary = 0.0, 0.0, 0.0
    for seed in range(6):
        clusters = problem(num_patches=24, seed=seed)
        counts = round_counts(24, 12, 8)
        found = agglomerate(clusters, counts, random_halves(24, counts, seed), FIRST_ORDER)
        for b in range(2):
            best = ref.greedy_agglomeration(*told(clusters, b), 12, 1)
            spent += total_cost(clusters, b, found.group[b].tolist())
            greedy += total_cost(clusters, b, best.group.tolist())
            arbitrary += total_cost(clusters, b, [i % 12 for i in range(24)])
    assert greedy < spent < 3 * greedy
    assert spent < arbitrary / 100


def test_the_first_patch_of_a_group_leads_it():
    group = torch.tensor([[2, 0, 2, 1, 0, 3], [3, 3, 3, 0, 1, 2]])
    grouping = first_leads(group, 4)
    assert grouping.lead.tolist() == [[0, 1, 3, 5], [0, 3, 4, 5]]
    assert grouping.group.tolist() == [[0, 1, 0, 2, 1, 3], [0, 0, 0, 1, 2, 3]]


class Probes:
    """A sketch made of the keys, ``(B, K, 2, C)``."""

    basis = None

    def __call__(self, tokens, block):
        key = block.heads.key[:, :2, handmade.PREFIX :]
        rows = torch.cat([key, key[..., :2]], dim=-1).transpose(1, 2)
        return rows.float() if tokens.x.dtype != torch.float64 else rows


probes = Probes()


@pytest.mark.parametrize("sketch", [None, probes])
def test_the_action_leaves_the_count_and_takes_sizes_into_account(sketch):
    tokens = handmade.tokens(sizes=True)
    block = handmade.block(tokens)
    action = Agglomerate(15, 6, 4, sketch)
    grouping = action(tokens, block, 6)
    reduced = regroup(tokens, grouping)
    assert reduced.num_patches == 6
    assert_close(reduced.size.sum(1), tokens.size.sum(1))
    rows = None if sketch is None else sketch(tokens, block)
    clusters = Clusters(tokens.patches, tokens.sizes(), rows)
    cost = cosine_cost if sketch is None else FIRST_ORDER
    halves = random_halves(15, action.counts, 0)
    truth = agglomerate(clusters, action.counts, halves, cost)
    assert torch.equal(grouping.group, truth.group)


def test_the_action_shifts_groups_where_it_is_asked_to():
    tokens = handmade.tokens()
    block = handmade.block(tokens)
    plain = Agglomerate(15, 6, 4, probes)(tokens, block, 6)
    shifted = Agglomerate(15, 6, 4, probes, ridge=0.5)(tokens, block, 6)
    assert plain.shift is None
    assert torch.equal(shifted.group, plain.group)
    clusters = Clusters(tokens.patches, tokens.sizes(), probes(tokens, block))
    assert_close(shifted.shift, cancel(clusters, plain, 0.5))


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_rows_in_a_basis_are_rows_in_the_features_own_coordinates(damping):
    seen = problem(9, channels=6)
    basis = torch.linalg.qr(torch.randn(6, 3, dtype=torch.float64)).Q
    inside = Clusters(seen.feature, seen.size, seen.sketch @ basis, basis)
    spread = Clusters(seen.feature, seen.size, inside.sketch @ basis.T)
    costs = []
    for clusters in (inside, spread):
        cost = PullbackCost.of(clusters, damping)
        halves = random_halves(9, [6, 4], 0)
        grouping = agglomerate(clusters, [6, 4], halves, cost)
        costs.append(cost(clusters, clusters))
        group, shift = grouping.group, cancel(clusters, grouping, 0.5)
    assert_close(costs[0], costs[1])
    assert torch.equal(agglomerate(inside, [6, 4], halves, cost).group, group)
    assert_close(cancel(inside, grouping, 0.5), shift)


def test_seeds_choose_the_halves():
    tokens = handmade.tokens((6, 8))
    block = handmade.block(tokens)
    one, same, other = (
        Agglomerate(48, 20, 2, None, seed)(tokens, block, 20).group for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_halves_are_not_saved_but_copied():
    action = Agglomerate(15, 6, 4)
    assert not action.state_dict()
    twin = copy.deepcopy(action)
    assert all(
        torch.equal(a, b) for a, b in zip(action.buffers(), twin.buffers(), strict=True)
    )
