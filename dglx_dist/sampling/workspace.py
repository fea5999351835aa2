"""The memory that one sampling thread keeps from batch to batch."""

from __future__ import annotations

from typing import final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.sampling.relabel import Table

DIRECT_LIMIT = 1 << 26
"""Largest graph with a table entry per node (4 bytes each, 256 MiB a thread); larger ones are hashed."""

_FIRST_SLOTS = 1 << 16
_LAST_BASE = 1 << 31


@final
class Workspace:
    """One thread's relabelling table; not to be shared between threads.

    Args:
        num_nodes: N of the whole graph.
        direct_limit: Up to how many nodes the table has an entry per node.
    """

    def __init__(self, num_nodes: int, *, direct_limit: int = DIRECT_LIMIT) -> None:
        direct = num_nodes <= direct_limit
        slots = np.zeros(num_nodes if direct else _FIRST_SLOTS, np.uint32)
        self._table = Table(slots, np.empty(0 if direct else _FIRST_SLOTS, np.int64), 1)

    @property
    def table(self) -> Table:
        """The table, ready for a batch; give it back through :meth:`keep`."""
        # Numbers of a batch stay below 2**31, so the 32-bit entries cannot wrap within one.
        if self._table.base >= _LAST_BASE:
            self._table.slots[:] = 0
            self._table = Table(self._table.slots, self._table.keys, 1)
        return self._table

    def keep(self, table: Table) -> None:
        """Keep ``table``, as a kernel returned it, for the next batch."""
        self._table = table


def check_seeds(seeds: Array, num_distinct: int) -> None:
    """Raise ConfigError when fewer of ``seeds`` are distinct than there are, naming the first repeat."""
    if num_distinct == len(seeds):
        return
    ids, counts = np.unique(seeds, return_counts=True)
    raise ConfigError(
        f"the seeds have node {ids[counts > 1][0]} more than once ({len(seeds)} seeds, {num_distinct} "
        f"distinct); a block has one row per node: pass torch.unique(seeds)"
    )
