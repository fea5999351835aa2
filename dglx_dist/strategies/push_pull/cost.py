"""Candidates of push-pull, and the cost of an epoch (docs/strategies/push_pull.md)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import nn

from dglx_dist.layers.base import projects_first
from dglx_dist.layers.convolutions import CONVOLUTIONS
from dglx_dist.strategies.cost import (
    GRADIENTS,
    Candidate,
    Cost,
    Measured,
    PlanContext,
    Seconds,
    Survey,
    Traffic,
    present,
    ring_split,
    traffic_with_sums,
)
from dglx_dist.strategies.push_pull.exchange import BACKWARD, FORWARD
from dglx_dist.strategies.push_pull.split_model import find_first_layer

_SHORT_ID_BYTES = 4
_SUMS = (FORWARD, BACKWARD)
_ROUNDS_OF_SUMS = 4
"""Sequential messages: request and reply, forward and backward."""
_BLOCK_S = 1.5e-3
"""Of a core, to launch the operations on the block of one more owner, forward and backward, of any size: the
sums and products are the same in one block or in many (P1, P9: 1 to 3 ms)."""
_WIDE = 1 / 3
"""Of the rate of a column of an edge, to sum feature rows: long ones, without a gradient (0.15 to 0.4 ns
where steps took 0.7 to 0.9: amazon_photo, cora, coauthor_physics, dblp_full)."""
_COLUMNS_OF_A_HEAD = 50
"""With attention, every part computes the softmax of every owner's edges: so many columns of an edge per head
(P9: 40 to 60, with 8 heads and with 2)."""


@dataclass(frozen=True, kw_only=True)
class FirstLayer:
    """The convolution that takes the features, and the other parameters."""

    sum_width: int
    """H: columns of the sum over the parts for each destination, of all heads."""
    logit_width: int
    """K: columns of the sum that is returned for each source and destination; 0: none."""
    itemsize: int
    """s: bytes of an element."""
    cut_bytes: int
    """Of the split parameters, all parts together."""
    replicated_bytes: int
    """Of all others, as their gradients are sent: those of the owner side with a flag of one element each."""
    known: bool
    """Whether the sums have just these widths and no values of edges are sent; False: they may differ."""


def inspect(model: nn.Module, features: int) -> FirstLayer:
    """Return the sizes of ``model`` split where it takes ``features``; ConfigError if it cannot be."""
    name, stages = find_first_layer(model, features, "columns")
    cut = [stages.get_parameter(name) for name in stages.cut]
    split = {id(parameter) for parameter in cut}
    others = [parameter for parameter in model.parameters() if id(parameter) not in split]
    # Parameters used before the sum have a gradient on every rank, and need no flag.
    unflagged = {id(stages.get_parameter(name)) for name in stages.shared}
    return FirstLayer(
        sum_width=stages.sum_width,
        logit_width=stages.heads,
        itemsize=cut[0].element_size(),
        cut_bytes=sum(parameter.numel() * parameter.element_size() for parameter in cut),
        replicated_bytes=sum(
            (other.numel() + (id(other) not in unflagged)) * other.element_size() for other in others
        ),
        # Edge values are sent with the structure; a layer of the user may sum anything.
        known=type(model.get_submodule(name)) in CONVOLUTIONS and not stages.required_edges,
    )


def candidates(context: PlanContext) -> Iterator[Candidate]:
    """Yield both ways to share structure, group sizes, and pipelines with late weights."""
    if context.ranks == 1 or not context.steps:
        return
    make = partial(Candidate, unit="mini_batch")
    yield make(options={"structure": "push"})
    yield make(options={"structure": "resample"})
    # One rank with all columns, the ranks of a server, half of all ranks.
    for size in sorted({1, context.ranks // context.servers, context.ranks // 2}):
        if context.ranks % size == 0 and size < context.ranks:
            yield make(options={"structure": "push", "group_size": size})
    for late in ({"depth": 3}, {"depth": 3, "weights": "split"}):
        yield make(options={"structure": "push", **late}, exact=False)


def cost(candidate: Candidate, known: Measured) -> Cost:
    """Return the cost of an epoch on the batches of data parallelism."""
    work = known.mini_batches
    first: FirstLayer = known.shape.inspected[candidate.strategy]
    size = int(candidate.options.get("group_size", known.cluster.ranks))
    depth = int(candidate.options.get("depth", 1))
    pushed = candidate.options.get("structure") == "push"
    traffic = _traffic(known, first, size, pushed=pushed)
    columns = known.graph.nodes * known.graph.feature_bytes // size
    peak = (
        known.batch_memory(held=columns + known.own_features, owners=size, in_flight=depth)
        + (depth - 1) * 4 * work.largest[1][0] * known.shape.layers[0].outputs
    )
    return Cost(
        seconds=_seconds(known, first, size, traffic, late=depth > 1, pushed=pushed),
        traffic=traffic,
        memory=peak,
        shared=known.own_features + known.structure,
        on_host=known.program_bytes + columns + known.own_features + known.structure,
    )


def column_bytes(found: Survey, first: FirstLayer, *, group_size: int, pushed: bool) -> dict[str, int]:
    """Return the bytes by ledger phase, over all ranks; empty phases are left out.

    For each batch, with N_f parts in a group (all ranks W where it is 0)::

        structure             (N_f - 1) 4 (D1 + 1 + E1 + L0)       nothing when every part samples for itself
        activations           (N_f - 1) s (D1 H + 2 (L0 + D1) K)   K only where layer 1 attends
        activation_gradients  the same, the other way
        gradients             2 (W - 1) (|theta_D| + flags) s, and for W / N_f > 1 groups the cut weights too

    Depth and versions of weights change none of it.

    Args:
        found: Counted on the same cut, seeds and fan-outs, one rank per server.
        group_size: Parts that together hold all columns; a divisor of the ranks, or 0: all of them.
        pushed: Whether owners send the structure of their first blocks.
    """
    ranks, size = found.ranks, group_size or found.ranks
    pulled = found.first_targets * first.sum_width
    pulled += 2 * (found.input_rows + found.first_targets) * first.logit_width
    # Each part's pieces, summed over the groups that have the same.
    cut = 2 * (ranks // size - 1) * first.cut_bytes
    return present(
        structure=(size - 1) * structure_bytes(found) if pushed else 0,
        activations=(size - 1) * first.itemsize * pulled,
        activation_gradients=(size - 1) * first.itemsize * pulled,
        sampling=found.sampling_bytes,
        labels=found.label_bytes,
        gradients=found.steps * (2 * (ranks - 1) * first.replicated_bytes + cut),
    )


def structure_bytes(found: Survey) -> int:
    """Return the bytes of the first blocks, once each."""
    batches = found.steps * found.ranks
    return _SHORT_ID_BYTES * (found.first_targets + batches + found.first_edges + found.input_rows)


def _traffic(known: Measured, first: FirstLayer, size: int, *, pushed: bool) -> Traffic:
    cluster, work = known.cluster, known.mini_batches
    phases = column_bytes(work.survey, first, group_size=size, pushed=pushed)
    in_group = {name: phases.get(name, 0) for name in ("structure", *_SUMS)}
    # Ordered pairs of different ranks of a group, and those on different servers.
    others, groups = cluster.ranks * (size - 1), np.array(cluster.server_of_rank).reshape(-1, size)
    away = int((groups[:, :, None] != groups[:, None, :]).sum())
    crossing = {name: count * away // others if others else 0 for name, count in in_group.items()}
    inside = {name: count - crossing[name] for name, count in in_group.items()}
    sums = ring_split(first.replicated_bytes, cluster.server_of_rank, work.steps)
    if len(groups) > 1:
        # Every part's ring has the same bytes, up to columns that do not divide evenly.
        every = 2 * (len(groups) - 1) * first.cut_bytes * work.steps
        server_of = cluster.server_of_rank
        far = sum(server != server_of[(rank + size) % cluster.ranks] for rank, server in enumerate(server_of))
        outside = every * far // cluster.ranks
        sums = sums[0] + outside, sums[1] + every - outside
    moved = known.graph.nodes * (cluster.servers - 1) // cluster.servers * known.graph.feature_bytes
    aligned = size % cluster.ranks_per_server == 0 or cluster.ranks_per_server % size == 0
    return traffic_with_sums(
        {**phases, **crossing},
        inside,
        sums,
        once=cluster.ranks * moved // size,
        # A model of the user's own may give its first layer values of edges.
        exact=work.counted and aligned and first.known and not known.shape.guessed,
    )


def _seconds(
    known: Measured, first: FirstLayer, size: int, traffic: Traffic, *, late: bool, pushed: bool
) -> Seconds:
    """Return the seconds in groups of ``size`` ranks; ``late``: sums travel while other batches compute."""
    known, summed = _sums_first(known, first, size)
    cluster, work = known.cluster, known.mini_batches
    logits = first.logit_width * _COLUMNS_OF_A_HEAD * work.worked[2][0]
    of_an_owner = work.steps * _BLOCK_S / min(cluster.cores, 1.0) + logits * known.rates.edge_column_s
    compute = known.compute_seconds() + summed + (size - 1) * of_an_owner
    waited = sum(traffic.outside.get(name, 0) for name in _SUMS)
    waited_s = waited / cluster.servers / cluster.external_bytes_per_s
    if waited:
        waited_s = cluster.after_bursts(waited_s, 2 * work.steps, compute)
        waited_s += cluster.latencies(_ROUNDS_OF_SUMS * work.steps)
    others = sum(count for name, count in traffic.outside.items() if name not in (*_SUMS, GRADIENTS))
    ahead = others / cluster.servers / cluster.external_bytes_per_s
    own = sum(traffic.inside.get(name, 0) for name in _SUMS) / cluster.servers / cluster.internal_bytes_per_s
    return known.batch_seconds(
        traffic,
        compute=compute,
        # Without pushed structure every part draws the batches of its whole group.
        sampling=known.sampling_seconds(1 if pushed else size),
        pulled=ahead + (waited_s if late else 0.0),
        waited=0.0 if late else waited_s,
        inside=own,
    )


def _sums_first(known: Measured, first: FirstLayer, size: int) -> tuple[Measured, float]:
    """Return ``known`` with the products, and the seconds of the sums, if parts sum rows first."""
    (sources, *_), (targets, *_), (edges, *_) = known.mini_batches.worked
    layer, *others = known.shape.layers
    early = projects_first(sources, targets, edges, layer.inputs // size, first.sum_width)
    if early or not layer.sums_sources or not layer.per_source:
        return known, 0.0
    late = replace(layer, summed=0, per_source=0, per_target=layer.per_source + layer.per_target)
    summed = edges * layer.inputs * _WIDE * known.rates.edge_column_s
    return replace(known, shape=replace(known.shape, layers=(late, *others))), summed
