"""How a command ends when something is wrong."""

from __future__ import annotations

import sys

from rich.console import Console

from dglx_dist.cluster.topology import launched_by_torchrun, read_topology
from dglx_dist.errors import DglxError

LAUNCHED = "--launched"
"""Hidden flag of ranks whose launcher shows their error, so that they need not."""


def report(error: Exception, *, debug: bool) -> None:
    """Show one message on standard error, with ``debug`` a traceback in place of it.

    A rank leaves its message where torchrun collects it; the launcher of ``dglx train`` shows the first.
    """
    console = Console(stderr=True, soft_wrap=True)
    if launched_by_torchrun():
        # Only torchrun's ranks need torch for this; they have it already.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    if debug:
        console.print_exception()
    elif LAUNCHED not in sys.argv:
        console.print(f"{_who()}{_text(error)}", style="red", highlight=False, markup=False)


def _text(error: Exception) -> str:
    if isinstance(error, DglxError):
        return f"error: {error}"
    return f"unexpected {type(error).__name__}: {error}\nrun the same command with --debug for the traceback"


def _who() -> str:
    return f"rank {read_topology().rank}: " if launched_by_torchrun() else ""
