"""Kernels in which a graph server computes over the edges into its nodes.

Their arrays, for n own nodes, m halo nodes, E edges into own nodes and K heads, are:

- ``indptr`` (n + 1,) int64 and ``sources`` (E,) int32 local ids in [0, n + m), in-edges in CSC order. Node v
  has its in-edges from ``indptr[v]`` to ``indptr[v + 1]``.
- ``out_indptr`` (n + m + 1,) int64, ``out_targets`` (E,) int32 and ``out_edges`` (E,) positions in CSC order,
  the same edges by source. Local id u has its out-edges from ``out_indptr[u]`` to ``out_indptr[u + 1]``.
- ``rows`` (n + m, w) by source.
- ``values`` (E, K) edge factors in CSC order, where K divides w, or None if all factors are 1.
- ``first`` is the first node in ``out``, and ``nodes`` (k,) int32 are local ids.

Every sum follows the edge order, so equal rows give equal bits. Kernels release the interpreter lock. A
kernel is compiled twice: once for ``values`` as an array and once for None.
"""

import numpy as np
from numba import njit

from dglx_dist.graph.row_kernels import read_ahead
from dglx_dist.records import Array

_AHEAD = 8
"""Number of edges between a prefetched row and the row in use. Rows are scattered in memory."""


@njit(cache=True, nogil=True)
def gather(
    indptr: Array, sources: Array | None, values: Array | None, rows: Array, first: int, out: Array
) -> None:
    """Sum the source rows of each node ``first + i``, times the values, into ``out[i]`` (nodes, w).

    ``rows`` has the source rows. If ``sources`` is None, it has one row for each in-edge into these nodes.
    """
    heads = 1 if values is None else values.shape[1]
    width = rows.shape[1] // heads
    first_edge = indptr[first]
    end_edge = indptr[first + out.shape[0]]
    for i in range(out.shape[0]):
        out[i, :] = 0
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            if sources is not None and edge + _AHEAD < end_edge:
                read_ahead(rows, sources[edge + _AHEAD])

            source = edge - first_edge if sources is None else sources[edge]
            for head in range(heads):
                # Slices let the compiler make vector code. Indices might be negative, which prevents that.
                total = out[i, head * width : (head + 1) * width]
                row = rows[source, head * width : (head + 1) * width]
                if values is None:
                    for column in range(width):
                        total[column] += row[column]
                else:
                    value = values[edge, head]
                    for column in range(width):
                        total[column] += value * row[column]


@njit(cache=True, nogil=True)
def pull_back(
    out_indptr: Array,
    places: Array,
    out_edges: Array,
    values: Array | None,
    gradients: Array,
    nodes: Array,
    out: Array,
) -> None:
    """Add to ``out[i]`` (k, w) the gradients at ``places`` along the out-edges from ``nodes[i]``.

    This is the transpose of :func:`gather`. For node gradients, ``places`` is ``out_targets``, and each
    gradient is multiplied by its edge's value. For edge gradients, it is ``out_edges``.
    """
    heads = 1 if values is None else values.shape[1]
    width = gradients.shape[1] // heads
    for i in range(len(nodes)):
        for position in range(out_indptr[nodes[i]], out_indptr[nodes[i] + 1]):
            if values is not None and position + _AHEAD < len(out_edges):
                read_ahead(values, out_edges[position + _AHEAD])

            for head in range(heads):
                total = out[i, head * width : (head + 1) * width]
                row = gradients[places[position], head * width : (head + 1) * width]
                if values is None:
                    for column in range(width):
                        total[column] += row[column]
                else:
                    value = values[out_edges[position], head]
                    for column in range(width):
                        total[column] += value * row[column]


