"""Oracle: the contract of the command line for compare and benchmark; the library."""

import json

import pytest
import torch
from PIL import Image

import foveate.models
from foveate import cli
from foveate.evaluation.compare import compare
from foveate.reduction.plan import Plan
from tests import tiny

GRID = (5, 5)  # of the square images that the tiny model takes


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    """Let the command line open a tiny random network."""

    def open_tiny(name, size=tiny.IMAGE[0]):
        model = tiny.dense_model()
        model.transform = model.transform.__class__(size)
        return model

    monkeypatch.setattr(foveate.models, "open_model", open_tiny)


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Run a command in an empty folder; exit code, standard output and error lines."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err.splitlines()

    return run


@pytest.fixture
def plan(tmp_path):
    """A plan file for a grid that is not square."""
    file = tmp_path / "plan.json"
    Plan("tome", "saliency", (3, 7), ((1, 12),), alpha=0.5).save(file)
    return file


def read(tmp_path, name):
    return json.loads((tmp_path / "foveate-out" / name).read_text())


def test_compare_writes_what_the_library_finds(call, photographs, tmp_path):
    words = ("--methods", "tome, random", "--depths", "0,1", "--keep", "0.75,0.3,0.1")
    code, out, lines = call("compare", "--images", photographs, *words, "--seed", 3)
    assert (code, lines) == (0, [])
    record = read(tmp_path, "compare.json")
    assert {"model": "tiny", "task": "cls", "place": "between", "seed": 3}.items() <= (
        record.items()
    )
    assert [(r["method"], r["keep"], r["counts"]) for r in record["rows"]] == [
        ("tome", 0.75, [22, 19]),
        ("tome", 0.3, [14, 8]),
        ("random", 0.75, [22, 19]),
        ("random", 0.3, [14, 8]),
        ("random", 0.1, [8, 3]),
    ]
    needed = {"method", "depths", "keep", "counts", "output_error", "cosine", "macs"}
    assert all(needed | {"mac_ratio"} <= set(row) for row in record["rows"])
    assert [s["method"] for s in record["skipped"]] == ["tome"]
    assert record["files"] == [str(photographs / name) for name in ("a.png", "b.png")]
    assert [s["file"] for s in record["skipped_files"]] == [str(photographs / "torn.jpg")]
    assert "Left out tome at keep 0.1: keep must be from 13" in out
    assert "Skipped 1 of 3 files" in out
    model = tiny.dense_model()
    pictures = [model.transform(Image.open(photographs / n)) for n in ("a.png", "b.png")]
    terms = {"depths": [0, 1], "keeps": [0.75, 0.3], "seed": 3}
    found = compare(model, ["tome", "random"], torch.stack(pictures), **terms)
    assert [row.errors for row in found.rows] == [
        tuple(row["error_per_image"]) for row in record["rows"][:4]
    ]


def test_compare_at_equal_multiply_adds_and_with_options_for_all(
    call, photographs, tmp_path
):
    words = ("--methods", "norm,sensitivity", "--depths", 1, "--mac-ratio", "1.05,1.1")
    more = ("--place", "before", "--fuse-last", 0, "--alpha", 0.25, "--probes", 2)
    code, out, _ = call(
        "compare", "--images", photographs, "--task", "saliency", *words, *more
    )
    assert code == 0
    rows = read(tmp_path, "compare.json")["rows"]
    assert [row["target_mac_ratio"] for row in rows] == [1.05, 1.1] * 2
    assert all(row["mac_ratio"] >= row["target_mac_ratio"] for row in rows)
    for row in rows:
        plan = row["plan"]
        assert (plan["place"], plan["fuse_last"], plan["alpha"]) == ("before", 0, 0.25)
    assert rows[2]["plan"]["options"] == {"num_probes": 2, "seed": 0}
    assert "sensitivity*" in out
    assert "* back-propagates" in out


def test_compare_takes_plans_and_lets_names_follow_them(call, photographs, tmp_path):
    for name, count in (("a.json", 9), ("b.json", 20)):
        Plan("norm", "cls", GRID, ((1, count),)).save(tmp_path / name)
    words = ("--plan", "a.json", "--plan", "b.json")
    assert call("compare", "--images", photographs, *words)[0] == 0
    rows = read(tmp_path, "compare.json")["rows"]
    assert [(row["method"], row["counts"]) for row in rows] == [
        ("norm", [9]),
        ("norm", [20]),
    ]
    assert call("compare", "--images", photographs, "--methods", "random", *words)[0] == 0
    rows = read(tmp_path, "compare.json")["rows"]
    assert [row["method"] for row in rows] == ["norm", "norm", "random", "random"]


def test_compare_by_default_runs_all_methods_that_learn_nothing(
    call, photographs, tmp_path
):
    words = ("--depths", 1, "--probes", 2)
    assert call("compare", "--images", photographs, *words)[0] == 0
    record = read(tmp_path, "compare.json")
    assert {"tome", "evit", "foveate-oracle"} <= {row["method"] for row in record["rows"]}
    assert {row["keep"] for row in record["rows"]} == {0.95, 0.75, 0.5}
    code, _, lines = call("report", "foveate-out")
    assert (code, lines) == (0, [])
    page = (tmp_path / "foveate-out/report.html").read_text(encoding="utf-8")
    assert "Methods on the same images" in page


