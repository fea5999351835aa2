"""Unified ids of a graph of several types: in-edges, plans by type, and expansion by edge type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.structure import ReplicatedStructure
from dglx_dist.planner.model_shape import build_topology
from dglx_dist.records import IdRanges
from dglx_dist.strategies.full_graph.expansion import EasOptions, select_external
from dglx_dist.strategies.full_graph.graph_types import TypedPlan, UnifiedGraph
from dglx_dist.strategies.full_graph.halo_block import OwnEdgeCount
from dglx_dist.strategies.full_graph.plan_builder import PartitionContext, make_all_plans, split_by_server
from tests.strategies.full_graph import typed_cases as cases

PLACEMENTS = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]
BOUNDS = {"author": [0, 0, 15, 40], "paper": [0, 25, 26, 60], "venue": [0, 5, 5, 5], "topic": [0, 2, 4, 7]}
"""First nodes of three servers. The first has no authors, and the others have no venues."""


def make_context(servers: int, per_server: int) -> PartitionContext:
    topology = build_topology(servers, per_server)
    bounds = {ntype: np.array([*ends[:servers], ends[-1]]) for ntype, ends in BOUNDS.items()}
    structures, edge_bounds = {}, []
    for etype, (u, v) in cases.raw_graph().edges.items():
        # Rows of destinations decide where edges are. Sources may have more rows.
        count = cases.NUM_NODES[etype[2]]
        order = np.lexsort((u, v))
        indptr = np.concatenate([[0], np.cumsum(np.bincount(v, minlength=count))])
        structures[etype] = ReplicatedStructure(etype, cases.NUM_NODES[etype[0]], indptr, u[order])
        edge_bounds.append(indptr[bounds[etype[2]]])
    graph = UnifiedGraph(
        ntypes=tuple(cases.NUM_NODES),
        structures=structures,
        nodes=IdRanges.from_offsets([RowOwners(bounds[ntype], topology).starts for ntype in cases.NUM_NODES]),
        edges=IdRanges.from_offsets(edge_bounds),
    )
    return PartitionContext(
        structure=graph, bounds=np.sum([*bounds.values()], axis=0), topology=topology, seed=4
    )


def list_edges(graph: UnifiedGraph, number: int) -> set[tuple[int, int]]:
    (shard,) = [*graph.structures.values()][number].shards
    destinations = np.repeat(np.arange(len(shard.indptr) - 1), np.diff(shard.indptr))
    return {*zip(shard.indices.tolist(), destinations.tolist(), strict=True)}


def get_graph(context: PartitionContext) -> UnifiedGraph:
    assert isinstance(context.structure, UnifiedGraph)
    return context.structure


def test_edge_types_with_edges_elsewhere_are_not_skipped() -> None:
    count = OwnEdgeCount(0)
    assert count
    assert not count == 0  # noqa: SIM201 - models write either
    assert count != 0
    assert count > 0
    assert not count <= 0
    assert max(count, 1) == 1
    assert len(torch.ones(count)) == int(count) == 0
    assert OwnEdgeCount(3) == 3 < OwnEdgeCount(4)


@pytest.mark.parametrize(("servers", "per_server"), PLACEMENTS)
def test_in_edges_are_those_of_all_types(servers: int, per_server: int) -> None:
    graph = get_graph(make_context(servers, per_server))
    nodes = np.random.default_rng(0).permutation(graph.rank_bounds[-1])
    edges = graph.submit("in_edges", nodes, phase="test")()
    kinds, ids = graph.nodes.to_typed(np.repeat(nodes, np.diff(edges.indptr)))
    source_kinds, sources = graph.nodes.to_typed(edges.sources)
    relations = graph.find_relations(edges.edge_ids)
    for number, (source, _, destination) in enumerate(graph.structures):
        chosen = relations == number
        assert {*source_kinds[chosen].tolist()} <= {graph.ntypes.index(source)}
        assert {*kinds[chosen].tolist()} <= {graph.ntypes.index(destination)}
        pairs = zip(sources[chosen].tolist(), ids[chosen].tolist(), strict=True)
        assert {*pairs} == list_edges(graph, number)
    assert np.array_equal(graph.in_degrees(nodes), np.diff(edges.indptr))
    assert len(np.unique(edges.edge_ids)) == sum(cases.NUM_EDGES.values())


def test_counts_in_edges_from_outside_a_server() -> None:
    context = make_context(3, 1)
    graph, nodes = get_graph(context), np.arange(context.bounds[-1])
    for server in range(3):
        first, last = context.own_range(server)
        edges = graph.submit("in_edges", nodes, phase="test")()
        is_outside = (edges.sources < first) | (edges.sources >= last)
        counts = np.add.reduceat(np.append(is_outside, 0), edges.indptr[:-1]) * (np.diff(edges.indptr) > 0)
        assert np.array_equal(graph.in_degrees(nodes, (first, last)), counts)


@pytest.mark.parametrize("hops", [0, 1, 2])
@pytest.mark.parametrize(("servers", "per_server"), PLACEMENTS)
def test_plans_by_type_have_all_in_edges_of_their_targets(servers: int, per_server: int, hops: int) -> None:
    context = make_context(servers, per_server)
    graph = get_graph(context)
    seeds = graph.unify({"paper": np.arange(0, 60, 3), "author": np.arange(2)})
    plans = make_all_plans(context, split_by_server(context, np.sort(seeds)), 2, hops)
    typed = [graph.split(plan) for plan in plans]
    targets = {ntype: np.concatenate([plan.targets()[ntype] for plan in typed]) for ntype in graph.ntypes}
    assert sorted(targets["paper"]) == list(range(0, 60, 3))
    assert sorted(targets["author"]) == [0, 1]
    for depth in range(2):
        for number, etype in enumerate(graph.structures):
            for plan in typed:
                check_relation(plan, depth, graph, number)
            counts = sum(len(plan.layers[depth].relations[etype].indices) for plan in typed)
            assert (etype in typed[0].layers[depth].skipped) == (counts == 0)
        check_halos(typed, depth)


def check_relation(plan: TypedPlan, depth: int, graph: UnifiedGraph, number: int) -> None:
    etype = [*graph.structures][number]
    relation, rows = plan.layers[depth].relations[etype], plan.layers[depth].rows[etype[0]]
    sources = np.concatenate([plan.nodes[etype[0]][: rows.own_rows], rows.halo_nodes])
    own_targets = plan.nodes[etype[2]][: relation.targets]
    targets = np.repeat(own_targets, np.diff(relation.indptr))
    pairs = {*zip(sources[relation.indices].tolist(), targets.tolist(), strict=True)}
    assert pairs == {edge for edge in list_edges(graph, number) if edge[1] in own_targets}
    assert np.array_equal(
        graph.structures[etype].submit_find_edges(relation.edge_ids)()[0], sources[relation.indices]
    )


def check_halos(typed: list[TypedPlan], depth: int) -> None:
    """Each rank sends the rows that the others expect, type by type."""
    for rank, plan in enumerate(typed):
        for ntype, rows in plan.layers[depth].rows.items():
            first = 0
            for peer, count in rows.receive:
                sent = dict(typed[peer].layers[depth].rows[ntype].send)[rank]
                expected = rows.halo_nodes[first : first + count]
                assert np.array_equal(typed[peer].nodes[ntype][sent], expected)
                first += count
            assert first == len(rows.halo_nodes)


def test_fan_outs_of_expansion_are_by_edge_type() -> None:
    context = make_context(3, 1)
    graph = get_graph(context)
    own_range = context.own_range(1)
    paper = graph.unify({"paper": np.array([25])})
    assert own_range[0] <= paper[0] < own_range[1]
    edges = graph.submit("in_edges", paper, phase="test")()
    is_outside = (edges.sources < own_range[0]) | (edges.sources >= own_range[1])
    relations = np.unique(graph.find_relations(edges.edge_ids[is_outside]))
    assert len(relations) > 1
    options = EasOptions(hops=1, fanout=1, inner="batch")
    selected = np.setdiff1d(select_external(graph, own_range, paper, options, seed=0), paper)
    chosen = {
        int(relation) for relation in graph.find_relations(edges.edge_ids[np.isin(edges.sources, selected)])
    }
    assert chosen >= {*relations.tolist()}
    assert len(selected) <= len(np.unique(graph.find_relations(edges.edge_ids)))
