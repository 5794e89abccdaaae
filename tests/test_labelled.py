"""Oracle: the layouts as their makers publish them; scenes and their files on disk."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from foveate.data.labelled import IGNORED, Example, open_labelled
from foveate.data.scene_files import write_ade20k, write_coco
from tests import labelled

WIDTH, HEIGHT = 12, 9


def picture(size=(WIDTH, HEIGHT)):
    return Image.new("RGB", size, (9, 99, 199))


def save(image, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file)


def rectangle(left, top, right, bottom):
    return [[left, top, right, top, right, bottom, left, bottom]]


def write_instances(folder, images="val2017"):
    """One picture: a dog, a smaller cup on it, a crowd that is larger than both."""
    boxes = [(1, 1, 9, 8, 18, 0), (2, 2, 5, 5, 47, 0), (0, 0, 12, 9, 47, 1)]
    objects = [
        {
            "id": index,
            "image_id": 3,
            "category_id": category,
            "bbox": [left, top, right - left, bottom - top],
            "segmentation": rectangle(left, top, right, bottom),
            "iscrowd": crowd,
        }
        for index, (left, top, right, bottom, category, crowd) in enumerate(boxes)
    ]
    listed = {"id": 3, "file_name": "a.jpg", "width": WIDTH, "height": HEIGHT}
    bare = {**listed, "id": 4, "file_name": "b.jpg"}
    record = {
        "images": [listed, bare],
        "annotations": objects,
        "categories": [{"id": 18, "name": "dog"}, {"id": 47, "name": "cup"}],
    }
    (folder / "annotations").mkdir()
    file = folder / "annotations" / "instances_val2017.json"
    file.write_text(json.dumps(record))
    for name in ("a.jpg", "b.jpg"):
        save(picture(), folder / images / name)


@pytest.mark.parametrize("images", ["val2017", "images/val2017"])
def test_coco_gives_class_mask_and_objects(tmp_path, images):
    write_instances(tmp_path, images)
    data = open_labelled(tmp_path)
    assert data.classes == {
        "classification": ("dog", "cup"),
        "segmentation": ("background", "dog", "cup"),
        "detection": ("dog", "cup"),
    }
    assert len(data) == 2
    first, bare = data[0].target, data[1].target
    assert first.label == 0  # the largest that is no crowd
    expected = np.full((HEIGHT, WIDTH), IGNORED)
    expected[1:8, 1:9] = 1
    expected[2:5, 2:5] = 2
    assert first.mask.tolist() == expected.tolist()
    assert first.objects.labels.tolist() == [0, 1, 1]
    assert first.objects.crowd.tolist() == [False, False, True]
    assert bare.label is None
    assert not bare.mask.any()
    assert bare.objects.boxes.shape == (0, 4)


def test_ade20k_gives_masks(tmp_path):
    numbers = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    numbers[2:4], numbers[5:] = 1, 150
    save(picture(), tmp_path / "images" / "validation" / "ADE_val_00000001.jpg")
    save(
        Image.fromarray(numbers),
        tmp_path / "annotations" / "validation" / "ADE_val_00000001.png",
    )
    data = open_labelled(tmp_path)
    assert list(data.classes) == ["segmentation"]
    assert len(data.classes_for("segmentation")) == 150
    target = data[0].target
    assert target.mask[:, 0].tolist() == [255, 255, 0, 0, 255, *[149] * 4]
    assert (target.label, target.objects, target.depth) == (None, None, None)
    with pytest.raises(ValueError, match=r"labels for detection; .* for segmentation"):
        data.classes_for("detection")


def test_ade20k_for_training_is_taken_if_there_is_no_validation(tmp_path):
    save(picture(), tmp_path / "images" / "training" / "a.jpg")
    mask = Image.fromarray(np.ones((HEIGHT, WIDTH), dtype=np.uint8))
    save(mask, tmp_path / "annotations" / "training" / "a.png")
    assert "training" in open_labelled(tmp_path).files[0]
    (tmp_path / "images" / "training" / "a.jpg").unlink()
    (tmp_path / "images" / "training").rmdir()
    with pytest.raises(ValueError, match=r"must hold the folder '.*images/validation'"):
        open_labelled(tmp_path)


def test_imagenet_gives_labels(tmp_path):
    save(picture(), tmp_path / "n15075141" / "ILSVRC2012_val_00000001.JPEG")
    save(picture(), tmp_path / "n01440764" / "ILSVRC2012_val_00000002.JPEG")
    data = open_labelled(tmp_path)
    assert [data[i].target.label for i in range(2)] == [0, 999]
    assert len(data.classes_for("classification")) == 1000


def test_nyu_gives_depth_and_where_it_counts(tmp_path):
    millimetres = np.full((480, 640), 2500, dtype=np.uint16)
    save(picture((640, 480)), tmp_path / "bathroom" / "rgb_00045.jpg")
    save(Image.fromarray(millimetres), tmp_path / "bathroom" / "sync_depth_00045.png")
    data = open_labelled(tmp_path)
    target = data[0].target
    assert data.classes_for("depth") == ()
    assert float(target.depth[200, 200]) == 2.5
    assert int(target.valid.sum()) == 426 * 560


def same(first: Example, second: Example, with_objects: bool) -> bool:
    mine, other = first.target, second.target
    if not with_objects:
        return first.picture.tobytes() == second.picture.tobytes()
    pairs = zip(mine.objects, other.objects, strict=True)
    return (
        first.picture.tobytes() == second.picture.tobytes()
        and mine.label == other.label
        and torch.equal(mine.mask, other.mask)
        and all(torch.equal(a, b) for a, b in pairs)
    )


def test_scenes_are_what_their_files_say(tmp_path):
    drawn = labelled.scenes(5, seed=3)
    write_coco(labelled.composites(5, seed=3), tmp_path / "coco")
    read = open_labelled(tmp_path / "coco")
    assert read.classes == drawn.classes
    assert all(same(read[i], drawn[i], True) for i in range(5))
    assert len({drawn[i].target.label for i in range(5)}) > 1


def test_scenes_as_ade20k_ignore_the_photograph(tmp_path):
    write_ade20k(labelled.composites(3, seed=3), tmp_path / "ade")
    read, drawn = open_labelled(tmp_path / "ade"), labelled.scenes(3, seed=3)
    for index in range(3):
        assert same(read[index], drawn[index], False)
        mask = drawn[index].target.mask
        expected = torch.where(mask == 0, IGNORED, mask - 1)
        assert torch.equal(read[index].target.mask, expected)


def test_the_first_are_a_data_set_of_their_own():
    data = labelled.scenes(5)
    assert len(data.first(2)) == 2
    assert len(data.first(0)) == len(data.first(9)) == 5
    assert same(data.first(2)[1], data[1], True)
    assert len(list(data.first(2))) == 2
    with pytest.raises(IndexError, match="index must be from 0 to 1; got 2"):
        data.first(2)[2]


def test_what_is_no_data_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a folder with a data set; got no such"):
        open_labelled(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"must be laid out as COCO, .* holds no file"):
        open_labelled(tmp_path)
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match=r"must hold the file '.*annotations.json'"):
        open_labelled(tmp_path)
