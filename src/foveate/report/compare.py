"""The section of the report about ``compare.json``, and its table for the terminal."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveate.report.blocks import Block, Chart, Section, Table, Text
from foveate.report.statistics import in_figures
from foveate.report.terminal import print_table, print_text

if TYPE_CHECKING:  # plotly is slow to import, and the terminal does without it
    from plotly import graph_objects as go

Record = Mapping[str, Any]

COLUMNS = ("Method", "Depths", "Keep", "Patches", "MACs", "Output error", "Cosine")


def rows(record: Record) -> list[tuple[str, ...]]:
    """Cells of a comparison, in its own order, under ``COLUMNS``.

    Args:
        record: What ``compare`` wrote.

    Returns:
        One row for each method and budget; a star marks those that back-propagate.
    """
    return [
        (
            label(row),
            _depths(row),
            f"{row['keep']:.3g}",
            ", ".join(map(str, row["counts"])),
            f"{row['mac_ratio']:.2f}x",
            in_figures(row["output_error"]),
            f"{row['cosine']:.4f}",
        )
        for row in record["rows"]
    ]


def print_comparison(record: Record) -> None:
    """Print the table of a comparison, and what was left out.

    Args:
        record: What ``compare`` wrote.
    """
    title = "{model}, {task}, {num_images} images".format_map(record)
    print_table(title, COLUMNS[:-1], [cells[:-1] for cells in rows(record)])  # 80 wide
    if any(row["back_propagates"] for row in record["rows"]):
        print_text(STAR)
    for left in record["skipped"]:
        print_text("Left out {method} at keep {keep:.3g}: {reason}".format_map(left))


def label(row: Record) -> str:
    """A method's name, with a star if it back-propagates."""
    return row["method"] + ("*" if row["back_propagates"] else "")


def section(record: Record, directory: Path) -> Section:
    """Show which method moves the output least for its multiply-adds.

    Args:
        record: What ``compare`` wrote.
        directory: Folder of the record.

    Returns:
        The best at each budget, error against multiply-adds, and all numbers.
    """
    caption = f"Mean over {record['num_images']} images ± standard error. {STAR}"
    blocks: list[Block] = [
        Text(best(record), heading="Least output error", is_callout=True),
        Chart("Output error and what it buys", trade_off(record), TRADE_OFF),
        Table(COLUMNS, rows(record), caption, num_text=2),
    ]
    if record["skipped"]:
        cells = [(s["method"], f"{s['keep']:.3g}", s["reason"]) for s in record["skipped"]]
        blocks.append(Table(("Left out", "Keep", "Reason"), cells, num_text=3))
    where = f"{record['model']} · {record['task']} · {record['num_patches']} patches"
    return Section("Methods on the same images", blocks, where)


STAR = (
    "* back-propagates at inference: it shows what can be reached, and its multiply-adds "
    "are those of the blocks alone."
)
TRADE_OFF = (
    "Output error: distance of the task's raw output from the full model's, relative to "
    "the norm of that; mean over images with its standard error. It stands over the "
    "multiply-adds of the full model's blocks divided by those of the reduced; scoring and "
    "matching are not counted. Lower and further right is better; budgets without any "
    f"error are not drawn. {STAR}"
)


def best(record: Record) -> list[str]:
    """A line for each budget: the least error without back-propagation, and with it.

    Args:
        record: What ``compare`` wrote.

    Returns:
        Lines from the largest budget down.
    """
    lines = []
    budgets = sorted(record["rows"], key=_keep, reverse=True)
    for keep, group in groupby(budgets, key=_keep):
        of = list(group)
        plain = [row for row in of if not row["back_propagates"]]
        winners = [min(some, key=_error) for some in (plain, of) if some]
        said = [
            f"{label(row)} {in_figures(row['output_error'])} at {row['mac_ratio']:.2f}x"
            for row in winners
        ]
        lines.append(f"Keep {keep:.3g}: {', '.join(dict.fromkeys(said))}.")
    return lines


def trade_off(record: Record) -> "go.Figure":
    """Output error over the ratio of multiply-adds, a line for each method."""
    from plotly import graph_objects as go

    figure = go.Figure()
    drawn = [row for row in record["rows"] if _error(row) > 0]
    names = _series(drawn)
    for name in dict.fromkeys(names):
        own = [row for row, series in zip(drawn, names, strict=True) if series == name]
        line = sorted(own, key=lambda row: row["mac_ratio"])
        errors = [row["output_error"]["standard_error"] or 0.0 for row in line]
        figure.add_scatter(
            x=[row["mac_ratio"] for row in line],
            y=[_error(row) for row in line],
            error_y={"array": errors, "thickness": 1, "width": 3},
            mode="lines+markers",
            line={"dash": "dot" if line[0]["back_propagates"] else "solid"},
            name=name,
        )
    figure.update_xaxes(title="multiply-adds, full over reduced")
    figure.update_yaxes(title="output error", type="log", tickformat="~g")
    return figure


def _keep(row: Record) -> float:
    return row["keep"]


def _error(row: Record) -> float:
    return row["output_error"]["mean"]


def _series(rows: Sequence[Record]) -> list[str]:
    """Line of the chart of each row: its method, and its depths if they differ."""
    depths: dict[str, set[str]] = {}
    for row in rows:
        depths.setdefault(label(row), set()).add(_depths(row))
    return [
        label(row) + (f" at {_depths(row)}" if len(depths[label(row)]) > 1 else "")
        for row in rows
    ]


def _depths(row: Record) -> str:
    return ", ".join(map(str, row["depths"]))
