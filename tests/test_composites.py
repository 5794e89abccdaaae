"""Oracle: closed forms on flat pictures, numpy on the pixels, invariants of a scene."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from foveate.data.composites import Composites, Ranges, Scene, open_composites
from foveate.data.cutouts import Cutout, Cutouts, load_cutouts, load_photographs
from foveate.data.scene_files import run_lengths, write_ade20k, write_coco

SIZE = 48
STILL = {"gamma": (1.0, 1.0), "gain": (1.0, 1.0)}
COLOURS = {"apple": (255, 0, 0), "leaf": (0, 255, 0), "sea": (0, 0, 255)}
GREY = (100, 100, 100)


def disc(colour, side=40, margin=0):
    """A disc of one colour, sharp, in a transparent square."""
    pixels = np.zeros((side, side, 4), dtype=np.uint8)
    y, x = np.mgrid[:side, :side] - (side - 1) / 2
    pixels[x**2 + y**2 <= (side / 2) ** 2] = (*colour, 255)
    return Image.fromarray(np.pad(pixels, ((margin, margin), (margin, margin), (0, 0))))


@pytest.fixture
def folders(tmp_path):
    """Cut-outs of three classes, and two flat photographs."""
    for number, (name, colour) in enumerate(COLOURS.items()):
        (tmp_path / "cutouts" / name).mkdir(parents=True)
        for each in range(number + 1):
            disc(colour, 40 + 8 * each, margin=5).save(
                tmp_path / "cutouts" / name / f"{each}.png"
            )
    (tmp_path / "photos").mkdir()
    for name, size in (("wide.png", (120, 80)), ("tall.png", (50, 90))):
        Image.new("RGB", size, GREY).save(tmp_path / "photos" / name)
    return tmp_path / "cutouts", tmp_path / "photos"


def scenes_of(folders, num=40, seed=0, **ranges):
    return open_composites(*folders, num, SIZE, seed, Ranges(**{**STILL, **ranges}))


def test_what_is_seen_is_what_is_labelled(folders):
    scenes = scenes_of(folders, objects=(1, 6))
    for scene in (scenes[i] for i in range(len(scenes))):
        pixels = np.asarray(scene.picture)
        flat = {
            index: (pixels == COLOURS[name]).all(axis=2)
            for index, name in enumerate(scenes.classes)
        }
        semantic = scene.semantic.numpy()
        grey = (pixels == GREY).all(axis=2)
        for index, mask in flat.items():
            assert (semantic[mask] == index + 1).all()
        assert (semantic[grey] == 0).all()
        pure = grey | np.logical_or.reduce([*flat.values()])
        assert pure.mean() > 0.7  # the others are blended edges


def test_masks_are_disjoint_and_boxes_are_tight(folders):
    scenes = scenes_of(folders, objects=(5, 9), scale=(0.4, 0.9))
    for scene in (scenes[i] for i in range(len(scenes))):
        masks, num = scene.masks, len(scene.classes)
        assert masks.shape == (num, SIZE, SIZE)
        assert masks.sum(dim=0).max() == 1
        assert_close(scene.areas, masks.sum(dim=(1, 2)))
        assert (scene.areas > 0).all()
        for box, mask in zip(scene.boxes, masks, strict=True):
            rows, columns = mask.nonzero().T
            ends = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert box.tolist() == ends
        largest = scene.areas.tolist().index(max(scene.areas.tolist()))
        assert scene.label == scene.classes[largest]


def test_hidden_objects_are_left_out(folders):
    scenes = scenes_of(folders, num=20, objects=(30, 30), scale=(0.9, 1.0))
    nums = [len(scenes[i].classes) for i in range(len(scenes))]
    assert max(nums) < 30
    assert min(nums) >= 1


def test_a_visible_share_is_of_the_whole_object(folders):
    scenes = scenes_of(folders, num=60, objects=(2, 2), scale=(0.5, 0.5))
    side = SIZE // 2
    whole = int((np.asarray(disc(GREY, 240).resize((side, side)))[..., 3] >= 128).sum())
    seen = [scenes[i] for i in range(len(scenes))]
    shares = torch.cat([scene.visible for scene in seen])
    areas = torch.cat([scene.areas for scene in seen]).double()
    assert_close(areas, shares * whole, atol=0.05 * whole, rtol=0)
    assert_close(shares[shares == 1].unique(), torch.ones(1, dtype=torch.float64))
    assert 0 < shares.min() < 0.5
    assert all(scene.visible[-1] == 1 for scene in seen)  # the frontmost


def test_objects_behind_are_cut_off_at_all_sides_alike(folders):
    scenes = scenes_of(folders, num=300, objects=(2, 2), scale=(0.3, 0.3))
    boxes = torch.cat([scenes[i].boxes[:-1] for i in range(300)])
    ends = torch.tensor([0, 0, SIZE, SIZE])
    touching = (boxes == ends).sum(dim=0)
    expected = 300 * 0.15  # the centre lies nearer to a side than half an object
    assert (touching - expected).abs().max() < 4 * expected**0.5


def test_all_is_drawn(folders):
    seen = [scenes_of(folders, num=200)[i] for i in range(200)]
    assert {scene.label for scene in seen} == {0, 1, 2}
    assert {len(scene.classes) for scene in seen} >= {1, 2, 3}
    first = torch.bincount(torch.cat([scene.classes for scene in seen]))
    expected = first.sum() / 3
    assert (first - expected).abs().max() < 4 * expected.sqrt()  # classes are uniform


def test_lighting_changes_pixels_and_not_labels(folders):
    plain, lit = scenes_of(folders), scenes_of(folders, gamma=(0.7, 1.4), gain=(0.8, 1.2))
    for index in range(5):
        assert torch.equal(plain[index].instances, lit[index].instances)
        assert plain[index].picture.tobytes() != lit[index].picture.tobytes()


def test_pictures_are_mirrored_every_second_time(tmp_path):
    ramp = np.zeros((60, 60, 3), dtype=np.uint8)
    ramp[..., 0] = np.arange(60) * 4
    objects = np.full((20, 20, 4), 255, dtype=np.uint8)
    objects[:, :10, 1] = 0
    (tmp_path / "cutouts" / "a").mkdir(parents=True)
    (tmp_path / "photos").mkdir()
    Image.fromarray(objects).save(tmp_path / "cutouts" / "a" / "a.png")
    Image.fromarray(ramp).save(tmp_path / "photos" / "a.png")
    scenes = scenes_of((tmp_path / "cutouts", tmp_path / "photos"), 200, objects=(1, 1))
    turned = []
    for scene in (scenes[i] for i in range(200)):
        pixels = np.asarray(scene.picture).astype(int)
        left, top, right, bottom = scene.boxes[0].int().tolist()
        row = pixels[0] if top > 3 else pixels[-1]
        middle = (top + bottom) // 2
        turned.append((
            row[0, 0] > row[-1, 0],
            pixels[middle, left + 1, 1] > pixels[middle, right - 2, 1],
        ))
    for share in np.mean(turned, axis=0):
        assert abs(share - 0.5) < 4 * 0.5 / 200**0.5


def test_an_index_always_gives_the_same(folders):
    short, long = scenes_of(folders, 3, seed=7), scenes_of(folders, 9, seed=7)
    other = scenes_of(folders, 3, seed=8)
    assert long[2].picture.tobytes() == short[2].picture.tobytes()
    assert torch.equal(long[2].instances, short[2].instances)
    assert other[2].picture.tobytes() != short[2].picture.tobytes()
    assert short[1].picture.tobytes() != short[2].picture.tobytes()


def test_another_process_gives_the_same_bytes(folders, tmp_path):
    code = (
        "import sys; from pathlib import Path;"
        "from foveate.data.composites import open_composites;"
        "from foveate.data.scene_files import write_coco;"
        "write_coco(open_composites(sys.argv[1], sys.argv[2], 4, 48, 3), sys.argv[3])"
    )
    words = [sys.executable, "-c", code, *map(str, folders), str(tmp_path / "there")]
    subprocess.run(words, check=True)
    write_coco(open_composites(*folders, 4, SIZE, 3), tmp_path / "here")
    files = sorted(f for f in (tmp_path / "here").rglob("*") if f.is_file())
    assert len(files) == 5
    for file in files:
        there = tmp_path / "there" / file.relative_to(tmp_path / "here")
        assert file.read_bytes() == there.read_bytes()


def test_a_transparent_edge_is_blended_and_belongs_to_what_is_behind(tmp_path):
    for alpha, is_seen in ((127, False), (128, True)):
        pixels = np.full((8, 8, 4), (200, 200, 200, alpha), dtype=np.uint8)
        pixels[:, 4:] = (0, 0, 0, 255)
        cutouts = Cutouts(("a",), ((Cutout(Image.fromarray(pixels), tmp_path),),))
        whole = Ranges(objects=(1, 1), scale=(0.5, 0.5), **STILL)
        photo = Image.new("RGB", (16, 16), GREY)
        scene = Composites(cutouts, [photo], 1, 16, ranges=whole)[0]
        assert int(scene.areas) == (8 * 8 if is_seen else 8 * 4)
        blended = round(100 + 100 * alpha / 255)
        assert (np.asarray(scene.picture) == blended).all(axis=2).sum() == 32


def test_margins_are_trimmed_and_large_pictures_shrunk(folders):
    cutouts = load_cutouts(folders[0], 20, 5)
    assert cutouts.classes == ("apple", "leaf", "sea")
    assert [len(each) for each in cutouts.by_class] == [1, 2, 3]
    assert {c.picture.size for each in cutouts.by_class for c in each} == {(20, 20)}
    assert load_cutouts(folders[0], 64, 5).by_class[2][2].picture.size == (56, 56)
    sizes = [photo.size for photo in load_photographs(folders[1], 60)]
    assert sizes == [(50, 90), (90, 60)]


def test_run_lengths_begin_with_zeros():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]], dtype=torch.bool)
    assert run_lengths(mask) == [2, 1, 1, 2]
    assert run_lengths(~mask) == [0, 2, 1, 1, 2]
    assert run_lengths(torch.zeros(2, 3, dtype=torch.bool)) == [6]
    assert run_lengths(torch.ones(2, 3, dtype=torch.bool)) == [0, 6]


def test_coco_ids_begin_at_one_and_counts_add_up(folders, tmp_path):
    scenes = scenes_of(folders, 6)
    told = []
    counts = write_coco(scenes, tmp_path / "out", lambda *state: told.append(state))
    written = json.loads((tmp_path / "out" / "annotations.json").read_text())
    assert [i["id"] for i in written["images"]] == [1, 2, 3, 4, 5, 6]
    ids = [a["id"] for a in written["annotations"]]
    assert ids == [*range(1, len(ids) + 1)]
    assert [c["id"] for c in written["categories"]] == [1, 2, 3]
    assert told == [(n, 6) for n in range(1, 7)]
    assert counts["num_objects"] == len(ids) == sum(counts["objects_of_class"].values())
    assert counts["labels"] == [scenes[i].label for i in range(6)]
    for annotation in written["annotations"]:
        assert annotation["area"] == sum(annotation["segmentation"]["counts"][1::2])
    pixels = np.asarray(Image.open(tmp_path / "out" / "images" / "000003.png"))
    assert pixels.tobytes() == scenes[3].picture.tobytes()


def test_ade20k_masks_hold_classes_from_one(folders, tmp_path):
    scenes = scenes_of(folders, 3)
    write_ade20k(scenes, tmp_path)
    for index in range(3):
        file = tmp_path / "annotations" / "validation" / f"00000{index}.png"
        mask = np.asarray(Image.open(file))
        assert mask.dtype == np.uint8
        assert (mask == scenes[index].semantic.numpy()).all()


def test_pictures_of_other_scenes_are_not_mixed_in(folders, tmp_path):
    write_coco(scenes_of(folders, 3), tmp_path)
    write_coco(scenes_of(folders, 4), tmp_path)
    with pytest.raises(ValueError, match=r"other pictures; got 2 .* '000002.png'"):
        write_coco(scenes_of(folders, 2), tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c, p: (c / "none").mkdir(), r"none in '.*none'"),
        (lambda c, p: (c / "apple" / "0.png").write_bytes(b"x"), r"'.*apple/0.png': "),
        (
            lambda c, p: Image.new("RGB", (9, 9)).save(c / "sea" / "x.png"),
            r"alpha channel; '.*sea/x.png' has mode RGB",
        ),
        (
            lambda c, p: Image.new("RGBA", (9, 9)).save(c / "sea" / "x.png"),
            r"opaque pixel .* '.*sea/x.png' has none",
        ),
        (lambda c, p: (p / "torn.jpg").write_bytes(b"x"), r"'.*torn.jpg' cannot be read"),
    ],
)
def test_a_broken_file_is_named(folders, spoil, message):
    spoil(*folders)
    with pytest.raises(ValueError, match=message):
        scenes_of(folders)


def test_folders_must_hold_something(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"cutouts must be a folder .*'.*gone'"):
        open_composites(tmp_path / "gone", folders[1], 1)
    with pytest.raises(ValueError, match=r"1 to 254 folders, one a class; got 0"):
        open_composites(tmp_path / "empty", folders[1], 1)
    with pytest.raises(ValueError, match=r"got none in '.*empty'"):
        open_composites(folders[0], tmp_path / "empty", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num": 0}, r"num must be at least 1; got 0"),
        ({"size": 7}, r"size must be at least 8; got 7"),
        ({"seed": -1}, r"seed must be at least 0; got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(folders, change, message):
    with pytest.raises(ValueError, match=message):
        open_composites(*folders, **{"num": 1, **change})


@pytest.mark.parametrize(
    "wrong",
    [
        {"objects": (0, 2)},
        {"scale": (0.5, 0.2)},
        {"crop": (0.5, 1.1)},
        {"gain": (0.0, 1.0)},
    ],
)
def test_ranges_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be two numbers"):
        Ranges(**wrong)


def test_there_is_no_scene_beyond_the_last(folders):
    with pytest.raises(IndexError, match=r"from 0 to 39; got 40"):
        _ = scenes_of(folders)[40]


def test_a_scene_in_closed_form():
    instances = torch.tensor([[0, 1, 1], [2, 2, 1]], dtype=torch.uint8)
    share = torch.tensor([0.5, 1.0], dtype=torch.float64)
    scene = Scene(Image.new("RGB", (3, 2)), instances, torch.tensor([4, 1]), share)
    assert scene.semantic.tolist() == [[0, 5, 5], [2, 2, 5]]
    assert scene.boxes.tolist() == [[1, 0, 3, 2], [0, 1, 2, 2]]
    assert (scene.areas.tolist(), scene.label) == ([3, 2], 4)
