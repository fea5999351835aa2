"""Graphs of several types as graphs of one type: ids over all types, and plans split by type.

Plans are made with *unified* ids, which number the nodes of all types rank by rank, and type by type within a
rank. So each rank and each server owns one range. Edges have unified ids, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np

from dglx_dist.comm.topology import Topology
from dglx_dist.dataloading.sampler_spec import find_edge_keys
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.structure import InEdges, Structure
from dglx_dist.records import Array, EdgeType, IdRanges
from dglx_dist.strategies.full_graph.halo_plan import NO_IDS, HaloLayer, RankPlan

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@final
class MaskedStructure:
    """The in-edges that an edge column marks with a number other than 0.

    For each edge on another server it sends 8 bytes and receives the column's value.
    """

    def __init__(self, structure: Structure, store: KVStore, key: str) -> None:
        self._structure = structure
        self._store = store
        self._key = key

    def submit(self, op: str, nodes: Array, *, phase: str) -> Callable[[], InEdges]:
        """Request the marked in-edges into ``nodes``, like ``Structure.submit``."""
        wait = self._structure.submit(op, nodes, phase=phase)

        def wait_for_marked() -> InEdges:
            edges = wait()
            return edges.keep(self._store.pull(self._key, edges.edge_ids, phase=phase).numpy() != 0)

        return wait_for_marked

    def in_degrees(self, nodes: Array, outside: tuple[int, int] | None = None) -> Array:
        """Count all in-edges, marked or not, as ``Structure.in_degrees`` does. Return (K,) int64."""
        return self._structure.in_degrees(nodes, outside)


@final
@dataclass(frozen=True, kw_only=True)
class UnifiedGraph:
    """In-edges of all types over unified ids, with those ``Structure`` methods that plans need."""

    ntypes: tuple[str, ...]
    structures: Mapping[EdgeType, Structure | MaskedStructure]
    """In-edges by edge type, in the typed ids of source and destination."""
    nodes: IdRanges
    """Unified node ids, by type and rank."""
    edges: IdRanges
    """Unified edge ids, by type and server."""

    @classmethod
    def from_graph(
        cls,
        g: DistGraph,
        mask: str | None = None,
        *,
        bounds: Mapping[str, Array] | None = None,
        topology: Topology | None = None,
    ) -> UnifiedGraph:
        """Return the in-edges in ``g``, or only those that the edge column ``mask`` marks.

        Args:
            bounds: (S + 1,) first node on each server, by node type. By default the session's.
            topology: Ranks on these servers. By default the session's.
        """
        if bounds is None:
            bounds = {ntype: g.get_node_partition_policy(ntype).bounds for ntype in g.ntypes}
        if topology is None:
            topology = g.session.topology
        return cls(
            ntypes=tuple(g.ntypes),
            structures={etype: _open_structure(g, etype, mask) for etype in g.canonical_etypes},
            nodes=IdRanges.from_offsets([RowOwners(bounds[ntype], topology).starts for ntype in g.ntypes]),
            edges=IdRanges.from_offsets(g.edge_bounds),
        )

    @cached_property
    def rank_bounds(self) -> Array:
        """(W + 1,) int64 first unified id on each rank, and the end."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.nodes.counts.sum(axis=0))])

    def submit(self, op: str, nodes: Array, *, phase: str) -> Callable[[], InEdges]:
        """Request in-edges into ``nodes``, as ``Structure.submit``. Per node they are ordered by type."""
        kinds, ids = self.nodes.to_typed(nodes)
        pending = []
        for etype, structure in self.structures.items():
            positions = np.flatnonzero(kinds == self.ntypes.index(etype[2]))
            pending.append((positions, structure.submit(op, ids[positions], phase=phase)))
        return lambda: self._join(len(nodes), [(positions, wait()) for positions, wait in pending])

    def _join(self, num_nodes: int, pieces: list[tuple[Array, InEdges]]) -> InEdges:
        """Join the in-edges from all edge types. Each piece starts with its nodes' positions."""
        counts = np.zeros((num_nodes, len(pieces)), np.int64)
        for number, (positions, edges) in enumerate(pieces):
            counts[positions, number] = np.diff(edges.indptr)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts.ravel())])
        sources = np.empty(starts[-1], np.int64)
        edge_ids = np.empty(starts[-1], np.int64)

        # A node's in-edges are grouped by edge type, so each group is moved to its start.
        for number, (source_type, _, _) in enumerate(self.structures):
            positions, edges = pieces[number]
            shifts = starts[positions * len(pieces) + number] - edges.indptr[:-1]
            places = np.arange(len(edges.sources)) + np.repeat(shifts, np.diff(edges.indptr))
            sources[places] = self.nodes.from_typed(self.ntypes.index(source_type), edges.sources)
            edge_ids[places] = self.edges.from_typed(number, edges.edge_ids)
        return InEdges(indptr=starts[:: len(pieces)], sources=sources, edge_ids=edge_ids)

    def in_degrees(self, nodes: Array, outside: tuple[int, int] | None = None) -> Array:
        """Count in-edges over all types, as ``Structure.in_degrees`` does. Return (K,) int64."""
        kinds, ids = self.nodes.to_typed(nodes)
        total = np.zeros(len(nodes), np.int64)
        for (source, _, destination), structure in self.structures.items():
            positions = np.flatnonzero(kinds == self.ntypes.index(destination))
            typed_range = outside and self.find_typed_range(source, outside)
            total[positions] += structure.in_degrees(ids[positions], typed_range)
        return total

    def find_typed_range(self, ntype: str, unified_range: tuple[int, int]) -> tuple[int, int]:
        """Return the half-open id range of ``ntype`` within a range of unified ids."""
        kind = self.ntypes.index(ntype)
        starts = self.nodes.starts[kind]
        counts = self.nodes.counts[kind]
        # Each rank has one range per type. The nodes before a bound are counted in each of these ranges.
        begin, end = (int(np.clip(bound - starts, 0, counts).sum()) for bound in unified_range)
        return begin, end

    def unify(self, ids: Mapping[str, Array]) -> Array:
        """Return the (K,) int64 unified node ids for typed ``ids``."""
        unified_ids = [NO_IDS]
        for ntype, typed_ids in ids.items():
            unified_ids.append(self.nodes.from_typed(self.ntypes.index(ntype), typed_ids))
        return np.concatenate(unified_ids)

    def find_relations(self, edge_ids: Array) -> Array:
        """Return the (K,) int64 edge type number for each unified edge id."""
        return self.edges.locate(edge_ids)[0]

    def split(self, plan: RankPlan) -> TypedPlan:
        """Split ``plan``, which has unified ids, by type.

        Rows and edges keep their order within a type. So a layer's rows are still a prefix of the previous
        layer's.
        """
        kinds, ids = self.nodes.to_typed(plan.nodes)
        splitter = _Splitter(self, kinds, plan)
        layers: list[TypedLayer] = []
        for depth, layer in enumerate(plan.layers):
            is_same = depth > 0 and layer is plan.layers[depth - 1]
            layers.append(layers[-1] if is_same else splitter.split(depth))
        nodes = {ntype: ids[kinds == kind] for kind, ntype in enumerate(self.ntypes)}
        return TypedPlan(nodes=nodes, layers=tuple(layers))


