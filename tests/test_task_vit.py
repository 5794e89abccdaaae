"""Oracle: the gathered form against the masked one, and both against loops; the model."""

import pytest
import torch

from foveate.adaptive.full_vit import FullViT
from tests import tiny
from tests.reference_pruning import reference_output
from tests.tiny_pruned import apart, model_of, vit_of

DOUBLE = torch.float64
DENSE = ("timm-vit", "timm-dinov3", "timm-eva02", "hf-dinov2", "hf-dinov3")
CASES = [
    *[(network, task) for network in DENSE for task in ("cls", "saliency", "taps")],
    ("timm-vit-average", "logits"),
    ("timm-vit-siglip", "cls"),
    ("hf-siglip", "cls"),
    ("hf-dinov2-classifier", "logits"),
    ("hf-depth-anything", "depth"),
]
every_case = pytest.mark.parametrize(("network", "task"), CASES)
every_action = pytest.mark.parametrize("action", ["prune", "merge"])


def skip_unknown(network, selection):
    if selection == "class" and not model_of(network).backbone.has_class_token:
        pytest.skip("no class token")


# --- masked and gathered ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("selection", ["register", "class"])
@every_action
@every_case
@torch.no_grad()
def test_masked_is_gathered(network, task, action, selection, dtype):
    skip_unknown(network, selection)
    vit = vit_of(network, task, action=action, selection=selection, dtype=dtype)
    images = tiny.random_images(dtype=dtype)
    masked, gathered = vit(images, "frozen"), vit(images)
    assert apart(masked, gathered) < (1e-5 if dtype == torch.float32 else 1e-9)
    full = vit.model(images, task)
    assert gathered.shape == full.shape
    assert apart(gathered, full) > 1e-3


@pytest.mark.parametrize("recovery", ["learned", 0, 0.4])
@pytest.mark.parametrize(
    ("depths", "counts", "fuse_last"),
    [((0, 1, 2), (5, 0, 20), 0), ((2,), (30,), 0), ((0, 1), (4, 9), 1), ((1,), (34,), 1)],
)
@pytest.mark.parametrize("redundancy", [False, True])
@pytest.mark.parametrize("one_way", [False, True])
@every_action
@torch.no_grad()
def test_masked_is_gathered_at_any_depths(
    action, one_way, redundancy, depths, counts, fuse_last, recovery
):
    options = {"depths": depths, "fuse_last": fuse_last, "recovery": recovery,
               "redundancy": redundancy}  # fmt: skip
    vit = vit_of("hf-dinov3", "taps", counts, DOUBLE, action=action, one_way=one_way,
                 **options)  # fmt: skip
    images = tiny.random_images(dtype=DOUBLE)
    assert apart(vit(images, "frozen"), vit(images)) < 1e-8


@pytest.mark.parametrize("network", ["timm-dinov3", "hf-dinov2"])
@every_action
@torch.no_grad()
def test_masked_is_gathered_on_another_grid(network, action):
    vit = vit_of(network, "saliency", dtype=DOUBLE, grid=tiny.OTHER_GRID, action=action)
    images = tiny.random_images(tiny.OTHER_IMAGE, DOUBLE)
    assert apart(vit(images, "frozen"), vit(images)) < 1e-8


@every_action
@torch.no_grad()
def test_learned_counts_once_frozen_are_gathered(action):
    vit = vit_of("hf-dinov2", "taps", dtype=DOUBLE, action=action)
    images = tiny.random_images(dtype=DOUBLE)
    counts = vit.look(images, "learned").counts
    assert torch.equal(counts, counts[:1].expand(2, -1))
    assert counts[0].tolist() not in ([8.0, 9.0], [9.0, 8.0])  # neither frozen nor even
    assert counts.sum(1).tolist() == [17.0, 17.0]
    vit.controller.freeze(counts)
    assert apart(vit(images, "learned"), vit(images)) < 1e-8
    assert torch.equal(vit.train()(images), vit.eval()(images, "learned"))


