"""Oracle: the full network, and the invariants that every method keeps on every network."""

import pytest
import torch
from torch.testing import assert_close

from foveate.forward import Block
from foveate.models import open_model
from foveate.reduction.recover import recover
from foveate.reduction.reduced_vit import reduce
from tests import tiny_vggt
from tests.test_conformance import COUNTS, MERGING, METHODS, fingerprint, planned

CASES = [(name, "camera") for name in METHODS] + [("tome", "depth"), ("freeze", "depth")]


@pytest.fixture(scope="module")
def single_model():
    return open_model(tiny_vggt.vggt())


@pytest.mark.parametrize("task", ["camera", "depth"])
def test_zero_removal_is_the_model_bit_for_bit(single_model, task):
    images = tiny_vggt.frames()
    plan = planned(single_model, "tome", task, {0: 35, 1: 35})
    assert torch.equal(reduce(single_model, plan)(images), single_model(images, task))


@pytest.mark.parametrize(("method", "task"), CASES)
def test_outputs_of_every_method(single_model, method, task):
    images, before = tiny_vggt.frames(), fingerprint(single_model)
    reduced = reduce(single_model, planned(single_model, method, task, COUNTS))
    with torch.no_grad():
        y, full = reduced(images), single_model(images, task)
        alone = reduced(images[1:])
        assert torch.equal(reduced(images), y)
    assert y.shape == full.shape
    assert 1e-5 < (y - full).norm() / full.norm() < 1
    assert_close(alone[0], y[1], rtol=1e-3, atol=1e-4)
    assert fingerprint(single_model) == before


@pytest.mark.parametrize("method", METHODS)
def test_tokens_of_every_method(single_model, method):
    images, backbone = tiny_vggt.frames(), single_model.backbone
    reduced = reduce(single_model, planned(single_model, method, "depth", COUNTS))
    with torch.no_grad():
        kept = reduced.tokens_at(images, (0, 1, 2, 6))
        heads = backbone.project(0, kept[0])
        tokens = backbone.attend(0, kept[0], heads)
        after = reduced.steps["0"][0](tokens, Block(backbone, 0, heads, {}, kept[0]))
    assert [k.num_patches for k in kept.values()] == [35, 24, 18, 35]
    assert torch.equal(after.prefix, tokens.prefix)
    if method in MERGING:
        assert torch.equal(kept[2].size.sum(1), torch.full((2,), 35.0))
    assert_close(recover(after).patches, tokens.patches, rtol=1e-4, atol=1e-5)
    rows = (after.position[:, :, None] == tokens.position[:, None]).all(-1)
    assert (rows.byte().argmax(-1).diff(dim=1) > 0).all()
    assert torch.equal(kept[6].position, tokens.position)
