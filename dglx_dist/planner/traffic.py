"""Bytes of an epoch by the ledger's phases, between servers and inside of them, for each way of moving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dglx_dist.cluster.ledger import ring_bytes
from dglx_dist.planner.batch_work import BatchWork, CacheHits
from dglx_dist.planner.bounded_bytes import BoundedSetting, bounded_bytes
from dglx_dist.planner.full_work import FullWork
from dglx_dist.planner.halo_bytes import exchanged_bytes
from dglx_dist.planner.measured import Ghosts, Measured
from dglx_dist.planner.mini_batch_bytes import column_bytes, row_bytes
from dglx_dist.planner.records import Cluster

GRADIENTS = "gradients"
_ID_BYTES = 8
_SUMS = ("structure", "activations", "activation_gradients")
_GHOSTS = ("ghosts", "ghost_gradients")
INTERVALS = 8
"""Of a graph server, when nobody says."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one epoch, all ranks."""

    outside: Mapping[str, int] = field(default_factory=dict)
    inside: Mapping[str, int] = field(default_factory=dict)
    once: int = 0
    """Between servers, before the first epoch."""
    exact: bool = True


def rows_traffic(known: Measured, work: BatchWork, cache: CacheHits | None) -> Traffic:
    """Return data parallelism's (algorithms 1.3); misses alone with a cache."""
    row = _ID_BYTES + known.graph.feature_bytes
    found = work.survey
    if cache is not None:
        found = replace(found, feature_bytes=found.feature_bytes - cache.hits * row)
    phases = row_bytes(found)
    sums = ring_split(known.shape.gradient_bytes, known.cluster, 1, work.steps)
    once = 0 if cache is None else cache.rows * row
    return _split(
        {name: count for name, count in phases.items() if name != GRADIENTS}, {}, sums, once, work.counted
    )


def columns_traffic(known: Measured, work: BatchWork, size: int, *, pushed: bool) -> Traffic:
    """Return push-pull's (algorithms 2.4, 2.6) in groups of ``size`` ranks."""
    first, cluster = known.shape.first, known.cluster
    assert first is not None, "the model cannot be split"
    phases = column_bytes(work.survey, first, group_size=size, pushed=pushed)
    inside: dict[str, int] = {}
    others, away = _others_of_group(cluster, size)
    outside = {name: count for name, count in phases.items() if name not in (*_SUMS, GRADIENTS)}
    for name in _SUMS:
        count = phases.get(name, 0)
        outside[name] = count * away // others if others else 0
        inside[name] = count - outside[name]
    sums = ring_split(first.replicated_bytes, cluster, 1, work.steps)
    groups = cluster.ranks // size
    if groups > 1:
        # Every part's ring has the same bytes, but for what columns do not divide by.
        every = 2 * (groups - 1) * first.cut_bytes * work.steps
        server_of = cluster.server_of_rank
        far = sum(server != server_of[(rank + size) % cluster.ranks] for rank, server in enumerate(server_of))
        crossing = every * far // cluster.ranks
        sums = sums[0] + crossing, sums[1] + every - crossing
    moved = known.graph.nodes * (cluster.servers - 1) // cluster.servers * known.graph.feature_bytes
    aligned = size % cluster.ranks_per_server == 0 or cluster.ranks_per_server % size == 0
    return _split(outside, inside, sums, cluster.ranks * moved // size, work.counted and aligned)


def plans_traffic(known: Measured, work: FullWork, *, use_pp: bool) -> Traffic:
    """Return that of whole graphs with exchanged rows (algorithms 3.1, 3.4)."""
    widths, row = known.shape.widths, known.graph.feature_bytes
    outside = exchanged_bytes(work.pairs.outside, widths, use_pp=use_pp)
    inside = exchanged_bytes(work.pairs.inside, widths, use_pp=use_pp)
    sums = ring_split(known.shape.gradient_bytes, known.cluster, 1, work.steps)
    halo = work.pairs.outside[0] * row if use_pp else 0
    alone = work.steps == 1 or known.cluster.ranks_per_server == 1
    # How wide exchanged rows are is then not known.
    sure = not known.shape.guessed or not (outside or inside)
    once = work.external_rows * (_ID_BYTES + row) + halo
    return _split(outside, inside, sums, once, work.counted and alone and sure)


def intervals_traffic(known: Measured, ghosts: Ghosts) -> Traffic:
    """Return that of intervals (algorithms 4.6); what goes to workers leaves the server."""
    shape, total = known.shape, ghosts.outside + ghosts.inside
    phases = bounded_bytes(
        BoundedSetting(
            widths=(shape.features, *(layer.outputs for layer in shape.layers)),
            nodes=known.graph.nodes,
            ghosts=total,
            intervals=INTERVALS * known.cluster.ranks,
        )
    )
    inside = {name: phases[name] * ghosts.inside // max(total, 1) for name in _GHOSTS}
    outside = {name: count - inside.get(name, 0) for name, count in phases.items()}
    once = ghosts.outside * (2 * _ID_BYTES + known.graph.feature_bytes)
    counted = ghosts.counted and shape.kind == "gcn" and not shape.guessed
    return _split(outside, inside, (0, 0), once, counted)


def ring_split(num_bytes: int, cluster: Cluster, distance: int, steps: int) -> tuple[int, int]:
    """Return the bytes (between servers, inside of them) of ring all-reduces over all ranks.

    Args:
        num_bytes: That are summed in one step.
        cluster: Whose ranks.
        distance: To the next rank of the ring.
        steps: How often.
    """
    ranks, server_of, outside, inside = cluster.ranks, cluster.server_of_rank, 0, 0
    for rank in range(ranks) if ranks > 1 else ():
        sent = ring_bytes(num_bytes, ranks, rank) * steps
        if server_of[rank] == server_of[(rank + distance) % ranks]:
            inside += sent
        else:
            outside += sent
    return outside, inside


def _others_of_group(cluster: Cluster, size: int) -> tuple[int, int]:
    """Return pairs of an owner and another part of its group, and those of them on two servers."""
    server_of, together = cluster.server_of_rank, 0
    for first in range(0, cluster.ranks, size):
        together += sum(count * count for count in Counter(server_of[first : first + size]).values())
    # A group's pairs of ranks, in order and with themselves, are its size squared.
    return cluster.ranks * (size - 1), cluster.ranks * size - together


def _split(
    outside: Mapping[str, int], inside: Mapping[str, int], sums: tuple[int, int], once: int, exact: bool
) -> Traffic:
    return Traffic(
        outside=_present({**outside, GRADIENTS: sums[0]}),
        inside=_present({**inside, GRADIENTS: sums[1]}),
        once=once,
        exact=exact,
    )


def _present(phases: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(phases.items()) if count}
