"""What the one-pass partitioners share: the order of the nodes, and room in the parts."""

from __future__ import annotations

import numpy as np
from numba import njit

from dglx_dist.partition.symmetric import SymmetricGraph
from dglx_dist.records import Array


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
