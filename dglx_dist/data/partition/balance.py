"""Measure how good a partition is, and rebalance overloaded parts."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from dglx_dist.data.partition.base import PARTITIONERS, Partitioner
from dglx_dist.data.partition.graph_views import (
    MASKS,
    BalanceWeights,
    SymmetricGraph,
    assign_parts,
    balance_weights,
    concatenate_owners,
    constraint_columns,
    first_ids,
    has_node_column,
    imbalance,
    in_degrees,
    part_shares,
    sum_by_part,
    symmetrise,
)
from dglx_dist.data.validate import check_assignment
from dglx_dist.records import Array, Assignment, RawGraph


@dataclass(frozen=True, kw_only=True)
class PartitionQuality:
    """Measured properties of one partition. An edge belongs to its destination's owner."""

    num_parts: int
    num_nodes: tuple[int, ...]
    """(P,) owned nodes by part."""
    num_edges: tuple[int, ...]
    """(P,) edges into owned nodes by part."""
    cut_edges: int
    """Directed edges between different owners."""
    edge_cut: float
    """``cut_edges`` / E, in [0, 1], or 0 without edges. A random partition has (P - 1) / P."""
    remote_fraction: tuple[float, ...]
    """(P,) share of a part's in-edges with a remote source (rho for one-hop reads)."""
    halo_nodes: tuple[int, ...]
    """(P,) distinct remote sources from which a part's in-edges start."""
    halo_factor: tuple[float, ...]
    """(P,) halo nodes per owned node, or 0 for an empty part."""
    replication_factor: float
    """Mean number of copies per node if every part stores its halo: 1 + all halo nodes / N."""
    balance: dict[str, float]
    """Largest load / share by constraint (max / mean for equal shares). 1 is even."""
    tolerance: dict[str, float]
    """Tolerance by constraint that the partitioner promised."""
    missed: dict[str, float]
    """Reached value by constraint, for broken promises."""


def measure(graph: RawGraph, assignment: Assignment) -> PartitionQuality:
    """Measure ``assignment`` on ``graph``. Each edge is read 1 + P / 64 times."""
    check_assignment(assignment, graph)
    num_parts = assignment.num_parts
    part = concatenate_owners(graph, assignment)
    num_owned = np.bincount(part, minlength=num_parts)
    num_in_edges = sum_by_part(part, in_degrees(graph), num_parts).astype(np.int64)
    num_remote, num_halo = _count_remote_and_halo(graph, part, num_parts)
    num_cut = int(num_remote.sum())
    edge_cut = 0.0
    if graph.total_edges > 0:
        edge_cut = num_cut / graph.total_edges

    # Parameters from partitioners outside this package may have any type.
    tolerance = assignment.parameters.get("tolerance")
    missed = assignment.parameters.get("missed")
    return PartitionQuality(
        num_parts=num_parts,
        num_nodes=tuple(num_owned.tolist()),
        num_edges=tuple(num_in_edges.tolist()),
        cut_edges=num_cut,
        edge_cut=edge_cut,
        remote_fraction=tuple((num_remote / np.maximum(num_in_edges, 1)).tolist()),
        halo_nodes=tuple(num_halo.tolist()),
        halo_factor=tuple((num_halo / np.maximum(num_owned, 1)).tolist()),
        replication_factor=1.0 + int(num_halo.sum()) / max(graph.total_nodes, 1),
        balance=_measure_balance(graph, part, assignment),
        tolerance=dict(tolerance) if isinstance(tolerance, dict) else {},
        missed=dict(missed) if isinstance(missed, dict) else {},
    )


def _measure_balance(graph: RawGraph, part: Array, assignment: Assignment) -> dict[str, float]:
    """Measure the imbalance for all constraints that exist in the graph, whether requested or not."""
    constraints = ["nodes", "degree"]
    constraints += [mask for mask, column in MASKS.items() if has_node_column(graph, column)]
    if len(graph.num_nodes) > 1:
        constraints.append("ntype")
    requested = assignment.parameters.get("balance")
    if isinstance(requested, list):
        constraints += [constraint for constraint in requested if constraint not in constraints]

    targets = assignment.parameters.get("target_weights")
    shares = part_shares(targets if isinstance(targets, list) else None, assignment.num_parts)
    balance = {}
    for constraint in constraints:
        for name, column in constraint_columns(graph, constraint):
            balance[name] = imbalance(sum_by_part(part, column, assignment.num_parts), shares)
    return balance


