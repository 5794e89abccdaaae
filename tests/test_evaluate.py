"""Oracle: the scores by hand, a plan that keeps everything, the record's contract."""

import pytest
import torch

from foveate.evaluation.evaluate import collect, evaluate, labelled_task, open_trial, pack
from foveate.evaluation.metrics import Estimate
from foveate.reduction.plan import Plan
from foveate.reduction.presets import plan_for
from tests import labelled

GRID = (8, 8)


@pytest.fixture(scope="module")
def model():
    return labelled.taught_model()


@pytest.fixture(scope="module")
def data():
    return labelled.scenes(6, seed=1)


@pytest.fixture(autouse=True)
def short_clock(monkeypatch):
    """Two rounds on the clock."""
    import foveate.evaluation.evaluate as module

    real = module.benchmark
    monkeypatch.setattr(module, "benchmark", lambda *args: real(*args, rounds=2, warmup=0))


def test_the_score_is_that_of_the_model_picture_by_picture(model, data):
    right = 0
    for index in range(len(data)):
        picture, target = data[index]
        output = model(model.transform(picture)[None], "label")
        right += int(output.argmax()) == target.label
    found = evaluate(model, data, "label", batch_size=4)
    assert 0 < right < len(data)
    assert found.scores["full"]["top1"].value == pytest.approx(right / len(data))
    assert found.clock is None


@pytest.mark.parametrize("task", labelled.HEADS)
def test_a_plan_that_keeps_everything_changes_nothing(model, data, task):
    plan = Plan("tome", task, GRID, ((1, 64),))
    found = evaluate(model, data, task, plan)
    assert found.scores["full"] == found.scores["reduced"]
    for estimate in found.scores["difference"].values():
        assert estimate == Estimate(0.0, 0.0, 0.0)


def test_a_plan_that_removes_something_changes_something(model, data):
    plan = plan_for(model, "norm", "mask", GRID, {0: 8}, fuse_last=0, alpha=0.0)
    found = evaluate(model, data, "mask", plan)
    full, reduced, change = (
        found.scores[side]["miou"] for side in ("full", "reduced", "difference")
    )
    assert change.value == pytest.approx(reduced.value - full.value)
    assert change.high < 0
    assert found.clock.plan == plan


def test_a_record_has_what_the_contract_says(model, data):
    plan = plan_for(model, "tome", "objects", GRID, {1: 40})
    record = evaluate(model, data, "objects", plan).record()
    for side in ("full", "reduced", "difference"):
        scores = record["scores"][side]
        assert set(scores) >= {"box_ap", "box_ap50", "mask_ap", "mask_ap75"}
        assert all(set(each) == {"value", "low", "high"} for each in scores.values())
    needed = {"speedup", "mac_ratio", "overhead_share", "peak_memory_ratio", "num_images"}
    assert needed <= set(record)
    assert set(record["speedup"]) == {"median", "low", "high"}
    assert (record["num_images"], record["data"]) == (6, "composites")
    assert record["plan"]["method"] == "tome"
    bare = evaluate(model, data, "objects").record()
    assert set(bare) == {"model", "task", "data", "num_images", "scores"}
    assert bare["scores"] == {"full": record["scores"]["full"]}


def test_batches_and_progress_do_not_change_scores(model, data):
    told = []
    first = evaluate(
        model, data, "mask", batch_size=1, progress=lambda *now: told.append(now)
    )
    second = evaluate(model, data, "mask", batch_size=5)
    assert told == [(k, 6) for k in range(1, 7)]
    for name, estimate in first.scores["full"].items():
        assert estimate == pytest.approx(second.scores["full"][name], abs=1e-6)


def test_batches_are_cut_where_the_shape_changes_or_they_are_full():
    shapes = [(1, 4), (1, 4), (1, 6), (3, 6), (5, 6), (1, 4)]
    pictures = [(k, torch.full((w, 3, n, n), k)) for k, (w, n) in enumerate(shapes)]
    batches = [*pack(pictures, 4)]
    rows = [[(k, list(where)) for k, where in batch.examples] for batch in batches]
    assert rows == [
        [(0, [0]), (1, [1])],
        [(2, [0]), (3, [1, 2, 3])],
        [(4, [0, 1, 2, 3, 4])],
        [(5, [0])],
    ]
    for batch in batches:
        assert batch.count == len(batch.images)
        for example, where in batch.examples:
            assert (batch.images[list(where)] == example).all()


def test_models_see_the_same_batches(model, data):
    seen = [[], []]
    calls = [lambda x, s=s: (s.append(x), model(x, "label"))[1] for s in seen]
    first, second = collect(
        calls, open_trial(model, "label", data), data, 4, torch.zeros(())
    )
    assert [len(x) for x in seen[0]] == [4, 2]
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert torch.equal(first.values["top1"], second.values["top1"])


def test_only_tasks_with_labels_can_be_scored(model, data):
    with pytest.raises(ValueError, match=r"\(label, mean, mask, objects of tiny.*'cls'"):
        labelled_task(model, "cls")
    plan = Plan("tome", "mask", GRID, ((1, 40),))
    with pytest.raises(ValueError, match="task must be the plan's 'mask'; got 'label'"):
        evaluate(model, data, "label", plan)
    wrong = Plan("tome", "mask", (3, 7), ((1, 12),))
    with pytest.raises(ValueError, match=r"plan's patch grid \(3, 7\); got \(8, 8\)"):
        evaluate(model, data, "mask", wrong)
