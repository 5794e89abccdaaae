"""Oracle: a record written by hand, and what page and screen must show of it."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from foveate.report import probe, write_report
from foveate.report.records import write_record


def interval(value, half=0.01):
    return {"value": value, "low": value - half, "high": value + half}


def cell(task, alpha, depth, criterion, value):
    at = {"task": task, "alpha": alpha, "depth": depth, "criterion": criterion}
    return {**at, "drop": interval(value)}


@pytest.fixture
def record():
    """Two tasks, of which one recovers; two depths, two criteria."""
    drops = [
        ("label", 0.0, 0.1, 0.2),
        ("label", 1.0, 0.1, 0.2),
        ("<mask>", 0.0, 0.3, -0.005),
        ("<mask>", 1.0, 0.4, 0.5),
    ]
    nothing = dict.fromkeys(("value", "low", "high"))
    return {
        "model": "tiny",
        "data": "scenes",
        "num_images": 9,
        "num_resamples": 50,
        "seed": 3,
        "keep": 0.5,
        "criteria": ["norm", "random"],
        "depths": [4, 8],
        "alphas": [0.0, 1.0],
        "tasks": [
            {
                "name": "label",
                "score": "top1",
                "recovers": False,
                "full": interval(0.8),
            },
            {
                "name": "<mask>",
                "score": "miou",
                "recovers": True,
                "full": interval(0.6),
            },
        ],
        "cells": [
            cell(task, alpha, depth, criterion, value + (criterion == "random"))
            for task, alpha, *values in drops
            for depth, value in zip((4, 8), values, strict=True)
            for criterion in ("norm", "random")
        ],
        "between_tasks": [
            {"depth": 4, "alpha": 0.0, "tasks": ["label", "<mask>"], **interval(0.9)},
            {"depth": 8, "alpha": 0.0, "tasks": ["label", "<mask>"], **nothing},
        ],
        "between_depths": [],
        "pairs": [
            {"task": t, "alpha": a, "excludes_zero": True, "significant": a == 1.0}
            for t, a in (("label", 0.0), ("<mask>", 0.0), ("<mask>", 1.0))
        ],
        "recovery": [{"task": "<mask>", "depth": None, **interval(-0.02)}],
        "verdict": [{"claim": "ranking", "finding": "confirmed", "sentence": "They do."}],
    }


def test_rows_are_criteria_and_columns_depths(record):
    assert probe.rows(record) == [
        ("label", "-", "norm", "10.0*", "20.0*"),
        ("label", "-", "random", "110.0*", "120.0*"),
        ("<mask>", "0", "norm", "30.0*", "-0.5"),
        ("<mask>", "0", "random", "130.0*", "99.5*"),
        ("<mask>", "1", "norm", "40.0*", "50.0*"),
        ("<mask>", "1", "random", "140.0*", "150.0*"),
    ]


def test_pairs_are_counted_by_task_and_endpoint(record):
    assert probe.pair_rows(record) == [
        ("label", "-", "1", "1", "0"),
        ("<mask>", "0", "1", "1", "0"),
        ("<mask>", "1", "1", "1", "1"),
    ]


def test_heat_maps_hold_the_drops(record):
    label, mask = (probe.heat_map(record, t).data[0] for t in record["tasks"])
    assert list(label.x) == ["depth 4", "depth 8"]
    assert [list(line) for line in label.z] == [
        pytest.approx([10, 20]),
        pytest.approx([110, 120]),
    ]
    assert list(mask.x)[2:] == ["depth 4<br>alpha 1", "depth 8<br>alpha 1"]
    assert list(mask.z[0]) == pytest.approx([30, -0.5, 40, 50])
    assert (mask.zmin, mask.zmax) == (-150, 150)
    (agreed,) = probe.correlations(record).data
    assert list(agreed.y) == ["label / &lt;mask&gt;, alpha 0"]
    assert (list(agreed.z[0]), list(agreed.text[0])) == ([0.9, None], ["0.90*", "-"])


def test_screen_and_page_say_what_was_found(record, tmp_path, capsys):
    probe.print_probe(record)
    out = capsys.readouterr().out
    assert "tiny, 9 images of scenes" in out
    assert re.search(r"<mask>.*miou.*60.00 \(59.00 to 61.00\)", out)
    assert re.search(r"<mask>.*0.*norm.*30.0\*.*-0.5 ", out)
    assert "They do." in out
    write_record(tmp_path / "probe.json", record)
    page = write_report(tmp_path).read_text(encoding="utf-8").replace(get_plotlyjs(), "")
    assert re.findall("<h1>(.*?)</h1>", page) == [
        "Pruning at one block, by criterion and task"
    ]
    assert "They do." in page
    assert "-2.00 (-3.00 to -1.00)" in page
    assert "<mask>" not in page
    figures = re.findall(r'data-figure="(.*?)"', page, flags=re.DOTALL)
    kinds = [json.loads(unescape(text))["data"][0]["type"] for text in figures]
    assert kinds == ["heatmap"] * 3


def test_one_task_that_recovers_nothing_has_no_correlations(record):
    record |= {"tasks": record["tasks"][:1], "between_tasks": [], "recovery": []}
    section = probe.section(record, Path())
    assert [block.kind for block in section.blocks] == [
        "text",
        "facts",
        "table",
        "chart",
        "table",
    ]
