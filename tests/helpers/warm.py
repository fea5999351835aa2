"""Imported once by the server that ranks are forked from: what every rank would else load for itself.

Numba reads its tables of types at the first compiled call, which costs half a second of each process.
"""

from __future__ import annotations

from numba.core.registry import cpu_target

import dglx_dist.strategies.data_parallel
import dglx_dist.training.models  # noqa: F401

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
