"""Candidates of the full-graph strategies, the plans of an epoch in sizes, and its cost.

See docs/strategies/shared_preload.md. Sizes are counted by one process or by all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch

from dglx_dist.comm.codec import WireDtype, wire_bytes
from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.topology import Topology
from dglx_dist.memory import machine_memory
from dglx_dist.records import Array
from dglx_dist.strategies.cost import (
    ALLOCATOR_OVERHEAD,
    ID_BYTES,
    Candidate,
    Cost,
    LayerCounts,
    Measured,
    ModelShape,
    PartitionContext,
    PlanContext,
    PlannedRun,
    Seconds,
    Traffic,
    Unit,
    Work,
    present,
    ring_split,
    traffic_with_sums,
)
from dglx_dist.strategies.full_graph.expansion import EasOptions, compose, eas_rule
from dglx_dist.strategies.full_graph.halo_block import HaloBlock, halo_block
from dglx_dist.strategies.full_graph.halo_plan import NO_IDS, RankPlan
from dglx_dist.strategies.full_graph.memory_estimate import (
    PLAN_BYTES,
    LocalExchange,
    StepSizes,
    estimate,
    most_timed_seeds,
    step_sizes,
)
from dglx_dist.strategies.full_graph.plan_builder import Planner, PlanRequest, plan_all, seeds_by_server

EAS_HOPS: Mapping[str, int] = MappingProxyType({"eas, 1 hop": 1, "eas, 2 hops": 2})
"""Variants of expansion-aware sampling: ``FullGraphScheme.limit`` to hops between servers."""
EAS_FANOUT = 15
"""External fan-out, as in the paper."""
_COVER: Mapping[str, Any] = MappingProxyType({"aggregate": "cover"})
_MOST_EDGES = 200_000_000
"""Largest plans to build, over layers and cooperative batches: about a second for each million edges."""
_COVER_BYTES = 40
"""Memory of building covers, by edge of the graph: 27 were measured with two layers on 4 servers."""
_TRIED_PARTS = (8, 3, 1)
"""Every n-th of a server's training nodes, the smallest neighbourhood first."""
_BATCH_COUNTS = (2, 8)
"""Numbers of cooperative batches to compare, for graphs that do not fit the memory at once."""
_MOST_BATCHES = 16
_STORED_EDGE_BYTES = 16
"""Of a cooperative batch's plan on disk, per edge of its first layer: source and edge, 8 bytes each."""
_READ_S = 5e-3
"""Of a core, to open the files of a cooperative batch and to make its blocks, of any size (A1)."""
_EXCHANGE_S = 0.4e-3
"""Of a core, to gather and scatter exchanged rows, however few: 28 times in a step of 14 layers (A1)."""
_CODE_BYTE_S = 14e-9
"""Of a core, to encode and to decode a number in 8 bits."""


@dataclass(frozen=True, kw_only=True)
class FullWork:
    """Work of one full-graph epoch."""

    largest: StepSizes
    """Of any rank."""
    worked: LayerCounts
    """Of the busiest rank, over all steps."""
    outside: tuple[int, ...]
    """(L,) pairs of a node and a rank that reads its row as input of a layer, input-most first, without
    computing it: a rank of another server computes the node (B_ext). Of all ranks and steps."""
    inside: tuple[int, ...]
    """The same: another rank of the server computes it."""
    card_rows: tuple[int, ...]
    """(L,) rows through the busiest network card, in or out, whichever is more."""
    inside_rows: tuple[int, ...]
    """(L,) rows between the ranks of the busiest server."""
    external_rows: int
    """Feature rows preloaded from other servers, of all servers and steps."""
    steps: int = 1
    read_rows: int = 0
    """Feature rows of the busiest rank over all steps; cooperative batches read them in each epoch."""
    cover: FullWork | None = None
    """The same where layers above the first exchange the rows of covers; None: they were not counted."""


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
        # In a job all ranks must count or none, and each has its own memory.
        free = machine_memory()[1] if not run.in_job else sys.maxsize
        if run.graph.edges * PLAN_BYTES > free:
            return None
        covers = self.cooperative_batches == 1 and not self.limit
        covers &= run.graph.edges * (PLAN_BYTES + _COVER_BYTES) <= free
        partition, number = run.partition, self.cooperative_batches
        pieces = [
            [own] if number == 1 else compose(own, number, "random", seed=partition.seed)
            for own in seeds_by_server(partition, run.seeds)
        ]
        # A server may have fewer seeds than there are batches.
        steps = [step for step in zip(*pieces, strict=True) if any(map(len, step))]
        topology, make = partition.topology, self._maker(run, covers)

        def counted(plan: RankPlan) -> list[Array]:
            variants = [plan, with_covers(plan)] if covers else [plan]
            return [sizes_of(one, topology.world_size) for one in variants]

        sizes = np.array([[counted(one) for one in make([*step])] for step in steps])
        # (processes, R, ranks of a process, variants, K) to (variants, R, W, K)
        gathered = gather_int64(sizes, run.g.session).reshape(-1, *sizes.shape).transpose(3, 1, 0, 2, 4)
        ordered = gathered.reshape(len(gathered), len(steps), topology.world_size, -1)
        plain, *others = (full_work_of(one, topology) for one in ordered)
        return replace(plain, cover=others[0]) if covers else plain

    def _maker(self, run: PlannedRun, covers: bool) -> Callable[[list[Array]], list[RankPlan]]:
        topology, eas = run.partition.topology, None
        if self.limit:
            limits = EasOptions(hops=EAS_HOPS[self.limit], fanout=EAS_FANOUT)
            eas = eas_rule(limits, seed=run.partition.seed)
        options: dict[str, Any] = {"hops": self.hops, "eas": eas, "cover": covers}
        options["num_layers"] = run.num_layers
        if not run.in_job:
            return lambda seeds: plan_all(run.partition, seeds, **options)
        planner = Planner(run.g)

        def make(seeds: list[Array]) -> list[RankPlan]:
            # One rank of a server gives the seeds of all of it.
            own = seeds[topology.server] if topology.local_rank == 0 else NO_IDS
            return [planner.plan(PlanRequest(seeds=own, show_progress=False, **options))]

        return make

    def trials(self, run: PlannedRun) -> Iterator[list[Any]]:
        if run.partition.structure.is_whole:
            server = run.partition.topology.server if run.in_job else 0
            yield from plan_trials(run.partition, run.seeds, run.num_layers, server)


