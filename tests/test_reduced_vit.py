"""Oracle: the full model, plain gradients, the same steps taken by hand; invariants."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from foveate.backbones import open_backbone
from foveate.forward import Block, run
from foveate.models import Model
from foveate.reduction.matching import Prune, bipartite
from foveate.reduction.plan import Plan
from foveate.reduction.presets import PRESETS, build_steps, plan_for
from foveate.reduction.recover import recover
from foveate.reduction.reduced_vit import ReducedViT, reduce
from foveate.reduction.resolution import RESOLUTION
from foveate.reduction.step import Reduce
from tests import handmade, tiny

METHODS = [name for name in PRESETS if name != RESOLUTION]  # which takes no steps
FORWARD_ONLY = [name for name in METHODS if "num_probes" not in PRESETS[name].options]


def fewer(model, method="tome", task="saliency", counts=None, **settings):
    """A reduced model; oracles with four probes, heads as they are drawn."""
    counts = {0: 25, 1: 18} if counts is None else counts
    settings.setdefault("options", tiny.options_of(method, model.name, task, 4))
    return reduce(model, plan_for(model, method, task, tiny.GRID, counts, **settings))


@pytest.fixture(scope="module")
def model():
    return tiny.dense_model()


@pytest.fixture(scope="module")
def short_model():
    """One block, which is all that compiling needs to see."""
    full = tiny.dense_model()
    backbone = open_backbone(tiny.hf_dinov2(num_hidden_layers=1))
    return Model("short", backbone, full.tasks, full.transform).eval()


# --- what it computes ---------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before", "between"])
def test_the_output_is_that_of_the_steps_taken_by_hand(model, images, place):
    backbone = model.backbone
    tokens = run(backbone, backbone.embed(images), 0, 1)[0]
    step = Reduce(bipartite, 20, place, proportional=True)
    plan = plan_for(model, "tome", "cls", tiny.GRID, {1: 20}, place=place)
    if place == "before":
        tokens = step(tokens, Block(backbone, 1))
    heads = backbone.project(1, tokens)
    tokens = backbone.attend(1, tokens, heads)
    if place == "between":
        tokens = step(tokens, Block(backbone, 1, heads))
    tokens = backbone.transform(1, tokens)
    assert tokens.num_patches == 20
    end = run(backbone, tokens, 2, 3)[0]
    truth = model.task("cls").decode(backbone, (end.x,), end.layout)
    assert_close(reduce(model, plan)(images), truth, rtol=0, atol=0)


@pytest.mark.parametrize("fuse_last", [0, 1, 2])
def test_the_last_blocks_run_on_the_recovered_grid(model, images, fuse_last):
    reduced = fewer(model, counts={0: 20}, fuse_last=fuse_last)
    backbone, stop = model.backbone, 3 - fuse_last
    small = reduced.tokens_at(images, (stop,))[stop]
    assert small.num_patches == 20
    full = run(backbone, recover(small), stop, 3)[0]
    truth = model.task("saliency").decode(backbone, (full.x,), full.layout)
    assert_close(reduced(images), truth, rtol=0, atol=0)


def test_tokens_at_some_depths(model, images):
    kept = fewer(model, task="cls").tokens_at(images, (0, 1, 2, 3))
    assert [t.num_patches for t in kept.values()] == [35, 25, 18, 18]
    assert torch.equal(kept[0].x, model.backbone.embed(images).x)


def test_alpha_and_memory_reach_the_output(model, images):
    copied, restored = (fewer(model, alpha=a)(images) for a in (0.0, 1.0))
    truth = model(images, "saliency")
    assert (restored - truth).norm() < (copied - truth).norm()


@pytest.mark.parametrize("num_patches", [1, 2, 3])
@pytest.mark.parametrize("method", FORWARD_ONLY)
def test_one_two_or_three_patches_work(model, method, num_patches):  # FastVGGT#25
    images = tiny.random_images((tiny.PATCH, tiny.PATCH * num_patches))
    least = num_patches - num_patches // 2
    options = tiny.options_of(method, model.name, "saliency")
    plan = plan_for(
        model, method, "saliency", (1, num_patches), {1: least}, options=options
    )
    y = reduce(model, plan)(images)
    assert y.isfinite().all()
    assert y.shape == (2, 1, tiny.PATCH, tiny.PATCH * num_patches)


def test_images_of_another_grid_are_refused(model):
    other = tiny.random_images(tiny.OTHER_IMAGE)
    wrong = r"plan's patch grid \(5, 7\); got \(7, 3\) from \(28, 12\) pixels\."
    with pytest.raises(ValueError, match=wrong):
        fewer(model)(other)


def test_a_plan_read_from_a_file_gives_the_same_bits(model, images, tmp_path):
    reduced = fewer(model, "agglomerate")
    reduced.plan.save(tmp_path / "plan.json")
    again = reduce(model, Plan.load(tmp_path / "plan.json"))
    assert torch.equal(again(images), reduced(images))


# --- a step ------------------------------------------------------------------------------


def test_a_step_to_what_there_is_changes_nothing():
    tokens = handmade.tokens()
    assert (
        Reduce(bipartite, 15, proportional=True)(tokens, handmade.block(tokens)) is tokens
    )


def test_a_step_says_whether_attention_is_proportional():
    tokens = handmade.tokens()
    block = handmade.block(tokens)
    assert Reduce(bipartite, 9, proportional=True)(tokens, block).key_bias() is not None
    assert Reduce(bipartite, 9)(tokens, block).key_bias() is None


def test_steps_never_clamp():  # tomesd#40
    tokens = handmade.tokens()
    with pytest.raises(ValueError, match=r"keep must be at least 1 patch; got 0\."):
        Reduce(bipartite, 0)
    step = Reduce(Prune(handmade.scores), 16)
    with pytest.raises(ValueError, match=r"keep at depth 1 .* most the 15 .* got 16\."):
        step(tokens, handmade.block(tokens))


# --- what can be done with it ------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_copies_and_pickles_give_the_same_bits(model, images, method):
    reduced = fewer(model, method, task="cls")
    truth = reduced(images)
    for twin in (copy.deepcopy(reduced), pickle.loads(pickle.dumps(reduced))):
        assert twin.model is not model
        assert torch.equal(twin(images), truth)


def test_the_state_dict_is_that_of_the_model(model, images):
    reduced = fewer(model, "agglomerate")
    state = reduced.state_dict()
    assert set(state) == {f"model.{name}" for name in model.state_dict()}
    twin = fewer(tiny.dense_model(), "agglomerate")
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not torch.equal(twin(images), reduced(images))
    twin.load_state_dict(state)
    assert torch.equal(twin(images), reduced(images))


def test_wrapping_leaves_the_mode_of_every_part_alone():
    model = tiny.dense_model()
    model.backbone.train()
    reduced = fewer(model)
    assert not reduced.training
    assert model.backbone.training
    assert not model.tasks.training


@pytest.mark.parametrize("method", ["tome", "evit", "agglomerate"])
def test_gradients_under_checkpointing_equal_the_plain_ones(images, method):
    model = tiny.dense_model().requires_grad_(True)
    reduced, grads = fewer(model, method), []
    for keep in (True, False):
        model.zero_grad()
        x = images.clone().requires_grad_(True)
        y = reduced(x) if keep else checkpoint(reduced, x, use_reentrant=False)
        y.square().sum().backward()
        named = model.named_parameters()
        grads.append({"x": x.grad} | {n: p.grad for n, p in named if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert len(grads[0]) > 20
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad)
    assert grads[0]["x"].abs().max() > 0


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_autocast_runs_and_is_close(model, images, method):
    reduced = fewer(model, method, task="cls")
    with torch.no_grad():
        truth = reduced(images)
        with torch.autocast("cpu", torch.bfloat16):
            found = reduced(images)
    assert found.isfinite().all()
    assert (found - truth).norm() < 0.05 * truth.norm()


@pytest.mark.parametrize(
    "method", ["tome", "pitome", "agglomerate", "foveate-oracle", *tiny.HEAD_KINDS]
)
def test_a_half_precision_model_stays_finite(images, method):
    model = tiny.dense_model(torch.bfloat16)
    y = fewer(model, method)(images.bfloat16())
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


def test_the_batch_is_not_looked_at(model):  # eomt#73
    images = torch.cat([tiny.random_images(), 3 * tiny.random_images(seed=5)])
    reduced = fewer(model)
    together = reduced(images)
    for b in range(4):
        assert_close(reduced(images[b : b + 1])[0], together[b], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method", ["tome", "coverage", "evit", "agglomerate", "importance", "foveate", "spn"]
)
def test_one_graph_is_compiled_once(short_model, images, method):  # tomesd#40
    reduced = fewer(short_model, method, counts={0: 20}, fuse_last=0)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(reduced, fullgraph=True, backend="eager")
    with torch.no_grad():
        for shift in range(3):
            assert_close(compiled(images + shift), reduced(images + shift))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompiles"]


def test_nothing_is_remembered_between_calls(model, images):
    reduced = fewer(model, "foveate-oracle")
    first = reduced(images)
    reduced(2 * images + 1)
    assert torch.equal(reduced(images), first)
    assert isinstance(reduced, ReducedViT)
    assert build_steps(model, reduced.plan).keys() == {int(d) for d in reduced.steps}
