"""Bytes and memory for push-pull training (docs/strategies/push_pull.md)."""

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
from dglx_dist.planner.records import Cluster
from dglx_dist.records import EdgeType
from dglx_dist.strategies.candidate import Candidate
from dglx_dist.strategies.push_pull.exchange import BACKWARD, FORWARD
from dglx_dist.strategies.push_pull.split_model import find_first_layer, find_typed_layer

_SHORT_ID_BYTES = 4
_SUMS = (FORWARD, BACKWARD)


@dataclass(frozen=True, kw_only=True)
class FirstLayer:
    """Sizes of the convolution on the features, and sizes of the other parameters."""

    sum_width: int
    """H, columns in the sum over the parts for each destination, over all heads."""
    logit_width: int
    """K, columns in the sum that is returned for each source and destination. 0: none."""
    itemsize: int
    """s, bytes per element."""
    cut_bytes: int
    """Bytes that the split parameters take, all parts together."""
    replicated_bytes: int
    """Gradient bytes for all other parameters. On the owner side, each has a flag with one element."""
    known: bool
    """Whether the sums have exactly these widths and no edge values are sent."""
    sum_widths: Mapping[str, int] = field(default_factory=dict)
    """H by destination type, if the layer reads several node types."""
    logit_widths: Mapping[EdgeType, int] = field(default_factory=dict)
    """K by edge type, for relations with attention."""


def inspect(model: nn.Module, features: int | TypedFeatures) -> FirstLayer:
    """Measure ``model`` split at its ``features``. Raise ConfigError if it cannot be split."""
    if isinstance(features, TypedFeatures):
        return inspect_types(model, features.etypes, features.widths)
    name, stages = find_first_layer(model, features)
    layer_class = type(model.get_submodule(name))
    # Edge values are sent with the structure, and a user's layer may sum anything.
    is_known = layer_class in CONVOLUTIONS and not stages.required_edges
    return _measure(model, stages, is_known=is_known, sum_width=stages.sum_width)


def inspect_types(model: nn.Module, etypes: Sequence[EdgeType], widths: Mapping[str, int]) -> FirstLayer:
    """Measure ``model`` split at the features of several node types.

    ``widths`` has the number of feature columns by node type. Raises ConfigError if ``model`` cannot be
    split.
    """
    _, stages = find_typed_layer(model, etypes, widths)
    return _measure(model, stages, is_known=True)


def _measure(model: nn.Module, stages: SplittableConv, *, is_known: bool, sum_width: int = 0) -> FirstLayer:
    """Measure ``model``, which has ``stages`` as its first layer."""
    cut_parameters = [stages.get_parameter(name) for name in stages.cut]
    cut_ids = {id(parameter) for parameter in cut_parameters}
    cut_bytes = 0
    for parameter in cut_parameters:
        cut_bytes += parameter.numel() * parameter.element_size()

    # Parameters used before the sum have a gradient on every rank, and need no flag.
    unflagged_ids = {id(stages.get_parameter(name)) for name in stages.shared}
    replicated_bytes = 0
    for parameter in model.parameters():
        if id(parameter) in cut_ids:
            continue
        num_flags = 1
        if id(parameter) in unflagged_ids:
            num_flags = 0
        replicated_bytes += (parameter.numel() + num_flags) * parameter.element_size()

    return FirstLayer(
        sum_width=sum_width,
        logit_width=stages.heads,
        itemsize=cut_parameters[0].element_size(),
        cut_bytes=cut_bytes,
        replicated_bytes=replicated_bytes,
        known=is_known,
        sum_widths=stages.sum_widths,
        logit_widths=stages.logit_widths,
    )


