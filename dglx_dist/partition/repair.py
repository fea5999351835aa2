"""Moves nodes out of parts that are too heavy, where a partitioner missed its tolerance."""

from __future__ import annotations

import logging

import numpy as np
from numba import njit

from dglx_dist.partition.symmetric import SymmetricGraph
from dglx_dist.partition.weights import BalanceWeights
from dglx_dist.records import Array

LOG = logging.getLogger(__name__)
MAX_PASSES = 12
EPSILON = 1e-12


def settle(
    graph: SymmetricGraph, weights: BalanceWeights, part_of_node: Array, method: str
) -> tuple[Array, dict[str, float]]:
    """Return ``part_of_node`` within its capacities as far as moves allow, and what is still missed.

    Moves cost cut edges, so the nodes that lose least go first. What stays too heavy is logged as a
    warning, with the figure reached.

    Args:
        graph: Whose neighbours decide where a node goes.
        weights: Constraints and capacities.
        part_of_node: (N,) int32; not changed.
        method: Whose result it is, for the message.
    """
    missed = weights.missed(part_of_node)
    if not missed:
        return part_of_node, missed
    LOG.info("%s left %s above tolerance; moving nodes", method, missed)
    part_of_node = rebalance(graph, weights, part_of_node)
    missed = weights.missed(part_of_node)
    for name, reached in missed.items():
        LOG.warning(
            "%s could not balance %s within its tolerance: the heaviest part carries %.3f of its share",
            method,
            name,
            reached,
        )
    return part_of_node, missed


def rebalance(graph: SymmetricGraph, weights: BalanceWeights, part_of_node: Array) -> Array:
    """Return a copy of the (N,) int32 ``part_of_node`` with nodes moved from heavy parts to where room is.

    A move must lower the total excess, each constraint measured in its own total. One constraint may
    thus push another a little over, which a later move of another node mends: that is how two nodes
    change places.
    """
    part = part_of_node.copy()
    # Weights are whole numbers: what is above the whole part of the room is excess in full.
    loads, room = weights.loads(part), np.floor(weights.capacities() + 1e-6)
    totals = np.maximum(loads.sum(axis=1), 1.0)
    matrix = weights.matrix() / totals
    loads /= totals[:, None]
    room /= totals[:, None]
    for attempt in range(MAX_PASSES):
        # First only nodes that lose no neighbour, then twice as many each time, at last any number.
        allowed_loss = 2**attempt - 1 if attempt < MAX_PASSES // 2 else 2**62
        _move(graph.indptr, graph.indices, matrix, loads, room, part, np.int64(allowed_loss))
        if (loads <= room * (1 + 1e-9)).all():
            break
    return part


def deal(weights: BalanceWeights) -> Array:
    """Return (N,) int32 parts that are even in all constraints, whatever the edges are."""
    return _deal(weights.matrix(), np.maximum(weights.capacities(), 1.0))


@njit(cache=True, nogil=True)
def _deal(matrix: Array, room: Array) -> Array:
    num_nodes, num_constraints = matrix.shape
    num_parts = room.shape[1]
    part = np.zeros(num_nodes, dtype=np.int32)
    loads = np.zeros(room.shape)
    for u in range(num_nodes):
        best_fill = np.inf
        for p in range(num_parts):
            # Constraints in which the node weighs count double or more.
            fill = 0.0
            for c in range(num_constraints):
                fill += (loads[c, p] + matrix[u, c]) / room[c, p] * (1.0 + matrix[u, c])
            if fill < best_fill:
                best_fill = fill
                part[u] = p
        for c in range(num_constraints):
            loads[c, part[u]] += matrix[u, c]
    return part


@njit(cache=True, nogil=True)
def _move(
    indptr: Array, indices: Array, matrix: Array, loads: Array, room: Array, part: Array, allowed_loss: int
) -> None:
    num_parts = loads.shape[1]
    links = np.zeros(num_parts, dtype=np.int64)
    for u in range(len(part)):
        home = part[u]
        relief = _excess(loads[:, home], room[:, home], matrix[u], 0.0)
        relief -= _excess(loads[:, home], room[:, home], matrix[u], -1.0)
        if relief <= EPSILON:
            continue
        links[:] = 0
        for e in range(indptr[u], indptr[u + 1]):
            links[part[indices[e]]] += 1
        best, best_links, best_burden = -1, np.int64(-1), 0.0
        for p in range(num_parts):
            burden = _excess(loads[:, p], room[:, p], matrix[u], 1.0)
            burden -= _excess(loads[:, p], room[:, p], matrix[u], 0.0)
            if p == home or burden > relief - EPSILON:
                continue
            if links[p] > best_links or (links[p] == best_links and burden < best_burden):
                best, best_links, best_burden = p, links[p], burden
        if best >= 0 and links[home] - best_links <= allowed_loss:
            part[u] = best
            loads[:, home] -= matrix[u]
            loads[:, best] += matrix[u]


@njit(cache=True, nogil=True)
def _excess(load: Array, room: Array, weight: Array, sign: float) -> float:
    """Return by how much a part exceeds its room over all constraints, with the node taken out or put in."""
    excess = 0.0
    for c in range(len(load)):
        excess += max(load[c] + sign * weight[c] - room[c], 0.0)
    return excess
