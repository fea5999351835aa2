"""The nodes that a rank computes in a pass over all nodes: its share by work, in batches of bounded size."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.memory import machine_memory
from dglx_dist.records import Array

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

_MAX_DEGREE = 512
"""Maximum mean in-degree of a full batch. Above it, batches get fewer nodes to save memory."""

MIN_NODES = 4096
"""Destinations or in-edges of a batch if memory is short, and destinations if it is unknown."""

_BATCH_BYTES = 1 << 30
"""Memory of a batch. A larger batch reads fewer rows twice, but beyond this size the gain is small."""

_EDGE_BYTES = 64
"""Memory of an edge of a batch besides its rows: its source, its id, and copies of them."""

_NODE_WORK = 8
"""Work of a destination without in-edges, as a number of in-edges. Measured with GraphSAGE 64 x 64."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Size of the largest batch of destinations. A single destination may have more in-edges."""

    nodes: int
    edges: int

    @classmethod
    def from_batch_size(cls, batch_size: int) -> BatchLimits:
        """Return the limits of batches of ``batch_size`` nodes. Raise ConfigError if it is below 1."""
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1")
        return cls(nodes=batch_size, edges=_MAX_DEGREE * batch_size)

    @classmethod
    def from_memory(cls, session: Session, num_nodes: int, node_bytes: int, edge_bytes: int) -> BatchLimits:
        """Return the limits of batches that take at most :data:`_BATCH_BYTES`.

        The limits are the same in every run, so that results are, too. Only if memory is short, batches are
        halved until those of all ranks of the machine take a quarter of its free memory.

        Args:
            num_nodes: Number of nodes of the graph. A batch has no more sources.
            node_bytes: Bytes of all rows of a source and a destination.
            edge_bytes: Bytes of all rows of an edge.
        """
        num_ranks = session.hosts.count(session.hosts[session.topology.rank])
        free_bytes = machine_memory()[1] // (4 * num_ranks)
        num_bytes = _BATCH_BYTES
        while num_bytes > max(free_bytes, 1):
            num_bytes //= 2
        edge_bytes += _EDGE_BYTES
        num_items = num_bytes // (edge_bytes + node_bytes)
        # On a dense graph, edges share sources.
        num_items = max(num_items, (num_bytes - num_nodes * node_bytes) // edge_bytes, MIN_NODES)
        return cls(nodes=num_items, edges=num_items)


FIRST_BATCH = BatchLimits(nodes=MIN_NODES, edges=32 * MIN_NODES)
"""Limits of a batch from which the memory of larger ones is estimated."""


@final
class ServerNodes:
    """Nodes of one type of the local server, in storage order. Positions count from the first of them.

    ``marks`` are (N,) bool and select the nodes. None: all nodes.
    """

    def __init__(self, g: DistGraph, ntype: str, marks: DistTensor | None = None) -> None:
        policy = g.get_node_partition_policy(ntype)
        self._first = int(policy.bounds[policy.part_id])
        self._structures = [g.structure(etype) for etype in g.canonical_etypes if etype[2] == ntype]
        self._topology = g.session.topology
        self._marked_ids: Array | None = None
        self._count = policy.get_part_size()
        if marks is not None:
            ids = self._first + np.flatnonzero(marks.local_rows())
            degrees = sum((structure.in_degrees(ids) for structure in self._structures), np.zeros(len(ids)))
            self._edges_before = np.concatenate([[0], np.cumsum(degrees, dtype=np.int64)])
            self._marked_ids = ids
            self._count = len(ids)

    def get_share(self) -> tuple[int, int]:
        """Return the positions that this rank computes, as first and end. Ranks get equal work."""
        ranks = self._topology.ranks_of_server(self._topology.server)
        index = ranks.index(self._topology.rank)
        total = self._count_work(self._count) - self._count_work(0)
        bounds = [self._count_work(0) + total * i // len(ranks) for i in (index, index + 1)]
        positions = range(self._count + 1)
        first, end = (bisect_left(positions, bound, key=self._count_work) for bound in bounds)
        return first, end

    def split(self, share: tuple[int, int], limits: BatchLimits) -> Iterator[Array]:
        """Yield the (n,) int64 ids at the positions of ``share``, in batches within ``limits``."""
        first, end = share
        while first < end:
            max_edges = self._count_edges(first) + limits.edges
            positions = range(end + 1)
            last = bisect_right(positions, max_edges, lo=first + 1, key=self._count_edges) - 1
            last = min(max(first + 1, last), first + limits.nodes)
            yield self._get_ids(first, last)
            first = last

    def count_edges(self, share: tuple[int, int]) -> int:
        """Return the number of in-edges of the nodes at the positions of ``share``."""
        return self._count_edges(share[1]) - self._count_edges(share[0])

    def _get_ids(self, first: int, last: int) -> Array:
        if self._marked_ids is not None:
            return self._marked_ids[first:last]
        return self._first + np.arange(first, last)

    def _count_edges(self, position: int) -> int:
        """Return a number that grows by the in-degree of each node before ``position``."""
        if self._marked_ids is not None:
            return int(self._edges_before[position])
        return sum(structure.count_edges_before(self._first + position) for structure in self._structures)

    def _count_work(self, position: int) -> int:
        return self._count_edges(position) + _NODE_WORK * position
