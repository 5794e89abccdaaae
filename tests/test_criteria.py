"""Oracle: naive scores in ``reference_scoring``."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

from foveate.backbones import Heads, open_backbone
from foveate.forward import Block, run
from foveate.reduction.regroup import Grouping, regroup
from foveate.scoring import criteria
from foveate.scoring.criteria import (
    Random,
    class_attention,
    coverage,
    feature_norm,
    key_redundancy,
    pairwise_cosine,
    received_attention,
)
from foveate.tokens import Layout, Tokens
from tests import reference_scoring as reference
from tests import tiny

STATELESS = [class_attention, coverage, feature_norm, key_redundancy, received_attention]
CHEAP = [*STATELESS, Random(3)]
DEPTH = 1


def named(score):
    return getattr(score, "__name__", type(score).__name__)


cheap = pytest.mark.parametrize("score", CHEAP, ids=named)


def entering(backbone, depth=DEPTH, dtype=torch.float32):
    """Tokens of two images that enter a block."""
    tokens = backbone.embed(tiny.random_images(dtype=dtype))
    return run(backbone, tokens, 0, depth)[0]


def merged(tokens, keep=12):
    """Merge patch n into group n mod ``keep``; attention becomes proportional."""
    group = torch.arange(tokens.num_patches).expand(len(tokens.x), -1) % keep
    lead = torch.arange(keep).expand(len(tokens.x), -1)
    return regroup(tokens, Grouping(lead, group)).with_(proportional=True)


def image(tokens, b):
    """One image of a batch."""
    fields = ("x", "size", "stand_in", "position", "grid_position")
    values = {name: getattr(tokens, name) for name in fields}
    return tokens.with_(**{
        k: None if v is None else v[b : b + 1] for k, v in values.items()
    })


def with_heads(heads, grid, num_prefix=1, size=None):
    """A block and tokens that have just these heads."""
    x = torch.zeros(len(heads.key), heads.key.shape[2], 4)
    tokens = Tokens(x, Layout(num_prefix, grid, (8, 8)), size=size, proportional=True)
    return tokens, Block(open_backbone(tiny.hf_dinov2()), 0, heads)


def random_heads(num_tokens, generator, channels=5):
    draw = [torch.randn(2, 3, num_tokens, channels, generator=generator) for _ in range(3)]
    return Heads(*draw)


@pytest.fixture(scope="module")
def backbone():
    return open_backbone(tiny.hf_dinov2())


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", ["hf-dinov2", "hf-dinov3", "timm-vit-registers"])
def test_scores_equal_the_reference(name, reduced):
    backbone = open_backbone(tiny.BACKBONES[name]())
    tokens = entering(backbone)
    tokens = merged(tokens) if reduced else tokens
    heads = backbone.project(DEPTH, tokens)
    block, num_prefix = Block(backbone, DEPTH), tokens.layout.num_prefix
    for b in range(2):
        query, key = heads.query[b], heads.key[b]
        size = tokens.size[b] if reduced else None
        truth = {
            class_attention: reference.class_attention(query, key, num_prefix, size),
            key_redundancy: reference.key_redundancy(key, num_prefix),
            feature_norm: reference.feature_norm(tokens.x[b], num_prefix),
        }
        if not reduced:  # the reference lets every patch ask once
            rows = reference.received_attention(query, key, num_prefix)
            truth[received_attention] = rows
        for score, expected in truth.items():
            found = score(tokens, block)[b].double()
            assert_close(found, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_known_projections_are_not_computed_again(backbone, generator):
    tokens = entering(backbone)
    heads = random_heads(36, generator)
    block = Block(backbone, DEPTH, heads)
    expected = reference.class_attention(heads.query[1], heads.key[1], 1)
    found = class_attention(tokens, block)[1].double()
    assert_close(found, torch.from_numpy(expected), rtol=1e-4, atol=1e-6)


def test_class_attention_needs_a_class_token():
    backbone = open_backbone(tiny.hf_siglip())
    with pytest.raises(ValueError, match="got HuggingFaceBackbone without one"):
        class_attention(entering(backbone), Block(backbone, DEPTH))


def test_merged_twins_receive_what_they_received_together(generator):
    heads = random_heads(8, generator)  # a class token and seven patches
    for x in heads:
        x[:, :, 7] = x[:, :, 4]  # patches 3 and 6 are the same
    apart = received_attention(*with_heads(heads, (1, 7)))
    shorter = Heads(*(x[:, :, :7] for x in heads))
    size = torch.ones(2, 6).index_fill(1, torch.tensor(3), 2.0)
    together = received_attention(*with_heads(shorter, (1, 7), size=size))
    assert_close(together[:, 3], apart[:, 3] + apart[:, 6])
    others = [0, 1, 2, 4, 5]
    assert_close(together[:, others], apart[:, others])


@pytest.mark.parametrize("score", [received_attention, key_redundancy], ids=named)
def test_chunks_change_nothing(score, backbone, monkeypatch):
    tokens, block = entering(backbone), Block(backbone, DEPTH)
    whole = score(tokens, block)
    monkeypatch.setattr(criteria, "_ROWS", 4)
    assert_close(score(tokens, block), whole)


def test_keys_of_zeros_are_safe(generator):
    heads = random_heads(6, generator)
    heads.key[0, :, 2] = 0
    heads.key[1] = 0
    scores = key_redundancy(*with_heads(heads, (1, 5)))
    assert scores.isfinite().all()
    assert scores[0, 1] == 1
    assert (scores[1] == 1).all()


def test_lone_patch_has_no_relative(generator):
    assert (key_redundancy(*with_heads(random_heads(2, generator), (1, 1))) == 2).all()


def test_pairwise_cosine_equals_torch(generator):
    a, b = (torch.randn(2, n, 5, generator=generator) for n in (3, 4))
    truth = torch.nn.functional.cosine_similarity(a[:, :, None], b[:, None], dim=-1)
    assert_close(pairwise_cosine(a, b), truth)


@pytest.mark.parametrize("grid", [(5, 7), (1, 1), (1, 6), (4, 4), (3, 8)])
def test_coverage_of_the_grid_equals_the_reference(grid):
    layout = Layout(2, grid, (8, 8))
    tokens = Tokens(torch.zeros(2, 2 + layout.num_patches, 3), layout)
    truth = torch.from_numpy(reference.farthest_point(grid)).float()
    assert torch.equal(coverage(tokens, None), truth.expand(2, -1))
    itself = torch.arange(layout.num_patches)[None, :, None].expand(2, -1, -1)
    assert torch.equal(coverage(tokens.with_(stand_in=itself), None), truth.expand(2, -1))


def mean_places(stand_in, grid, num_patches):
    """Mean places of the members of every patch, one image, plain Python."""
    places = []
    for k in range(num_patches):
        members = [
            divmod(n, grid[1]) for n, speakers in enumerate(stand_in) if k in speakers
        ]
        members = members or [((grid[0] - 1) / 2, (grid[1] - 1) / 2)]
        places.append([sum(axis) / len(members) for axis in zip(*members, strict=True)])
    return places


def assert_farthest_first(scores, places):
    """Every visit goes to a farthest point, to within rounding (ties may go either way)."""

    def squared(p, q):
        return sum((u - v) ** 2 for u, v in zip(p, q, strict=True))

    order = reference.descending(scores)
    assert sorted(scores) == [float(-rank) for rank in reversed(range(len(places)))]
    centre = [sum(axis) / len(places) for axis in zip(*places, strict=True)]
    nearest = min(squared(p, centre) for p in places)
    assert squared(places[order[0]], centre) == pytest.approx(nearest, abs=1e-5)
    for rank in range(1, len(order)):
        gaps = [min(squared(p, places[j]) for j in order[:rank]) for p in places]
        assert gaps[order[rank]] == pytest.approx(max(gaps), abs=1e-5)


@pytest.mark.parametrize("num_stand_ins", [1, 2])
def test_coverage_after_a_reduction_uses_the_mean_places(generator, num_stand_ins):
    layout, keep = Layout(1, (5, 7), (8, 8)), 9
    # Patch 8 speaks for nobody, and nobody speaks for some of the patches.
    stand_in = torch.randint(-1, 8, (3, 35, num_stand_ins), generator=generator)
    if num_stand_ins == 2:  # two different ones
        stand_in[..., 1] = torch.where(stand_in[..., 0] < 0, -1, (stand_in[..., 0] + 3) % 8)
    tokens = Tokens(torch.zeros(3, 1 + keep, 4), layout, stand_in=stand_in)
    scores = coverage(tokens, None)
    assert scores.shape == (3, keep)
    for b in range(3):
        places = mean_places(stand_in[b].tolist(), layout.grid, keep)
        assert_farthest_first(scores[b].tolist(), places)


def test_random_draws_belong_to_seed_and_depth(backbone):
    tokens = entering(backbone)
    here, there = Block(backbone, 1), Block(backbone, 2)
    scores = Random(3)(tokens, here)
    assert scores.shape == (2, 35)
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores, Random(3)(tokens, here))
    assert len(scores[0].unique()) == 35
    assert not torch.equal(scores, Random(4)(tokens, here))
    assert not torch.equal(scores, Random(3)(tokens, there))
    assert 0.3 < scores.mean() < 0.7


@cheap
@pytest.mark.parametrize("reduced", [False, True])
def test_images_do_not_mix(score, reduced, backbone):
    tokens, block = entering(backbone), Block(backbone, DEPTH)
    tokens = merged(tokens) if reduced else tokens
    together = score(tokens, block)
    assert together.shape == (2, tokens.num_patches)
    for b in range(2):
        assert_close(score(image(tokens, b), block), together[b : b + 1])


@cheap
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_float32(score, dtype, generator):
    heads = Heads(*(x.to(dtype) for x in random_heads(36, generator)))
    x = (200 * torch.randn(2, 36, 36, generator=generator)).to(
        dtype
    )  # overflows if squared
    network = open_backbone(tiny.hf_dinov2())
    tokens = Tokens(x, Layout(1, (5, 7), (20, 28)))
    found = score(tokens, Block(network, DEPTH, heads))
    wide = Heads(*(h.double() for h in heads))
    truth = score(tokens.with_(x=x.double()), Block(network, DEPTH, wide))
    assert found.dtype == torch.float32
    assert_close(found, truth.float(), rtol=1e-5, atol=1e-5)


@cheap
def test_scores_compile_into_one_graph(score, backbone):
    tokens, block = entering(backbone), Block(backbone, DEPTH)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda tokens: score(tokens, block), backend="eager", fullgraph=True, dynamic=False
    )
    for given in (tokens, merged(tokens)):
        assert_close(compiled(given), score(given, block))


@cheap
def test_scores_survive_copies_and_pickles(score, backbone):
    tokens, block = entering(backbone), Block(backbone, DEPTH)
    truth = score(tokens, block)
    for copied in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):
        assert torch.equal(copied(tokens, block), truth)
