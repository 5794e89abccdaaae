"""Oracle: a naive loop over images; multiply-adds in closed form; invariants."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from foveate.backbones import open_backbone
from foveate.evaluation.compare import compare, cosine, mean_and_error, output_error
from foveate.evaluation.schedule import DEFAULT_METHODS, plan_for_terms
from foveate.models import Model, open_model
from foveate.reduction.plan import Plan
from foveate.reduction.presets import PRESETS, plan_for
from foveate.reduction.reduced_vit import reduce
from foveate.tasks.embedding import ClassToken
from tests import tiny

GRID, N, C = tiny.GRID, 35, tiny.WIDTH


@pytest.fixture
def four_images():
    """Four images in float64, ``(4, 3, 20, 28)``."""
    return torch.cat([tiny.random_images(dtype=torch.float64, seed=s) for s in (1, 2)])


def by_hand(model, plan, image):
    """Error and cosine of one image, one number at a time."""
    full = model(image[None], plan.task).flatten().tolist()
    less = reduce(model, plan)(image[None]).flatten().tolist()
    square = sum(y**2 for y in full)
    lost = sum((a - b) ** 2 for a, b in zip(less, full, strict=True))
    inner = sum(a * b for a, b in zip(less, full, strict=True))
    return (lost / square) ** 0.5, inner / (square * sum(a**2 for a in less)) ** 0.5


@pytest.mark.parametrize("task", ["cls", "saliency"])
def test_errors_and_cosines_are_those_of_a_naive_loop(double_model, four_images, task):
    methods = ["random", "tome", "agglomerate"]
    terms = {"depths": [1], "keeps": [0.75, 0.6], "seed": 3, "place": "before"}
    found = compare(double_model, methods, four_images, task, batch_size=3, **terms)
    assert [(r.case.plan.method, r.case.keep) for r in found.rows] == [
        (method, keep) for method in methods for keep in (0.75, 0.6)
    ]
    for row in found.rows:
        options = {k: 3 for k in PRESETS[row.case.plan.method].options if k == "seed"}
        keep = {0.75: 26, 0.6: 21}[row.case.keep]
        plan = Plan(
            row.case.plan.method,
            task,
            GRID,
            ((1, keep),),
            place="before",
            options={**row.case.plan.options, **options},
        )
        assert row.case.plan == plan
        truth = [by_hand(double_model, plan, image) for image in four_images]
        assert_close(row.errors, tuple(t[0] for t in truth))
        assert_close(row.cosines, tuple(t[1] for t in truth))
        assert min(row.errors) > 1e-3


def test_the_record_is_json_and_sums_its_images_up(dense_model, images):
    found = compare(dense_model, ["random", "tome"], images, depths=[0, 1])
    record = json.loads(json.dumps(found.record(["a", "b"]), allow_nan=False))
    assert {k: record[k] for k in ("model", "task", "place", "num_images", "seed")} == {
        "model": "tiny",
        "task": "cls",
        "place": "between",
        "num_images": 2,
        "seed": 0,
    }
    assert (record["num_patches"], record["files"], record["grid"]) == (
        N,
        ["a", "b"],
        [5, 7],
    )
    assert [row["keep"] for row in record["rows"]] == [0.95, 0.75, 0.5] * 2
    for row in record["rows"]:
        values = np.array(row["error_per_image"])
        assert row["output_error"]["mean"] == pytest.approx(values.mean())
        assert row["output_error"]["standard_error"] == pytest.approx(
            values.std(ddof=1) / 2**0.5
        )
        assert row["cosine"] == pytest.approx(np.mean(row["cosine_per_image"]))
        assert row["depths"] == [0, 1]
        assert row["counts"][-1] == {0.95: 33, 0.75: 26, 0.5: 18}[row["keep"]]
        assert row["mac_ratio"] == pytest.approx(record["full_macs"] / row["macs"])
        assert not row["back_propagates"]
        plan = Plan.from_record(row["plan"])
        assert list(plan.counts.values()) == row["counts"]


@pytest.mark.parametrize("task", ["cls", "saliency"])
def test_removing_nothing_changes_nothing_and_saves_nothing(dense_model, images, task):
    found = compare(
        dense_model, DEFAULT_METHODS, images, task, depths=[1], keeps=[1], num_probes=2
    )
    assert [row.case.plan.method for row in found.rows] == list(DEFAULT_METHODS)
    for row in found.rows:
        assert row.errors == (0.0, 0.0)
        assert row.cosines == pytest.approx((1.0, 1.0))
        assert (row.mac_ratio, [*row.case.plan.counts.values()]) == (1.0, [N])


@pytest.mark.parametrize("task", ["cls", "saliency"])
def test_results_do_not_depend_on_the_batch_size(double_model, four_images, task):
    methods = ["random", "evit", "tome", "pitome", "sensitivity", "foveate-oracle"]
    terms = {"depths": [0, 1], "keeps": [0.5], "num_probes": 3}
    one, four = (
        compare(double_model, methods, four_images, task, batch_size=size, **terms)
        for size in (1, 4)
    )
    assert len(one.rows) == len(methods)
    for a, b in zip(one.rows, four.rows, strict=True):
        assert_close(a.errors, b.errors)
        assert_close(a.cosines, b.cosines)


def block(attended, transformed):
    """Closed form of a block: 4 N C^2 + 2 N^2 C + 8 N C^2, the class token included."""
    attended, transformed = attended + 1, transformed + 1
    return 4 * attended * C**2 + 2 * attended**2 * C + 8 * transformed * C**2


@pytest.mark.parametrize(
    ("task", "place", "fuse_last", "blocks"),
    [
        ("cls", "before", 1, [(N, N), (18, 18), (18, 18)]),
        ("cls", "between", 1, [(N, N), (N, 18), (18, 18)]),
        ("saliency", "between", 1, [(N, N), (N, 18), (N, N)]),
        ("saliency", "before", 0, [(N, N), (18, 18), (18, 18)]),
    ],
)
def test_multiply_adds_are_the_closed_form(
    dense_model, images, task, place, fuse_last, blocks
):
    terms = {"depths": [1], "keeps": [0.5], "place": place, "fuse_last": fuse_last}
    (row,) = compare(dense_model, ["norm"], images, task, **terms).rows
    assert row.macs == sum(block(*counts) for counts in blocks)
    assert row.full_macs == 3 * block(N, N)


def test_blocks_that_a_task_does_not_need_are_not_counted(dense_model, images):
    class Early(ClassToken):
        def taps(self, num_blocks):
            return (2,)

    model = Model("tiny", dense_model.backbone, {"cls": Early()}, dense_model.transform)
    (row,) = compare(model, ["norm"], images, "cls", depths=[0], keeps=[0.5]).rows
    assert row.full_macs == 2 * block(N, N)
    assert row.macs == block(N, 18) + block(18, 18)


def test_equal_multiply_adds_for_all_methods_and_no_patch_less_than_needed(
    dense_model, images
):
    terms = {"depths": [0, 1], "mac_ratios": [1.1, 1.3]}
    found = compare(dense_model, ["norm", "agglomerate"], images, "saliency", **terms)
    ratios = [row.mac_ratio for row in found.rows]
    assert ratios[:2] == ratios[2:]
    assert [row.case.target for row in found.rows] == [1.1, 1.3] * 2
    for row in found.rows[:2]:
        assert row.mac_ratio >= row.case.target
        last = row.case.plan.counts[1]
        assert row.case.keep == last / N
        more = compare(
            dense_model,
            ["norm"],
            images,
            "saliency",
            depths=[0, 1],
            keeps=[(last + 1) / N],
        ).rows[0]
        assert more.mac_ratio < row.case.target


def test_what_a_method_cannot_do_is_named_and_the_others_go_on(dense_model, images):
    methods = ["tome", "norm", "pitome"]
    found = compare(dense_model, methods, images, depths=[1], keeps=[0.4, 0.6])
    assert [(r.case.plan.method, r.case.keep) for r in found.rows] == [
        ("tome", 0.6),
        ("norm", 0.4),
        ("norm", 0.6),
        ("pitome", 0.6),
    ]
    skipped = found.record()["skipped"]
    assert [(s["method"], s["keep"]) for s in skipped] == [("tome", 0.4), ("pitome", 0.4)]
    assert "keep must be from 18 to 35 of 35 patches" in skipped[0]["reason"]


def test_all_methods_refused_is_an_error(dense_model, images):
    with pytest.raises(ValueError, match=r"got tome at keep 0\.4: keep must be from 18"):
        compare(dense_model, ["tome"], images, depths=[1], keeps=[0.4])


def test_class_attention_without_a_class_token_is_skipped(images):
    model = open_model(tiny.timm_vit_average())
    terms = {"depths": [1], "keeps": [0.5]}
    found = compare(model, ["evit", "norm"], images, next(iter(model.tasks)), **terms)
    assert [row.case.plan.method for row in found.rows] == ["norm"]
    assert "class token" in found.skipped[0].reason


def test_an_output_that_overflows_is_skipped_with_the_reason(dense_model, images):
    class Overflow(ClassToken):
        def decode(self, backbone, features, layout):
            y = super().decode(backbone, features, layout)
            return y if features[0].shape[1] == N + 1 else y / 0

    model = Model("tiny", dense_model.backbone, {"cls": Overflow()}, dense_model.transform)
    found = compare(model, ["norm"], images, depths=[1], keeps=[1, 0.5])
    assert [row.case.keep for row in found.rows] == [1]
    assert found.skipped[0].reason == (
        "output must be finite; got NaN or infinity in torch.float32."
    )


def test_plans_are_taken_as_they_are_and_names_follow_them(dense_model, images):
    options = {"rounds": 2, "seed": 5}
    counts = {0: 30, 1: 20}
    plan = plan_for(
        dense_model, "agglomerate", "saliency", GRID, counts, alpha=0.5, options=options
    )
    other = plan_for(dense_model, "norm", "saliency", GRID, {1: 9}, place="before")
    found = compare(dense_model, [plan, "tome", other, "norm"], images, "saliency")
    assert [row.case.plan for row in found.rows][:2] == [
        plan,
        Plan("tome", "saliency", GRID, plan.schedule, alpha=0.5),
    ]
    assert [(r.case.plan.method, r.case.plan.schedule) for r in found.rows][2:] == [
        ("norm", ((1, 9),)),
        ("norm", plan.schedule),
        ("norm", ((1, 9),)),
    ]
    assert found.skipped[0].method == "tome"
    assert found.record()["place"] is None
    assert found.rows[-1].errors == found.rows[2].errors


def test_the_seed_decides_what_is_random(dense_model, images):
    errors = [
        compare(dense_model, ["random"], images, depths=[1], keeps=[0.5], seed=s)
        .rows[0]
        .errors
        for s in (1, 1, 2)
    ]
    assert errors[0] == errors[1] != errors[2]


def test_methods_that_back_propagate_say_so_and_take_the_probes(dense_model, images):
    terms = {"depths": [1], "keeps": [0.5], "num_probes": 2, "seed": 4}
    found = compare(dense_model, ["sensitivity", "norm"], images, **terms)
    oracle, norm = (row.record() for row in found.rows)
    assert (oracle["back_propagates"], norm["back_propagates"]) == (True, False)
    assert oracle["plan"]["options"] == {"num_probes": 2, "seed": 4}
    assert norm["plan"]["options"] == {}


def test_progress_counts_every_batch_of_every_method(dense_model, images):
    seen = []
    compare(
        dense_model,
        ["norm", "tome"],
        images,
        batch_size=1,
        progress=lambda done, total: seen.append((done, total)),
        depths=[1],
        keeps=[0.6],
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_error_and_cosine_in_closed_form():
    full = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]])
    less = torch.tensor([[[3.0, 3.0]], [[0.0, 2.0]]])
    assert_close(output_error(less, full), torch.tensor([0.2, 5**0.5]))
    assert_close(cosine(less, full), torch.tensor([21 / (5 * 18**0.5), 0.0]))
    assert output_error(less.bfloat16(), full.bfloat16()).dtype == torch.float32


def test_mean_and_its_standard_error():
    assert mean_and_error([1.0, 2.0, 6.0]) == {
        "mean": 3.0,
        "standard_error": pytest.approx((7 / 3) ** 0.5),
    }
    assert mean_and_error([2.0]) == {"mean": 2.0, "standard_error": None}


def test_a_plan_for_terms_is_the_case_of_a_comparison(dense_model, images):
    terms = {"depths": [1], "keeps": [0.5], "place": "before", "seed": 2}
    plan = plan_for_terms(dense_model, images, "cls", "random", **terms)
    assert plan == compare(dense_model, ["random"], images, **terms).rows[0].case.plan
    with pytest.raises(ValueError, match=r"keep must be one number here; got \[0.6, 0.4\]"):
        plan_for_terms(dense_model, images, "cls", "tome", depths=[1], keeps=[0.6, 0.4])
    with pytest.raises(ValueError, match=r"keep must be from 18 .*; got 14"):
        plan_for_terms(dense_model, images, "cls", "tome", depths=[1], keeps=[0.4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "fly"}, r"task must be one of cls, saliency for tiny; got 'fly'"),
        ({"methods": ["norm", "fly"]}, r"method must be one of .*; got 'fly'"),
        ({"methods": []}, r"methods must name at least one; got none"),
        ({"depths": [3]}, r"depths must be at least 0 and below 3 .*; got 3"),
        ({"depths": [1, 0]}, r"depths must be nonnegative and ascend; got \[1, 0\]"),
        ({"depths": []}, r"depths must have at least one number; got none"),
        ({"depths": None}, r"depths must be given .*; got none"),
        ({"keeps": [1.5]}, r"keep_ratio must be in \(0, 1\]; got 1\.5"),
        ({"keeps": []}, r"keep must have at least one number; got none"),
        ({"mac_ratios": [2]}, r"keep and mac_ratio cannot both be given; got \[0.5\]"),
        ({"keeps": None, "mac_ratios": [9]}, r"mac_ratio must be in \[1.0000, .*; got 9"),
        ({"num_probes": 0}, r"num_probes must be at least 1; got 0"),
        ({"batch_size": 0}, r"at least 1; got 2 images and batch_size 0"),
        ({"images": torch.zeros(0, 3, 20, 28)}, r"at least 1; got 0 images"),
        (
            {"images": torch.full((2, 3, 20, 28), torch.nan)},
            r"got a norm of nan for image 0",
        ),
    ],
)
def test_wrong_input_is_named(dense_model, images, changes, message):
    words = {"images": images, "methods": ["norm"], "depths": [1], "keeps": [0.5]}
    with pytest.raises(ValueError, match=message):
        compare(dense_model, **{**words, **changes})


@pytest.mark.parametrize(
    ("task", "grid", "message"),
    [
        ("saliency", GRID, r"task must be the plan's 'saliency'; got 'cls'"),
        ("cls", (7, 5), r"images must have the plan's patch grid \(7, 5\); got \(5, 7\)"),
    ],
)
def test_a_plan_for_something_else_is_refused(dense_model, images, task, grid, message):
    with pytest.raises(ValueError, match=message):
        compare(dense_model, [Plan("norm", task, grid, ((1, 5),))], images)


def test_an_output_of_zeros_has_no_relative_error(images):
    zero = nn.Linear(C, 4)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    backbone = open_backbone(tiny.hf_dinov2())
    model = Model("zero", backbone, {"cls": ClassToken(zero)}, tiny.dense_model().transform)
    with pytest.raises(ValueError, match=r"got a norm of 0\.0 for image 0"):
        compare(model, ["norm"], images, depths=[1])


def test_a_record_needs_a_name_for_each_image(dense_model, images):
    found = compare(dense_model, ["norm"], images, depths=[1])
    assert found.record()["files"] is None
    with pytest.raises(ValueError, match=r"files must name the 2 images; got 1 names"):
        found.record(["a"])
