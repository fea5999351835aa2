"""What every node weighs in each balance constraint, and how much a part may carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.partition.options import PartitionOptions
from dglx_dist.records import Array, EdgeType, NodeColumn, RawGraph, SparseRows
from dglx_dist.registry import did_you_mean

MASKS = {"train": "train_mask", "val": "val_mask", "test": "test_mask"}
COUNT_EDGES = ("degree", "etype")
"""Constraints whose weights are numbers of edges."""


@dataclass(frozen=True, kw_only=True)
class BalanceWeights:
    """C balance constraints over the N nodes of all types and the P parts."""

    names: tuple[str, ...]
    columns: tuple[Array, ...]
    """C arrays (N,) int64, not negative."""
    tolerance: Array
    """(C,) float64."""
    shares: Array
    """(P,) float64, the part of the whole that each part should carry; they sum to 1."""

    def matrix(self) -> Array:
        """Return (N, C) int64, row by row."""
        return np.ascontiguousarray(np.stack(self.columns, axis=1))

    def loads(self, part_of_node: Array) -> Array:
        """Return (C, P) float64: what each part carries under the (N,) int parts."""
        return np.stack(
            [np.bincount(part_of_node, weights=w, minlength=len(self.shares)) for w in self.columns]
        )

    def capacities(self) -> Array:
        """Return (C, P) float64: share x (1 + tolerance), or share + one heaviest node where that is more.

        No partition of indivisible nodes can promise less than the second.
        """
        rows = []
        for weights, tolerance in zip(self.columns, self.tolerance, strict=True):
            target = float(weights.sum()) * self.shares
            heaviest = float(weights.max(initial=0))
            rows.append(np.maximum(target * (1.0 + tolerance), target + heaviest))
        return np.stack(rows)

    def missed(self, part_of_node: Array) -> dict[str, float]:
        """Return, for each constraint beyond its capacity, the largest load / share."""
        loads, capacities = self.loads(part_of_node), self.capacities()
        return {
            name: imbalance(loads[c], self.shares)
            for c, name in enumerate(self.names)
            # Shares are rounded, so exactly full may look a hair above full.
            if (loads[c] > capacities[c] * (1 + 1e-9)).any()
        }


def imbalance(loads: Array, shares: Array) -> float:
    """Return the largest load / (total x share) of the (P,) loads, 1.0 when there is nothing to carry."""
    total = float(loads.sum())
    return float((loads / (total * shares)).max()) if total > 0 else 1.0


def balance_weights(
    graph: RawGraph, options: PartitionOptions, num_parts: int, max_constraints: int | None
) -> BalanceWeights:
    """Return the constraints of ``options`` as weights of the nodes of ``graph``.

    Raises:
        ConfigError: a constraint names neither a known weight nor a node column, its column is not
            numeric or negative, there are more than ``max_constraints``, or target_weights do not have
            one value per part.
    """
    names: list[str] = []
    columns: list[Array] = []
    tolerance: list[float] = []
    for constraint in options.constraints:
        for name, column in constraint_columns(graph, constraint):
            names.append(name)
            columns.append(column)
            tolerance.append(options.tolerance_of(constraint))
    if max_constraints is not None and len(names) > max_constraints:
        raise ConfigError(
            f"this method balances {max_constraints} weight at a time, but {len(names)} are asked for "
            f"({', '.join(names)}); choose method metis, or balance one of nodes, degree"
        )
    return BalanceWeights(
        names=tuple(names),
        columns=tuple(columns),
        tolerance=np.array(tolerance),
        shares=part_shares(options.target_weights, num_parts),
    )


def part_shares(target_weights: Sequence[float] | None, num_parts: int) -> Array:
    """Return (P,) float64 shares that sum to 1.

    Raises:
        ConfigError: there is not one weight per part.
    """
    if target_weights is None:
        return np.full(num_parts, 1.0 / num_parts)
    if len(target_weights) != num_parts:
        raise ConfigError(
            f"target_weights has {len(target_weights)} values for {num_parts} parts; give one per part"
        )
    weights = np.asarray(target_weights, dtype=np.float64)
    return weights / weights.sum()


def constraint_columns(graph: RawGraph, constraint: str) -> list[tuple[str, Array]]:
    """Return (name, (N,) int64 weights) of ``constraint``: one, or one per type for ``ntype`` and ``etype``.

    Raises:
        ConfigError: ``graph`` has no such weight.
    """
    if constraint == "nodes":
        return [("nodes", np.ones(graph.total_nodes, dtype=np.int64))]
    if constraint == "degree":
        return [("degree", in_degrees(graph))]
    if constraint == "ntype":
        return [(f"ntype:{node_type}", _only(graph, node_type)) for node_type in graph.num_nodes]
    if constraint == "etype":
        return [(f"etype:{'.'.join(etype)}", _in_degrees_by(graph, etype)) for etype in graph.edges]
    return [(constraint, _data_column(graph, constraint, MASKS.get(constraint, constraint)))]


def in_degrees(graph: RawGraph) -> Array:
    """Return (N,) int64: in-edges of every node over all edge types, which is what its owner stores."""
    parts = {t: np.zeros(count, dtype=np.int64) for t, count in graph.num_nodes.items()}
    for (_, _, dst_type), (_, dst) in graph.edges.items():
        parts[dst_type] += np.bincount(dst, minlength=graph.num_nodes[dst_type])
    return np.concatenate([*parts.values(), np.zeros(0, dtype=np.int64)])


def _in_degrees_by(graph: RawGraph, etype: EdgeType) -> Array:
    return in_degrees(replace(graph, edges={etype: graph.edges[etype]}))


def has_column(graph: RawGraph, column: str) -> bool:
    """Whether any node type carries ``column``."""
    return any(column in columns for columns in graph.node_data.values())


def _only(graph: RawGraph, wanted: str) -> Array:
    pieces = [np.full(count, t == wanted, dtype=np.int64) for t, count in graph.num_nodes.items()]
    return np.concatenate(pieces)


def _data_column(graph: RawGraph, constraint: str, column: str) -> Array:
    if not has_column(graph, column):
        existing = sorted({name for columns in graph.node_data.values() for name in columns})
        hint = did_you_mean(constraint, ["nodes", "degree", "ntype", "etype", *MASKS, *existing])
        raise ConfigError(
            f"cannot balance {constraint!r}: {graph.name} has no node column {column!r}{hint} (node columns: "
            f"{', '.join(existing) or 'none'}; besides these: nodes, degree, ntype, etype)"
        )
    pieces = [np.zeros(0, dtype=np.int64)]
    for node_type, count in graph.num_nodes.items():
        values = graph.node_data.get(node_type, {}).get(column)
        pieces.append(
            np.zeros(count, dtype=np.int64) if values is None else _weight_of(values, constraint, node_type)
        )
    return np.concatenate(pieces)


def _weight_of(values: NodeColumn, constraint: str, node_type: str) -> Array:
    if isinstance(values, SparseRows) or values.ndim != 1 or values.dtype.kind not in "biu":
        raise ConfigError(
            f"cannot balance {constraint!r}: node type {node_type!r} has it as {values.shape} "
            f"{values.dtype}; a weight is one integer or bool per node"
        )
    if values.dtype.kind == "i" and len(values) and values.min() < 0:
        row = int(np.argmax(values < 0))
        raise ConfigError(
            f"cannot balance {constraint!r}: node {row} of type {node_type!r} weighs {values[row]}; "
            "weights are 0 or more"
        )
    return values.astype(np.int64)
