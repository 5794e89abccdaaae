"""Scores with their intervals, in figures and tables."""

from collections.abc import Mapping
from typing import Any

from foveate.report import terminal

SIDES = ("full", "reduced", "difference")


def in_interval(estimate: Mapping[str, float | None], unit: float = 100) -> str:
    """A share as ``81.2 (79.8 to 82.5)``, in per cent; a dash where it is undefined."""
    if estimate["value"] is None or estimate["low"] is None or estimate["high"] is None:
        return "-"
    value, low, high = (unit * float(estimate[k] or 0) for k in ("value", "low", "high"))
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def print_evaluation(record: Mapping[str, Any]) -> None:
    """Print scores side by side, and below them what was saved.

    Args:
        record: What ``evaluate`` writes.
    """
    title = "{model}, {task}, {num_images} images of {data}".format_map(record)
    sides = [side for side in SIDES if side in record["scores"]]
    names = record["scores"]["full"]
    rows = [
        (name, *(shown(name, record["scores"][side][name]) for side in sides))
        for name in names
    ]
    terminal.print_table(title, ("", *sides), rows)
    if "speedup" not in record:
        return
    terminal.print_table("What was saved", ("", ""), saved_rows(record))


def saved_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a plan saves, in words and figures."""
    speed, throughput = record["speedup"], record["images_per_second"]
    memory = record["peak_memory_ratio"]
    return [
        ("speed-up of the blocks", f"{speed['median']:.3f}"),
        ("multiply-adds, full over reduced", f"{record['mac_ratio']:.3f}"),
        ("share of the steps in the time", f"{100 * record['overhead_share']:.2f} %"),
        ("peak memory, full over reduced", "-" if memory is None else f"{memory:.3f}"),
        ("images a second, full", f"{throughput['full']:.1f}"),
        ("images a second, reduced", f"{throughput['reduced']:.1f}"),
    ]


def shown(name: str, estimate: Mapping[str, float | None]) -> str:
    """Errors of depth are no shares."""
    return in_interval(
        estimate, 1 if name in {"rmse", "silog", "abs_rel", "log10"} else 100
    )
