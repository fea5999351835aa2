"""Work and foreign rows of every way to train on whole neighbourhoods, counted from the partitioned graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from dglx_dist.comm.topology import Topology
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.structure import Structure
from dglx_dist.planner.model_shape import HaloPairs
from dglx_dist.planner.records import Way
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
"""That plans may have, over layers and co-batches: making them takes about a second for each million."""


@dataclass(frozen=True, kw_only=True)
class RankLayers:
    """The plan of one rank in numbers. JSON values."""

    rows: list[int]
    """(L + 1,) rows of each level that it computes, the features' first."""
    sources: list[int]
    """(L,) rows that go into each layer, its own and the halo."""
    edges: list[int]
    """(L,)."""
    received: list[dict[int, int]]
    """(L,) rows of the halo by the rank that holds them."""
    server_rows: int
    """Feature rows that the ranks of its server hold together."""
    external_rows: int
    """Of them, those that another server owns."""


@dataclass(frozen=True, kw_only=True)
class FullWork:
    """One epoch."""

    rows: tuple[int, ...]
    """(L + 1,) of the rank with most work; of the largest step."""
    sources: tuple[int, ...]
    """(L,) of that rank and step."""
    edges: tuple[int, ...]
    """(L,) of that rank and step."""
    worked: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """(L,) sources, targets and edges of the rank with most work, over all steps of the epoch."""
    pairs: HaloPairs
    """Rows that cross, of all ranks and steps."""
    card_rows: tuple[int, ...]
    """(L,) rows through the busiest card, in or out, whichever is more."""
    inside_rows: tuple[int, ...]
    """(L,) rows between the ranks of the busiest server."""
    external_rows: int
    """Feature rows that are preloaded from other servers, of all servers and steps."""
    most_external_rows: int
    """Of one server."""
    steps: int = 1
    counted: bool = True
    read_rows: int = 0
    """Feature rows that the rank with most work holds, over all steps: of co-batches, read in each epoch."""

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.sources)


def worth_counting(edges: int, num_layers: int, way: Way) -> bool:
    """Return whether the plans of ``way`` can be made in minutes; else they are expected from figures."""
    _, _, number = way
    return edges * num_layers * number <= _MOST_EDGES


def gathered(steps: Sequence[Sequence[RankLayers]], topology: Topology) -> FullWork:
    """Return what ``steps`` of an epoch come to, each with the plans of all (W,) ranks."""
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
    """Return (L,) rows between servers, rows inside, rows through the busiest card and inside the busiest."""
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
    """What all plans of a run share."""

    structure: Structure
    """Of the whole graph."""
    bounds: Array
    """(S + 1,) int64 first node of each server."""
    topology: Topology
    """Of any rank of the run."""
    seed: int
    """Of the run."""

    def own(self, server: int) -> tuple[int, int]:
        """Return the first node of ``server`` and the one after its last."""
        return int(self.bounds[server]), int(self.bounds[server + 1])


def seeds_by_server(ground: PartitionContext, seeds: Array) -> list[Array]:
    """Cut the (K,) ascending int64 ``seeds`` by the server that owns them."""
    return [
        seeds[first:last]
        for first, last in zip(
            np.searchsorted(seeds, ground.bounds[:-1]),
            np.searchsorted(seeds, ground.bounds[1:]),
            strict=True,
        )
    ]


def plan_all(
    ground: PartitionContext,
    seeds: Sequence[Array],
    num_layers: int,
    hops: int,
    *,
    eas: Selection | None = None,
) -> list[RankLayers]:
    """Return the plan of each of the W ranks in numbers (algorithms 3.1 to 3.3).

    Args:
        ground: Graph and ranks.
        seeds: (S,) what each server computes of the output, ascending ids of its own.
        num_layers: L.
        hops: k: layers that a server computes without others.
        eas: Which nodes a server may use; only with ``hops`` equal to L.
    """
    held = [
        _held(ground, server, closure, hops)
        for server, closure in enumerate(_grown(ground, seeds, num_layers, hops, eas))
    ]
    holder_of = _holders(ground, held, hops)
    plans = []
    for rank in range(ground.topology.world_size):
        server = ground.topology.server_of_rank[rank]
        mine, inner = own_rows(held[server], rank), ground.own(server)
        layers = read_layers(mine, held[server], hops, inner, rank, lambda ids: holder_of[ids])
        nodes = held[server].closure.nodes
        external = int(np.count_nonzero((nodes < inner[0]) | (nodes >= inner[1])))
        plans.append(in_numbers(layers, len(nodes), external))
    return plans


def in_numbers(layers: Sequence[HaloLayer], server_rows: int, external_rows: int) -> RankLayers:
    """Return what counts of a rank's plan."""
    return RankLayers(
        rows=[layers[0].own_rows, *(layer.targets for layer in layers)],
        sources=[layer.num_sources for layer in layers],
        edges=[len(layer.indices) for layer in layers],
        received=[dict(layer.receive) for layer in layers],
        server_rows=server_rows,
        external_rows=external_rows,
    )


def _grown(
    ground: PartitionContext, seeds: Sequence[Array], num_layers: int, hops: int, eas: Selection | None
) -> list[KHopNeighborhood]:
    """Return the rows of every server, level by level, as ``levels.grow_levels`` does on heads."""
    servers = range(ground.topology.num_servers)
    allowed = [
        None if eas is None else np.union1d(eas(ground.structure, ground.own(server), mine), mine)
        for server, mine in enumerate(seeds)
    ]
    growers = [NeighborhoodExpander(ground.structure, seeds[server], allowed[server]) for server in servers]
    met = [np.empty(0, np.int64) for _ in servers]
    for level in range(num_layers - 1, -1, -1):
        sources = [expander.sources() for expander in growers]
        met = [np.union1d(before, found) for before, found in zip(met, sources, strict=True)]
        for server, expander in enumerate(growers):
            expander.add(_wanted(sources, ground.own(server)) if level >= hops else met[server])
    return [expander.finish() for expander in growers]