GraphStructure: TypeAlias = Structure | MaskedStructure | UnifiedGraph
"""The in-edges from which plans are made."""


@final
@dataclass(frozen=True, kw_only=True)
class TypedLayer:
    """One layer in a plan, by node and edge type, with typed ids."""

    rows: Mapping[str, HaloLayer]
    """Own rows and halo by node type, without edges."""
    relations: Mapping[EdgeType, HaloLayer]
    """One block per edge type.

    Its sources are the source type's rows. Its targets are the destination type's first own rows.
    """
    skipped: frozenset[EdgeType] = frozenset()
    """Edge types without edges on any rank."""


@final
@dataclass(frozen=True, kw_only=True)
class TypedPlan:
    """One rank's plan by node and edge type."""

    nodes: Mapping[str, Array]
    """(n,) int64 ids of this rank's feature rows."""
    layers: tuple[TypedLayer, ...]
    """The L layers, input layer first. Equal layers are one object."""

    def targets(self) -> dict[str, Array]:
        """Return this rank's seed ids by node type."""
        return {ntype: self.nodes[ntype][: rows.targets] for ntype, rows in self.layers[-1].rows.items()}


def find_bounds(g: DistGraph) -> Array:
    """Return the (S + 1,) int64 first unified id on each server, and the end."""
    return np.sum([g.get_node_partition_policy(ntype).bounds for ntype in g.ntypes], axis=0)


def unify_structure(g: DistGraph, mask: str | None = None) -> GraphStructure:
    """Return the in-edges over unified ids. With ``mask``, only those that this edge column marks."""
    if not g.is_homogeneous:
        return UnifiedGraph.from_graph(g, mask)
    return _open_structure(g, g.canonical_etypes[0], mask)


def _open_structure(g: DistGraph, etype: EdgeType, mask: str | None) -> Structure | MaskedStructure:
    if mask is None:
        return g.structure(etype)
    key = find_edge_keys(g, etype, [mask], "mask")[mask]
    return MaskedStructure(g.structure(etype), g.kvstore, key)


def unify_nodes(g: DistGraph, ids: Mapping[str, Array]) -> Array:
    """Return the (K,) int64 unified node ids for typed ``ids``. With one type, both are the same."""
    if not g.is_homogeneous:
        return UnifiedGraph.from_graph(g).unify(ids)
    (own_ids,) = ids.values()
    return own_ids


