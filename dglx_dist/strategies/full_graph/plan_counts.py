"""Sizes of the plans of a full-graph epoch: counted by one process or by all ranks, or estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch

from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.topology import Topology
from dglx_dist.records import EDGE_TYPE, Array
from dglx_dist.strategies.cost import (
    Cluster,
    GraphStats,
    LayerCounts,
    PartitionContext,
    PlannedRun,
    Work,
)
from dglx_dist.strategies.full_graph.expansion import EasOptions, Selection, compose, eas_rule
from dglx_dist.strategies.full_graph.halo_block import HaloBlock, halo_block
from dglx_dist.strategies.full_graph.halo_plan import RankPlan
from dglx_dist.strategies.full_graph.memory_estimate import LocalExchange
from dglx_dist.strategies.full_graph.plan_builder import Planner, PlanRequest, plan_all, seeds_by_server

EAS_HOPS: Mapping[str, int] = MappingProxyType({"eas, 1 hop": 1, "eas, 2 hops": 2})
"""Variants of expansion-aware sampling: ``FullGraphScheme.limit`` to hops between servers."""
EAS_FANOUT = 15
"""External fan-out, as in the paper."""
_MOST_EDGES = 200_000_000
"""Largest plans to build, over layers and cooperative batches: about a second for each million edges."""
_MOST_TRIED_EDGES = 3_000_000
"""Of all layers of a timed neighbourhood."""
_TRIED_PARTS = (8, 3, 1)
"""Every n-th of a server's training nodes, the smallest neighbourhood first."""
_FEW_SEEDS = 64
"""Seeds whose neighbourhoods are timed if those of all are too large."""


@dataclass(frozen=True, kw_only=True)
class HaloPairs:
    """Pairs of a node and a rank that reads its row without computing it, for each layer's input."""

    outside: tuple[int, ...]
    """(L,) input-most layer first: a rank of another server computes the node (B_ext)."""
    inside: tuple[int, ...]
    """(L,) another rank of the same server computes it."""


@dataclass(frozen=True, kw_only=True)
class FullWork:
    """Work of one full-graph epoch."""

    rows: tuple[int, ...]
    """(L + 1,) of the largest step of any rank."""
    sources: tuple[int, ...]
    """(L,) of that step."""
    edges: tuple[int, ...]
    """(L,) of that step."""
    worked: LayerCounts
    """Of the busiest rank, over all steps."""
    pairs: HaloPairs
    """Exchanged rows of all ranks and steps."""
    card_rows: tuple[int, ...]
    """(L,) rows through the busiest network card, in or out, whichever is more."""
    inside_rows: tuple[int, ...]
    """(L,) rows between the ranks of the busiest server."""
    external_rows: int
    """Feature rows preloaded from other servers, of all servers and steps."""
    steps: int = 1
    counted: bool = True
    read_rows: int = 0
    """Feature rows of the busiest rank over all steps; cooperative batches read them in each epoch."""