@pytest.mark.parametrize(
    "words",
    [
        ("--method", "agglomerate", "--depths", 1, "--keep", 0.5, "--size", 28),
        ("--method", "norm", "--depths", 1, "--mac-ratio", 1.1, "--images", "photos"),
    ],
)
def test_benchmark_of_a_method(call, photographs, tmp_path, words):
    code, out, lines = call("benchmark", *words, "--rounds", 2, "--batch-size", 3)
    assert (code, lines) == (0, [])
    record = read(tmp_path, "benchmark.json")
    side = 28 if "--size" in words else 20
    assert (record["image_size"], record["batch_size"]) == ([side, side], 3)
    assert record["realised"] == record["speedup"]["median"] / record["mac_ratio"]
    assert set(record["speedup"]) == {"median", "low", "high"}
    assert set(record["images_per_second"]) == {"full", "reduced"}
    assert {"overhead_share", "peak_memory_ratio"} <= set(record)
    assert ("Reduction does not pay at batch size 3" in out) == (not record["pays"])
    assert ("Skipped 1 of 3 files" in out) == ("--images" in words)


def test_benchmark_of_a_plan_takes_its_task_grid_and_threads(call, plan, tmp_path):
    before = torch.get_num_threads()
    try:
        words = ("--rounds", 2, "--warmup", 0, "--threads", 1)
        code, _, lines = call("benchmark", "--plan", plan, *words)
    finally:
        torch.set_num_threads(before)
    assert (code, lines) == (0, [])
    record = read(tmp_path, "benchmark.json")
    assert (record["task"], record["image_size"]) == ("saliency", [12, 28])
    assert (record["threads"], record["warmup"]) == (1, 0)
    assert Plan.from_record(record["plan"]) == Plan.load(plan)


COMPARE = {"--images": "photos", "--methods": "norm", "--depths": 1, "--keep": 0.5}
BENCHMARK = {"--method": "norm", "--depths": 1, "--keep": 0.5}


@pytest.mark.parametrize(
    ("command", "changes", "parts"),
    [
        ("compare", {"--methods": "norm,fly"}, ["method must be one of", "got 'fly'"]),
        ("compare", {"--depths": "1,x"}, ["depths must be integers", "got '1,x'"]),
        ("compare", {"--depths": None}, ["depths must be given", "got none"]),
        ("compare", {"--depths": 3}, ["depths must be", "got 3"]),
        ("compare", {"--keep": "0.5;1"}, ["keep must be numbers", "got '0.5;1'"]),
        ("compare", {"--keep": "nan"}, ["keep must be numbers", "got 'nan'"]),
        ("compare", {"--keep": "1.5"}, ["keep_ratio must be in (0, 1]", "got 1.5"]),
        ("compare", {"--mac-ratio": 1.1}, ["keep and mac_ratio cannot both be given"]),
        (
            "compare",
            {"--keep": None, "--mac-ratio": 9},
            ["mac_ratio must be in", "got 9.0"],
        ),
        ("compare", {"--place": "after"}, ["--place", "between", "'after'"]),
        ("compare", {"--probes": 0}, ["--probes", "got '0'"]),
        ("compare", {"--alpha": 2}, ["--alpha", "got '2'"]),
        ("compare", {"--plan": "gone"}, ["plan must be a JSON file", "gone"]),
        ("compare", {"--images": "gone"}, ["images must be", "'gone'"]),
        (
            "compare",
            {"--methods": "tome", "--keep": 0.1},
            ["methods must include one that can", "tome at keep 0.1", "got 3"],
        ),
        (
            "compare",
            {"--plan": "plan.json"},
            ["task must be the plan's 'saliency'", "'cls'"],
        ),
        ("benchmark", {"--method": None}, ["plan or method must be given", "None"]),
        ("benchmark", {"--plan": "plan.json"}, ["plan or method", "not both", "norm"]),
        (
            "benchmark",
            {"--plan": "plan.json", "--method": None},
            ["plan must stand alone", "depths='1'"],
        ),
        ("benchmark", {"--method": "fly"}, ["method must be one of", "got 'fly'"]),
        ("benchmark", {"--keep": "0.5,0.4"}, ["keep must be one number", "[0.5, 0.4]"]),
        ("benchmark", {"--rounds": 1}, ["--rounds", "got '1'"]),
        ("benchmark", {"--size": 30}, ["divisible by the patch size", "30 x 30"]),
        (
            "benchmark",
            {**dict.fromkeys(BENCHMARK), "--plan": "plan.json", "--size": 20},
            ["images must have the plan's patch grid (3, 7); got (5, 5)"],
        ),
    ],
)
def test_a_wrong_value_is_one_line_and_leaves_nothing(
    call, photographs, plan, tmp_path, command, changes, parts
):
    options = {**(COMPARE if command == "compare" else BENCHMARK), **changes}
    given = [word for pair in options.items() if pair[1] is not None for word in pair]
    before = sorted(tmp_path.rglob("*"))
    code, out, lines = call(command, *given)
    assert (code, out, len(lines)) == (2, "", 1)
    assert all(part in lines[0] for part in parts), lines
    assert sorted(tmp_path.rglob("*")) == before
