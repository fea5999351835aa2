"""Bytes and memory for full_graph, shared_preload and cooperative, from an epoch's plans.

See docs/strategies/shared_preload.md. Plans are counted by one process or by all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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

_MAX_EDGES = 200_000_000
"""Largest plans to build, in edges over layers and cooperative batches. A million edges take a second."""
_PLAN_BYTES = 100
"""Memory to build all ranks' plans, in bytes per edge. 95 were measured with two layers."""
_COVER_BYTES = 40
"""Memory for building covers, in bytes per edge. 27 were measured with two layers on 4 servers."""


@final
@dataclass(frozen=True)
class StepSizes:
    """Rows and edges in a step on one rank."""

    rows: tuple[int, ...]
    """(L + 1,) rows by level, features first."""
    sources: tuple[int, ...]
    """(L,) sources by layer."""
    edges: tuple[int, ...]
    """(L,) edges by layer."""
    sent: tuple[int, ...]
    """(L,) rows that other ranks receive."""


def read_step_sizes(plan: RankPlan) -> StepSizes:
    """Count the rows and edges in the step that ``plan`` describes."""
    layers = plan.layers
    num_sent = []
    for layer in layers:
        num_sent.append(sum(len(rows) for _, rows in layer.send))
    return StepSizes(
        rows=(layers[0].own_rows, *(layer.targets for layer in layers)),
        sources=tuple(layer.num_sources for layer in layers),
        edges=tuple(len(layer.indices) for layer in layers),
        sent=tuple(num_sent),
    )


@dataclass(frozen=True, kw_only=True)
class FullWork:
    """Work in one full-graph epoch."""

    largest: StepSizes
    """Sizes of the largest step on any rank."""
    outside: tuple[int, ...]
    """B_ext by layer: rows that cross servers in an epoch, over all ranks and steps, input-most first.

    An entry counts pairs of a node and a rank. The rank reads the node's row as an input of the layer without
    computing it, and a rank on another server computes it. Shape (L,).
    """
    inside: tuple[int, ...]
    """(L,) pairs for which another rank on the same server computes the row."""
    external_rows: int
    """Feature rows preloaded from other servers, over all servers and steps."""
    trained_rows: TrainedRows
    """Trainable input rows. Layer 1 reads them by id, so :attr:`outside` and :attr:`inside` lack them."""
    steps: int = 1
    cover: FullWork | None = None
    """The same work if layers above the first exchange rows of covers. None if covers were not counted."""
    plan: RankPlan | TypedPlan | None = None
    """Plan for the largest step on any rank. None if another process may have built the plan."""


