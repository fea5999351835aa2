"""Streaming partitioners: Fennel and LDG, one pass over the nodes in breadth-first order."""

from __future__ import annotations

from typing import final

import numpy as np
from numba import njit

from dglx_dist.data.partition.base import Partitioner
from dglx_dist.data.partition.graph_views import BalanceWeights, SymmetricGraph, assign_parts, symmetrise
from dglx_dist.records import Array, Assignment, RawGraph


def stream_order(graph: SymmetricGraph, seed: int) -> Array:
    """Return (N,) int64 all nodes in breadth-first order from random starts.

    Greedy streaming works well in this order, since some neighbours of a node are assigned before it.
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
"""Exponent of Fennel's size penalty; the authors' choice."""


class _Streaming(Partitioner):
    honours = frozenset({"balance", "tolerance", "target_weights"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        def compute(weights: BalanceWeights) -> Array:
            symmetric = symmetrise(graph, weighted=False)
            order, adjacency = stream_order(symmetric, seed), (symmetric.indptr, symmetric.indices)
            capacity, is_fennel = weights.capacities()[0], isinstance(self, Fennel)
            return _stream(*adjacency, order, weights.columns[0], capacity, weights.shares, is_fennel)

        return assign_parts(self, graph, (num_parts, seed), compute)


@final
class Fennel(_Streaming):
    """Each node goes where assigned neighbours minus the marginal size penalty is largest.

    Supports one constraint, its tolerance, which always holds, and target weights.
    """


@final
class Ldg(_Streaming):
    """Linear deterministic greedy: each node goes where assigned neighbours x free share is largest.

    Supports one constraint, its tolerance, which always holds, and target weights.
    """


@njit(cache=True, nogil=True)
def _stream(
    indptr: Array, indices: Array, order: Array, weights: Array, capacity: Array, shares: Array, fennel: bool
) -> Array:
    num_parts, num_nodes = len(capacity), max(len(order), 1)
    # The size of a part is measured in nodes of mean weight, relative to an equal share, so that
    # Fennel's constant alpha = sqrt(P) m / n^1.5 also applies to other weights and unequal shares.
    alpha = np.sqrt(num_parts) * (len(indices) / 2) / num_nodes**GAMMA
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
            if fennel:
                score = links[p] - alpha * GAMMA * np.sqrt(load[p] / mean_weight / (shares[p] * num_parts))
            else:
                score = links[p] * (1.0 - load[p] / max(capacity[p], 1.0))
            if score > best_score or (score == best_score and fill < best_fill):
                best, best_score, best_fill = p, score, fill
        # Where all parts are full the emptiest one takes the node.
        chosen = best if best >= 0 else emptiest
        part[u] = chosen
        load[chosen] += weights[u]
    return part
