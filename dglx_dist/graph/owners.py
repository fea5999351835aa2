"""The one rank that changes a row: who adds to it, applies its optimiser and saves it."""

from __future__ import annotations

from functools import cached_property
from typing import final

import numpy as np

from dglx_dist.cluster.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array


@final
class RowOwners:
    """One owner rank for every row: the rows of a server in even, contiguous runs over its ranks.

    All ranks of a server can read and overwrite its rows; what depends on the value that is there already
    (adding, an optimiser's step) is done by the owner alone, so that nothing is lost between two of them.

    Args:
        bounds: (S + 1,) int64; server s has the rows ``bounds[s]:bounds[s + 1]``.
        topology: Which ranks a server has.

    Raises:
        ConfigError: ``bounds`` are not those of as many servers.
    """

    def __init__(self, bounds: Array, topology: Topology) -> None:
        if bounds.shape != (topology.num_servers + 1,):
            raise ConfigError(
                f"bounds have shape {bounds.shape} for {topology.num_servers} servers; give "
                f"({topology.num_servers + 1},) first rows"
            )
        self._bounds = bounds
        self._topology = topology

    @cached_property
    def starts(self) -> Array:
        """(W + 1,) int64; rank r owns the rows ``starts[r]:starts[r + 1]``."""
        starts = []
        for server in range(self._topology.num_servers):
            first, last = int(self._bounds[server]), int(self._bounds[server + 1])
            ranks = len(self._topology.ranks_of_server(server))
            starts += [first + (last - first) * local // ranks for local in range(ranks)]
        return np.array([*starts, self._bounds[-1]], dtype=np.int64)

    def rank_of(self, ids: Array) -> Array:
        """Return the (K,) int64 owner rank of each of the (K,) int64 ``ids``, which must be rows."""
        # From the right: of ranks that start at the same row, all but the last own none.
        return np.searchsorted(self.starts, ids, side="right") - 1

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return the first row of ``rank`` and the one after its last."""
        return int(self.starts[rank]), int(self.starts[rank + 1])