@final
@dataclass(frozen=True)
class FullGraphScheme(Work):
    """Plans and batches when training on a whole graph."""

    hops: int
    """Layers that a server computes without rows from other servers."""
    eas: EasOptions | None = None
    """Limits for the external neighbourhood. None: it has no limit."""
    cooperative_batches: int = 1

    def describe(self, num_layers: int) -> str:
        text = f"plans of {self.hops} of {num_layers} layers preloaded"
        if self.eas:
            text += ", sampled"
        if self.cooperative_batches > 1:
            text += f" in {self.cooperative_batches} cooperative batches"
        return text

    def count(self, run: PlannedRun) -> FullWork | None:
        if run.graph.edges * run.num_layers * self.cooperative_batches > _MAX_EDGES:
            return None
        # In a job, free memory differs between ranks, but either all ranks must count or none.
        free_bytes = sys.maxsize
        if not run.in_job:
            free_bytes = machine_memory()[1]
        if run.graph.edges * _PLAN_BYTES > free_bytes:
            return None

        graph = run.partition.structure
        can_cover = self.cooperative_batches == 1 and not self.eas and not isinstance(graph, UnifiedGraph)
        use_cover = can_cover and run.graph.edges * (_PLAN_BYTES + _COVER_BYTES) <= free_bytes
        sizes, plan = self._count_steps(run, use_cover)
        works = [decode_work(variant, run.partition.topology) for variant in sizes]
        cover = works[1] if use_cover else None
        if run.in_job or plan is None:
            return replace(works[0], cover=cover)
        if isinstance(graph, UnifiedGraph):
            return replace(works[0], cover=cover, plan=graph.split(plan))
        return replace(works[0], cover=cover, plan=plan)

    def _count_steps(self, run: PlannedRun, use_cover: bool) -> tuple[Array, RankPlan | None]:
        """Build the plans for all steps.

        Returns:
            The plans' sizes, and the largest plan that this process built. There is one entry for plans with
            source rows and, with ``use_cover``, one for plans with covers. Each is an (R, W, K) array that
                holds
            the packed sizes by step and rank.
        """
        topology = run.partition.topology
        make_plans = self._make_planner(run, use_cover)
        steps = self._compose_steps(run)
        counted: list[list[list[Array]]] = []
        largest_plan = None
        most_work = -1
        for step in steps:
            counted.append([])
            for rank, plan in zip(run.ranks_here, make_plans(step), strict=True):
                work = _measure_plan(plan)
                if work > most_work:
                    largest_plan = plan
                    most_work = work
                trained = find_trained_rows(run, plan, rank)
                variants = [pack_sizes(plan, topology.world_size, trained)]
                if use_cover:
                    variants.append(pack_sizes(use_covers(plan), topology.world_size, trained))
                counted[-1].append(variants)

        sizes: Array = np.array(counted)
        gathered = gather_int64(sizes, run.g.session).reshape(-1, *sizes.shape)
        # (processes, R, ranks per process, variants, K) to (variants, R, processes, ranks per process, K)
        ordered = gathered.transpose(3, 1, 0, 2, 4)
        return ordered.reshape(len(ordered), len(steps), topology.world_size, -1), largest_plan

    def _compose_steps(self, run: PlannedRun) -> list[list[Array]]:
        """Return each step's (K,) int64 seeds by server. At least one server has seeds in a step."""
        num_batches = self.cooperative_batches
        batches_by_server: list[Sequence[Array]] = []
        for ids in split_by_server(run.partition, run.plan_seeds):
            batches: Sequence[Array] = [ids]
            if num_batches > 1:
                batches = compose_batches(ids, num_batches, "random", seed=run.partition.seed)
            batches_by_server.append(batches)

        # A server may have fewer seeds than there are batches.
        steps = [list(step) for step in zip(*batches_by_server, strict=True)]
        return [step for step in steps if any(map(len, step))]

    def _make_planner(self, run: PlannedRun, use_cover: bool) -> Callable[[list[Array]], list[RankPlan]]:
        """Return a function from a step's seeds by server to the plans of the ranks counted here."""
        topology = run.partition.topology
        eas = self.eas and make_selection(self.eas, seed=run.partition.seed)
        options: dict[str, Any] = {"hops": self.hops, "eas": eas, "cover": use_cover}
        options["num_layers"] = run.num_layers
        if not run.in_job:
            return partial(make_all_plans, run.partition, **options)
        planner = Planner(run.g)

        def make_plan(seeds: list[Array]) -> list[RankPlan]:
            # One rank on a server passes the seeds for the whole server.
            server_seeds = NO_IDS
            if topology.local_rank == 0:
                server_seeds = seeds[topology.server]
            return [planner.plan(PlanRequest(seeds=server_seeds, show_progress=False, **options))]

        return make_plan

    def blocks(self, counts: FullWork) -> tuple[list[Any], int] | None:
        if counts.plan is None:
            return None
        return build_blocks(counts.plan), counts.steps


def _measure_plan(plan: RankPlan) -> int:
    """Count the edges and rows in ``plan``, which tell how long its step takes."""
    num_edges = sum(len(layer.indices) for layer in plan.layers)
    num_targets = sum(layer.targets for layer in plan.layers)
    return num_edges + num_targets + plan.layers[0].own_rows


def find_trained_rows(run: PlannedRun, plan: RankPlan, rank: int) -> tuple[Array, Array]:
    """Count the trainable rows that ``rank`` reads as inputs.

    Returns:
        - (W,) int64 rows by the rank that owns them, without own rows.
        - (W,) int64 rows in layer 1's halo by the rank that would send them.
    """
    world_size = run.partition.topology.world_size
    graph = run.partition.structure
    if not isinstance(graph, UnifiedGraph):
        return np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)

    first_layer = plan.layers[0]
    rows = np.concatenate([plan.nodes, first_layer.halo_nodes])
    trained_types = [index for index, ntype in enumerate(graph.ntypes) if ntype in run.trained_types]
    types, _ = graph.nodes.locate(rows)
    is_trained = np.isin(types, trained_types)
    owners = run.partition.find_owners(rows[is_trained])

    # Halo rows are in order of the ranks that send them.
    ranks, num_rows = np.array(first_layer.receive, np.int64).reshape(-1, 2).T
    senders = np.repeat(ranks, num_rows)
    trained_senders = senders[is_trained[len(plan.nodes) :]]
    return (
        np.bincount(owners[owners != rank], minlength=world_size),
        np.bincount(trained_senders, minlength=world_size),
    )


