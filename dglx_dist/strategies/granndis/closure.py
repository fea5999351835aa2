"""The rows that one server computes at every level, and their in-edges, grown from the last level down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from dglx_dist.graph.in_edges import InEdges
from dglx_dist.graph.remote_plan import number_distinct
from dglx_dist.graph.structure import PendingInEdges, Structure
from dglx_dist.records import Array

PRELOAD_STRUCTURE = "preload_structure"
"""Phase under which asked in-edges are counted: 8 bytes per remote row, 24 per in-edge of it."""

CHUNK = 1 << 16
"""Rows whose in-edges are asked for at once."""

_AHEAD = 2
"""Asked chunks that are under way while one is read."""

Selection: TypeAlias = Callable[[Structure, tuple[int, int], Array], Array]
"""(structure, (first, last) ids of the server's own nodes, (K,) ascending int64 seeds of the server) to the
(n,) ascending int64 ids of the nodes that the server may use, its seeds among them (algorithms 3.3). Called
on the first rank of each server; nothing in it may be collective."""


@final
@dataclass(frozen=True, kw_only=True)
class Closure:
    """What one server computes (algorithms 3.1): R^0, R^1, ..., R^L, each within the one before."""

    nodes: Array
    """(n,) int64 global ids of R^0, by the last level that has them, latest first, ascending within."""
    counts: Array
    """(L + 1,) int64; R^l is ``nodes[:counts[l]]``."""
    indptr: Array
    """(counts[1] + 1,) int64; the in-edges of row p of R^1 are at ``indptr[p]:indptr[p + 1]``."""
    sources: Array
    """(E,) int64 global ids, some of them of other servers' rows above level ``hops``."""
    edge_ids: Array
    """(E,) int64 global edge ids."""

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.counts) - 1

    @property
    def work(self) -> Array:
        """(n,) int64: for each level above 0 that has the row, its in-edges and one for itself."""
        return self.levels * (self.in_degrees + 1)

    @property
    def levels(self) -> Array:
        """(n,) int64; the last level that has the row."""
        ascending = self.counts[:0:-1]
        below = np.searchsorted(ascending, np.arange(len(self.nodes)), side="right")
        return self.num_layers - below

    @property
    def in_degrees(self) -> Array:
        """(n,) int64, 0 for rows that are at level 0 only: their in-edges are of no use."""
        degrees = np.zeros(len(self.nodes), dtype=np.int64)
        degrees[: len(self.indptr) - 1] = np.diff(self.indptr)
        return degrees


@final
class Grower:
    """Grows a :class:`Closure`; used by one thread, not collective.

    Args:
        structure: Whose in-edges.
        seeds: (K,) ascending int64 ids without repeats: R^L.
        allowed: (n,) ascending int64 ids; edges from other nodes are left out. None: all edges.
    """

    def __init__(self, structure: Structure, seeds: Array, allowed: Array | None = None) -> None:
        self._structure, self._allowed = structure, allowed
        self._rings: list[Array] = [seeds]
        self._known = seeds
        self._edges: list[InEdges] = []

    def sources(self) -> Array:
        """Ask for the in-edges of the rows that were added last; return their sources.

        Returns:
            (n,) ascending int64 ids without repeats; rows that are known may be among them.

        Raises:
            PeerError: an owner is dead or silent.
        """
        found = [np.empty(0, np.int64)]
        for edges in in_edges_of(self._structure, self._rings[-1]):
            kept = edges if self._allowed is None else only_from(edges, self._allowed)
            self._edges.append(kept)
            found.append(number_distinct(kept.sources)[0])
        return np.unique(np.concatenate(found))

    def add(self, rows: Array) -> None:
        """Make those of the (n,) int64 ascending ``rows`` that are not known the rows of one level lower."""
        new = np.setdiff1d(rows, self._known, assume_unique=True)
        self._rings.append(new)
        if len(new):
            self._known = np.union1d(self._known, new)

    def finish(self) -> Closure:
        """Return what has grown: :meth:`sources` and :meth:`add` have been called once for each level."""
        assert len(self._rings) > 1
        sizes = np.array([len(ring) for ring in self._rings], dtype=np.int64)
        lengths = [np.diff(edges.indptr) for edges in self._edges]
        nothing = np.empty(0, np.int64)
        return Closure(
            nodes=np.concatenate(self._rings),
            counts=np.cumsum(sizes)[::-1].copy(),
            indptr=np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths])),
            sources=np.concatenate([nothing, *(edges.sources for edges in self._edges)]),
            edge_ids=np.concatenate([nothing, *(edges.edge_ids for edges in self._edges)]),
        )


def in_edges_of(structure: Structure, nodes: Array) -> Iterator[InEdges]:
    """Yield all in-edges of the (K,) int64 ``nodes``, in their order, some nodes at a time.

    Raises:
        PeerError: an owner is dead or silent.
    """
    under_way: deque[PendingInEdges] = deque()
    for first in range(0, len(nodes), CHUNK):
        under_way.append(structure.submit("in_edges", nodes[first : first + CHUNK], phase=PRELOAD_STRUCTURE))
        if len(under_way) > _AHEAD:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def only_from(edges: InEdges, allowed: Array) -> InEdges:
    """Return those of ``edges`` whose source is among the (n,) ascending int64 ``allowed``."""
    kept = np.zeros(len(edges.sources), dtype=bool)
    if len(allowed):
        places = np.minimum(np.searchsorted(allowed, edges.sources), len(allowed) - 1)
        kept = allowed[places] == edges.sources
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
    return InEdges(indptr=before[edges.indptr], sources=edges.sources[kept], edge_ids=edges.edge_ids[kept])