def sizes_of(plan: RankPlan, world_size: int) -> Array:
    """Return the (K,) int64 sizes of a plan, as :func:`full_work_of` reads them.

    The fields of :func:`step_sizes`, feature rows that the server fetches from others, and (L, W) halo rows
    by the rank that holds them.
    """
    received = np.zeros((len(plan.layers), world_size), np.int64)
    for row, layer in zip(received, plan.layers, strict=True):
        for rank, count in layer.receive:
            row[rank] = count
    return np.concatenate([*vars(step_sizes(plan)).values(), [plan.external_nodes], received.reshape(-1)])


def with_covers(plan: RankPlan) -> RankPlan:
    """Return ``plan`` in the sizes of its covers; layer 1 keeps its rows, as with ``use_pp``."""
    first, *above = plan.layers
    covers = [one.cover for one in above if one.cover is not None]
    assert len(covers) == len(above), "the plan was made without covers"
    layers = (replace(one.layer, indices=np.concatenate([one.layer.indices, one.indices])) for one in covers)
    return replace(plan, layers=(first, *layers))


def full_work_of(sizes: Array, topology: Topology) -> FullWork:
    """Return the work of an epoch from the (R, W, K) int64 :func:`sizes_of` the plans of its steps."""
    world_size, num_servers = topology.world_size, topology.num_servers
    layers = (sizes.shape[2] - 2) // (4 + world_size)
    ends = np.cumsum([layers + 1, layers, layers, layers, 1])
    *step_fields, external, received = np.split(sizes, ends, axis=2)
    rows, sources, edges, _ = step_fields
    busiest = int(edges.sum(axis=(0, 2)).argmax())
    step, rank = divmod(int((edges.sum(axis=2) + rows.sum(axis=2)).argmax()), world_size)
    leaders = [topology.ranks_of_server(server)[0] for server in range(num_servers)]
    server = np.array(topology.server_of_rank)
    of_server, is_same = np.eye(num_servers, dtype=np.int64)[server], server[:, None] == server
    # (receiving rank, layer, sending rank) rows.
    halo = received.sum(axis=0).reshape(world_size, layers, world_size)
    between, within = halo * ~is_same[:, None], halo * is_same[:, None]
    came, left = between.sum(axis=2).T @ of_server, between.sum(axis=0) @ of_server
    inside = within.sum(axis=2).T @ of_server

    def numbers(counts: Array) -> tuple[int, ...]:
        return tuple(counts.tolist())

    return FullWork(
        largest=StepSizes(*(numbers(one[step, rank]) for one in step_fields)),
        worked=(
            numbers(sources[:, busiest].sum(axis=0)),
            numbers(rows[:, busiest, 1:].sum(axis=0)),
            numbers(edges[:, busiest].sum(axis=0)),
        ),
        outside=numbers(came.sum(axis=1)),
        inside=numbers(inside.sum(axis=1)),
        card_rows=numbers(np.maximum(came, left).max(axis=1)),
        inside_rows=numbers(inside.max(axis=1)),
        external_rows=int(external[:, leaders].sum()),
        steps=len(sizes),
        read_rows=int(rows[:, busiest, 0].sum()),
    )


