"""Oracle: records written by hand, and what page and screen must show of them."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from foveate.report import benchmark, compare, write_report
from foveate.report.records import write_record

HERE = Path()


def row(method, keep, error, mac_ratio, **changes):
    return {
        "method": method,
        "depths": [4, 8],
        "keep": keep,
        "counts": [200, int(256 * keep)],
        "back_propagates": method == "oracle",
        "output_error": {"mean": error, "standard_error": error / 10},
        "cosine": 1 - error**2,
        "mac_ratio": mac_ratio,
        **changes,
    }


@pytest.fixture
def comparison():
    """Two budgets; the oracle wins the smaller; something was left out."""
    return {
        "model": "tiny",
        "task": "cls",
        "num_images": 5,
        "num_patches": 256,
        "rows": [
            row("tome", 0.5, 0.2, 1.4),
            row("tome", 0.75, 0.1, 1.2),
            row("norm", 0.5, 0.3, 1.4),
            row("norm", 0.75, 0.0, 1.2),
            row("oracle", 0.5, 0.125, 1.4),
        ],
        "skipped": [{"method": "evit", "keep": 0.75, "reason": "no <b>class</b> token."}],
    }


@pytest.fixture
def timing():
    """Three rounds in which the blocks are 2, 3 and 4 times as fast."""
    full = [{"encoder": float(k), "model": 10.0, "steps": 0.0} for k in (2, 3, 4)]
    reduced = [{"encoder": 1.0, "model": 8.0, "steps": 0.1}] * 3
    return {
        "model": "tiny",
        "task": "cls",
        "method": "oracle",
        "back_propagates": True,
        "device": "cpu",
        "threads": 2,
        "dtype": "float32",
        "batch_size": 8,
        "image_size": [224, 448],
        "rounds": 3,
        "warmup": 1,
        "speedup": {"median": 3.0, "low": 2.2, "high": 3.8},
        "model_speedup": {"median": 1.25, "low": 1.25, "high": 1.25},
        "quantiles": {"low": 0.1, "high": 0.9},
        "mac_ratio": 4.0,
        "realised": 0.75,
        "overhead_share": 0.1,
        "peak_memory_ratio": 1.5,
        "peak_memory": {"held": 2**20, "full": 2**21, "reduced": 2**20},
        "images_per_second": {"full": 0.8, "reduced": 1.0},
        "pays": True,
        "verdict": "Reduction pays.",
        "seconds": {"full": full, "reduced": reduced},
        "plan": {"schedule": [[4, 128], [8, 64]]},
    }


def test_cells_of_a_comparison(comparison):
    assert compare.rows(comparison)[0] == (
        "tome",
        "4, 8",
        "0.5",
        "200, 128",
        "1.40x",
        "0.2 ± 0.02",
        "0.9600",
    )
    assert compare.rows(comparison)[-1][0] == "oracle*"


def test_the_best_at_each_budget_with_and_without_back_propagation(comparison):
    assert compare.best(comparison) == [
        "Keep 0.75: norm 0 ± 0 at 1.20x.",
        "Keep 0.5: tome 0.2 ± 0.02 at 1.40x, oracle* 0.125 ± 0.013 at 1.40x.",
    ]
    comparison["rows"] = comparison["rows"][-1:]
    assert compare.best(comparison) == ["Keep 0.5: oracle* 0.125 ± 0.013 at 1.40x."]


def test_the_trade_off_has_a_line_for_each_method(comparison):
    tome, norm, oracle = compare.trade_off(comparison).data
    assert (tome.name, list(tome.x), list(tome.y)) == ("tome", [1.2, 1.4], [0.1, 0.2])
    assert list(tome.error_y.array) == pytest.approx([0.01, 0.02])
    assert (norm.name, list(norm.x)) == ("norm", [1.4])  # an error of 0 has no logarithm
    assert (oracle.name, oracle.line.dash) == ("oracle*", "dot")


def test_a_method_at_two_depths_is_two_lines_and_one_image_has_no_bar(comparison):
    one = {"mean": 0.3, "standard_error": None}
    comparison["rows"][1] |= {"depths": [6], "output_error": one}
    figure = compare.trade_off(comparison)
    assert [line.name for line in figure.data] == [
        "tome at 4, 8",
        "tome at 6",
        "norm",
        "oracle*",
    ]
    assert list(figure.data[1].error_y.array) == [0.0]


def test_screen_shows_rows_and_what_was_left_out(comparison, capsys):
    compare.print_comparison(comparison)
    out = capsys.readouterr().out
    assert "tiny, cls, 5 images" in out
    assert re.search(r"oracle\*.*4, 8.*0\.5.*200, 128.*1\.40x.*0\.125 ± 0\.013", out)
    assert "* back-propagates at inference" in out
    assert "Left out evit at keep 0.75: no <b>class</b> token." in out
    comparison["rows"], comparison["skipped"] = comparison["rows"][:2], []
    compare.print_comparison(comparison)
    out = capsys.readouterr().out
    assert "back-propagates" not in out
    assert "Left out" not in out


def test_cells_of_a_benchmark(timing):
    assert dict(benchmark.rows(timing)) == {
        "Speedup of the blocks": "3.00x (2.20 to 3.80)",
        "Speedup of the whole call": "1.25x (1.25 to 1.25)",
        "Multiply-adds saved in the blocks": "4.00x",
        "Realised share of that": "75%",
        "Steps' share of the blocks' time": "10.0%",
        "Peak memory": "1.50x (3 to 2 MiB)",
        "Images per second": "0.8 to 1",
    }
    unknown = {**timing, "peak_memory": None, "peak_memory_ratio": None}
    assert dict(benchmark.rows(unknown))["Peak memory"] == "not recorded on this device"


def test_the_rounds_are_drawn_as_ratios(timing):
    blocks, whole = benchmark.rounds(timing).data
    assert (blocks.name, list(blocks.y)) == ("blocks", [2.0, 3.0, 4.0])
    assert (whole.name, list(whole.y)) == ("whole call", [1.25] * 3)


@pytest.mark.parametrize("pays", [True, False])
def test_screen_says_when_reduction_does_not_pay(timing, capsys, pays):
    verdict = "Reduction does not pay."
    benchmark.print_benchmark({**timing, "pays": pays, "verdict": verdict})
    out = capsys.readouterr().out
    assert "tiny, cls, oracle, batch size 8" in out
    assert (verdict in out) == (not pays)


def test_the_section_of_a_benchmark_says_what_an_oracle_is(timing):
    callout, table, facts, _ = benchmark.section(timing, HERE).blocks
    assert (callout.heading, callout.paragraphs) == ("It pays", ["Reduction pays."])
    assert "10% to 90% quantile" in table.caption
    assert "back-propagates" in table.caption
    assert ("Image size", "224 x 448") in facts.items
    plain = {**timing, "back_propagates": False, "pays": False}
    callout, table, *_ = benchmark.section(plain, HERE).blocks
    assert callout.heading == "It does not pay"
    assert "back-propagates" not in table.caption


def test_both_stand_on_the_page_with_all_they_have(comparison, timing, tmp_path):
    write_record(tmp_path / "compare.json", comparison)
    write_record(tmp_path / "benchmark.json", timing)
    page = write_report(tmp_path).read_text(encoding="utf-8").replace(get_plotlyjs(), "")
    titles = re.findall("<h1>(.*?)</h1>", page)
    assert titles == ["Methods on the same images", "Clock and memory"]
    assert "no &lt;b&gt;class&lt;/b&gt; token." in page
    assert "oracle, patches: 128 from block 4, 64 from block 8" in page
    figures = re.findall(r'data-figure="(.*?)"', page, flags=re.DOTALL)
    assert [len(json.loads(unescape(text))["data"]) for text in figures] == [3, 2]


@pytest.mark.parametrize("name", ["compare.json", "benchmark.json"])
def test_an_incomplete_record_is_named(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"{name}' must be a complete record"):
        write_report(tmp_path)
