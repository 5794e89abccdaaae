"""Oracle: round trips, and one wrong value for each rule."""

import json
from dataclasses import FrozenInstanceError

import pytest

from foveate.reduction.plan import Plan

PLAN = Plan(
    "pitome",
    "saliency",
    (5, 7),
    ((1, 30), (2, 20)),
    place="before",
    fuse_last=2,
    alpha=0.5,
    options={"margin": 0.3},
)


@pytest.fixture
def record(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    return json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.parametrize("plan", [PLAN, Plan("tome", "cls", (5, 7), ())])
def test_a_saved_plan_comes_back_equal(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")) == plan


def test_the_file_holds_the_integers(record):
    assert record["format"] == "foveate-plan"
    assert record["version"] == 1
    assert record["grid"] == [5, 7]
    assert record["schedule"] == [[1, 30], [2, 20]]


def test_counts_by_depth():
    assert PLAN.counts == {1: 30, 2: 20}
    assert PLAN.num_patches == 35


def test_a_plan_cannot_be_changed():
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'alpha'"):
        PLAN.alpha = 1.0


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (
            {"schedule": ((1, 20), (2, 30))},
            r"counts that never grow, .* \[\[1, 20\], \[2, 30\]\]",
        ),
        ({"schedule": ((2, 30), (1, 20))}, "ascending depths"),
        ({"schedule": ((1, 30), (1, 20))}, "ascending depths"),
        ({"schedule": ((-1, 30),)}, r"ascending depths .* got \[\[-1, 30\]\]"),
        ({"schedule": ((1, 36),)}, "from 1 to 35; got"),
        ({"schedule": ((1, 0),)}, "from 1 to 35; got"),
        ({"place": "after"}, r"place must be one of \('before', 'between'\); got 'after'"),
        ({"alpha": 1.5}, r"alpha must be from 0 to 1; got 1\.5"),
        ({"alpha": float("nan")}, "alpha must be from 0 to 1; got nan"),
        ({"fuse_last": -1}, "fuse_last must be at least 0; got -1"),
        ({"grid": (-5, -7)}, r"grid must be at least 1 x 1 patches; got \(-5, -7\)"),
    ],
)
def test_values_out_of_range_are_refused(change, wrong):
    fields = {"method": "tome", "task": "cls", "grid": (5, 7), "schedule": ((1, 20),)}
    with pytest.raises(ValueError, match=wrong):
        Plan(**{**fields, **change})


@pytest.mark.parametrize("name", ["method", "grid", "schedule", "options", "fuse_last"])
def test_missing_fields_are_named(record, name):
    del record[name]
    with pytest.raises(ValueError, match=rf"my\.json has missing {name}\."):
        Plan.from_record(record, "my.json")


def test_unknown_fields_are_named(record):
    with pytest.raises(ValueError, match=r"plan has unknown ratio, speed\."):
        Plan.from_record({**record, "speed": 2, "ratio": 0.5})


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("method", 3, "method must be a string; got 3"),
        ("task", None, "task must be a string; got None"),
        ("place", ["before"], r"place must be a string; got \['before'\]"),
        ("fuse_last", "1", "fuse_last must be an integer; got '1'"),
        ("fuse_last", 1.0, r"fuse_last must be an integer; got 1\.0"),
        ("fuse_last", True, "fuse_last must be an integer; got True"),
        ("alpha", "half", "alpha must be a number; got 'half'"),
        ("options", [], r"options must be an object; got \[\]"),
        ("grid", [35], r"grid must hold pairs of integers; got \[35\]"),
        ("grid", [5, 7.5], "grid must hold pairs of integers"),
        ("grid", 35, "grid must hold pairs of integers; got 35"),
        ("schedule", 20, "schedule must be a list of pairs; got 20"),
        ("schedule", {"1": 20}, "schedule must be a list of pairs"),
        ("schedule", [[1, True]], r"schedule must hold pairs of integers; got \[1, True\]"),
        ("schedule", [20], "schedule must hold pairs of integers; got 20"),
        ("schedule", [[1, 20], [2, 30]], "counts that never grow"),
    ],
)
def test_wrong_types_are_named(record, name, value, wrong):
    with pytest.raises(ValueError, match=wrong):
        Plan.from_record({**record, name: value})


@pytest.mark.parametrize("version", [0, 2, None])
def test_other_versions_are_refused(record, version):
    wrong = rf"version 1; plan has \('foveate-plan', {version}\)\."
    with pytest.raises(ValueError, match=wrong):
        Plan.from_record({**record, "version": version})


@pytest.mark.parametrize("value", [[], "plan", None, 3, {}])
def test_other_json_is_refused(value):
    with pytest.raises(ValueError, match=r"plan has \(None, None\)\."):
        Plan.from_record(value)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[1, 2"])
def test_files_that_are_no_json_are_refused(tmp_path, text):
    (tmp_path / "plan.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"plan must be a JSON file; .*plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"plan must be a JSON file; .*none\.json"):
        Plan.load(tmp_path / "none.json")
