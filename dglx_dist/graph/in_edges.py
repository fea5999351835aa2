"""In-edges of asked nodes, put together from the answers of several pieces of the structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numba import njit

from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True)
class CSCShard:
    """In-edges of consecutive destinations; what a compiled kernel reads."""

    indptr: Array
    """(n + 1,) int64, starting at 0."""
    indices: Array
    """(E,) int32 or int64 global source ids."""
    first_node: int
    """Global id of the first destination."""
    first_edge: int
    """Global id of the first edge; the edge at position i has the id ``first_edge + i``."""

    @property
    def last_node(self) -> int:
        """Global id after the last destination."""
        return self.first_node + len(self.indptr) - 1

    @property
    def last_edge(self) -> int:
        """Global id after the last edge."""
        return self.first_edge + len(self.indices)


@dataclass(frozen=True, kw_only=True)
class InEdges:
    """Some in-edges of K nodes, node by node."""

    indptr: Array
    """(K + 1,) int64; the edges of the k-th node are at ``indptr[k]:indptr[k + 1]``."""
    sources: Array
    """(e,) int64 global source ids."""
    edge_ids: Array
    """(e,) int64 global edge ids."""


NO_EDGES: Array = np.empty(0, dtype=np.int64)

Draw: TypeAlias = Callable[[CSCShard, Array, str, Array], InEdges]
"""(piece of the structure, (k,) int64 global ids of its nodes, parameters, (X,) int64 ascending ids of edges
that may not be drawn) to their drawn in-edges."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Answered in-edges of some distinct nodes, and where among the asked ones these stand."""

    edges: InEdges
    starts: Array
    """(nodes + 1,) int64; node i of ``edges`` stands at ``positions[starts[i]:starts[i + 1]]``."""
    positions: Array
    """(places,) int64."""


def join_pieces(count: int, pieces: Sequence[Piece]) -> InEdges:
    """Return the in-edges of ``count`` asked nodes, each answered by exactly one of ``pieces``."""
    sizes = np.zeros(count, dtype=np.int64)
    for piece in pieces:
        _sizes(piece.edges.indptr, piece.starts, piece.positions, sizes)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    sources, edge_ids = np.empty(indptr[-1], np.int64), np.empty(indptr[-1], np.int64)
    for piece in pieces:
        edges = piece.edges
        _fill(edges.indptr, edges.sources, piece.starts, piece.positions, indptr, sources)
        _fill(edges.indptr, edges.edge_ids, piece.starts, piece.positions, indptr, edge_ids)
    return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)


def to_wire(nodes: Array, edges: InEdges) -> list[Array]:
    """Return [sources, destinations, edge ids], (e,) int64 each: 24 bytes an edge (algorithms 1.3)."""
    destinations = np.repeat(nodes, np.diff(edges.indptr))
    return [edges.sources.astype(np.int64, copy=False), destinations, edges.edge_ids]


def from_wire(nodes: Array, arrays: Sequence[Array]) -> InEdges:
    """Undo :func:`to_wire` for the distinct (k,) int64 ``nodes`` that were asked for.

    Raises:
        ValueError: the destinations are not some of ``nodes`` in their order.
    """
    sources, destinations, edge_ids = arrays
    indptr = np.empty(len(nodes) + 1, dtype=np.int64)
    if _runs(nodes, destinations, indptr) != len(destinations):
        raise ValueError("the answer has edges of nodes that were not asked for, or in another order")
    return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)


def all_in_edges(shard: CSCShard, nodes: Array, _parameters: str = "", _exclude: Array = NO_EDGES) -> InEdges:
    """Return every in-edge of ``nodes`` ((k,) int64 global ids in the shard), ascending by edge id.

    Nothing is excluded: callers that do not want some of them drop these themselves.
    """
    local = nodes - shard.first_node
    first, counts = shard.indptr[local], shard.indptr[local + 1] - shard.indptr[local]
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    at = np.arange(indptr[-1]) + np.repeat(first - indptr[:-1], counts)
    return InEdges(indptr=indptr, sources=shard.indices[at].astype(np.int64), edge_ids=at + shard.first_edge)


@njit(cache=True, nogil=True)
def _sizes(indptr: Array, starts: Array, positions: Array, sizes: Array) -> None:
    for node in range(len(indptr) - 1):
        for place in range(starts[node], starts[node + 1]):
            sizes[positions[place]] = indptr[node + 1] - indptr[node]


@njit(cache=True, nogil=True)
def _fill(indptr: Array, values: Array, starts: Array, positions: Array, to: Array, out: Array) -> None:
    for node in range(len(indptr) - 1):
        for place in range(starts[node], starts[node + 1]):
            at = to[positions[place]]
            for edge in range(indptr[node], indptr[node + 1]):
                out[at] = values[edge]
                at += 1


@njit(cache=True, nogil=True)
def _runs(nodes: Array, destinations: Array, indptr: Array) -> int:
    edge = 0
    indptr[0] = 0
    for k in range(len(nodes)):
        while edge < len(destinations) and destinations[edge] == nodes[k]:
            edge += 1
        indptr[k + 1] = edge
    return edge
