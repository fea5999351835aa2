"""What an epoch of whole graphs comes to, in one way of training: the record, from the plans of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dglx_dist.cluster.topology import Topology
from dglx_dist.planner.halo_bytes import HaloPairs
from dglx_dist.planner.records import Way
from dglx_dist.records import Array

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
