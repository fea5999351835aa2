"""How a server's neighbourhood grows with each hop, from the parts on disk: the price of preloading it.

The dataset is streamed: memory is a few bytes per node, and a hop reads the in-edges of those nodes only that
the hop before has found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from dglx_dist.cluster.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.placement import Placement
from dglx_dist.progress import progress
from dglx_dist.records import Array, EdgeType
from dglx_dist.storage.reader import StoredDataset

_TOGETHER = 64
"""Servers whose marks fit a word."""
_WORTH_TELLING = 1 << 24
"""Edges from which on one wants to see how far it is."""


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """The closures of all servers, hop by hop: R_i^L, R_i^(L-1), ... of algorithms 3.1, for all own nodes."""

    nodes: Array
    """(K + 1, S) int64 nodes within h hops of a server's own, its own included; row 0 are its own."""
    edges: Array
    """(K + 1, S) int64 in-edges of these: what a layer that computes them aggregates."""

    @property
    def hops(self) -> int:
        """K."""
        return len(self.nodes) - 1

    @property
    def factors(self) -> Array:
        """(K + 1, S) float64: nodes per node of the server's own, D_i of a model of h layers."""
        return np.asarray(self.nodes / np.maximum(self.nodes[0], 1))

    @property
    def foreign(self) -> Array:
        """(K + 1, S) int64: nodes of other servers, whose features are preloaded for h layers."""
        return np.asarray(self.nodes - self.nodes[0])

    @property
    def work(self) -> Array:
        """(K + 1, S) float64: edges that a preloaded model of h layers aggregates, by those without replicas.

        Its layers compute the closures of 0 to h - 1 hops; 1 for no layers.
        """
        layers = np.arange(1, self.hops + 1)[:, np.newaxis]
        summed = self.edges[:-1].cumsum(axis=0) / (layers * np.maximum(self.edges[0], 1))
        # A server without in-edges has no work to compare with.
        summed[:, self.edges[0] == 0] = 1.0
        return np.concatenate([np.ones((1, self.nodes.shape[1])), summed])


def measure_expansion(dataset: StoredDataset, servers: int, hops: int) -> Expansion:
    """Return how the in-neighbourhoods of ``servers`` servers grow; any process alone.

    Args:
        dataset: With all its parts on this machine; of one node and one edge type.
        servers: Each has an equal number of consecutive parts, as far as it goes.
        hops: K, at least 0.

    Raises:
        ConfigError: there are several types, no servers, fewer parts than servers, or ``hops`` is below 0.
        StorageError: a part is not on this machine, or damaged.
    """
    etype = _only_etype(dataset)
    if hops < 0 or servers < 1:
        raise ConfigError(f"hops={hops} must be at least 0 and servers={servers} at least 1")
    placement = Placement(dataset.manifest.num_parts, Topology(0, servers, tuple(range(servers))))
    bounds = placement.server_offsets(dataset.manifest.node_offsets[etype[2]])
    passes = -(-servers // _TOGETHER)
    edges = dataset.manifest.num_edges(etype)
    with progress("Following in-edges", edges * passes, enabled=edges * hops > _WORTH_TELLING) as advance:
        found = []
        for first in range(0, servers, _TOGETHER):
            some = bounds[first : first + _TOGETHER + 1]
            found.append(_Marks(dataset, etype, some).follow(hops))
            advance(edges)
    nodes, counted = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return Expansion(nodes=nodes, edges=counted)


def _only_etype(dataset: StoredDataset) -> EdgeType:
    manifest = dataset.manifest
    if len(manifest.node_types) != 1 or len(manifest.edge_types) != 1:
        raise ConfigError(
            f"{dataset.folder} has {len(manifest.node_types)} node and {len(manifest.edge_types)} edge "
            "types, and neighbourhoods are preloaded for graphs of one of each; partition one relation of it"
        )
    return manifest.edge_types[0]


class _Marks:
    """Which servers need a node, a bit for each.

    Args:
        dataset: With all its parts.
        etype: Whose edges are followed.
        bounds: (S + 1,) first own nodes of at most 64 servers.
    """

    def __init__(self, dataset: StoredDataset, etype: EdgeType, bounds: Array) -> None:
        self._dataset, self._etype = dataset, etype
        self._offsets = dataset.manifest.node_offsets[etype[2]]
        self._servers = len(bounds) - 1
        dtype = next(
            kind
            for kind in (np.uint8, np.uint16, np.uint32, np.uint64)
            if np.iinfo(kind).bits >= self._servers
        )
        self._marks: Array = np.zeros(int(self._offsets[-1]), dtype)
        for server in range(self._servers):
            self._marks[bounds[server] : bounds[server + 1]] = dtype(1 << server)
        self._fresh: Array = self._marks.copy()

    def follow(self, hops: int) -> tuple[Array, Array]:
        """Return (K + 1, S) int64 nodes and in-edges within 0 to ``hops`` hops."""
        nodes, edges = [], []
        for hop in range(hops + 1):
            if hop:
                self._spread()
            counts = np.zeros((2, _TOGETHER), np.int64)
            for part in range(self._dataset.manifest.num_parts):
                own = slice(int(self._offsets[part]), int(self._offsets[part + 1]))
                _count(self._dataset.part(part).indptr(self._etype), self._marks[own], counts)
            nodes.append(counts[0, : self._servers])
            edges.append(counts[1, : self._servers])
        return np.stack(nodes), np.stack(edges)

    def _spread(self) -> None:
        """Mark the sources of all in-edges of nodes that were marked in the hop before."""
        marks = self._marks.copy()
        for number in range(self._dataset.manifest.num_parts):
            part = self._dataset.part(number)
            fresh = self._fresh[int(self._offsets[number]) : int(self._offsets[number + 1])]
            _mark_sources(part.indptr(self._etype), part.indices(self._etype), fresh, marks)
        self._fresh = marks & ~self._marks
        self._marks = marks


@njit(cache=True, nogil=True)
def _mark_sources(indptr: Array, indices: Array, fresh: Array, marks: Array) -> None:
    for node in range(len(fresh)):
        if fresh[node]:
            for edge in range(indptr[node], indptr[node + 1]):
                marks[indices[edge]] |= fresh[node]


@njit(cache=True, nogil=True)
def _count(indptr: Array, marks: Array, counts: Array) -> None:
    for node in range(len(marks)):
        bits = np.uint64(marks[node])
        server = 0
        while bits != np.uint64(0):
            if bits & np.uint64(1):
                counts[0, server] += 1
                counts[1, server] += indptr[node + 1] - indptr[node]
            bits >>= np.uint64(1)
            server += 1
