"""Who sends which rows to whom: boundary rows to the graph servers that have them as ghosts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from dglx_dist.records import Array
from dglx_dist.strategies.bounded.local_graph import LocalGraph


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """Of one graph server, by peer and interval. W graph servers, k intervals."""

    boundary: tuple[Array, ...]
    """Per peer (b,) int32: own nodes that it has as ghosts, ascending; its position there is its id."""
    boundary_bounds: tuple[Array, ...]
    """Per peer (k + 1,) int64: those of interval i are ``boundary[peer][bounds[i]:bounds[i + 1]]``."""
    returned: tuple[tuple[Array, ...], ...]
    """Per peer and interval (g,) int32: positions, among this server's ghosts that are the peer's, of those
    whose gradients interval i sends home."""

    @property
    def num_sent(self) -> int:
        """Boundary rows that leave in one Scatter: |G| is the sum over all graph servers."""
        return sum(len(nodes) for nodes in self.boundary)


def routes_of(graph: LocalGraph, bounds: Array, boundary: Sequence[Array]) -> Routes:
    """Return the routes of ``graph``.

    A ghost's gradient is sent by its home: the highest interval with an edge from it. In the order of the
    layers and intervals all others have computed what they add by then.

    Args:
        graph: Of this graph server.
        bounds: (k + 1,) of its intervals.
        boundary: Per peer, see :attr:`Routes.boundary`; of itself empty.
    """
    home = _homes(graph, bounds)
    returned = []
    for peer in range(graph.num_servers):
        first, end = int(graph.ghost_starts[peer]), int(graph.ghost_starts[peer + 1])
        of_peer = home[first:end]
        order = np.argsort(of_peer, kind="stable").astype(np.int32)
        cuts = np.searchsorted(of_peer[order], np.arange(1, len(bounds) - 1))
        returned.append(tuple(np.split(order, cuts)))
    return Routes(
        boundary=tuple(boundary),
        boundary_bounds=tuple(np.searchsorted(nodes, bounds) for nodes in boundary),
        returned=tuple(returned),
    )


def boundaries_together(graphs: Sequence[LocalGraph]) -> list[list[Array]]:
    """Return ``boundary`` per graph server and peer, for graph servers of one process."""
    return [
        [graph.own_positions(peer.ghost_ids(graph.rank), peer.rank) for peer in graphs] for graph in graphs
    ]


def _homes(graph: LocalGraph, bounds: Array) -> Array:
    """(m,) interval of the highest target of each ghost: out-edges are in the order of their targets."""
    last_edge = graph.out_indptr[graph.num_own + 1 :] - 1
    highest = graph.out_targets[last_edge] if graph.num_ghosts else np.empty(0, dtype=np.int32)
    return np.searchsorted(bounds, highest, side="right") - 1
