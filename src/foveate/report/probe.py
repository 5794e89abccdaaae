"""The section of the report about ``probe.json``, and its tables for the terminal."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveate.report.blocks import Block, Chart, Facts, Section, Table, Text
from foveate.report.scores import in_interval
from foveate.report.terminal import print_table, print_text

if TYPE_CHECKING:  # plotly is slow to import, and the terminal does without it
    from plotly import graph_objects as go

Record = Mapping[str, Any]
Row = Mapping[str, Any]

DROPS = (
    "Full minus pruned score, in points of a hundred, when only one block prunes; red is "
    "worse than the full model. Alpha 0 reads a removed patch back as a copy of its "
    "stand-in, alpha 1 with all of its offset. A star: the paired 95 % interval is without "
    "zero, not corrected for the number of cells."
)
ORDERS = (
    "Spearman's correlation between the drops that the criteria cause to two tasks: 1, the "
    "same order; -1, the opposite one. A star: the 95 % interval, over images that both "
    "tasks share, is without zero."
)
OFFSETS = (
    "Drop with the offset minus drop without, in points, mean over criteria: below zero "
    "the offset helps. 95 % intervals."
)
SIGNIFICANT = (
    "Pairs of criteria whose drops differ: how many have a paired 95 % interval without "
    "zero, and how many are significant after Holm's correction over all pairs."
)


def rows(record: Record) -> list[tuple[str, ...]]:
    """Drops in points, a column for each depth.

    Args:
        record: What ``probe`` wrote.

    Returns:
        One row for each task, endpoint and criterion; of a task that recovers nothing one
        endpoint. A star marks an interval without zero.
    """
    found = []
    for task, alpha in places(record):
        for criterion in record["criteria"]:
            drops = [row["drop"] for row in _cells(record, task, alpha, criterion)]
            shown = "-" if alpha is None else f"{alpha:g}"
            found.append((task["name"], shown, criterion, *map(_marked, drops)))
    return found


def places(record: Record) -> list[tuple[Row, float | None]]:
    """Tasks and their endpoints; None for a task that recovers nothing."""
    return [
        (task, alpha)
        for task in record["tasks"]
        for alpha in (record["alphas"] if task["recovers"] else [None])
    ]


def print_probe(record: Record) -> None:
    """Print scores, drops and the verdict.

    Args:
        record: What ``probe`` wrote.
    """
    title = "{model}, {num_images} images of {data}".format_map(record)
    print_table(title, ("task", "score", "full, 95 % interval"), full_rows(record))
    columns = ("task", "alpha", "criterion", *(f"depth {d}" for d in record["depths"]))
    print_table(f"Drops in points at keep {record['keep']:g}", columns, rows(record))
    print_text(*(each["sentence"] for each in record["verdict"]))


def full_rows(record: Record) -> list[tuple[str, str, str]]:
    """Score of each task before any pruning."""
    return [(t["name"], t["score"], in_interval(t["full"])) for t in record["tasks"]]


def section(record: Record, directory: Path) -> Section:
    """Show which criterion costs which task how much, and what that says.

    Args:
        record: What ``probe`` wrote.
        directory: Folder of the record.

    Returns:
        The verdict, a heat-map for each task, rank correlations, and all numbers.
    """
    facts = [
        ("Images", str(record["num_images"])),
        ("Patches kept", f"{record['keep']:.0%}"),
        ("Resamples", str(record["num_resamples"])),
    ]
    sentences = [each["sentence"] for each in record["verdict"]]
    blocks: list[Block] = [
        Text(sentences, heading="Does one rule fit all tasks?", is_callout=True),
        Facts(facts),
        Table(("Task", "Score", "Full model"), full_rows(record), num_text=2),
    ]
    for task in record["tasks"]:
        heading = f"What pruning costs {task['name']} ({task['score']})"
        blocks.append(Chart(heading, heat_map(record, task), DROPS))
    if record["between_tasks"]:
        heading = "Do tasks agree on the criteria?"
        blocks.append(Chart(heading, correlations(record), ORDERS))
    if record["recovery"]:
        columns = ("Task", "Depth", "Points")
        blocks.append(Table(columns, recovery_rows(record), OFFSETS, num_text=2))
    heads = ("Task", "Alpha", "Pairs", "Without zero", "After Holm")
    blocks.append(Table(heads, pair_rows(record), SIGNIFICANT, num_text=2))
    where = f"{record['model']} · {record['data']} · seed {record['seed']}"
    return Section("Pruning at one block, by criterion and task", blocks, where)


def recovery_rows(record: Record) -> list[tuple[str, str, str]]:
    """What the offset changes, for each task and depth."""
    return [
        (
            row["task"],
            "all" if row["depth"] is None else str(row["depth"]),
            in_interval(row),
        )
        for row in record["recovery"]
    ]


def pair_rows(record: Record) -> list[tuple[str, ...]]:
    """How many pairs of criteria differ, for each task and endpoint."""
    found = []
    for task, alpha in places(record):
        own = [
            pair
            for pair in record["pairs"]
            if (pair["task"], pair["alpha"]) == (task["name"], alpha or 0)
        ]
        counts = (sum(p[k] for p in own) for k in ("excludes_zero", "significant"))
        shown = "-" if alpha is None else f"{alpha:g}"
        found.append((task["name"], shown, str(len(own)), *map(str, counts)))
    return found


def heat_map(record: Record, task: Row) -> "go.Figure":
    """Drops of a task, criterion over depth, one endpoint beside the other."""
    alphas = [alpha for each, alpha in places(record) if each is task]
    columns = [(alpha, depth) for alpha in alphas for depth in record["depths"]]
    cells = [
        [
            drop["drop"]
            for alpha in alphas
            for drop in _cells(record, task, alpha, criterion)
        ]
        for criterion in record["criteria"]
    ]
    names = [
        f"depth {depth}" + ("" if alpha is None else f"<br>alpha {alpha:g}")
        for alpha, depth in columns
    ]
    return _heat(cells, names, list(record["criteria"]), unit=100)


def correlations(record: Record) -> "go.Figure":
    """Rank correlation between tasks, pair of tasks over depth."""
    by_pair: dict[str, list[Row]] = {}
    for row in record["between_tasks"]:
        name = escape(f"{' / '.join(row['tasks'])}, alpha {row['alpha']:g}")
        by_pair.setdefault(name, []).append(row)
    names = [f"depth {depth}" for depth in record["depths"]]
    return _heat(list(by_pair.values()), names, list(by_pair), unit=1)


def _heat(
    cells: Sequence[Sequence[Row]], x: list[str], y: list[str], unit: float
) -> "go.Figure":
    """Values around zero, red above, with the numbers written on them."""
    from plotly import graph_objects as go

    values = [[_times(each["value"], unit) for each in line] for line in cells]
    known = [abs(v) for line in values for v in line if v is not None]
    most = max([*known, 1e-9])
    figure = go.Figure()
    figure.add_heatmap(
        z=values,
        x=x,
        y=y,
        text=[[_marked(each, unit) for each in line] for line in cells],
        texttemplate="%{text}",
        hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
        colorscale="RdBu",
        reversescale=unit == 100,
        zmin=-most,
        zmax=most,
        xgap=2,
        ygap=2,
    )
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category", autorange="reversed")
    return figure


def _cells(record: Record, task: Row, alpha: float | None, criterion: str) -> list[Row]:
    """Cells of a row, by depth."""
    wanted = {"task": task["name"], "alpha": alpha or 0.0, "criterion": criterion}
    return [row for row in record["cells"] if wanted.items() <= row.items()]


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else unit * value


def _marked(found: Row, unit: float = 100) -> str:
    """A number, with a star if its interval is without zero; a dash if undefined."""
    value, low, high = (found[k] for k in ("value", "low", "high"))
    if value is None or low is None or high is None:
        return "-"
    shown = f"{unit * value:.{1 if unit == 100 else 2}f}"
    return shown + ("*" if low > 0 or high < 0 else "")
