"""Sizes of the plans of a full-graph epoch: counted by one process or by all ranks, or estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.topology import Topology
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.records import EDGE_TYPE, Array
from dglx_dist.strategies.cost import (
    Cluster,
    GraphStats,
    LayerCounts,
    PartitionContext,
    PlannedRun,
    Work,
)
from dglx_dist.strategies.full_graph.expansion import (
    AUTO,
    EasOptions,
    EasSelector,
    HeldNeighborhood,
    KHopNeighborhood,
    NeighborhoodExpander,
    Selection,
    compose,
    split_rows,
)
from dglx_dist.strategies.full_graph.halo_block import HaloBlock, halo_block
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer
from dglx_dist.strategies.full_graph.plan_builder import Planner, PlanRequest, own_rows, read_layers

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
class RankLayers:
    """Plan sizes of one rank. JSON values."""

    rows: list[int]
    """(L + 1,) rows that it computes at each level, input features first."""
    sources: list[int]
    """(L,) input rows of each layer, own and halo."""
    edges: list[int]
    """(L,)."""
    received: list[dict[int, int]]
    """(L,) halo rows by the rank that holds them."""
    external_rows: int
    """Feature rows held by all ranks of its server that another server owns."""


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
        make = self._in_job(run) if run.in_job else self._alone(run)
        local = [[asdict(one) for one in make([piece[step] for piece in pieces])] for step in range(number)]
        gathered: Sequence[Any] = gather_json(local, run.g.session)
        steps = [
            [RankLayers(**one) for process in gathered for one in process[step]] for step in range(number)
        ]
        return full_work_of(steps, partition.topology)

    def _alone(self, run: PlannedRun) -> Callable[[list[Array]], list[RankLayers]]:
        eas = self._selection(run)
        return lambda seeds: plan_all(run.partition, seeds, run.num_layers, self.hops, eas=eas)

    def _in_job(self, run: PlannedRun) -> Callable[[list[Array]], list[RankLayers]]:
        """Return what makes this rank's plan, as in training; collective."""
        topology, planner, eas = run.partition.topology, Planner(run.g), self._selection(run)
        run.g.barrier()

        def make(seeds: list[Array]) -> list[RankLayers]:
            own = seeds[topology.server]
            made = planner.plan(
                PlanRequest(
                    # One rank of a server gives the seeds of all of it.
                    seeds=own if topology.local_rank == 0 else own[:0],
                    num_layers=run.num_layers,
                    hops=self.hops,
                    eas=eas,
                    seeds_stay=self.cooperative_batches > 1,
                    show_progress=False,
                )
            )
            return [_rank_layers(made.layers, made.external_nodes)]

        return make

    def _selection(self, run: PlannedRun) -> Selection | None:
        if not self.limit:
            return None
        limits, selector = EasOptions(hops=EAS_HOPS[self.limit], fanout=EAS_FANOUT), EasSelector(run.g)
        # A new rule for each call, because a rule keeps the nodes of one server.
        return lambda structure, own, seeds: selector.rule(limits, seed=run.partition.seed)(
            structure, own, seeds
        )

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


def full_work_of(steps: Sequence[Sequence[RankLayers]], topology: Topology) -> FullWork:
    """Return the work of an epoch from the plans of all (W,) ranks for each step."""
    worked = [_sum_of([step[rank] for step in steps]) for rank in range(topology.world_size)]
    busiest = max(range(len(worked)), key=lambda rank: sum(worked[rank][2]))
    largest = max((one for step in steps for one in step), key=lambda one: sum(one.edges) + sum(one.rows))
    outside, inside, cards, servers = _crossing(steps, topology)
    leaders = [topology.ranks_of_server(server)[0] for server in range(topology.num_servers)]
    return FullWork(
        rows=tuple(largest.rows),
        sources=tuple(largest.sources),
        edges=tuple(largest.edges),
        worked=worked[busiest],
        pairs=HaloPairs(outside=outside, inside=inside),
        card_rows=cards,
        inside_rows=servers,
        external_rows=sum(step[leader].external_rows for step in steps for leader in leaders),
        steps=len(steps),
        read_rows=sum(step[busiest].rows[0] for step in steps),
    )


def _sum_of(plans: Sequence[RankLayers]) -> LayerCounts:
    def total(counts: list[list[int]]) -> tuple[int, ...]:
        return tuple(sum(layer) for layer in zip(*counts, strict=True))

    return (
        total([one.sources for one in plans]),
        total([one.rows[1:] for one in plans]),
        total([one.edges for one in plans]),
    )


