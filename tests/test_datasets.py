"""Oracle: the formats as their makers publish them, by hand; numpy on the pixels."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from foveate.data.ade20k import open_ade20k
from foveate.data.coco import draw_mask, open_coco
from foveate.data.imagenet import open_imagenet
from foveate.data.nyu import open_nyu

WIDTH, HEIGHT = 12, 9


def noise(size=(WIDTH, HEIGHT), seed=0):
    shape = (size[1], size[0], 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels)


def save(picture, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.save(file)
    return file


# ImageNet-1K


def test_imagenet_numbers_synsets_among_all_thousand(tmp_path):
    for synset in ("n15075141", "n01440764", "n01443537"):
        save(noise(), tmp_path / synset / f"ILSVRC2012_val_{synset}.JPEG")
    save(noise(seed=1), tmp_path / "n01443537" / "a.JPEG")
    found = open_imagenet(tmp_path)
    assert found.labels == (0, 1, 1, 999)  # tench, goldfish, ..., toilet tissue
    assert [f.name for f in found.files][1:3] == ["ILSVRC2012_val_n01443537.JPEG", "a.JPEG"]
    sample = found[3]
    assert (sample.label, sample.picture.mode) == (999, "RGB")
    assert not found.is_official


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, r"'.*val' holds no folder"),
        ("cat", r"named by ImageNet-1K's synsets, as n01440764; got 'cat'"),
        ("n01440764", r"must hold pictures in '.*n01440764'; it holds none"),
    ],
)
def test_imagenet_names_what_is_wrong(tmp_path, name, message):
    (tmp_path / "val").mkdir()
    if name:
        (tmp_path / "val" / name).mkdir()
    with pytest.raises(ValueError, match=message):
        open_imagenet(tmp_path / "val")


def test_imagenet_must_be_there_and_readable(tmp_path):
    with pytest.raises(ValueError, match=r"folder for each synset; got no such .*gone"):
        open_imagenet(tmp_path / "gone")
    save(noise(), tmp_path / "n01440764" / "a.JPEG").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"'.*a.JPEG' cannot be read"):
        _ = open_imagenet(tmp_path)[0]


# ADE20K


@pytest.fixture
def ade20k(tmp_path):
    """One picture with classes 0, 1 and 150."""
    numbers = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    numbers[2:4], numbers[5:] = 1, 150
    save(noise(), tmp_path / "images" / "validation" / "ADE_val_00000001.jpg")
    save(Image.fromarray(numbers), annotation(tmp_path))
    return tmp_path


def annotation(folder, number=1):
    return folder / "annotations" / "validation" / f"ADE_val_0000000{number}.png"


def test_ade20k_ignores_zero_and_begins_at_one(ade20k):
    found = open_ade20k(ade20k)
    mask = found[0].mask
    assert mask.shape == (HEIGHT, WIDTH)
    assert mask.dtype == torch.int64
    rows = [255, 255, 0, 0, 255, 149, 149, 149, 149]
    assert mask[:, 3].tolist() == rows
    assert (len(found), found.is_official) == (1, False)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: annotation(f).unlink(), r"1 missing, the first '.*00000001.png'"),
        (lambda f: save(noise(), annotation(f, 2)), r"no.* for 1 in .*ADE_val_00000002'"),
        (lambda f: (f / "images" / "validation" / "ADE_val_00000001.jpg").unlink(), "none"),
        (lambda f: (f / "images").rename(f / "pictures"), r"the folder '.*images/valid"),
    ],
)
def test_ade20k_lists_must_agree(ade20k, spoil, message):
    spoil(ade20k)
    with pytest.raises(ValueError, match=message):
        open_ade20k(ade20k)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            np.full((HEIGHT, WIDTH), 151, np.uint8),
            r"'.*1.png' must hold classes 0 to 150.*151",
        ),
        (
            np.zeros((HEIGHT, 5), np.uint8),
            r"'.*1.png' must be as large .*12 x 9; got 5 x 9",
        ),
        (
            np.zeros((HEIGHT, WIDTH, 3), np.uint8),
            r"'.*1.png' must have mode L or P; got RGB",
        ),
    ],
)
def test_ade20k_masks_must_fit(ade20k, mask, message):
    save(Image.fromarray(mask), annotation(ade20k))
    with pytest.raises(ValueError, match=message):
        _ = open_ade20k(ade20k)[0]


def test_ade20k_number_of_classes_has_eight_bits(ade20k):
    with pytest.raises(ValueError, match=r"num_classes must be 1 to 254; got 255"):
        open_ade20k(ade20k, num_classes=255)
    with pytest.raises(ValueError, match=r"classes 0 to 149; got 150"):
        _ = open_ade20k(ade20k, num_classes=149)[0]


# COCO


def instances():
    """Two pictures, three objects in the first, categories 1, 18 and 90."""
    runs = {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * 2, HEIGHT, HEIGHT * 9]}
    square = [[1.0, 2.0, 5.0, 2.0, 5.0, 6.0, 1.0, 6.0]]
    images = [
        {"id": number, "file_name": name, "width": WIDTH, "height": HEIGHT}
        for number, name in ((42, "b.jpg"), (7, "a.jpg"))
    ]
    objects = [
        {"id": 1, "category_id": 90, "bbox": [1, 2, 4, 4.5], "segmentation": square},
        {
            "id": 2,
            "category_id": 1,
            "bbox": [2, 0, 1, 9],
            "segmentation": runs,
            "iscrowd": 1,
        },
        {"id": 3, "category_id": 18, "bbox": [0, 0, 2, 2], "segmentation": square * 2},
    ]
    names = {1: "person", 18: "dog", 90: "toothbrush"}
    return {
        "images": images,
        "annotations": [{"image_id": 7, "iscrowd": 0, **o} for o in objects],
        "categories": [{"id": number, "name": name} for number, name in names.items()],
    }


@pytest.fixture
def coco(tmp_path):
    """Write pictures, and a record; return folder and file."""

    def write(record):
        for seed, name in enumerate(("a.jpg", "b.jpg")):
            save(noise(seed=seed), tmp_path / "val2017" / name)
        file = tmp_path / "instances_val2017.json"
        file.write_text(record if isinstance(record, str) else json.dumps(record))
        return tmp_path / "val2017", file

    return write


def test_coco_closes_the_gaps_between_ids(coco):
    found = open_coco(*coco(instances()))
    assert found.image_ids == (7, 42)
    assert found.category_ids == (1, 18, 90)
    assert found.classes == ("person", "dog", "toothbrush")
    objects = found[0].objects
    assert objects.labels.tolist() == [2, 0, 1]
    assert objects.boxes.tolist() == [[1, 2, 5, 6.5], [2, 0, 3, 9], [0, 0, 2, 2]]
    assert objects.crowd.tolist() == [False, True, False]
    assert not found.is_official


def test_coco_masks_are_drawn_from_polygons_and_run_lengths(coco):
    square, column, same = open_coco(*coco(instances()))[0].objects.masks.numpy()
    expected = np.zeros((HEIGHT, WIDTH), dtype=bool)
    expected[2:6, 1:5] = True
    assert (square == expected).all()
    assert (same == expected).all()
    assert column.any(axis=0).nonzero()[0].tolist() == [2]
    assert column[:, 2].all()


def test_coco_reads_compressed_run_lengths(coco):
    from faster_coco_eval.core import mask

    pixels = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    pixels[1:7:2, 3:11:3] = 1
    code = mask.encode(np.asfortranarray(pixels))
    text = {"size": code["size"], "counts": code["counts"].decode()}
    assert (draw_mask(text, (WIDTH, HEIGHT)).numpy() == pixels).all()


def test_coco_keeps_pictures_without_objects(coco):
    objects = open_coco(*coco(instances()))[1].objects
    assert objects.boxes.shape == (0, 4)
    assert objects.masks.shape == (0, HEIGHT, WIDTH)
    assert objects.labels.shape == objects.crowd.shape == (0,)


def changed(part, index=0, **fields):
    """The record with fields of one entry replaced; None takes a field away."""
    record = instances()
    entry = {**record[part][index], **fields}
    record[part][index] = {k: v for k, v in entry.items() if v is not None}
    return record


ONE = [[1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", r"'.*json' must be JSON"),
        ("[]", r"'.*json' must be a JSON object; got list"),
        ({"images": []}, r"'.*json' must have the field 'annotations'"),
        ({**instances(), "categories": []}, r"images and categories; got 2 and 0"),
        ({**instances(), "images": {}}, r"field 'images' must be of type list; got dict"),
        (changed("images", id="7"), r"images: field 'id' must be of type int; got str"),
        (changed("images", width=None), r"image 42 must have the field 'width'"),
        (changed("images", file_name="c.jpg"), r"under images; 1 missing, .*c.jpg'"),
        (changed("categories", name=3), r"category 1: field 'name' .* str; got int"),
        (changed("annotations", image_id=8), r"annotation 1: field 'image_id' .*; got 8"),
        (changed("annotations", category_id=2), r"1: field 'category_id' .*; got 2"),
        (changed("annotations", bbox=[1, 2, 3]), r"field 'bbox' .*; got \[1, 2, 3\]"),
        (changed("annotations", bbox=[0, 0, -1, 2]), r"field 'bbox' .*; got \[0, 0, -1"),
        (changed("annotations", bbox=None), r"annotation 1 must have the field 'bbox'"),
        (changed("annotations", segmentation=ONE), r"polygons of at least 3 points"),
        (changed("annotations", segmentation=[]), r"polygons of at least 3 points"),
        (
            changed(
                "annotations", 1, segmentation={"size": [WIDTH, HEIGHT], "counts": "x"}
            ),
            r"annotation 2: .*\[height, width\] = \[9, 12\]; got \[12, 9\]",
        ),
        (
            changed(
                "annotations", 1, segmentation={"size": [HEIGHT, WIDTH], "counts": [7]}
            ),
            r"annotation 2: .* must count 108 pixels; got 7",
        ),
    ],
)
def test_coco_names_file_annotation_and_field(coco, record, message):
    with pytest.raises(ValueError, match=message):
        open_coco(*coco(record))


def test_coco_must_be_there(coco, tmp_path):
    with pytest.raises(
        ValueError, match=r"must hold the file '.*gone.json'; there is none"
    ):
        open_coco(tmp_path, tmp_path / "gone.json")


def test_coco_pictures_must_have_the_listed_size(coco):
    record = instances()
    folder, file = coco(record)
    save(noise((WIDTH, HEIGHT + 1)), folder / "b.jpg")
    with pytest.raises(ValueError, match=r"'.*b.jpg' must be 12 x 9, as .*; got 12 x 10"):
        _ = open_coco(folder, file)[1]


def test_coco_names_a_mask_that_cannot_be_decoded(coco):
    broken = {"size": [HEIGHT, WIDTH], "counts": "zz~~~"}
    found = open_coco(*coco(changed("annotations", 1, segmentation=broken)))
    with pytest.raises(
        ValueError, match=r"annotation 2: field 'segmentation' must be a mask"
    ):
        _ = found[0]


# NYU-Depth-V2


def save_nyu(folder, names, millimetres=None, size=(640, 480)):
    if millimetres is None:
        millimetres = np.full((480, 640), 2500, dtype=np.uint16)
    save(Image.new("RGB", size, (9, 9, 9)), folder / names[0])
    save(Image.fromarray(millimetres), folder / names[1])


@pytest.mark.parametrize(
    "names",
    [
        ("bathroom/rgb_00045.jpg", "bathroom/sync_depth_00045.png"),
        ("00000_colors.png", "00000_depth.png"),
    ],
)
def test_nyu_counts_pixels_in_the_crop_and_range(tmp_path, names):
    millimetres = np.full((480, 640), 2500, dtype=np.uint16)
    millimetres[100, 100:105] = (0, 1, 2, 10000, 10001)
    save_nyu(tmp_path, names, millimetres)
    found = open_nyu(tmp_path)
    sample = found[0]
    assert sample.depth.dtype == torch.float32
    assert sample.depth[100, 102:106].tolist() == pytest.approx([0.002, 10, 10.001, 2.5])
    expected = np.zeros((480, 640), dtype=bool)
    expected[45:471, 41:601] = True
    expected[100, [100, 101, 104]] = False
    assert (sample.valid.numpy() == expected).all()
    assert (len(found), found.is_official) == (1, False)


def test_nyu_names_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"folder with NYU-Depth-V2; got '.*gone'"):
        open_nyu(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"rgb_\*.jpg with sync_depth_\*.png.* holds none"):
        open_nyu(tmp_path)
    save_nyu(tmp_path, ("0_colors.png", "0_depth.png"))
    (tmp_path / "0_depth.png").unlink()
    with pytest.raises(ValueError, match=r"1 missing, the first '.*0_depth.png'"):
        open_nyu(tmp_path)


@pytest.mark.parametrize(
    ("millimetres", "size", "message"),
    [
        (None, (320, 240), r"'.*colors.png' must be 640 x 480.*; got 320 x 240"),
        (np.zeros((480, 640), np.uint8), (640, 480), r"'.*depth.png' must have mode I;16"),
        (np.zeros((240, 640), np.uint16), (640, 480), r"'.*depth.png' must be as large"),
    ],
)
def test_nyu_pairs_must_fit(tmp_path, millimetres, size, message):
    save_nyu(tmp_path, ("0_colors.png", "0_depth.png"), millimetres, size)
    with pytest.raises(ValueError, match=message):
        _ = open_nyu(tmp_path)[0]


# NYU-Depth-V2, the authors' file


def save_mat(folder, num=4, size=(640, 480), split=(2, 4), **changes):
    """Pictures as MATLAB writes them, column by column; picture k has depth k metres."""
    import h5py
    from scipy.io import savemat

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num, 3, *size), dtype=np.uint8)
    depths = np.arange(1, num + 1, dtype=np.float32)[:, None, None] * np.ones(size, "f4")
    depths[:, 30, 20] = 0
    with h5py.File(folder / "nyu_depth_v2_labeled.mat", "w") as mat:
        for name, values in {"images": images, "depths": depths, **changes}.items():
            if values is not None:
                mat[name] = values
    if split is not None:
        numbers = np.array(split, dtype=np.uint16)[:, None]
        savemat(folder / "splits.mat", {"testNdxs": numbers, "trainNdxs": numbers + 1})
    return images


def test_nyu_reads_the_test_set_from_the_authors_file(tmp_path):
    images = save_mat(tmp_path)
    found = open_nyu(tmp_path)
    assert (len(found), found.is_official) == (2, False)
    assert [f.name for f in found.files] == ["00002", "00004"]
    sample = found[1]
    assert sample.picture.size == (640, 480)
    assert sample.picture.mode == "RGB"
    assert sample.picture.getpixel((100, 50)) == tuple(images[3, :, 100, 50])
    assert sample.depth.shape == sample.valid.shape == (480, 640)
    assert sample.depth.dtype == torch.float32
    assert (float(sample.depth[50, 100]), float(sample.depth[20, 30])) == (4, 0)
    expected = np.zeros((480, 640), dtype=bool)
    expected[45:471, 41:601] = True
    assert (sample.valid.numpy() == expected).all()


def test_nyu_prefers_depths_as_measured(tmp_path):
    raw = np.full((4, 640, 480), 7, "f4")
    raw[:, 300, 200] = 0
    save_mat(tmp_path, rawDepths=raw)
    sample = open_nyu(tmp_path)[0]
    assert (float(sample.depth[50, 100]), float(sample.depth[200, 300])) == (7, 0)
    assert int(sample.valid.sum()) == 426 * 560 - 1


def test_nyu_takes_all_pictures_without_a_split(tmp_path):
    save_mat(tmp_path, num=3, split=None)
    assert open_nyu(tmp_path).indices == (0, 1, 2)
    from foveate.data.labelled import open_labelled

    data = open_labelled(tmp_path)
    assert list(data.classes) == ["depth"]
    assert [float(data[i].target.depth[100, 100]) for i in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (64, 48)}, r"images \(N, 3, 640, 480\) .* Eigen's crop .*64, 48"),
        ({"depths": None}, r"must hold images .* and depths .*; got \{'images'"),
        (
            {"depths": np.ones((2, 640, 480), "f4")},
            r"must hold images .*'depths': \(2, 640, 480\)",
        ),
        ({"split": (2, 5)}, r"splits.mat' must name pictures from 1 to 4 .* up to 5"),
        ({"split": (0, 1)}, r"splits.mat' must name pictures from 1 to 4"),
    ],
)
def test_nyu_names_what_is_wrong_in_the_authors_file(tmp_path, changes, message):
    save_mat(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        open_nyu(tmp_path)


def test_nyu_names_a_torn_file(tmp_path):
    save_mat(tmp_path)
    (tmp_path / "splits.mat").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"splits.mat' must be a MATLAB file with testNd"):
        open_nyu(tmp_path)
    (tmp_path / "nyu_depth_v2_labeled.mat").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"labeled.mat' must be an HDF5 file"):
        open_nyu(tmp_path)


def test_nyu_says_what_to_install(tmp_path, monkeypatch):
    import sys

    save_mat(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs h5py: pip install 'foveate\[nyu"):
        open_nyu(tmp_path)
