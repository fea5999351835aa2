"""Bytes and memory of push-pull training (docs/strategies/push_pull.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from torch import nn

from dglx_dist.layers.base import SplittableConv
from dglx_dist.layers.convolutions import CONVOLUTIONS
from dglx_dist.planner.costs.base import (
    Cost,
    CostModel,
    EpochCounts,
    Survey,
    Traffic,
    TypedCounts,
    TypedFeatures,
    build_traffic,
    present,
    ring_split,
)
from dglx_dist.records import EdgeType
from dglx_dist.strategies.candidate import Candidate
from dglx_dist.strategies.push_pull.exchange import BACKWARD, FORWARD
from dglx_dist.strategies.push_pull.split_model import find_first_layer, find_typed_layer

_SHORT_ID_BYTES = 4
_SUMS = (FORWARD, BACKWARD)


@dataclass(frozen=True, kw_only=True)
class FirstLayer:
    """The convolution on the features, and the other parameters."""

    sum_width: int
    """H, columns of the sum over the parts for each destination, of all heads."""
    logit_width: int
    """K, columns of the sum that is returned for each source and destination. 0: none."""
    itemsize: int
    """s, bytes of an element."""
    cut_bytes: int
    """Bytes of the split parameters, all parts together."""
    replicated_bytes: int
    """Bytes of the gradients of all other parameters, with a flag of one element each on the owner side."""
    known: bool
    """Whether the sums have exactly these widths and no values of edges are sent."""
    sum_widths: Mapping[str, int] = field(default_factory=dict)
    """H by destination type, if the layer reads several node types."""
    logit_widths: Mapping[EdgeType, int] = field(default_factory=dict)
    """K by edge type, for relations with attention."""


def inspect(model: nn.Module, features: int | TypedFeatures) -> FirstLayer:
    """Return the sizes of ``model`` split at its ``features``. Raise ConfigError if it cannot be split."""
    if isinstance(features, TypedFeatures):
        return inspect_types(model, features.etypes, features.widths)
    name, stages = find_first_layer(model, features)
    # Edge values are sent with the structure, and a layer of the user may sum anything.
    known = type(model.get_submodule(name)) in CONVOLUTIONS and not stages.required_edges
    return _measure(model, stages, known=known, sum_width=stages.sum_width)


def inspect_types(model: nn.Module, etypes: Sequence[EdgeType], widths: Mapping[str, int]) -> FirstLayer:
    """Return the sizes of ``model`` split at the features of several node types, of ``widths`` columns.

    Raises ConfigError if it cannot be split.
    """
    _, stages = find_typed_layer(model, etypes, widths)
    return _measure(model, stages, known=True)


def _measure(model: nn.Module, stages: SplittableConv, *, known: bool, sum_width: int = 0) -> FirstLayer:
    cut = [stages.get_parameter(name) for name in stages.cut]
    split = {id(parameter) for parameter in cut}
    replicated = [parameter for parameter in model.parameters() if id(parameter) not in split]

    # Parameters used before the sum have a gradient on every rank, and need no flag.
    unflagged = {id(stages.get_parameter(name)) for name in stages.shared}
    return FirstLayer(
        sum_width=sum_width,
        logit_width=stages.heads,
        itemsize=cut[0].element_size(),
        cut_bytes=sum(parameter.numel() * parameter.element_size() for parameter in cut),
        replicated_bytes=sum(
            (parameter.numel() + (id(parameter) not in unflagged)) * parameter.element_size()
            for parameter in replicated
        ),
        known=known,
        sum_widths=stages.sum_widths,
        logit_widths=stages.logit_widths,
    )


@final
class PushPullCosts(CostModel):
    """Structure, sums of layer 1 there and back, and sums of the gradients that ranks have in common."""

    inspect = staticmethod(inspect)

    @staticmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        work = counts.mini_batches
        first: FirstLayer = counts.shape.inspected[candidate.strategy]
        size = int(candidate.options.get("group_size", counts.cluster.ranks))
        depth = int(candidate.options.get("depth", 1))
        pushed = candidate.options.get("structure", "push") == "push"
        if depth > 1 and _reads_trained_rows(counts):
            return Cost(why_not="batches begin early only if all node types have features; use depth=1")
        if not pushed and counts.structure_partitioned:
            return Cost(why_not="drawing the batches of other ranks needs the whole structure on each server")
        columns = counts.graph.all_feature_bytes // size
        held_bytes = columns + counts.own_feature_bytes
        late_sums = (depth - 1) * 4 * work.largest[1][0] * counts.shape.layers[0].outputs
        return Cost(
            traffic=_traffic(counts, first, size, pushed=pushed),
            memory=counts.batch_memory(held=held_bytes, owners=size, in_flight=depth) + late_sums,
            shared=counts.own_feature_bytes + counts.structure_bytes,
            on_host=counts.program_bytes + held_bytes + counts.structure_bytes,
        )


def _reads_trained_rows(counts: EpochCounts) -> bool:
    widths = counts.shape.feature_widths
    first_layer = counts.mini_batches.survey.first_layer
    return widths is not None and first_layer is not None and bool(first_layer.sources.keys() - widths)


def column_bytes(survey: Survey, first: FirstLayer, *, group_size: int, pushed: bool) -> dict[str, int]:
    """Return the bytes of all ranks by ledger phase, without empty phases.

    For each batch, with ``group_size`` N_f (0 means all W ranks)::

        structure             (N_f - 1) 4 (D1 + 1 + E1 + L0)       nothing when every part samples for itself
        activations           (N_f - 1) s (D1 H + 2 (L0 + D1) K)   K is 0 without attention
        activation_gradients  the same, the other way
        gradients             2 (W - 1) (|theta_D| + flags) s, and for W / N_f > 1 groups the cut weights too

    The bytes do not depend on the depth and the versions of weights.

    Args:
        survey: Counts on the same cut, seeds and fan-outs, with one rank per server.
        group_size: Number of parts that together hold all columns: a divisor of the ranks, or 0 for all.
        pushed: Whether owners send the structure of their first blocks.
    """
    ranks = survey.ranks
    size = group_size or survey.ranks
    beside = present(sampling=survey.sampling_bytes, labels=survey.label_bytes)
    if first.sum_widths:
        assert survey.first_layer is not None, "layers of several types need counts by type"
        typed = typed_bytes(survey.first_layer, first, ranks=ranks, group_size=size, pushed=pushed)
        return {**typed, **beside}

    num_values = survey.first_targets * first.sum_width
    num_values += 2 * (survey.input_rows + survey.first_targets) * first.logit_width
    return {
        **present(
            structure=(size - 1) * structure_bytes(survey) if pushed else 0,
            activations=(size - 1) * first.itemsize * num_values,
            activation_gradients=(size - 1) * first.itemsize * num_values,
            gradients=survey.steps * _step_bytes(first, ranks, size),
        ),
        **beside,
    }


def _step_bytes(first: FirstLayer, ranks: int, size: int) -> int:
    # Each part's pieces are summed over the groups.
    return 2 * (ranks - 1) * first.replicated_bytes + 2 * (ranks // size - 1) * first.cut_bytes


def typed_bytes(
    counts: TypedCounts, first: FirstLayer, *, ranks: int, group_size: int, pushed: bool
) -> dict[str, int]:
    """Return the bytes of all ranks by ledger phase on a graph of several types, without empty phases.

    For each batch, with sums over the T node types t and the edge types r with destination type d(r)::

        structure             (N_f - 1) 4 (sum_t L0_t + sum_r (D1_d(r) + 1 + E1_r) + T)    T: 0 for one type
        activations           (N_f - 1) s (sum_t D1_t H_t + sum_r 2 (L0_r + D1_r) K_r)
        activation_gradients  the same, the other way
        gradients             as in :func:`column_bytes`

    Sampling and labels are not included.
    """
    size = group_size or ranks
    num_values = sum(counts.targets[ntype] * width for ntype, width in first.sum_widths.items())
    for (source, _, target), heads in first.logit_widths.items():
        num_values += 2 * heads * (counts.sources[source] + counts.targets[target])
    num_ids = sum(counts.sources.values()) + counts.batches * (len(counts.sources) > 1) * len(counts.sources)
    num_ids += sum(counts.targets[target] + counts.batches for _, _, target in counts.edges)
    num_ids += sum(counts.edges.values())
    return present(
        structure=(size - 1) * _SHORT_ID_BYTES * num_ids if pushed else 0,
        activations=(size - 1) * first.itemsize * num_values,
        activation_gradients=(size - 1) * first.itemsize * num_values,
        gradients=counts.batches // ranks * _step_bytes(first, ranks, size),
    )


def structure_bytes(survey: Survey) -> int:
    """Return the bytes of the layer-1 blocks of an epoch if each is sent once."""
    batches = survey.steps * survey.ranks
    return _SHORT_ID_BYTES * (survey.first_targets + batches + survey.first_edges + survey.input_rows)


def _traffic(counts: EpochCounts, first: FirstLayer, size: int, *, pushed: bool) -> Traffic:
    """Return the traffic of an epoch with groups of ``size`` ranks.

    ``pushed`` tells whether the ranks of a group send each other their blocks (``structure="push"``).
    """
    cluster, work = counts.cluster, counts.mini_batches
    survey = work.survey
    phases = column_bytes(survey, first, group_size=size, pushed=pushed)
    trained_outside, trained_inside = survey.trained_rows.traffic(counts.shape.trained_row_bytes)
    in_group = {name: phases.get(name, 0) for name in ("structure", *_SUMS)}

    # Ordered pairs of different ranks of a group, and the number of pairs on different servers.
    pairs = cluster.ranks * (size - 1)
    groups = np.array(cluster.server_of_rank).reshape(-1, size)
    remote_pairs = int((groups[:, :, None] != groups[:, None, :]).sum())
    crossing = {name: count * remote_pairs // pairs if pairs else 0 for name, count in in_group.items()}
    inside = {name: count - crossing[name] for name, count in in_group.items()}
    sums_outside, sums_inside = ring_split(first.replicated_bytes, cluster.server_of_rank, work.steps)
    if len(groups) > 1:
        # Every part's ring has the same bytes, up to columns that do not divide evenly.
        cut_bytes = 2 * (len(groups) - 1) * first.cut_bytes * work.steps
        server_of = cluster.server_of_rank
        far = sum(server != server_of[(rank + size) % cluster.ranks] for rank, server in enumerate(server_of))
        outside = cut_bytes * far // cluster.ranks
        sums_outside += outside
        sums_inside += cut_bytes - outside

    remote_bytes = counts.graph.all_feature_bytes * (cluster.servers - 1) // cluster.servers
    is_aligned = size % cluster.ranks_per_server == 0 or cluster.ranks_per_server % size == 0
    return build_traffic(
        {**phases, **crossing, **trained_outside},
        {**inside, **trained_inside},
        (sums_outside, sums_inside),
        startup_bytes=cluster.ranks * remote_bytes // size,
        # The first layer of a custom model may get values of edges.
        is_exact=work.is_complete and is_aligned and first.known and not counts.shape.is_guessed,
    )
