"""Oracle: naive pairing in this file; ``pair_costs`` of the references; invariants."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from foveate.forward import Block, run
from foveate.reduction.matching import bipartite
from foveate.reduction.presets import plan_for
from foveate.reduction.reduced_vit import reduce
from foveate.reduction.regroup import regroup
from foveate.reduction.sketch import PulledProbes
from foveate.reduction.spectral import (
    LeadsOnly,
    PullbackPairs,
    important_leads,
    pair_costs,
    shares,
)
from tests import reference_reduction as reference
from tests import tiny

GRID = tiny.GRID


@pytest.fixture
def patches(generator):
    """Features (2, 7, 5), sketches (2, 7, 3, 5) and sizes (2, 7), float64."""
    feature = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)
    sketch = torch.randn(2, 7, 3, 5, generator=generator, dtype=torch.float64)
    size = torch.randint(1, 5, (2, 7), generator=generator).double()
    return feature, sketch, size


def between(model, images, depth=1):
    """Tokens between attention and MLP of a block, with sizes that differ."""
    backbone = model.backbone
    tokens, _ = run(backbone, backbone.embed(images), 0, depth)
    heads = backbone.project(depth, tokens)
    tokens = backbone.attend(depth, tokens, heads)
    size = torch.arange(35.0).remainder(3).add(1).expand(2, -1).contiguous()
    return tokens.with_(size=size, proportional=True), Block(backbone, depth, heads)


def naive_costs(feature, sketch, weight, cost):
    """Costs of one image, (even, odd)."""
    k = len(weight)
    costs = np.zeros((len(range(0, k, 2)), len(range(1, k, 2))))
    for a in range(0, k, 2):
        for b in range(1, k, 2):
            total = weight[a] + weight[b]
            mean = (weight[a] * feature[a] + weight[b] * feature[b]) / total
            apart = feature[a] - feature[b]
            merge = sketch[a] @ (mean - feature[a]) + sketch[b] @ (mean - feature[b])
            far = ((sketch[a] @ apart) ** 2 + (sketch[b] @ apart) ** 2) / 2
            costs[a // 2, b // 2] = np.mean(merge**2 if cost == "merge" else far)
    return costs


def naive_pairs(x, sketch, size, keep, options):
    """Features, sizes and leads of one image after one step of pairwise merging."""
    mean, cost = options
    importance = np.sqrt((sketch**2).sum((1, 2)) / sketch.shape[1])
    weight = importance if mean == "importance" else size
    costs = naive_costs(x, sketch, weight, cost)
    best = sorted(
        (costs[i].min(), 2 * i, 2 * int(costs[i].argmin()) + 1) for i in range(len(costs))
    )
    group = list(range(len(x)))
    for _, a, b in best[: len(x) - keep]:
        group[a] = b
    found = []
    for target in sorted(set(group)):
        members = [i for i in range(len(x)) if group[i] == target]
        lead = max(members, key=lambda i: importance[i])
        feature = sum(weight[i] * x[i] for i in members) / sum(weight[i] for i in members)
        found.append((lead, feature, sum(size[i] for i in members)))
    return sorted(found, key=lambda f: f[0])


def test_cost_by_size_is_that_of_the_reference(patches):
    feature, sketch, size = patches
    costs = pair_costs(feature, sketch, size, "merge")
    assert costs.shape == (2, 4, 3)
    for image in range(2):
        full = reference.pair_costs(feature[image], size[image], sketch[image])
        assert_close(costs[image], torch.from_numpy(full[0::2, 1::2]))


@pytest.mark.parametrize("cost", ["merge", "metric"])
def test_costs_by_any_weight(patches, cost):
    feature, sketch, size = patches
    costs = pair_costs(feature, sketch, size.sqrt(), cost)
    for image in range(2):
        one = (feature[image].numpy(), sketch[image].numpy(), size[image].sqrt().numpy())
        assert_close(costs[image], torch.from_numpy(naive_costs(*one, cost)))


def test_two_weights_of_zero_count_as_equal(patches):
    feature, sketch, size = patches
    nothing = pair_costs(feature, sketch, torch.zeros_like(size), "merge")
    assert_close(nothing, pair_costs(feature, sketch, torch.ones_like(size), "merge"))


def test_equal_patches_cost_nothing(patches):
    feature, sketch, size = patches
    feature[:, 3] = feature[:, 4]
    for cost in ("merge", "metric"):
        costs = pair_costs(feature, sketch, size, cost)
        assert_close(costs[:, 2, 1], torch.zeros(2).double(), atol=1e-12, rtol=0)
        assert (costs[:, 1] > 1e-3).all()


@pytest.mark.parametrize("mean", ["importance", "size"])
@pytest.mark.parametrize("cost", ["merge", "metric"])
@pytest.mark.parametrize("keep", [34, 24, 18])
def test_action_is_the_naive_one(double_model, double_images, mean, cost, keep):
    tokens, block = between(double_model, double_images)
    probes = PulledProbes(double_model.task("cls"), num_probes=4)
    grouping = PullbackPairs(probes, mean, cost)(tokens, block, keep)
    after = regroup(tokens, grouping)
    sketch = probes(tokens, block) * tokens.size[..., None, None]
    for image in range(2):
        one = (tokens.patches[image], sketch[image], tokens.size[image].double())
        found = naive_pairs(*(v.numpy() for v in one), keep, (mean, cost))
        assert grouping.lead[image].tolist() == [lead for lead, _, _ in found]
        feature = torch.from_numpy(np.stack([f for _, f, _ in found]))
        assert_close(after.patches[image], feature)
        assert after.size[image].tolist() == [s for _, _, s in found]


def test_the_most_important_leads_and_ties_go_to_the_first():
    group = torch.tensor([[2, 0, 0, 1, 2]])
    importance = torch.tensor([[1.0, 3.0, 4.0, 0.0, 1.0]])
    found = important_leads(group, importance, 3)
    assert found.lead.tolist() == [[0, 2, 3]]
    assert found.group.tolist() == [[0, 1, 1, 2, 0]]


def test_shares_sum_to_one_and_are_equal_where_all_is_zero():
    group = torch.tensor([[0, 0, 1, 1, 1, 2]])
    weight = torch.tensor([[1.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    found = shares(weight, group, 3)
    assert_close(found, torch.tensor([[0.25, 0.75, 1 / 3, 1 / 3, 1 / 3, 1.0]]))


@pytest.mark.parametrize(
    ("names", "message"),
    [(("keys", "merge"), "mean must be one of"), (("size", "keys"), "cost must be one of")],
)
def test_refuses_unknown_names(double_model, names, message):
    with pytest.raises(ValueError, match=f"{message} .*; got 'keys'"):
        PullbackPairs(PulledProbes(double_model.task("cls")), *names)


def test_refuses_to_remove_more_than_half(double_model, double_images):
    tokens, block = between(double_model, double_images)
    action = PullbackPairs(PulledProbes(double_model.task("cls"), num_probes=1))
    with pytest.raises(ValueError, match=r"keep must be .*; got 16"):
        action(tokens, block, 16)


def test_leads_only_drops_what_the_other_action_merges(double_model, double_images):
    tokens, block = between(double_model, double_images)
    grouping = LeadsOnly(bipartite)(tokens, block, 20)
    merged = bipartite(tokens, block, 20)
    after = regroup(tokens, grouping)
    assert torch.equal(grouping.lead, merged.lead)
    assert_close(
        after.patches, tokens.patches.gather(1, merged.lead[..., None].expand(-1, -1, 36))
    )
    assert ((grouping.group < 0).sum(1) == 15).all()
    assert torch.equal(after.size, tokens.size.gather(1, merged.lead))


@pytest.mark.parametrize("method", ["freeze-tome", "freeze-random"])
def test_frozen_patches_come_back_as_they_went(double_model, double_images, method):
    plan = plan_for(double_model, method, "saliency", GRID, {1: 20})
    reduced = reduce(double_model, plan)
    backbone = double_model.backbone
    tokens, _ = run(backbone, backbone.embed(double_images), 0, 1)
    frozen = backbone.attend(1, tokens, backbone.project(1, tokens)).patches
    kept = reduced.tokens_at(double_images, (2,))[2]
    gone = kept.stand_in[..., 0] < 0
    assert (gone.sum(1) == 15).all()
    assert_close(kept.offset[gone], frozen[gone])
    assert_close(kept.size, torch.ones(2, 20))
    assert reduced(double_images).shape == (2, 1, 20, 28)


def test_options_reach_the_action(double_model, double_images):
    def output(**options):
        given = {"num_probes": 4, **options}
        plan = plan_for(double_model, "pullback", "cls", GRID, {1: 25}, options=given)
        return reduce(double_model, plan)(double_images)

    assert torch.equal(output(), output(mean="importance", cost="merge"))
    for options in ({"mean": "size"}, {"cost": "metric"}, {"seed": 3}):
        assert not torch.allclose(output(), output(**options))
