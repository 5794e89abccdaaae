"""Oracle: the network that was saved; the weights it was trained on."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from foveate.adaptive.checkpoint import open_pruned, save_pruned
from foveate.adaptive.full_vit import FullViT
from foveate.adaptive.task_vit import TaskViT, run_mixed
from foveate.reduction.presets import plan_for
from foveate.reduction.reduced_vit import ReducedViT
from foveate.training.pruned import train_pruned
from foveate.training.views import Views
from tests import labelled
from tests.courses import FORMS, GRID, PRUNING, course, images, spec


@pytest.fixture(scope="module")
def model():
    return labelled.model_with_heads()


@pytest.fixture(scope="module")
def views(model):
    return Views(labelled.scenes(6), model.transform)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["register", "plan", "full"])
def test_a_checkpoint_gives_back_the_same_bits(model, views, tmp_path, form, kind):
    wanted = course(form, "mask", PRUNING if kind == "register" else None)
    if kind == "plan":
        plan = plan_for(model, "tome", "mask", GRID, {0: 40, 1: 32}, fuse_last=0)
        wanted = replace(wanted, plan=plan)
    found = train_pruned(model, wanted, views)
    kinds = {"register": TaskViT, "plan": ReducedViT, "full": FullViT}
    assert type(found.network) is kinds[kind]
    save_pruned(tmp_path, form, found.network, model, spec("mask"), 2)
    opened = open_pruned(tmp_path, labelled.model_with_heads())
    assert torch.equal(opened(images()), found.network(images()))
    assert not torch.equal(opened(images()), model(images(), "mask"))


def test_other_weights_and_other_checkpoints_are_refused(model, views, tmp_path):
    found = train_pruned(model, course("tap-f", "mask"), views)
    save_pruned(tmp_path, "tap-f", found.network, model, spec("mask"), 2)
    other = copy.deepcopy(model)
    next(other.parameters()).add_(1)
    with pytest.raises(ValueError, match="checkpoint must be of the weights of tiny"):
        open_pruned(tmp_path, other)
    record = (tmp_path / "checkpoint.json").read_text()
    (tmp_path / "checkpoint.json").write_text(record.replace('"tap-f"', '"heads"'))
    with pytest.raises(ValueError, match="must be of tap-j or tap-f"):
        open_pruned(tmp_path, model)


def test_a_shared_backbone_is_checked_as_well(model, views, tmp_path):
    for task in ("label", "mask"):
        found = train_pruned(model, course("tap-f", task), views)
        save_pruned(tmp_path / task, "tap-f", found.network, model, spec(task), 2)
    first = open_pruned(tmp_path / "label", labelled.model_with_heads())
    before = copy.deepcopy(first.state_dict())
    with pytest.raises(ValueError, match="there is a low-rank update 'label' already"):
        open_pruned(tmp_path / "label", first.model)
    assert all(torch.equal(before[k], v) for k, v in first.state_dict().items())
    weight = next(p for n, p in first.model.named_parameters() if "base_layer" in n)
    weight.data.add_(1)
    with pytest.raises(ValueError, match="checkpoint must be of the weights of tiny"):
        open_pruned(tmp_path / "mask", first.model)


def test_tasks_share_one_backbone_and_a_mixed_batch(model, views, tmp_path):
    alone = {}
    for task in ("label", "mask"):
        found = train_pruned(model, course("tap-f", task), views)
        save_pruned(tmp_path / task, "tap-f", found.network, model, spec(task), 2)
        alone[task] = found.network
    first = open_pruned(tmp_path / "label", labelled.model_with_heads())
    second = open_pruned(tmp_path / "mask", first.model)
    shared = {"label": first, "mask": second}
    kept = {p.data_ptr() for p in first.model.backbone.parameters()}
    own = {n: p.data_ptr() for n, p in second.model.backbone.named_parameters()}
    assert {n for n, at in own.items() if at not in kept} == {
        n for n in own if ".mask." in n
    }
    tasks = ["mask", "label", "mask", "label"]
    batch = images(4)
    with torch.no_grad():
        for output, task, image in zip(
            run_mixed(shared, batch, tasks), tasks, batch, strict=True
        ):
            assert_close(output, alone[task](image[None])[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="tasks must be one of label, mask for each of 4"):
        run_mixed(shared, batch, ["label"])
