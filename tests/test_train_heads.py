"""Oracle: the run that was not killed; features by the model itself; losses that fall."""

import pytest
import torch
from torch.testing import assert_close

from foveate.training.heads import (
    HeadCourse,
    compute_features,
    train_heads,
    with_heads,
)
from foveate.training.loop import Recipe
from foveate.training.views import Views
from tests import labelled


class KilledError(Exception):
    """The run ends here."""


@pytest.fixture(scope="module")
def model():
    return labelled.bare_model()


@pytest.fixture(scope="module")
def data():
    return labelled.scenes(6)


def courses(steps=9, **changes):
    recipe = Recipe(steps, 3, 5e-3, validate_every=3, **changes)
    small = {"width": 16, "hidden": 16, "proposals": 8}
    return {
        "label": HeadCourse("classification", {}, recipe),
        "mask": HeadCourse("segmentation", {"depths": [1, 3]}, recipe),
        "objects": HeadCourse("detection", small, recipe),
    }


def weights(found):
    return {
        f"{name}.{key}": value
        for name, trained in found.items()
        for key, value in trained.head.state_dict().items()
    }


def same(first, second):
    a, b = weights(first), weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_features_are_what_the_blocks_give(model, data):
    views, told = Views(data, model.transform, 5), []
    found = compute_features(model, views, [3, 1, 3], 2, lambda *now: told.append(now))
    assert told == [(2, 5), (4, 5), (5, 5)]
    assert list(found.taps) == [1, 3]
    images = torch.stack([views[i].image for i in range(5)])
    with torch.no_grad():
        hidden = model.backbone.network(images, output_hidden_states=True).hidden_states
    for depth in (1, 3):
        assert found.taps[depth].dtype == torch.float16
        expected = hidden[depth]
        assert_close(found.taps[depth].float(), expected, atol=2e-3, rtol=2e-3)
    batch = found.batch(torch.tensor([4, 0]))
    assert torch.equal(batch["1"], found.taps[1][[4, 0]].float())
    assert [t.label for t in found.targets] == [data[i].target.label for i in range(5)]


def test_a_killed_run_goes_on_to_the_same_weights(model, data, tmp_path):
    views = Views(data, model.transform)
    whole = train_heads(model, data, courses(), views, tmp_path / "whole")
    alone = train_heads(model, data, courses(), views)
    assert same(whole, alone)

    def kill(name, now):
        seen.append((name, now.step))
        if (name, now.step) == ("mask", 6):
            raise KilledError

    seen = []
    with pytest.raises(KilledError):
        train_heads(model, data, courses(), views, tmp_path / "killed", watch=kill)
    assert seen == [("label", 3), ("label", 6), ("label", 9), ("mask", 3), ("mask", 6)]
    again = []
    resumed = train_heads(
        model,
        data,
        courses(),
        views,
        tmp_path / "killed",
        watch=lambda name, now: again.append((name, now.step)),
    )
    assert again == [("mask", 9), ("objects", 3), ("objects", 6), ("objects", 9)]
    assert same(whole, resumed)
    for name, trained in whole.items():
        assert resumed[name].training == trained.training


def test_another_course_does_not_go_on_from_this_one(model, data, tmp_path):
    views = Views(data, model.transform)
    first = train_heads(model, data, courses(), views, tmp_path)
    other = train_heads(model, data, courses(seed=1), views, tmp_path)
    assert not same(first, other)
    more = train_heads(model, data, courses(12), views, tmp_path)
    assert more["label"].training.step == 12
    fewer = Views(data, model.transform, 4)
    assert not same(first, train_heads(model, data, courses(), fewer, tmp_path))


def test_heads_learn_and_the_backbone_does_not(model, data):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    recipe = Recipe(60, 6, 5e-3, validate_every=20)
    kinds = {name: HeadCourse(c.kind, c.settings, recipe) for name, c in courses().items()}
    found = train_heads(model, data, kinds, Views(data, model.transform))
    for trained in found.values():
        first, *_, last = trained.training.losses
        assert last < (0.9 if trained.spec.kind == "detection" else 0.6) * first
        assert trained.spec.provenance["loss"] == last
        assert trained.seconds > 0
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert list(model.tasks) == ["cls"]
    more = with_heads(model, found)
    assert list(more.tasks) == ["cls", *kinds]
    logits = more(torch.stack([more.transform(data[i].picture) for i in range(6)]), "label")
    assert logits.shape == (6, 3)
    assert found["mask"].spec.classes == ("background", *labelled.CLASSES)


def test_the_state_of_the_global_generator_does_not_matter(model, data):
    views = Views(data, model.transform)
    torch.manual_seed(1)
    first = train_heads(model, data, courses(3), views)
    torch.manual_seed(2)
    assert same(first, train_heads(model, data, courses(3), views))


def test_what_cannot_be_learned_is_refused(model, data):
    views = Views(data, model.transform)
    with pytest.raises(ValueError, match="data must have labels for depth"):
        train_heads(model, data, {"a": HeadCourse("depth")}, views)
    wrong = {"a": HeadCourse("classification", {"head": "linear"})}
    with pytest.raises(ValueError, match="settings of classification are pool; got head"):
        train_heads(model, data, wrong, views)
