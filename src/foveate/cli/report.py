"""The command ``report``."""

from pathlib import Path
from typing import Annotated

from typer import Argument


def report(directory: Annotated[Path, Argument(show_default=False)]) -> None:
    """Make one self-contained web page of the records in a folder."""
    from foveate.report import terminal, write_report

    terminal.print_text(f"Wrote {write_report(directory)}")
