"""Moves nodes out of parts that are too heavy, where a partitioner missed its tolerance."""

from __future__ import annotations

import logging

import numpy as np
from numba import njit

from dglx_dist.partition.symmetric import SymmetricGraph
from dglx_dist.partition.weights import BalanceWeights
from dglx_dist.records import Array

LOG = logging.getLogger(__name__)
MAX_PASSES = 8


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
    """Return a copy of the (N,) int32 ``part_of_node`` with nodes moved from heavy parts to where room is."""
    part = part_of_node.copy()
    matrix, loads, room = weights.matrix(), weights.loads(part), weights.capacities()
    for attempt in range(MAX_PASSES):
        # First only nodes that lose nothing, then twice as much each time, at last anything.
        allowed_loss = np.int64(2**attempt - 1) if attempt < MAX_PASSES - 1 else np.int64(2**62)
        _move(graph.indptr, graph.indices, matrix, loads, room, part, allowed_loss)
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
    indptr: Array,
    indices: Array,
    matrix: Array,
    loads: Array,
    room: Array,
    part: Array,
    allowed_loss: int,
) -> None:
    num_constraints, num_parts = loads.shape
    links = np.zeros(num_parts, dtype=np.int64)
    for u in range(len(part)):
        home = part[u]
        helps = False
        for c in range(num_constraints):
            if matrix[u, c] > 0 and loads[c, home] > room[c, home]:
                helps = True
        if not helps:
            continue
        links[:] = 0
        for e in range(indptr[u], indptr[u + 1]):
            links[part[indices[e]]] += 1
        best, best_links, best_fill = -1, np.int64(-1), 0.0
        for p in range(num_parts):
            fits, fill = p != home, 0.0
            for c in range(num_constraints):
                load = loads[c, p] + matrix[u, c]
                if matrix[u, c] > 0 and load > room[c, p]:
                    fits = False
                fill = max(fill, load / max(room[c, p], 1.0))
            if fits and (links[p] > best_links or (links[p] == best_links and fill < best_fill)):
                best, best_links, best_fill = p, links[p], fill
        if best >= 0 and links[home] - best_links <= allowed_loss:
            part[u] = best
            for c in range(num_constraints):
                loads[c, home] -= matrix[u, c]
                loads[c, best] += matrix[u, c]
