"""Compiled sums over edges: Gather, its transpose, products per edge. Without the interpreter lock.

n own nodes, m ghosts, E edges into own nodes, K heads, d columns per head. In-edges are in CSC order: those
of node v are ``indptr[v]:indptr[v + 1]``, their sources local ids in [0, n + m). Out-edges are the same
edges by source: those of local id u are ``out_indptr[u]:out_indptr[u + 1]``, with their targets and their
positions in CSC order. Every sum runs in the order of the edges, so equal rows give equal bits.
"""

from __future__ import annotations

from numba import njit

from dglx_dist.graph.read_ahead import read_ahead
from dglx_dist.records import Array

_AHEAD = 8
"""So many edges before a row is added the processor is asked for it: sources lie anywhere in memory."""


@njit(cache=True, nogil=True)
def gather_sums(indptr: Array, sources: Array, rows: Array, first: int, out: Array) -> None:
    """Write to ``out[i]`` the sum of the source rows of node ``first + i``.

    Args:
        indptr: (n + 1,) int64.
        sources: (E,) int32.
        rows: (n + m, w).
        first: First node.
        out: (nodes, w), overwritten.
    """
    last_edge = indptr[first + out.shape[0]]
    for i in range(out.shape[0]):
        out[i, :] = 0
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            if edge + _AHEAD < last_edge:
                read_ahead(rows, sources[edge + _AHEAD])
            source = sources[edge]
            for column in range(rows.shape[1]):
                out[i, column] += rows[source, column]


@njit(cache=True, nogil=True)
def gather_weighted(
    indptr: Array, sources: Array, values: Array, rows: Array, first: int, out: Array
) -> None:
    """As :func:`gather_sums`, each row times the value of its edge, by head.

    Args:
        indptr: (n + 1,) int64.
        sources: (E,) int32.
        values: (E, K); K divides w.
        rows: (n + m, w).
        first: First node.
        out: (nodes, w), overwritten.
    """
    width = rows.shape[1] // values.shape[1]
    last_edge = indptr[first + out.shape[0]]
    for i in range(out.shape[0]):
        out[i, :] = 0
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            if edge + _AHEAD < last_edge:
                read_ahead(rows, sources[edge + _AHEAD])
            source = sources[edge]
            for head in range(values.shape[1]):
                value = values[edge, head]
                # Slices, because indices that might be negative keep the loop from becoming vector code.
                total = out[i, head * width : (head + 1) * width]
                row = rows[source, head * width : (head + 1) * width]
                for column in range(width):
                    total[column] += value * row[column]


@njit(cache=True, nogil=True)
def pull_back_sums(out_indptr: Array, out_targets: Array, slopes: Array, nodes: Array, out: Array) -> None:
    """Add to ``out[i]`` the gradients of the targets of ``nodes[i]``: the transpose of :func:`gather_sums`.

    Args:
        out_indptr: (n + m + 1,) int64.
        out_targets: (E,) int32.
        slopes: (n, w).
        nodes: (k,) int32 local ids.
        out: (k, w).
    """
    for i in range(len(nodes)):
        for place in range(out_indptr[nodes[i]], out_indptr[nodes[i] + 1]):
            target = out_targets[place]
            for column in range(slopes.shape[1]):
                out[i, column] += slopes[target, column]


@njit(cache=True, nogil=True)
def pull_back_weighted(
    out_indptr: Array,
    out_targets: Array,
    out_edges: Array,
    values: Array,
    slopes: Array,
    nodes: Array,
    out: Array,
) -> None:
    """Add as :func:`pull_back_sums`, each row times the value of its edge: transpose of the weighted gather.

    Args:
        out_indptr: (n + m + 1,) int64.
        out_targets: (E,) int32.
        out_edges: (E,) positions in CSC order.
        values: (E, K); K divides w.
        slopes: (n, w).
        nodes: (k,) int32 local ids.
        out: (k, w).
    """
    width = slopes.shape[1] // values.shape[1]
    for i in range(len(nodes)):
        for place in range(out_indptr[nodes[i]], out_indptr[nodes[i] + 1]):
            target, edge = out_targets[place], out_edges[place]
            for head in range(values.shape[1]):
                value = values[edge, head]
                total = out[i, head * width : (head + 1) * width]
                row = slopes[target, head * width : (head + 1) * width]
                for column in range(width):
                    total[column] += value * row[column]


@njit(cache=True, nogil=True)
def pull_back_edges(out_indptr: Array, out_edges: Array, slopes: Array, nodes: Array, out: Array) -> None:
    """Add to ``out[i]`` the rows of the out-edges of ``nodes[i]``.

    Args:
        out_indptr: (n + m + 1,) int64.
        out_edges: (E,) positions in CSC order.
        slopes: (E, k), in CSC order.
        nodes: (k,) int32 local ids.
        out: (k, k).
    """
    for i in range(len(nodes)):
        for place in range(out_indptr[nodes[i]], out_indptr[nodes[i] + 1]):
            edge = out_edges[place]
            for column in range(slopes.shape[1]):
                out[i, column] += slopes[edge, column]


@njit(cache=True, nogil=True)
def edge_products(indptr: Array, sources: Array, slopes: Array, rows: Array, first: int, out: Array) -> None:
    """Write to ``out`` the product of the target's gradient and the source's row, by head, of each in-edge.

    Args:
        indptr: (n + 1,) int64.
        sources: (E,) int32.
        slopes: (nodes, w) of the nodes from ``first`` on.
        rows: (n + m, w).
        first: First node.
        out: (edges of these nodes, K), overwritten; K divides w.
    """
    width = rows.shape[1] // out.shape[1]
    begin = indptr[first]
    for i in range(slopes.shape[0]):
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            source = sources[edge]
            for head in range(out.shape[1]):
                total = out.dtype.type(0)
                for column in range(head * width, (head + 1) * width):
                    total += slopes[i, column] * rows[source, column]
                out[edge - begin, head] = total


@njit(cache=True, nogil=True)
def segment_sums(indptr: Array, values: Array, first: int, out: Array) -> None:
    """Write to ``out[i]`` the sum over the in-edges of node ``first + i``.

    Args:
        indptr: (n + 1,) int64.
        values: (edges of these nodes, k) in CSC order.
        first: First node.
        out: (nodes, k), overwritten.
    """
    begin = indptr[first]
    for i in range(out.shape[0]):
        out[i, :] = 0
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            for column in range(values.shape[1]):
                out[i, column] += values[edge - begin, column]


@njit(cache=True, nogil=True)
def take_sources(sources: Array, rows: Array, first_edge: int, out: Array) -> None:
    """Copy to ``out[i]`` the row of the source of edge ``first_edge + i``.

    Args:
        sources: (E,) int32.
        rows: (n + m, k).
        first_edge: Position in CSC order.
        out: (edges, k), overwritten.
    """
    for i in range(out.shape[0]):
        source = sources[first_edge + i]
        for column in range(rows.shape[1]):
            out[i, column] = rows[source, column]
