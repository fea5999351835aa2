"""How good a partition is: what it cuts, how even it is, how much every part must fetch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numba import njit

from dglx_dist.errors import ConfigError
from dglx_dist.partition.flat import from_assignment
from dglx_dist.partition.symmetric import first_ids
from dglx_dist.partition.weights import (
    MASKS,
    constraint_columns,
    has_column,
    imbalance,
    in_degrees,
    part_shares,
)
from dglx_dist.records import Array, Assignment, RawGraph


@dataclass(frozen=True, kw_only=True)
class PartitionQuality:
    """Figures of one partition; an edge belongs to the owner of its destination (section 1.1)."""

    num_parts: int
    num_nodes: tuple[int, ...]
    """(P,) owned nodes."""
    num_edges: tuple[int, ...]
    """(P,) in-edges of owned nodes."""
    cut_edges: int
    """Directed edges whose ends have different owners."""
    edge_cut: float
    """``cut_edges`` / E, in [0, 1]; a random partition has (P - 1) / P. 0 without edges."""
    remote_fraction: tuple[float, ...]
    """(P,) share of a part's in-edges whose source is elsewhere: rho of section 0 for one-hop reads."""
    halo_nodes: tuple[int, ...]
    """(P,) distinct foreign sources of the in-edges of a part."""
    halo_factor: tuple[float, ...]
    """(P,) halo nodes per owned node; 0 for an empty part."""
    replication_factor: float
    """Copies of a node on average when every part keeps its halo: 1 + sum of halo nodes / N."""
    balance: dict[str, float]
    """Constraint -> largest load / share of the load (max / mean when the shares are equal); 1 is even."""
    tolerance: dict[str, float]
    """Constraint -> what the partitioner promised."""
    missed: dict[str, float]
    """Constraint -> what was reached where the promise was not kept; empty is good."""

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON values: lists for tuples."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def measure(graph: RawGraph, assignment: Assignment) -> PartitionQuality:
    """Return the figures of ``assignment`` on ``graph``; reads each edge 1 + P / 64 times, one process.

    Raises:
        ConfigError: ``assignment`` is not one owner in [0, P) for each node of ``graph``.
    """
    _check_fits(graph, assignment)
    num_parts = assignment.num_parts
    part = from_assignment(graph, assignment)
    owned = np.bincount(part, minlength=num_parts)
    edges = np.bincount(part, weights=in_degrees(graph), minlength=num_parts).astype(np.int64)
    remote, halo = _remote_and_halo(graph, part, num_parts)
    num_cut, num_edges = int(remote.sum()), graph.total_edges
    tolerance, missed = assignment.parameters.get("tolerance"), assignment.parameters.get("missed")
    return PartitionQuality(
        num_parts=num_parts,
        num_nodes=tuple(owned.tolist()),
        num_edges=tuple(edges.tolist()),
        cut_edges=num_cut,
        edge_cut=num_cut / num_edges if num_edges else 0.0,
        remote_fraction=tuple((remote / np.maximum(edges, 1)).tolist()),
        halo_nodes=tuple(halo.tolist()),
        halo_factor=tuple((halo / np.maximum(owned, 1)).tolist()),
        replication_factor=1.0 + int(halo.sum()) / max(graph.total_nodes, 1),
        balance=_balance(graph, part, assignment),
        tolerance=dict(tolerance) if isinstance(tolerance, dict) else {},
        missed=dict(missed) if isinstance(missed, dict) else {},
    )


def _check_fits(graph: RawGraph, assignment: Assignment) -> None:
    for node_type, count in graph.num_nodes.items():
        owners = assignment.part_of.get(node_type)
        if owners is None or len(owners) != count:
            have = "none" if owners is None else len(owners)
            raise ConfigError(
                f"the assignment has {have} owners for the {count} nodes of type {node_type!r}; "
                "it was made for another graph"
            )
        if count and (owners.min() < 0 or owners.max() >= assignment.num_parts):
            raise ConfigError(
                f"an owner of type {node_type!r} is outside 0..{assignment.num_parts - 1}: "
                f"they span {owners.min()}..{owners.max()}"
            )


def _balance(graph: RawGraph, part: Array, assignment: Assignment) -> dict[str, float]:
    """Return the imbalance of everything that can be balanced in ``graph``, asked for or not."""
    asked = assignment.parameters.get("balance")
    constraints = ["nodes", "degree", *(c for c, column in MASKS.items() if has_column(graph, column))]
    if len(graph.num_nodes) > 1:
        constraints.append("ntype")
    constraints += [c for c in asked if c not in constraints] if isinstance(asked, list) else []
    targets = assignment.parameters.get("target_weights")
    shares = part_shares(targets if isinstance(targets, list) else None, assignment.num_parts)
    return {
        name: imbalance(np.bincount(part, weights=column, minlength=assignment.num_parts), shares)
        for constraint in constraints
        for name, column in constraint_columns(graph, constraint)
    }


def _remote_and_halo(graph: RawGraph, part: Array, num_parts: int) -> tuple[Array, Array]:
    """Return (P,) int64 in-edges from elsewhere and (P,) int64 distinct foreign sources."""
    first_id = first_ids(graph)
    remote = np.zeros(num_parts, dtype=np.int64)
    halo = np.zeros(num_parts, dtype=np.int64)
    for first_part in range(0, num_parts, 64):
        # One bit per (source, part): 8 bytes a node for each 64 parts, however many edges there are.
        readers = np.zeros(graph.total_nodes, dtype=np.uint64)
        for (src_type, _, dst_type), (src, dst) in graph.edges.items():
            _mark(src, dst, first_id[src_type], first_id[dst_type], part, first_part, readers, remote)
        _count_bits(readers, first_part, halo)
    return remote, halo


@njit(cache=True, nogil=True)
def _mark(
    src: Array,
    dst: Array,
    first_src: int,
    first_dst: int,
    part: Array,
    first_part: int,
    readers: Array,
    remote: Array,
) -> None:
    for e in range(len(src)):
        u = src[e] + first_src
        reader = part[dst[e] + first_dst]
        if reader != part[u] and first_part <= reader < first_part + 64:
            remote[reader] += 1
            readers[u] |= np.uint64(1) << np.uint64(reader - first_part)


@njit(cache=True, nogil=True)
def _count_bits(readers: Array, first_part: int, halo: Array) -> None:
    for u in range(len(readers)):
        bits = readers[u]
        bit = 0
        while bits != np.uint64(0):
            if bits & np.uint64(1):
                halo[first_part + bit] += 1
            bits >>= np.uint64(1)
            bit += 1
