"""Results on the terminal: a short table, and a bar while it takes long."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from foveate.report.statistics import STATISTICS, in_figures

Report = Callable[[int, int], None]


@contextmanager
def progress_bar(label: str) -> Iterator[Report]:
    """Show a bar on the error stream while something runs; nothing unless on a terminal.

    Args:
        label: What is running.

    Yields:
        A function of how much is done, and of how much there is.
    """
    hidden = not (sys.stderr.isatty() and sys.stdout.isatty())
    with Progress(console=Console(stderr=True), disable=hidden, transient=True) as progress:
        task = progress.add_task(escape(label), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; the first column is text, all others are numbers.

    Args:
        title: Heading.
        columns: Heads of the columns.
        rows: Cells.
    """
    table = Table(title=escape(title), title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if index else "left")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)


def print_diagnosis(record: Mapping[str, Any]) -> None:
    """Print the statistics, the regime and the advice of a diagnosis.

    Args:
        record: What ``diagnose`` writes.
    """
    title = "{model}, {task}, depth {depth}, rank {rank}".format_map(record)
    rows = [
        (
            statistic.name,
            *(in_figures(record[tokens][key]) for tokens in ("all", "patches")),
        )
        for key, statistic in STATISTICS.items()
    ]
    print_table(title, ("", "all tokens", "patches"), rows)
    print_text(f"Regime: {record['regime']}", str(record["advice"]))


def print_text(*lines: str) -> None:
    """Print lines as they are."""
    for line in lines:
        Console().print(line, markup=False, highlight=False, soft_wrap=True)


def print_skipped(skipped: Sequence[tuple[Path, str]], num_files: int) -> None:
    """Name the files that were left out; nothing if there are none."""
    if skipped:
        print_text(f"Skipped {len(skipped)} of {num_files} files:")
    print_text(*(f"  {file}: {reason}" for file, reason in skipped))