def _count_remote_and_halo(graph: RawGraph, part: Array, num_parts: int) -> tuple[Array, Array]:
    """Return (P,) int64 counts: in-edges with a remote source, and distinct remote sources."""
    first_id = first_ids(graph)
    num_remote = np.zeros(num_parts, dtype=np.int64)
    num_halo = np.zeros(num_parts, dtype=np.int64)
    for first_part in range(0, num_parts, 64):
        # A node has one bit for each of 64 parts, set if the part reads the node. So the memory is 8 bytes
        # per node, however many edges there are.
        readers = np.zeros(graph.total_nodes, dtype=np.uint64)
        for (src_type, _, dst_type), (src, dst) in graph.edges.items():
            _mark(src, dst, first_id[src_type], first_id[dst_type], part, first_part, readers, num_remote)
        _count_bits(readers, first_part, num_halo)

    return num_remote, num_halo


@njit(cache=True, nogil=True)
def _mark(
    src: Array,
    dst: Array,
    first_src: int,
    first_dst: int,
    part: Array,
    first_part: int,
    readers: Array,
    num_remote: Array,
) -> None:
    for e in range(len(src)):
        u = src[e] + first_src
        reader = part[dst[e] + first_dst]
        if reader != part[u] and first_part <= reader < first_part + 64:
            num_remote[reader] += 1
            readers[u] |= np.uint64(1) << np.uint64(reader - first_part)


@njit(cache=True, nogil=True)
def _count_bits(readers: Array, first_part: int, num_halo: Array) -> None:
    for u in range(len(readers)):
        bits = readers[u]
        bit = 0
        while bits != np.uint64(0):
            if bits & np.uint64(1):
                num_halo[first_part + bit] += 1
            bits >>= np.uint64(1)
            bit += 1


_LOG = logging.getLogger(__name__)
_MAX_PASSES = 12
_EPSILON = 1e-12


def enforce_capacities(
    graph: SymmetricGraph, weights: BalanceWeights, part_of_node: Array, method: str
) -> tuple[Array, dict[str, float]]:
    """Move nodes until no part exceeds its tolerance, and return the (N,) int32 ``part_of_node``.

    Moves may not be enough. Constraints that are still exceeded are logged as warnings, with the name of the
    ``method``. They are also returned, each with the largest ratio between a part's load and its share.
    """
    unmet = weights.find_unmet(part_of_node)
    if not unmet:
        return part_of_node, unmet

    _LOG.info("%s left %s above tolerance; moving nodes", method, unmet)
    part_of_node = rebalance(graph, weights, part_of_node)
    unmet = weights.find_unmet(part_of_node)
    for name, ratio in unmet.items():
        _LOG.warning(
            "%s could not balance %s: the heaviest part has %.3f times its share",
            method,
            name,
            ratio,
        )

    return part_of_node, unmet


def assign_balanced(
    partitioner: Partitioner,
    graph: RawGraph,
    num_parts: int,
    seed: int,
    compute: Callable[[SymmetricGraph, BalanceWeights], Array],
    *,
    dtype: Any = None,
    weighted: bool = True,
    count_reserved_bytes: Callable[[BalanceWeights], int],
) -> Assignment:
    """Partition ``graph`` with ``compute``, and move nodes out of parts that exceed their tolerance.

    If some parts still exceed it, a warning is logged and the assignment lists their constraints in
    ``parameters["missed"]``.

    Args:
        partitioner: Partitioner with the options and the workspace.
        graph: The graph to partition.
        num_parts: Number of parts P. With one part, or with at least as many parts as nodes, ``compute`` is
            not called.
        seed: Seed that the assignment records.
        compute: Function from the undirected graph and the balance weights to each node's part, (N,).
        dtype: Dtype for the neighbour ids that ``compute`` reads. By default int32 if N fits, else int64.
        weighted: Whether ``compute`` reads how many parallel and opposite edges connect two nodes.
        count_reserved_bytes: Function from the balance weights to the bytes that ``compute`` takes in
            addition to its arguments. The graph is kept on disk if they do not fit beside it.
    """
    num_nodes = graph.total_nodes
    weights = balance_weights(graph, partitioner.options, num_parts, partitioner.max_constraints)
    if num_parts == 1 or num_parts >= num_nodes:
        parts = np.arange(num_nodes, dtype=np.int32) % np.int32(num_parts)
        return assign_parts(partitioner, graph, num_parts, seed, parts, weights)

    workspace = partitioner.workspace
    if workspace is not None:
        # Each balance weight is a column with one int64 per node.
        workspace = workspace.with_reserved(8 * len(weights.columns) * num_nodes)
    reserved_bytes = count_reserved_bytes(weights)
    symmetric = symmetrise(
        graph, dtype=dtype, weighted=weighted, workspace=workspace, reserved_bytes=reserved_bytes
    )

    parts = compute(symmetric, weights)
    method = PARTITIONERS.name_of(type(partitioner))
    parts, unmet = enforce_capacities(symmetric, weights, parts, method)
    parameters = {}
    if unmet:
        parameters["missed"] = unmet
    return assign_parts(partitioner, graph, num_parts, seed, parts, weights, **parameters)