@final
class PushPullCosts(CostModel):
    """Counts structure, sums for layer 1 there and back, and sums of the gradients that ranks share."""

    inspect = staticmethod(inspect)

    @staticmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        first_layer: FirstLayer = counts.shape.inspected[candidate.strategy]
        group_size = int(candidate.options.get("group_size", counts.cluster.ranks))
        depth = int(candidate.options.get("depth", 1))
        pushed = candidate.options.get("structure", "push") == "push"
        if depth > 1 and _reads_trained_rows(counts):
            return Cost(why_not="batches begin early only if all node types have features; use depth=1")
        if not pushed and counts.structure_partitioned:
            return Cost(why_not="drawing the batches of other ranks needs the whole structure on each server")

        # A rank maps its columns for all nodes, and all columns for its server's nodes.
        column_bytes = counts.graph.all_feature_bytes // group_size
        held_bytes = column_bytes + counts.own_feature_bytes
        _, targets, _ = counts.mini_batches.largest
        # Sums for layer 1, in float32, that wait for the batches before them.
        late_bytes = (depth - 1) * 4 * targets[0] * counts.shape.layers[0].outputs
        batch_bytes = counts.batch_memory(held=held_bytes, owners=group_size, in_flight=depth)
        return Cost(
            traffic=_traffic(counts, first_layer, group_size, pushed=pushed),
            memory=batch_bytes + late_bytes,
            shared=counts.own_feature_bytes + counts.structure_bytes,
            on_host=counts.program_bytes + held_bytes + counts.structure_bytes,
        )


def _reads_trained_rows(counts: EpochCounts) -> bool:
    """Return whether layer 1 reads nodes that have no features because of their type."""
    widths = counts.shape.feature_widths
    first_layer = counts.mini_batches.survey.first_layer
    if widths is None or first_layer is None:
        return False
    return bool(first_layer.sources.keys() - widths)


def column_bytes(survey: Survey, first: FirstLayer, *, group_size: int, pushed: bool) -> dict[str, int]:
    """Return the bytes that all ranks send, by ledger phase, without empty phases.

    For each batch, with ``group_size`` N_f (0 means all W ranks)::

        structure             (N_f - 1) 4 (D1 + 1 + E1 + L0)       nothing when every part samples for itself
        activations           (N_f - 1) s (D1 H + 2 (L0 + D1) K)   K is 0 without attention
        activation_gradients  the same, the other way
        gradients             2 (W - 1) (|theta_D| + flags) s, and for W / N_f > 1 groups the cut weights too

    The bytes depend neither on the depth nor on the weights' versions.

    Args:
        survey: Counts on the same cut, seeds and fan-outs, with one rank per server.
        first: The model's sizes.
        group_size: How many parts hold all columns together: a divisor of the ranks, or 0 for all.
        pushed: Whether owners send the structure of their first blocks.
    """
    num_ranks = survey.ranks
    group_size = group_size or num_ranks
    sampling = present(sampling=survey.sampling_bytes, labels=survey.label_bytes)
    if first.sum_widths:
        assert survey.first_layer is not None, "layers of several types need counts by type"
        phases = typed_bytes(survey.first_layer, first, ranks=num_ranks, group_size=group_size, pushed=pushed)
        return {**phases, **sampling}

    num_values = survey.first_targets * first.sum_width
    num_values += 2 * (survey.input_rows + survey.first_targets) * first.logit_width
    sum_bytes = (group_size - 1) * first.itemsize * num_values
    pushed_bytes = 0
    if pushed:
        pushed_bytes = (group_size - 1) * structure_bytes(survey)
    phases = present(
        structure=pushed_bytes,
        activations=sum_bytes,
        activation_gradients=sum_bytes,
        gradients=survey.steps * _step_bytes(first, num_ranks, group_size),
    )
    return {**phases, **sampling}


def _step_bytes(first: FirstLayer, num_ranks: int, group_size: int) -> int:
    """Return the bytes that all ranks send to sum a step's gradients."""
    num_groups = num_ranks // group_size
    # Each part's pieces of the cut parameters are summed over the groups.
    return 2 * (num_ranks - 1) * first.replicated_bytes + 2 * (num_groups - 1) * first.cut_bytes


