"""Oracle: invariants of the written page and files; colours and crops in closed form."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from foveate.report import write_report
from foveate.report.pictures import crop_to, heat_map
from foveate.report.records import check_directory, read_record, write_record

ROWS, COLUMNS = 3, 5
KEYS = ("kappa_cap", "cv", "rank_entropy", "rank_participation", "rank_stable", "rank_90")


def tokens_record(scale, num_patches):
    values = scale * np.exp(-0.3 * np.arange(12))
    share = np.cumsum(values**2) / (1.25 * (values**2).sum())
    return {
        "singular_values": values.tolist(),
        "cumulative": share.tolist(),
        "energy": float((values**2).sum()),
        "importance": np.linspace(0, scale, num_patches).tolist(),
        "block_norm": np.linspace(scale, 0, num_patches).tolist(),
    }


def diagnosis_record(files, grid=(ROWS, COLUMNS)):
    """A record with the shape of what ``diagnose`` writes."""
    num_patches = grid[0] * grid[1]
    images = [
        {
            "file": str(file),
            "grid": list(grid),
            "all": tokens_record(3.0 + i, num_patches + 1),
            "patches": tokens_record(2.0 + i, num_patches),
        }
        for i, file in enumerate(files)
    ]
    estimates = {key: {"mean": 0.5, "standard_error": 0.01} for key in KEYS}
    return {
        "model": "tiny",
        "task": "cls",
        "depth": 2,
        "rank": 4,
        "route": "randomised",
        "num_images": len(files),
        "num_patches": num_patches,
        "num_outputs": 24,
        "products": {"jvp": 100, "vjp": 120},
        "all": estimates,
        "patches": estimates,
        "regime": "high rank, localised",
        "advice": "Score tokens.",
        "images": images,
    }


@pytest.fixture
def photographs(tmp_path):
    """Two photographs, the second with a name that is HTML and script."""
    files = [tmp_path / "a.png", tmp_path / "<img src=x onerror=alert(1)>&'.png"]
    for shade, file in enumerate(files):
        Image.new("RGB", (60, 40), (200, 100, 50 + shade)).save(file)
    return files


@pytest.fixture
def page(tmp_path, photographs):
    """The report on two photographs, one file that is gone, and one skipped."""
    record = diagnosis_record([*photographs, "gone.png"])
    record["skipped"] = [{"file": "<b>torn</b>.jpg", "reason": "cannot be read: <i>"}]
    write_record(tmp_path / "diagnose.json", record)
    return write_report(tmp_path).read_text(encoding="utf-8")


def without_plotly(page):
    from plotly.offline import get_plotlyjs

    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def test_the_page_loads_nothing(page):
    own = without_plotly(page)
    assert "default-src 'none'" in own
    assert not re.search(r"(https?:)?//[a-z]", own)
    sources = re.findall(r'(?:src|href)="(.*?)"|url\("(.*?)"\)', own)
    assert sources
    assert all((a or b).startswith("data:image/") for a, b in sources)


def test_names_of_files_are_text_and_never_markup(page):
    own = without_plotly(page)
    assert "<img src=x" not in own
    assert "<b>torn" not in own
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;&#39;.png" in own
    figures = charts(page)
    names = {trace["name"] for figure in figures for trace in figure["data"]}
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;&#x27;.png" in names


def charts(page):
    from html import unescape

    found = re.findall(r'data-figure="(.*?)"', page, flags=re.DOTALL)
    return [json.loads(unescape(text)) for text in found]


def test_the_page_shows_regime_statistics_cost_and_what_was_skipped(page):
    own = without_plotly(page)
    for text in (
        "high rank, localised",
        "Score tokens.",
        "0.5 ± 0.01",
        "100 JVP + 120 VJP",
    ):
        assert text in own
    assert "cannot be read: &lt;i&gt;" in own
    assert own.count("no longer at its place") == 1


def test_spectrum_and_energy_are_those_of_the_record(page):
    spectrum, energy = charts(page)
    assert spectrum["layout"]["yaxis"]["type"] == "log"
    means = [t for t in spectrum["data"] if t["line"]["width"] == 3]
    expected = (3.0 * 4.0 * 5.0) ** (1 / 3)
    assert means[0]["y"][0] == pytest.approx(expected)
    assert len(means[0]["y"]) == 12
    marks = [t for t in energy["data"] if t["mode"] == "markers"]
    assert [(t["x"], t["y"]) for t in marks] == [([4], [0.5])] * 2
    assert "all tokens: κ_cap(4) = 50.0%" in marks[0]["name"]


def test_photographs_have_the_shape_of_the_grid_and_are_embedded_once(page):
    own = without_plotly(page)
    assert own.count(f"aspect-ratio: {COLUMNS} / {ROWS}") == 3 + 3 + 2
    assert own.count("data:image/jpeg") == 2
    assert own.count("data:image/png") == 2 * 3


def test_a_heat_map_has_a_pixel_per_patch_row_by_row():
    values = np.arange(6.0)
    pixels = np.asarray(heat_map(values, (2, 3)))
    assert pixels.shape == (2, 3, 4)
    assert pixels[0, 0].tolist() == [0, 0, 4, round(0.35 * 255)]
    assert pixels[1, 2].tolist() == [252, 255, 164, round(0.85 * 255)]
    assert (np.diff(pixels.reshape(6, 4)[:, 3].astype(int)) > 0).all()
    assert np.asarray(heat_map([0.0] * 6, (3, 2)))[..., :3].max() == 4


def test_a_heat_map_needs_a_value_per_patch():
    with pytest.raises(ValueError, match="values must be 2 x 3 numbers; got 5"):
        heat_map([0.0] * 5, (2, 3))


@pytest.mark.parametrize(
    ("size", "grid", "expected"),
    [
        ((60, 40), (2, 2), (40, 40)),
        ((60, 40), (2, 1), (20, 40)),
        ((60, 40), (1, 3), (60, 20)),
    ],
)
def test_crops_the_largest_central_part(size, grid, expected):
    picture = Image.new("RGB", size)
    left, top = (size[0] - expected[0]) // 2, (size[1] - expected[1]) // 2
    picture.paste((255, 0, 0), (left, top, left + expected[0], top + expected[1]))
    cropped = crop_to(picture, grid)
    assert cropped.size == expected
    assert (np.asarray(cropped)[..., 0] == 255).all()


def test_photographs_are_found_beside_a_record_that_has_moved(tmp_path):
    folder = tmp_path / "moved"
    (folder / "photos").mkdir(parents=True)
    Image.new("RGB", (60, 40)).save(folder / "photos/a.png")
    write_record(folder / "diagnose.json", diagnosis_record(["photos/a.png"]))
    assert "data:image/jpeg" in write_report(folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["", "nothing-here"])
def test_rejects_a_folder_without_records(tmp_path, name):
    with pytest.raises(ValueError, match=r"directory must be a folder with diagnose\.json"):
        write_report(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "must be a JSON record"), ("[]", "object; got list"), ("{}", "complete record")],
)
def test_rejects_a_damaged_record_and_writes_nothing(tmp_path, text, message):
    (tmp_path / "diagnose.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["diagnose.json"]


def test_a_record_comes_back_as_it_was(tmp_path):
    record = diagnosis_record(["a.png"])
    assert (
        read_record(write_record(tmp_path / "new/folder/diagnose.json", record)) == record
    )


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path):
    file = write_record(tmp_path / "a.json", {"value": 1.0})
    with pytest.raises(ValueError, match=r"a\.json must hold finite numbers"):
        write_record(file, {"value": float("nan")})
    assert read_record(file) == {"value": 1.0}
    assert [f.name for f in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_for_results_may_not_exist_yet_but_must_be_possible(tmp_path):
    assert check_directory(tmp_path / "a/b") == tmp_path / "a/b"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(ValueError, match=f"out must be a folder.*; got '.*{place}'"):
            check_directory(tmp_path / place)
