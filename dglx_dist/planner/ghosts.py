"""What graph servers exchange of each other's nodes: pairs of a node and another rank that reads it."""

from __future__ import annotations

import numpy as np

from dglx_dist.cluster.topology import Topology
from dglx_dist.graph.owners import RowOwners
from dglx_dist.planner.measured import Ghosts
from dglx_dist.records import Array


def count_ghosts(indptr: Array, indices: Array, bounds: Array, topology: Topology) -> Ghosts:
    """Count the pairs over all edges, rank by rank.

    Args:
        indptr: (N + 1,) of the in-edges.
        indices: (E,) their sources.
        bounds: (S + 1,) int64 first node of each server.
        topology: Of the run.
    """
    starts = RowOwners(bounds, topology).starts
    outside = inside = 0
    for rank in range(topology.world_size):
        first, last = int(starts[rank]), int(starts[rank + 1])
        server = topology.server_of_rank[rank]
        sources = np.unique(indices[int(indptr[first]) : int(indptr[last])])
        away = np.count_nonzero((sources < bounds[server]) | (sources >= bounds[server + 1]))
        own = np.count_nonzero((sources >= first) & (sources < last))
        outside += int(away)
        inside += int(len(sources) - away - own)
    return Ghosts(outside=outside, inside=inside)
