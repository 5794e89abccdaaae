"""The section of the report about ``benchmark.json``, and its table for the terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveate.report.blocks import Block, Chart, Facts, Section, Table, Text
from foveate.report.terminal import print_table, print_text

if TYPE_CHECKING:  # plotly is slow to import, and the terminal does without it
    from plotly import graph_objects as go

Record = Mapping[str, Any]

COLUMNS = ("", "Measured")


def rows(record: Record) -> list[tuple[str, str]]:
    """Cells of a benchmark under ``COLUMNS``.

    Args:
        record: What ``benchmark`` wrote.

    Returns:
        A name and a measured value each.
    """
    rate = record["images_per_second"]
    return [
        ("Speedup of the blocks", spread(record["speedup"])),
        ("Speedup of the whole call", spread(record["model_speedup"])),
        ("Multiply-adds saved in the blocks", f"{record['mac_ratio']:.2f}x"),
        ("Realised share of that", f"{record['realised']:.0%}"),
        ("Steps' share of the blocks' time", f"{record['overhead_share']:.1%}"),
        ("Peak memory", _memory(record)),
        ("Images per second", f"{rate['full']:.3g} to {rate['reduced']:.3g}"),
    ]


def print_benchmark(record: Record) -> None:
    """Print the table of a benchmark, and a line if reduction does not pay.

    Args:
        record: What ``benchmark`` wrote.
    """
    title = "{model}, {task}, {method}, batch size {batch_size}".format_map(record)
    print_table(title, COLUMNS, rows(record))
    if not record["pays"]:
        print_text(record["verdict"])


def spread(ratio: Mapping[str, float]) -> str:
    """Median and quantiles of a ratio, ``1.25x (1.21 to 1.33)``."""
    return "{median:.2f}x ({low:.2f} to {high:.2f})".format_map(ratio)


def section(record: Record, directory: Path) -> Section:
    """Show what a plan saves on the machine it was timed on.

    Args:
        record: What ``benchmark`` wrote.
        directory: Folder of the record.

    Returns:
        Whether it pays, the numbers, the conditions, and all rounds.
    """
    height, width = record["image_size"]
    quantiles = "{low:.0%} to {high:.0%} quantile".format_map(record["quantiles"])
    caption = f"Median over {record['rounds']} rounds ({quantiles}). {CAPTION}"
    if record["back_propagates"]:
        caption += " " + ORACLE
    heading = "It pays" if record["pays"] else "It does not pay"
    blocks: list[Block] = [
        Text([record["verdict"]], heading=heading, is_callout=True),
        Table(COLUMNS, rows(record), caption),
        Facts([
            ("Device", record["device"]),
            ("Threads", f"{record['threads']}"),
            ("Precision", record["dtype"]),
            ("Batch size", f"{record['batch_size']}"),
            ("Image size", f"{height} x {width}"),
            ("Warm-up rounds", f"{record['warmup']}"),
        ]),
        Chart("Every round", rounds(record), ROUNDS),
    ]
    plan = record["plan"]
    steps = ", ".join(f"{count} from block {depth}" for depth, count in plan["schedule"])
    where = f"{record['model']} · {record['task']} · {record['method']}, patches: {steps}"
    return Section("Clock and memory", blocks, where)


CAPTION = (
    "All ratios are full over reduced. Steps: scoring, matching, gathering and recovery. "
    "Memory: weights, images and the most that a call holds beyond them."
)
ORACLE = (
    "This method back-propagates at inference; that is timed in the steps, held in the "
    "memory, and not counted in the multiply-adds."
)
ROUNDS = (
    "Ratio of the seconds of one full and one reduced call, which took turns. Dotted: no "
    "gain; dashed: what the multiply-adds promise for the blocks."
)


def rounds(record: Record) -> "go.Figure":
    """Ratio of every round, of the blocks and of the whole call."""
    from plotly import graph_objects as go

    figure = go.Figure()
    seconds = record["seconds"]
    parts = {"encoder": ("blocks", "#f97316"), "model": ("whole call", "#3b82f6")}
    for part, (name, colour) in parts.items():
        pairs = zip(seconds["full"], seconds["reduced"], strict=True)
        ratios = [full[part] / reduced[part] for full, reduced in pairs]
        figure.add_scatter(
            x=list(range(1, len(ratios) + 1)),
            y=ratios,
            mode="lines+markers",
            line={"color": colour},
            name=name,
        )
    for height, dash in ((1.0, "dot"), (record["mac_ratio"], "dash")):
        figure.add_hline(y=height, line={"dash": dash, "width": 1, "color": "gray"})
    figure.update_xaxes(title="round")
    figure.update_yaxes(title="speedup", rangemode="tozero")
    return figure


def _memory(record: Record) -> str:
    memory = record["peak_memory"]
    if memory is None:
        return "not recorded on this device"
    full, reduced = (
        (memory["held"] + memory[name]) / 2**20 for name in ("full", "reduced")
    )
    return f"{record['peak_memory_ratio']:.2f}x ({full:.0f} to {reduced:.0f} MiB)"
