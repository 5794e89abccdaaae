"""Oracle: the full model, and invariants that every method must keep on every network."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from foveate.forward import Block
from foveate.models import Model, open_model
from foveate.reduction.presets import PRESETS, build_steps, plan_for
from foveate.reduction.recover import recover
from foveate.reduction.reduced_vit import reduce
from foveate.reduction.resolution import RESOLUTION
from foveate.tasks.saliency import Saliency, SaliencyDecoder
from tests import tiny

METHODS = [name for name in PRESETS if name != RESOLUTION]
MERGING = {name for name in METHODS if PRESETS[name].proportional} - {"diffrate"} | {"evit"}
COUNTS = {0: 24, 1: 18}

every_method = pytest.mark.parametrize("method", METHODS)
every_network = pytest.mark.parametrize("network", tiny.BACKBONES)
with_heads = ("hf-dinov2-classifier", "hf-vit-classifier", "hf-depth-anything")
every_task = pytest.mark.parametrize("network", [*tiny.BACKBONES, *with_heads])


@cache
def model_of(network):
    """The network's own tasks and a dense one."""
    opened = open_model(tiny.NETWORKS[network]())
    decoder = tiny.randomise(SaliencyDecoder((tiny.WIDTH, 16, 8, 8)))
    tasks = {**opened.tasks, "saliency": Saliency(decoder)}
    return Model(network, opened.backbone, tasks, opened.transform).eval()


def planned(model, method, task, counts, **settings):
    """A plan; oracles with two probes, heads as they are drawn."""
    options = tiny.options_of(method, model.name, task)
    return plan_for(model, method, task, tiny.GRID, counts, options=options, **settings)


@cache
def is_refused_without_class_token(method):
    try:
        planned(model_of("hf-siglip"), method, "cls", COUNTS)
    except ValueError:
        return True
    return False


def skip_without_class_token(model, method):
    """Methods that read a class token say so as soon as they are planned."""
    if not model.backbone.has_class_token and is_refused_without_class_token(method):
        with pytest.raises(
            ValueError, match=f"method '{method}' .* with a class token; got"
        ):
            planned(model, method, "cls", COUNTS)
        pytest.skip("reads a class token")


def fingerprint(model):
    """Everything that an edit of a model would change."""
    state = [(name, t.data_ptr(), t._version) for name, t in model.state_dict().items()]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    parts = [
        (name, type(part), part.training, [len(getattr(part, h)) for h in hooks])
        for name, part in model.named_modules()
    ]
    return state, parts


@every_task
def test_zero_removal_is_the_model_bit_for_bit(network):  # ToMe#1, silent errors at r = 0
    model, images = model_of(network), tiny.random_images()
    for task in model.tasks:
        plan = planned(model, "tome", task, {0: 35, 1: 35})
        assert torch.equal(reduce(model, plan)(images), model(images, task))


@every_method
def test_zero_removal_takes_no_step(method):
    model = model_of("hf-dinov2")
    assert build_steps(model, planned(model, method, "cls", {0: 35, 1: 35})) == {}


@every_task
@every_method
def test_outputs(network, method):
    """Right shape, same bits again, no look at the batch, the model as it was."""
    model, images = model_of(network), tiny.random_images()
    skip_without_class_token(model, method)
    before = fingerprint(model)
    for task in model.tasks:
        reduced = reduce(model, planned(model, method, task, COUNTS))
        with torch.no_grad():
            y, full = reduced(images), model(images, task)
            alone = reduced(images[1:])
            assert torch.equal(reduced(images), y)
        assert y.shape == full.shape
        assert 1e-4 < (y - full).norm() / full.norm() < 1
        assert_close(alone[0], y[1], rtol=1e-3, atol=1e-4)
    assert fingerprint(model) == before


@every_network
@every_method
def test_tokens(network, method):
    """Exact counts, whole sizes, prefix tokens as they were, the order of the grid."""
    model, images = model_of(network), tiny.random_images()
    skip_without_class_token(model, method)
    reduced = reduce(model, planned(model, method, "saliency", COUNTS))
    backbone = model.backbone
    with torch.no_grad():
        kept = reduced.tokens_at(images, (0, 1, 2, 3))
        heads = backbone.project(0, kept[0])
        tokens = backbone.attend(0, kept[0], heads)
        (step,) = reduced.steps["0"]
        after = step(tokens, Block(backbone, 0, heads, {}, kept[0]))
    num_prefix = tokens.layout.num_prefix
    assert [kept[d].x.shape[1] - num_prefix for d in kept] == [35, 24, 18, 35]
    assert torch.equal(after.prefix, tokens.prefix)
    assert after.num_patches == 24
    assert after.stand_in.min() >= -1
    assert after.stand_in.max() < 24
    if method in MERGING:
        assert torch.equal(kept[2].size.sum(1), torch.full((2,), 35.0))
    # The whole offset restores every patch, and in its place.
    assert_close(recover(after).patches, tokens.patches, rtol=1e-4, atol=1e-5)
    if tokens.position is not None:
        rows = after.position[:, :, None] == tokens.position[:, None]
        place = rows.all(-1).byte().argmax(-1)  # whose rotary position each patch has
        assert (place.diff(dim=1) > 0).all()
        assert torch.equal(kept[3].position, tokens.position)


def test_the_guarantees_name_tests_that_exist():
    here = Path(__file__).parent
    named = re.findall(
        r"`(test_\w+\.py)::(test_\w+)`", (here.parent / "docs/peers.md").read_text()
    )
    assert len(named) > 50
    for file, test in named:
        assert f"def {test}(" in (here / file).read_text(), f"{file}::{test}"
