"""Candidates of the full-graph strategies, and the cost of an epoch (docs/strategies/shared_preload.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dglx_dist.strategies.cost import (
    ALLOCATOR_OVERHEAD,
    FEW_CORES,
    ID_BYTES,
    Candidate,
    Cost,
    Measured,
    MemoryModel,
    PlanContext,
    Seconds,
    Traffic,
    Unit,
    Widths,
    after_bursts,
    all_reduce_seconds,
    handling_seconds,
    hidden_share,
    latencies,
    ring_split,
    traffic_with_sums,
)
from dglx_dist.strategies.full_graph.memory_estimate import structure_bytes
from dglx_dist.strategies.full_graph.plan_counts import EAS_FANOUT, EAS_HOPS, FullGraphScheme, FullWork

_BATCH_COUNTS = (2, 8)
"""Numbers of cooperative batches to compare, for graphs that do not fit the memory at once."""
_MOST_BATCHES = 16
_STORED_EDGE_BYTES = 16
"""Of a cooperative batch's plan on disk, per edge of its first layer: source and edge, 8 bytes each."""
_READ_S = 5e-3
"""Of a core, to open the files of a cooperative batch and to make its blocks, of any size (A1)."""
_EXCHANGE_S = 0.4e-3
"""Of a core, to gather and scatter exchanged rows, however few: 28 times in a step of 14 layers (A1)."""


def exchanging_candidates(context: PlanContext) -> Iterator[Candidate]:
    """Yield full_graph."""
    yield Candidate(unit="full_graph", works=(FullGraphScheme(0),))


def preloading_candidates(context: PlanContext) -> Iterator[Candidate]:
    """Yield shared_preload of some layers, of all, and with limits of the external neighbourhood."""
    if context.servers == 1:
        return
    num_layers = context.num_layers
    for hops in sorted({1, num_layers - 1} - {0, num_layers}):
        yield Candidate(unit="full_graph", options={"hops": hops}, works=(FullGraphScheme(hops),))
    yield Candidate(unit="full_graph", works=(FullGraphScheme(num_layers),))
    for limit, reach in EAS_HOPS.items():
        options = {"external_hops": reach, "external_fanout": EAS_FANOUT}
        works = (FullGraphScheme(num_layers, limit),)
        yield Candidate(unit="full_graph", options=options, works=works, exact=False)


def cooperative_candidates(context: PlanContext) -> Iterator[Candidate]:
    """Yield cooperative, with as many batches as mini-batches and with other numbers."""
    if context.servers == 1:
        return

    def of(number: int, unit: Unit) -> Candidate:
        scheme = FullGraphScheme(context.num_layers, cooperative_batches=number)
        return Candidate(unit=unit, options={"batches": number}, works=(scheme,))

    # With as many, an epoch has as many updates. With too many, the neighbourhoods do not fit; with fewer,
    # the epoch would be a different one.
    alike = max(context.steps, 2) if 0 < context.steps <= _MOST_BATCHES else 0
    if alike:
        yield of(alike, "mini_batch")
    for number in sorted({*_BATCH_COUNTS} - {alike}):
        yield of(number, "full_graph")


def cost(candidate: Candidate, known: Measured) -> Cost:
    """Return the cost of an epoch of one step, or of several cooperative batches."""
    work: FullWork = known.works[candidate.works[0]]
    # Of several batches, none keeps the features of its halo.
    use_pp = work.steps == 1
    traffic = _traffic(known, work, use_pp=use_pp)
    return Cost(
        seconds=_seconds(known, work, traffic, use_pp=use_pp),
        traffic=traffic,
        memory=full_graph_memory(known.memory, work, ahead=0 if work.steps == 1 else 1),
        shared=known.memory.own_features,
    )