def plan_trials(
    context: PartitionContext, seeds: Array, num_layers: int, server: int = 0
) -> Iterator[list[HaloBlock]]:
    """Yield the blocks of all layers for parts of a server's training nodes, smallest first.

    With the size and wide ids of shared preloading on a server of one rank, and of cooperative batches;
    no row comes from another server. The structure must be whole here.
    """
    own_seeds = seeds_by_server(context, seeds)[server]
    own_seeds = own_seeds if len(own_seeds) else seeds
    few = most_timed_seeds(int(context.bounds[-1]), context.structure.num_edges, num_layers)
    own_seeds = own_seeds[:: -(-len(own_seeds) // few)]
    alone = replace(context, bounds=context.bounds[[0, -1]], topology=Topology(0, 1, (0,)))
    for part in _TRIED_PARTS:
        (plan,) = plan_all(alone, [own_seeds[::part]], num_layers, num_layers)
        nodes, blocks = torch.from_numpy(plan.nodes), list[HaloBlock]()
        for depth, layer in enumerate(plan.layers):
            is_same = depth and layer is plan.layers[depth - 1]
            blocks.append(blocks[-1].local_var() if is_same else halo_block(layer, nodes, LocalExchange(0)))
        yield blocks


def exchanging_candidates(context: PlanContext) -> Iterator[Candidate]:
    """Yield full_graph, also with covers, with halo rows in 8 bits, and with those of the epoch before."""
    yield from _of_scheme(FullGraphScheme(0))
    others: tuple[dict[str, Any], ...] = ({"wire_dtype": "int8"}, {"staleness": 1})
    for options in others if context.servers > 1 else ():
        yield Candidate(unit="full_graph", options=options, works=(FullGraphScheme(0),), exact=False)


def _of_scheme(scheme: FullGraphScheme, *, covers: bool = True, **options: Any) -> Iterator[Candidate]:
    for some in (options, {**options, **_COVER})[: 1 + covers]:
        yield Candidate(unit="full_graph", options=some, works=(scheme,))


def preloading_candidates(context: PlanContext) -> Iterator[Candidate]:
    """Yield shared_preload of some layers, of all, and with limits of the external neighbourhood."""
    if context.servers == 1:
        return
    num_layers = context.num_layers
    for hops in sorted({1, num_layers - 1} - {0, num_layers}):
        yield from _of_scheme(FullGraphScheme(hops), hops=hops)
    yield from _of_scheme(FullGraphScheme(num_layers), covers=context.ranks > context.servers)
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
    if candidate.options.items() >= _COVER.items():
        return _cost_of_covers(known, work)
    # Of several batches, none keeps the features of its halo.
    use_pp = work.steps == 1
    wire: WireDtype = candidate.options.get("wire_dtype", "same")
    traffic = _traffic(known, work, use_pp=use_pp, wire=wire)
    seconds = _seconds(known, work, traffic, use_pp=use_pp, wire=wire)
    memory = full_graph_memory(known, work, ahead=0 if work.steps == 1 else 1)
    if "staleness" in candidate.options:
        shown = max(0.0, seconds.outside + seconds.inside - seconds.compute)
        seconds = replace(seconds, outside=shown, inside=0.0)
        # The rows of an epoch, sent and received, in buffers and in transit.
        pairs = tuple(map(sum, zip(work.outside, work.inside, strict=True)))
        moved = exchanged_bytes(pairs, known.shape, use_pp=use_pp)
        memory += 4 * sum(moved.values()) // known.cluster.ranks
    return _cost(known, seconds, traffic, memory)


def _cost(known: Measured, seconds: Seconds, traffic: Traffic, memory: int) -> Cost:
    own = known.own_features
    return Cost(
        seconds=seconds, traffic=traffic, memory=memory, shared=own, on_host=known.program_bytes + own
    )


def _cost_of_covers(known: Measured, whole: FullWork) -> Cost:
    first, *above = known.shape.layers
    if not above or not all(layer.sums_sources for layer in above):
        return Cost(why_not="a layer reads its sources by more than a sum or mean")
    if (work := whole.cover) is None:
        return Cost(why_not="its covers were not counted: there is no dataset, or it is too large")
    # Products are applied to own rows, before the exchange where that makes rows narrower.
    narrowed = (first, *(replace(layer, inputs=layer.summed) for layer in above))
    known = replace(known, shape=replace(known.shape, layers=narrowed))
    sources, targets, edges = work.worked
    traffic = _traffic(known, work, use_pp=True)
    own_rows = replace(work, worked=((sources[0], *targets[:-1]), targets, edges))
    seconds = _seconds(known, own_rows, traffic, use_pp=True)
    # Rows are copied behind each other once more, and their gradients.
    copied = sum(rows * layer.inputs for rows, layer in zip(sources[1:], above, strict=True))
    copy_s = 2 * copied * known.shape.itemsize * (known.plan_rates or known.rates).gather_byte_s
    # The blocks of whole rows are kept beside those of the covers.
    blocks = estimate(whole.largest, known.of_graphs, 0, ahead=0).structure
    memory = full_graph_memory(known, work) + round(ALLOCATOR_OVERHEAD * sum(blocks))
    return _cost(known, replace(seconds, compute=seconds.compute + copy_s), traffic, memory)


def full_graph_memory(known: Measured, work: FullWork, *, ahead: int = 0) -> int:
    """Return the peak of a rank that trains on whole graphs; ``ahead``: batches loaded in advance."""
    found = estimate(work.largest, known.of_graphs, known.shape.features * known.shape.itemsize, ahead=ahead)
    of_steps = round(ALLOCATOR_OVERHEAD * (found.total - found.held))
    return known.fixed + known.own_features + found.held + of_steps


def exchanged_bytes(
    pairs: Sequence[int], shape: ModelShape, *, use_pp: bool, wire: WireDtype = "same"
) -> dict[str, int]:
    """Return the bytes of an epoch by ledger phase, for (L,) ``pairs`` outside or inside of servers.

    ``halo`` is b_0 B_1 + b_1 B_2 + ..., b_l the bytes of d_l numbers as ``wire`` sends them, without its
    first term where layer-1 rows are cached (``use_pp``); ``halo_gradients`` the same without the terms of
    rows that have no gradient. Empty phases are left out.
    """
    first, *above = (
        wire_bytes(wire, layer.inputs, shape.itemsize) * count
        for layer, count in zip(shape.layers, pairs, strict=True)
    )
    first = 0 if use_pp else first
    return present(halo=sum(above) + first, halo_gradients=sum(above) + (first if shape.first_learns else 0))


def _traffic(known: Measured, work: FullWork, *, use_pp: bool, wire: WireDtype = "same") -> Traffic:
    row = known.graph.feature_bytes
    outside, inside = (
        exchanged_bytes(pairs, known.shape, use_pp=use_pp, wire=wire) for pairs in (work.outside, work.inside)
    )
    halo = work.outside[0] * row if use_pp else 0
    one_planner = work.steps == 1 or known.cluster.ranks_per_server == 1
    # The width of exchanged rows is unknown for a guessed shape.
    widths_known = not known.shape.guessed or not (outside or inside)
    return traffic_with_sums(
        outside,
        inside,
        ring_split(known.shape.gradient_bytes, known.cluster.server_of_rank, work.steps),
        once=work.external_rows * (ID_BYTES + row) + halo,
        exact=one_planner and widths_known,
    )


def _seconds(
    known: Measured, work: FullWork, traffic: Traffic, *, use_pp: bool, wire: WireDtype = "same"
) -> Seconds:
    cluster, rates = known.cluster, known.plan_rates or known.rates
    compute, read = rates.compute_s(known.shape.work(*work.worked), work.steps), 0.0
    if work.steps > 1:
        compute += rates.fresh_edge_s * sum(work.worked[2])
        # Plans and rows of all cooperative batches from disk, including checksums.
        num_bytes = work.read_rows * known.graph.feature_bytes + _STORED_EDGE_BYTES * max(work.worked[2])
        read = num_bytes * rates.check_byte_s + work.steps * _READ_S / min(cluster.cores, 1.0)
    if not cluster.has_few_cores:
        read = max(0.0, read - cluster.hidden_share * compute)
    outside, inside = (
        sum(exchanged_bytes(rows, known.shape, use_pp=use_pp, wire=wire).values())
        for rows in (work.card_rows, work.inside_rows)
    )
    waits = 2 * sum(1 for rows in work.card_rows[use_pp:] if rows) * work.steps
    handling = known.handling_seconds(traffic) + waits * _EXCHANGE_S / min(cluster.cores, 1.0)
    handling += (outside + inside) * _CODE_BYTE_S if wire != "same" else 0.0
    moving = cluster.after_bursts(outside / cluster.external_bytes_per_s, waits, compute)
    return Seconds(
        compute=compute + handling,
        sampling=read,
        outside=moving + cluster.latencies(waits),
        inside=inside / cluster.internal_bytes_per_s,
        all_reduce=known.all_reduce_seconds(work.steps, traffic, compute),
    )
