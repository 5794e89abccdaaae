"""Oracle: the contract of the command line: exit codes, one line, whole files or none."""

import json
import signal
import sys

import pytest
import torch

import foveate.models
from foveate import cli
from tests import tiny

SUMMARY = (
    "kappa_cap",
    "cv",
    "rank_entropy",
    "rank_participation",
    "rank_stable",
    "rank_90",
)


@pytest.fixture
def tiny_model(monkeypatch):
    """Let the command line open a tiny random network."""
    monkeypatch.setattr(foveate.models, "open_model", lambda name: tiny.dense_model())


@pytest.fixture
def call(capsys):
    """Run a command; return its exit code, standard output and error lines."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err.splitlines()

    return run


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["Missing command"]),
        (["fly"], ["No such command", "'fly'"]),
        (["diagnose", "--depth", "1"], ["Missing option", "--images"]),
        (["diagnose", "--imges", "x"], ["No such option", "--imges"]),
        (
            ["diagnose", "--images", "x", "--depth", "low"],
            ["--depth", "integer", "got 'low'"],
        ),
        (
            ["demo", "--batch-size", "0"],
            ["--batch-size", "greater than or equal", "got '0'"],
        ),
        (["demo", "--seed", "-1"], ["--seed", "greater than or equal to 0", "got '-1'"]),
        (
            ["demo", "--seed", str(2**63)],
            ["--seed", "less than or equal", f"got '{2**63}'"],
        ),
        (["demo", "--dtype", "int8"], ["--dtype", "float32", "'int8'"]),
        (
            ["diagnose", "--images", "x", "--depth", "1", "--rank", "0"],
            ["--rank", "got '0'"],
        ),
        (["report"], ["Missing argument", "directory"]),
        (
            ["report", "gone"],
            ["directory must be a folder with diagnose.json", "got 'gone'"],
        ),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(
    call, monkeypatch, tmp_path, words, parts
):
    monkeypatch.chdir(tmp_path)
    code, out, lines = call(*words)
    assert (code, out, len(lines)) == (2, "", 1)
    assert all(part in lines[0] for part in parts), lines
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"--images": "gone"}, ["images must be", "no such path 'gone'"]),
        ({"--images": "."}, ["images must hold a usable picture", "1 unusable"]),
        ({"--task": "fly"}, ["task must be one of cls, saliency", "got 'fly'"]),
        ({"--device": "tpu9"}, ["device must be", "got 'tpu9'"]),
        ({"--depth": "3"}, ["depth must be from 0 to 2", "got 3"]),
        ({"--depth": "-1"}, ["depth must be from 0 to 2", "got -1"]),
        ({"--rank": "37"}, ["rank must be", "36", "got 37"]),
        ({"--out": "torn.jpg"}, ["out must be a folder", "got 'torn.jpg'"]),
    ],
)
def test_a_wrong_value_is_one_line_and_leaves_nothing(
    call, tiny_model, photographs, monkeypatch, tmp_path, changes, parts
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    before = sorted(tmp_path.rglob("*"))
    if changes.get("--images") == ".":
        photographs.rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
        before = sorted(tmp_path.rglob("*"))
    options = {
        "--images": photographs,
        "--depth": 1,
        "--rank": 3,
        "--out": "out",
        **changes,
    }
    code, out, lines = call(
        "diagnose", *(word for pair in options.items() for word in pair)
    )
    assert (code, out, len(lines)) == (2, "", 1)
    assert all(part in lines[0] for part in parts), lines
    assert sorted(tmp_path.rglob("*")) == before


def test_not_a_number_in_the_weights_is_one_line(call, photographs, monkeypatch, tmp_path):
    model = tiny.dense_model()
    with torch.no_grad():
        next(model.backbone.parameters()).fill_(float("nan"))
    monkeypatch.setattr(foveate.models, "open_model", lambda name: model)
    out_dir = tmp_path / "out"
    words = ("--images", photographs, "--depth", 1, "--rank", 3, "--out", out_dir)
    code, _, lines = call("diagnose", *words)
    assert (code, len(lines)) == (2, 1)
    assert not out_dir.exists()


def test_diagnose_writes_the_record_and_names_what_it_skipped(
    call, tiny_model, photographs, tmp_path
):
    out_dir = tmp_path / "new/out"
    words = ("--images", photographs, "--depth", 1, "--rank", 3, "--out", out_dir)
    code, out, lines = call("diagnose", *words)
    assert (code, lines) == (0, [])
    assert [f.name for f in out_dir.iterdir()] == ["diagnose.json"]
    record = json.loads((out_dir / "diagnose.json").read_text())
    assert (record["model"], record["task"], record["depth"]) == ("tiny", "cls", 1)
    assert (record["rank"], record["num_images"], record["num_outputs"]) == (3, 2, 36)
    assert record["route"] in {"exact", "randomised"}
    assert set(record["products"]) == {"jvp", "vjp"}
    for tokens in ("all", "patches"):
        assert all(set(record[tokens][k]) == {"mean", "standard_error"} for k in SUMMARY)
    assert [image["file"] for image in record["images"]] == [
        str(photographs / name) for name in ("a.png", "b.png")
    ]
    for image in record["images"]:
        rows, columns = image["grid"]
        assert (
            len(image["patches"]["importance"]) == rows * columns == record["num_patches"]
        )
        assert len(image["patches"]["block_norm"]) == rows * columns
    assert [s["file"] for s in record["skipped"]] == [str(photographs / "torn.jpg")]
    assert "Skipped 1 of 3 files" in out
    assert "torn.jpg: cannot be read" in out
    assert record["regime"] in out


def test_the_same_seed_writes_the_same_bytes(call, tiny_model, photographs, tmp_path):
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        words = ("--images", photographs, "--depth", 1, "--rank", 3, "--exact", "never")
        call("diagnose", *words, "--seed", seed, "--probes", 6, "--out", tmp_path / name)
        texts.append((tmp_path / name / "diagnose.json").read_text())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_report_makes_a_page_of_what_diagnose_wrote(
    call, tiny_model, photographs, tmp_path
):
    words = ("--images", photographs, "--depth", 1, "--rank", 3, "--out", tmp_path / "out")
    call("diagnose", *words)
    code, out, lines = call("report", tmp_path / "out")
    assert (code, lines) == (0, [])
    assert str(tmp_path / "out/report.html") in out.replace("\n", "")
    assert "a.png" in (tmp_path / "out/report.html").read_text(encoding="utf-8")


def test_an_error_of_our_own_is_not_hidden(monkeypatch, call, photographs):
    def fail(name):
        raise TypeError("a defect")

    monkeypatch.setattr(foveate.models, "open_model", fail)
    with pytest.raises(TypeError, match="a defect"):
        cli.main(["diagnose", "--images", str(photographs), "--depth", "1"])


def test_an_interrupt_ends_with_130_and_leaves_no_half_file(
    call, tiny_model, photographs, monkeypatch, tmp_path
):
    def interrupt(*words, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("foveate.diagnosis.diagnose.diagnose", interrupt)
    words = ("--images", photographs, "--depth", 1, "--out", tmp_path / "out")
    assert call("diagnose", *words) == (130, "", [])
    assert not (tmp_path / "out").exists()


def test_an_interrupt_that_a_library_hides_ends_with_130(
    call, tiny_model, photographs, monkeypatch, tmp_path
):
    def hide(*words, **options):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("could not be imported") from None

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("foveate.diagnosis.diagnose.diagnose", hide)
    words = ("--images", photographs, "--depth", 1, "--out", tmp_path / "out")
    assert call("diagnose", *words) == (130, "", [])
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_while_the_commands_are_imported_ends_with_130(call, monkeypatch):
    class Interrupt:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "foveate.cli.run":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "foveate.cli.run")
    monkeypatch.setattr(sys, "meta_path", [Interrupt, *sys.meta_path])
    assert call("--help") == (130, "", [])


def test_what_cannot_be_written_is_one_line_and_no_partial_file(
    call, tiny_model, photographs, tmp_path
):
    (tmp_path / "out/diagnose.json").mkdir(parents=True)
    words = ("--images", photographs, "--depth", 1, "--rank", 3, "--out", tmp_path / "out")
    code, out, lines = call("diagnose", *words)
    assert (code, out, len(lines)) == (2, "", 1)
    assert "diagnose.json" in lines[0]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["diagnose.json"]