def split_nodes(g: DistGraph, nodes: Array) -> dict[str, Array]:
    """Split the (K,) unified ``nodes`` by type, and return typed ids in the same order."""
    if g.is_homogeneous:
        return {g.ntypes[0]: nodes}
    kinds, ids = UnifiedGraph.from_graph(g).nodes.to_typed(nodes)
    return {ntype: ids[kinds == kind] for kind, ntype in enumerate(g.ntypes)}


def split_plan(plan: RankPlan, g: DistGraph) -> TypedPlan:
    """Split ``plan`` by the types in ``g``. Sends nothing."""
    if not g.is_homogeneous:
        return UnifiedGraph.from_graph(g).split(plan)
    (ntype,) = g.ntypes
    (etype,) = g.canonical_etypes
    # Equal layers stay one object.
    layers = {id(layer): TypedLayer(rows={ntype: layer}, relations={etype: layer}) for layer in plan.layers}
    return TypedPlan(nodes={ntype: plan.nodes}, layers=tuple(layers[id(layer)] for layer in plan.layers))


@final
class _Splitter:
    """Splits the layers in ``plan`` by type. ``kinds`` are type numbers for the plan's nodes."""

    def __init__(self, graph: UnifiedGraph, kinds: Array, plan: RankPlan) -> None:
        self._graph = graph
        self._kinds = kinds
        self._plan = plan
        self._row_in_type = _number_by_kind(kinds)

    def split(self, depth: int) -> TypedLayer:
        plan = self._plan
        graph = self._graph
        layer = plan.layers[depth]
        own_kinds = self._kinds[: layer.own_rows]
        halo_kinds, halo_ids = graph.nodes.to_typed(layer.halo_nodes)
        rows = {}
        for kind, ntype in enumerate(graph.ntypes):
            is_halo = halo_kinds == kind
            rows[ntype] = self._rows_of_type(layer, kind, halo_ids[is_halo], is_halo)

        # Within a type, its own rows come first and then its halo rows.
        own_counts = np.bincount(own_kinds, minlength=len(graph.ntypes))
        halo_rows = own_counts[halo_kinds] + _number_by_kind(halo_kinds)
        source_rows = np.concatenate([self._row_in_type[: layer.own_rows], halo_rows])
        targets = np.repeat(self._row_in_type[: layer.targets], np.diff(layer.indptr))
        edge_kinds, edge_ids = graph.edges.to_typed(layer.edge_ids)
        relations = {}
        for number, etype in enumerate(graph.structures):
            edges = np.flatnonzero(edge_kinds == number)
            num_targets = rows[etype[2]].targets
            degrees = np.bincount(targets[edges], minlength=num_targets)
            relations[etype] = replace(
                rows[etype[0]],
                targets=num_targets,
                indptr=np.concatenate([np.zeros(1, np.int64), np.cumsum(degrees)]),
                indices=source_rows[layer.indices[edges]],
                edge_ids=edge_ids[edges],
                cover=plan.covers[number * len(plan.layers) + depth] if plan.covers else None,
            )

        edge_counts = plan.edge_counts.reshape(len(plan.layers), -1)[depth]
        skipped = {etype for etype, count in zip(relations, edge_counts, strict=True) if count == 0}
        return TypedLayer(rows=rows, relations=relations, skipped=frozenset(skipped))

    def _rows_of_type(self, layer: HaloLayer, kind: int, halo_ids: Array, is_halo: Array) -> HaloLayer:
        # An empty list has no second dimension.
        peers, num_rows = np.array(layer.receive, np.int64).reshape(-1, 2).T
        senders = np.repeat(peers, num_rows)[is_halo]
        ranks, counts = np.unique(senders, return_counts=True)
        send = [(rank, self._row_in_type[rows[self._kinds[rows] == kind]]) for rank, rows in layer.send]
        return HaloLayer(
            own_rows=int(np.count_nonzero(self._kinds[: layer.own_rows] == kind)),
            targets=int(np.count_nonzero(self._kinds[: layer.targets] == kind)),
            indptr=np.zeros(1, np.int64),
            indices=NO_IDS,
            edge_ids=NO_IDS,
            halo_nodes=halo_ids,
            receive=tuple(zip(ranks.tolist(), counts.tolist(), strict=True)),
            send=tuple((rank, rows) for rank, rows in send if len(rows)),
        )


def _number_by_kind(kinds: Array) -> Array:
    """Return each item's position among the items of its kind, as (n,) int64."""
    order = np.argsort(kinds, kind="stable")
    counts = np.bincount(kinds)
    starts = np.cumsum(counts) - counts
    positions = np.empty(len(kinds), np.int64)
    positions[order] = np.arange(len(kinds)) - np.repeat(starts, counts)
    return positions
