"""Fennel: one pass over the nodes with a convex price on size."""

from __future__ import annotations

from typing import final

import numpy as np
from numba import njit

from dglx_dist.data.partition.base import Partitioner
from dglx_dist.data.partition.graph_views import (
    SymmetricGraph,
    balance_weights,
    check_request,
    describe,
    symmetrise,
    to_assignment,
)
from dglx_dist.records import Array, Assignment, RawGraph


def stream_order(graph: SymmetricGraph, seed: int) -> Array:
    """Return (N,) int64 all nodes in breadth-first order from random starts, drawn by ``seed``.

    A node then arrives when some of its neighbours are placed already: the order in which a crawl
    would bring them, and the one in which greedy streaming does well.
    """
    starts = np.random.default_rng(seed).permutation(graph.num_nodes)
    return _breadth_first(graph.indptr, graph.indices, starts)


@njit(cache=True, nogil=True)
def _breadth_first(indptr: Array, indices: Array, starts: Array) -> Array:
    order = np.empty(len(starts), dtype=np.int64)
    seen = np.zeros(len(starts), dtype=np.bool_)
    found = 0
    done = 0
    for start in starts:
        if seen[start]:
            continue
        seen[start] = True
        order[found] = start
        found += 1
        while done < found:
            u = order[done]
            done += 1
            for e in range(indptr[u], indptr[u + 1]):
                v = indices[e]
                if not seen[v]:
                    seen[v] = True
                    order[found] = v
                    found += 1
    return order


GAMMA = 1.5
"""Exponent of the price of size; 1.5 is the authors' choice."""


@final
class Fennel(Partitioner):
    """Each node goes where placed neighbours minus the marginal price of size is largest.

    Honours one constraint, its tolerance and target weights. One pass; beside the symmetric rows it
    keeps a few numbers per node. The tolerance holds always.
    """

    honours = frozenset({"balance", "tolerance", "target_weights"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Stream the nodes in breadth-first order; see :meth:`Partitioner.assign`."""
        check_request(num_parts, seed)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        symmetric = symmetrise(graph, weighted=False)
        part_of_node = _stream(
            symmetric.indptr,
            symmetric.indices,
            stream_order(symmetric, seed),
            weights.columns[0],
            weights.capacities()[0],
            weights.shares,
        )
        return to_assignment(
            graph,
            part_of_node,
            num_parts,
            method="fennel",
            seed=seed,
            parameters=describe(self.options, weights),
        )


@njit(cache=True, nogil=True)
def _stream(
    indptr: Array, indices: Array, order: Array, weights: Array, capacity: Array, shares: Array
) -> Array:
    num_parts = len(capacity)
    num_nodes = max(len(order), 1)
    num_pairs = len(indices) / 2
    # The size of a part is measured in nodes of mean weight, relative to an equal share, so that
    # Fennel's constant alpha = sqrt(P) m / n^1.5 fits other weights and unequal shares as well.
    alpha = np.sqrt(num_parts) * num_pairs / num_nodes**GAMMA
    mean_weight = max(weights.sum() / num_nodes, 1e-9)
    part = np.full(len(order), -1, dtype=np.int32)
    load = np.zeros(num_parts)
    links = np.zeros(num_parts)
    for u in order:
        links[:] = 0
        for e in range(indptr[u], indptr[u + 1]):
            p = part[indices[e]]
            if p >= 0:
                links[p] += 1
        best, best_score, best_fill = -1, -np.inf, np.inf
        emptiest, emptiest_fill = 0, np.inf
        for p in range(num_parts):
            fill = (load[p] + weights[u]) / max(capacity[p], 1.0)
            if fill < emptiest_fill:
                emptiest, emptiest_fill = p, fill
            if fill > 1.0:
                continue
            size = load[p] / mean_weight / (shares[p] * num_parts)
            score = links[p] - alpha * GAMMA * np.sqrt(size)
            if score > best_score or (score == best_score and fill < best_fill):
                best, best_score, best_fill = p, score, fill
        chosen = best if best >= 0 else emptiest
        part[u] = chosen
        load[chosen] += weights[u]
    return part


@final
class Ldg(Partitioner):
    """Each node goes where most of its placed neighbours are, times how empty that part is.

    Honours one constraint, its tolerance and target weights. One pass; beside the symmetric rows it
    keeps a few numbers per node. The tolerance holds always.
    """

    honours = frozenset({"balance", "tolerance", "target_weights"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Stream the nodes in breadth-first order; see :meth:`Partitioner.assign`."""
        check_request(num_parts, seed)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        symmetric = symmetrise(graph, weighted=False)
        part_of_node = _stream_ldg(
            symmetric.indptr,
            symmetric.indices,
            stream_order(symmetric, seed),
            weights.columns[0],
            weights.capacities()[0],
        )
        return to_assignment(
            graph,
            part_of_node,
            num_parts,
            method="ldg",
            seed=seed,
            parameters=describe(self.options, weights),
        )


@njit(cache=True, nogil=True)
def _stream_ldg(indptr: Array, indices: Array, order: Array, weights: Array, capacity: Array) -> Array:
    num_parts = len(capacity)
    part = np.full(len(order), -1, dtype=np.int32)
    load = np.zeros(num_parts)
    links = np.zeros(num_parts)
    for u in order:
        links[:] = 0
        for e in range(indptr[u], indptr[u + 1]):
            p = part[indices[e]]
            if p >= 0:
                links[p] += 1
        best, best_score, best_fill = 0, -1.0, np.inf
        for p in range(num_parts):
            fill = (load[p] + weights[u]) / max(capacity[p], 1.0)
            # A full part takes nobody: its score is below every other one, and the emptiest wins a tie.
            score = links[p] * (1.0 - load[p] / max(capacity[p], 1.0)) if fill <= 1.0 else -0.5
            if score > best_score or (score == best_score and fill < best_fill):
                best, best_score, best_fill = p, score, fill
        part[u] = best
        load[best] += weights[u]
    return part
