"""Work and halo rows of full-graph training, counted from the partitioned graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dglx_dist.comm.topology import Topology
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.structure import Structure
from dglx_dist.planner.model_shape import HaloPairs
from dglx_dist.planner.records import FullGraphScheme
from dglx_dist.records import Array
from dglx_dist.strategies.full_graph.expansion import (
    AUTO,
    HeldNeighborhood,
    KHopNeighborhood,
    NeighborhoodExpander,
    Selection,
    split_rows,
)
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer
from dglx_dist.strategies.full_graph.plan_builder import own_rows, read_layers

_MOST_EDGES = 200_000_000
"""Largest plans to build, over layers and cooperative batches: about a second for each million edges."""


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
    server_rows: int
    """Feature rows held by all ranks of its server."""
    external_rows: int
    """Of these, rows that another server owns."""


@dataclass(frozen=True, kw_only=True)
class FullWork:
    """Work of one full-graph epoch."""

    rows: tuple[int, ...]
    """(L + 1,) of the largest step of any rank."""
    sources: tuple[int, ...]
    """(L,) of that step."""
    edges: tuple[int, ...]
    """(L,) of that step."""
    worked: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """(L,) sources, targets and edges of the busiest rank, over all steps."""
    pairs: HaloPairs
    """Exchanged rows of all ranks and steps."""
    card_rows: tuple[int, ...]
    """(L,) rows through the busiest network card, in or out, whichever is more."""
    inside_rows: tuple[int, ...]
    """(L,) rows between the ranks of the busiest server."""
    external_rows: int
    """Feature rows preloaded from other servers, of all servers and steps."""
    most_external_rows: int
    """Maximum over the servers."""
    steps: int = 1
    counted: bool = True
    read_rows: int = 0
    """Feature rows of the busiest rank over all steps; cooperative batches read them in each epoch."""


def worth_counting(edges: int, num_layers: int, scheme: FullGraphScheme) -> bool:
    """Return True if the plans of ``scheme`` can be built in minutes; otherwise they are estimated."""
    return edges * num_layers * scheme.cooperative_batches <= _MOST_EDGES


def full_work_of(steps: Sequence[Sequence[RankLayers]], topology: Topology) -> FullWork:
    """Return the work of an epoch from the plans of all (W,) ranks for each step."""
    worked = [_sum_of([step[rank] for step in steps]) for rank in range(topology.world_size)]
    busiest = max(range(len(worked)), key=lambda rank: int(worked[rank][2].sum()))
    largest = max((one for step in steps for one in step), key=lambda one: sum(one.edges) + sum(one.rows))
    outside, inside, cards, servers = _crossing(steps, topology)
    external = np.array(
        [
            sum(step[topology.ranks_of_server(server)[0]].external_rows for step in steps)
            for server in range(topology.num_servers)
        ]
    )
    sources, targets, edges = worked[busiest]
    return FullWork(
        rows=tuple(largest.rows),
        sources=tuple(largest.sources),
        edges=tuple(largest.edges),
        worked=(tuple(sources.tolist()), tuple(targets.tolist()), tuple(edges.tolist())),
        pairs=HaloPairs(outside=outside, inside=inside),
        card_rows=cards,
        inside_rows=servers,
        external_rows=int(external.sum()),
        most_external_rows=int(external.max()),
        steps=len(steps),
        read_rows=sum(step[busiest].rows[0] for step in steps),
    )


def _sum_of(plans: Sequence[RankLayers]) -> tuple[Array, Array, Array]:
    return (
        np.array([one.sources for one in plans]).sum(axis=0),
        np.array([one.rows[1:] for one in plans]).sum(axis=0),
        np.array([one.edges for one in plans]).sum(axis=0),
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
                    if topology.server_of_rank[int(other)] == server:
                        inside[layer, server] += count
                    else:
                        came[layer, server] += count
                        left[layer, topology.server_of_rank[int(other)]] += count
    busiest = np.maximum(came, left).max(axis=1)
    return (
        tuple(came.sum(axis=1).tolist()),
        tuple(inside.sum(axis=1).tolist()),
        tuple(busiest.tolist()),
        tuple(inside.max(axis=1).tolist()),
    )


@dataclass(frozen=True, kw_only=True)
class PartitionContext:
    """Graph, partition and ranks that all plans of a run share."""

    structure: Structure
    bounds: Array
    """(S + 1,) int64 first node of each server."""
    topology: Topology
    """Of any rank of the run."""
    seed: int

    def own_range(self, server: int) -> tuple[int, int]:
        """Return the first node of ``server`` and the one after its last."""
        return int(self.bounds[server]), int(self.bounds[server + 1])


def seeds_by_server(context: PartitionContext, seeds: Array) -> list[Array]:
    """Split the (K,) ascending int64 ``seeds`` by the server that owns them."""
    return [
        seeds[first:last]
        for first, last in zip(
            np.searchsorted(seeds, context.bounds[:-1]),
            np.searchsorted(seeds, context.bounds[1:]),
            strict=True,
        )
    ]


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
        context: Graph and ranks.
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
        external = int(np.count_nonzero((nodes < inner[0]) | (nodes >= inner[1])))
        plans.append(rank_layers(layers, len(nodes), external))
    return plans


def rank_layers(layers: Sequence[HaloLayer], server_rows: int, external_rows: int) -> RankLayers:
    return RankLayers(
        rows=[layers[0].own_rows, *(layer.targets for layer in layers)],
        sources=[layer.num_sources for layer in layers],
        edges=[len(layer.indices) for layer in layers],
        received=[dict(layer.receive) for layer in layers],
        server_rows=server_rows,
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
