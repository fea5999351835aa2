"""Bytes and memory of lambda: graph servers and stateless workers (docs/strategies/lambda.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import nn

from dglx_dist.comm.topology import Topology
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.planner.costs.base import (
    ID_BYTES,
    Cost,
    CostModel,
    EpochCounts,
    PlannedRun,
    Traffic,
    Work,
    build_traffic,
)
from dglx_dist.planner.costs.full_graph import FullGraphScheme, estimate_memory
from dglx_dist.records import Array
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.strategies.serverless.options import LambdaOptions

_SHORT_ID_BYTES, _LABEL_BYTES, _STATISTICS_BYTES = 4, 4, 2 * 2 * 8
"""Bytes of an id, of a label, and of loss and correct predictions. A label is sent as a number, where the
paper sends one-hot rows. The statistics are two float64 for each half of a fused task.
"""
_GHOSTS = ("ghosts", "ghost_gradients")
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
        shard = run.partition.structure.shards[0]
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
        first, last = int(starts[rank]), int(starts[rank + 1])
        server = topology.server_of_rank[rank]
        is_read, edges = np.zeros(int(bounds[-1]), np.bool_), indices[int(indptr[first]) : int(indptr[last])]
        for start in range(0, len(edges), _EDGES_AT_ONCE):
            is_read[edges[start : start + _EDGES_AT_ONCE]] = True
        sources = np.flatnonzero(is_read)
        num_outside = np.count_nonzero((sources < bounds[server]) | (sources >= bounds[server + 1]))
        num_own = np.count_nonzero((sources >= first) & (sources < last))
        outside += int(num_outside)
        inside += int(len(sources) - num_outside - num_own)
    return HaloCounts(outside=outside, inside=inside)


def serverless_bytes(
    *,
    widths: Sequence[int],
    nodes: int,
    ghosts: int,
    intervals: int,
    fusion: bool = True,
    rematerialise: bool = True,
    own_rows: bool = False,
    itemsize: int = 4,
) -> dict[str, int]:
    """Return the bytes of an epoch by ledger phase, over all ranks, with one parameter server.

    The formulas hold for convolutions that map sums, with i = d_{l-1} columns, like GCN's. With ``own_rows``
    they hold for a sum beside the own row, with i = 2 d_{l-1}, like GraphSAGE's. Streaming does not change
    them. For each layer l of L, with n nodes, |G| pairs of a node and another graph server that reads it, s
    bytes per number and K intervals::

        ghosts            |G| (4 + s d_l)               l < L, and as much back
        AV l              n i s down                    n d_l s up, twice that without rematerialisation
        fused AV L        n (i s + 4) down              n i s up, not for L = 1; 32 K of loss and count
        gradAV l          n (i + d_l) s down            n i s up, not for l = 1; n d_l s more down
                                                        without rematerialisation
        weights           K |W_l| s for each task down, once back

    ``widths`` are d_0 to d_L: features, hidden widths, classes.
    """
    hidden = sum(widths[1:-1])
    boundary = ghosts * (_SHORT_ID_BYTES * (len(widths) - 2) + itemsize * hidden)
    down = up = weights_down = weights_up = 0
    last = len(widths) - 1
    for layer in range(1, last + 1):
        num_inputs, num_outputs = (1 + own_rows) * widths[layer - 1], widths[layer]
        weights = intervals * (num_inputs + 1) * num_outputs * itemsize
        gradient_bytes = 0 if layer == 1 else nodes * num_inputs * itemsize
        weights_up += weights
        if layer == last and fusion:
            down += nodes * (num_inputs * itemsize + _LABEL_BYTES)
            up += gradient_bytes + intervals * _STATISTICS_BYTES
            weights_down += weights
            continue
        activation_bytes = 0 if rematerialise else nodes * num_outputs * itemsize
        column_bytes = nodes * itemsize
        down += column_bytes * num_inputs + column_bytes * (num_inputs + num_outputs) + activation_bytes
        up += column_bytes * num_outputs + activation_bytes + gradient_bytes
        weights_down += 2 * weights
    return {
        "ghost_gradients": boundary,
        "ghosts": boundary,
        "lambda_down": down,
        "lambda_up": up,
        "weights_down": weights_down,
        "weights_up": weights_up,
    }


def _traffic(counts: EpochCounts, ghosts: HaloCounts, read: int) -> Traffic:
    cluster, shape, total = counts.cluster, counts.shape, ghosts.outside + ghosts.inside
    own_rows = shape.kind == "sage"
    phases = serverless_bytes(
        widths=(shape.features, *(layer.outputs for layer in shape.layers)),
        nodes=counts.graph.nodes,
        ghosts=total,
        intervals=LambdaOptions().intervals * cluster.ranks,
        own_rows=own_rows,
    )
    # When the pipeline is emptied, all ranks read the weights, except the rank that stores them.
    phases["weights_read"] = read * (cluster.ranks - 1)
    inside = {name: phases[name] * ghosts.inside // max(total, 1) for name in _GHOSTS}
    inside["weights_read"] = read * (cluster.ranks_per_server - 1)
    outside = {name: count - inside.get(name, 0) for name, count in phases.items()}
    once = ghosts.outside * (2 * ID_BYTES + counts.graph.feature_bytes)
    # The weights of norms between the layers are not counted.
    known_weights = shape.kind in ("gcn", "sage") and shape.tensors == (2 + own_rows) * len(shape.layers)
    is_exact = ghosts.is_complete and known_weights and not shape.is_guessed
    return build_traffic(outside, inside, (0, 0), once=once, exact=is_exact)


@final
class LambdaCosts(CostModel):
    """Border rows between graph servers, and rows and weights to and from workers on the same servers."""

    @staticmethod
    def inspect(model: nn.Module, features: int) -> int:
        # Recognising layers imports the workers' code, which other strategies do not need.
        from dglx_dist.strategies.serverless.parameter_service import bytes_of_read
        from dglx_dist.strategies.serverless.cut import capture

        program = capture(model, features).program
        return bytes_of_read(program.weight_shapes, program.dtype)

    @staticmethod
    def works(candidate: Candidate, context: CandidateContext) -> tuple[Work, ...]:
        return _EXCHANGING, HaloPairs()

    @staticmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        traffic = _traffic(
            counts, counts.works[HaloPairs()], counts.shape.inspected.get(candidate.strategy, 0)
        )
        # Every epoch in flight keeps its activations.
        num_in_flight = 1 + 0.5 * (int(candidate.options.get("staleness", -1)) + 1)
        epoch_bytes = estimate_memory(counts, counts.works[_EXCHANGING]) - counts.fixed_bytes
        memory = counts.fixed_bytes + round(epoch_bytes * num_in_flight)
        return Cost(traffic=traffic, memory=memory, note="workers on the same servers")