def pack_sizes(plan: RankPlan, world_size: int, trained: tuple[Array, Array] | None = None) -> Array:
    """Pack a plan's sizes into one int64 array, which :func:`decode_work` unpacks.

    With L layers and W ranks, the array holds in this order:

    - all fields that :func:`read_step_sizes` returns,
    - the number of feature rows that the server fetches from other servers,
    - (L, W) halo rows by the rank that sends them, without trainable rows in layer 1,
    - (W,) trainable rows by the rank that owns them.

    ``trained`` is the result from :func:`find_trained_rows`. None: no rows are trainable.
    """
    received = np.zeros((len(plan.layers), world_size), np.int64)
    for layer_row, layer in zip(received, plan.layers, strict=True):
        for sender, num_rows in layer.receive:
            layer_row[sender] = num_rows
    trained_rows = np.zeros(world_size, np.int64)
    if trained is not None:
        trained_rows, trained_halo = trained
        received[0] -= trained_halo

    sizes = vars(read_step_sizes(plan)).values()
    return np.concatenate([*sizes, [plan.external_nodes], received.reshape(-1), trained_rows])


def use_covers(plan: RankPlan) -> RankPlan:
    """Return ``plan`` with its covers' sizes above layer 1. Layer 1 is kept, as with ``use_pp``."""
    layers = [plan.layers[0]]
    for layer in plan.layers[1:]:
        cover = layer.cover
        assert cover is not None, "the plan was made without covers"
        indices = np.concatenate([cover.layer.indices, cover.indices])
        layers.append(replace(cover.layer, indices=indices))
    return replace(plan, layers=tuple(layers))


def decode_work(sizes: Array, topology: Topology) -> FullWork:
    """Unpack an epoch's work from the (R, W, K) int64 arrays that :func:`pack_sizes` made of its plans."""
    world_size = topology.world_size
    # K is (L + 1) + 3 L for a step's sizes, 1, L W and W.
    num_layers = (sizes.shape[2] - 2 - world_size) // (4 + world_size)
    lengths = [num_layers + 1, num_layers, num_layers, num_layers, 1, num_layers * world_size]
    *step_fields, external, received, trained = np.split(sizes, np.cumsum(lengths), axis=2)

    # The largest step has the most edges and rows.
    rows, _, edges, _ = step_fields
    num_elements = edges.sum(axis=2) + rows.sum(axis=2)
    step, rank = divmod(int(num_elements.argmax()), world_size)
    largest = StepSizes(*(_to_ints(field[step, rank]) for field in step_fields))

    # All ranks on a server report the rows that the server preloads, so only the first one counts.
    first_ranks = [topology.ranks_of_server(server)[0] for server in range(topology.num_servers)]
    server = np.array(topology.server_of_rank)
    is_same = server[:, None] == server

    # Halo rows by receiving rank, layer and sending rank.
    halo = received.sum(axis=0).reshape(world_size, num_layers, world_size)
    trained_rows = trained.sum(axis=0)
    return FullWork(
        largest=largest,
        outside=_to_ints((halo * ~is_same[:, None]).sum(axis=(0, 2))),
        inside=_to_ints((halo * is_same[:, None]).sum(axis=(0, 2))),
        external_rows=int(external[:, first_ranks].sum()),
        trained_rows=TrainedRows(
            outside=int((trained_rows * ~is_same).sum()), inside=int((trained_rows * is_same).sum())
        ),
        steps=len(sizes),
    )


def _to_ints(array: Array) -> tuple[int, ...]:
    return tuple(array.tolist())


