"""Linear deterministic greedy: one pass over the nodes."""

from __future__ import annotations

from typing import final

import numpy as np
from numba import njit

from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.flat import check_request, describe, to_assignment
from dglx_dist.partition.stream import stream_order
from dglx_dist.partition.symmetric import symmetrise
from dglx_dist.partition.weights import balance_weights
from dglx_dist.records import Array, Assignment, RawGraph


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
        part_of_node = _stream(
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
def _stream(indptr: Array, indices: Array, order: Array, weights: Array, capacity: Array) -> Array:
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
