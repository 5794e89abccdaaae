"""Oracle: the contract of the command line, and the scenes that the library draws."""

import json

import numpy as np
import pytest
from PIL import Image

from foveate import cli
from foveate.data.ade20k import open_ade20k
from foveate.data.coco import open_coco
from foveate.data.composites import open_composites


@pytest.fixture
def folders(tmp_path):
    """Two classes of striped blocks, and a photograph."""
    for name in ("cup", "key"):
        (tmp_path / "cutouts" / name).mkdir(parents=True)
        pixels = np.full((30, 20, 4), 255, dtype=np.uint8)
        pixels[::3, :, len(name) % 3] = 0
        Image.fromarray(pixels).save(tmp_path / "cutouts" / name / "a.png")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (60, 40), (9, 90, 60)).save(tmp_path / "photos" / "a.png")
    return tmp_path / "cutouts", tmp_path / "photos"


@pytest.fixture
def call(capsys, folders, tmp_path):
    """Make scenes; return exit code, standard output and error lines."""

    def run(*words, num=5):
        fixed = ("--cutouts", folders[0], "--photos", folders[1], "--out", tmp_path / "out")
        options = [*map(str, (*fixed, "--num", num, "--size", 32, *words))]
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", "composites", *options])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err.splitlines()

    return run


def test_coco_is_what_the_reader_reads(call, folders, tmp_path):
    code, out, errors = call("--format", "coco", "--seed", "3")
    assert (code, errors) == (0, [])
    assert "composites.json" in out
    record = json.loads((tmp_path / "out" / "composites.json").read_text())
    scenes = open_composites(*folders, 5, 32, 3)
    assert record["labels"] == [scenes[i].label for i in range(5)]
    assert (record["num_images"], record["seed"], record["format"]) == (5, 3, "coco")
    found = open_coco(tmp_path / "out" / "images", tmp_path / "out" / "annotations.json")
    assert found.classes == ("cup", "key")
    for index in range(5):
        read, scene = found[index], scenes[index]
        assert read.picture.tobytes() == scene.picture.tobytes()
        assert read.objects.labels.tolist() == scene.classes.tolist()
        assert read.objects.boxes.tolist() == scene.boxes.tolist()
        assert read.objects.masks.tolist() == scene.masks.tolist()


def test_ade20k_is_what_the_reader_reads(call, folders, tmp_path):
    code, _, errors = call("--format", "ade20k")
    assert (code, errors) == (0, [])
    scenes = open_composites(*folders, 5, 32)
    found = open_ade20k(tmp_path / "out", num_classes=2)
    for index in range(5):
        expected = (scenes[index].semantic - 1) % 256  # 0 becomes 255, which is ignored
        assert found[index].mask.tolist() == expected.tolist()


def test_the_same_command_writes_the_same_files(call, tmp_path):
    written = []
    for _ in range(2):
        assert call()[0] == 0
        files = sorted(f for f in (tmp_path / "out").rglob("*") if f.is_file())
        written.append({f: f.read_bytes() for f in files})
    assert len(written[0]) == 5 + 2
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--cutouts", "gone"), "cutouts must be a folder"),
        (("--photos", "gone"), "images must be a picture or a folder"),
        (("--size", "7"), "--size"),
        (("--format", "voc"), "--format"),
        (("--num", "0"), "--num"),
        (("--out", __file__), "out must be a folder"),
    ],
)
def test_a_wrong_word_is_one_line_and_writes_nothing(call, tmp_path, words, part):
    code, out, errors = call(*words)
    assert (code, out, len(errors)) == (2, "", 1)
    assert part in errors[0]
    assert words[1] in errors[0]
    assert not (tmp_path / "out").exists()


def test_more_pictures_than_asked_for_are_refused(call):
    assert call(num=6)[0] == 0
    code, _, errors = call(num=5)
    assert code == 2
    assert "out must not hold other pictures; got 1" in errors[0]


def test_what_there_is_is_said(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["data", "--help"])
    assert "composites" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["data"])
    assert capsys.readouterr().err == "foveate: Missing command.\n"
