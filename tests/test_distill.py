"""Oracle: measures taken by hand with scipy; calls that are counted; the run not killed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.testing import assert_close

from foveate.data.crops import Photographs
from foveate.forward import run
from foveate.reduction.presets import plan_for
from foveate.reduction.reduced_vit import reduce
from foveate.scoring.heads import head_name, load_head, save_head
from foveate.training import targets
from foveate.training.distill import Course, distill, measure_head
from foveate.training.loop import Recipe
from foveate.training.modes import leading_modes
from foveate.training.probes import Cut, pull_back
from foveate.training.pupils import pupil
from foveate.training.targets import Targets, model_hash
from tests import tiny
from tests.reference_jacobian import materialise
from tests.test_crops import draw

SMALL = {
    "importance": {"hidden": 16, "num_heads": 2},
    "metric": {"hidden": 16, "num_heads": 2},
    "factors": {"hidden": 16, "num_heads": 2, "rows": 3, "dims": 6},
}
RECIPE = Recipe(60, batch_size=4, learning_rate=0.01, validate_every=20)
WAYS = [
    ("importance", "modes"),
    ("importance", "norms"),
    ("metric", "modes"),
    ("factors", "modes"),
]
every_way = pytest.mark.parametrize(("kind", "source"), WAYS)


class KilledError(Exception):
    """The run ends here."""


@pytest.fixture(scope="module")
def model():
    return tiny.dense_model()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Four photographs to learn from and three to validate on."""
    folder = tmp_path_factory.mktemp("photos")
    files = [draw(folder / f"{i}.png", (34 + i, 40), seed=i) for i in range(7)]
    return files[:4], files[4:]


@pytest.fixture
def counted(monkeypatch):
    """Which computation was given how many images."""
    calls = []

    def count(function):
        def call(model, task, images, *rest):
            calls.append((function.__name__, len(images)))
            return function(model, task, images, *rest)

        return call

    monkeypatch.setattr(targets, "pull_back", count(pull_back))
    monkeypatch.setattr(targets, "leading_modes", count(leading_modes))
    return calls


def course(kind, source="modes", **changes):
    terms = {
        "depth": 1,
        "num_crops": 12,
        "rank": 3,
        "num_probes": 4,
        "recipe": RECIPE,
        "config": SMALL[kind],
    }
    return Course(kind, source=source, **{**terms, **changes})


def held_tokens(model, files, cut):
    """Tokens of whole photographs at a cut, as they are kept on disk."""
    backbone = model.backbone
    images = Photographs(files, model.transform).batch(0, len(files))
    tokens, _ = run(backbone, backbone.embed(images), 0, cut.depth)
    if cut.place == "between":
        heads = backbone.project(cut.depth, tokens)
        tokens = backbone.attend(cut.depth, tokens, heads)
    return images, tokens.x.half().float()


@every_way
def test_the_loss_falls_and_a_head_comes_out(model, photos, tmp_path, kind, source):
    told = []
    found = distill(model, course(kind, source), *photos, tmp_path, watch=told.append)
    losses = found.training.losses
    assert losses[-1] < 0.8 * losses[0]
    assert found.training.step == 60
    assert len(told) == 3
    place = "between" if kind == "factors" else "before"
    head = found.head
    where = (head.kind, head.model, head.task, head.depth, head.place)
    assert where == (kind, "tiny", "cls", 1, place)
    assert not head.network.training
    assert not any(p.requires_grad for p in head.network.parameters())
    said = json.loads(json.dumps(head.provenance))
    assert said["model_hash"] == model_hash(model)
    assert said["course"]["recipe"]["steps"] == 60
    assert (said["steps"], said["best_step"]) == (60, found.training.best_step)
    assert said["best_score"] == found.training.best_score
    assert set(found.seconds) == {"targets", "training"}
    assert all(s > 0 for s in found.seconds.values())
    assert all(len(values) == 3 for values in found.measures.values())


@every_way
def test_the_head_is_used_by_its_method(model, photos, tmp_path, images, kind, source):
    short = course(kind, source, recipe=Recipe(2, batch_size=2))
    head = distill(model, short, *photos, tmp_path / "cache").head
    file = tmp_path / "heads" / head_name("cls", 1, kind)
    save_head(head, file)
    method = next(m for m, k in tiny.HEAD_KINDS.items() if k == kind)
    options = {"head": str(tmp_path / "heads")}
    plan = plan_for(model, method, "cls", tiny.GRID, {1: 24}, options=options)
    truth = model(images, "cls")
    assert 0 < (reduce(model, plan)(images) - truth).norm() < truth.norm()
    again = load_head(file)
    state = again.network.state_dict()
    for name, weight in head.network.state_dict().items():
        assert torch.equal(state[name], weight)


