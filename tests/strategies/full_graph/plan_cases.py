"""A graph of 240 nodes, and the plain answer to what servers must compute: sets over the whole edge list."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph.structure import ReplicatedStructure
from dglx_dist.planner.model_shape import build_topology
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, Assignment, RawGraph
from dglx_dist.strategies.full_graph.halo_plan import RankPlan
from dglx_dist.strategies.full_graph.plan_builder import PartitionContext

NUM_NODES, NUM_PARTS = 240, 4


def raw_graph() -> RawGraph:
    """Chains with 60 long edges, loops and double edges; every 17th node has no in-edge, 5 have no edge."""
    random = np.random.default_rng(5)
    near = np.arange(2, NUM_NODES - 5)
    source = np.concatenate([near - 1, near - 2, random.integers(NUM_NODES - 5, size=60), [7, 7, 8, 8]])
    destination = np.concatenate([near, near, random.integers(NUM_NODES - 5, size=60), [7, 9, 9, 9]])
    kept = destination % 17 != 0
    return RawGraph(
        name="chains",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (source[kept], destination[kept])},
        node_data={
            NODE_TYPE: {
                "feat": random.standard_normal((NUM_NODES, 3)),
                "label": random.integers(4, size=NUM_NODES),
                "train_mask": np.arange(NUM_NODES) % 11 == 3,
            }
        },
        edge_data={EDGE_TYPE: {"weight": random.random((int(kept.sum()), 2))}},
        num_classes={NODE_TYPE: 4},
    )


def write_chains(folder: Path) -> Path:
    part_of = np.searchsorted([96, 168, 216], np.arange(NUM_NODES), side="right")
    astray = np.arange(0, NUM_NODES, 10)
    part_of[astray] = np.random.default_rng(6).integers(NUM_PARTS, size=len(astray))
    assignment = Assignment(
        num_parts=NUM_PARTS, part_of={NODE_TYPE: part_of.astype(np.int32)}, method="test", seed=4
    )
    write_dataset(raw_graph(), assignment, folder / "parts")
    return folder / "parts"


def structure_of(num_nodes: int, source: Array, destination: Array) -> ReplicatedStructure:
    order = np.lexsort((source, destination))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(destination, minlength=num_nodes))])
    return ReplicatedStructure(EDGE_TYPE, num_nodes, indptr, source[order])


def plain_context(servers: int, per_server: int) -> PartitionContext:
    """The graph in its own ids, cut into servers of unequal size."""
    return PartitionContext(
        structure=structure_of(NUM_NODES, *raw_graph().edges[EDGE_TYPE]),
        bounds=np.array([0, *[96, 168, 216][: servers - 1], NUM_NODES]),
        topology=build_topology(servers, per_server),
        seed=4,
    )


def whole_of(context: PartitionContext) -> Whole:
    (shard,) = context.structure.shards
    destination = np.repeat(np.arange(NUM_NODES), np.diff(shard.indptr))
    return Whole(shard.indices, destination, context.bounds, context.topology)


@dataclass(frozen=True)
class Whole:
    source: np.ndarray
    """(E,) by edge id."""
    destination: np.ndarray
    bounds: np.ndarray
    topology: Topology

    def own_nodes(self, server: int) -> set[int]:
        return set(range(int(self.bounds[server]), int(self.bounds[server + 1])))

    def in_neighbours(self, nodes: set[int]) -> set[int]:
        return set(self.source[np.isin(self.destination, list(nodes))].tolist())

    def in_edges(self, nodes: set[int]) -> np.ndarray:
        return np.flatnonzero(np.isin(self.destination, list(nodes)))

    def find_levels(self, seeds: set[int], num_layers: int, hops: int) -> list[list[set[int]]]:
        """R_i^l by server and level, by the definition."""
        levels = [set(seeds)]
        for _ in range(num_layers):
            levels.insert(0, levels[0] | self.in_neighbours(levels[0]))
        answer = []
        for server in range(self.topology.num_servers):
            rows = [self.own_nodes(server) & levels[level] for level in range(num_layers + 1)]
            for level in range(hops - 1, -1, -1):
                rows[level] = rows[level + 1] | self.in_neighbours(rows[level + 1])
            answer.append(rows)
        return answer


def check_plans(
    plans: list[RankPlan], whole: Whole, rows: list[list[set[int]]], allowed: list[set[int]] | None = None
) -> None:
    """Assert that ``plans``, by rank, compute ``rows`` (by server and level) and read all that these need.

    ``allowed``: by server, the only nodes that edges may come from.
    """
    topology = whole.topology
    for server, levels in enumerate(rows):
        members = [plans[rank] for rank in topology.ranks_of_server(server)]
        for level, expected in enumerate(levels):
            held = np.concatenate([plan.rows(level) for plan in members])
            assert sorted(held.tolist()) == sorted(expected), (server, level)
        for plan in members:
            _check_order(plan, levels)
            assert plan.external_nodes == len(levels[0] - whole.own_nodes(server))
    for rank, plan in enumerate(plans):
        server = topology.server_of_rank[rank]
        for number in range(1, len(plan.layers) + 1):
            _check_edges(plan, number, whole, None if allowed is None else allowed[server])
            _check_halo(plans, rank, number)


def _check_order(plan: RankPlan, levels: list[set[int]]) -> None:
    latest = [max(level for level, rows in enumerate(levels) if node in rows) for node in plan.nodes.tolist()]
    keys = [(-level, node) for level, node in zip(latest, plan.nodes.tolist(), strict=True)]
    assert keys == sorted(set(keys))
    assert plan.seeds == len(plan.rows(len(plan.layers)))


def _check_edges(plan: RankPlan, number: int, whole: Whole, allowed: set[int] | None) -> None:
    """Every in-edge of every target is there exactly once, between the right rows."""
    layer = plan.layers[number - 1]
    assert layer.own_rows == len(plan.rows(number - 1))
    assert layer.targets == len(plan.rows(number)) <= layer.own_rows
    sources = np.concatenate([plan.rows(number - 1), layer.halo_nodes])
    assert layer.num_sources == len(sources)
    expected = whole.in_edges(set(plan.rows(number).tolist()))
    if allowed is not None:
        expected = expected[np.isin(whole.source[expected], list(allowed))]
    assert sorted(layer.edge_ids.tolist()) == expected.tolist()
    assert np.array_equal(sources[layer.indices], whole.source[layer.edge_ids])
    targets = np.repeat(plan.rows(number), np.diff(layer.indptr))
    assert np.array_equal(targets, whole.destination[layer.edge_ids])
    assert len(layer.indptr) == layer.targets + 1


def _check_halo(plans: list[RankPlan], rank: int, number: int) -> None:
    """The halo comes by rank, ascending within; the ranks send just these rows; each row is read."""
    layer = plans[rank].layers[number - 1]
    assert list(layer.receive) == sorted(layer.receive)
    assert sum(count for _, count in layer.receive) == len(layer.halo_nodes)
    read = set(layer.indices[layer.indices >= layer.own_rows].tolist())
    assert len(read) == len(layer.halo_nodes)
    first = 0
    for peer, count in layer.receive:
        assert peer != rank
        assert count > 0
        requested = layer.halo_nodes[first : first + count]
        assert (np.diff(requested) > 0).all()
        sent = dict(plans[peer].layers[number - 1].send)[rank]
        assert np.array_equal(plans[peer].rows(number - 1)[sent], requested)
        first += count
    senders = {peer for peer, plan in enumerate(plans) if rank in dict(plan.layers[number - 1].send)}
    assert senders == {peer for peer, _ in layer.receive}
