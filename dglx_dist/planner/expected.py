"""Estimates of batches, plans and ghosts for hypothetical graphs and clusters.

A frontier with e drawn in-edges that lead to N nodes reaches about N' (1 - exp(-e / N')) distinct sources,
where N' is N divided by the root of the degrees' spread, because popular nodes are drawn repeatedly. Shared
neighbours within communities are ignored, so rows are rather over- than underestimated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dglx_dist.planner.candidates import EAS_FANOUT, EAS_HOPS
from dglx_dist.planner.closures import FullWork
from dglx_dist.planner.cost_model import Ghosts
from dglx_dist.planner.model_shape import HaloPairs
from dglx_dist.planner.records import Cluster, FullGraphScheme, GraphStats
from dglx_dist.planner.workload import BatchWork, Draws, Survey

ASSUMPTIONS = (
    "batches and closures are expected from the number of nodes and edges and the spread of degrees, as if "
    "neighbours were drawn independently; communities make them smaller",
    "partitions are even in nodes, edges and training nodes",
)
_ID_BYTES, _EDGE_BYTES = 8, 24


@dataclass(frozen=True, kw_only=True)
class _Levels:
    """Rows and edges of one batch by layer, input-most first."""

    sources: tuple[float, ...]
    targets: tuple[float, ...]
    edges: tuple[float, ...]
    remote: float
    """Fraction of the input rows that another server owns."""


def batches(
    graph: GraphStats, cluster: Cluster, draws: Draws, *, gradient_bytes: int, partitioned: bool
) -> BatchWork:
    """Estimate an epoch of mini-batches.

    Args:
        graph: Its statistics.
        cluster: Servers and ranks.
        draws: Fan-outs and batch size.
        gradient_bytes: Of a step.
        partitioned: Whether servers ask each other for in-edges.
    """
    seeds = graph.train_nodes / cluster.ranks
    steps = max(math.ceil(seeds / draws.batch_size), 1)
    one = _batch(graph, cluster, min(draws.batch_size, seeds), draws.fanouts)
    every = cluster.ranks * steps
    sampling_bytes = every * one.remote * (_ID_BYTES * sum(one.targets) + _EDGE_BYTES * sum(one.edges))
    total = Survey(
        steps=steps,
        input_rows=round(every * one.sources[0]),
        remote_rows=round(every * one.sources[0] * one.remote),
        edges=round(every * sum(one.edges)),
        seeds_per_rank=[round(seeds)] * cluster.ranks,
        feature_bytes=round((_ID_BYTES + graph.feature_bytes) * every * one.sources[0] * one.remote),
        sampling_bytes=round(sampling_bytes) if partitioned and cluster.servers > 1 else 0,
        label_bytes=0,
        gradient_bytes=2 * (cluster.ranks - 1) * gradient_bytes * steps,
        first_targets=round(every * one.targets[0]),
        first_edges=round(every * one.edges[0]),
        ranks_per_server=cluster.ranks_per_server,
    )
    return BatchWork(
        survey=total,
        worked=(_rounded(one.sources, steps), _rounded(one.targets, steps), _rounded(one.edges, steps)),
        first=(total.input_rows, total.first_targets, total.first_edges),
        largest=(_rounded(one.sources, 1), _rounded(one.targets, 1), _rounded(one.edges, 1)),
        card_share=1.0 / cluster.servers,
        counted=False,
    )


def closures(graph: GraphStats, cluster: Cluster, scheme: FullGraphScheme, num_layers: int) -> FullWork:
    """Estimate a full-graph epoch; cooperative batches count as parts of one step."""
    hops, limit, number = scheme
    own, share = graph.nodes / cluster.servers, 1.0 / cluster.ranks_per_server
    needed = _needed(graph, num_layers)
    held = _expand(graph, cluster, EAS_HOPS[limit] if limit else hops, fanout=EAS_FANOUT if limit else None)
    reach = (
        [held[-1]] * num_layers + [own]
        if limit
        else [held[max(hops - at, 0)] for at in range(num_layers + 1)]
    )
    rows = [all_rows * part for all_rows, part in zip(reach, needed, strict=True)]
    external = (reach[0] - own) * needed[0] if hops else 0.0
    edges = [graph.mean_degree * after * share for after in rows[1:]]
    outside, inside = [], []
    for layer, after in enumerate(rows[1:]):
        pairs = (
            _border_rows(graph, after * share, graph.edge_cut, graph.nodes - own) if layer >= hops else 0.0
        )
        between = _border_rows(
            graph, after * share, _cut_inside(cluster, graph), reach[layer] * (1.0 - share)
        )
        outside.append(round(pairs * cluster.ranks))
        inside.append(round(between * cluster.ranks))
    targets = tuple(round(after * share) for after in rows[1:])
    sources = tuple(
        round(before * share) + (out + into) // cluster.ranks
        for before, out, into in zip(rows[:-1], outside, inside, strict=True)
    )
    counted = tuple(round(one) for one in edges)
    return FullWork(
        rows=tuple(round(before * share / number) for before in rows),
        sources=tuple(one // number for one in sources),
        edges=tuple(one // number for one in counted),
        worked=(sources, targets, counted),
        pairs=HaloPairs(outside=tuple(outside), inside=tuple(inside)),
        card_rows=tuple(one // cluster.servers for one in outside),
        inside_rows=tuple(one // cluster.servers for one in inside),
        external_rows=round(external * cluster.servers),
        most_external_rows=round(external),
        steps=number,
        counted=False,
        read_rows=round(rows[0] * share),
    )


def plan_assumptions(whole: Mapping[FullGraphScheme, FullWork]) -> tuple[str, ...]:
    """Return the assumption for graphs whose plans are too large to be built."""
    if all(work.counted for work in whole.values()):
        return ()
    return (f"plans of whole graphs are too large to be counted: {ASSUMPTIONS[0]}",)


def ghosts(graph: GraphStats, cluster: Cluster) -> Ghosts:
    """Estimate the pairs of a node and another rank that reads it."""
    rows, own = graph.nodes / cluster.ranks, graph.nodes / cluster.servers
    outside = _border_rows(graph, rows, graph.edge_cut, graph.nodes - own) * cluster.ranks
    inside = _border_rows(graph, rows, _cut_inside(cluster, graph), own - rows) * cluster.ranks
    return Ghosts(outside=round(outside), inside=round(inside), counted=False)


def _batch(graph: GraphStats, cluster: Cluster, seeds: float, fanouts: Sequence[int]) -> _Levels:
    sources: list[float] = []
    targets: list[float] = []
    edges: list[float] = []
    rows, remote, reached = seeds, 0.0, 0.0
    for hop, fanout in enumerate(reversed(fanouts)):
        # A node that is reached along an edge has more edges than average.
        degree = graph.mean_degree * (1.0 if hop == 0 else graph.degree_spread)
        each = degree if fanout < 0 else fanout * (1.0 - math.exp(-degree / max(fanout, 1)))
        drawn = rows * each
        found = _distinct(graph, drawn, graph.nodes)
        new = min(found, graph.nodes - rows)
        remote += new * _remote_share(graph, cluster, hop + 1)
        reached += new
        targets.insert(0, rows)
        edges.insert(0, drawn)
        rows = min(rows + new, graph.nodes)
        sources.insert(0, rows)
    share = remote / max(reached + seeds, 1.0)
    return _Levels(sources=tuple(sources), targets=tuple(targets), edges=tuple(edges), remote=share)


def _needed(graph: GraphStats, num_layers: int) -> list[float]:
    # The fraction of nodes that training depends on, by level, input features first.
    found = [graph.train_nodes / graph.nodes]
    for _ in range(num_layers):
        reached = _distinct(graph, found[0] * graph.edges, graph.nodes) / graph.nodes
        found.insert(0, found[0] + reached * (1.0 - found[0]))
    return found


def _expand(graph: GraphStats, cluster: Cluster, hops: int, *, fanout: int | None) -> list[float]:
    # Rows within 0 to ``hops`` hops of a server's own nodes.
    own = graph.nodes / cluster.servers
    others, new, found = graph.nodes - own, own, [own]
    # Cut edges of own nodes lead to other servers, and all edges of other nodes but those that lead here.
    leaving = graph.edge_cut
    for _ in range(hops):
        crossing = graph.mean_degree * leaving
        drawn = new * (crossing if fanout is None else min(crossing, fanout))
        unmet = 1.0 - (found[-1] - own) / others if others else 0.0
        new = _distinct(graph, drawn, others) * unmet
        found.append(found[-1] + new)
        leaving = 1.0 - graph.edge_cut / max(cluster.servers - 1, 1)
    return found


def _border_rows(graph: GraphStats, rows: float, cut: float, others: float) -> float:
    # Distinct sources of ``rows`` among ``others``, from which the fraction ``cut`` of their edges comes.
    return _distinct(graph, rows * graph.mean_degree * cut, others)


def _distinct(graph: GraphStats, drawn: float, nodes: float) -> float:
    popular = nodes / max(graph.degree_spread, 1.0) ** 0.5
    return popular * -math.expm1(-drawn / popular) if popular else 0.0


def _remote_share(graph: GraphStats, cluster: Cluster, hops: int) -> float:
    # The fraction of nodes ``hops`` hops away that another server owns: cut after cut.
    far = (cluster.servers - 1) / cluster.servers
    if not far:
        return 0.0
    return far * (1.0 - (1.0 - min(graph.edge_cut / far, 1.0)) ** hops)


def _cut_inside(cluster: Cluster, graph: GraphStats) -> float:
    # The fraction of edges between the ranks of one server.
    if cluster.ranks_per_server == 1:
        return 0.0
    far = max((cluster.servers - 1) / cluster.servers, 1e-9)
    quality = min(graph.edge_cut / far, 1.0) if cluster.servers > 1 else 0.35
    return (1.0 - graph.edge_cut) * quality * (cluster.ranks_per_server - 1) / cluster.ranks_per_server


def _rounded(values: Sequence[float], times: int) -> tuple[int, ...]:
    return tuple(round(times * value) for value in values)