@final
class LocalExchange:
    """Replacement for an exchange with the same allocations. It sends nothing."""

    def __init__(self, num_halo: int) -> None:
        self.num_halo = num_halo
        self.cover: CoverExchange | None = None

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return ``h`` with zeros as halo rows."""
        if not self.num_halo:
            return h
        # Like the exchange, padding allocates all rows forward, and the own rows backward. The list begins
        # with the last dimension, so the last two numbers are for the rows.
        padding = [0, 0] * (h.dim() - 1) + [0, self.num_halo]
        return functional.pad(h, padding)


def build_blocks(plan: RankPlan | TypedPlan) -> list[Any]:
    """Build a block for each layer in ``plan``. The blocks compute without the other ranks."""
    blocks: list[Any] = []
    previous_layer = None
    layers: Sequence[HaloLayer | TypedLayer] = plan.layers
    for layer in layers:
        if layer is previous_layer:
            # Equal layers share a structure, as they do in training.
            blocks.append(blocks[-1].local_var())
        else:
            blocks.append(_build_block(layer, plan.nodes))
        previous_layer = layer
    return blocks


def _build_block(layer: HaloLayer | TypedLayer, nodes: Any) -> HaloBlock | TypedHaloBlock:
    if isinstance(layer, HaloLayer):
        return halo_block(layer, torch.from_numpy(nodes), LocalExchange(len(layer.halo_nodes)))
    exchanges: Any = {}
    for type_name, halo in [*layer.rows.items(), *layer.relations.items()]:
        exchanges[type_name] = LocalExchange(len(halo.halo_nodes))
    return typed_halo_block(layer, nodes, exchanges)


@final
class FullGraphCosts(CostModel):
    """Counts border rows in every layer, rows preloaded before the first epoch, and gradient sums."""

    inspect = staticmethod(check_rows_stay_apart)

    @staticmethod
    def works(candidate: Candidate, context: CandidateContext) -> tuple[Work, ...]:
        options = _read_options(candidate)
        return (FullGraphScheme(options.resolve_hops(context.num_layers), options.eas, options.batches),)

    @staticmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        options = _read_options(candidate)
        scheme = FullGraphCosts.works(candidate, counts.context)[0]
        work: FullWork = counts.works[scheme]
        if work.steps < options.batches:
            return Cost(why_not=f"servers have training nodes for at most {work.steps} batches")
        if options.aggregate == "cover":
            return _build_cover_cost(counts, work)

        # With several batches, no batch keeps its halo's features, and the next batch is loaded ahead.
        use_pp = work.steps == 1
        num_ahead = 0 if work.steps == 1 else 1
        traffic = _traffic(counts, work, use_pp=use_pp, wire=options.wire_dtype)
        memory = estimate_memory(counts, work, ahead=num_ahead)
        if options.staleness:
            # Factor 4: an epoch's rows are sent and received, and each is in a buffer and in transit.
            pairs = tuple(map(sum, zip(work.outside, work.inside, strict=True)))
            moved_bytes = count_exchanged_bytes(pairs, counts.shape, use_pp=use_pp)
            memory += 4 * sum(moved_bytes.values()) // counts.cluster.ranks

        return _build_cost(counts, traffic, memory)


def _read_options(candidate: Candidate) -> FullGraphOptions:
    options: FullGraphOptions = STRATEGIES.get(candidate.strategy).read_options(candidate.options)
    return options


def _build_cost(counts: EpochCounts, traffic: Traffic, memory: int) -> Cost:
    features = counts.own_feature_bytes
    return Cost(traffic=traffic, memory=memory, shared=features, on_host=counts.program_bytes + features)


def _build_cover_cost(counts: EpochCounts, work: FullWork) -> Cost:
    """Compute an epoch's cost with ``aggregate="cover"``. ``work`` has the counts for source rows, too."""
    if counts.shape.feature_widths is not None:
        return Cost(why_not="covers of several edge types are not counted; name the strategy and this option")
    first_layer, *layers_above = counts.shape.layers
    if not layers_above or not all(layer.sums_sources for layer in layers_above):
        return Cost(why_not="a layer reads its sources by more than a sum or mean")
    if work.cover is None:
        return Cost(why_not="its covers were not counted, because the graph is too large")

    # Products are applied to own rows, before the exchange if that makes rows narrower.
    layers = [first_layer]
    for layer in layers_above:
        layers.append(replace(layer, inputs=layer.summed))
    counts = replace(counts, shape=replace(counts.shape, layers=tuple(layers)))

    # Blocks for source rows are kept in addition to those for covers.
    block_bytes = sum(_list_structure_bytes(work.largest))
    memory = estimate_memory(counts, work.cover) + round(ALLOCATOR_OVERHEAD * block_bytes)
    return _build_cost(counts, _traffic(counts, work.cover, use_pp=True), memory)


