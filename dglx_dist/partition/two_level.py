"""The split of DistDGL (section 1.1): over the machines, then over the trainers of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.partition.flat import from_assignment
from dglx_dist.partition.hierarchical import Hierarchical
from dglx_dist.partition.options import PartitionOptions
from dglx_dist.partition.weights import balance_weights, part_shares
from dglx_dist.records import Array, Assignment, EdgeType, NodeColumn, RawGraph

TRAINER_ID = "trainer_id"
"""Node and edge data that names the trainer, numbered machine by machine: DGL's name."""
TRAINERS_PER_PART = "trainers_per_part"
"""Key in ``Assignment.parameters`` and so in the manifest."""


@dataclass(frozen=True, kw_only=True)
class TwoLevelSplit:
    """One cut at both levels: part p holds the trainers p x t to (p + 1) x t - 1."""

    parts: Assignment
    """The owner of every node among the P parts."""
    trainers: Assignment
    """Its trainer among the P x t."""


def assign_two_levels(
    graph: RawGraph, method: str, options: PartitionOptions, size: tuple[int, int], seed: int
) -> TwoLevelSplit:
    """Cut ``graph`` over the parts, and each part over its trainers, with the same method and balance.

    Every constraint holds at both levels: a trainer carries at most (1 + tolerance) of its share, and so
    does a part. ``parameters["missed"]`` of each level says where it does not.

    Args:
        graph: Of any types.
        method: The partitioner for both levels; neither ``hierarchical`` nor ``file``.
        options: ``target_weights`` are those of the P parts; the trainers of a part are equal.
        size: (P, t).
        seed: At least 0.

    Raises:
        ConfigError: the method cannot be used at two levels, or the options do not fit.
    """
    num_parts, per_part = size
    if options.servers is not None or options.workers is not None or options.inner is not None:
        raise ConfigError(
            f"servers, workers and inner are for method hierarchical alone, and {per_part} trainers for each "
            "part ask for two levels already; leave them out"
        )
    part_shares(options.target_weights, num_parts)
    targets = None
    if options.target_weights is not None:
        targets = tuple(weight / per_part for weight in options.target_weights for _ in range(per_part))
    two = replace(options, servers=num_parts, workers=per_part, inner=method, target_weights=targets)
    trainers = Hierarchical(two).assign(graph, num_parts * per_part, seed)
    part_of = {ntype: owners // np.int32(per_part) for ntype, owners in trainers.part_of.items()}
    of_levels = ("servers", "workers", "inner", "missed", "target_weights")
    told = {name: value for name, value in trainers.parameters.items() if name not in of_levels}
    told[TRAINERS_PER_PART] = per_part
    if options.target_weights is not None:
        told["target_weights"] = list(options.target_weights)
    parts = Assignment(num_parts=num_parts, part_of=part_of, method=method, seed=seed, parameters=told)
    if told.get("tolerance"):
        weights = balance_weights(graph, options, num_parts, None)
        missed = weights.missed(from_assignment(graph, parts))
        if missed:
            parts = replace(parts, parameters={**told, "missed": missed})
    return TwoLevelSplit(parts=parts, trainers=trainers)


def with_trainer_ids(graph: RawGraph, trainers: Assignment) -> RawGraph:
    """Return ``graph`` with the trainer of each node, and of each edge by its destination, as int32 columns.

    Raises:
        ConfigError: the graph has a column of that name.
    """
    check_no_trainer_ids(graph)
    node_data: dict[str, dict[str, NodeColumn]] = {
        ntype: {**graph.node_data.get(ntype, {}), TRAINER_ID: trainers.part_of[ntype]}
        for ntype in graph.num_nodes
    }
    edge_data: dict[EdgeType, dict[str, Array]] = {
        etype: {**graph.edge_data.get(etype, {}), TRAINER_ID: trainers.part_of[etype[2]][destinations]}
        for etype, (_, destinations) in graph.edges.items()
    }
    return replace(graph, node_data=node_data, edge_data=edge_data)


def check_no_trainer_ids(graph: RawGraph) -> None:
    """Raise ConfigError when the graph has a column where the trainers' numbers shall stand."""
    for name, columns in (*graph.node_data.items(), *graph.edge_data.items()):
        if TRAINER_ID in columns:
            raise ConfigError(
                f"{graph.name} has {TRAINER_ID!r} as data of {name!r} already; remove it, or cut for one "
                "trainer per part"
            )
