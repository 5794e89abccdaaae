"""Oracle: sizes counted on the maps, boxes in closed form, objects that must be found."""

import pytest
import torch
from torch.testing import assert_close
from torchvision.ops import box_iou

from foveate.data.coco import Objects
from foveate.data.labelled import Target
from foveate.forward import run
from foveate.tasks.detection import Detection, SimpleFeaturePyramid
from foveate.tokens import Layout
from tests import labelled, tiny

ODD = Layout(1, (3, 5), (42, 70))  # patches of 14 pixels
SMALL = {"width": 32, "hidden": 32, "proposals": 20}


def objects(boxes, labels=None, crowd=None, size=(42, 70)):
    boxes = torch.tensor(boxes, dtype=torch.float64).view(-1, 4)
    num = len(boxes)
    masks = torch.zeros(num, *size, dtype=torch.bool)
    for mask, box in zip(masks, boxes.int().tolist(), strict=True):
        mask[box[1] : box[3], box[0] : box[2]] = True
    kinds = torch.tensor(labels or [0] * num, dtype=torch.int64)
    return Objects(boxes, kinds, torch.tensor(crowd or [False] * num).bool(), masks)


def detector(num_classes=3, **settings):
    torch.manual_seed(0)
    return Detection(tiny.WIDTH, num_classes, **{**SMALL, **settings})


@pytest.mark.parametrize("grid", [(5, 7), (6, 4), (1, 3)])
@pytest.mark.parametrize("scales", [(4, 2, 1, 0.5), (2, 1, 0.5), (1,)])
def test_levels_have_the_sizes_they_say(grid, scales):
    pyramid = SimpleFeaturePyramid(8, 8, scales)
    maps = pyramid(torch.randn(2, 8, *grid))
    assert [tuple(level.shape[2:]) for level in maps] == pyramid.sizes(grid)
    even = [n + n % 2 for n in grid]
    assert pyramid.sizes(grid) == [tuple(int(n * s) for n in even) for s in scales]


@pytest.mark.parametrize("scales", [(), (3,), (1, 2), (0.25,)])
def test_other_levels_are_refused(scales):
    with pytest.raises(ValueError, match=r"scales must descend and be from 4, 2, 1"):
        SimpleFeaturePyramid(8, 8, scales)


def test_padding_is_not_seen():
    """A grid of odd sides has the same levels as one with a row and column of zeros."""
    pyramid = SimpleFeaturePyramid(8, 8, (2, 1, 0.5)).eval()
    x = torch.randn(1, 8, 4, 6)
    x[:, :, -1], x[:, :, :, -1] = 0, 0
    for mine, padded in zip(pyramid(x[:, :, :3, :5]), pyramid(x), strict=True):
        assert torch.equal(mine, padded)


BOXES = [[3.0, 4.0, 33.0, 25.0], [10.0, 0.0, 70.0, 42.0]]


def test_boxes_in_image_pixels_come_back_in_image_pixels(monkeypatch):
    """Inside, a patch is 16 pixels wide; outside, it is 14."""
    task = detector(with_masks=False).eval()
    output = task.decode(Still(), (torch.randn(1, 16, tiny.WIDTH),), ODD)
    truth = task._truth(Target(objects=objects(BOXES, [2, 0])), ODD, output)
    assert_close(truth["boxes"].double(), torch.tensor(BOXES).double() * 16 / 14)
    assert truth["labels"].tolist() == [3, 1]  # 0 is what is no object
    inside = {**truth, "scores": torch.tensor([0.9, 0.8])}
    seen = {}

    def proposed(images, maps):
        seen["sizes"], seen["maps"] = images.image_sizes, maps
        return [truth["boxes"]], {}

    monkeypatch.setattr(task, "rpn", torch.nn.Identity())
    monkeypatch.setattr(task.rpn, "forward", proposed)
    monkeypatch.setattr(task.roi_heads, "forward", lambda *_: ([inside], {}))
    (found,) = task.predict(output, ODD)
    assert_close(found.boxes.double(), torch.tensor(BOXES).double())
    assert found.labels.tolist() == [2, 0]
    assert found.masks is None
    assert seen["sizes"] == [(48, 80)]
    assert [tuple(m.shape[2:]) for m in seen["maps"].values()] == [(8, 12), (4, 6), (2, 3)]


class Still:
    """A backbone whose final norm does nothing."""

    def finish(self, x):
        return x


def features(model, data):
    images = torch.stack([model.transform(data[i].picture) for i in range(len(data))])
    tokens = model.backbone.embed(images)
    return run(model.backbone, tokens, 0, tiny.DEPTH)[0].x, tokens.layout


def test_a_detector_learns_two_images_by_heart():
    model, data = labelled.bare_model(), labelled.scenes(2, seed=7)
    task = detector(proposals=50).train()
    x, layout = features(model, data)
    targets = [data[i].target for i in range(2)]
    optimizer = torch.optim.AdamW(task.parameters(), 5e-3)
    losses = []
    for step in range(80):
        torch.manual_seed(step)
        loss = task.loss(task.decode(model.backbone, (x,), layout), targets, layout)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    task.eval()
    with torch.no_grad():
        output = task.decode(model.backbone, (x,), layout)
    for found, target in zip(task.predict(output, layout), targets, strict=True):
        assert (found.scores.diff() <= 0).all()
        assert found.masks.shape == (len(found.labels), 32, 32)
        sure = found.scores > 0.5
        for box, label, mask in zip(*target_parts(target), strict=True):
            own = sure & (found.labels == label)
            overlap = box_iou(box[None].float(), found.boxes[own])
            assert overlap.max() > 0.5
            best = found.masks[own][overlap.argmax()]
            assert (best & mask).sum() / (best | mask).sum() > 0.5


def target_parts(target):
    return target.objects.boxes, target.objects.labels, target.objects.masks


@pytest.fixture
def output():
    return detector().decode(Still(), (torch.randn(2, 16, tiny.WIDTH),), ODD)


def loss_of(task, output, *found):
    torch.manual_seed(4)
    return task.train().loss(output, [Target(objects=each) for each in found], ODD)


def test_images_without_objects_have_a_loss(output):
    task, empty = detector(), objects([])
    loss = loss_of(task, output, empty, empty)
    assert loss.isfinite()
    loss.backward()
    assert task.rpn.head.cls_logits.weight.grad.abs().sum() > 0
    assert not torch.equal(loss_of(task, output, empty, objects(BOXES)), loss)


def test_crowds_and_boxes_without_area_are_left_out(output):
    task, plain = detector(), objects(BOXES[:1], [1])
    flat = [5.0, 5.0, 5.0, 9.0]
    more = objects([*BOXES, flat], [1, 2, 0], [False, True, False])
    assert torch.equal(
        loss_of(task, output, plain, more), loss_of(task, output, *[plain] * 2)
    )
    truth = task._truth(Target(objects=more), ODD, output)
    assert truth["masks"].shape == (1, 48, 80)
    assert truth["masks"].dtype == torch.uint8


def test_what_cannot_be_learned_from_is_refused(output):
    task = detector()
    with pytest.raises(ValueError, match="must have objects for detection"):
        task.train().loss(output, [Target(label=0)] * 2, ODD)
    with pytest.raises(ValueError, match="must be in training mode for its loss"):
        task.eval().loss(output, [Target(objects=objects(BOXES))] * 2, ODD)