# --- measures -----------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["modes", "norms"])
def test_an_importance_is_measured_by_the_exact_target(model, photos, tmp_path, source):
    found = distill(model, course("importance", source), *photos, tmp_path)
    images, tokens = held_tokens(model, photos[1], Cut(1, "before"))
    truth = leading_modes(model, "cls", images, [Cut(1, "before")], 3, 0)
    predicted = found.head.network(tokens, 1)
    for image, value in enumerate(found.measures["spearman"]):
        expected = spearmanr(predicted[image], truth["importance.1.before"][image])
        assert value == pytest.approx(expected.statistic, abs=1e-6)
    assert found.training.best_score == pytest.approx(np.mean(found.measures["spearman"]))


def test_a_metric_is_measured_against_the_materialised_jacobian(model, photos, tmp_path):
    terms = {"rank": 12, "recipe": Recipe(3, batch_size=4)}  # all 36 outputs are searched
    found = distill(model, course("metric", **terms), *photos, tmp_path)
    cut, backbone = Cut(1, "before"), model.backbone
    images, tokens = held_tokens(model, photos[1], cut)
    start, _ = run(backbone, backbone.embed(images), 0, 1)

    def tail(x):
        end, _ = run(backbone, start.with_(x=x), 1, 3)
        return model.task("cls").decode(backbone, (end.x,), end.layout)

    jacobian = materialise(tail, start.x)[:, :, 1:].flatten(2).double()
    predicted = found.head.network(tokens, 1)
    for image in range(3):
        _, values, right = np.linalg.svd(jacobian[image].numpy(), full_matrices=False)
        rows = predicted.directions[image, :, 1:].flatten(1).double().numpy()
        share = np.square(rows @ right[:12].T).sum() / 12
        assert found.measures["alignment"][image] == pytest.approx(share, abs=1e-3)
        true = (right[:12].T * values[:12] ** 2) @ right[:12]
        said = (rows.T * predicted.energies[image].double().numpy()) @ rows
        error = np.linalg.norm(said - true) / np.linalg.norm(true)
        assert found.measures["metric_error"][image] == pytest.approx(error, rel=5e-3)
    assert found.training.best_score == pytest.approx(np.mean(found.measures["alignment"]))


def test_factors_are_measured_by_the_order_of_merges(model, photos, tmp_path):
    found = distill(model, course("factors"), *photos, tmp_path)
    cut = Cut(1, "between")
    images, tokens = held_tokens(model, photos[1], cut)
    rows = pull_back(model, "cls", images, [cut], 4, 0)["rows.1.between"].float()
    network = found.head.network
    said = network(tokens, 1) @ network.basis.T
    feature = tokens[:, 1:]
    for image, value in enumerate(found.measures["spearman"]):
        costs = []
        for g in (rows[image], said[image]):
            moved = feature[image, ::4, None] - feature[image]  # (A, N, C)
            effect = torch.einsum("anrc,anc->anr", g[::4, None] - g, moved)
            costs.append(effect.square().mean(2).flatten())
        assert value == pytest.approx(spearmanr(*costs).statistic, abs=2e-3)


def test_measures_are_those_of_the_head_that_is_returned(model, photos, tmp_path):
    found = distill(model, course("factors"), *photos, tmp_path)
    folder = next(tmp_path.glob("val-*"))
    learn = pupil("factors")
    seen = Targets(folder, 3, Cut(1, "between"), ("tokens", "rows"))
    held = learn.prepare(seen.batch(torch.arange(3)))
    again = measure_head(found.head, learn, held)["spearman"]
    assert again.tolist() == found.measures["spearman"]


# --- what is killed, and what is computed -------------------------------------------------


