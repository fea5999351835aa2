"""Bytes and memory of lambda: graph servers and stateless workers (docs/strategies/lambda.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
from torch import nn

from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.planner.costs.base import (
    ID_BYTES,
    Cost,
    CostModel,
    EpochCounts,
    PlannedRun,
    Traffic,
    TypedFeatures,
    Work,
    build_traffic,
)
from dglx_dist.planner.costs.full_graph import FullGraphScheme, estimate_memory
from dglx_dist.records import Array
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.strategies.serverless.options import LambdaOptions

if TYPE_CHECKING:
    from dglx_dist.strategies.serverless.program import Program

_SHORT_ID_BYTES = 4
_STATISTICS_BYTES = 2 * 2 * 8
"""Bytes of loss and correct predictions, which are two float64 for each half of a fused task."""
_HALO_PHASES = ("ghosts", "ghost_gradients")
_EXCHANGING = FullGraphScheme(0)


@final
@dataclass(frozen=True)
class HaloPairs(Work):
    """Pairs of a node and another rank that reads the node. Intervals exchange the rows of these pairs."""

    def describe(self, num_layers: int) -> str:
        return "pairs of border nodes"

    def count(self, run: PlannedRun) -> HaloCounts | None:
        if run.in_job:
            # A job counts only the rows that training needs in the first layer. Intervals exchange all rows.
            work = run.works[_EXCHANGING]
            return work and HaloCounts(outside=work.outside[0], inside=work.inside[0], is_complete=False)
        shard = run.g.structure().shards[0]
        return count_halo_pairs(shard.indptr, shard.indices, run.partition.bounds, run.partition.topology)


@dataclass(frozen=True, kw_only=True)
class HaloCounts:
    """Counts of :class:`HaloPairs`."""

    outside: int
    inside: int
    is_complete: bool = True
    """Whether the counts cover all nodes of the graph, not only nodes that training needs."""


_EDGES_AT_ONCE = 1 << 18


def count_halo_pairs(indptr: Array, indices: Array, bounds: Array, topology: Topology) -> HaloCounts:
    """Count the pairs over all in-edges ((N + 1,) ``indptr``, (E,) ``indices``), rank by rank."""
    starts = RowOwners(bounds, topology).starts
    outside = inside = 0
    for rank in range(topology.world_size):
        first = int(starts[rank])
        last = int(starts[rank + 1])
        server = topology.server_of_rank[rank]
        is_read = np.zeros(int(bounds[-1]), np.bool_)
        edges = indices[int(indptr[first]) : int(indptr[last])]
        for start in range(0, len(edges), _EDGES_AT_ONCE):
            is_read[edges[start : start + _EDGES_AT_ONCE]] = True
        sources = np.flatnonzero(is_read)
        num_outside = np.count_nonzero((sources < bounds[server]) | (sources >= bounds[server + 1]))
        num_own = np.count_nonzero((sources >= first) & (sources < last))
        outside += int(num_outside)
        inside += int(len(sources) - num_outside - num_own)

    return HaloCounts(outside=outside, inside=inside)


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """Sizes of a graph and its parts."""

    nodes: int
    edges: int
    pairs: int
    """Pairs of a node and another graph server that reads it."""
    intervals: int
    """Number of intervals of all graph servers."""
    remote_intervals: int = 0
    """Number of intervals of graph servers other than the parameter server's."""