@njit(cache=True, nogil=True)
def edge_products(
    indptr: Array, sources: Array, gradients: Array, rows: Array, first: int, out: Array
) -> None:
    """Multiply the target's gradient with the source's row, by head, into ``out`` (edges, K).

    ``gradients`` is (nodes, w), and ``out`` has the in-edges into these nodes.
    """
    width = rows.shape[1] // out.shape[1]
    first_edge = indptr[first]
    for i in range(gradients.shape[0]):
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            source = sources[edge]
            if edge + _AHEAD < len(sources):
                read_ahead(rows, sources[edge + _AHEAD])

            for head in range(out.shape[1]):
                total = out.dtype.type(0)
                for column in range(head * width, (head + 1) * width):
                    total += gradients[i, column] * rows[source, column]
                out[edge - first_edge, head] = total


@njit(cache=True, nogil=True)
def gather_extreme(
    indptr: Array, sources: Array | None, rows: Array, first: int, is_max: bool, out: Array, best: Array
) -> None:
    """Write the largest or smallest row over node ``first + i``'s in-edges to ``out[i]`` (nodes, w).

    ``rows`` has the source rows. If ``sources`` is None, it has one row for each in-edge into these nodes.
    ``best`` (nodes, w) gets the position of the edge that gave the result, or the first one if several are
    equal. A node without edges gets -1 in ``best``, and an infinite ``out``.
    """
    out[:] = -np.inf if is_max else np.inf
    best[:] = -1
    first_edge = indptr[first]
    for i in range(out.shape[0]):
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            row = rows[edge - first_edge] if sources is None else rows[sources[edge]]
            for column in range(out.shape[1]):
                value = row[column]
                is_better = value > out[i, column] if is_max else value < out[i, column]
                # The first edge counts even if its value is infinite or NaN.
                if best[i, column] < 0 or is_better:
                    out[i, column] = value
                    best[i, column] = edge


@njit(cache=True, nogil=True)
def pull_back_extreme(
    out_indptr: Array,
    out_targets: Array,
    out_edges: Array,
    best: Array,
    gradients: Array,
    nodes: Array,
    out: Array,
) -> None:
    """Add to ``out[i]`` (k, w) the gradients from targets that took their value from ``nodes[i]``."""
    for i in range(len(nodes)):
        for position in range(out_indptr[nodes[i]], out_indptr[nodes[i] + 1]):
            target = out_targets[position]
            edge = out_edges[position]
            for column in range(out.shape[1]):
                if best[target, column] == edge:
                    out[i, column] += gradients[target, column]


@njit(cache=True, nogil=True)
def softmax(indptr: Array, scores: Array, first: int, out: Array) -> None:
    """Write the softmax over each node's in-edges in ``scores`` to ``out``.

    Both are (edges, K) and have the in-edges into consecutive nodes from ``first`` on. Their length tells
    which node is the last.
    """
    first_edge = indptr[first]
    node = first
    while indptr[node] - first_edge < len(scores):
        start = indptr[node] - first_edge
        end = indptr[node + 1] - first_edge
        for column in range(scores.shape[1]):
            largest = -np.inf
            for edge in range(start, end):
                largest = max(largest, scores[edge, column])

            # Subtracting the largest score keeps the exponentials finite, and cancels out in the quotient.
            total = 0.0
            for edge in range(start, end):
                out[edge, column] = np.exp(scores[edge, column] - largest)
                total += out[edge, column]
            for edge in range(start, end):
                out[edge, column] /= total
        node += 1


@njit(cache=True, nogil=True)
def softmax_gradient(indptr: Array, shares: Array, gradients: Array, first: int, out: Array) -> None:
    """Write the scores' gradient to ``out``. ``shares`` is what :func:`softmax` wrote.

    ``gradients`` is the gradient for ``shares``. All three are (edges, K), as in :func:`softmax`.
    """
    first_edge = indptr[first]
    node = first
    while indptr[node] - first_edge < len(shares):
        start = indptr[node] - first_edge
        end = indptr[node + 1] - first_edge
        for column in range(shares.shape[1]):
            total = 0.0
            for edge in range(start, end):
                total += shares[edge, column] * gradients[edge, column]
            for edge in range(start, end):
                out[edge, column] = shares[edge, column] * (gradients[edge, column] - total)
        node += 1