def typed_bytes(
    counts: TypedCounts, first: FirstLayer, *, ranks: int, group_size: int, pushed: bool
) -> dict[str, int]:
    """Return the bytes that all ranks send on a graph with several types, by ledger phase.

    For each batch, with sums over the T node types t and the edge types r with destination type d(r)::

        structure             (N_f - 1) 4 (sum_t L0_t + sum_r (D1_d(r) + 1 + E1_r) + T)    T: 0 for one type
        activations           (N_f - 1) s (sum_t D1_t H_t + sum_r 2 (L0_r + D1_r) K_r)
        activation_gradients  the same, the other way
        gradients             as in :func:`column_bytes`

    Sampling and labels are not included. Empty phases are left out.
    """
    group_size = group_size or ranks
    num_values = 0
    for ntype, width in first.sum_widths.items():
        num_values += counts.targets[ntype] * width
    for (source, _, target), heads in first.logit_widths.items():
        num_values += 2 * heads * (counts.sources[source] + counts.targets[target])
    sum_bytes = (group_size - 1) * first.itemsize * num_values

    num_ids = sum(counts.sources.values())
    # Each type's source count is sent with a batch, except if there is only one type.
    num_types = len(counts.sources)
    if num_types > 1:
        num_ids += counts.batches * num_types
    for (_, _, target), num_edges in counts.edges.items():
        num_ids += counts.targets[target] + counts.batches + num_edges
    pushed_bytes = 0
    if pushed:
        pushed_bytes = (group_size - 1) * _SHORT_ID_BYTES * num_ids

    num_steps = counts.batches // ranks
    return present(
        structure=pushed_bytes,
        activations=sum_bytes,
        activation_gradients=sum_bytes,
        gradients=num_steps * _step_bytes(first, ranks, group_size),
    )


def structure_bytes(survey: Survey) -> int:
    """Return the bytes that an epoch's layer-1 blocks take if each is sent once."""
    num_batches = survey.steps * survey.ranks
    # A block has an offset for each target and one more, and an id for each edge and each source.
    num_offsets = survey.first_targets + num_batches
    return _SHORT_ID_BYTES * (num_offsets + survey.first_edges + survey.input_rows)


def _traffic(counts: EpochCounts, first: FirstLayer, group_size: int, *, pushed: bool) -> Traffic:
    """Return an epoch's traffic in groups of ``group_size`` ranks.

    ``pushed`` tells whether the ranks in a group send each other their blocks (``structure="push"``).
    """
    cluster = counts.cluster
    work = counts.mini_batches
    phases = column_bytes(work.survey, first, group_size=group_size, pushed=pushed)
    trained_outside, trained_inside = work.survey.trained_rows.traffic(counts.shape.trained_row_bytes)

    # A rank sends equally many bytes to each other rank in its group. Pairs of ranks are ordered.
    groups = np.array(cluster.server_of_rank).reshape(-1, group_size)
    num_pairs = cluster.ranks * (group_size - 1)
    num_remote_pairs = int((groups[:, :, None] != groups[:, None, :]).sum())
    group_outside = {}
    group_inside = {}
    for name in ("structure", *_SUMS):
        num_bytes = phases.get(name, 0)
        group_outside[name] = num_bytes * num_remote_pairs // max(num_pairs, 1)
        group_inside[name] = num_bytes - group_outside[name]

    remote_bytes = counts.graph.all_feature_bytes * (cluster.servers - 1) // cluster.servers
    is_aligned = group_size % cluster.ranks_per_server == 0 or cluster.ranks_per_server % group_size == 0
    # In a custom model, the first layer may get edge values.
    is_known = first.known and not counts.shape.is_guessed
    return build_traffic(
        {**phases, **group_outside, **trained_outside},
        {**group_inside, **trained_inside},
        _split_gradient_sums(cluster, first, group_size, work.steps),
        startup_bytes=cluster.ranks * remote_bytes // group_size,
        is_exact=work.is_complete and is_aligned and is_known,
    )


def _split_gradient_sums(cluster: Cluster, first: FirstLayer, group_size: int, steps: int) -> tuple[int, int]:
    """Return the bytes between and within servers that gradient sums take in ``steps`` steps."""
    server_of = cluster.server_of_rank
    outside, inside = ring_split(first.replicated_bytes, server_of, steps)
    num_groups = cluster.ranks // group_size
    if num_groups == 1:
        return outside, inside

    # Ranks with the same part form a ring. All rings have the same bytes, up to columns that do not divide
    # evenly.
    num_crossing = 0
    for rank, server in enumerate(server_of):
        next_rank = (rank + group_size) % cluster.ranks
        if server_of[next_rank] != server:
            num_crossing += 1
    cut_bytes = 2 * (num_groups - 1) * first.cut_bytes * steps
    cut_outside = cut_bytes * num_crossing // cluster.ranks
    return outside + cut_outside, inside + cut_bytes - cut_outside
