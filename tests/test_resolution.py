"""Oracle: torchvision's resizing around the full model; multiply-adds counted by hand."""

import pytest
import torch
from torch.testing import assert_close
from torchvision.transforms.functional import InterpolationMode, resize

from foveate.reduction.macs import encoder_macs
from foveate.reduction.plan import Plan
from foveate.reduction.presets import build_steps, plan_for
from foveate.reduction.reduced_vit import reduce
from foveate.reduction.resolution import LowerResolution, coarser_grid
from tests import tiny

GRID = tiny.GRID


def resolution(task, keep, grid=GRID):
    return Plan("resolution", task, grid, ((0, keep),), place="before", fuse_last=0)


def at_most(keep):
    return lambda grid: grid[0] * grid[1] <= keep


@pytest.mark.parametrize(
    ("grid", "keep", "expected"),
    [
        ((16, 16), 256, (16, 16)),
        ((16, 16), 255, (15, 15)),
        ((16, 16), 128, (11, 11)),
        ((5, 7), 34, (4, 6)),
        ((5, 7), 23, (4, 5)),  # 4 / 5 of 7 is 5.6, but 5 / 7 of 5 is 3.6
        ((5, 7), 1, (1, 1)),
        ((2, 30), 50, (2, 25)),
    ],
)
def test_grid_is_the_largest_that_fits(grid, keep, expected):
    assert coarser_grid(grid, at_most(keep)) == expected


def test_refuses_a_budget_below_one_patch():
    with pytest.raises(ValueError, match=r"as coarse as \(1, 1\); got less"):
        coarser_grid(GRID, at_most(0))


@pytest.mark.parametrize("task", ["cls", "saliency"])
def test_all_patches_are_the_full_model(dense_model, images, task):
    model = reduce(dense_model, resolution(task, 35))
    assert_close(model(images), dense_model(images, task))


@pytest.mark.parametrize("task", ["cls", "saliency"])
def test_output_is_that_of_smaller_images(dense_model, images, task):
    model = reduce(dense_model, resolution(task, 25))
    small = resize(images, [16, 24], InterpolationMode.BICUBIC, antialias=True)
    expected = dense_model(small, task)
    if task == "saliency":
        expected = resize(expected, [20, 28], InterpolationMode.BILINEAR)
    assert model.grid == (4, 6)
    assert_close(model(images), expected)


def test_maps_without_channels_are_resized_too():
    from foveate.models import open_model

    model = open_model(tiny.hf_depth_anything())
    images = tiny.random_images((24, 24))
    plan = resolution("depth", 20, grid=(6, 6))
    found = reduce(model, plan)(images)
    small = resize(images, [16, 16], InterpolationMode.BICUBIC, antialias=True)
    full = model(images, "depth")
    expected = resize(model(small, "depth"), list(full.shape[1:]), antialias=False)
    assert found.shape == full.shape
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("counts", "settings", "task"),
    [
        ({1: 20, 2: 9}, {}, "cls"),
        ({1: 12}, {"place": "before"}, "cls"),
        ({1: 12}, {}, "saliency"),
        ({0: 26}, {"place": "before", "fuse_last": 0}, "saliency"),
    ],
)
def test_plan_costs_at_most_what_the_schedule_does(dense_model, counts, settings, task):
    plan = plan_for(dense_model, "resolution", task, GRID, counts, **settings)
    backbone = dense_model.backbone

    def macs(grid):
        tokens = 1 + grid[0] * grid[1]
        return encoder_macs(backbone, [(tokens, tokens)] * 3)

    place, pairs, now = settings.get("place", "between"), [], 35
    for depth in range(3):
        if task == "saliency" and depth == 3 - settings.get("fuse_last", 1):
            now = 35
        before, now = now, counts.get(depth, now)
        pairs.append((1 + (now if place == "before" else before), 1 + now))
    budget = encoder_macs(backbone, pairs)
    model = reduce(dense_model, plan)
    grids = [(1, 1), (1, 2), (2, 3), (3, 4), (4, 5), (4, 6), (5, 7)]  # of this aspect
    assert plan.schedule == ((0, model.grid[0] * model.grid[1]),)
    assert (plan.place, plan.fuse_last) == ("before", 0)
    assert macs(model.grid) <= budget < macs(grids[grids.index(model.grid) + 1])


@pytest.mark.parametrize(
    ("method", "schedule"),
    [("tome", ((0, 20),)), ("resolution", ((1, 20),)), ("resolution", ((0, 20), (1, 9)))],
)
def test_refuses_plans_of_another_kind(dense_model, method, schedule):
    plan = Plan(method, "cls", GRID, schedule)
    with pytest.raises(ValueError, match=f"one count, at depth 0; got '{method}' with"):
        LowerResolution(dense_model, plan)


def test_refuses_images_of_another_grid(dense_model):
    model = reduce(dense_model, resolution("cls", 20))
    with pytest.raises(ValueError, match=r"patch grid \(5, 7\); got \(7, 3\)"):
        model(tiny.random_images(tiny.OTHER_IMAGE))


def test_has_no_steps(dense_model):
    with pytest.raises(ValueError, match="'resolution' must be run by foveate"):
        build_steps(dense_model, resolution("cls", 20))


def test_copies_give_the_same(dense_model, images, tmp_path):
    model = reduce(dense_model, resolution("saliency", 20))
    torch.save(model, tmp_path / "model")
    again = torch.load(tmp_path / "model", weights_only=False)
    assert torch.equal(again(images), model(images))
