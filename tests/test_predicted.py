"""Oracle: the heads called by hand on the tokens of a block; the predicted metric."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from foveate.forward import Block, run
from foveate.reduction.agglomerate import Agglomerate
from foveate.reduction.matching import bipartite
from foveate.reduction.predicted import (
    LearnedImportance,
    PredictedFactors,
    PredictedModes,
)
from foveate.reduction.presets import plan_for
from foveate.reduction.reduced_vit import reduce
from foveate.reduction.step import Reduce
from tests import tiny

READERS = {
    "importance": LearnedImportance,
    "metric": PredictedModes,
    "factors": PredictedFactors,
}
every_kind = pytest.mark.parametrize("kind", READERS)


@pytest.fixture(scope="module")
def model():
    return tiny.dense_model()


def around(model, depth=0, images=None):
    """Tokens before and after the attention of a block, and the block in between."""
    backbone = model.backbone
    images = tiny.random_images() if images is None else images
    entering, _ = run(backbone, backbone.embed(images), 0, depth)
    heads = backbone.project(depth, entering)
    block = Block(backbone, depth, heads, {}, entering)
    return entering, backbone.attend(depth, entering, heads), block


def merged(model):
    """Tokens with sizes, under proportional attention."""
    step = Reduce(bipartite, 20, "before", proportional=True)
    return step(around(model)[0], Block(model.backbone, 0))


def by_hand(head, tokens):
    """What the network says of some tokens, in the convention of a sketch."""
    with torch.no_grad():
        if head.kind == "metric":
            metric = head.network(tokens.x, tokens.layout.num_prefix)
            return 3**0.5 * metric.sketch() / tokens.sizes()[..., None, None]
        return head.network(tokens.x, tokens.layout.num_prefix, tokens.key_bias())


@every_kind
def test_a_head_trained_before_reads_what_enters_wherever_the_step_stands(model, kind):
    head = tiny.untrained_head(kind, place="before")
    entering, attended, block = around(model)
    truth = by_hand(head, entering)
    between = READERS[kind](head, "between")(attended, block)
    before = READERS[kind](head, "before")(entering, Block(model.backbone, 0))
    assert_close(between, truth, rtol=0, atol=0)
    assert_close(before, truth, rtol=0, atol=0)
    assert not torch.equal(truth, by_hand(head, attended))


@every_kind
def test_a_head_trained_between_reads_what_attention_gives(model, kind):
    head = tiny.untrained_head(kind, place="between")
    _, attended, block = around(model)
    found = READERS[kind](head, "between")(attended, block)
    assert_close(found, by_hand(head, attended), rtol=0, atol=0)
    late = replace(block, heads=None, entering=None)  # after another step
    assert_close(READERS[kind](head, "between")(attended, late), found)


@every_kind
def test_a_head_trained_between_is_refused_before(kind):
    head = tiny.untrained_head(kind, place="between")
    wrong = r"place must be 'between', where the head was trained; got 'before'\."
    with pytest.raises(ValueError, match=wrong):
        READERS[kind](head, "before")


@every_kind
def test_what_entered_is_gone_after_another_step(model, kind):
    reader = READERS[kind](tiny.untrained_head(kind, place="before"), "between")
    backbone = model.backbone
    first = Reduce(bipartite, 30)
    second = Reduce(lambda tokens, block, keep: reader(tokens, block), 25)
    wrong = r"steps before the head's at block 0 must not change the tokens"
    with pytest.raises(ValueError, match=wrong):
        run(backbone, backbone.embed(tiny.random_images()), 0, 1, {0: [first, second]})


@every_kind
def test_merged_tokens_are_seen_with_their_sizes(model, kind):
    head = tiny.untrained_head(kind, place="before")
    small = merged(model)
    assert small.key_bias() is not None
    found = READERS[kind](head, "before")(small, Block(model.backbone, 0))
    assert_close(found, by_hand(head, small))
    plain = by_hand(head, small.with_(size=None))
    assert found.shape[1] == 20
    assert not torch.allclose(found, plain, rtol=1e-3)


def test_modes_have_the_metric_as_the_mean_of_their_outer_products(model):
    head = tiny.untrained_head("metric")
    entering, attended, block = around(model)
    rows = PredictedModes(head, "between")(attended, block).double()  # (B, K, r, C)
    metric = head.network(entering.x, entering.layout.num_prefix)
    u = metric.directions[:, :, entering.layout.num_prefix :].double().flatten(2)
    g = torch.einsum("bj,bjm,bjn->bmn", metric.energies.double(), u, u)
    flat = rows.transpose(1, 2).flatten(2)  # (B, r, K C)
    mean = torch.einsum("bjm,bjn->bmn", flat, flat) / flat.shape[1]
    assert_close(mean, g, rtol=1e-4, atol=1e-6)


def test_modes_of_a_merged_token_add_up_to_its_copies(model):
    """A row of a merged token is the sum of its copies', which are s of those given."""
    head = tiny.untrained_head("metric", place="before")
    small = merged(model)
    rows = PredictedModes(head, "before")(small, Block(model.backbone, 0))
    sketch = head.network(small.x, small.layout.num_prefix).sketch()
    assert_close(rows * small.sizes()[..., None, None], 3**0.5 * sketch)


def test_the_columns_of_factors_are_computed_once(model, monkeypatch):
    head = tiny.untrained_head("factors")
    truth = head.network.basis
    factors = PredictedFactors(head, "between")
    monkeypatch.setattr("foveate.scoring.factors.cholesky_qr", None)  # may not be called
    assert torch.equal(factors.basis, truth)
    assert not factors.basis.requires_grad
    assert factors.bfloat16().basis.dtype == torch.float32


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize(("method", "kind"), tiny.HEAD_KINDS.items())
def test_presets_read_heads_where_they_were_trained(model, method, kind, place):
    options = tiny.options_of(method, "tiny", "cls")
    settings = {"options": options, "place": place}
    if kind == "factors" and place == "before":
        with pytest.raises(ValueError, match=r"place must be 'between', where"):
            plan_for(model, method, "cls", tiny.GRID, {0: 24}, **settings)
        return
    reduced = reduce(model, plan_for(model, method, "cls", tiny.GRID, {0: 24}, **settings))
    (step,) = reduced.steps["0"]
    reader = step.action.sketch if isinstance(step.action, Agglomerate) else None
    reader = step.action.score if reader is None else reader
    assert isinstance(reader, READERS[kind])
    assert not any(p.requires_grad for p in reader.parameters())
    seen = []
    reader.network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    images = tiny.random_images()
    reduced(images)
    entering, attended, _ = around(model, 0, images)
    expected = attended if kind == "factors" else entering
    assert_close(seen[0], expected.x, rtol=0, atol=0)


@pytest.mark.parametrize("method", tiny.HEAD_KINDS)
def test_a_preset_without_a_head_says_how_to_get_one(model, method):
    wrong = (
        r"head must be given for 'cls' at depth 0 of tiny, .* the package has none "
        rf"\(train one with foveate distill {tiny.HEAD_KINDS[method]}\)"
    )
    with pytest.raises(ValueError, match=wrong):
        plan_for(model, method, "cls", tiny.GRID, {0: 24})
