"""Results for people: one web page, tables on the terminal; and the records behind them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foveate.report.blocks import Section
from foveate.report.records import read_record, write_whole

__all__ = ["write_report"]


def write_report(directory: str | Path) -> Path:
    """Make one self-contained page of the records in a folder.

    Args:
        directory: Folder with records that commands wrote, such as ``diagnose.json``.

    Returns:
        The file ``report.html`` in that folder. It needs no network.

    Raises:
        ValueError: If there is no such folder, or no record in it, or one is damaged.
    """
    directory = Path(directory)
    makers = _sections()
    records = {name: directory / name for name in makers if (directory / name).is_file()}
    if not records:
        raise ValueError(
            f"directory must be a folder with {' or '.join(makers)}; got '{directory}'."
        )
    sections = []
    for name, file in records.items():
        try:
            sections.append(makers[name](read_record(file), directory))
        except (KeyError, TypeError) as error:
            raise ValueError(f"'{file}' must be a complete record; {error!r}.") from error
    return write_whole(directory / "report.html", render(sections))


def _sections() -> dict[str, Callable[[Mapping[str, Any], Path], Section]]:
    """What makes the section of each record, in the order of the page."""
    from foveate.report import benchmark, compare, diagnosis, probe, tasks, theorems

    return {
        "diagnose.json": diagnosis.section,
        "compare.json": compare.section,
        "benchmark.json": benchmark.section,
        "probe.json": probe.section,
        "train.json": tasks.training,
        "evaluate.json": tasks.evaluation,
        "theorems.json": theorems.section,
    }


def render(sections: list[Section]) -> str:
    """Lay sections out as one HTML document, plotly.js included once.

    Args:
        sections: What to show, in order.

    Returns:
        The document. All texts of the sections are escaped.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    from foveate import __version__

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.jinja")
    return page.render(sections=sections, plotly=get_plotlyjs(), version=__version__)
