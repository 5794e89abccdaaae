"""Oracle: the files that ``demo`` promises, and that nothing is left when it fails."""

import json

import pytest

import foveate.models
from foveate import cli
from foveate.cli import demo
from foveate.data import bundled
from foveate.reduction.plan import Plan
from tests import tiny

RECORDS = {"diagnose.json", "compare.json", "benchmark.json", "plan.json"}


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    """Let the command line open a tiny random network."""
    monkeypatch.setattr(foveate.models, "open_model", lambda name: tiny.dense_model())


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Run the demo in an empty folder; exit code, standard output and error lines."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main(["demo", "--out", "here", *words])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err.splitlines()

    return run


def test_demo_runs_the_whole_path(call, tmp_path):
    code, out, lines = call("--seed", "3")
    assert (code, lines) == (0, [])
    folder = tmp_path / "here"
    assert {f.name for f in folder.iterdir()} == RECORDS | {"photos", "report.html"}
    photographs = sorted((folder / "photos").iterdir())
    assert [f.stem for f in photographs] == sorted(bundled.PHOTOGRAPHS)
    for name in (*RECORDS, "report.html"):
        assert f"Wrote here/{name}" in out

    diagnosis, comparison, benchmark = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("diagnose", "compare", "benchmark")
    )
    assert (diagnosis["num_images"], diagnosis["depth"]) == (5, 1)
    assert [(row["method"], row["keep"], row["depths"]) for row in comparison["rows"]] == [
        (method, keep, [2])
        for method in demo.METHODS
        if method != "foveate"  # nobody has taught a head on this model
        for keep in demo.KEEPS
    ]
    assert comparison["rows"][-1]["plan"]["options"] == {
        "num_probes": demo.NUM_PROBES,
        "seed": 3,
    }
    skipped = [(refused["method"], refused["keep"]) for refused in comparison["skipped"]]
    assert skipped == [("foveate", keep) for keep in demo.KEEPS]
    assert all("foveate distill factors" in s["reason"] for s in comparison["skipped"])
    assert "Timing tome in place of foveate: head must be given" in out
    assert (benchmark["rounds"], benchmark["warmup"]) == (6, 1)
    plan = Plan.load(folder / "plan.json")
    assert plan == Plan("tome", "cls", (5, 5), ((1, 13),))
    assert plan == Plan.from_record(benchmark["plan"])

    page = (folder / "report.html").read_text(encoding="utf-8")
    for heading in ("Methods on the same images", "Clock and memory", "astronaut"):
        assert heading in page


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--task", "fly"], "task must be one of cls, saliency"),
        (["--device", "tpu9"], "device must be"),
    ],
)
def test_a_wrong_value_leaves_nothing(call, tmp_path, words, part):
    code, out, lines = call(*words)
    assert (code, out, len(lines)) == (2, "", 1)
    assert part in lines[0]
    assert not list(tmp_path.iterdir())


def test_without_its_photographs_it_says_what_to_install(call, monkeypatch, tmp_path):
    monkeypatch.setattr(bundled, "find_spec", lambda name: None)
    code, out, lines = call()
    assert (code, out, len(lines)) == (2, "", 1)
    assert "pip install 'foveate[demo]'" in lines[0]
    assert not list(tmp_path.iterdir())


def test_what_was_finished_stays_when_it_is_interrupted(call, monkeypatch, tmp_path):
    def interrupt(*words, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("foveate.evaluation.benchmark.benchmark", interrupt)
    code, _, lines = call()
    assert (code, lines) == (130, [])
    written = {f.name for f in (tmp_path / "here").iterdir()}
    assert written == {"photos", "diagnose.json", "compare.json"}