def full_graph_memory(model: MemoryModel, work: FullWork, *, ahead: int = 0) -> int:
    """Return the peak of a rank that trains on whole graphs; ``ahead``: batches loaded in advance."""
    inputs = work.rows[0] * model.shape.features * model.shape.itemsize
    # Equal layers share one block.
    distinct = dict.fromkeys(zip(work.edges, work.sources, work.rows[1:], strict=True))
    blocks = sum(structure_bytes(*sizes) for sizes in distinct)
    step = model.step(model.of_graphs, work.rows, work.sources, work.edges)
    own = model.graph.nodes // model.cluster.servers * model.graph.feature_bytes
    return model.fixed + own + round(ALLOCATOR_OVERHEAD * (step + (1 + ahead) * (inputs + blocks)))


def exchanged_bytes(pairs: Sequence[int], widths: Widths, *, use_pp: bool) -> dict[str, int]:
    """Return the bytes of an epoch by ledger phase, for (L,) ``pairs`` outside or inside of servers.

    ``halo`` is s (d_0 B_1 + d_1 B_2 + ...), without its first term where layer-1 rows are cached
    (``use_pp``); ``halo_gradients`` the same without the terms of rows that have no gradient. Empty phases
    are left out.
    """
    above = widths.hidden * sum(pairs[1:])
    first = 0 if use_pp else widths.first * pairs[0]
    counts = {"halo": above + first, "halo_gradients": above + (first if widths.first_learns else 0)}
    return {phase: count * widths.itemsize for phase, count in counts.items() if count}


def _traffic(known: Measured, work: FullWork, *, use_pp: bool) -> Traffic:
    widths, row = known.shape.widths, known.graph.feature_bytes
    outside = exchanged_bytes(work.pairs.outside, widths, use_pp=use_pp)
    inside = exchanged_bytes(work.pairs.inside, widths, use_pp=use_pp)
    halo = work.pairs.outside[0] * row if use_pp else 0
    one_planner = work.steps == 1 or known.cluster.ranks_per_server == 1
    # The width of exchanged rows is unknown for a guessed shape.
    widths_known = not known.shape.guessed or not (outside or inside)
    return traffic_with_sums(
        outside,
        inside,
        ring_split(known.shape.gradient_bytes, known.cluster, work.steps),
        once=work.external_rows * (ID_BYTES + row) + halo,
        exact=work.counted and one_planner and widths_known,
    )


def _seconds(known: Measured, work: FullWork, traffic: Traffic, *, use_pp: bool) -> Seconds:
    cluster, widths, rates = known.cluster, known.shape.widths, known.plan_rates or known.rates
    compute, read = rates.compute_s(known.shape.work(*work.worked), work.steps), 0.0
    if work.steps > 1:
        compute += rates.fresh_edge_s * sum(work.worked[2])
        # Plans and rows of all cooperative batches from disk, including checksums.
        num_bytes = work.read_rows * known.graph.feature_bytes + _STORED_EDGE_BYTES * max(work.worked[2])
        read = num_bytes * rates.check_byte_s + work.steps * _READ_S / min(cluster.cores, 1.0)
    if cluster.cores >= FEW_CORES:
        read = max(0.0, read - hidden_share(cluster.cores) * compute)
    outside = sum(exchanged_bytes(work.card_rows, widths, use_pp=use_pp).values())
    inside = sum(exchanged_bytes(work.inside_rows, widths, use_pp=use_pp).values())
    waits = 2 * sum(1 for rows in work.card_rows[use_pp:] if rows) * work.steps
    handling = handling_seconds(known, traffic) + waits * _EXCHANGE_S / min(cluster.cores, 1.0)
    moving = after_bursts(outside / cluster.external_bytes_per_s, waits, compute, cluster)
    return Seconds(
        compute=compute + handling,
        sampling=read,
        outside=moving + latencies(waits, cluster),
        inside=inside / cluster.internal_bytes_per_s,
        all_reduce=all_reduce_seconds(known, work.steps, traffic, compute),
    )
