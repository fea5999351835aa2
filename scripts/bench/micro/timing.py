"""Helpers of the programs: options, the timing loop, commands, tables and JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from scripts.out_files import markdown_table

T = TypeVar("T")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the program ``name``."""
    return argparse.ArgumentParser(
        prog=f"python scripts/bench {name}",
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )


def time_call(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that ``work`` takes, and what it returns."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def in_turn(contestants: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0) -> dict[str, list[T]]:
    """Return the results of each contestant. They run in turn, so that a slow moment affects all of them.

    The first ``warm_up`` rounds are left out.
    """
    results: dict[str, list[T]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            results[name].append(contestant())
    return {name: values[warm_up:] for name, values in results.items()}


def dglx(
    *arguments: object, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Run one ``dglx`` command in ``folder`` and stop with what it printed if it fails."""
    command = [sys.executable, "-m", "dglx_dist.cli", *map(str, arguments)]
    more = {**os.environ, **(environment or {})}
    done = subprocess.run(command, cwd=folder, env=more, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as Markdown, floats with two digits."""
    cells = [
        [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows
    ]
    return markdown_table(list(rows[0]), cells)


def write_json(path: Path | None, value: object) -> None:
    """Write the figures, where a file is given."""
    if path:
        path.write_text(json.dumps(value, indent=1), encoding="utf-8")
