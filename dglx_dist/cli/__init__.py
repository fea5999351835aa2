"""The command line ``dglx``."""

import logging
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any

from dglx_dist.cli.common import LAUNCHED, LAUNCHER, report_error
from dglx_dist.errors import DglxError
from dglx_dist.progress import VisibleFormatter

__all__ = ["main", "run_command_line"]


def main() -> None:
    """Run ``dglx`` with this process's arguments, and end the process."""
    from dglx_dist.cli.app import app

    run_command_line(app, "dglx")


def run_command_line(app: Callable[..., Any], program: str) -> None:
    """Run ``app``, a ``typer.Typer``, with this process's arguments, and end the process.

    The exit code is 0, 2 for errors that the user can correct (one message, no traceback), or 1 for all
    others.
    """
    # The words after -- belong to another command or are not options.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = sys.argv[1:end]
    debug = "--debug" in options
    for flag in ("--debug", LAUNCHER, LAUNCHED):
        while flag in options:
            options.remove(flag)

    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, TextIOWrapper):
            # File names may contain characters that the locale cannot show.
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())

    try:
        app(options + sys.argv[end:], prog_name=program)
    except DglxError as error:
        report_error(error, debug=debug)
        raise SystemExit(2) from None
    except Exception as error:
        report_error(error, debug=debug)
        # The error has been shown. Python ends with exit code 1 without showing it again.
        sys.excepthook = lambda *_: None
        raise
