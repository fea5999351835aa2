"""How many in-edges a node has from outside the asking server, counted where its in-edges lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from dglx_dist.graph.rows import submit_to_owners
from dglx_dist.graph.structure import Structure
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.eas_kernels import count_outside

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


def outside_degrees(g: DistGraph, structure: Structure) -> OutsideDegrees:
    """Return the graph's, made at the first call; every rank must call it, with a barrier before its use.

    When the graph closes, this rank answers no more.

    Args:
        g: The graph.
        structure: Its in-edges of one type.
    """
    label = f"{g.kvstore.label}.outside.{':'.join(structure.etype)}"
    known = g.session.attached.get(label)
    if isinstance(known, OutsideDegrees):
        return known
    made = OutsideDegrees(g, structure, label)
    g.session.attached[label] = made

    def leave() -> None:
        made.close()
        del g.session.attached[label]

    g.on_close.append(leave)
    return made


@final
class OutsideDegrees:
    """Answers for the own server's nodes and asks the others; what policy ``degree`` prefers by.

    Made by :func:`outside_degrees`.
    """

    def __init__(self, g: DistGraph, structure: Structure, label: str) -> None:
        self._session, self._structure, self._placement = g.session, structure, g.placement
        self._bounds = g.get_node_partition_policy(structure.etype[2]).bounds
        self._label = label
        if not structure.is_whole:
            # One operation per asking server, since a question to owners has no parameters.
            for server in range(len(self._bounds) - 1):
                g.session.rpc.register(self._op(server), partial(self._answer, server))

    def of(self, nodes: Array, *, whole: bool = False) -> Array:
        """Return (K,) int64, how many in-edges of ``nodes`` come from outside this rank's server.

        Sends 8 bytes per distinct node of another server and receives 8.

        Args:
            nodes: (K,) int64 existing ids.
            whole: Count all in-edges.

        Raises:
            PeerError: an owner is dead or silent.
        """
        if whole:
            return self._structure.in_degrees(nodes)
        own = self._placement.topology.server
        if self._structure.is_whole:
            return self._count(own, nodes)
        asked = submit_to_owners(
            self._session,
            self._placement,
            self._op(own),
            nodes,
            self._bounds,
            lambda ids: [self._count(own, ids)],
        )
        return asked()[0]

    def _answer(self, server: int, _parameters: str, arrays: Sequence[Array]) -> list[Array]:
        return [self._count(server, arrays[0])]

    def _count(self, server: int, nodes: Array) -> Array:
        low, high = int(self._bounds[server]), int(self._bounds[server + 1])
        counts = np.zeros(len(nodes), np.int64)
        for shard in self._structure.shards:
            places = np.flatnonzero((nodes >= shard.first_node) & (nodes < shard.last_node))
            found = np.empty(len(places), np.int64)
            count_outside(shard.indptr, shard.indices, shard.first_node, nodes[places], low, high, found)
            counts[places] = found
        return counts

    def _op(self, server: int) -> str:
        return f"{self._label}.{server}"

    def close(self) -> None:
        """Answer no more."""
        for server in range(len(self._bounds) - 1):
            self._session.rpc.unregister(self._op(server))
