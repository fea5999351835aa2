"""Bytes and memory for lambda: graph servers and stateless workers (docs/strategies/lambda.md)."""

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
from dglx_dist.planner.costs.full_graph import FullGraphScheme, FullWork, estimate_memory
from dglx_dist.records import Array
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.strategies.serverless.options import LambdaOptions

if TYPE_CHECKING:
    from dglx_dist.strategies.serverless.program import Program
    from dglx_dist.strategies.serverless.tasks import Item

_SHORT_ID_BYTES = 4
_STATISTICS_BYTES = 2 * 2 * 8
"""Bytes for loss and correct predictions: two float64 for each half of a fused task."""
_HALO_PHASES = ("ghosts", "ghost_gradients")
_EXCHANGING = FullGraphScheme(0)


@final
@dataclass(frozen=True)
class HaloPairs(Work):
    """Counts pairs of a node and another rank that reads it. Intervals exchange the rows of these pairs."""

    def describe(self, num_layers: int) -> str:
        return "pairs of border nodes"

    def count(self, run: PlannedRun) -> HaloCounts | None:
        if not run.in_job:
            shard = run.g.structure().shards[0]
            return count_halo_pairs(shard.indptr, shard.indices, run.partition.bounds, run.partition.topology)

        # A job counts only the rows that training needs in the first layer. Intervals exchange all rows.
        work: FullWork | None = run.works[_EXCHANGING]
        if work is None:
            return None
        return HaloCounts(outside=work.outside[0], inside=work.inside[0], is_complete=False)


@dataclass(frozen=True, kw_only=True)
class HaloCounts:
    """Counts from :class:`HaloPairs`."""

    outside: int
    inside: int
    is_complete: bool = True
    """Whether the counts cover all nodes in the graph, not only nodes that training needs."""


_EDGES_AT_ONCE = 1 << 18


def count_halo_pairs(indptr: Array, indices: Array, bounds: Array, topology: Topology) -> HaloCounts:
    """Count the pairs over all in-edges ((N + 1,) ``indptr``, (E,) ``indices``), rank by rank.

    ``bounds`` has the (S + 1,) first node on each server.
    """
    starts = RowOwners(bounds, topology).starts
    outside = 0
    inside = 0
    for rank in range(topology.world_size):
        first_node = int(starts[rank])
        end_node = int(starts[rank + 1])
        server = topology.server_of_rank[rank]

        # A rank's edges may not fit in memory, so they are read in pieces.
        is_read = np.zeros(int(bounds[-1]), np.bool_)
        sources_of_edges = indices[int(indptr[first_node]) : int(indptr[end_node])]
        for start in range(0, len(sources_of_edges), _EDGES_AT_ONCE):
            is_read[sources_of_edges[start : start + _EDGES_AT_ONCE]] = True

        sources = np.flatnonzero(is_read)
        is_outside = (sources < bounds[server]) | (sources >= bounds[server + 1])
        is_own = (sources >= first_node) & (sources < end_node)
        num_outside = int(np.count_nonzero(is_outside))
        outside += num_outside
        inside += len(sources) - num_outside - int(np.count_nonzero(is_own))

    return HaloCounts(outside=outside, inside=inside)


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """Sizes of a graph and its parts."""

    nodes: int
    edges: int
    pairs: int
    """Pairs of a node and another graph server that reads it."""
    intervals: int
    """Intervals on all graph servers."""
    remote_intervals: int = 0
    """Intervals on graph servers other than the parameter server's."""


def serverless_bytes(program: Program, sizes: PartSizes) -> dict[str, int]:
    """Return an epoch's bytes by ledger phase, over all ranks, with one parameter server.

    For each task that a worker computes, on n rows (nodes or edges), with s bytes per number and K
    intervals::

        lambda_down       n s (columns in inputs, and in gradients of outputs)
        lambda_up         n s (columns in outputs, or in gradients of inputs)
        fused last task   n 4 down for classes, 32 K up for loss and count
        weights           K |W| s down, and once up for a backward task

    A Scatter sends (4 + s d) for each pair, and as much back. Dorylus has these formulas for GCN.
    """
    from dglx_dist.strategies.serverless.graph_server import TaskKind, epoch_schedule
    from dglx_dist.strategies.serverless.program import Apply, Scatter
    from dglx_dist.strategies.serverless.tasks import Direction, list_pulled_items, list_submitted_items

    itemsize = np.dtype(program.dtype).itemsize
    totals = dict.fromkeys((*_HALO_PHASES, "lambda_down", "lambda_up", "weights_down", "weights_up"), 0)
    for task in epoch_schedule(program):
        step = program.steps[task.step]
        if isinstance(step, Scatter) and task.kind in (TaskKind.SCATTER, TaskKind.SEND_BACK):
            # Only rows in trained slots have gradients that are sent back.
            names = list(step.slots)
            phase = "ghosts"
            if task.kind is TaskKind.SEND_BACK:
                names = [name for name in names if name in program.trained_slots]
                phase = "ghost_gradients"
            num_columns = sum(program.slots[name].width for name in names)
            totals[phase] += sizes.pairs * (_SHORT_ID_BYTES + itemsize * num_columns)

        elif isinstance(step, Apply) and task.kind in (TaskKind.WORK, TaskKind.APPLY):
            num_readers = sizes.remote_intervals
            if task.kind is TaskKind.WORK:
                num_readers = sizes.intervals
                num_rows = sizes.nodes if step.per == "node" else sizes.edges
                input_items = list_pulled_items(program, task.step, task.direction)
                output_items = list_submitted_items(program, task.step, task.direction)
                totals["lambda_down"] += _count_item_bytes(input_items, num_rows, sizes.intervals)
                totals["lambda_up"] += _count_item_bytes(output_items, num_rows, sizes.intervals)

            num_weights = sum(map(math.prod, program.weights_of(task.step).values()))
            weight_bytes = num_weights * itemsize * num_readers
            totals["weights_down"] += weight_bytes
            if task.direction is not Direction.FORWARD:
                totals["weights_up"] += weight_bytes

    return totals


