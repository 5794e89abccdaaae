"""Oracle: the run that was not killed; the form that is not shortened; what was saved."""

import copy
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch.testing import assert_close

from foveate.adaptive.controller import Pruning
from foveate.adaptive.task_vit import TaskViT, open_task_vit
from foveate.backbones.recomputed import Recomputed
from foveate.evaluation.pruned import evaluate_pruned, plan_of, pruned_macs, time_pruned
from foveate.reduction.macs import block_macs
from foveate.reduction.presets import plan_for
from foveate.training.pruned import build_pruned, train_pruned
from foveate.training.views import Views
from tests import labelled
from tests.courses import FORMS, GRID, PRUNING, TASKS, course, images


class KilledError(Exception):
    """The run ends here."""


@pytest.fixture(scope="module")
def model():
    return labelled.model_with_heads()


@pytest.fixture(scope="module")
def views(model):
    return Views(labelled.scenes(6), model.transform)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", TASKS)
def test_training_lowers_the_loss_and_leaves_the_model_alone(model, views, form, task):
    before = copy.deepcopy(model.state_dict())
    found = train_pruned(model, course(form, task, steps=12), views)
    assert found.training.losses[-1] < found.training.losses[0]
    assert found.difference is not None
    assert found.difference < 1e-5
    assert int(found.network.controller.counts.sum()) == PRUNING.remove
    assert (found.alphas is None) == (task == "label")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_what_is_trained_changes_and_nothing_else(model, views, form):
    network, parts = build_pruned(model, course(form, "mask"))
    before = {k: v.clone() for k, v in network.state_dict().items()}
    counted = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert counted == sum(parts.values())
    found = train_pruned(model, course(form, "mask"), views)
    after = found.network.state_dict()
    changed = {k for k, v in after.items() if not torch.equal(v, before[k])}
    for part in ("register", "allocate.weight", "recover.weight"):
        assert f"controller.{part}" in changed
    backbone = {k for k in changed if k.startswith("model.backbone.")}
    assert backbone
    assert all("lora_" in key for key in backbone) == (form == "tap-f")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_a_killed_run_ends_as_the_one_that_was_not(model, views, tmp_path, form, distill):
    state, wanted = tmp_path / "a.state", course(form, "objects", distill=distill)
    whole = train_pruned(model, wanted, views)

    def kill(now):
        if now.step == 4:
            raise KilledError

    with pytest.raises(KilledError):
        train_pruned(model, wanted, views, state, kill)
    again = train_pruned(model, wanted, views, state)
    assert again.training.losses == whole.training.losses
    first, second = whole.network.state_dict(), again.network.state_dict()
    for key, value in first.items():
        assert_close(second[key], value, rtol=0, atol=1e-6)


class Says(torch.nn.Module):
    """The same of every image."""

    def __init__(self, raw):
        super().__init__()
        self.raw = raw

    def forward(self, images):
        return self.raw.expand(len(images), *self.raw.shape)


@pytest.mark.parametrize("task", TASKS)
def test_distillation_adds_the_share_of_variance_that_is_missed(model, views, task):
    """First losses with weights 0 and 3, against the outputs before any step."""
    wanted = course("tap-f", task, steps=1)
    network, _ = build_pruned(model, wanted)
    seen = []
    network.train().register_forward_hook(lambda *call: seen.append(call[2].detach()))
    draw = torch.Generator().manual_seed(3)
    raw = model(images(1), task)[0]
    raw = torch.randn(raw.shape, generator=draw)
    plain = train_pruned(model, wanted, views).training.losses[0]
    guided = replace(wanted, distill=3.0)
    found = train_pruned(model, guided, views, teacher=Says(raw)).training.losses[0]
    for rows in combinations(range(6), 3):
        network(torch.stack([views[i].image for i in rows]))
    variance = raw.double().var(correction=0)
    extra = [3 * (y - raw).double().square().mean() / variance for y in seen]
    assert min(abs(float(e) - (found - plain)) for e in extra) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_distillation_pulls_towards_the_model_that_is_left_alone(model, views, form):
    full = model(images(), "mask")
    gaps = []
    for weight in (0.0, 100.0):
        found = train_pruned(model, course(form, "mask", steps=20, distill=weight), views)
        gaps.append(float((found.network(images()) - full).norm()))
    assert gaps[1] < gaps[0]