def _crossing(
    steps: Sequence[Sequence[RankLayers]], topology: Topology
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return (L,) rows between servers, within servers, of the busiest card, within the busiest server."""
    num_layers = len(steps[0][0].edges)
    came = np.zeros((num_layers, topology.num_servers), np.int64)
    left, inside = came.copy(), came.copy()
    for plans in steps:
        for rank, plan in enumerate(plans):
            server = topology.server_of_rank[rank]
            for layer, received in enumerate(plan.received):
                for other, count in received.items():
                    # Keys of JSON objects are strings.
                    holder = topology.server_of_rank[int(other)]
                    if holder == server:
                        inside[layer, server] += count
                    else:
                        came[layer, server] += count
                        left[layer, holder] += count
    busiest = np.maximum(came, left).max(axis=1)
    return (
        tuple(came.sum(axis=1).tolist()),
        tuple(inside.sum(axis=1).tolist()),
        tuple(busiest.tolist()),
        tuple(inside.max(axis=1).tolist()),
    )


def seeds_by_server(context: PartitionContext, seeds: Array) -> list[Array]:
    """Split the (K,) ascending int64 ``seeds`` by the server that owns them."""
    return np.split(seeds, np.searchsorted(seeds, context.bounds[1:-1]))


def plan_all(
    context: PartitionContext,
    seeds: Sequence[Array],
    num_layers: int,
    hops: int,
    *,
    eas: Selection | None = None,
) -> list[RankLayers]:
    """Return the plan sizes of all W ranks (docs/strategies/shared_preload.md).

    Args:
        context: Graph and ranks; the structure is whole here.
        seeds: (S,) output nodes of each server, ascending ids of its own.
        num_layers: L.
        hops: k: layers that a server computes without others.
        eas: Nodes that a server may use; only with ``hops`` equal to L.
    """
    held = [
        _held(context, server, closure, hops)
        for server, closure in enumerate(_expand(context, seeds, num_layers, hops, eas))
    ]
    holder_of = _holders(context, held, hops)
    plans = []
    for rank in range(context.topology.world_size):
        server = context.topology.server_of_rank[rank]
        rows, inner = own_rows(held[server], rank), context.own_range(server)
        layers = read_layers(rows, held[server], hops, inner, rank, lambda ids: holder_of[ids])
        nodes = held[server].closure.nodes
        plans.append(_rank_layers(layers, int(np.count_nonzero((nodes < inner[0]) | (nodes >= inner[1])))))
    return plans


def _rank_layers(layers: Sequence[HaloLayer], external_rows: int) -> RankLayers:
    return RankLayers(
        rows=[layers[0].own_rows, *(layer.targets for layer in layers)],
        sources=[layer.num_sources for layer in layers],
        edges=[len(layer.indices) for layer in layers],
        received=[dict(layer.receive) for layer in layers],
        external_rows=external_rows,
    )


def _expand(
    context: PartitionContext, seeds: Sequence[Array], num_layers: int, hops: int, eas: Selection | None
) -> list[KHopNeighborhood]:
    # The rows of every server, level by level, as server leaders grow them in training.
    servers = range(context.topology.num_servers)
    allowed = [
        None
        if eas is None
        else np.union1d(eas(context.structure, context.own_range(server), own_seeds), own_seeds)
        for server, own_seeds in enumerate(seeds)
    ]
    expanders = [
        NeighborhoodExpander(context.structure, seeds[server], allowed[server]) for server in servers
    ]
    reached = [np.empty(0, np.int64) for _ in servers]
    for level in range(num_layers - 1, -1, -1):
        sources = [expander.sources() for expander in expanders]
        reached = [np.union1d(before, found) for before, found in zip(reached, sources, strict=True)]
        for server, expander in enumerate(expanders):
            expander.add(
                _own_sources(sources, context.own_range(server)) if level >= hops else reached[server]
            )
    return [expander.finish() for expander in expanders]


def _own_sources(sources: Sequence[Array], own: tuple[int, int]) -> Array:
    # Nodes of one server that any server reads.
    return np.unique(np.concatenate([ids[slice(*np.searchsorted(ids, own))] for ids in sources]))


def _held(context: PartitionContext, server: int, closure: KHopNeighborhood, hops: int) -> HeldNeighborhood:
    members = context.topology.ranks_of_server(server)
    if hops == 0:
        holders = RowOwners(context.bounds, context.topology).rank_of(closure.nodes).astype(np.int32)
    else:
        split = split_rows(closure, len(members), AUTO, context.seed)
        holders = split.astype(np.int32) + np.int32(members[0])
    return HeldNeighborhood(closure=closure, holders=holders)


def _holders(context: PartitionContext, held: Sequence[HeldNeighborhood], hops: int) -> Array:
    """Return (N,) int64: the rank that computes each node for other servers."""
    num_nodes = int(context.bounds[-1])
    if hops == 0:
        return RowOwners(context.bounds, context.topology).rank_of(np.arange(num_nodes))
    found = np.full(num_nodes, -1, np.int64)
    for server, one in enumerate(held):
        first, last = context.own_range(server)
        nodes = one.closure.nodes
        is_own = (nodes >= first) & (nodes < last)
        found[nodes[is_own]] = one.holders[is_own]
    return found


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
    for part in _TRIED_PARTS:
        yield _plan_blocks(context, own_seeds[::part], num_layers, server)


def _plan_blocks(context: PartitionContext, seeds: Array, num_layers: int, server: int) -> list[HaloBlock]:
    expander = NeighborhoodExpander(context.structure, seeds)
    for _ in range(num_layers):
        expander.add(expander.sources())
    closure = expander.finish()
    held = HeldNeighborhood(closure=closure, holders=np.zeros(len(closure.nodes), np.int32))
    own = own_rows(held, 0)
    layers = read_layers(own, held, num_layers, context.own_range(server), 0, np.zeros_like)
    nodes = torch.from_numpy(own.nodes)
    blocks: list[HaloBlock] = []
    for depth, layer in enumerate(layers):
        is_same = depth and layer is layers[depth - 1]
        blocks.append(
            blocks[-1].fresh() if is_same else halo_block(layer, nodes, _NoPeers(), etype=EDGE_TYPE)
        )
    return blocks


class _NoPeers:
    """Exchange of a rank that needs no remote rows."""

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return ``h``."""
        return h
