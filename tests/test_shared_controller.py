"""Oracle: the controller that was handed in, number by number."""

import copy
from dataclasses import replace

import pytest
import torch

from foveate.adaptive.checkpoint import open_controller, open_pruned, save_pruned
from foveate.adaptive.controller import Pruning
from foveate.models.checkpoint import HeadSpec
from foveate.training.config import TapConfig, read_config
from foveate.training.loop import Recipe
from foveate.training.pruned import TapCourse, train_pruned
from foveate.training.views import Views
from tests import labelled

PRUNING = Pruning((0, 1), 32, least=(8, 0), redundancy=True)
RECIPE = Recipe(6, 3, 5e-3, validate_every=2)
COURSE = TapCourse("tap-f", "mask", RECIPE, PRUNING, rank=2, calibrate=4)


@pytest.fixture(scope="module")
def model():
    return labelled.model_with_heads()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """Folder of a network for one task."""
    folder = tmp_path_factory.mktemp("taps") / "mask"
    views = Views(labelled.scenes(6), model.transform)
    found = train_pruned(model, COURSE, views).network
    kind, num, settings = labelled.HEADS["mask"]
    spec = HeadSpec(kind, tuple(str(i) for i in range(num)), settings)
    save_pruned(folder, "tap-f", found, model, spec, 2)
    return folder


def test_a_controller_is_that_of_the_network(saved, model):
    whole, alone = open_pruned(saved, model).controller, open_controller(saved)
    assert alone.pruning == PRUNING
    assert alone.whole == whole.whole
    assert not any(p.requires_grad for p in alone.parameters())
    for name, value in whole.state_dict().items():
        assert torch.equal(alone.state_dict()[name], value)


@pytest.mark.parametrize("form", ["tap-f", "tap-j"])
def test_another_task_uses_a_controller_as_it_is(saved, model, form):
    held = open_controller(saved)
    before = copy.deepcopy(held.state_dict())
    course = replace(COURSE, form=form, task="label", controller=held)
    views = Views(labelled.scenes(6), model.transform)
    found = train_pruned(model, course, views)
    assert "register" not in found.parameters
    assert found.training.losses[-1] < found.training.losses[0]
    assert found.network.controller is not held
    used = found.network.controller.state_dict()
    for name, value in before.items():
        assert torch.equal(held.state_dict()[name], value)
        assert name == "counts" or torch.equal(used[name], value)
    assert sum(found.network.controller.whole) == PRUNING.remove


def test_a_controller_of_another_pruning_is_refused(saved):
    with pytest.raises(ValueError, match="controller must have the pruning"):
        replace(
            COURSE, pruning=replace(PRUNING, remove=30), controller=open_controller(saved)
        )


def test_a_network_without_a_controller_is_refused(model, tmp_path):
    views = Views(labelled.scenes(6), model.transform)
    found = train_pruned(model, replace(COURSE, pruning=None), views).network
    kind, num, settings = labelled.HEADS["mask"]
    spec = HeadSpec(kind, tuple(str(i) for i in range(num)), settings)
    save_pruned(tmp_path, "tap-f", found, model, spec, 2)
    with pytest.raises(ValueError, match="must have a controller"):
        open_controller(tmp_path)


def test_a_configuration_names_the_folder(saved, model, tmp_path):
    file = tmp_path / "tap.toml"
    text = f'model = "m"\ntask = "label"\ncontroller = "{saved}"\n[data]\nfolder = "d"\n'
    file.write_text(text + "[recipe]\nsteps = 3\n")
    found = read_config(file, TapConfig)
    course = found.course("tap-f", model, 0)
    assert course.pruning == PRUNING
    assert course.controller.whole == open_controller(saved).whole
    both = replace(found, pruning=PRUNING)
    with pytest.raises(ValueError, match="controller and pruning cannot both"):
        both.course("tap-f", model, 0)