def test_a_backbone_that_is_not_frozen_is_not_trained_by_the_way(views):
    loose = labelled.model_with_heads().requires_grad_(True)
    with pytest.raises(ValueError, match="model must be frozen for tap-f"):
        train_pruned(loose, course("tap-f"), views)


def test_counts_are_calibrated_on_views_from_all_over(model, views, monkeypatch):
    seen, calibrate = [], TaskViT.calibrate

    def spy(vit, batches):
        seen.append(torch.cat(list(batches)))
        return calibrate(vit, batches)

    monkeypatch.setattr(TaskViT, "calibrate", spy)
    for seed in (0, 0, 1, 2, 3):
        wanted = course("tap-f", steps=1)
        train_pruned(
            model, replace(wanted, recipe=replace(wanted.recipe, seed=seed)), views
        )
    every = torch.stack([views[i].image for i in range(len(views))])
    chosen = [
        tuple(int((every == image).flatten(1).all(1).nonzero()) for image in images)
        for images in seen
    ]
    assert all(len(set(each)) == 4 for each in chosen)
    assert chosen[0] == chosen[1]
    assert len({tuple(sorted(each)) for each in chosen}) > 1


@pytest.mark.parametrize("form", FORMS)
def test_recomputed_activations_give_the_same_training(model, views, form):
    plain = train_pruned(model, course(form, "mask"), views)
    again = train_pruned(model, course(form, "mask", recompute=True), views)
    assert again.training.losses == plain.training.losses
    assert isinstance(again.network.model.backbone, Recomputed)


def test_recomputed_keeps_less(model):
    def held(backbone):
        total = 0

        def pack(x):
            nonlocal total
            total += x.numel()
            return x

        x = images().requires_grad_()
        tokens = backbone.embed(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            for depth in range(backbone.num_blocks):
                heads = backbone.project(depth, tokens)
                tokens = backbone.transform(depth, backbone.attend(depth, tokens, heads))
        return total, tokens.x

    (full, x), (less, y) = held(model.backbone), held(Recomputed(model.backbone))
    assert torch.equal(x, y)
    assert less < 0.6 * full


def test_an_evaluation_holds_a_pruned_model_against_the_full_one(model, views):
    data = labelled.scenes(4, seed=3)
    found = train_pruned(model, course("tap-j", "mask"), views).network
    record = evaluate_pruned(found, data, model, batch_size=2).record()
    assert set(record["scores"]) == {"full", "reduced", "difference"}
    assert record["plan"]["method"] == "task-register"
    kept = [count for _, count in record["plan"]["schedule"]]
    assert kept[-1] == 32
    backbone = model.backbone
    full = 3 * block_macs(backbone, 0, 65, 65)
    less = (
        block_macs(backbone, 0, 66, 2 + kept[0])
        + block_macs(backbone, 1, 2 + kept[0], 2 + kept[1])
        + block_macs(backbone, 2, 2 + kept[1], 2 + kept[1])
    )
    assert record["mac_ratio"] == full / less
    assert pruned_macs(found, images(1)) == (full, less)
    nothing = train_pruned(model, course("tap-j", "mask", None), views).network
    assert plan_of(nothing) is None
    assert time_pruned(nothing, images()) is None
    assert pruned_macs(nothing, images(1)) == (full, full)
    assert set(evaluate_pruned(nothing, data).record()["scores"]) == {"full"}
    assert set(evaluate_pruned(nothing, data, model).record()["scores"]) == {
        "full",
        "reduced",
        "difference",
    }


def test_register_and_plan_cannot_both_be_given(model):
    plan = plan_for(model, "tome", "mask", GRID, {0: 40})
    with pytest.raises(ValueError, match="pruning and plan cannot both be given"):
        course(plan=plan)
    resolution = plan_for(model, "resolution", "mask", GRID, {0: 16})
    with pytest.raises(ValueError, match="plan must reduce tokens to be trained"):
        build_pruned(model, course(pruning=None, plan=resolution))


def test_a_controller_starts_like_the_class_token(model):
    """With the class token's start, the register ranks as it does in the first block."""
    register = open_task_vit(model, "label", Pruning((0,), 32))
    token = open_task_vit(model, "label", Pruning((0,), 32, selection="class"))
    with torch.no_grad():
        first, second = register.look(images()), token.look(images())
    # The register's own key takes a little of each head's attention, and nothing else.
    pair = torch.stack([first.scores.flatten(), second.scores.flatten()])
    assert torch.corrcoef(pair)[0, 1] > 0.9999
