"""Oracle: the pixels of flat blocks, which image, mask and boxes must agree on."""

import pytest
import torch
from torch.nn.functional import max_pool2d
from torchvision.ops import masks_to_boxes

from foveate.data.folder import ImageTransform
from foveate.training.views import Views
from tests import labelled

PLAIN = ImageTransform(32, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
AUGMENTED = {"augment": True, "scale": (0.35, 1.0)}


def views(num=0, side=32, num_scenes=4, **options):
    return Views(labelled.scenes(num_scenes, side), PLAIN, num, **options)


def same(first, second):
    objects = zip(first.target.objects, second.target.objects, strict=True)
    return torch.equal(first.image, second.image) and all(
        torch.equal(a, b) for a, b in objects
    )


def test_a_picture_of_that_size_passes_unchanged():
    data = labelled.scenes(4)
    for index in range(4):
        view = views()[index]
        assert torch.equal(view.image, PLAIN(data[index].picture))
        assert torch.equal(view.target.mask, data[index].target.mask)
        assert view.target.label == data[index].target.label


def test_another_size_is_resized_whole():
    data = labelled.scenes(4, side=48)
    for index in range(4):
        view, target = views(side=48)[index], data[index].target
        assert view.image.shape == (3, 32, 32)
        assert view.target.mask.shape == (32, 32)
        expected = target.objects.boxes * 32 / 48
        assert torch.allclose(view.target.objects.boxes.double(), expected, atol=1e-4)
        assert view.target.objects.masks.shape[1:] == (32, 32)
        assert view.target.objects.masks.dtype == torch.bool


def test_image_mask_and_boxes_are_moved_alike():
    """Blocks are flat and pure, so that a pixel's colour gives away its class."""
    colours = torch.tensor([*labelled.COLOURS.values()]) / 255
    checked = 0
    for index in range(40):
        view = views(40, num_scenes=8, **AUGMENTED)[index]
        distance = (view.image[None] - colours[:, :, None, None]).abs().amax(1)
        for k in range(3):
            # The edge may be off by a pixel: images are smooth, masks are not.
            pure = max_pool2d(distance[k][None], 3, 1, 1)[0] < 0.02
            assert (view.target.mask[pure] == k + 1).all()
            checked += int(pure.sum())
        objects = view.target.objects
        for box, mask, label in zip(
            objects.boxes, objects.masks, objects.labels, strict=True
        ):
            assert (view.target.mask[mask] == label + 1).all()
            tight = masks_to_boxes(mask[None])[0] + torch.tensor([0, 0, 1, 1])
            assert box.tolist() == tight.tolist()
    assert checked > 2000


def test_objects_that_are_not_seen_are_left_out():
    counts = [
        len(
            views(60, num_scenes=8, augment=True, scale=(0.1, 0.2))[i].target.objects.labels
        )
        for i in range(60)
    ]
    assert 0 in counts
    assert max(counts) > 0


def test_views_follow_from_seed_and_index():
    first, again = views(9, **AUGMENTED), views(9, **AUGMENTED)
    assert same(first[7], again[7])
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    assert same(first[7], again[7])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not same(first[3], first[7])  # the same picture, seen twice
    assert not same(views(9, seed=1, **AUGMENTED)[7], first[7])


def test_pictures_come_again_and_again():
    few = views(9)
    assert len(few) == 9
    assert same(few[1], few[5])
    assert len(views()) == 4
    with pytest.raises(IndexError, match="index must be from 0 to 8; got 9"):
        few[9]


def test_labels_of_other_kinds_are_left_as_they_are():
    from dataclasses import replace

    data = labelled.scenes(2, side=48)
    bare = replace(
        data,
        read=lambda s: data.read(s)._replace(
            target=replace(data.read(s).target, mask=None, objects=None)
        ),
    )
    view = Views(bare, PLAIN, augment=True)[1]
    assert view.image.shape == (3, 32, 32)
    assert (view.target.mask, view.target.objects) == (None, None)
    assert view.target.label == data[1].target.label
