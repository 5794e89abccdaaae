"""Oracle: the padded form against the masked one, one image against its batch, loops."""

import pytest
import torch

from foveate.adaptive.padded import pack
from foveate.reduction.masked import remember
from foveate.reduction.recover import recover
from foveate.tokens import Layout, Tokens
from tests import tiny
from tests.test_task_vit import CASES, skip_unknown
from tests.tiny_pruned import apart, vit_of

DOUBLE = torch.float64


def batch_of_six():
    return torch.cat([tiny.random_images(dtype=DOUBLE, seed=s) for s in range(3)])


def lively_vit_of(*args, **changes):
    """One whose images get different counts."""
    vit = vit_of(*args, **changes)
    with torch.no_grad():
        vit.controller.allocate.weight.mul_(5)
    return vit


@pytest.mark.parametrize("selection", ["register", "class"])
@pytest.mark.parametrize("action", ["prune", "merge"])
@pytest.mark.parametrize(("network", "task"), CASES)
@torch.no_grad()
def test_padded_is_masked(network, task, action, selection):
    skip_unknown(network, selection)
    vit = lively_vit_of(network, task, dtype=DOUBLE, action=action, selection=selection)
    images = batch_of_six()
    assert apart(vit(images, "padded"), vit(images, "images")) < 1e-8


@pytest.mark.parametrize("stand_ins", [1, 3])
@pytest.mark.parametrize(
    ("depths", "counts", "fuse_last"),
    [((0, 1, 2), (8, 7, 9), 0), ((0, 1), (14, 12), 1), ((1,), (20,), 1)],
)
@pytest.mark.parametrize("redundancy", [False, True])
@pytest.mark.parametrize("action", ["prune", "merge"])
@torch.no_grad()
def test_padded_is_masked_at_any_depths(
    action, redundancy, depths, counts, fuse_last, stand_ins
):
    options = {"fuse_last": fuse_last, "redundancy": redundancy, "stand_ins": stand_ins}
    vit = lively_vit_of("timm-dinov3", "taps", counts, DOUBLE, action=action,
                        depths=depths, **options)  # fmt: skip
    images = batch_of_six()
    assert apart(vit(images, "padded"), vit(images, "images")) < 1e-8


@pytest.mark.parametrize("action", ["prune", "merge"])
@torch.no_grad()
def test_padding_is_never_read(action):
    """An image in a batch is the image alone by a static model with the counts it got."""
    vit = lively_vit_of("hf-dinov2", "taps", dtype=DOUBLE, action=action)
    images = batch_of_six()
    counts = vit.look(images, "images").counts.long().tolist()
    assert len({count for count, _ in counts}) > 2
    together = vit(images, "padded")
    weights = vit.controller.state_dict()
    del weights["counts"]
    for image in range(len(images)):
        alone = vit_of("hf-dinov2", "taps", counts[image], DOUBLE, action=action)
        alone.controller.load_state_dict(weights, strict=False)
        assert apart(together[image], alone(images[image][None])[0]) < 1e-8


@torch.no_grad()
def test_a_static_allocation_needs_no_padding(images):
    vit = vit_of("hf-dinov2", "taps", allocation="static")
    assert apart(vit(images, "padded"), vit(images)) < 1e-5


@torch.no_grad()
def test_pack_keeps_what_stays_in_order_and_what_is_read_back():
    """Twelve patches of which two images keep five and three."""
    layout = Layout(1, (3, 4), (42, 56))
    x = torch.arange(2 * 13 * 2, dtype=DOUBLE).view(2, 13, 2)
    position = torch.arange(24, dtype=DOUBLE).view(2, 12, 1)
    tokens = Tokens(x, layout).with_(position=position)
    stays = torch.zeros(2, 12, dtype=torch.bool)
    stays[0, [0, 3, 4, 8, 11]] = True
    stays[1, [2, 5, 6]] = True
    size = torch.where(stays, 1.0, 1e-9).to(DOUBLE)
    speaker = torch.where(stays, torch.arange(12), torch.tensor([[3], [5]]))
    masked = remember(tokens, tokens.with_(size=size), speaker[..., None], 0.25)
    packed = pack(masked, stays)
    assert packed.x.shape == (2, 6, 2)
    assert torch.equal(packed.patches[0], tokens.patches[0, [0, 3, 4, 8, 11]])
    assert torch.equal(packed.patches[1, :3], tokens.patches[1, [2, 5, 6]])
    assert torch.equal(packed.position[0, :, 0], position[0, [0, 3, 4, 8, 11], 0])
    assert (packed.sizes()[1, 3:] < 0.5).all()
    found, patches = recover(packed).patches, tokens.patches
    for image in range(2):
        for patch in range(12):
            lead = patches[image, speaker[image, patch]]
            back = lead + 0.25 * (patches[image, patch] - lead)
            assert torch.allclose(found[image, patch], back, atol=1e-12, rtol=0)
    assert torch.equal(recover(packed).position, position)