@final
@dataclass(frozen=True)
class FullGraphScheme(Work):
    """How a whole graph is trained on."""

    hops: int
    """Layers that a server computes without rows of other servers."""
    limit: str = ""
    """Name of a limit of the external neighbourhood, of :data:`EAS_HOPS`; "": none."""
    cooperative_batches: int = 1

    def describe(self, num_layers: int) -> str:
        number = self.cooperative_batches
        batches = f" in {number} cooperative batches" if number > 1 else ""
        sampled = ", sampled" if self.limit else ""
        return f"plans of {self.hops} of {num_layers} layers preloaded{sampled}{batches}"

    def count(self, run: PlannedRun) -> FullWork | None:
        if run.graph.edges * run.num_layers * self.cooperative_batches > _MOST_EDGES:
            return None
        partition, number = run.partition, self.cooperative_batches
        pieces = [
            [own] if number == 1 else compose(own, number, "random", seed=partition.seed)
            for own in seeds_by_server(partition, run.seeds)
        ]
        topology, make = partition.topology, self._in_job(run) if run.in_job else self._alone(run)
        sizes = np.array(
            [
                [sizes_of(plan, topology.world_size) for plan in make([piece[step] for piece in pieces])]
                for step in range(number)
            ]
        )
        # (processes, R, ranks of a process, K)
        gathered = gather_int64(sizes, run.g.session).reshape(-1, *sizes.shape)
        return full_work_of(gathered.transpose(1, 0, 2, 3).reshape(number, topology.world_size, -1), topology)

    def _alone(self, run: PlannedRun) -> Callable[[list[Array]], list[RankPlan]]:
        eas = self._selection(run)
        return lambda seeds: plan_all(run.partition, seeds, run.num_layers, self.hops, eas=eas)

    def _in_job(self, run: PlannedRun) -> Callable[[list[Array]], list[RankPlan]]:
        """Return what makes this rank's plan, as in training; collective."""
        topology, planner, eas = run.partition.topology, Planner(run.g), self._selection(run)

        def make(seeds: list[Array]) -> list[RankPlan]:
            own = seeds[topology.server]
            request = PlanRequest(
                # One rank of a server gives the seeds of all of it.
                seeds=own if topology.local_rank == 0 else own[:0],
                num_layers=run.num_layers,
                hops=self.hops,
                eas=eas,
                seeds_stay=self.cooperative_batches > 1,
                show_progress=False,
            )
            return [planner.plan(request)]

        return make

    def _selection(self, run: PlannedRun) -> Selection | None:
        if not self.limit:
            return None
        return eas_rule(EasOptions(hops=EAS_HOPS[self.limit], fanout=EAS_FANOUT), seed=run.partition.seed)

    def trials(self, run: PlannedRun) -> Iterator[list[Any]]:
        if run.partition.structure.is_whole:
            server = run.partition.topology.server if run.in_job else 0
            yield from plan_trials(run.partition, run.seeds, run.num_layers, server)

    def estimate(self, graph: GraphStats, cluster: Cluster, num_layers: int) -> FullWork:
        """Return the expected work; cooperative batches count as parts of one step."""
        hops, number = self.hops, self.cooperative_batches
        own, share = graph.nodes / cluster.servers, 1.0 / cluster.ranks_per_server
        needed = _needed(graph, num_layers)
        if self.limit:
            held = _expected_rows(graph, cluster, EAS_HOPS[self.limit], fanout=EAS_FANOUT)
            reach = [held[-1]] * num_layers + [own]
        else:
            held = _expected_rows(graph, cluster, hops, fanout=None)
            reach = [held[max(hops - at, 0)] for at in range(num_layers + 1)]
        rows = [all_rows * part for all_rows, part in zip(reach, needed, strict=True)]
        external = (reach[0] - own) * needed[0] if hops else 0.0
        outside, inside = [], []
        for layer, after in enumerate(rows[1:]):
            crossing = graph.border_rows(after * share, graph.edge_cut, graph.nodes - own)
            between = graph.border_rows(after * share, graph.cut_inside(cluster), reach[layer] * (1 - share))
            outside.append(round(crossing * cluster.ranks) if layer >= hops else 0)
            inside.append(round(between * cluster.ranks))
        sources = tuple(
            round(before * share) + (out + into) // cluster.ranks
            for before, out, into in zip(rows[:-1], outside, inside, strict=True)
        )
        edges = tuple(round(graph.mean_degree * after * share) for after in rows[1:])
        return FullWork(
            rows=tuple(round(before * share / number) for before in rows),
            sources=tuple(one // number for one in sources),
            edges=tuple(one // number for one in edges),
            worked=(sources, tuple(round(after * share) for after in rows[1:]), edges),
            pairs=HaloPairs(outside=tuple(outside), inside=tuple(inside)),
            card_rows=tuple(one // cluster.servers for one in outside),
            inside_rows=tuple(one // cluster.servers for one in inside),
            external_rows=round(external * cluster.servers),
            steps=number,
            counted=False,
            read_rows=round(rows[0] * share),
        )


def _needed(graph: GraphStats, num_layers: int) -> list[float]:
    # The fraction of nodes that training depends on, by level, input features first.
    found = [graph.train_nodes / graph.nodes]
    for _ in range(num_layers):
        reached = graph.distinct(found[0] * graph.edges, graph.nodes) / graph.nodes
        found.insert(0, found[0] + reached * (1.0 - found[0]))
    return found


def _expected_rows(graph: GraphStats, cluster: Cluster, hops: int, *, fanout: int | None) -> list[float]:
    # Rows within 0 to ``hops`` hops of a server's own nodes.
    own = graph.nodes / cluster.servers
    others, new, found = graph.nodes - own, own, [own]
    # Cut edges of own nodes lead to other servers, and all edges of other nodes but those that lead here.
    leaving = graph.edge_cut
    for _ in range(hops):
        crossing = graph.mean_degree * leaving
        drawn = new * (crossing if fanout is None else min(crossing, fanout))
        unmet = 1.0 - (found[-1] - own) / others if others else 0.0
        new = graph.distinct(drawn, others) * unmet
        found.append(found[-1] + new)
        leaving = 1.0 - graph.edge_cut / max(cluster.servers - 1, 1)
    return found


def sizes_of(plan: RankPlan, world_size: int) -> Array:
    """Return the (K,) int64 sizes of a plan, as :func:`full_work_of` reads them.

    (L + 1,) own rows of each level, (L,) sources and (L,) edges of each layer, feature rows that the server
    fetches from others, and (L, W) halo rows by the rank that holds them.
    """
    received = np.zeros((len(plan.layers), world_size), np.int64)
    for row, layer in zip(received, plan.layers, strict=True):
        for rank, count in layer.receive:
            row[rank] = count
    rows = [plan.layers[0].own_rows, *(layer.targets for layer in plan.layers)]
    sources = [layer.num_sources for layer in plan.layers]
    edges = [len(layer.indices) for layer in plan.layers]
    return np.concatenate([rows, sources, edges, [plan.external_nodes], received.reshape(-1)])


def full_work_of(sizes: Array, topology: Topology) -> FullWork:
    """Return the work of an epoch from the (R, W, K) int64 :func:`sizes_of` the plans of its steps."""
    world_size, num_servers = topology.world_size, topology.num_servers
    layers = (sizes.shape[2] - 2) // (3 + world_size)
    ends = np.cumsum([layers + 1, layers, layers, 1])
    rows, sources, edges, external, received = np.split(sizes, ends, axis=2)
    busiest = int(edges.sum(axis=(0, 2)).argmax())
    step, rank = divmod(int((edges.sum(axis=2) + rows.sum(axis=2)).argmax()), world_size)
    leaders = [topology.ranks_of_server(server)[0] for server in range(num_servers)]
    server = np.array(topology.server_of_rank)
    of_server, is_same = np.eye(num_servers, dtype=np.int64)[server], server[:, None] == server
    # (receiving rank, layer, sending rank) rows.
    halo = received.sum(axis=0).reshape(world_size, layers, world_size)
    between, within = halo * ~is_same[:, None], halo * is_same[:, None]
    came, left = between.sum(axis=2).T @ of_server, between.sum(axis=0) @ of_server
    inside = within.sum(axis=2).T @ of_server

    def numbers(counts: Array) -> tuple[int, ...]:
        return tuple(counts.tolist())

    return FullWork(
        rows=numbers(rows[step, rank]),
        sources=numbers(sources[step, rank]),
        edges=numbers(edges[step, rank]),
        worked=(
            numbers(sources[:, busiest].sum(axis=0)),
            numbers(rows[:, busiest, 1:].sum(axis=0)),
            numbers(edges[:, busiest].sum(axis=0)),
        ),
        pairs=HaloPairs(outside=numbers(came.sum(axis=1)), inside=numbers(inside.sum(axis=1))),
        card_rows=numbers(np.maximum(came, left).max(axis=1)),
        inside_rows=numbers(inside.max(axis=1)),
        external_rows=int(external[:, leaders].sum()),
        steps=len(sizes),
        read_rows=int(rows[:, busiest, 0].sum()),
    )


def plan_trials(
    context: PartitionContext, seeds: Array, num_layers: int, server: int = 0
) -> Iterator[list[HaloBlock]]:
    """Yield the blocks of all layers for parts of a server's training nodes, smallest first.

    With the size and wide ids of shared preloading on a server of one rank, and of cooperative batches;
    no row comes from another server. The structure must be whole here.
    """
    own_seeds = seeds_by_server(context, seeds)[server]
    own_seeds = own_seeds if len(own_seeds) else seeds
    if context.structure.num_edges * num_layers > _MOST_TRIED_EDGES:
        own_seeds = own_seeds[:: -(-len(own_seeds) // _FEW_SEEDS)]
    alone = PartitionContext(
        structure=context.structure,
        bounds=context.bounds[[0, -1]],
        topology=Topology(0, 1, (0,)),
        seed=context.seed,
    )
    for part in _TRIED_PARTS:
        (plan,) = plan_all(alone, [own_seeds[::part]], num_layers, num_layers)
        nodes, blocks = torch.from_numpy(plan.nodes), list[HaloBlock]()
        for depth, layer in enumerate(plan.layers):
            is_same = depth and layer is plan.layers[depth - 1]
            blocks.append(
                blocks[-1].fresh() if is_same else halo_block(layer, nodes, LocalExchange(0), etype=EDGE_TYPE)
            )
        yield blocks
