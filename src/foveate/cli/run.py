"""From words to a command, and from what goes wrong to one line."""

import os
import sys
import warnings
from collections.abc import Sequence

import typer

from foveate.cli.benchmark import benchmark
from foveate.cli.compare import compare
from foveate.cli.data import data
from foveate.cli.demo import demo
from foveate.cli.diagnose import diagnose
from foveate.cli.distill import distill
from foveate.cli.evaluate import evaluate
from foveate.cli.interrupts import EXIT_CODE, heeded_interrupts
from foveate.cli.options import laid_flat
from foveate.cli.probe import probe
from foveate.cli.report import report
from foveate.cli.train import train

REFUSED = 2

app = typer.Typer(
    name="foveate",
    help="Find out which tokens of a Vision Transformer a task depends on, "
    "and spend computation there.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, diagnose, distill, compare, benchmark, probe, evaluate, report):
    app.command()(laid_flat(command))
app.add_typer(data)
app.add_typer(train)


@app.callback()
def foveate() -> None:
    """Find out which tokens of a Vision Transformer a task depends on."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a wrong input is one line on the error stream.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        The exit code.
    """
    try:
        with heeded_interrupts(), warnings.catch_warnings():
            _keep_libraries_quiet()
            code = app(args=arguments, prog_name="foveate", standalone_mode=False)
    except typer.TyperException as error:
        return _refuse(_with_value(error))
    except (ValueError, ModuleNotFoundError, OSError) as error:
        return _refuse(str(error))
    except typer.Abort:
        return EXIT_CODE
    return code or 0


def _keep_libraries_quiet() -> None:
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _with_value(error: typer.TyperException) -> str:
    """Add what came; typer checks types with pydantic, whose messages leave it out."""
    from pydantic import ValidationError

    message, cause = error.format_message(), error.__cause__
    if not isinstance(cause, ValidationError):
        return message
    came = f"'{cause.errors()[0]['input']}'"
    return message if came in message else f"{message}; got {came}."


def _refuse(message: str) -> int:
    print("foveate:", " ".join(message.split()), file=sys.stderr)
    return REFUSED