# --- a second implementation --------------------------------------------------------------


@every_action
@pytest.mark.parametrize("selection", ["register", "class"])
@every_case
@torch.no_grad()
def test_gathered_is_what_loops_compute(network, task, selection, action):
    skip_unknown(network, selection)
    vit = vit_of(network, task, dtype=DOUBLE, selection=selection, action=action)
    images = tiny.random_images(dtype=DOUBLE)
    assert apart(vit(images), reference_output(vit, images)) < 1e-8


@pytest.mark.parametrize("recovery", ["learned", 0.4])
@pytest.mark.parametrize(
    ("depths", "counts", "fuse_last"),
    [((0, 1, 2), (11, 7, 9), 0), ((0, 1), (14, 12), 1), ((0,), (34,), 2)],
)
@pytest.mark.parametrize("redundancy", [False, True])
@pytest.mark.parametrize("one_way", [False, True])
@every_action
@torch.no_grad()
def test_chains_are_resolved_backwards(
    action, one_way, redundancy, depths, counts, fuse_last, recovery
):
    options = {"depths": depths, "fuse_last": fuse_last, "recovery": recovery,
               "redundancy": redundancy}  # fmt: skip
    vit = vit_of("timm-dinov3", "taps", counts, DOUBLE, action=action, one_way=one_way,
                 **options)  # fmt: skip
    images = tiny.random_images(dtype=DOUBLE)
    assert apart(vit(images), reference_output(vit, images)) < 1e-8


@pytest.mark.parametrize("stand_ins", [2, 5, 40])
@pytest.mark.parametrize(
    ("depths", "counts", "fuse_last"),
    [((0, 1, 2), (11, 7, 9), 0), ((0, 1), (14, 12), 1), ((0,), (34,), 2)],
)
@every_action
@torch.no_grad()
def test_several_stand_ins_blend_what_they_say(
    action, depths, counts, fuse_last, stand_ins
):
    options = {"depths": depths, "fuse_last": fuse_last, "stand_ins": stand_ins,
               "blend": 0.3}  # fmt: skip
    vit = vit_of("timm-dinov3", "taps", counts, DOUBLE, action=action, **options)
    images = tiny.random_images(dtype=DOUBLE)
    found = vit(images)
    assert apart(found, reference_output(vit, images)) < 1e-8
    assert apart(found, vit(images, "frozen")) < 1e-8
    alone = vit_of("timm-dinov3", "taps", counts, DOUBLE, action=action, depths=depths,
                   fuse_last=fuse_last)  # fmt: skip
    # Of the last case one patch is left, which has no one to blend with.
    assert (apart(found, alone(images)) > 1e-4) == (sum(counts) < 34)


@torch.no_grad()
def test_a_cold_blend_is_the_nearest_alone():
    images = tiny.random_images(dtype=DOUBLE)
    cold = vit_of("hf-dinov2", "taps", dtype=DOUBLE, stand_ins=3, blend=1e-6)
    alone = vit_of("hf-dinov2", "taps", dtype=DOUBLE)
    assert apart(cold(images), alone(images)) < 1e-8


# --- nothing removed ----------------------------------------------------------------------


@every_case
@torch.no_grad()
def test_one_way_and_nothing_removed_is_the_model(network, task):
    """Poolings of all tokens too: decoders do not meet the register."""
    vit = vit_of(network, task, (0, 0), DOUBLE, one_way=True)
    images = tiny.random_images(dtype=DOUBLE)
    assert apart(vit(images), vit.model(images, task)) < 1e-12
    assert apart(vit(images, "frozen"), vit.model(images, task)) < 1e-12


@torch.no_grad()
def test_the_class_token_and_nothing_removed_is_the_model_bit_for_bit(images):
    vit = vit_of("hf-dinov2", "saliency", (0, 0), selection="class")
    assert torch.equal(vit(images), vit.model(images, "saliency"))
    full = FullViT(vit.model, "saliency")
    assert torch.equal(full(images), vit.model(images, "saliency"))
