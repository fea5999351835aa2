"""Runs a script as torchrun would, in ranks that find torch and dgl imported, which saves each seconds."""

import atexit
import os
import runpy
import sys
from pathlib import Path

from tests.helpers.ranks import Outcome, start_ranks


def run_script(path: Path, folder: Path, *arguments: str, ranks: int = 2, timeout_s: float = 250.0) -> str:
    """Run ``path ARGUMENTS`` on ``ranks`` ranks of one server in ``folder``; return what all of them wrote.

    Raises:
        AssertionError: a rank raised, died or hung; its error and what all wrote are shown.
    """
    outcomes = start_ranks(_main, ranks, args=(path, folder, arguments), timeout_s=timeout_s)
    shown = "".join(outcome.output for outcome in outcomes)
    failed = [outcome for outcome in outcomes if outcome.error or outcome.exitcode != 0]
    assert not failed, "\n".join([*(item.error or f"exit code {item.exitcode}" for item in failed), shown])
    return shown


def _main(path: Path, folder: Path, arguments: tuple[str, ...]) -> None:
    os.chdir(folder)
    sys.argv = [str(path), *arguments]
    # As for every script: its neighbours can be imported.
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def start_script(path: Path, *, ranks: int = 2) -> list[Outcome]:
    """Run ``path`` on ``ranks`` ranks of one server; return how each ended, with what its end wrote."""
    return start_ranks(_run_and_leave, ranks, args=(path,))


def _run_and_leave(path: Path) -> None:
    """End as the interpreter does: an uncaught error is shown, and exit functions run."""
    code = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
