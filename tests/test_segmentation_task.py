"""Oracle: the loss pixel by pixel, a convolution as a matrix, patches by their place."""

import pytest
import torch
from torch.nn.functional import interpolate
from torch.testing import assert_close

from foveate.data.labelled import IGNORED, Target
from foveate.tasks.segmentation import (
    LinearSegmenter,
    MultiScaleSegmenter,
    Segmentation,
    as_map,
)
from foveate.tokens import Layout
from tests import labelled, tiny

LAYOUT = Layout(1, (3, 5), (12, 20))


def test_a_map_has_every_patch_in_its_place():
    x = torch.arange(2 * 16 * 2).reshape(2, 16, 2)
    found = as_map(x, LAYOUT)
    assert found.shape == (2, 2, 3, 5)
    for row, column in ((0, 0), (1, 3), (2, 4)):
        assert torch.equal(found[:, :, row, column], x[:, 1 + 5 * row + column])


def test_the_linear_head_is_a_matrix_on_every_patch(generator):
    head = tiny.randomise(LinearSegmenter(4, 2, 3))
    maps = [torch.randn(2, 4, 3, 5, generator=generator) for _ in range(2)]
    joined = torch.cat(maps, 1).movedim(1, -1)  # (B, rows, columns, 8)
    norm, matrix = head.norm, head.classifier.weight[:, :, 0, 0]
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    expected = ((joined - norm.running_mean) * scale + norm.bias) @ matrix.T
    expected = expected + head.classifier.bias
    assert_close(head(maps).movedim(1, -1), expected)


def test_the_other_head_refines_to_a_quarter_of_a_patch(generator):
    head = tiny.randomise(MultiScaleSegmenter(4, 2, 3, width=8))
    maps = [torch.randn(2, 4, 3, 5, generator=generator) for _ in range(2)]
    found = head(maps)
    assert found.shape == (2, 3, 12, 20)
    assert not torch.equal(head([maps[0], maps[0]]), found)
    assert not torch.equal(head([maps[1], maps[1]]), found)


def test_logits_have_the_size_of_the_image():
    model, images = labelled.model_with_heads(), tiny.random_images((24, 32))
    task = model.task("mask")
    assert task.taps(tiny.DEPTH) == (1, 3)
    output = model(images, "mask")
    assert output.shape == (2, 4, 24, 32)
    features = [torch.randn(2, 16, tiny.WIDTH) for _ in range(2)]
    maps = [as_map(model.backbone.finish(x), LAYOUT) for x in features]
    expected = interpolate(
        task.decoder(maps), (12, 20), mode="bilinear", align_corners=False
    )
    assert torch.equal(task.decode(model.backbone, tuple(features), LAYOUT), expected)
    assert len(task.predict(output, LAYOUT)) == 2


def test_without_depths_the_end_is_read():
    assert Segmentation(LinearSegmenter(4, 1, 3)).taps(7) == (7,)


@pytest.fixture
def masks():
    masks = torch.randint(0, 3, (2, 4, 5), generator=torch.Generator().manual_seed(3))
    masks[0, :2] = IGNORED
    return masks


def test_the_loss_is_a_mean_over_pixels_of_all_images(masks, generator):
    logits = torch.randn(2, 3, 4, 5, generator=generator)
    task = Segmentation(LinearSegmenter(4, 1, 3))
    losses = [
        -logits[b, :, i, j].log_softmax(0)[masks[b, i, j]]
        for b in range(2)
        for i in range(4)
        for j in range(5)
        if masks[b, i, j] != IGNORED
    ]
    found = task.loss(logits, [Target(mask=m) for m in masks], LAYOUT)
    assert len(losses) == 30
    assert_close(found, torch.stack(losses).mean())


def test_the_loss_where_nothing_counts_is_zero(masks):
    task = Segmentation(LinearSegmenter(4, 1, 3))
    targets = [Target(mask=torch.full((4, 5), IGNORED))] * 2
    assert float(task.loss(torch.randn(2, 3, 4, 5), targets, LAYOUT)) == 0


def test_targets_need_a_mask():
    task = Segmentation(LinearSegmenter(4, 1, 3))
    with pytest.raises(ValueError, match="must have a mask for segmentation"):
        task.loss(torch.randn(1, 3, 4, 5), [Target(label=1)], LAYOUT)
