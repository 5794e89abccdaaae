"""Oracle: the contract of the command line: exit codes, one line, whole files or none."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import foveate.models
from foveate import cli
from foveate.cli.run import app
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
def photographs(tmp_path):
    """A folder with two photographs and a broken file."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed, name in enumerate(("a.png", "b.png")):
        noise = tiny.random_images((40, 52), seed=seed)[0].sigmoid()
        pixels = (255 * noise).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / name)
    (folder / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    return folder


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


def test_demo_needs_nothing(call, tiny_model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, lines = call("demo", "--out", "here")
    assert (code, lines) == (0, [])
    written = {f.name for f in (tmp_path / "here").iterdir()}
    assert {"photos", "diagnose.json", "report.html"} <= written
    assert json.loads((tmp_path / "here/diagnose.json").read_text())["num_images"] == 5


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


HEAVY = {"torch", "torchvision", "timm", "transformers", "plotly", "numpy", "PIL"}


@pytest.mark.parametrize("statement", ["import foveate", "import foveate.cli.run"])
def test_importing_is_light(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(done.stdout.split())


def test_public_names_exist_and_others_do_not():
    import foveate

    assert all(getattr(foveate, name) for name in foveate.__all__)
    assert set(foveate.__all__) <= set(dir(foveate))
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        _ = foveate.fly


def test_the_readme_calls_only_what_exists():
    import foveate

    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")
        assert set(re.findall(r"\bfv\.(\w+)", block)) <= set(foveate.__all__)
    words = re.findall(r"^foveate (\w+)", readme, flags=re.MULTILINE)
    assert set(words) <= {command.callback.__name__ for command in app.registered_commands}
    assert all((Path(__file__).parents[1] / link).exists() for link in links(readme))


def links(text):
    return re.findall(r"\]\(([^):]+)\)", text)
