"""Imported once by the server that ranks are forked from: what every rank would else load for itself.

Each rank would import the modules of its strategy. Numba would read its tables of types at the first compiled
call, which costs half a second of each process, and each kernel from its cache, which costs 5 to 50 ms. The
picture at the end of a run costs as much, so ranks leave an empty file in its place: tests/test_cli.py and
tests/report look at pictures.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

import dglx_dist
import dglx_dist.planner.trials
import dglx_dist.report.pictures


def _load_kernels(module: Any) -> None:
    """Load what Numba's cache holds of the kernels of ``module``."""
    for kernel in list(vars(module).values()):
        if isinstance(kernel, Dispatcher) and hasattr(kernel._cache, "_cache_file"):
            for signature, *_ in kernel._cache._cache_file._load_index():
                kernel.compile(signature)


def _empty(_: Any, path: Path, *, title: str) -> None:
    assert title
    path.touch()


cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
for module in pkgutil.walk_packages(dglx_dist.__path__, "dglx_dist."):
    if not module.name.endswith("__main__"):
        _load_kernels(importlib.import_module(module.name))
dglx_dist.report.pictures.draw = _empty
# Tests need a choice, not a good one.
dglx_dist.planner.trials._MIN_FIRST_TURN_S = 0.01
