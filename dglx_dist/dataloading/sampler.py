"""Samples batches from a replicated structure, or from a structure that is partitioned over servers.

A partitioned structure is sampled hop by hop. The requests of all edge types are sent before local draws.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np

from dglx_dist.dataloading.kernels import (
    NodeTable,
    NumberedNodes,
    RawBatch,
    SampleRequest,
    Schema,
    ThreadTable,
    draw_first_hop,
    grow_nodes,
    grow_table,
    make_relations,
    number_seeds,
    number_type,
    pack_ids,
    sample_batch,
    write_ids,
)
from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import plan_remote
from dglx_dist.graph.sampling import pack_hop_parameters
from dglx_dist.graph.structure import NO_EDGES, CSCShard, InEdges, Structure, all_in_edges
from dglx_dist.keyed_random import Csc, merge_ids, relation_keys, stream_key
from dglx_dist.records import Array, EdgeType


@dataclass(frozen=True, kw_only=True)
class SourceDraws:
    """Options for LABOR, which draws sources. All edge types and ranks share a hop's draws."""

    layer_dependency: bool
    """Whether all hops have the same draws."""
    batch_dependency: int
    """Number of consecutive steps with the same draws. With 0 or less, all batches have the same draws."""
    rounds: int = 0
    """Number of iterations that lower a hop's source count. -1 iterates until convergence."""
    unequal: bool = False
    """Whether edges have different probabilities. If so, blocks have ``edge_weights``."""

    def streams(self, seed: int, epoch: int, step: int, num_hops: int, source_types: Array) -> Array:
        """Return (L, R) uint64 keys for the draws, by hop and edge type."""
        seed_key = stream_key(seed, 0, 0)
        if self.batch_dependency > 0:
            seed_key = stream_key(seed, epoch, step // self.batch_dependency)
        num_source_types = int(source_types.max(initial=0)) + 1
        keys = relation_keys(seed_key, 0, num_hops, num_source_types)

        # Edge types with the same source type share the draws for its nodes.
        hops = np.zeros(num_hops, np.int64) if self.layer_dependency else np.arange(num_hops)
        return keys[hops[:, None], source_types]


_cached_keys = lru_cache(64)(relation_keys)
"""Cache for an epoch's keys, which all its batches share."""


@dataclass(frozen=True, kw_only=True)
class DrawSettings:
    """Settings for all draws that a loader makes."""

    schema: Schema
    fanouts: Array
    """(L, R) int64 fan-outs, hop 0 (at the seeds) first. -1 draws all in-edges."""
    replace: bool
    exclude: Mapping[EdgeType, Array]
    """Edge type to (X,) int64 ascending edge ids that are never drawn. Types may be missing."""
    seed: int
    by_source: SourceDraws | None = None
    """Options for LABOR. None draws for each destination independently."""

    def signature(self) -> str:
        """Return all fields except the schema as a string, with a digest of the excluded edges."""
        exclude_digest = compute_digest(self.exclude.items())[:16]
        return (
            f"fanouts={self.fanouts.tolist()}, replace={self.replace}, "
            f"exclude={exclude_digest}, seed={self.seed}, by_source={self.by_source}"
        )

    def request(
        self, seeds: Mapping[str, Array], epoch: int, exclude: Mapping[EdgeType, Array], step: int = 0
    ) -> SampleRequest:
        """Build the arguments of the sampling kernel for one batch.

        Args:
            seeds: Seed ids by node type.
            epoch: Number of the epoch.
            exclude: Edge ids by type that this batch leaves out, besides those that all batches leave out.
            step: Number of the step. Only LABOR's draws depend on it.
        """
        no_ids = np.empty(0, np.int64)
        seed_arrays = [seeds.get(ntype, no_ids) for ntype in self.schema.ntypes]
        num_hops, num_relations = self.fanouts.shape

        # The kernel gets the excluded ids of all edge types in one array, and the end of each type in it.
        excluded_ids = no_ids
        excluded_ends = np.zeros(num_relations + 1, np.int64)
        if exclude or self.exclude:
            id_arrays = []
            for etype in self.schema.etypes:
                id_arrays.append(merge_ids(self.exclude.get(etype, no_ids), exclude.get(etype, no_ids)))
            excluded_ids = np.concatenate(id_arrays)
            excluded_ends = _sum_lengths(id_arrays)

        if self.by_source is None:
            rounds = 0
            streams = _cached_keys(self.seed, epoch, num_hops, num_relations)
        else:
            rounds = self.by_source.rounds
            streams = self.by_source.streams(self.seed, epoch, step, num_hops, self.schema.source_types)

        return SampleRequest(
            seeds=np.concatenate(seed_arrays),
            seed_ends=_sum_lengths(seed_arrays),
            fanouts=self.fanouts,
            streams=streams,
            replace=self.replace,
            by_source=self.by_source is not None,
            rounds=rounds,
            exclude=excluded_ids,
            exclude_ends=excluded_ends,
        )


def compute_digest(arrays: Iterable[tuple[EdgeType, Array]]) -> str:
    digest = hashlib.sha256()
    for etype, values in arrays:
        digest.update(f"{etype} {len(values)} ".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


@final
class LocalSource:
    """Samples from the complete structure in one compiled call. Thread-safe."""

    def __init__(self, schema: Schema, cscs: Sequence[Csc]) -> None:
        # Keep a reference to the arrays, because ``relations`` holds only their addresses.
        self._cscs = tuple(cscs)
        self.relations = make_relations(schema, self._cscs)

    def sample(
        self, request: SampleRequest, exclude: Mapping[EdgeType, Array], workspace: ThreadTable
    ) -> RawBatch:
        """Sample a batch. The draws depend only on ``request``, not on how servers share the structure.

        Args:
            exclude: Edge ids by type. They are also in ``request.exclude``, and only this batch excludes
                them.
            workspace: The calling thread's table, over the nodes of all types.

        Raises:
            ConfigError: a seed is repeated within its type.
            PeerError: a server did not answer in time.
        """
        batch, table = sample_batch(self.relations, request, workspace.table, request.by_source or None)
        workspace.keep(table)
        _check_seeds(request, batch.node_ends[0])
        return batch


def is_compiled() -> bool:
    """Return whether Numba's cache has the mini-batch kernel. An older build may have left it there."""
    return any(Path(sample_batch.stats.cache_path).glob("kernels.sample_batch-*.nbi"))


def load_kernels(tell: Callable[[str], None]) -> None:
    """Load the mini-batch kernels from Numba's cache, or compile them and call ``tell`` with a notice.

    Two processes share the compilation. The caller must have only one thread, because this forks.
    """
    # The kernels run on a graph with one node and one edge from the node to itself.
    schema = Schema(ntypes=("_N",), num_nodes=(1,), etypes=(("_N", "_E", "_N"),))
    node = np.zeros(1, np.int64)
    bounds = np.array([0, 1])
    source = LocalSource(schema, [Csc(bounds, node.astype(np.int32), np.empty(0, np.float32), 0, 0)])
    draws = DrawSettings(schema=schema, fanouts=np.ones((1, 1), np.int64), replace=False, exclude={}, seed=0)
    request = draws.request({"_N": node}, 0, {})
    table = ThreadTable(1).table
    if not is_compiled():
        tell("compiling kernels, once after each installation (about 15 s) ...")
        child_pid = os.fork()
        if child_pid == 0:
            try:
                number_seeds(table, schema.offsets, request.seeds, request.seed_ends)
                plan_remote(node, bounds, 0)
            finally:
                # After a failure, the parent compiles the kernels that the child has not saved.
                os._exit(0)

        draw_first_hop(source.relations, request)
        os.waitpid(child_pid, 0)

    source.sample(request, {}, ThreadTable(1))
    plan_remote(node, bounds, 0)


def _check_seeds(request: SampleRequest, num_distinct: Array) -> None:
    """Raise ConfigError if a seed is repeated within its type."""
    for (first, last), count in zip(pairwise(request.seed_ends), num_distinct, strict=True):
        if last - first == count:
            continue
        ids, num_uses = np.unique(request.seeds[first:last], return_counts=True)
        raise ConfigError(
            f"the seeds contain node {ids[num_uses > 1][0]} more than once ({last - first} seeds, "
            f"{count} distinct), but a block has one row per node. Pass torch.unique(seeds)."
        )


def _sum_lengths(lists: Sequence[Array]) -> Array:
    return np.cumsum([0, *map(len, lists)])


@final
class RemoteSource:
    """Samples when each server has only its own nodes' in-edges. Each hop takes one round of requests.

    For each hop and edge type, it sends 8 bytes per remote destination and receives 24 per sampled edge. A
    request also has 8 bytes for each edge that the batch excludes. All ranks serve ``op`` with
    ``graph.sampling.make_keyed_draw``. Its rule excludes the loader's excluded edges. Edges that a single
    batch excludes travel with the request. Thread-safe.

    Args:
        known: In-edges that need no request: [hop][edge type], (ascending destinations, their in-edges).
    """

    def __init__(
        self, schema: Schema, structures: Sequence[Structure], op: str, known: Sequence[Any] = ()
    ) -> None:
        self.known = known
        self._schema = schema
        self._structures = tuple(structures)
        self._op = op
        self._etypes = schema.etypes
        self._offsets = schema.offsets
        self._source_types = schema.source_types.tolist()
        self._destination_types = schema.destination_types.tolist()

    def draw_jointly(self, requests: Sequence[SampleRequest]) -> RemoteSource:
        """Draw for all ``requests`` together, and return a source that holds the drawn edges.

        The requests differ only in their seeds. Each destination is drawn once.
        """
        # For each type, the nodes that the hops have reached, ascending and distinct.
        seeds_by_request = [np.split(request.seeds, request.seed_ends[1:-1]) for request in requests]
        nodes = [np.unique(np.concatenate(seeds)) for seeds in zip(*seeds_by_request, strict=True)]
        known: list[list[tuple[Array, InEdges]]] = []
        for hop in range(len(requests[0].fanouts)):
            frontiers = [nodes[node_type] for node_type in self._destination_types]
            edges = self._draw(requests[0], {}, hop, frontiers)
            known.append(list(zip(frontiers, edges, strict=True)))
            for node_type, in_edges in zip(self._source_types, edges, strict=True):
                # Sorting and dropping repeated ids takes a tenth of the time that np.unique takes.
                ids = np.sort(np.concatenate([nodes[node_type], in_edges.sources]))
                nodes[node_type] = ids[np.diff(ids, prepend=-1) > 0]
        return RemoteSource(self._schema, self._structures, self._op, known)

    def sample(
        self, request: SampleRequest, exclude: Mapping[EdgeType, Array], workspace: ThreadTable
    ) -> RawBatch:
        """Draw all hops of a batch, and number its nodes in the order in which the hops reach them.

        Args:
            exclude: Ascending edge ids by type.
            workspace: The calling thread's table. Its numbers are invalid for the next batch, also after an
                error.
        """
        table, nodes = number_seeds(workspace.table, self._offsets, request.seeds, request.seed_ends)
        node_ends = [nodes.counts.copy()]
        # One array for each hop and edge type.
        indptrs: list[Array] = []
        sources: list[Array] = []
        edge_ids: list[Array] = []
        try:
            _check_seeds(request, nodes.counts)
            for hop in range(len(request.fanouts)):
                frontiers = [nodes.ids[nodes.starts[t] :][: nodes.counts[t]] for t in self._destination_types]
                edges = self._draw(request, exclude, hop, frontiers)
                table, nodes, source_indices = self._number_sources(table, nodes, edges)
                indptrs += [in_edges.indptr for in_edges in edges]
                sources += source_indices
                edge_ids += [in_edges.edge_ids for in_edges in edges]
                node_ends.append(nodes.counts.copy())
        finally:
            # Also after an error, the next batch must not see the numbers that this batch assigned.
            workspace.keep(table._replace(base=table.base + int(nodes.counts.max())))

        ids, starts = pack_ids(nodes)
        return RawBatch(
            nodes=ids,
            node_starts=starts,
            node_ends=np.array(node_ends),
            indptr=np.concatenate(indptrs),
            sources=np.concatenate(sources),
            edge_ids=np.concatenate(edge_ids),
            edge_ends=_sum_lengths(edge_ids),
            edge_weights=np.empty(0, np.float32),
        )

    def _draw(
        self, request: SampleRequest, exclude: Mapping[EdgeType, Array], hop: int, frontiers: Sequence[Array]
    ) -> list[InEdges]:
        """Draw one hop. Return in-edges by edge type. ``frontiers`` has the destinations for each edge type.

        Requests for all edge types are sent before the first answer is awaited. Edges that were drawn jointly
        before (:attr:`known`) need no request.
        """
        if self.known:
            known = zip(self.known[hop], frontiers, strict=True)
            return [_select_known(entry, nodes) for entry, nodes in known]
        waits: list[Callable[[], InEdges]] = []
        for relation, (structure, frontier) in enumerate(zip(self._structures, frontiers, strict=True)):
            fanout = int(request.fanouts[hop, relation])
            if fanout == 0 or not len(frontier):
                starts = np.zeros(len(frontier) + 1, np.int64)
                waits.append(partial(InEdges, indptr=starts, sources=NO_EDGES, edge_ids=NO_EDGES))
                continue
            parameters = pack_hop_parameters(fanout, int(request.streams[hop, relation]))
            excluded = exclude.get(self._etypes[relation], NO_EDGES)
            layer = len(request.fanouts) - hop
            waits.append(structure.submit(self._op, frontier, parameters, exclude=excluded, layer=layer))
        return [wait_for_edges() for wait_for_edges in waits]

    def _number_sources(
        self, table: NodeTable, nodes: NumberedNodes, edges: Sequence[InEdges]
    ) -> tuple[NodeTable, NumberedNodes, list[Array]]:
        """Number the sources that one hop reaches. Each new node gets the next number in its type.

        Return the table and the nodes, which may be larger copies, and the source numbers by edge type.
        """
        # Any source may be a new node.
        num_edges_by_type = np.zeros(len(nodes.counts), np.int64)
        for node_type, in_edges in zip(self._source_types, edges, strict=True):
            num_edges_by_type[node_type] += len(in_edges.sources)
        old_counts = nodes.counts.copy()
        nodes = grow_nodes(nodes, num_edges_by_type)
        table = grow_table(table, nodes, int(num_edges_by_type.sum()))
        source_indices = []
        for node_type, in_edges in zip(self._source_types, edges, strict=True):
            numbers = np.empty(len(in_edges.sources), np.int64)
            number_type(table, nodes, node_type, in_edges.sources + self._offsets[node_type], numbers)
            source_indices.append(numbers)
        write_ids(nodes, self._offsets, old_counts)
        return table, nodes, source_indices


BatchSource: TypeAlias = LocalSource | RemoteSource


def _select_known(known: tuple[Array, InEdges], nodes: Array) -> InEdges:
    """Return the in-edges of ``nodes``. ``known`` holds the known destinations and their in-edges."""
    known_nodes, edges = known
    shard = CSCShard(indptr=edges.indptr, indices=edges.sources, first_node=0, first_edge=0)
    selected = all_in_edges(shard, np.searchsorted(known_nodes, nodes))
    # The shard's edge ids are positions among the known edges.
    return replace(selected, edge_ids=edges.edge_ids[selected.edge_ids])
