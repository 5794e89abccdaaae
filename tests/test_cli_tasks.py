"""Oracle: the contract of the command line from training heads to probing them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foveate import cli
from foveate.data.scene_files import write_ade20k, write_coco
from foveate.models import open_model
from foveate.reduction.presets import plan_for
from tests import labelled, tiny

NUM = 6
CONFIG = """
model = "$TINY"
size = 32
num_views = 8

[data]
cutouts = "{folder}/cutouts"
photos = "{folder}/photos"
num = 8

[val]
folder = "{folder}/coco"

[tasks.label]
kind = "classification"
recipe = {{ steps = 6, batch_size = 4 }}

[tasks.mask]
kind = "segmentation"
settings = {{ head = "linear" }}
recipe = {{ steps = 30, batch_size = 4, learning_rate = 5e-3 }}

[tasks.objects]
kind = "detection"
settings = {{ width = 16, hidden = 16, proposals = 8, with_masks = false }}
recipe = {{ steps = 6, batch_size = 2 }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved network, cut-outs, scenes as COCO and as ADE20K, a configuration."""
    folder = tmp_path_factory.mktemp("tasks")
    tiny.hf_dinov2().save_pretrained(folder / "network")
    labelled.write_cutouts(folder)
    write_coco(labelled.composites(NUM, seed=1), folder / "coco")
    write_ade20k(labelled.composites(NUM, seed=1), folder / "ade")
    (folder / "heads.toml").write_text(CONFIG.format(folder=folder))
    return folder


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err.splitlines()


@pytest.fixture(scope="module")
def trained(folder):
    """Heads that the command has trained; its record."""
    out = folder / "heads"
    words = ["train", "heads", "--config", str(folder / "heads.toml"), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY", str(folder / "network"))
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
    assert not ended.value.code
    return json.loads((out / "train.json").read_text())


def test_heads_are_trained_scored_and_opened_again(trained, folder):
    assert list(trained["tasks"]) == ["label", "mask", "objects"]
    assert trained["num_val"] == NUM
    for name, score in (("label", "top1"), ("mask", "miou"), ("objects", "box_ap50")):
        task = trained["tasks"][name]
        assert set(task["scores"][score]) == {"value", "low", "high"}
        assert task["steps"] in (6, 30)
        assert task["num_parameters"] > 0
    assert "mask_ap" not in trained["tasks"]["objects"]["scores"]
    model = open_model(folder / "heads")
    assert {"label", "mask", "objects"} <= set(model.tasks)
    assert model.transform.size == 32


def test_evaluate_scores_the_full_and_the_reduced_model(trained, folder, capsys, tmp_path):
    model = open_model(folder / "heads")
    plan_for(model, "tome", "mask", (8, 8), {1: 40}).save(tmp_path / "plan.json")
    words = ("--checkpoint", folder / "heads", "--data", folder / "coco")
    more = ("--plan", tmp_path / "plan.json", "--out", tmp_path)
    code, out, errors = run(capsys, "evaluate", *words, *more)
    assert (code, errors) == (0, [])
    record = json.loads((tmp_path / "evaluate.json").read_text())
    assert record["num_images"] == NUM
    assert record["scores"]["full"] == trained["tasks"]["mask"]["scores"]
    assert set(record["scores"]) == {"full", "reduced", "difference"}
    assert "speed-up of the blocks" in out
    code, out, _ = run(
        capsys, "evaluate", *words, "--task", "label", "--num", 3, "--out", tmp_path
    )
    record = json.loads((tmp_path / "evaluate.json").read_text())
    assert (record["task"], record["num_images"]) == ("label", 3)
    assert list(record["scores"]) == ["full"]


@pytest.mark.parametrize("source", ["data", "scenes"])
def test_probe_measures_every_criterion(trained, folder, capsys, tmp_path, source):
    places = {
        "data": ("--data", folder / "coco"),
        "scenes": (
            *("--cutouts", folder / "cutouts"),
            *("--photos", folder / "photos", "--num", 4),
        ),
    }
    words = ("--tasks", "label,mask,objects", "--depths", "0,2", "--num-resamples", 5)
    more = ("--criteria", "random,norm", "--keep", 0.25, "--out", tmp_path)
    model = ("--model", folder / "heads")
    code, out, errors = run(capsys, "probe", *places[source], *words, *more, *model)
    assert (code, errors) == (0, [])
    record = json.loads((tmp_path / "probe.json").read_text())
    assert (record["keep"], record["num_resamples"]) == (0.25, 5)
    assert record["num_images"] == (NUM if source == "data" else 4)
    assert len(record["cells"]) == 3 * 2 * 2 * 2
    assert all(verdict["sentence"] in out for verdict in record["verdict"])
    assert run(capsys, "report", tmp_path)[0] == 0
    assert "Does one rule fit" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--tasks", "label"), ["data must have a folder, or else cutouts"]),
        (("--tasks", "fly", "--data", "coco"), ["task must be one of", "got 'fly'"]),
        (("--tasks", "cls", "--data", "coco"), ["task must be one that labels exist for"]),
        (("--tasks", "objects", "--data", "ade"), ["labels for detection", "segmentation"]),
        (
            ("--tasks", "mask", "--data", "ade"),
            ["data must have the 4 classes of the task's head; it has 150"],
        ),
        (
            ("--tasks", "mask", "--data", "coco", "--depths", "0,9"),
            ["depths must ascend, from 0 to 2", "got [0, 9]"],
        ),
        (
            ("--tasks", "mask", "--data", "coco", "--depths", "a"),
            ["depths must be integers separated by commas; got 'a'"],
        ),
        (
            ("--tasks", "mask", "--data", "coco", "--criteria", "fly"),
            ["criteria must be from random", "got 'fly'"],
        ),
        (("--tasks", "mask", "--data", "coco", "--keep", "2"), ["keep must be in (0, 1]"]),
        (("--tasks", "mask", "--data", "gone"), ["no such", "gone"]),
    ],
)
def test_a_wrong_probe_is_one_line(trained, folder, capsys, monkeypatch, words, parts):
    monkeypatch.chdir(folder)
    fixed = ("--model", folder / "heads", "--out", folder / "unwritten")
    depths = () if "--depths" in words else ("--depths", "0")
    code, out, errors = run(capsys, "probe", *words, *depths, *fixed)
    assert (code, out, len(errors)) == (2, "", 1)
    assert all(part in errors[0] for part in parts), errors
    assert not (folder / "unwritten").exists()


# --- data that is not as it should be -----------------------------------------------------


def no_annotations(folder):
    (folder / "annotations.json").unlink()


def no_image(folder):
    min((folder / "images").iterdir()).unlink()


def wrong_class(folder):
    file = folder / "annotations.json"
    record = json.loads(file.read_text())
    record["annotations"][0]["category_id"] = 77
    file.write_text(json.dumps(record))


def other_size(folder):
    file = folder / "annotations.json"
    record = json.loads(file.read_text())
    record["annotations"][0]["segmentation"]["size"] = [9, 9]
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (no_annotations, ["must hold the file", "annotations.json'; there is none"]),
        (no_image, ["must hold every file", "1 missing", ".png'"]),
        (wrong_class, ["field 'category_id' must be an id under categories; got 77"]),
        (other_size, ["[height, width] = [32, 32]; got [9, 9]"]),
    ],
)
def test_damaged_coco_is_one_line(trained, folder, capsys, tmp_path, spoil, parts):
    write_coco(labelled.composites(NUM, seed=1), tmp_path / "coco")
    spoil(tmp_path / "coco")
    refused(capsys, folder, tmp_path / "coco", "mask", parts)


def masks(folder, number, size):
    file = min((folder / "annotations" / "validation").iterdir())
    Image.fromarray(np.full(size, number, dtype=np.uint8)).save(file)


@pytest.mark.parametrize(
    ("number", "size", "parts"),
    [
        (151, (32, 32), ["must hold classes 0 to 150; got 151"]),
        (1, (32, 20), ["must be as large as its image, 32 x 32; got 20 x 32"]),
    ],
)
def test_damaged_ade20k_is_one_line(trained, folder, capsys, tmp_path, number, size, parts):
    write_ade20k(labelled.composites(2, seed=1), tmp_path / "ade")
    masks(tmp_path / "ade", number, size)
    refused(capsys, folder, tmp_path / "ade", "mask", parts)


def test_an_empty_folder_is_one_line(trained, folder, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(
        capsys,
        folder,
        tmp_path / "empty",
        "label",
        ["must be laid out as COCO", "holds no file"],
    )


def refused(capsys, folder: Path, data: Path, task: str, parts):
    model = ("--model", folder / "heads", "--out", data / "out")
    for words in (
        ("evaluate", "--task", task),
        ("probe", "--tasks", task, "--depths", 1, "--num-resamples", 2),
    ):
        code, out, errors = run(capsys, *words, "--data", data, *model)
        assert (code, out, len(errors)) == (2, "", 1)
        assert all(part in errors[0] for part in parts), errors
        assert not (data / "out").exists()
