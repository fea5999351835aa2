"""Which rows caches of several sizes would hold on each server, chosen as ``g.cache_rows`` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dglx_dist.cluster.topology import Topology
from dglx_dist.graph.access import access_probability, most_wanted
from dglx_dist.graph.split import split_ids
from dglx_dist.planner.closure_plans import Ground
from dglx_dist.planner.survey import Draws
from dglx_dist.records import Array

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

_MOST_EDGES = 2_000_000_000
"""That are followed, over ranks and hops; beyond it no cache is counted."""


@dataclass(frozen=True, kw_only=True)
class CachedRows:
    """A cache of one size."""

    alpha: float
    """By the server's own nodes."""
    held: tuple[Array, ...]
    """(S,) masks (N,) bool."""


def rows_of_caches(
    g: DistGraph, ground: Ground, seeds: Array, draws: Draws, sizes: Sequence[float]
) -> list[CachedRows]:
    """Return what caches of ``sizes`` hold under policy ``vip``; none where one server has all.

    Args:
        g: Whose structure is whole here.
        ground: Of the run.
        seeds: (K,) int64 all training nodes.
        draws: Of the batches.
        sizes: By the server's own nodes.
    """
    topology = ground.topology
    work = g.num_edges() * len(draws.fanouts) * topology.world_size
    if topology.num_servers == 1 or not sizes or work > _MOST_EDGES:
        return []
    held: list[list[Array]] = [[] for _ in sizes]
    for server in range(topology.num_servers):
        scores = _scores(g, ground, seeds, draws, server)
        first, last = ground.own(server)
        for place, alpha in enumerate(sizes):
            mask = np.zeros(g.num_nodes(), np.bool_)
            mask[most_wanted(scores, (first, last), int(alpha * (last - first)))] = True
            held[place].append(mask)
    return [CachedRows(alpha=alpha, held=tuple(masks)) for alpha, masks in zip(sizes, held, strict=True)]


def _scores(g: DistGraph, ground: Ground, seeds: Array, draws: Draws, server: int) -> Array:
    """Return (N,) float64: how many of the server's ranks need each row for a step, on average."""
    etype, ntype = g.canonical_etypes[0], g.ntypes[0]
    total = np.zeros(g.num_nodes())
    fanouts = [{etype: fanout} for fanout in draws.fanouts]
    for rank in ground.topology.ranks_of_server(server):
        here = Topology(rank, ground.topology.world_size, ground.topology.server_of_rank)
        mine = split_ids(seeds, ground.bounds, here, force_even=draws.force_even)[: draws.most_seeds]
        shards, counts = {etype: g.structure(etype).shards[0]}, {ntype: g.num_nodes()}
        total += access_probability(shards, counts, {ntype: mine}, fanouts, draws.batch_size)[ntype]
    return total
