"""Oracle: closed forms of the steps that a plan stands for; a wrong value for each rule."""

import pytest
import torch

import foveate
from foveate.models import Model, open_model
from foveate.reduction.matching import Prune
from foveate.reduction.plan import Plan
from foveate.reduction.presets import PRESETS, build_steps, find_preset, plan_for
from foveate.reduction.recover import Restore
from foveate.reduction.regroup import NOTHING, Memory
from foveate.reduction.step import Reduce
from tests import tiny

GRID = tiny.GRID


@pytest.fixture(scope="module")
def model():
    return tiny.dense_model()


class Early(torch.nn.Module):
    """A task that never sees what the last block gives."""

    needs_grid = True

    def taps(self, num_blocks):
        return (1, num_blocks - 1)


def test_public_names_are_those_of_the_package():
    assert foveate.plan_for is plan_for
    assert foveate.Plan is Plan
    assert foveate.reduce.__module__ == "foveate.reduction.reduced_vit"


def test_steps_of_a_task_that_reads_the_class_token(model):
    plan = plan_for(model, "tome", "cls", GRID, {2: 15, 1: 25}, place="before")
    assert plan.schedule == ((1, 25), (2, 15))
    steps = build_steps(model, plan)
    assert [(d, len(here)) for d, here in steps.items()] == [(1, 1), (2, 1)]
    for depth, (step,) in steps.items():
        assert isinstance(step, Reduce)
        assert (step.keep, step.place) == (plan.counts[depth], "before")
        assert step.proportional
        assert step.memory == NOTHING


@pytest.mark.parametrize(("fuse_last", "restored"), [(0, None), (1, 2), (2, 1)])
def test_steps_of_a_dense_task_end_on_the_full_grid(model, fuse_last, restored):
    plan = plan_for(
        model, "norm", "saliency", GRID, {0: 20}, fuse_last=fuse_last, alpha=0.5
    )
    steps = build_steps(model, plan)
    assert steps[0][0].memory == Memory(0.5)
    assert steps[0][0].action.stand_in
    found = [d for d, here in steps.items() if isinstance(here[0], Restore)]
    assert found == ([] if restored is None else [restored])


def test_frozen_presets_need_no_stand_in(model):
    plan = plan_for(model, "freeze-random", "saliency", GRID, {0: 20})
    (step,) = build_steps(model, plan)[0]
    assert step.memory == Memory(1.0, freeze=True)
    assert isinstance(step.action, Prune)
    assert not step.action.stand_in


def test_counts_that_change_nothing_take_no_step(model):
    plan = plan_for(model, "tome", "saliency", GRID, {0: 35, 1: 35})
    assert build_steps(model, plan) == {}
    later = plan_for(model, "tome", "cls", GRID, {0: 30, 1: 30, 2: 20})
    assert list(build_steps(model, later)) == [0, 2]


def test_blocks_that_the_task_never_runs_take_no_step(model):
    model = Model("tiny", model.backbone, {"early": Early()}, model.transform)
    assert list(build_steps(model, plan_for(model, "norm", "early", GRID, {0: 20}))) == [
        0,
        1,
    ]
    with pytest.raises(ValueError, match=r"below 1 for task 'early', which reads 2 blocks"):
        plan_for(model, "norm", "early", GRID, {1: 20})
    with pytest.raises(ValueError, match=r"fuse_last must be from 0 to 2; got 3\."):
        plan_for(model, "norm", "early", GRID, {}, fuse_last=3)


def test_options_are_the_presets_with_the_plans_on_top(model):
    plan = plan_for(
        model,
        "sensitivity",
        "cls",
        GRID,
        {1: 20},
        options={"num_probes": 3},
        place="before",
    )
    (step,) = build_steps(model, plan)[1]
    probes = step.action.score.probes
    assert (probes.num_probes, probes.seed, probes.place) == (3, 0, "before")
    assert probes.task is model.task("cls")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"method": "tom"}, "method must be one of random, norm, .*; got 'tom'"),
        ({"task": "depth"}, "task must be one of cls, saliency for tiny; got 'depth'"),
        ({"counts": {3: 20}}, r"below 3 for task 'cls', .* got 3\."),
        (
            {"counts": {2: 20}, "task": "saliency"},
            r"below 2 for task 'saliency', .* got 2\.",
        ),
        ({"counts": {0: 20}, "task": "saliency", "fuse_last": 3}, r"below 0 .* got 0\."),
        ({"fuse_last": 4}, r"fuse_last must be from 0 to 3; got 4\."),
        ({"options": {"margin": 0.5}}, r"options of 'tome' are none; got margin\."),
        (
            {"method": "random", "options": {"sed": 1, "x": 2}},
            r"options of 'random' are seed; got sed, x\.",
        ),
        (
            {"method": "random", "options": {"seed": "one"}},
            r"option 'seed' of 'random' must be of the type of its default, 0; got 'one'\.",
        ),
        ({"method": "random", "options": {"seed": True}}, "option 'seed' .* got True"),
        ({"method": "agglomerate", "options": {"rounds": 0}}, "rounds must be at least 1"),
        (
            {"method": "freeze", "options": {"num_probes": 0}},
            "num_probes must be at least 1",
        ),
        ({"counts": {1: 36}}, "counts that never grow, from 1 to 35"),
        ({"counts": {0: 18, 1: 8}}, r"keep must be from 9 to 18 of 18 patches .* got 8\."),
    ],
)
def test_plans_that_do_not_fit_are_refused(model, change, wrong):
    fields = {"method": "tome", "task": "cls", "grid": GRID, "counts": {1: 20}}
    with pytest.raises(ValueError, match=wrong):
        plan_for(model, **{**fields, **change})


@pytest.mark.parametrize(
    "method", ["tome", "tome-plain", "pitome", "freeze-tome", "pullback"]
)
def test_more_than_half_in_one_step_is_refused_when_it_is_planned(
    model, method
):  # A1111#9256
    assert plan_for(model, method, "cls", GRID, {1: 18}).counts == {1: 18}
    with pytest.raises(ValueError, match=r"keep must be from 18 to 35 .* got 17\."):
        plan_for(model, method, "cls", GRID, {1: 17})


@pytest.mark.parametrize("method", ["evit", "attention"])
def test_methods_that_read_the_class_token_need_one(method):  # svit#13
    model = open_model(tiny.hf_siglip())
    with pytest.raises(
        ValueError, match=rf"method '{method}' must be .* a class token; got"
    ):
        plan_for(model, method, "cls", GRID, {1: 20})
    assert plan_for(model, "received", "cls", GRID, {1: 20})


def test_numbers_may_be_written_without_a_point(model):
    assert plan_for(model, "pitome", "cls", GRID, {1: 20}, options={"margin": 1})


def test_every_preset_is_found_by_its_name():
    for name, preset in PRESETS.items():
        assert find_preset(name) is preset
