"""Sampling several edge types from a structure that is cut over servers.

In each hop the requests of all edge types leave before anything is drawn here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from dglx_dist.graph.in_edges import NO_EDGES, InEdges
from dglx_dist.graph.structure import PendingInEdges, Structure
from dglx_dist.records import Array, EdgeType
from dglx_dist.sampling.relabel import Table
from dglx_dist.sampling.relational import (
    Numbered,
    TypedAsk,
    TypedBatch,
    gathered,
    note_ids,
    number_type,
    number_typed_seeds,
    with_space,
    with_typed_room,
)
from dglx_dist.sampling.relational_source import TypedSource, check_typed_seeds
from dglx_dist.sampling.relations import Schema
from dglx_dist.sampling.workspace import Workspace


@final
class RemoteTypedSource(TypedSource):
    """Samples when each server has the in-edges of its own nodes only.

    For every hop and edge type it sends 8 bytes per remote destination and receives 24 per edge drawn there
    (algorithms 1.3); each server that is asked also gets 8 per edge of the type that the batch excludes
    there.

    Args:
        schema: The types.
        structures: One per edge type; each serves ``op`` with :func:`~dglx_dist.sampling.remote.keyed_draw`
            on all ranks.
        op: Name of the operation.
    """

    def __init__(self, schema: Schema, structures: Sequence[Structure], op: str) -> None:
        self._structures, self._op, self._etypes = tuple(structures), op, schema.etypes
        self._offsets = schema.offsets
        self._source_types = schema.source_types.tolist()
        self._destination_types = schema.destination_types.tolist()

    def sample(self, ask: TypedAsk, once: Mapping[EdgeType, Array], workspace: Workspace) -> TypedBatch:
        """Sample as :class:`TypedSource` says; one round of requests per hop.

        What ``op`` is served with must be the rule of ``ask``, without ``once``.

        Raises:
            ConfigError: a type's seeds have an id twice.
            PeerError: a server did not answer in time.
        """
        table, nodes = number_typed_seeds(workspace.table, self._offsets, ask.seeds, ask.seed_ends)
        node_ends, parts = [nodes.counts.copy()], []
        try:
            check_typed_seeds(ask, nodes.counts)
            for hop in range(len(ask.fanouts)):
                edges = self._draw(ask, once, hop, nodes)
                table, nodes, local = self._number(table, nodes, edges, ask.like.dtype)
                parts += [
                    (of_type.indptr, numbers, of_type.edge_ids)
                    for of_type, numbers in zip(edges, local, strict=True)
                ]
                node_ends.append(nodes.counts.copy())
        finally:
            # Also after an error, or the numbers given out so far would count in the next batch.
            workspace.keep(table._replace(base=table.base + int(nodes.counts.max())))
        ids, starts = gathered(nodes)
        edge_ends = np.cumsum([0, *(len(edge_ids) for _, _, edge_ids in parts)])
        indptr, sources, edge_ids = (
            np.concatenate(part).astype(ask.like.dtype, copy=False) for part in zip(*parts, strict=True)
        )
        return TypedBatch(ids, starts, np.array(node_ends), indptr, sources, edge_ids, edge_ends)

    def _draw(
        self, ask: TypedAsk, once: Mapping[EdgeType, Array], hop: int, nodes: Numbered
    ) -> list[InEdges]:
        """Return what each edge type draws for the nodes seen so far."""
        pending: list[PendingInEdges | int] = []
        for relation, structure in enumerate(self._structures):
            frontier = self._frontier(nodes, self._destination_types[relation])
            fanout = int(ask.fanouts[hop, relation])
            if fanout == 0 or not len(frontier):
                pending.append(len(frontier))
                continue
            parameters = json.dumps({"fanout": fanout, "stream": int(ask.streams[hop, relation])})
            exclude, layer = once.get(self._etypes[relation], NO_EDGES), len(ask.fanouts) - hop
            pending.append(structure.submit(self._op, frontier, parameters, exclude=exclude, layer=layer))
        return [_none(one) if isinstance(one, int) else one.result() for one in pending]

    def _number(
        self, table: Table, nodes: Numbered, edges: Sequence[InEdges], dtype: np.dtype[np.generic]
    ) -> tuple[Table, Numbered, list[Array]]:
        """Number the sources of a hop, edge type by edge type."""
        more, done = np.zeros(len(nodes.counts), np.int64), nodes.counts.copy()
        np.add.at(more, self._source_types, [len(of_type.sources) for of_type in edges])
        nodes = with_space(nodes, more)
        table = with_typed_room(table, nodes, int(more.sum()))
        local = [np.empty(len(of_type.sources), dtype) for of_type in edges]
        for relation, of_type in enumerate(edges):
            node_type = self._source_types[relation]
            keys = of_type.sources + self._offsets[node_type]
            number_type(table, nodes, node_type, keys, local[relation])
        note_ids(nodes, self._offsets, done)
        return table, nodes, local

    def _frontier(self, nodes: Numbered, node_type: int) -> Array:
        first = nodes.starts[node_type]
        return nodes.ids[first : first + nodes.counts[node_type]]


def _none(num_nodes: int) -> InEdges:
    return InEdges(indptr=np.zeros(num_nodes + 1, np.int64), sources=NO_EDGES, edge_ids=NO_EDGES)