def rebalance(graph: SymmetricGraph, weights: BalanceWeights, part_of_node: Array) -> Array:
    """Copy the (N,) int32 ``part_of_node``, and move nodes out of overloaded parts.

    Nodes that lose the fewest neighbours move first. A move must lower the total excess, where each
    constraint is relative to its total. A move may overload a part in a second constraint. A later move
    corrects this overload.
    """
    part = part_of_node.copy()
    loads = weights.loads(part)
    # Weights are integers, so capacities are rounded down. The 1e-6 allows for rounding errors in the shares.
    capacity = np.floor(weights.capacities() + 1e-6)

    # Weights, loads and capacities become shares of the constraint's total, so that they can be added.
    totals = np.maximum(loads.sum(axis=1), 1.0)
    matrix = np.empty((len(part), len(totals)))
    for c, column in enumerate(weights.columns):
        np.divide(column, totals[c], out=matrix[:, c])
    loads /= totals[:, None]
    capacity /= totals[:, None]

    for pass_number in range(_MAX_PASSES):
        # At first only nodes that lose no neighbour may move. The allowed loss doubles, then is unlimited.
        max_loss = 2**pass_number - 1 if pass_number < _MAX_PASSES // 2 else 2**62
        _move(graph.indptr, graph.indices, matrix, loads, capacity, part, np.int64(max_loss))
        if (loads <= capacity * (1 + 1e-9)).all():
            break
    return part


@njit(cache=True, nogil=True)
def _move(
    indptr: Array,
    indices: Array,
    matrix: Array,
    loads: Array,
    capacity: Array,
    part: Array,
    max_loss: int,
) -> None:
    """Move each node in an overloaded part, in place, to the part with most of its neighbours.

    A move must lower the total excess, and may lose at most ``max_loss`` neighbours.
    """
    num_parts = loads.shape[1]
    links = np.zeros(num_parts, dtype=np.int64)
    for u in range(len(part)):
        home = part[u]
        relief = _compute_excess(loads[:, home], capacity[:, home], matrix[u], 0.0)
        relief -= _compute_excess(loads[:, home], capacity[:, home], matrix[u], -1.0)
        if relief <= _EPSILON:
            continue

        links[:] = 0
        for e in range(indptr[u], indptr[u + 1]):
            links[part[indices[e]]] += 1

        # Among the parts with equally many neighbours, the best is the one with the least growth in excess.
        best, best_links, best_burden = -1, np.int64(-1), 0.0
        for p in range(num_parts):
            burden = _compute_excess(loads[:, p], capacity[:, p], matrix[u], 1.0)
            burden -= _compute_excess(loads[:, p], capacity[:, p], matrix[u], 0.0)
            if p == home or burden > relief - _EPSILON:
                continue
            if links[p] > best_links or (links[p] == best_links and burden < best_burden):
                best, best_links, best_burden = p, links[p], burden

        if best >= 0 and links[home] - best_links <= max_loss:
            part[u] = best
            loads[:, home] -= matrix[u]
            loads[:, best] += matrix[u]


@njit(cache=True, nogil=True)
def _compute_excess(load: Array, capacity: Array, weight: Array, sign: float) -> float:
    """Return the total excess over capacity, with the node added (1), removed (-1) or unchanged (0)."""
    excess = 0.0
    for c in range(len(load)):
        excess += max(load[c] + sign * weight[c] - capacity[c], 0.0)
    return excess