def _wanted(sources: Sequence[Array], own: tuple[int, int]) -> Array:
    """Return those nodes of one server that any server reads."""
    return np.unique(np.concatenate([ids[slice(*np.searchsorted(ids, own))] for ids in sources]))


def _held(ground: PartitionContext, server: int, closure: KHopNeighborhood, hops: int) -> HeldNeighborhood:
    members = ground.topology.ranks_of_server(server)
    if hops == 0:
        holders = RowOwners(ground.bounds, ground.topology).rank_of(closure.nodes).astype(np.int32)
    else:
        split = split_rows(closure, len(members), AUTO, ground.seed)
        holders = split.astype(np.int32) + np.int32(members[0])
    return HeldNeighborhood(closure=closure, holders=holders)


def _holders(ground: PartitionContext, held: Sequence[HeldNeighborhood], hops: int) -> Array:
    """Return (N,) int64: the rank that computes each node for other servers."""
    num_nodes = int(ground.bounds[-1])
    if hops == 0:
        return RowOwners(ground.bounds, ground.topology).rank_of(np.arange(num_nodes))
    found = np.full(num_nodes, -1, np.int64)
    for server, one in enumerate(held):
        first, last = ground.own(server)
        nodes = one.closure.nodes
        mine = (nodes >= first) & (nodes < last)
        found[nodes[mine]] = one.holders[mine]
    return found


@dataclass(frozen=True, kw_only=True)
class ServerWork:
    """What every server does in an epoch, S servers."""

    edges: tuple[int, ...]
    """(S,) edges that it aggregates, in all layers."""
    foreign: tuple[int, ...]
    """(S,) rows of the features that it needs and another server owns, counted for each step."""

    def kappa(self, base: ServerWork) -> float:
        """Return the edges of the server that has most, by those of ``base``: who is last decides."""
        return max(self.edges) / max(*base.edges, 1)


def exchanging_work(indptr: Array, indices: Array, bounds: Array, seeds: Array, layers: int) -> ServerWork:
    """Return the work of servers that compute their own nodes only, and fetch all others' rows in each layer.

    Args:
        indptr: (N + 1,) of the in-edges.
        indices: (E,) their sources.
        bounds: (S + 1,) first node of each server.
        seeds: (n,) ids of all training nodes.
        layers: L.
    """
    needed = _mask(len(indptr) - 1, seeds)
    degrees, edges = np.diff(indptr), np.zeros(len(bounds) - 1, np.int64)
    for _ in range(layers):
        work = np.where(needed, degrees, 0)
        edges += [work[first:last].sum() for first, last in _ranges(bounds)]
        needed = _with_sources(indptr, indices, needed)
    return ServerWork(edges=tuple(edges.tolist()), foreign=(0,) * len(edges))


def preloading_work(
    indptr: Array,
    indices: Array,
    bounds: Array,
    batches: Sequence[Sequence[Array]],
    layers: int,
    *,
    hops: int | None = None,
) -> ServerWork:
    """Return the work of servers that hold the neighbourhood of what they train on (algorithms 3.1, 3.3).

    Args:
        indptr: (N + 1,) of the in-edges.
        indices: (E,) their sources.
        bounds: (S + 1,) first node of each server.
        batches: By server, the (n,) ids of its training nodes of each step.
        layers: L.
        hops: How far from its own nodes a server takes others; None: as far as ``layers`` reach. What a
            fan-out would leave out is counted.
    """
    edges, foreign = np.zeros(len(batches), np.int64), np.zeros(len(batches), np.int64)
    for server, (first, last) in enumerate(_ranges(bounds)):
        allowed = _mask(len(indptr) - 1, np.arange(first, last))
        for _ in range(layers if hops is None else hops):
            allowed = _with_sources(indptr, indices, allowed)
        degrees = _degrees(indptr, indices, allowed)
        for seeds in batches[server]:
            needed = _mask(len(degrees), seeds)
            for _ in range(layers):
                edges[server] += degrees[needed].sum()
                needed = _with_sources(indptr, indices, needed) & allowed
            foreign[server] += needed.sum() - needed[first:last].sum()
    return ServerWork(edges=tuple(edges.tolist()), foreign=tuple(foreign.tolist()))


def _ranges(bounds: Array) -> list[tuple[int, int]]:
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


def _mask(num_nodes: int, ids: Array) -> Array:
    found = np.zeros(num_nodes, np.bool_)
    found[ids] = True
    return found


@njit(cache=True, nogil=True)
def _with_sources(indptr: Array, indices: Array, nodes: Array) -> Array:
    """Return the (N,) mask of ``nodes`` and of the sources of all their in-edges."""
    found = nodes.copy()
    for node in range(len(nodes)):
        if nodes[node]:
            for edge in range(indptr[node], indptr[node + 1]):
                found[indices[edge]] = True
    return found


@njit(cache=True, nogil=True)
def _degrees(indptr: Array, indices: Array, sources: Array) -> Array:
    """Return the (N,) numbers of in-edges that come from the (N,) mask ``sources``."""
    found = np.zeros(len(indptr) - 1, np.int64)
    for node in range(len(found)):
        for edge in range(indptr[node], indptr[node + 1]):
            found[node] += sources[indices[edge]]
    return found
