"""The sections of the report about ``evaluate.json`` and ``train.json``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveate.report.blocks import Block, Chart, Facts, Section, Table
from foveate.report.scores import SIDES, saved_rows, shown

if TYPE_CHECKING:  # plotly is slow to import, and the terminal does without it
    from plotly import graph_objects as go

Record = Mapping[str, Any]

SCORES = "Scores with 95 % intervals over images; the difference is paired."


def evaluation(record: Record, directory: Path) -> Section:
    """Show scores of the full and the reduced model, and what was saved.

    Args:
        record: What ``evaluate`` wrote.
        directory: Folder of the record.

    Returns:
        Tables.
    """
    title = f"Score: {record['task']}"
    return Section(title, _scores(record), f"{record['num_images']} images")


def training(record: Record, directory: Path) -> Section:
    """Show what was trained, how its loss fell, and what a register learned.

    Args:
        record: What ``train`` wrote.
        directory: Folder of the record.

    Returns:
        Tables and pictures.
    """
    if record["kind"] == "heads":
        return Section("Trained heads", _heads(record), f"{record['num_views']} views")
    parts = [(name, f"{number:,}") for name, number in record["parameters"].items()]
    blocks: list[Block] = [
        Facts([("Steps", str(record["steps"])), ("Views", str(record["num_views"]))]),
        Table(("Part", "Numbers that are trained"), parts),
        Chart("Loss", losses({record["task"]: record["losses"]})),
    ]
    if record["counts"]:
        caption = "Patches that leave at each depth, and the share of their offset that "
        blocks.append(
            Chart("What the register removes", allocation(record), f"{caption}comes back.")
        )
    if "scores" in record:
        blocks += _scores(record)
    return Section(f"Trained: {record['kind']}, {record['task']}", blocks)


def losses(by_task: Mapping[str, Sequence[float]]) -> "go.Figure":
    """Mean loss between validations, one line a task."""
    from plotly import graph_objects as go

    lines = [
        go.Scatter(x=[*range(1, len(values) + 1)], y=[*values], name=task)
        for task, values in by_task.items()
    ]
    figure = go.Figure(lines)
    return figure.update_layout(xaxis_title="validation", yaxis_title="loss", height=320)


def allocation(record: Record) -> "go.Figure":
    """Counts by depth as bars, alphas as points on an axis of their own."""
    from plotly import graph_objects as go

    depths = [str(depth) for depth in record["depths"]]
    figure = go.Figure(go.Bar(x=depths, y=record["counts"], name="removed"))
    if record["alpha"]:
        points = go.Scatter(
            x=depths, y=record["alpha"], name="alpha", mode="markers", yaxis="y2"
        )
        figure.add_trace(points)
    second = {"overlaying": "y", "side": "right", "range": [0, 1], "title": "alpha"}
    return figure.update_layout(
        xaxis_title="depth", yaxis_title="patches removed", yaxis2=second, height=320
    )


def _heads(record: Record) -> list[Block]:
    tasks = record["tasks"]
    rows = [
        (name, score, shown(score, estimate))
        for name, task in tasks.items()
        for score, estimate in (task["scores"] or {}).items()
    ]
    return [
        Table(("Task", "Score", "Validation"), rows, SCORES, num_text=2),
        Chart("Loss", losses({name: task["losses"] for name, task in tasks.items()})),
    ]


def _scores(record: Record) -> list[Block]:
    sides = [side for side in SIDES if side in record["scores"]]
    rows = [
        (name, *(shown(name, record["scores"][side][name]) for side in sides))
        for name in record["scores"]["full"]
    ]
    blocks: list[Block] = [Table(("Score", *sides), rows, SCORES)]
    if "speedup" in record:
        blocks.append(Table(("Saved", "Measured"), saved_rows(record)))
    return blocks
