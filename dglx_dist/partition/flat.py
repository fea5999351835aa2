"""Node ids of all types in one row, and back to one owner vector per type."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.partition.options import PartitionOptions
from dglx_dist.partition.weights import BalanceWeights
from dglx_dist.records import Array, Assignment, RawGraph


def check_request(num_parts: int, seed: int) -> None:
    """Raise ConfigError unless there is a part to put nodes in and the seed is not negative."""
    if num_parts < 1:
        raise ConfigError(f"num_parts is {num_parts}; it must be at least 1")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be at least 0")


def trivial_parts(num_nodes: int, num_parts: int) -> Array | None:
    """Return the (N,) int32 parts that need no thought: one part, or a part for each node; else None."""
    if num_parts == 1:
        return np.zeros(num_nodes, dtype=np.int32)
    if num_parts >= num_nodes:
        return np.arange(num_nodes, dtype=np.int32)
    return None


def to_assignment(
    graph: RawGraph,
    part_of_node: Array,
    num_parts: int,
    *,
    method: str,
    seed: int,
    parameters: Mapping[str, object],
) -> Assignment:
    """Cut the (N,) vector over all types into one owned int32 vector per type."""
    part_of: dict[str, Array] = {}
    first = 0
    for node_type, count in graph.num_nodes.items():
        part_of[node_type] = part_of_node[first : first + count].astype(np.int32)
        first += count
    return Assignment(
        num_parts=num_parts, part_of=part_of, method=method, seed=seed, parameters=dict(parameters)
    )


def from_assignment(graph: RawGraph, assignment: Assignment) -> Array:
    """Return the (N,) int32 owners over all types, in the order of ``graph.num_nodes``."""
    if not graph.num_nodes:
        return np.zeros(0, dtype=np.int32)
    return np.concatenate([np.asarray(assignment.part_of[t], dtype=np.int32) for t in graph.num_nodes])


def describe(options: PartitionOptions, weights: BalanceWeights | None) -> dict[str, object]:
    """Return what a partitioner was told and promises, as JSON values for ``Assignment.parameters``.

    ``weights`` are the constraints that it holds to; None: it promises no balance.
    """
    told: dict[str, object] = {"tolerance": {}}
    if weights is not None:
        told["tolerance"] = dict(zip(weights.names, weights.tolerance.tolist(), strict=True))
    if options.balance:
        told["balance"] = list(options.balance)
    if options.target_weights is not None:
        told["target_weights"] = list(options.target_weights)
    if options.objective != "cut":
        told["objective"] = options.objective
    if options.fast:
        told["fast"] = True
    return told
