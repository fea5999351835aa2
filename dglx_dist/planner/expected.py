"""Estimates of mini-batches for hypothetical graphs and clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dglx_dist.planner.workload import EDGE_BYTES
from dglx_dist.strategies.cost import ID_BYTES, BatchWork, Cluster, Draws, GraphStats, Survey

ASSUMPTIONS = (
    "batches and closures are expected from the number of nodes and edges and the spread of degrees, as if "
    "neighbours were drawn independently; communities make them smaller",
    "partitions are even in nodes, edges and training nodes",
)


def batches(
    graph: GraphStats, cluster: Cluster, draws: Draws, *, gradient_bytes: int, partitioned: bool
) -> BatchWork:
    """Estimate an epoch; ``partitioned``: servers ask each other for in-edges."""
    seeds = graph.train_nodes / cluster.ranks
    steps = max(math.ceil(seeds / draws.batch_size), 1)
    (sources, targets, edges), remote = _batch(graph, cluster, min(draws.batch_size, seeds), draws.fanouts)
    every = cluster.ranks * steps
    sampling_bytes = every * remote * (ID_BYTES * sum(targets) + EDGE_BYTES * sum(edges))
    total = Survey(
        steps=steps,
        input_rows=round(every * sources[0]),
        remote_rows=round(every * sources[0] * remote),
        edges=round(every * sum(edges)),
        seeds_per_rank=[round(seeds)] * cluster.ranks,
        feature_bytes=round((ID_BYTES + graph.feature_bytes) * every * sources[0] * remote),
        sampling_bytes=round(sampling_bytes) if partitioned and cluster.servers > 1 else 0,
        label_bytes=0,
        gradient_bytes=2 * (cluster.ranks - 1) * gradient_bytes * steps,
        first_targets=round(every * targets[0]),
        first_edges=round(every * edges[0]),
        ranks_per_server=cluster.ranks_per_server,
    )
    return BatchWork(
        survey=total,
        worked=(_rounded(sources, steps), _rounded(targets, steps), _rounded(edges, steps)),
        largest=(_rounded(sources, 1), _rounded(targets, 1), _rounded(edges, 1)),
        card_share=1.0 / cluster.servers,
        counted=False,
    )


def _batch(
    graph: GraphStats, cluster: Cluster, seeds: float, fanouts: Sequence[int]
) -> tuple[tuple[list[float], list[float], list[float]], float]:
    """Return sources, targets and edges of a batch by layer, and the share of input rows of other servers."""
    sources: list[float] = []
    targets: list[float] = []
    edges: list[float] = []
    rows, remote, reached = seeds, 0.0, 0.0
    for hop, fanout in enumerate(reversed(fanouts)):
        # A node that is reached along an edge has more edges than average.
        degree = graph.mean_degree * (1.0 if hop == 0 else graph.degree_spread)
        each = degree if fanout < 0 else fanout * (1.0 - math.exp(-degree / max(fanout, 1)))
        drawn = rows * each
        found = graph.distinct(drawn, graph.nodes)
        new = min(found, graph.nodes - rows)
        remote += new * _remote_share(graph, cluster, hop + 1)
        reached += new
        targets.insert(0, rows)
        edges.insert(0, drawn)
        rows = min(rows + new, graph.nodes)
        sources.insert(0, rows)
    share = remote / max(reached + seeds, 1.0)
    return (sources, targets, edges), share


def _remote_share(graph: GraphStats, cluster: Cluster, hops: int) -> float:
    # The fraction of nodes ``hops`` hops away that another server owns: cut after cut.
    far = (cluster.servers - 1) / cluster.servers
    if not far:
        return 0.0
    return far * (1.0 - (1.0 - min(graph.edge_cut / far, 1.0)) ** hops)


def _rounded(values: Sequence[float], times: int) -> tuple[int, ...]:
    return tuple(round(times * value) for value in values)
