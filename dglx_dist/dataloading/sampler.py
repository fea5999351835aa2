"""Sampling several edge types from a structure that is cut over servers.

In each hop the requests of all edge types leave before anything is drawn here.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from dglx_dist.dataloading.kernels import (
    Ask,
    Numbered,
    RawBatch,
    Schema,
    Table,
    TypedAsk,
    TypedBatch,
    Workspace,
    check_seeds,
    gathered,
    note_ids,
    number,
    number_seeds,
    number_type,
    number_typed_seeds,
    relations_of,
    sample_and_slice,
    sample_batch,
    sample_relations,
    with_room,
    with_space,
    with_typed_room,
)
from dglx_dist.graph.structure import NO_EDGES, CSCShard, Draw, InEdges, PendingInEdges, Structure
from dglx_dist.keyed_random import Csc, Rule, draw_edges, merged, relation_keys
from dglx_dist.records import Array, EdgeType


@dataclass(frozen=True, kw_only=True)
class TypedDraws:
    """How all batches of a loader are drawn."""

    schema: Schema
    fanouts: Array
    """(L, R) int64, hop 0 (at the seeds) first; -1 for all in-edges."""
    replace: bool
    exclude: Mapping[EdgeType, Array]
    """Edge type to (X,) int64 ascending ids of edges never drawn; types may be missing."""
    seed: int
    idtype: np.dtype[Any]
    """Of the blocks' structure: int32 or int64."""

    def ask(self, seeds: Mapping[str, Array], epoch: int, exclude: Mapping[EdgeType, Array]) -> TypedAsk:
        """Return what the kernel needs for the batch of ``seeds``, without the edges ``exclude`` either."""
        nothing = np.empty(0, np.int64)
        nodes = [seeds.get(ntype, nothing) for ntype in self.schema.ntypes]
        num_hops, num_relations = self.fanouts.shape
        edges, edge_ends = nothing, np.zeros(num_relations + 1, np.int64)
        if exclude or self.exclude:
            lists = [
                merged(self.exclude.get(etype, nothing), exclude.get(etype, nothing))
                for etype in self.schema.etypes
            ]
            edges, edge_ends = np.concatenate(lists), _ends(lists)
        return TypedAsk(
            np.concatenate(nodes),
            _ends(nodes),
            self.fanouts,
            relation_keys(self.seed, epoch, num_hops, num_relations),
            self.replace,
            edges,
            edge_ends,
            np.empty(0, self.idtype),
        )


class TypedSource(ABC):
    """Samples whole batches of several types; any thread may call it, each with a workspace of its own."""

    @abstractmethod
    def sample(self, ask: TypedAsk, once: Mapping[EdgeType, Array], workspace: Workspace) -> TypedBatch:
        """Sample a batch; the draws depend on ``ask`` alone, not on where the structure lies.

        Args:
            ask: What to sample.
            once: Those of the excluded edges that are of this batch alone, by type.
            workspace: The calling thread's own, over the nodes of all types.

        Raises:
            ConfigError: a type's seeds have an id twice.
        """


@final
class WholeTypedSource(TypedSource):
    """Samples from a structure that this server has whole.

    Args:
        schema: The types.
        cscs: In-edges of all nodes, one per edge type.
    """

    def __init__(self, schema: Schema, cscs: Sequence[Csc]) -> None:
        # The record has their addresses only.
        self._alive = tuple(cscs)
        self._relations = relations_of(schema, self._alive)

    def sample(self, ask: TypedAsk, once: Mapping[EdgeType, Array], workspace: Workspace) -> TypedBatch:
        """Sample in one compiled call; see :class:`TypedSource`."""
        batch, table = sample_relations(self._relations, ask, workspace.table)
        workspace.keep(table)
        check_typed_seeds(ask, batch.node_ends[0])
        return batch


def check_typed_seeds(ask: TypedAsk, num_distinct: Array) -> None:
    """Raise ConfigError when fewer seeds of a type are distinct ((T,) int64) than there are."""
    for node_type, count in enumerate(num_distinct.tolist()):
        check_seeds(ask.seeds[ask.seed_ends[node_type] : ask.seed_ends[node_type + 1]], count)


def _ends(lists: Sequence[Array]) -> Array:
    return np.cumsum([0, *map(len, lists)])


