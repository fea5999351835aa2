"""The command line ``dglx``: partition, inspect, train, report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dglx_dist.cli.common import LAUNCHED, report
from dglx_dist.errors import DglxError

__all__ = ["main", "run_command_line"]


def main() -> None:
    """Run the command that the arguments of this process ask for, and end the process."""
    from dglx_dist.cli.app import app

    run_command_line(app, "dglx")


def run_command_line(app: Callable[..., Any], program: str) -> None:
    """Run ``app``, a ``typer.Typer``, on the arguments of this process, and end the process.

    Exit codes: 0; 2 for what the user can put right (one message, no traceback); 1 for everything else.

    Args:
        app: The commands.
        program: Its name in help texts.
    """
    # What follows -- is another command's, or no option.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, others = sys.argv[1:end], sys.argv[end:]
    debug = "--debug" in own
    arguments = [argument for argument in own if argument not in ("--debug", LAUNCHED)] + others
    try:
        app(arguments, prog_name=program)
    except DglxError as error:
        report(error, debug=debug)
        raise SystemExit(2) from None
    except Exception as error:
        report(error, debug=debug)
        # It has been shown; Python shall end with 1, and not show it again.
        sys.excepthook = lambda *_: None
        raise
