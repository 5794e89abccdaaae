"""Oracle: the contract of the command line, and the head file that it leaves."""

import json
import math

import pytest
import torch

import foveate.models
from foveate import cli
from foveate.cli.distill import make_record
from foveate.scoring.heads import load_head
from foveate.training import targets
from foveate.training.distill import Distilled
from foveate.training.loop import Training
from tests import tiny
from tests.test_crops import draw

EVERY = {"num_parameters", "spearman", "seconds"}
KINDS = {
    "importance": EVERY,
    "metric": EVERY | {"alignment", "energy_error", "metric_error"},
    "factors": EVERY,
}


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch, tmp_path):
    """The command line opens a tiny random network, and writes where nothing else is."""
    monkeypatch.setattr(foveate.models, "open_model", lambda name: tiny.dense_model())
    monkeypatch.chdir(tmp_path)
    for part, count in (("train", 3), ("val", 2)):
        (tmp_path / part).mkdir()
        for i in range(count):
            draw(tmp_path / part / f"{i}.png", (30 + i, 36), seed=i + 10 * count)


@pytest.fixture
def call(capsys):
    """Run the command; return its exit code, standard output and error lines."""

    def run(kind, changes=None):
        options = {
            "--images": "train",
            "--val": "val",
            "--depth": 1,
            "--save": "new/head.safetensors",
            "--crops": 6,
            "--rank": 3,
            "--probes": 2,
            "--steps": 3,
            "--batch-size": 2,
            "--out": "out",
            **(changes or {}),
        }
        words = [str(word) for pair in options.items() for word in pair]
        with pytest.raises(SystemExit) as ended:
            cli.main(["distill", kind, *words])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err.splitlines()

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_and_its_record_are_written(call, tmp_path, kind):
    code, out, lines = call(kind)
    assert (code, lines) == (0, [])
    record = json.loads((tmp_path / "out/distill.json").read_text())
    head = load_head(tmp_path / "new/head.safetensors")
    assert KINDS[kind] <= set(record)
    assert record["num_parameters"] == sum(p.numel() for p in head.network.parameters())
    for name in KINDS[kind] - {"num_parameters", "seconds"}:
        assert set(record[name]) == {"mean", "standard_error"}
        values = record["per_image"][name]
        mean = sum(values) / 2
        assert record[name]["mean"] == pytest.approx(mean)
        error = math.sqrt(sum((v - mean) ** 2 for v in values) / 2)
        assert record[name]["standard_error"] == pytest.approx(error)
    assert -1 <= record["spearman"]["mean"] <= 1
    assert record["seconds"] == pytest.approx(sum(record["seconds_of"].values()))
    assert record["seconds"] > 0
    said = ("model", "task", "depth", "kind", "place")
    assert [record[name] for name in said] == [getattr(head, name) for name in said]
    assert (record["num_crops"], record["num_val"], record["steps"]) == (6, 2, 3)
    assert len(record["losses"]) == len(record["scores"]) == 1
    assert record["file"] == "new/head.safetensors"
    assert "spearman" in out
    assert "Wrote out/distill.json" in out
    assert "step 3: loss" in out
    course = head.provenance["course"]
    assert (course["recipe"]["batch_size"], course["rank"], course["num_probes"]) == (
        2,
        3,
        2,
    )
    found = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*.safetensors")}
    assert sum("targets-" in name for name in found) == 2
    assert not list(tmp_path.rglob("*.partial*"))


def test_a_second_call_computes_nothing_and_says_the_same(call, tmp_path, monkeypatch):
    call("importance")
    first = load_head(tmp_path / "new/head.safetensors")
    record = json.loads((tmp_path / "out/distill.json").read_text())
    monkeypatch.setattr(targets, "leading_modes", None)  # may not be called
    code, _, lines = call("importance")
    assert (code, lines) == (0, [])
    again = json.loads((tmp_path / "out/distill.json").read_text())
    clocks = ("seconds", "seconds_of")
    assert all(again[name] == record[name] for name in record if name not in clocks)
    found = load_head(tmp_path / "new/head.safetensors")
    for name, weight in found.network.state_dict().items():
        assert torch.equal(weight, first.network.state_dict()[name])
    assert found.provenance == first.provenance


def test_targets_may_be_kept_elsewhere(call, tmp_path):
    assert call("factors", {"--cache": "kept"})[0] == 0
    assert list((tmp_path / "kept").glob("train-probes-*"))
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["distill.json"]