@final
class RemoteTypedSource(TypedSource):
    """Samples when each server has the in-edges of its own nodes only.

    For every hop and edge type it sends 8 bytes per remote destination and receives 24 per edge drawn there
    (algorithms 1.3); each server that is asked also gets 8 per edge of the type that the batch excludes
    there.

    Args:
        schema: The types.
        structures: One per edge type; each serves ``op`` with ``keyed_draw``
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


class BatchSource(ABC):
    """Samples whole batches; any thread may call it, each with a workspace of its own."""

    is_whole: ClassVar[bool]
    """Whether it asks nobody."""

    @abstractmethod
    def sample(self, ask: Ask, workspace: Workspace) -> RawBatch:
        """Sample a batch; the draws depend on ``ask`` alone, not on where the structure lies.

        Raises:
            ConfigError: the seeds have an id twice.
        """


@final
class WholeSource(BatchSource):
    """Samples from a structure that this server has whole.

    Args:
        csc: In-edges of all nodes, from node 0 and edge 0.
    """

    is_whole = True

    def __init__(self, csc: Csc) -> None:
        self._csc = csc

    def sample(self, ask: Ask, workspace: Workspace) -> RawBatch:
        """Sample in one compiled call; see :class:`BatchSource`."""
        batch, table = sample_batch(self._csc, ask, workspace.table)
        workspace.keep(table)
        check_seeds(ask.seeds, int(batch.node_ends[0]))
        return batch

    def sample_and_slice(
        self, ask: Ask, workspace: Workspace, rows: Array, out: Array
    ) -> tuple[RawBatch, Array]:
        """Sample and copy the features of the batch's nodes, in one compiled call.

        Args:
            ask: What to sample.
            workspace: The calling thread's own.
            rows: (N, words) features of all nodes as words of one unsigned dtype.
            out: (any, words) memory to use if it is long enough.

        Returns:
            The batch and the memory used, whose first rows are the features.

        Raises:
            ConfigError: the seeds have an id twice.
        """
        batch, table, out = sample_and_slice(self._csc, ask, workspace.table, rows, out)
        workspace.keep(table)
        check_seeds(ask.seeds, int(batch.node_ends[0]))
        return batch, out


def csc_of(shard: CSCShard, weights: Array | None = None) -> Csc:
    """Return a piece of the structure as the kernels read it; ``weights`` are (E,) float32 of its edges."""
    likely = np.empty(0, np.float32) if weights is None else weights
    return Csc(shard.indptr, shard.indices, likely, shard.first_node, shard.first_edge)


def keyed_draw(rule: Rule, weights: Mapping[int, Array]) -> Draw:
    """Return how a server draws a hop, for itself and for others; parameters are JSON (fan-out, hop's key).

    What a batch excludes comes with the request.

    Args:
        rule: The same on all ranks; ``exclude`` is left out of every batch.
        weights: First node of a shard to its (E,) float32 edge weights; empty for all alike.
    """

    def draw(shard: CSCShard, nodes: Array, parameters: str, exclude: Array) -> InEdges:
        ask = json.loads(parameters)
        csc = csc_of(shard, weights.get(shard.first_node))
        here = Rule(rule.replace, merged(rule.exclude, exclude))
        indptr, sources, edge_ids = draw_edges(csc, nodes, int(ask["fanout"]), np.uint64(ask["stream"]), here)
        return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)

    return draw


@final
class RemoteSource(BatchSource):
    """Samples when each server has the in-edges of its own nodes only.

    Sends 8 bytes per remote destination and receives 24 per edge drawn there (algorithms 1.3); in every
    hop each server that is asked also gets 8 per edge that the batch excludes there.

    Args:
        structure: Serves ``op`` with :func:`keyed_draw` on all ranks.
        op: Name of the operation.
    """

    is_whole = False

    def __init__(self, structure: Structure, op: str) -> None:
        self._structure, self._op = structure, op

    def sample(self, ask: Ask, workspace: Workspace) -> RawBatch:
        """Sample as :class:`BatchSource` says; one round of requests per hop.

        The draw rule is the one that ``op`` is served with, without ``ask.once``: that of ``ask`` must be
        the same.

        Raises:
            ConfigError: the seeds have an id twice.
            PeerError: a server did not answer in time.
        """
        table, nodes, count = number_seeds(workspace.table, ask.seeds)
        node_ends, hops = [count], []
        try:
            check_seeds(ask.seeds, count)
            for hop, fanout in enumerate(ask.fanouts.tolist()):
                parameters = json.dumps({"fanout": fanout, "stream": int(ask.streams[hop])})
                layer = len(ask.fanouts) - hop
                edges = self._structure.ask(
                    self._op, nodes[:count], parameters, exclude=ask.once, layer=layer
                )
                nodes = np.concatenate([nodes[:count], np.empty(len(edges.sources) + 1, np.int64)])
                table = with_room(table, nodes, count, len(edges.sources))
                local = np.empty(len(edges.sources), ask.like.dtype)
                count = number(table, edges.sources, nodes, count, local)
                hops.append((edges.indptr, local, edges.edge_ids))
                node_ends.append(count)
        finally:
            # Also after an error, or the numbers given out so far would count in the next batch.
            workspace.keep(table._replace(base=table.base + count))
        return _joined(nodes[:count], node_ends, hops, ask.like.dtype)


def _joined(
    nodes: Array,
    node_ends: Sequence[int],
    hops: Sequence[tuple[Array, Array, Array]],
    dtype: np.dtype[np.generic],
) -> RawBatch:
    edge_ends = np.cumsum([0, *(len(edge_ids) for _, _, edge_ids in hops)])
    indptr, sources, edge_ids = (
        np.concatenate(part).astype(dtype, copy=False) for part in zip(*hops, strict=True)
    )
    return RawBatch(nodes, np.array(node_ends), indptr, sources, edge_ids, edge_ends)
