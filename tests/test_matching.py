"""Oracle: the slow loops of ``reference_reduction``, one image at a time; invariants."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from foveate.backbones import Heads
from foveate.forward import Block
from foveate.reduction import matching
from foveate.reduction.matching import (
    Fuse,
    ManyToOne,
    PiToMe,
    Prune,
    best_partner,
    bipartite,
    highest,
    match_halves,
    mean_keys,
)
from foveate.reduction.regroup import regroup
from foveate.reduction.step import Reduce
from tests import handmade
from tests import reference_reduction as ref

P = handmade.PREFIX


ACTIONS = {
    "tome": bipartite,
    "pitome": PiToMe(0.3),
    "prune": Prune(handmade.scores),
    "prune-stand-in": Prune(handmade.scores, stand_in=True),
    "many-to-one": ManyToOne(handmade.scores),
    "fuse": Fuse(handmade.scores),
}
every = pytest.mark.parametrize("name", ACTIONS)


def reference(name, tokens, block, keep, b):
    """What the slow loops give for one image."""
    x, key, size = tokens.x[b], block.heads.key[b], tokens.sizes()[b]
    scores = handmade.scores(tokens)[b].tolist()
    return {
        "tome": lambda: ref.tome(x, key, size, keep, P),
        "pitome": lambda: ref.pitome(x, key, size, keep, 0.3),
        "prune": lambda: ref.prune(x, key, scores, size, keep),
        "prune-stand-in": lambda: ref.prune(x, key, scores, size, keep),
        "many-to-one": lambda: ref.many_to_one(x, key, scores, size, keep, P),
        "fuse": lambda: ref.evit_by_scores(x, key, scores, size, keep, fuse=True),
    }[name]()


def in_order_of_leads(fused, keep, dropped):
    """Move the reference's fused token from the end to the place of its first patch."""
    order = [n for n in range(len(fused.group)) if n not in dropped or n == min(dropped)]
    kept = [n for n in order if n != min(dropped)]
    rank = [keep - 1 if n == min(dropped) else kept.index(n) for n in order]
    inverse = [rank.index(g) for g in range(keep)]
    x = fused.x[[*range(P), *(P + g for g in rank)]]
    return x, fused.size[rank], [inverse[g] for g in fused.group]


@every
@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize(("grid", "keep"), [((3, 5), 11), ((3, 5), 8), ((2, 4), 4)])
def test_actions_equal_the_slow_loops(name, sizes, grid, keep):
    tokens = handmade.tokens(grid, sizes=sizes)
    block = handmade.block(tokens)
    reduced = regroup(tokens, ACTIONS[name](tokens, block, keep))
    assert reduced.num_patches == keep
    for b in range(2):
        truth = reference(name, tokens, block, keep, b)
        x, size, group = truth.x, truth.size, truth.group.tolist()
        if name == "fuse":
            dropped = [n for n in range(len(group)) if group[n] == keep - 1]
            x, size, group = in_order_of_leads(truth, keep, dropped)
        assert_close(reduced.x[b], torch.from_numpy(x), rtol=1e-12, atol=1e-12)
        assert_close(reduced.size[b].double(), torch.from_numpy(size))
        found = reduced.stand_in[b, :, 0].tolist()
        if name == "prune":  # nobody speaks for what is gone
            kept = highest(handmade.scores(tokens), keep)[b].tolist()
            group = [g if k else -1 for g, k in zip(group, kept, strict=True)]
        assert found == group


@pytest.mark.parametrize("keep", [1, 2, 14])
@pytest.mark.parametrize("name", ["prune", "prune-stand-in", "many-to-one", "fuse"])
def test_any_count_can_be_left_by_score(name, keep):
    tokens = handmade.tokens(sizes=True)
    block = handmade.block(tokens)
    reduced = regroup(tokens, ACTIONS[name](tokens, block, keep))
    assert reduced.num_patches == keep
    if not name.startswith("prune"):
        assert_close(reduced.size.sum(1), tokens.size.sum(1))


@pytest.mark.parametrize("action", [bipartite, PiToMe()], ids=["tome", "pitome"])
@pytest.mark.parametrize(("count", "least"), [(15, 8), (8, 4), (2, 1)])
def test_more_pairs_than_half_are_refused(action, count, least):  # tomesd#40, A1111#9256
    tokens = handmade.tokens((1, count))
    block = handmade.block(tokens)
    assert action(tokens, block, least).lead.shape == (2, least)
    wrong = rf"keep must be from {least} to {count} of {count} patches .* got {least - 1}\."
    with pytest.raises(ValueError, match=wrong):
        action(tokens, block, least - 1)