@every_way
def test_a_killed_run_computes_nothing_twice_and_ends_with_the_same_head(
    model, photos, tmp_path, counted, kind, source
):
    expected = distill(model, course(kind, source), *photos, tmp_path / "truth")
    names = {"factors": ("pull_back",) * 2, "metric": ("leading_modes",) * 2}
    train, val = names.get(
        kind, ("pull_back" if source == "norms" else "leading_modes", "leading_modes")
    )
    assert counted == [(train, 8), (train, 4), (val, 3)]
    counted.clear()

    def kill(now):
        if now.step == 40:
            raise KilledError

    with pytest.raises(KilledError):
        distill(model, course(kind, source), *photos, tmp_path / "t", watch=kill)
    counted.clear()
    steps = []
    found = distill(
        model,
        course(kind, source),
        *photos,
        tmp_path / "t",
        watch=lambda now: steps.append(now.step),
    )
    assert not counted
    assert steps == [60]
    assert found.training == expected.training
    assert found.measures == expected.measures
    state = expected.head.network.state_dict()
    for name, weight in found.head.network.state_dict().items():
        assert torch.equal(weight, state[name]), name


def test_another_course_shares_the_targets_and_not_the_training(
    model, photos, tmp_path, counted
):
    short = course("importance", recipe=Recipe(2, batch_size=2))
    first = distill(model, short, *photos, tmp_path)
    counted.clear()
    longer = replace(short, recipe=Recipe(4, batch_size=2))
    assert distill(model, longer, *photos, tmp_path).training.step == 4
    wider = replace(short, config={"hidden": 24, "num_heads": 2})
    assert distill(model, wider, *photos, tmp_path).head.network.project.out_features == 24
    assert distill(model, short, *photos, tmp_path).training == first.training
    assert not counted
    assert len(list(tmp_path.glob("*.state"))) == 3


def test_one_pass_serves_several_depths(model, photos, tmp_path, counted):
    both = course("factors", depth=0, depths=(0, 1), recipe=Recipe(2, batch_size=2))
    heads = [
        distill(model, c, *photos, tmp_path).head for c in (both, replace(both, depth=1))
    ]
    assert counted == [("pull_back", 8), ("pull_back", 4), ("pull_back", 3)]
    assert [head.depth for head in heads] == [0, 1]
    means = [head.network.standardise.mean for head in heads]
    for cut, mean in zip((Cut(0), Cut(1)), means, strict=True):
        _, tokens = held_tokens(model, photos[1], cut)
        folder = next(tmp_path.glob("val-*"))
        kept = Targets(folder, 3, cut, ("tokens",)).batch(torch.arange(3))["tokens"]
        assert_close(kept, tokens, rtol=1e-3, atol=1e-3)
        assert mean.isfinite().all()
    assert not torch.allclose(means[0], means[1])


def test_the_seed_decides(model, photos, tmp_path):
    heads = []
    for number, seed in enumerate((0, 0, 1)):
        once = course("importance", recipe=Recipe(2, batch_size=2, seed=seed))
        head = distill(model, once, *photos, tmp_path / str(number)).head
        heads.append(torch.cat([w.flatten() for w in head.network.state_dict().values()]))
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


# --- what goes wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "wrong"),
    [
        ("importance", {"depths": (0, 2)}, r"depths must hold 1; got \(0, 2\)"),
        ("metric", {"source": "norms"}, "source must be 'modes' for a metric; got 'norms'"),
    ],
)
def test_courses_that_cannot_be_are_refused(kind, changes, wrong):
    with pytest.raises(ValueError, match=wrong):
        course(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "wrong"),
    [
        ("metric", {"depth": 3}, "depth must be from 0 to 2 .* got 3"),
        ("factors", {"depth": 3}, r"cuts must lie before depth 3, .* got 3\.between"),
        ("factors", {"depth": 2}, r"'cls' must depend on the patches at 2\.between"),
        ("importance", {"depth": -1}, "depth must be from 0 to 2 .* got -1"),
        ("metric", {"rank": 37}, "rank must be at most the 36 outputs of 'cls'; got 37"),
        ("metric", {"task": "fly"}, "task must be one of cls, saliency .* got 'fly'"),
    ],
)
def test_what_the_model_has_not_is_refused_and_leaves_nothing(
    model, photos, tmp_path, kind, changes, wrong
):
    with pytest.raises(ValueError, match=wrong):
        distill(model, course(kind, **changes), *photos, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_other_photographs_in_the_same_cache_are_refused(model, photos, tmp_path):
    short = course("importance", recipe=Recipe(1, batch_size=2))
    distill(model, short, *photos, tmp_path)
    with pytest.raises(ValueError, match=r"targets must have files .*val-.*manifest"):
        distill(model, short, photos[0], photos[1][:2], tmp_path)
