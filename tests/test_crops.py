"""Oracle: Pillow on the same box, another process, closed forms of area and aspect."""

import hashlib
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.testing import assert_close

from foveate.data.crops import Crops, Photographs, crop_size
from foveate.data.folder import ImageTransform
from tests import tiny

SIZE = 12
PLAIN = ImageTransform(SIZE, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # pixels from 0 to 1

OTHER_PROCESS = """
import hashlib, sys
from pathlib import Path
from foveate.data.crops import Crops
from foveate.data.folder import ImageTransform
crops = Crops([Path(f) for f in sys.argv[1:]], ImageTransform(12), 9, seed=5)
print(hashlib.sha256(crops.batch(0, 9).numpy().tobytes()).hexdigest())
"""


def draw(file, size, seed=0):
    """A photograph of noise, ``size`` is width and height."""
    noise = tiny.random_images(size[::-1], seed=seed)[0].sigmoid()
    Image.fromarray((255 * noise).byte().permute(1, 2, 0).numpy()).save(file)
    return file


@pytest.fixture
def files(tmp_path):
    sizes = {"a.png": (40, 30), "b.png": (25, 60), "c.png": (12, 12)}
    return [draw(tmp_path / name, size) for name, size in sizes.items()]


@pytest.fixture
def ramp(tmp_path):
    """Red is the column and green the row, so that a crop says where it is from."""
    x, y = np.meshgrid(np.arange(200), np.arange(100))
    Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8)).save(tmp_path / "r.png")
    return tmp_path / "r.png"


# --- the same index, the same crop --------------------------------------------------------


def test_another_process_draws_the_same_bytes(files):
    here = Crops(files, ImageTransform(SIZE), 9, seed=5).batch(0, 9)
    words = [sys.executable, "-c", OTHER_PROCESS, *map(str, files)]
    there = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert there.strip() == hashlib.sha256(here.numpy().tobytes()).hexdigest()


def test_a_longer_list_begins_with_a_shorter_one_and_no_order_matters(files):
    short, long = (Crops(files, PLAIN, num, seed=3) for num in (5, 12))
    torch.manual_seed(1)
    backwards = [long[i] for i in reversed(range(5))]
    assert torch.equal(short.batch(0, 5), torch.stack(backwards[::-1]))
    assert torch.equal(long.batch(2, 4), long.batch(0, 12)[2:4])
    assert (len(short), len(long)) == (5, 12)


def test_another_seed_draws_other_crops_and_the_largest_seed_some(files):
    crops = [Crops(files, PLAIN, 4, seed).batch(0, 4) for seed in (0, 1, 2**63 - 1)]
    assert all((a != b).any() for a in crops for b in crops if a is not b)


def test_crop_i_is_of_file_i_modulo_the_files(tmp_path):
    files = []
    for value in (10, 120, 230):
        files.append(tmp_path / f"{value}.png")
        Image.new("RGB", (20, 30), (value, value, value)).save(files[-1])
    crops = Crops(files, PLAIN, 7).batch(0, 7)
    values = [10, 120, 230, 10, 120, 230, 10]
    assert_close(crops.mean((1, 2, 3)), torch.tensor(values) / 255)


# --- where a crop is from -----------------------------------------------------------------


def boxes(crops):
    """Left, top, right and bottom edge of each crop of the ramp, and whether mirrored."""
    found = []
    for index in range(len(crops)):
        red, green, _ = 255 * crops[index]
        mirrored = bool(red[:, 0].mean() > red[:, -1].mean())
        red = red.flip(1) if mirrored else red
        x, y = red.mean(0), green.mean(1)
        width = float(x[-4] - x[3]) / (SIZE - 7) * SIZE
        height = float(y[-4] - y[3]) / (SIZE - 7) * SIZE
        middle = float(x[3:-3].mean()) + 0.5, float(y[3:-3].mean()) + 0.5
        left, top = middle[0] - width / 2, middle[1] - height / 2
        found.append((left, top, left + width, top + height, mirrored))
    return np.array(found)


def test_crops_are_within_the_picture_and_of_the_shares_asked_for(ramp):
    found = boxes(Crops([ramp], PLAIN, 300, scale=(0.1, 0.4)))
    left, top, right, bottom, mirrored = found.T
    assert left.min() > -1.5
    assert top.min() > -1.5
    assert right.max() < 201.5
    assert bottom.max() < 101.5
    share = (right - left) * (bottom - top) / 20000
    aspect = (right - left) / (bottom - top)
    assert 0.095 < share.min() < 0.12
    assert 0.38 < share.max() < 0.42
    assert 0.69 < aspect.min() < 0.8  # whole grey levels give the edges
    assert 1.25 < aspect.max() < 1.42
    assert abs(share.mean() - 0.25) < 0.02  # uniform
    assert abs(np.log(aspect).mean()) < 0.04  # log-uniform
    assert 0.4 < mirrored.mean() < 0.6
    room = left / (200 - (right - left))  # uniform from 0 to 1
    assert abs(room.mean() - 0.5) < 0.06
    assert abs(room.std() - 12**-0.5) < 0.03
    assert abs(np.corrcoef(share, aspect)[0, 1]) < 0.15