@every
def test_images_do_not_mix(name):  # eomt#73
    tokens = handmade.tokens()
    block, action = handmade.block(tokens), ACTIONS[name]
    together = action(tokens, block, 9)
    for b in range(2):
        one = tokens.with_(x=tokens.x[b : b + 1])
        heads = Heads(*(h[b : b + 1] for h in block.heads))
        alone = action(one, Block(None, 1, heads), 9)
        assert torch.equal(alone.lead[0], together.lead[b])
        assert torch.equal(alone.group[0], together.group[b])


def test_ties_go_to_the_lower_index():  # pytorch#50469
    assert highest(torch.tensor([[1.0, 2, 2, 2, 0]]), 2).tolist() == [[0, 1, 1, 0, 0]]
    same = torch.nn.functional.normalize(torch.ones(1, 8, 3), dim=-1)
    grouping = match_halves(same, 6)
    assert grouping.lead.tolist() == [[1, 3, 4, 5, 6, 7]]
    assert grouping.group.tolist() == [[0, 0, 0, 1, 2, 3, 4, 5]]


@every
def test_zero_keys_are_safe(name):
    tokens = handmade.tokens()
    block = handmade.block(tokens)
    block.heads.key[0, :, P + 4] = 0
    block.heads.key[1] = 0
    reduced = regroup(tokens, ACTIONS[name](tokens, block, 9))
    assert reduced.x.isfinite().all()
    assert reduced.num_patches == 9


@pytest.mark.parametrize("action", [bipartite, PiToMe(0.3), ManyToOne(handmade.scores)])
def test_chunks_change_nothing(action, monkeypatch):  # FastVGGT#29
    tokens = handmade.tokens()
    block = handmade.block(tokens)
    whole = action(tokens, block, 9)
    monkeypatch.setattr(matching, "_CHUNK", 3)
    parts = action(tokens, block, 9)
    assert torch.equal(parts.lead, whole.lead)
    assert torch.equal(parts.group, whole.group)


def test_best_partner_equals_the_full_product(generator):
    rows = torch.randn(2, 5, 3, generator=generator)
    columns = torch.randn(2, 4, 3, generator=generator)
    product = torch.einsum("bad,btd->bat", rows, columns)
    value, index = best_partner(rows, columns)
    assert_close(value, product.amax(-1))
    assert torch.equal(index, product.argmax(-1))


def test_keys_are_averaged_over_heads_and_scaled_to_one():
    tokens = handmade.tokens()
    block = handmade.block(tokens)
    for b in range(2):
        truth = torch.from_numpy(ref.mean_keys(block.heads.key[b], P))
        truth = truth / truth.norm(dim=-1, keepdim=True)
        assert_close(mean_keys(tokens, block)[b], truth)


@pytest.mark.parametrize("name", ["tome", "pitome", "many-to-one"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_matched_in_float32(name, dtype):
    tokens = handmade.tokens(dtype=dtype)
    block = handmade.block(tokens)
    exact = Block(None, 1, Heads(*(h.double() for h in block.heads)))
    found = ACTIONS[name](tokens, block, 9)
    truth = ACTIONS[name](tokens.with_(x=tokens.x.double()), exact, 9)
    assert torch.equal(found.group, truth.group)


@pytest.mark.parametrize("name", ["tome", "pitome", "many-to-one"])
def test_autocast_does_not_round_the_matching(name):
    tokens = handmade.tokens((12, 16), dtype=torch.float32)
    block, step = handmade.block(tokens), Reduce(ACTIONS[name], 120)
    truth = step(tokens, block)
    with torch.autocast("cpu", torch.bfloat16):
        found = step(tokens, block)
    assert torch.equal(found.stand_in, truth.stand_in)


@every
def test_actions_compile_into_one_graph(name):
    tokens = handmade.tokens()
    block = handmade.block(tokens)
    torch._dynamo.reset()
    action = partial(ACTIONS[name], keep=9)
    compiled = torch.compile(action, backend="eager", fullgraph=True, dynamic=False)
    found, truth = compiled(tokens, block), action(tokens, block)
    assert torch.equal(found.lead, truth.lead)
    assert torch.equal(found.group, truth.group)


@every
def test_actions_survive_copies_and_pickles(name):
    tokens = handmade.tokens()
    block, action = handmade.block(tokens), ACTIONS[name]
    truth = action(tokens, block, 9)
    for twin in (copy.deepcopy(action), pickle.loads(pickle.dumps(action))):
        assert torch.equal(twin(tokens, block, 9).group, truth.group)