def estimate_memory(counts: EpochCounts, work: FullWork, *, ahead: int = 0) -> int:
    """Return a rank's peak bytes when it trains on whole graphs and loads ``ahead`` batches in advance."""
    shape = counts.shape
    sizes = work.largest
    input_bytes = sizes.rows[0] * shape.features * shape.itemsize
    loaded_bytes = input_bytes + sum(_list_structure_bytes(sizes))
    activations = counts.activations(sizes.rows[1:], sizes.sources)
    step_bytes = (1 + ahead) * loaded_bytes + sum(activations) + counts.backward_bytes(activations)

    # The sent rows have buffers, and the gradients that come back have equally large buffers.
    num_sent = [rows * layer.inputs for rows, layer in zip(sizes.sent, shape.layers, strict=True)]
    buffer_bytes = 2 * max(num_sent) * shape.itemsize
    held_bytes = counts.own_feature_bytes + OPTIMIZER_COPIES * counts.parameter_bytes + buffer_bytes
    return counts.fixed_bytes + held_bytes + round(ALLOCATOR_OVERHEAD * step_bytes)


def _list_structure_bytes(sizes: StepSizes) -> list[int]:
    """Return (L,) bytes for the layers' blocks and plans. Equal successive layers count once."""
    layer_bytes = []
    previous_layer = None
    for layer in zip(sizes.edges, sizes.sources, sizes.rows[1:], sizes.sent, strict=True):
        num_bytes = 0
        if layer != previous_layer:
            num_bytes = _structure_bytes(*layer)
        layer_bytes.append(num_bytes)
        previous_layer = layer
    return layer_bytes


def _structure_bytes(edges: int, sources: int, targets: int, sent: int) -> int:
    """Return the bytes of a layer's plan and block, with 8 bytes per number.

    Each edge has its source and id, a position with half as much spare capacity, and in source order, which
    backward reads, its target and position. Each source has an offset and id. Each target and each sent row
    has an offset.
    """
    return (8 * 2 + 12 + 8 * 2) * edges + 16 * sources + 8 * (targets + sent)


def count_exchanged_bytes(
    pairs: Sequence[int], shape: ModelShape, *, use_pp: bool, wire: WireDtype = "same"
) -> dict[str, int]:
    """Return an epoch's bytes by ledger phase, for (L,) ``pairs`` outside or inside servers.

    ``halo`` is b_0 B_1 + b_1 B_2 + ..., where ``wire`` sends d_l numbers in b_l bytes. The first term is
    missing if layer-1 rows are cached (``use_pp``). ``halo_gradients`` is the same sum without the terms for
    rows that have no gradient. The result has no empty phases.
    """
    layer_bytes = []
    for layer, num_pairs in zip(shape.layers, pairs, strict=True):
        layer_bytes.append(wire_bytes(wire, layer.inputs, shape.itemsize) * num_pairs)
    if use_pp:
        layer_bytes[0] = 0

    gradient_bytes = sum(layer_bytes)
    if not shape.first_learns:
        gradient_bytes -= layer_bytes[0]
    return present(halo=sum(layer_bytes), halo_gradients=gradient_bytes)


def _traffic(counts: EpochCounts, work: FullWork, *, use_pp: bool, wire: WireDtype = "same") -> Traffic:
    """Return an epoch's traffic. With ``use_pp``, layer-1 rows are fetched before the first epoch."""
    shape = counts.shape
    trained_outside, trained_inside = work.trained_rows.traffic(shape.trained_row_bytes)
    halo_outside = count_exchanged_bytes(work.outside, shape, use_pp=use_pp, wire=wire)
    halo_inside = count_exchanged_bytes(work.inside, shape, use_pp=use_pp, wire=wire)
    outside = {**halo_outside, **trained_outside}
    inside = {**halo_inside, **trained_inside}

    # With several types, a row's bytes are the mean over the nodes.
    row_bytes = round(counts.graph.all_feature_bytes / counts.graph.nodes)
    startup_bytes = work.external_rows * (ID_BYTES + row_bytes)
    if use_pp:
        startup_bytes += work.outside[0] * row_bytes

    # In a guessed shape, the width of exchanged rows is unknown.
    has_one_planner = work.steps == 1 or counts.cluster.ranks_per_server == 1
    are_widths_known = not shape.is_guessed or not (outside or inside)
    return build_traffic(
        outside,
        inside,
        ring_split(shape.gradient_bytes, counts.cluster.server_of_rank, work.steps),
        startup_bytes=startup_bytes,
        is_exact=has_one_planner and are_widths_known,
    )
