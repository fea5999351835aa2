"""The plans of full-graph training for all ranks, made by one process from the same rules as by the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dglx_dist.cluster.topology import Topology
from dglx_dist.graph.owners import RowOwners
from dglx_dist.graph.structure import Structure
from dglx_dist.planner.full_work import RankLayers
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.closure import Closure, Grower, Selection
from dglx_dist.strategies.granndis.own_rows import own_rows, read_layers
from dglx_dist.strategies.granndis.plan import HaloLayer
from dglx_dist.strategies.granndis.shared_closure import HeldClosure
from dglx_dist.strategies.granndis.split import AUTO, split_rows


@dataclass(frozen=True, kw_only=True)
class Ground:
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


def seeds_by_server(ground: Ground, seeds: Array) -> list[Array]:
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
    ground: Ground, seeds: Sequence[Array], num_layers: int, hops: int, *, eas: Selection | None = None
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
    ground: Ground, seeds: Sequence[Array], num_layers: int, hops: int, eas: Selection | None
) -> list[Closure]:
    """Return the rows of every server, level by level, as ``levels.grow_levels`` does on heads."""
    servers = range(ground.topology.num_servers)
    allowed = [
        None if eas is None else np.union1d(eas(ground.structure, ground.own(server), mine), mine)
        for server, mine in enumerate(seeds)
    ]
    growers = [Grower(ground.structure, seeds[server], allowed[server]) for server in servers]
    met = [np.empty(0, np.int64) for _ in servers]
    for level in range(num_layers - 1, -1, -1):
        sources = [grower.sources() for grower in growers]
        met = [np.union1d(before, found) for before, found in zip(met, sources, strict=True)]
        for server, grower in enumerate(growers):
            grower.add(_wanted(sources, ground.own(server)) if level >= hops else met[server])
    return [grower.finish() for grower in growers]


def _wanted(sources: Sequence[Array], own: tuple[int, int]) -> Array:
    """Return those nodes of one server that any server reads."""
    return np.unique(np.concatenate([ids[slice(*np.searchsorted(ids, own))] for ids in sources]))


def _held(ground: Ground, server: int, closure: Closure, hops: int) -> HeldClosure:
    members = ground.topology.ranks_of_server(server)
    if hops == 0:
        holders = RowOwners(ground.bounds, ground.topology).rank_of(closure.nodes).astype(np.int32)
    else:
        split = split_rows(closure, len(members), AUTO, ground.seed)
        holders = split.astype(np.int32) + np.int32(members[0])
    return HeldClosure(closure=closure, holders=holders)


def _holders(ground: Ground, held: Sequence[HeldClosure], hops: int) -> Array:
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
