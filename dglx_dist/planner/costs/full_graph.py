"""Bytes and memory of full_graph, shared_preload and cooperative, from the plans of an epoch.

See docs/strategies/shared_preload.md. Plans are counted by one process or by all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dglx_dist.comm.codec import WireDtype, wire_bytes
from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.topology import Topology
from dglx_dist.memory import machine_memory
from dglx_dist.planner.costs.base import (
    ALLOCATOR_OVERHEAD,
    ID_BYTES,
    OPTIMIZER_COPIES,
    Cost,
    CostModel,
    EpochCounts,
    PlannedRun,
    Traffic,
    TrainedRows,
    Work,
    build_traffic,
    present,
    ring_split,
)
from dglx_dist.planner.records import ModelShape
from dglx_dist.records import Array
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.strategies.full_graph.expansion import EasOptions, compose_batches, make_selection
from dglx_dist.strategies.full_graph.graph_types import TypedLayer, TypedPlan, UnifiedGraph
from dglx_dist.strategies.full_graph.halo_block import HaloBlock, halo_block
from dglx_dist.strategies.full_graph.halo_exchange import CoverExchange
from dglx_dist.strategies.full_graph.halo_plan import NO_IDS, HaloLayer, RankPlan
from dglx_dist.strategies.full_graph.model import check_rows_stay_apart
from dglx_dist.strategies.full_graph.options import FullGraphOptions
from dglx_dist.strategies.full_graph.plan_builder import Planner, PlanRequest, make_all_plans, split_by_server
from dglx_dist.strategies.full_graph.typed_block import TypedHaloBlock, typed_halo_block

_MOST_EDGES = 200_000_000
"""Largest plans to build, in edges over layers and cooperative batches. A million edges take a second."""
_PLAN_BYTES = 100
"""Memory for building the plans of all ranks, in bytes per edge. 95 were measured with two layers."""
_COVER_BYTES = 40
"""Memory for building covers, in bytes per edge. 27 were measured with two layers on 4 servers."""


@final
@dataclass(frozen=True)
class StepSizes:
    """Rows and edges of a step on one rank."""

    rows: tuple[int, ...]
    """(L + 1,) rows of the levels, features first."""
    sources: tuple[int, ...]
    """(L,) sources of each layer."""
    edges: tuple[int, ...]
    """(L,) edges of each layer."""
    sent: tuple[int, ...]
    """(L,) rows that other ranks receive."""


def read_step_sizes(plan: RankPlan) -> StepSizes:
    layers = plan.layers
    return StepSizes(
        rows=(layers[0].own_rows, *(layer.targets for layer in layers)),
        sources=tuple(layer.num_sources for layer in layers),
        edges=tuple(len(layer.indices) for layer in layers),
        sent=tuple(sum(len(rows) for _, rows in layer.send) for layer in layers),
    )


@dataclass(frozen=True, kw_only=True)
class FullWork:
    """Work of one full-graph epoch."""

    largest: StepSizes
    """Sizes of the largest step of any rank."""
    outside: tuple[int, ...]
    """(L,) pairs of a node and a rank that reads its row as input of a layer, input-most first, without
    computing it, if a rank of another server computes the node (B_ext). Over all ranks and steps.
    """
    inside: tuple[int, ...]
    """(L,) pairs whose row another rank of the same server computes."""
    external_rows: int
    """Feature rows preloaded from other servers, over all servers and steps."""
    trained_rows: TrainedRows
    """Trainable input rows. Layer 1 reads them by id, so :attr:`outside` and :attr:`inside` lack them."""
    steps: int = 1
    cover: FullWork | None = None
    """The same work if layers above the first exchange the rows of covers. None: they were not counted."""
    plan: RankPlan | TypedPlan | None = None
    """Plan of the largest step of any rank. None: another process has it."""


@final
@dataclass(frozen=True)
class FullGraphScheme(Work):
    """Plans and batches of training on a whole graph."""

    hops: int
    """Number of layers that a server computes without rows of other servers."""
    eas: EasOptions | None = None
    """Limits of the external neighbourhood. None: it has no limit."""
    cooperative_batches: int = 1

    def describe(self, num_layers: int) -> str:
        num_batches = self.cooperative_batches
        batches = f" in {num_batches} cooperative batches" if num_batches > 1 else ""
        sampled = ", sampled" if self.eas else ""
        return f"plans of {self.hops} of {num_layers} layers preloaded{sampled}{batches}"

    def count(self, run: PlannedRun) -> FullWork | None:
        if run.graph.edges * run.num_layers * self.cooperative_batches > _MOST_EDGES:
            return None
        # In a job, free memory differs between ranks, but either all ranks must count or none.
        free_bytes = machine_memory()[1] if not run.in_job else sys.maxsize
        if run.graph.edges * _PLAN_BYTES > free_bytes:
            return None
        graph = run.partition.structure
        is_typed = isinstance(graph, UnifiedGraph)
        covers = self.cooperative_batches == 1 and not self.eas and not is_typed
        covers &= run.graph.edges * (_PLAN_BYTES + _COVER_BYTES) <= free_bytes
        partition, num_batches = run.partition, self.cooperative_batches
        pieces = [
            [ids] if num_batches == 1 else compose_batches(ids, num_batches, "random", seed=partition.seed)
            for ids in split_by_server(partition, run.plan_seeds)
        ]

        # A server may have fewer seeds than there are batches.
        steps = [step for step in zip(*pieces, strict=True) if any(map(len, step))]
        topology = partition.topology
        make_plans = self._make_planner(run, covers)
        largest = _LargestPlan()

        def count_plan(rank: int, plan: RankPlan) -> list[Array]:
            largest.consider(plan)
            trained = find_trained_rows(run, plan, rank)
            variants = [plan, use_covers(plan)] if covers else [plan]
            return [pack_sizes(variant, topology.world_size, trained) for variant in variants]

        counted = []
        for step in steps:
            plans = zip(run.ranks_here, make_plans([*step]), strict=True)
            counted.append([count_plan(rank, plan) for rank, plan in plans])
        sizes: Array = np.array(counted)
        # (processes, R, ranks of a process, variants, K) to (variants, R, W, K)
        gathered = gather_int64(sizes, run.g.session).reshape(-1, *sizes.shape).transpose(3, 1, 0, 2, 4)
        ordered = gathered.reshape(len(gathered), len(steps), topology.world_size, -1)
        works = [decode_work(variant, topology) for variant in ordered]
        plan: RankPlan | TypedPlan | None = None if run.in_job else largest.plan
        if isinstance(graph, UnifiedGraph) and isinstance(plan, RankPlan):
            plan = graph.split(plan)
        return replace(works[0], cover=works[1] if covers else None, plan=plan)

    def _make_planner(self, run: PlannedRun, covers: bool) -> Callable[[list[Array]], list[RankPlan]]:
        topology = run.partition.topology
        eas = self.eas and make_selection(self.eas, seed=run.partition.seed)
        options: dict[str, Any] = {"hops": self.hops, "eas": eas, "cover": covers}
        options["num_layers"] = run.num_layers
        if not run.in_job:
            return lambda seeds: make_all_plans(run.partition, seeds, **options)
        planner = Planner(run.g)

        def make_plan(seeds: list[Array]) -> list[RankPlan]:
            # One rank of a server passes the seeds of the whole server.
            server_seeds = seeds[topology.server] if topology.local_rank == 0 else NO_IDS
            return [planner.plan(PlanRequest(seeds=server_seeds, show_progress=False, **options))]

        return make_plan

    def blocks(self, counts: FullWork) -> tuple[list[Any], int] | None:
        return None if counts.plan is None else (build_blocks(counts.plan), counts.steps)


class _LargestPlan:
    def __init__(self) -> None:
        self.plan: RankPlan | None = None
        self._size = -1

    def consider(self, plan: RankPlan) -> None:
        size = sum(len(layer.indices) + layer.targets for layer in plan.layers) + plan.layers[0].own_rows
        if size > self._size:
            self.plan, self._size = plan, size


def find_trained_rows(run: PlannedRun, plan: RankPlan, rank: int) -> tuple[Array, Array]:
    """Count the trainable rows that are inputs of ``rank``.

    Returns:
        (W,) int64 number of these rows by the rank that owns them, without own rows, and (W,) int64 number
        of those in the halo of layer 1 by the rank that would send them.
    """
    world_size = run.partition.topology.world_size
    graph = run.partition.structure
    if not isinstance(graph, UnifiedGraph):
        return np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
    types = [number for number, ntype in enumerate(graph.ntypes) if ntype in run.trained_types]
    first = plan.layers[0]
    rows = np.concatenate([plan.nodes, first.halo_nodes])
    is_trained = np.isin(graph.nodes.locate(rows)[0], types)
    owners = run.partition.find_owners(rows[is_trained])
    senders = np.repeat(*np.array(first.receive, np.int64).reshape(-1, 2).T)
    trained_senders = senders[is_trained[len(plan.nodes) :]]
    return (
        np.bincount(owners[owners != rank], minlength=world_size),
        np.bincount(trained_senders, minlength=world_size),
    )


def pack_sizes(plan: RankPlan, world_size: int, trained: tuple[Array, Array] | None = None) -> Array:
    """Return the sizes of a plan as one int64 array, which :func:`decode_work` unpacks.

    The array holds, for L layers and W ranks: the fields of the result of :func:`read_step_sizes` in their
    order, the number of feature rows that the server fetches from other servers, the (L, W) numbers of halo
    rows by the rank that sends them, without trainable rows of layer 1, and the (W,) numbers of trainable
    rows by the rank that owns them. ``trained`` is the result of :func:`find_trained_rows`.
    """
    trained_rows, trained_halo = trained or (np.zeros(world_size, np.int64),) * 2
    received = np.zeros((len(plan.layers), world_size), np.int64)
    for row, layer in zip(received, plan.layers, strict=True):
        for rank, count in layer.receive:
            row[rank] = count
    received[0] -= trained_halo
    sizes = vars(read_step_sizes(plan)).values()
    return np.concatenate([*sizes, [plan.external_nodes], received.reshape(-1), trained_rows])


def use_covers(plan: RankPlan) -> RankPlan:
    """Return ``plan`` with the sizes of its covers above layer 1. Layer 1 is kept, as with ``use_pp``."""
    first, *above = plan.layers
    covers = [layer.cover for layer in above if layer.cover is not None]
    assert len(covers) == len(above), "the plan was made without covers"
    indices = [np.concatenate([cover.layer.indices, cover.indices]) for cover in covers]
    layers = (replace(cover.layer, indices=ids) for cover, ids in zip(covers, indices, strict=True))
    return replace(plan, layers=(first, *layers))


def decode_work(sizes: Array, topology: Topology) -> FullWork:
    """Return the work of an epoch from the (R, W, K) int64 :func:`pack_sizes` of the plans of its steps."""
    world_size, num_servers = topology.world_size, topology.num_servers
    layers = (sizes.shape[2] - 2 - world_size) // (4 + world_size)
    ends = np.cumsum([layers + 1, layers, layers, layers, 1, layers * world_size])
    *step_fields, external, received, trained = np.split(sizes, ends, axis=2)
    rows, _, edges, _ = step_fields
    step, rank = divmod(int((edges.sum(axis=2) + rows.sum(axis=2)).argmax()), world_size)
    leaders = [topology.ranks_of_server(server)[0] for server in range(num_servers)]
    server = np.array(topology.server_of_rank)
    is_same = server[:, None] == server

    # Numbers of halo rows by receiving rank, layer and sending rank.
    halo = received.sum(axis=0).reshape(world_size, layers, world_size)
    trained_rows = trained.sum(axis=0)

    def to_ints(counts: Array) -> tuple[int, ...]:
        return tuple(counts.tolist())

    return FullWork(
        largest=StepSizes(*(to_ints(field[step, rank]) for field in step_fields)),
        outside=to_ints((halo * ~is_same[:, None]).sum(axis=(0, 2))),
        inside=to_ints((halo * is_same[:, None]).sum(axis=(0, 2))),
        external_rows=int(external[:, leaders].sum()),
        trained_rows=TrainedRows(
            outside=int((trained_rows * ~is_same).sum()), inside=int((trained_rows * is_same).sum())
        ),
        steps=len(sizes),
    )


@final
class LocalExchange:
    """Replacement for an exchange with the same allocations. It sends nothing."""

    def __init__(self, num_halo: int) -> None:
        self.num_halo = num_halo
        self.cover: CoverExchange | None = None

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        # Like the exchange, this allocates all rows forward, and the own rows backward.
        return functional.pad(h, [0, 0] * (h.dim() - 1) + [0, self.num_halo]) if self.num_halo else h


def build_blocks(plan: RankPlan | TypedPlan) -> list[Any]:
    """Return blocks for all layers of ``plan`` that compute without the other ranks."""
    blocks = list[Any]()
    layers: Sequence[HaloLayer | TypedLayer] = plan.layers
    for depth, layer in enumerate(layers):
        is_same = depth and layer is layers[depth - 1]
        blocks.append(blocks[-1].local_var() if is_same else _build_block(layer, plan.nodes))
    return blocks


def _build_block(layer: HaloLayer | TypedLayer, nodes: Any) -> HaloBlock | TypedHaloBlock:
    if isinstance(layer, HaloLayer):
        return halo_block(layer, torch.from_numpy(nodes), LocalExchange(len(layer.halo_nodes)))
    halos = [*layer.rows.items(), *layer.relations.items()]
    exchanges: Any = {kind: LocalExchange(len(halo.halo_nodes)) for kind, halo in halos}
    return typed_halo_block(layer, nodes, exchanges)


@final
class FullGraphCosts(CostModel):
    """Border rows of every layer, rows preloaded before the first epoch, and sums of all gradients."""

    inspect = staticmethod(check_rows_stay_apart)

    @staticmethod
    def works(candidate: Candidate, context: CandidateContext) -> tuple[Work, ...]:
        options = _read_options(candidate)
        return (FullGraphScheme(options.resolve_hops(context.num_layers), options.eas, options.batches),)

    @staticmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        options = _read_options(candidate)
        work: FullWork = counts.works[FullGraphCosts.works(candidate, counts.context)[0]]
        if work.steps < options.batches:
            return Cost(why_not=f"servers have training nodes for at most {work.steps} batches")
        if options.aggregate == "cover":
            return _build_cover_cost(counts, work)

        # If there are several batches, none of them keeps the features of its halo.
        use_pp = work.steps == 1
        traffic = _traffic(counts, work, use_pp=use_pp, wire=options.wire_dtype)
        memory = estimate_memory(counts, work, ahead=0 if work.steps == 1 else 1)
        if options.staleness:
            # Factor 4: the rows of an epoch are sent and received, and each is in a buffer and in transit.
            pairs = tuple(map(sum, zip(work.outside, work.inside, strict=True)))
            moved = count_exchanged_bytes(pairs, counts.shape, use_pp=use_pp)
            memory += 4 * sum(moved.values()) // counts.cluster.ranks

        return _build_cost(counts, traffic, memory)


def _read_options(candidate: Candidate) -> FullGraphOptions:
    options: FullGraphOptions = STRATEGIES.get(candidate.strategy).read_options(candidate.options)
    return options


def _build_cost(counts: EpochCounts, traffic: Traffic, memory: int) -> Cost:
    features = counts.own_feature_bytes
    return Cost(traffic=traffic, memory=memory, shared=features, on_host=counts.program_bytes + features)


def _build_cover_cost(counts: EpochCounts, sources: FullWork) -> Cost:
    if counts.shape.feature_widths is not None:
        return Cost(why_not="covers of several edge types are not counted; name the strategy and this option")
    first, *above = counts.shape.layers
    if not above or not all(layer.sums_sources for layer in above):
        return Cost(why_not="a layer reads its sources by more than a sum or mean")
    if (work := sources.cover) is None:
        return Cost(why_not="its covers were not counted, because the graph is too large")

    # Products are applied to own rows, before the exchange if that makes rows narrower.
    narrowed = (first, *(replace(layer, inputs=layer.summed) for layer in above))
    counts = replace(counts, shape=replace(counts.shape, layers=narrowed))

    # The blocks of source rows are kept in addition to those of the covers.
    blocks = sum(_list_structure_bytes(sources.largest))
    memory = estimate_memory(counts, work) + round(ALLOCATOR_OVERHEAD * blocks)
    return _build_cost(counts, _traffic(counts, work, use_pp=True), memory)


def estimate_memory(counts: EpochCounts, work: FullWork, *, ahead: int = 0) -> int:
    """Return the peak bytes of a rank that trains on whole graphs and loads ``ahead`` batches in advance."""
    shape, sizes = counts.shape, work.largest
    loaded_bytes = sizes.rows[0] * shape.features * shape.itemsize + sum(_list_structure_bytes(sizes))
    activations = counts.activations(sizes.rows[1:], sizes.sources)
    step_bytes = (1 + ahead) * loaded_bytes + sum(activations) + counts.backward_bytes(activations)
    sent = [rows * layer.inputs for rows, layer in zip(sizes.sent, shape.layers, strict=True)]
    # The buffers of sent rows, and of the gradients that come back.
    held_bytes = OPTIMIZER_COPIES * counts.parameter_bytes + 2 * max(sent) * shape.itemsize
    return counts.fixed_bytes + counts.own_feature_bytes + held_bytes + round(ALLOCATOR_OVERHEAD * step_bytes)


def _list_structure_bytes(sizes: StepSizes) -> list[int]:
    """Return (L,) bytes of the layers' blocks and plans. Equal successive layers count once."""
    # For the first layer, the slice before it is empty and equals no layer.
    layers = [*zip(sizes.edges, sizes.sources, sizes.rows[1:], sizes.sent, strict=True)]
    repeats = [layers[:depth][-1:] == [layer] for depth, layer in enumerate(layers)]
    return [0 if same else _structure_bytes(*layer) for same, layer in zip(repeats, layers, strict=True)]


