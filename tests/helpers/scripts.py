"""Runs a script as torchrun would, in ranks that find torch and dgl imported, which saves each seconds."""

import os
import runpy
import sys
from pathlib import Path

from tests.helpers.ranks import start_ranks


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
