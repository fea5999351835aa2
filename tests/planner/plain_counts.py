"""Work of servers counted the plain way, over masks of all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.reader import StoredDataset, open_structure
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import Placement, RowOwners
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array
from dglx_dist.strategies.full_graph.cost import HaloPairs

_MAX_RANKS = 64  # Bits of a word.


@dataclass(frozen=True, kw_only=True)
class ServerWork:
    """Work of every server in an epoch, S servers."""

    edges: tuple[int, ...]
    """(S,) aggregated edges, in all layers."""
    foreign: tuple[int, ...]
    """(S,) feature rows that another server owns, counted for each step."""

    def kappa(self, base: ServerWork) -> float:
        """Return the edges of the busiest server, relative to ``base``."""
        return max(self.edges) / max(*base.edges, 1)


def exchanging_work(indptr: Array, indices: Array, bounds: Array, seeds: Array, layers: int) -> ServerWork:
    """Return the work of servers that compute only their own nodes, and exchange rows in each layer.

    Args:
        indptr: (N + 1,) of the in-edges.
        indices: (E,) their sources.
        bounds: (S + 1,) first node of each server.
        seeds: (n,) ids of all training nodes.
        layers: L.
    """
    needed = _mask(len(indptr) - 1, seeds)
    degrees, edges = np.diff(indptr), np.zeros(len(bounds) - 1, np.int64)
    for _ in range(layers):
        work = np.where(needed, degrees, 0)
        edges += [work[first:last].sum() for first, last in _ranges(bounds)]
        needed = _with_sources(indptr, indices, needed)
    return ServerWork(edges=tuple(edges.tolist()), foreign=(0,) * len(edges))


def preloading_work(
    indptr: Array,
    indices: Array,
    bounds: Array,
    batches: Sequence[Sequence[Array]],
    layers: int,
    *,
    hops: int | None = None,
) -> ServerWork:
    """Return the work of servers that hold the neighbourhood of their training nodes.

    Args:
        indptr: (N + 1,) of the in-edges.
        indices: (E,) their sources.
        bounds: (S + 1,) first node of each server.
        batches: By server, the (n,) ids of its training nodes of each step.
        layers: L.
        hops: Distance from its own nodes up to which a server takes others; None: ``layers``. A fan-out is
            not applied.
    """
    edges, foreign = np.zeros(len(batches), np.int64), np.zeros(len(batches), np.int64)
    for server, (first, last) in enumerate(_ranges(bounds)):
        allowed = _mask(len(indptr) - 1, np.arange(first, last))
        for _ in range(layers if hops is None else hops):
            allowed = _with_sources(indptr, indices, allowed)
        degrees = _degrees(indptr, indices, allowed)
        for seeds in batches[server]:
            needed = _mask(len(degrees), seeds)
            for _ in range(layers):
                edges[server] += degrees[needed].sum()
                needed = _with_sources(indptr, indices, needed) & allowed
            foreign[server] += needed.sum() - needed[first:last].sum()
    return ServerWork(edges=tuple(edges.tolist()), foreign=tuple(foreign.tolist()))


def count_pairs(dataset: StoredDataset, topology: Topology, layers: int) -> HaloPairs:
    """Count the rows that ``full_graph`` exchanges: only rows that training nodes depend on are computed.

    Args:
        dataset: With all its parts, of one node and edge type, and a ``train_mask``.
        topology: Of the run.
        layers: L, at least 1.

    Raises:
        ConfigError: there are more than 64 ranks, or no training mask.
    """
    if topology.world_size > _MAX_RANKS:
        raise ConfigError(f"halos of {topology.world_size} ranks cannot be counted; use at most {_MAX_RANKS}")
    manifest = dataset.manifest
    offsets = manifest.node_offsets[NODE_TYPE]
    bounds = Placement(manifest.num_parts, topology).server_offsets(offsets)
    rank_of = RowOwners(bounds, topology).rank_of(np.arange(int(offsets[-1])))
    needed = np.concatenate(
        [dataset.part(part).node_data(NODE_TYPE, "train_mask") for part in range(manifest.num_parts)]
    ).astype(np.bool_)
    csc = open_structure(dataset, EDGE_TYPE)
    server_of_rank = np.array(topology.server_of_rank)
    found = []
    for _ in range(layers):
        readers = np.zeros(len(needed), np.uint64)
        _mark_readers(csc.indptr, csc.indices, needed, rank_of, readers)
        found.append(_count_pairs(readers, rank_of, server_of_rank))
        needed = needed | (readers != 0)
    outside, inside = zip(*reversed(found), strict=True)
    return HaloPairs(outside=outside, inside=inside)


@njit(cache=True, nogil=True)
def _mark_readers(indptr: Array, indices: Array, needed: Array, rank_of: Array, readers: Array) -> None:
    """Set the bit of each needed node's rank at all its in-neighbours, and at itself."""
    for node in range(len(needed)):
        if needed[node]:
            bit = np.uint64(1) << np.uint64(rank_of[node])
            readers[node] |= bit
            for edge in range(indptr[node], indptr[node + 1]):
                readers[indices[edge]] |= bit


@njit(cache=True, nogil=True)
def _count_pairs(readers: Array, rank_of: Array, server_of_rank: Array) -> tuple[int, int]:
    outside, inside = 0, 0
    for node in range(len(readers)):
        bits = readers[node]
        rank = 0
        while bits != np.uint64(0):
            if bits & np.uint64(1) and rank != rank_of[node]:
                if server_of_rank[rank] == server_of_rank[rank_of[node]]:
                    inside += 1
                else:
                    outside += 1
            bits >>= np.uint64(1)
            rank += 1
    return outside, inside


def _ranges(bounds: Array) -> list[tuple[int, int]]:
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


def _mask(num_nodes: int, ids: Array) -> Array:
    found = np.zeros(num_nodes, np.bool_)
    found[ids] = True
    return found


def _with_sources(indptr: Array, indices: Array, nodes: Array) -> Array:
    found = nodes.copy()
    found[indices[np.repeat(nodes, np.diff(indptr))]] = True
    return found


def _degrees(indptr: Array, indices: Array, sources: Array) -> Array:
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return np.bincount(targets[sources[indices]], minlength=len(indptr) - 1)