def _count_item_bytes(items: Sequence[Item], num_rows: int, num_intervals: int) -> int:
    """Return the bytes of a task's ``items`` that all intervals send. They have ``num_rows`` together."""
    from dglx_dist.strategies.serverless.tasks import Role

    num_bytes = 0
    for item in items:
        if item.role is Role.STATISTICS:
            num_bytes += _STATISTICS_BYTES * num_intervals
            continue
        num_columns = item.width
        if not item.slot and not item.width:
            # Classes are one number for each row.
            num_columns = 1
        num_bytes += num_rows * num_columns * np.dtype(item.dtype).itemsize
    return num_bytes


def _traffic(counts: EpochCounts, halo: HaloCounts, program: Program) -> Traffic:
    """Return an epoch's traffic with the default number of intervals."""
    from dglx_dist.strategies.serverless.parameter_service import count_parameter_bytes

    cluster = counts.cluster
    num_intervals = LambdaOptions().intervals
    num_pairs = halo.outside + halo.inside
    sizes = PartSizes(
        nodes=counts.graph.nodes,
        edges=counts.graph.edges,
        pairs=num_pairs,
        intervals=num_intervals * cluster.ranks,
        remote_intervals=num_intervals * (cluster.ranks - 1),
    )
    phases = serverless_bytes(program, sizes)

    # When the pipeline is emptied, all ranks read the weights, except the rank that stores them.
    read_bytes = count_parameter_bytes(program.weight_shapes, program.dtype)
    phases["weights_read"] = read_bytes * (cluster.ranks - 1)

    inside = {"weights_read": read_bytes * (cluster.ranks_per_server - 1)}
    for name in _HALO_PHASES:
        inside[name] = phases[name] * halo.inside // max(num_pairs, 1)
    outside = {}
    for name, num_bytes in phases.items():
        outside[name] = num_bytes - inside.get(name, 0)
    startup_bytes = halo.outside * (2 * ID_BYTES + counts.graph.feature_bytes)

    # Degrees and edge data that are read before the first epoch are not counted.
    is_exact = halo.is_complete and not counts.shape.is_guessed
    return build_traffic(outside, inside, (0, 0), startup_bytes=startup_bytes, is_exact=is_exact)


@final
class LambdaCosts(CostModel):
    """Counts border rows between graph servers, and rows and weights to and from workers beside them."""

    @staticmethod
    def inspect(model: nn.Module, features: int | TypedFeatures) -> Program:
        if isinstance(features, TypedFeatures):
            raise ConfigError("lambda does not train models of several node or edge types")
        # Other strategies need not capture models.
        from torch.nn.functional import cross_entropy

        from dglx_dist.strategies.serverless.cut import CLASS_LABEL, capture

        return capture(model, features).with_loss(cross_entropy, CLASS_LABEL).program

    @staticmethod
    def works(candidate: Candidate, context: CandidateContext) -> tuple[Work, ...]:
        return _EXCHANGING, HaloPairs()

    @staticmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        traffic = _traffic(counts, counts.works[HaloPairs()], counts.shape.inspected[candidate.strategy])
        # Epochs that run ahead of others keep activations, too. Each of them is unfinished and counts half.
        staleness = int(candidate.options.get("staleness", -1))
        num_in_flight = 1 + 0.5 * (staleness + 1)
        epoch_bytes = estimate_memory(counts, counts.works[_EXCHANGING]) - counts.fixed_bytes
        memory = counts.fixed_bytes + round(epoch_bytes * num_in_flight)
        return Cost(traffic=traffic, memory=memory, note="workers on the same servers")
