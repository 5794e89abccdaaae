"""Oracle: numpy on the written pixels, bit for bit; Pillow for resampling."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from foveate.data.bundled import PHOTOGRAPHS, bundled_photographs, write_photographs
from foveate.data.folder import (
    ImageTransform,
    Skipped,
    find_images,
    load_images,
    read_images,
    read_picture,
    to_rgb,
)

SIZE = 16
PLAIN = ImageTransform(SIZE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def pixels(height=SIZE, width=SIZE, channels=3, seed=0):
    """Random bytes, ``(height, width, channels)``."""
    shape = (height, width, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(file, array, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(file, **options)
    return file


def rgb_of(file):
    return np.asarray(read_picture(file))


def test_finds_every_kind_in_every_folder_in_order(tmp_path):
    names = [
        "b/z.PNG",
        "a.jpg",
        "b/c/d.webp",
        "e.tiff",
        "f.Gif",
        "g.bmp",
        "h.jpeg",
        "i.tif",
    ]
    for name in names:
        save(tmp_path / name, pixels())
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "folder.png").mkdir()
    found = find_images(tmp_path)
    assert found == sorted(tmp_path / name for name in names)
    assert find_images(tmp_path / "a.jpg") == [tmp_path / "a.jpg"]


def test_a_file_may_have_any_name(tmp_path):
    file = save(tmp_path / "picture", pixels(), format="png")
    assert find_images(str(file)) == [file]


def test_rejects_a_path_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"images must be .*; got no such path '.*gone'"):
        find_images(tmp_path / "gone")


def test_rejects_a_folder_without_pictures(tmp_path):
    (tmp_path / "notes.txt").write_text("no picture")
    with pytest.raises(
        ValueError, match=r"images must be a folder with pictures .*got none"
    ):
        find_images(tmp_path)


def test_a_picture_of_the_model_size_passes_bit_for_bit(tmp_path):
    array = pixels()
    loaded = load_images([save(tmp_path / "a.png", array)], PLAIN)
    expected = torch.from_numpy(array).permute(2, 0, 1)[None] / 255
    assert torch.equal(loaded.images, expected)


def test_normalises_each_channel_by_its_own_numbers():
    array = pixels()
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    image = ImageTransform(SIZE, mean, std)(Image.fromarray(array))
    expected = (array / 255 - np.array(mean)) / np.array(std)
    assert_close(
        image.permute(1, 2, 0).double(), torch.from_numpy(expected), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("height", "width"), [(16, 40), (50, 16)])
def test_crops_the_centre_of_the_longer_side(height, width):
    array = pixels(height, width)
    top, left = (height - SIZE) // 2, (width - SIZE) // 2
    centre = array[top : top + SIZE, left : left + SIZE]
    image = PLAIN(Image.fromarray(array))
    assert torch.equal(image, torch.from_numpy(centre).permute(2, 0, 1) / 255)


def test_resamples_as_pillow_does_bicubic():
    smooth = Image.fromarray(pixels(8, 11)).resize((88, 64), Image.Resampling.BICUBIC)
    image = PLAIN(smooth)
    expected = (
        np.asarray(smooth.resize((22, SIZE), Image.Resampling.BICUBIC))[:, 3:19] / 255
    )
    assert_close(
        image.permute(1, 2, 0), torch.from_numpy(expected).float(), rtol=0, atol=1.01 / 255
    )


@pytest.mark.parametrize(
    ("orientation", "undo"),
    [
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (6, lambda a: np.rot90(a, 1)),
        (8, lambda a: np.rot90(a, -1)),
    ],
)
def test_turns_a_picture_upright(tmp_path, orientation, undo):
    upright = pixels(12, 20)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(undo(upright))
    file = save(tmp_path / "a.png", stored, exif=exif)
    assert np.array_equal(rgb_of(file), upright)


def test_repeats_grey(tmp_path):
    grey = pixels()[..., 0]
    file = save(tmp_path / "a.png", grey)
    assert np.array_equal(rgb_of(file), np.repeat(grey[..., None], 3, axis=2))


def test_scales_sixteen_bit_grey_and_does_not_cut_it_off(tmp_path):
    deep = (np.arange(SIZE * SIZE).reshape(SIZE, SIZE) * 257).astype(np.uint16)
    deep += np.random.default_rng(0).integers(0, 257, deep.shape, dtype=np.uint16) * (
        deep < 65000
    )
    expected = np.rint(deep / 257).astype(np.uint8)
    for name in ("a.png", "a.tif"):
        rgb = rgb_of(save(tmp_path / name, deep))
        assert np.array_equal(rgb, np.repeat(expected[..., None], 3, axis=2))


def test_lays_transparency_over_white(tmp_path):
    array = pixels(channels=4)
    colour, alpha = array[..., :3].astype(float), array[..., 3:] / 255
    expected = colour * alpha + 255 * (1 - alpha)
    rgb = rgb_of(save(tmp_path / "a.png", array))
    assert np.abs(rgb - expected).max() <= 1
    assert np.array_equal(
        to_rgb(Image.new("RGBA", (9, 9))), np.full((9, 9, 3), 255, np.uint8)
    )


def test_lays_transparent_grey_and_palettes_over_white(tmp_path):
    grey = pixels(channels=2)
    alpha = grey[..., 1:] / 255
    rgb = rgb_of(save(tmp_path / "grey.png", grey))
    assert np.abs(rgb - (grey[..., :1] * alpha + 255 * (1 - alpha))).max() <= 1

    palette = Image.new("P", (SIZE, SIZE))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putdata([0, 1] * (SIZE * SIZE // 2))
    palette.save(tmp_path / "palette.png", transparency=1)
    rgb = rgb_of(tmp_path / "palette.png")
    assert rgb[0, 0].tolist() == [10, 20, 30]
    assert rgb[0, 1].tolist() == [255, 255, 255]


def test_converts_cmyk(tmp_path):
    cmyk = Image.new("CMYK", (SIZE, SIZE), (0, 255, 255, 0))
    cmyk.save(tmp_path / "a.jpg", quality=100)
    assert np.abs(rgb_of(tmp_path / "a.jpg").astype(int) - [255, 0, 0]).max() <= 3


def test_takes_the_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (SIZE, SIZE), c) for c in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert rgb_of(tmp_path / "a.gif")[0, 0].tolist() == [255, 0, 0]


def test_a_broken_file_among_good_ones_is_left_out_and_named(tmp_path):
    good = [save(tmp_path / f"{n}.png", pixels(seed=n)) for n in (1, 3)]
    whole = save(tmp_path / "whole.jpg", pixels(64, 64)).read_bytes()
    (tmp_path / "whole.jpg").unlink()
    (tmp_path / "0.png").write_bytes(b"no picture")
    (tmp_path / "2.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "4.png").write_bytes(b"")
    loaded = load_images(find_images(tmp_path), PLAIN)
    assert loaded.files == good
    assert [s.file.name for s in loaded.skipped] == ["0.png", "2.jpg", "4.png"]
    assert all(
        "cannot be read" in s.reason and "\n" not in s.reason for s in loaded.skipped
    )
    assert torch.equal(loaded.images[1], PLAIN(read_picture(good[1])))


@pytest.mark.parametrize("kind", ["png", "jpg", "gif", "bmp", "tif", "webp"])
def test_every_cut_through_a_file_is_left_out_or_read(tmp_path, kind):
    file = save(tmp_path / f"a.{kind}", pixels(40, 40))
    whole = file.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 20)):
        file.write_bytes(whole[:length])
        [(named, image)] = read_images([file], PLAIN)
        assert named == file
        assert isinstance(image, Skipped) or image.shape == (3, SIZE, SIZE)


def test_leaves_out_what_is_too_small_or_too_long_or_too_deep(tmp_path):
    good = save(tmp_path / "good.png", pixels(8, 8))
    small = [
        save(tmp_path / "dot.png", pixels(1, 1)),
        save(tmp_path / "low.png", pixels(7, 20)),
    ]
    long = save(tmp_path / "long.png", pixels(8, 257))
    deep = save(tmp_path / "deep.tif", np.ones((SIZE, SIZE), np.float32))
    loaded = load_images([good, *small, long, deep], PLAIN)
    reasons = [s.reason for s in loaded.skipped]
    assert loaded.files == [good]
    assert "at least 8 pixels; got 1 x 1" in reasons[0]
    assert "at least 8 pixels; got 20 x 7" in reasons[1]
    assert "at most 1 : 32; got 257 x 8" in reasons[2]
    assert "at most 16 bits; got mode F" in reasons[3]
    save(tmp_path / "just.png", pixels(8, 256))
    assert read_picture(tmp_path / "just.png").size == (256, 8)


def test_rejects_a_folder_in_which_nothing_can_be_used(tmp_path):
    save(tmp_path / "dot.png", pixels(1, 1))
    (tmp_path / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    message = r"images must hold a usable picture; got 2 unusable; the first: '.*dot\.png'"
    with pytest.raises(ValueError, match=message):
        load_images(find_images(tmp_path), PLAIN)


def test_reads_one_picture_at_a_time(tmp_path):
    file = save(tmp_path / "a.png", pixels())
    stream = read_images([file, tmp_path / "gone.png"], PLAIN)
    assert next(stream)[0] == file
    assert "cannot be read" in next(stream)[1].reason


def test_bundled_photographs_are_photographs_in_colour(tmp_path):
    pictures = bundled_photographs()
    assert list(pictures) == sorted(PHOTOGRAPHS)
    for picture in pictures.values():
        array = np.asarray(picture, dtype=float)
        assert picture.mode == "RGB"
        assert min(picture.size) >= 224
        assert np.ptp(array, axis=2).mean() > 10  # not grey
    files = write_photographs(tmp_path / "photos")
    assert find_images(tmp_path / "photos") == files
    assert np.array_equal(rgb_of(files[0]), pictures["astronaut"])