def test_a_crop_is_the_box_that_its_five_numbers_say(files):
    crops = Crops(files[:1], ImageTransform(SIZE), 6, seed=2)
    picture, mirrored = Image.open(files[0]), set()
    for index, crop in enumerate(crops):
        generator = torch.Generator().manual_seed(2 * 1_000_003 + index)
        area, aspect, left, top, flip = torch.rand(5, generator=generator).tolist()
        pixels = (0.25 + 0.75 * area) * 40 * 30
        ratio = 0.75 * (16 / 9) ** aspect
        width, height = min(40, (pixels * ratio) ** 0.5), min(30, (pixels / ratio) ** 0.5)
        x, y = left * (40 - width), top * (30 - height)
        box = (x, y, x + width, y + height)
        truth = picture.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box)
        truth = truth.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip < 0.5 else truth
        assert_close(crop, ImageTransform(SIZE)(truth), rtol=0, atol=0.02)
        mirrored.add(flip < 0.5)
    assert index == 5
    assert len(mirrored) == 2


@given(
    size=st.tuples(st.integers(8, 3000), st.integers(8, 3000)),
    scale=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(sorted),
    area=st.floats(0, 1),
    aspect=st.floats(0, 1),
)
@settings(deadline=None)
def test_the_size_of_a_crop(size, scale, area, aspect):
    width, height = crop_size(size, tuple(scale), area, aspect)
    assert 1 <= width <= size[0]
    assert 1 <= height <= size[1]
    share, ratio = width * height / (size[0] * size[1]), width / height
    assert share <= (1 + 1e-9) * (scale[0] + (scale[1] - scale[0]) * area) or 1 in (
        width,
        height,
    )
    if 1 < width < size[0] and 1 < height < size[1]:
        assert share == pytest.approx(scale[0] + (scale[1] - scale[0]) * area)
        assert math.log(ratio) == pytest.approx(math.log(4 / 3) * (2 * aspect - 1))


def test_what_would_stick_out_is_shortened():
    assert crop_size((100, 10), (1.0, 1.0), 0.3, 0.5) == (pytest.approx(1000**0.5), 10)
    assert crop_size((10, 100), (1.0, 1.0), 0.3, 0.5) == (10, pytest.approx(1000**0.5))


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_any_crop_of_any_picture_can_be_cut(data):
    """Boxes end at the edge, where rounding must not carry them over it."""
    size = data.draw(st.tuples(st.integers(8, 90), st.integers(8, 90)))
    draws = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=4, max_size=4))
    picture = Image.new("RGB", size)
    width, height = crop_size(size, (0.9, 1.0), draws[0], draws[1])
    x, y = draws[2] * (size[0] - width), draws[3] * (size[1] - height)
    picture.resize((4, 4), Image.Resampling.BICUBIC, box=(x, y, x + width, y + height))


# --- whole photographs --------------------------------------------------------------------


def test_photographs_are_prepared_as_the_model_wants_them(files):
    transform = ImageTransform(SIZE)
    found = Photographs(files, transform)
    truth = torch.stack([transform(Image.open(file)) for file in files])
    assert torch.equal(found.batch(0, 3), truth)
    assert torch.equal(found[1], truth[1])
    assert (len(found), found.scale, found.seed) == (3, None, 0)


# --- what goes wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_out_of_range_is_refused(files, index):
    for pictures in (Crops(files, PLAIN, 3), Photographs(files, PLAIN)):
        with pytest.raises(IndexError, match=f"index must be from 0 to 2; got {index}"):
            pictures[index]


def test_a_file_that_cannot_be_read_is_named(files, tmp_path):
    torn = tmp_path / "torn.jpg"
    torn.write_bytes(b"\xff\xd8\xff")
    for pictures in (Crops([*files, torn], PLAIN, 4), Photographs([*files, torn], PLAIN)):
        assert pictures.batch(0, 3).isfinite().all()
        with pytest.raises(
            ValueError, match=r"files must be readable; '.*torn\.jpg' cannot"
        ):
            pictures.batch(0, 4)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"files": []}, "files and num must be at least 1; got 0 files and num 3"),
        ({"num": 0}, "files and num must be at least 1; got 3 files and num 0"),
        ({"scale": (0.0, 1.0)}, r"scale must be two shares within \(0, 1\]; got \(0\.0"),
        ({"scale": (0.5, 0.4)}, r"scale must be two .* got \(0\.5, 0\.4\)"),
        ({"scale": (0.5, 1.1)}, r"scale must be two .* got \(0\.5, 1\.1\)"),
        ({"scale": (math.nan, 1.0)}, r"scale must be two .* got \(nan, 1\.0\)"),
    ],
)
def test_numbers_out_of_range_are_refused(files, change, wrong):
    with pytest.raises(ValueError, match=wrong):
        Crops(**{"files": files, "transform": PLAIN, "num": 3, **change})


def test_no_photographs_are_refused():
    with pytest.raises(ValueError, match="files must name at least one picture; got none"):
        Photographs([], PLAIN)
