"""Oracle: constant maps, the whole image, boxes by proportion, depths known exactly."""

from itertools import pairwise

import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torch.testing import assert_close

from foveate.data.coco import Objects
from foveate.data.folder import ImageTransform
from foveate.data.labelled import Example, Target
from foveate.evaluation import scorers
from foveate.evaluation.scorers import (
    ClassScorer,
    DepthScorer,
    MaskScorer,
    find_scorer,
)
from foveate.evaluation.scorers_detection import ObjectScorer
from foveate.tasks.depth import Depth
from foveate.tasks.detection import Found
from tests import labelled, tiny

SIDE = 24
PLAIN = ImageTransform(SIDE, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def picture(width, height, seed=0):
    noise = tiny.random_images((height, width), seed=seed)[0].sigmoid()
    return Image.fromarray((255 * noise).byte().permute(1, 2, 0).numpy())


def once(num=1):
    return torch.ones(1, num, dtype=torch.float64)


def scores(scorer, *parts):
    found = scorer.gather(list(parts)).scores(once(len(parts)))
    return {name: float(value) for name, value in found.items()}


# --- windows ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(24, 24), (24, 25), (24, 61), (100, 24)])
def test_windows_cover_the_picture_and_stay_inside(size):
    covered = torch.zeros(size)
    windows = scorers.windows_of(size, SIDE)
    for top, left in windows:
        assert 0 <= top <= size[0] - SIDE
        assert 0 <= left <= size[1] - SIDE
        covered[top : top + SIDE, left : left + SIDE] += 1
    assert covered.min() >= 1
    assert len(windows) == 1 or len(set(windows)) == len(windows)
    starts = [max(window) for window in windows]
    assert all(b - a <= 2 * SIDE // 3 for a, b in pairwise(starts))


@pytest.mark.parametrize("size", [(70, 31), (31, 70), (12, 12)])
def test_constant_logits_are_constant_wherever_windows_overlap(size):
    scorer = MaskScorer(PLAIN, 3)
    shown = picture(*size)
    inputs = scorer.inputs(shown)
    assert inputs.shape[1:] == (3, SIDE, SIDE)
    logits = torch.tensor([0.1, 0.7, 0.3])[:, None, None].expand(3, SIDE, SIDE)
    merged = scorer._merge([logits] * len(inputs), shown)
    assert_close(merged, logits[:, :1, :1].expand_as(merged))
    mask = torch.ones(size[::-1], dtype=torch.int64)
    part = scorer.measure([logits] * len(inputs), Example(shown, Target(mask=mask)))
    assert scores(scorer, part)["miou"] == 1


def test_windows_are_parts_of_the_whole_and_go_back_to_their_places():
    """A network that copies its input gives the picture back."""
    scorer, shown = MaskScorer(PLAIN, 3), picture(70, 31)
    size = scorers.shorter_to(SIDE, shown.size)
    assert size == (SIDE, round(70 * SIDE / 31))
    inputs = scorer.inputs(shown)
    assert len(inputs) > 2
    assert_close(scorer._merge(list(inputs), shown), PLAIN.whole(shown, size))


def test_a_square_is_seen_as_a_whole(generator):
    scorer, shown = MaskScorer(PLAIN, 4), picture(40, 40)
    inputs = scorer.inputs(shown)
    assert torch.equal(inputs, PLAIN(shown)[None])
    logits = torch.randn(4, SIDE, SIDE, generator=generator)
    sized = interpolate(logits[None], (40, 40), mode="bilinear", align_corners=False)
    mask = sized[0].argmax(0)
    part = scorer.measure([logits], Example(shown, Target(mask=mask)))
    assert scores(scorer, part)["miou"] == 1
    mask[0, 0] = (mask[0, 0] + 1) % 4
    part = scorer.measure([logits], Example(shown, Target(mask=mask)))
    assert scores(scorer, part)["miou"] < 1


# --- classes ------------------------------------------------------------------------------


def test_the_class_of_the_central_square_counts():
    scorer, shown = ClassScorer(PLAIN, 5), picture(40, 30)
    assert torch.equal(scorer.inputs(shown), PLAIN(shown)[None])
    logits = torch.tensor([0.0, 3, 2, 1, -1])
    parts = [
        scorer.measure([logits], Example(shown, Target(label=k))) for k in (1, 2, None)
    ]
    assert parts[2] is None
    assert scores(scorer, *parts) == {"top1": 0.5, "top5": 1.0}
    with pytest.raises(ValueError, match="must have a picture with a class; got none"):
        scorer.gather([None])


def test_fewer_than_five_classes_have_no_top_5():
    part = ClassScorer(PLAIN, 3).measure(
        [torch.zeros(3)], Example(picture(24, 24), Target(label=0))
    )
    assert scores(ClassScorer(PLAIN, 3), part) == {"top1": 1.0}


# --- boxes --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(48, 36), (36, 48), (24, 24), (17, 24)])
def test_the_letterbox_holds_the_whole_picture_and_grey(size):
    shown, scorer = picture(*size), ObjectScorer(PLAIN, 3, ("box",))
    (image,) = scorer.inputs(shown)
    width, height = (round(n * SIDE / max(size)) for n in size)
    assert image.shape == (3, SIDE, SIDE)
    assert_close(image[:, :height, :width], PLAIN.whole(shown, (height, width)))
    assert not image[:, height:].any()
    assert not image[:, :, width:].any()


@pytest.mark.parametrize("size", [(48, 36), (30, 60), (24, 24), (53, 37)])
def test_boxes_go_back_to_the_picture(size):
    sides = [round(n * SIDE / max(size)) / n for n in size]
    scale = torch.tensor(sides * 2, dtype=torch.float64)
    boxes = torch.tensor([[1.0, 2.0, 9.0, 8.0], [0.0, 0.0, *size]], dtype=torch.float64)
    masks = torch.zeros(2, size[1], size[0], dtype=torch.bool)
    labels = torch.tensor([2, 0])
    objects = Objects(boxes, labels, torch.zeros(2).bool(), masks)
    found = Found(boxes * scale, labels, torch.tensor([0.9, 0.8]))
    scorer = ObjectScorer(PLAIN, 3, ("box",))
    back = scorer._as_picture(found, size)
    assert_close(back.boxes, boxes, atol=1e-12, rtol=0)
    example = Example(picture(*size), Target(objects=objects))
    part = scorer.measure([found], example)
    assert scores(scorer, part) == pytest.approx({
        "box_ap": 1,
        "box_ap50": 1,
        "box_ap75": 1,
    })


def test_boxes_end_at_the_border_of_the_picture():
    found = Found(torch.tensor([[3.0, 3, 24, 24]]), torch.tensor([0]), torch.ones(1))
    back = ObjectScorer(PLAIN, 1, ("box",))._as_picture(found, (48, 36))
    assert back.boxes.tolist() == [[6, 6, 48, 36]]


def test_masks_go_back_to_the_picture():
    square = torch.zeros(1, SIDE, SIDE, dtype=torch.bool)
    square[0, 3:9, 6:12] = True
    found = Found(torch.tensor([[6.0, 3, 12, 9]]), torch.tensor([0]), torch.ones(1), square)
    back = ObjectScorer(PLAIN, 1, ("box", "mask"))._as_picture(found, (48, 36))
    expected = torch.zeros(1, 36, 48, dtype=torch.bool)
    expected[0, 6:18, 12:24] = True
    assert (back.masks ^ expected).sum() <= 4  # corners are rounded by the interpolation
    nothing = Found(*(part[:0] for part in found))
    scorer = ObjectScorer(PLAIN, 1, ("box", "mask"))
    assert scorer._as_picture(nothing, (48, 36)).masks.shape == (0, 36, 48)
    objects = Objects(
        back.boxes.double(), torch.tensor([0]), torch.zeros(1).bool(), expected
    )
    example = Example(picture(48, 36), Target(objects=objects))
    parts = [scorer.measure([each], example) for each in (found, nothing)]
    assert scores(scorer, parts[0])["mask_ap50"] == pytest.approx(1)
    assert scores(scorer, parts[1])["mask_ap50"] == 0


# --- depth --------------------------------------------------------------------------------


def test_depth_sees_the_whole_picture_in_whole_patches():
    scorer = DepthScorer(PLAIN, (4, 4), relative=False)
    (image,) = scorer.inputs(picture(50, 30))
    assert image.shape == (3, 24, 40)


@pytest.fixture
def rooms(generator):
    depth = 1 + 4 * torch.rand(30, 50, generator=generator)
    return Target(depth=depth, valid=torch.rand(30, 50, generator=generator) > 0.3)


def test_metric_depth_is_taken_as_it_is(rooms):
    scorer = DepthScorer(PLAIN, (4, 4), relative=False)
    example = Example(picture(50, 30), rooms)
    exact, twice = (scorer.measure([k * rooms.depth], example) for k in (1, 2))
    assert scores(scorer, exact)["abs_rel"] == pytest.approx(0, abs=1e-6)
    assert scores(scorer, exact)["delta1"] == 1
    assert scores(scorer, twice)["abs_rel"] > 0.5


def test_disparity_is_aligned_image_by_image(rooms):
    scorer = DepthScorer(PLAIN, (4, 4), relative=True)
    example = Example(picture(50, 30), rooms)
    for scale, shift in ((3.0, 0.5), (70.0, 2.0)):
        part = scorer.measure([scale / rooms.depth + shift], example)
        assert scores(scorer, part)["abs_rel"] == pytest.approx(0, abs=1e-5)


# --- which, and what is refused -----------------------------------------------------------


def test_every_kind_finds_its_protocol():
    model, data = labelled.model_with_heads(), labelled.scenes(2)
    kinds = {
        name: find_scorer(model.task(name), PLAIN, data, (4, 4)) for name in labelled.HEADS
    }
    assert kinds["label"] == ClassScorer(PLAIN, 3)
    assert kinds["mask"] == MaskScorer(PLAIN, 4)
    assert kinds["objects"] == ObjectScorer(PLAIN, 3, ("box", "mask"))
    model.task("objects").with_masks = False
    found = find_scorer(model.task("objects"), PLAIN, data, (4, 4))
    assert found == ObjectScorer(PLAIN, 3, ("box",))
    depth = Depth(
        torch.nn.Identity(),
        torch.nn.Identity(),
        (1,),
        normalised=True,
        head_knows_grid=True,
    )
    with pytest.raises(ValueError, match="data must have labels for depth"):
        find_scorer(depth, PLAIN, data, (4, 4))


@pytest.mark.parametrize(
    ("scorer", "outputs", "message"),
    [
        (MaskScorer(PLAIN, 3), torch.zeros(3, SIDE, SIDE), "must have a mask for every"),
        (ObjectScorer(PLAIN, 3, ("box",)), None, "must list objects for every picture"),
        (DepthScorer(PLAIN, (4, 4), False), torch.zeros(4, 4), "must have depth for every"),
    ],
)
def test_a_picture_without_its_label_is_refused(scorer, outputs, message):
    with pytest.raises(ValueError, match=message):
        scorer.measure([outputs], Example(picture(24, 24), Target(label=0)))


@pytest.mark.parametrize(
    ("scorer", "target", "shape"),
    [
        (ClassScorer(PLAIN, 4), Target(label=0), (3,)),
        (
            MaskScorer(PLAIN, 4),
            Target(mask=torch.zeros(24, 24).long()),
            (3, SIDE, SIDE),
        ),
    ],
)
def test_a_head_for_other_classes_is_refused(scorer, target, shape):
    with pytest.raises(ValueError, match="the 3 classes of the task's head; it has 4"):
        scorer.measure([torch.zeros(shape)], Example(picture(24, 24), target))