def serverless_bytes(program: Program, sizes: PartSizes) -> dict[str, int]:
    """Return the bytes of an epoch by ledger phase, over all ranks, with one parameter server.

    For each task of a worker, on n rows of nodes or edges, with s bytes per number and K intervals::

        lambda_down       n s (columns of inputs, and of gradients of outputs)
        lambda_up         n s (columns of outputs, or of gradients of inputs)
        fused last task   n 4 down for classes, 32 K up for loss and count
        weights           K |W| s down, and once up for a backward task

    A Scatter sends (4 + s d) for each pair, and as much back. Dorylus has these formulas for GCN.
    """
    from dglx_dist.strategies.serverless.graph_server import TaskKind, epoch_schedule
    from dglx_dist.strategies.serverless.program import Apply, Scatter
    from dglx_dist.strategies.serverless.tasks import Direction, Item, Role, given_items, pulled_items

    itemsize = np.dtype(program.dtype).itemsize
    totals = dict.fromkeys((*_HALO_PHASES, "lambda_down", "lambda_up", "weights_down", "weights_up"), 0)

    def count(items: Sequence[Item], rows: int) -> int:
        statistics = sum(item.role is Role.STATISTICS for item in items) * _STATISTICS_BYTES * sizes.intervals
        columns = sum(
            (item.width if item.slot or item.width else 1) * np.dtype(item.dtype).itemsize
            for item in items
            if item.role is not Role.STATISTICS
        )
        return rows * columns + statistics

    for task in epoch_schedule(program):
        step = program.steps[task.step]
        if isinstance(step, Scatter):
            is_back = task.kind is TaskKind.SEND_BACK
            if not is_back and task.kind is not TaskKind.SCATTER:
                continue
            names = [name for name in step.slots if not is_back or name in program.trained_slots]
            row = _SHORT_ID_BYTES + itemsize * sum(program.slots[name].width for name in names)
            totals[_HALO_PHASES[is_back]] += sizes.pairs * row
        elif isinstance(step, Apply) and task.kind in (TaskKind.WORK, TaskKind.APPLY):
            on_worker = task.kind is TaskKind.WORK
            if on_worker:
                rows = sizes.nodes if step.per == "node" else sizes.edges
                totals["lambda_down"] += count(pulled_items(program, task.step, task.direction), rows)
                totals["lambda_up"] += count(given_items(program, task.step, task.direction), rows)

            weights = sum(map(math.prod, program.weights_of(task.step).values())) * itemsize
            weights *= sizes.intervals if on_worker else sizes.remote_intervals
            totals["weights_down"] += weights
            totals["weights_up"] += weights * (task.direction is not Direction.FORWARD)

    return totals


def _traffic(counts: EpochCounts, halo: HaloCounts, program: Program) -> Traffic:
    from dglx_dist.strategies.serverless.parameter_service import bytes_of_read

    cluster = counts.cluster
    shape = counts.shape
    total = halo.outside + halo.inside
    intervals = LambdaOptions().intervals
    sizes = PartSizes(
        nodes=counts.graph.nodes,
        edges=counts.graph.edges,
        pairs=total,
        intervals=intervals * cluster.ranks,
        remote_intervals=intervals * (cluster.ranks - 1),
    )
    phases = serverless_bytes(program, sizes)

    # When the pipeline is emptied, all ranks read the weights, except the rank that stores them.
    read = bytes_of_read(program.weight_shapes, program.dtype)
    phases["weights_read"] = read * (cluster.ranks - 1)
    inside = {name: phases[name] * halo.inside // max(total, 1) for name in _HALO_PHASES}
    inside["weights_read"] = read * (cluster.ranks_per_server - 1)
    outside = {name: count - inside.get(name, 0) for name, count in phases.items()}
    startup_bytes = halo.outside * (2 * ID_BYTES + counts.graph.feature_bytes)

    # Degrees and data of edges that are read before the first epoch are not counted.
    is_exact = halo.is_complete and not shape.is_guessed
    return build_traffic(outside, inside, (0, 0), startup_bytes=startup_bytes, is_exact=is_exact)


@final
class LambdaCosts(CostModel):
    """Border rows between graph servers, and rows and weights to and from workers on the same servers."""

    @staticmethod
    def inspect(model: nn.Module, features: int | TypedFeatures) -> Program:
        if isinstance(features, TypedFeatures):
            raise ConfigError("lambda does not train models of several node or edge types")
        # Other strategies do not need the capture of models.
        from torch.nn.functional import cross_entropy

        from dglx_dist.strategies.serverless.cut import CLASS_LABEL, capture

        return capture(model, features).with_loss(cross_entropy, CLASS_LABEL).program

    @staticmethod
    def works(candidate: Candidate, context: CandidateContext) -> tuple[Work, ...]:
        return _EXCHANGING, HaloPairs()

    @staticmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        traffic = _traffic(counts, counts.works[HaloPairs()], counts.shape.inspected[candidate.strategy])
        # Every epoch in flight keeps its activations.
        num_in_flight = 1 + 0.5 * (int(candidate.options.get("staleness", -1)) + 1)
        epoch_bytes = estimate_memory(counts, counts.works[_EXCHANGING]) - counts.fixed_bytes
        memory = counts.fixed_bytes + round(epoch_bytes * num_in_flight)
        return Cost(traffic=traffic, memory=memory, note="workers on the same servers")
