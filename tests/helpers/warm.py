"""Imported once by the server that ranks are forked from: what every rank would else load for itself.

Numba reads its tables of types at the first compiled call, which costs half a second of each process. The
picture at the end of a run costs as much, so ranks leave an empty file in its place: tests/test_cli.py and
tests/report look at pictures.
"""

from pathlib import Path
from typing import Any

from numba.core.registry import cpu_target

import dglx_dist.cli.train_job
import dglx_dist.report.pictures
import dglx_dist.strategies.data_parallel
import dglx_dist.training.models

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()


def _empty(_: Any, path: Path, *, title: str) -> None:
    assert title
    path.touch()


dglx_dist.report.pictures.draw = _empty
