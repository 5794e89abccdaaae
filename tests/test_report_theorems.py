"""Oracle: a record written by hand, and what the page must show of it."""

import json
import re
from html import unescape

import pytest
from plotly.offline import get_plotlyjs

from foveate.report import theorems, write_report
from foveate.report.records import write_record


def image(name, other, kappa_cap, best, measured):
    return {
        "file": name,
        "kappa_cap": kappa_cap,
        "captured": {"leading": best, "random": 0.1},
        "replacement": [
            {"scale": 1.0, "bound": [2.0, 4.0, 0.0], "measured": [measured, 3.0, 0.0]},
            {"scale": 0.1, "bound": [0.2, 0.4, 0.0], "measured": [0.1, 0.3, 0.0]},
        ],
        "merging": {"scores": 0.2, "directions": 0.9},
        "path": {
            "to": other,
            "length": 3.0,
            "error": 0.01,
            "chord": 2.5,
            "first_order": 4.0,
            "speeds": [4.0, 2.0, 3.0],
        },
    }


@pytest.fixture
def record():
    """Two images; in the second one token moves further than its bound."""
    return {
        "model": "tiny",
        "task": "cls",
        "depth": 8,
        "rank": 4,
        "norm": "frobenius",
        "num_tokens": 3,
        "num_images": 2,
        "images": [
            image("photos/a.png", "photos/<b>.png", 0.5, 0.5, 1.0),
            image("photos/<b>.png", "photos/a.png", 0.25, 0.2, 2.5),
        ],
    }


@pytest.fixture
def page(tmp_path, record):
    write_record(tmp_path / "theorems.json", record)
    return write_report(tmp_path).read_text(encoding="utf-8").replace(get_plotlyjs(), "")


def charts(page):
    found = re.findall(r'data-figure="(.*?)"', page, flags=re.DOTALL)
    return [json.loads(unescape(text)) for text in found]


def test_the_verdict_counts_what_is_within_its_bound(record):
    assert theorems.verdict(record) == [
        "4 of 4 metrics of rank 4 caught no more than κ_cap.",
        "Moved by 100%: 5 of 6 replaced tokens changed the output by no more than their "
        "bound.",
        "Moved by 10%: 6 of 6 replaced tokens changed the output by no more than their "
        "bound.",
    ]


def test_a_metric_that_catches_too_much_is_counted(record):
    record["images"][1]["captured"]["leading"] = 0.26
    assert theorems.verdict(record)[0].startswith("3 of 4 metrics")


def test_shares_are_means_beside_their_largest_part_of_the_bound(record):
    assert theorems.captured_rows(record) == [
        ("κ_cap, the bound", "37.50%", "100.00%"),
        ("leading", "35.00%", "100.00%"),
        ("random", "10.00%", "40.00%"),
    ]


def test_merging_and_lengths_are_those_of_the_record(record):
    assert theorems.merging_rows(record) == [("scores", "0.200"), ("directions", "0.900")]
    assert theorems.length_rows(record)[0] == ("a.png to <b>.png", "3 ± 0.01", "2.5", "4")


def test_the_scatter_has_every_token_that_moves_and_the_line_of_the_bound(page):
    scatter, speed = charts(page)
    points = {trace["name"]: (trace["x"], trace["y"]) for trace in scatter["data"]}
    assert points["moved by 100%"] == ([2.0, 4.0] * 2, [1.0, 3.0, 2.5, 3.0])
    assert points["moved by 10%"] == ([0.2, 0.4] * 2, [0.1, 0.3] * 2)
    assert points["bound reached"] == ([0.1, 4.0], [0.1, 4.0])
    assert {scatter["layout"][axis]["type"] for axis in ("xaxis", "yaxis")} == {"log"}
    assert [trace["x"] for trace in speed["data"]] == [[0.0, 0.5, 1.0]] * 2


def test_names_of_files_are_text_and_never_markup(page):
    assert "<b>.png" not in page
    assert "a.png to &lt;b&gt;.png" in page
    names = [trace["name"] for trace in charts(page)[1]["data"]]
    assert names == ["a.png", "&lt;b&gt;.png"]


def test_no_token_that_moves_leaves_the_scatter_empty(record):
    for one in record["images"]:
        one["replacement"] = [{"scale": 1.0, "bound": [0.0], "measured": [0.0]}]
    assert [len(trace.x) for trace in theorems.replacements(record).data] == [0]


def test_a_record_that_lacks_a_part_is_named(tmp_path, record):
    del record["images"][1]["merging"]
    write_record(tmp_path / "theorems.json", record)
    with pytest.raises(
        ValueError, match=r"theorems\.json' must be a complete record.*merg"
    ):
        write_report(tmp_path)