def _structure_bytes(edges: int, sources: int, targets: int, sent: int) -> int:
    """Return the bytes of a layer's plan and block, 8 for each of these numbers.

    Per edge: source and id, position with half as much spare capacity, and in source order, which backward
    reads, target and position. Per source: offset and id. Per target, and per sent row: offset.
    """
    return (8 * 2 + 12 + 8 * 2) * edges + 16 * sources + 8 * (targets + sent)


def count_exchanged_bytes(
    pairs: Sequence[int], shape: ModelShape, *, use_pp: bool, wire: WireDtype = "same"
) -> dict[str, int]:
    """Return the bytes of an epoch by ledger phase, for (L,) ``pairs`` outside or inside of servers.

    ``halo`` is b_0 B_1 + b_1 B_2 + ..., where b_l are the bytes of d_l numbers as ``wire`` sends them. The
    first term is missing if layer-1 rows are cached (``use_pp``). ``halo_gradients`` is the same sum
    without the terms of rows that have no gradient. The result has no empty phases.
    """
    first, *above = (
        wire_bytes(wire, layer.inputs, shape.itemsize) * count
        for layer, count in zip(shape.layers, pairs, strict=True)
    )
    first = 0 if use_pp else first
    return present(halo=sum(above) + first, halo_gradients=sum(above) + (first if shape.first_learns else 0))


def _traffic(counts: EpochCounts, work: FullWork, *, use_pp: bool, wire: WireDtype = "same") -> Traffic:
    # With several types, this is the mean over the nodes.
    row = round(counts.graph.all_feature_bytes / counts.graph.nodes)
    outside, inside = (
        {**count_exchanged_bytes(pairs, counts.shape, use_pp=use_pp, wire=wire), **trained}
        for pairs, trained in zip(
            (work.outside, work.inside),
            work.trained_rows.traffic(counts.shape.trained_row_bytes),
            strict=True,
        )
    )
    halo = work.outside[0] * row if use_pp else 0
    one_planner = work.steps == 1 or counts.cluster.ranks_per_server == 1

    # The width of exchanged rows is unknown for a guessed shape.
    widths_known = not counts.shape.is_guessed or not (outside or inside)
    return build_traffic(
        outside,
        inside,
        ring_split(counts.shape.gradient_bytes, counts.cluster.server_of_rank, work.steps),
        startup_bytes=work.external_rows * (ID_BYTES + row) + halo,
        is_exact=one_planner and widths_known,
    )
