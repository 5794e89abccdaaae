"""The command line: options in, one library call, a table and a JSON record out."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from foveate.cli.interrupts import EXIT_CODE


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0, 2 after one line about a wrong input, 130 after Ctrl-C.

    Args:
        arguments: Words of the command line; those of the process if None.
    """
    try:
        # Here, since even what --help needs takes long enough to be interrupted.
        from foveate.cli.run import run

        code = run(arguments)
    except KeyboardInterrupt:
        code = EXIT_CODE
    sys.exit(code)
