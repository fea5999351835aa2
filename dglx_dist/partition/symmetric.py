"""One undirected graph out of all edge types, as partitioners want it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from dglx_dist.records import Array, RawGraph


@dataclass(frozen=True, kw_only=True)
class SymmetricGraph:
    """Rows of neighbours without direction, self loops or repetition; u lists v iff v lists u."""

    indptr: Array
    """(N + 1,) int64."""
    indices: Array
    """(M,) int32 or int64, in no particular order within a row; M is even."""
    edge_weights: Array | None
    """(M,) int32: how many directed edges join the pair; None when (99 in 100) pairs have the same number."""

    @property
    def num_nodes(self) -> int:
        """N, over all node types."""
        return len(self.indptr) - 1


def symmetrise(graph: RawGraph, *, dtype: Any = None, weighted: bool = True) -> SymmetricGraph:
    """Join all edge types of ``graph`` into one symmetric graph; ids of the node types follow each other.

    Needs, beside the edges, 2 E ids (and 2 E int32 weights if ``weighted``) and two arrays of N int64.

    Args:
        graph: Homogeneous or heterogeneous.
        dtype: Of the indices; None: int32 if N fits, else int64.
        weighted: Whether to count parallel (and opposite) edges; False: each pair weighs the same.
    """
    num_nodes = graph.total_nodes
    if dtype is None:
        dtype = np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64
    first_id = first_ids(graph)
    # One slot more than rows + 1: while filling, indptr[v + 1] is where row v goes on, and ends as its end.
    indptr = np.zeros(num_nodes + 2, dtype=np.int64)
    for (src_type, _, dst_type), (src, dst) in graph.edges.items():
        _count(src, dst, first_id[src_type], first_id[dst_type], indptr)
    np.cumsum(indptr, out=indptr)
    indices = np.empty(indptr[-1], dtype=dtype)
    for (src_type, _, dst_type), (src, dst) in graph.edges.items():
        _fill(src, dst, first_id[src_type], first_id[dst_type], indptr, indices)
    indptr = indptr[:-1]
    weights = np.ones(len(indices) if weighted else 0, dtype=np.int32)
    num_kept = _merge(indptr, indices, weights, weighted)
    # Shrinks in place where the allocator can: no second copy of the largest array.
    indices.resize(num_kept, refcheck=False)
    if not weighted:
        return SymmetricGraph(indptr=indptr, indices=indices, edge_weights=None)
    weights.resize(num_kept, refcheck=False)
    weights_or_none = None if _nearly_uniform(weights) else weights
    return SymmetricGraph(indptr=indptr, indices=indices, edge_weights=weights_or_none)


def first_ids(graph: RawGraph) -> dict[str, int]:
    """Return, per node type, the id of its first node when all types follow each other."""
    firsts, first = {}, 0
    for node_type, count in graph.num_nodes.items():
        firsts[node_type] = first
        first += count
    return firsts


def _nearly_uniform(weights: Array) -> bool:
    """Whether all but 1 in 100 weights are the same: they then cost memory and hardly change a cut.

    A directed graph without structure has a few pairs joined both ways; a symmetric one has none joined
    once.
    """
    if len(weights) == 0:
        return True
    commonest = int(np.median(weights[:: max(len(weights) // 1000, 1)]))
    return int(np.count_nonzero(weights != commonest)) <= len(weights) // 100


@njit(cache=True, nogil=True)
def _count(src: Array, dst: Array, first_src: int, first_dst: int, indptr: Array) -> None:
    for e in range(len(src)):
        u, v = src[e] + first_src, dst[e] + first_dst
        if u != v:
            indptr[u + 2] += 1
            indptr[v + 2] += 1


@njit(cache=True, nogil=True)
def _fill(src: Array, dst: Array, first_src: int, first_dst: int, indptr: Array, indices: Array) -> None:
    for e in range(len(src)):
        u, v = src[e] + first_src, dst[e] + first_dst
        if u != v:
            indices[indptr[u + 1]] = v
            indptr[u + 1] += 1
            indices[indptr[v + 1]] = u
            indptr[v + 1] += 1


@njit(cache=True, nogil=True)
def _merge(indptr: Array, indices: Array, weights: Array, weighted: bool) -> int:
    """Merge repeated neighbours in place, moving rows forward; return how many entries are left."""
    num_nodes = len(indptr) - 1
    place = np.full(num_nodes, -1, dtype=np.int64)
    written = 0
    begin = indptr[0]
    for u in range(num_nodes):
        end = indptr[u + 1]
        row = written
        for e in range(begin, end):
            v = indices[e]
            # Places only grow, so one before this row belongs to another row.
            if place[v] >= row:
                if weighted:
                    weights[place[v]] += 1
                continue
            place[v] = written
            indices[written] = v
            if weighted:
                weights[written] = 1
            written += 1
        begin = end
        indptr[u + 1] = written
    return written