def test_norms_need_no_modes_of_the_crops(call, tmp_path):
    assert call("importance", {"--source": "norms"})[0] == 0
    names = sorted(
        f.name.split("-cls")[0] for f in (tmp_path / "out/targets").glob("*-cls-*")
    )
    assert names == ["train-norms", "val-modes"]


def test_the_largest_seed_is_a_seed(call):
    assert call("importance", {"--seed": 2**63 - 1})[0] == 0


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("importance", "float64"), ("metric", "float64"), ("factors", "bfloat16")],
)
def test_other_precisions_of_the_model(call, tmp_path, kind, dtype):
    assert call(kind, {"--dtype": dtype})[0] == 0
    assert load_head(tmp_path / "new/head.safetensors").kind == kind


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"--images": "gone"}, ["images must be", "no such path 'gone'"]),
        ({"--val": "gone"}, ["val:", "no such path 'gone'"]),
        ({"--depth": 3}, ["depth must be from 0 to 2", "got 3"]),
        ({"--depth": -1}, ["depth must be from 0 to 2", "got -1"]),
        ({"--task": "fly"}, ["task must be one of cls, saliency", "got 'fly'"]),
        ({"--rank": 37}, ["rank must be at most the 36 outputs", "got 37"]),
        ({"--dtype": "bfloat16"}, ["dtype must be float32 or float64", "got bfloat16"]),
        ({"--rank": 0}, ["--rank", "got '0'"]),
        ({"--crops": 0}, ["--crops", "got '0'"]),
        ({"--steps": "many"}, ["--steps", "got 'many'"]),
        ({"--learning-rate": 0}, ["learning_rate must be positive", "got 0"]),
        ({"--source": "rows"}, ["--source", "modes", "'rows'"]),
        ({"--out": "train/0.png"}, ["out must be a folder", "got 'train/0.png'"]),
        ({"--save": "train"}, ["save must be a file", "got the folder 'train'"]),
        ({"--save": "train/0.png/head"}, ["save:", "must be a folder", "'train/0.png'"]),
    ],
)
def test_a_wrong_value_is_one_line_and_leaves_nothing(call, tmp_path, changes, parts):
    before = sorted(tmp_path.rglob("*"))
    code, out, lines = call("importance", changes)
    assert (code, out, len(lines)) == (2, "", 1)
    assert all(part in lines[0] for part in parts), lines
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_kind_is_one_line(call):
    code, _, lines = call("importanc")
    assert (code, len(lines)) == (2, 1)
    assert "'importanc'" in lines[0]


def test_norms_for_a_metric_are_one_line(call):
    code, _, lines = call("metric", {"--source": "norms"})
    assert (code, len(lines)) == (2, 1)
    assert "source must be 'modes' for a metric; got 'norms'." in lines[0]


def test_a_photograph_that_cannot_be_read_is_named(call, tmp_path):
    (tmp_path / "train/torn.jpg").write_bytes(b"\xff\xd8\xff")
    code, _, lines = call("importance")
    assert (code, len(lines)) == (2, 1)
    assert "files must be readable; 'train/torn.jpg' cannot be read" in lines[0]
    assert not (tmp_path / "out/distill.json").exists()


def test_an_interrupt_leaves_what_was_finished(call, tmp_path, monkeypatch):
    compute = targets.leading_modes

    def interrupt(model, task, images, *rest):
        if len(images) == 2:  # the photographs to validate on
            raise KeyboardInterrupt
        return compute(model, task, images, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(targets, "leading_modes", interrupt)
        assert call("importance") == (130, "", [])
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "out/distill.json").exists()
    assert len(list(tmp_path.rglob("targets-*.safetensors"))) == 1
    assert call("importance")[0] == 0


def test_a_measure_that_is_not_defined_has_no_number():
    head = tiny.untrained_head("metric", provenance={"course": {"num_crops": 5}})
    measures = {"energy_error": [math.nan, 0.5, 0.7], "alignment": [math.nan] * 3}
    found = Distilled(head, Training(1, [1.0], [0.5], 1), measures, {"training": 1.0})
    record = make_record(found, 3, "head")
    json.dumps(record, allow_nan=False)
    assert record["energy_error"]["mean"] == pytest.approx(0.6)
    assert record["energy_error"]["standard_error"] == pytest.approx(0.1)
    assert record["alignment"] == {"mean": None, "standard_error": None}
    assert record["per_image"]["energy_error"] == [None, 0.5, 0.7]
    assert record["num_parameters"] > 1000
