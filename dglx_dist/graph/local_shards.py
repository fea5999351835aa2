"""In-edges that lie in this server's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.graph.in_edges import CSCShard, Draw, Piece, all_in_edges
from dglx_dist.records import Array


@final
class LocalShards:
    """What both structures do with the shards in memory.

    Args:
        shards: Pieces of the structure, in order of the ids.
        num_sources: Nodes of the source type.
    """

    def __init__(self, shards: tuple[CSCShard, ...], num_sources: int) -> None:
        self._shards = shards
        self._num_sources = num_sources
        self._draws: dict[str, Draw] = {"in_edges": all_in_edges}
        self._out_degrees: Array | None = None

    def serve(self, op: str, draw: Draw) -> None:
        """See :meth:`Structure.serve`."""
        if op in self._draws:
            raise ConfigError(f"{op!r} is served already; choose another name")
        self._draws[op] = draw

    def serves(self, op: str) -> bool:
        """See :meth:`Structure.serves`."""
        return op in self._draws

    def draw_of(self, op: str) -> Draw:
        """Return the function that answers ``op``.

        Raises:
            ConfigError: ``op`` is not served.
        """
        if op not in self._draws:
            raise ConfigError(f"{op!r} is not served (known: {', '.join(self._draws)}); call serve() first")
        return self._draws[op]

    def pieces(self, draw: Draw, nodes: Array, parameters: str, exclude: Array) -> list[Piece]:
        """Return the drawn in-edges of those of the (K,) int64 ``nodes`` that are here, shard by shard."""
        pieces = []
        for shard in self._shards:
            places = np.flatnonzero((nodes >= shard.first_node) & (nodes < shard.last_node))
            if len(places):
                edges = draw(shard, nodes[places], parameters, exclude)
                pieces.append(Piece(edges=edges, starts=np.arange(len(places) + 1), positions=places))
        return pieces

    def in_degrees(self, nodes: Array) -> Sequence[Array]:
        """Return [(K,) int64 in-edges of each of ``nodes``], 0 for those that are not here."""
        out = np.zeros(len(nodes), dtype=np.int64)
        for shard in self._shards:
            places = np.flatnonzero((nodes >= shard.first_node) & (nodes < shard.last_node))
            local = nodes[places] - shard.first_node
            out[places] = shard.indptr[local + 1] - shard.indptr[local]
        return [out]

    def out_degrees(self, nodes: Array) -> Sequence[Array]:
        """Return [(K,) int64 out-edges of each of ``nodes`` that end here]."""
        if self._out_degrees is None:
            # Counted once, when first asked for: it reads every edge.
            total = np.zeros(self._num_sources, dtype=np.int64)
            for shard in self._shards:
                total += np.bincount(shard.indices, minlength=self._num_sources)
            self._out_degrees = total
        return [self._out_degrees[nodes]]

    def find_edges(self, edge_ids: Array) -> Sequence[Array]:
        """Return [sources, destinations], (K,) int64 each, 0 for edges that are not here."""
        sources = np.zeros(len(edge_ids), dtype=np.int64)
        destinations = np.zeros(len(edge_ids), dtype=np.int64)
        for shard in self._shards:
            places = np.flatnonzero((edge_ids >= shard.first_edge) & (edge_ids < shard.last_edge))
            local = edge_ids[places] - shard.first_edge
            sources[places] = shard.indices[local]
            destinations[places] = shard.first_node + np.searchsorted(shard.indptr, local, side="right") - 1
        return [sources, destinations]
