"""Oracle: every recipe runs from end to end on a tiny data set in the exact format."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foveate import cli
from foveate.data.scene_files import write_ade20k, write_coco
from tests import labelled, tiny

RECIPES = Path(__file__).parent.parent / "recipes"
SETS = ("imagenet", "ade20k", "coco")


def write_imagenet(folder):
    for split in ("train", "val"):
        for seed, synset in enumerate(("n01440764", "n03388043")):
            (folder / split / synset).mkdir(parents=True)
            for index in range(2):
                noise = np.random.default_rng(9 * seed + index).integers(
                    0, 255, (40, 36, 3)
                )
                file = folder / split / synset / f"{index}.JPEG"
                Image.fromarray(noise.astype(np.uint8)).save(file)


def write_data(name, folder):
    if name == "imagenet":
        return write_imagenet(folder)
    for seed, split in enumerate(("train2017", "val2017")):
        scenes = labelled.composites(4, 32, seed)
        if name == "coco":
            write_coco(scenes, folder / "parts")
            (folder / "annotations").mkdir(exist_ok=True)
            (folder / "parts" / "images").rename(folder / split)
            (folder / "parts" / "annotations.json").rename(
                folder / "annotations" / f"instances_{split}.json"
            )
            continue
        write_ade20k(scenes, folder / "parts")
        for kind in ("images", "annotations"):
            (folder / kind).mkdir(exist_ok=True)
            part = ("training", "validation")[seed]
            (folder / "parts" / kind / "validation").rename(folder / kind / part)
    return None


def shortened(text, network, heads):
    """The same recipe for a network of three blocks and 64 patches, for two steps."""
    text = re.sub(r'"timm:[^"]+"', f'"{network}"', text)
    text = re.sub(r'"out/[^"]+"', f'"{heads}"', text)
    for name, value in {"size": 32, "num_views": 4, "steps": 2, "batch_size": 2}.items():
        text = re.sub(rf"^{name} = [\d]+", f"{name} = {value}", text, flags=re.M)
    text = text.replace("[3, 6, 9, 12]", "[1, 2, 3]").replace("[3, 6, 9]", "[0, 1, 2]")
    text = re.sub(r"remove = \d+", "remove = 32", text)
    text = re.sub(r"least = .*", "least = [8, 8, 0]", text)
    text = text.replace("width = 256, hidden = 1024, proposals = 1000", "width = 16")
    return text.replace('precision = "bf16"', 'precision = "no"')


def run(*words):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code


@pytest.mark.parametrize("name", SETS)
def test_a_recipe_runs(tmp_path, monkeypatch, name):
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    tiny.hf_dinov2().save_pretrained(tmp_path / "network")
    write_data(name, tmp_path / "data")
    for part in ("heads", "tap"):
        text = (RECIPES / f"{name}-{part}.toml").read_text()
        text = shortened(text, tmp_path / "network", tmp_path / "heads")
        (tmp_path / f"{part}.toml").write_text(text)
    heads = ("train", "heads", "--config", tmp_path / "heads.toml")
    assert run(*heads, "--out", tmp_path / "heads") == 0
    for form in ("tap-j", "tap-f"):
        words = ("train", form, "--config", tmp_path / "tap.toml")
        assert run(*words, "--out", tmp_path / form) == 0
        record = json.loads((tmp_path / form / "train.json").read_text())
        assert sum(record["counts"]) == 32
        assert record["masked_difference"] < 1e-4
        assert set(record["scores"]) == {"full", "reduced", "difference"}
        assert record["alpha"] is None if name == "imagenet" else len(record["alpha"]) == 3
        log = (tmp_path / form / "train.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in log] == [2]


def test_every_recipe_is_run_here_or_made_for_the_scenes():
    known = {f"{name}-{part}.toml" for name in SETS for part in ("heads", "tap")}
    assert {f.name for f in RECIPES.glob("*.toml")} - known == {"composites-heads.toml"}


def test_a_pruned_checkpoint_is_evaluated_by_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    tiny.hf_dinov2().save_pretrained(tmp_path / "network")
    write_data("ade20k", tmp_path / "data")
    for part, form in (("heads", "heads"), ("tap", "tap-f")):
        text = (RECIPES / f"ade20k-{part}.toml").read_text()
        (tmp_path / f"{part}.toml").write_text(
            shortened(text, tmp_path / "network", tmp_path / "heads")
        )
        words = ("train", form, "--config", tmp_path / f"{part}.toml")
        assert run(*words, "--out", tmp_path / part) == 0
    data = tmp_path / "data"
    words = ("evaluate", "--checkpoint", tmp_path / "tap", "--data", data)
    assert run(*words, "--out", tmp_path / "scored") == 0
    record = json.loads((tmp_path / "scored" / "evaluate.json").read_text())
    assert record["plan"]["schedule"][-1][1] == 32
    assert record["mac_ratio"] > 1
    assert record["num_images"] == 4
