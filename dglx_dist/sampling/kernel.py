"""A whole mini-batch in one compiled call: every hop, relabelling, and local feature rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from dglx_dist.records import Array
from dglx_dist.sampling.pick import Csc, Rule, count_hop, draw_hop
from dglx_dist.sampling.relabel import Table, number, with_room

_CHUNK = 2048


class RawBatch(NamedTuple):
    """All hops of a mini-batch, one after another, hop 0 (at the seeds) first.

    Hop h draws for the nodes ``[0, node_ends[h])`` and sees nodes ``[0, node_ends[h + 1])``.
    """

    nodes: Array
    """(n,) int64 distinct global ids; the seeds come first."""
    node_ends: Array
    """(L + 1,) int64; the first is the number of seeds."""
    indptr: Array
    """The hops' indptr, each of ``node_ends[h] + 1`` entries and starting at 0."""
    sources: Array
    """The hops' source numbers, positions in ``nodes``."""
    edge_ids: Array
    """The hops' global edge ids."""
    edge_ends: Array
    """(L + 1,) int64; hop h has the edges ``[edge_ends[h], edge_ends[h + 1])``."""


@njit(cache=True, nogil=True)
def _longer(array: Array, used: int, length: int) -> Array:
    """Return a copy of ``array[:used]`` with room for ``length``."""
    out = np.empty(length, array.dtype)
    out[:used] = array[:used]
    return out


@njit(cache=True, nogil=True)
def number_seeds(table: Table, seeds: Array) -> tuple[Table, Array, int]:
    """Start the list of nodes of a batch; a count below len(seeds) tells that seeds repeat."""
    nodes = np.empty(len(seeds) + 1, np.int64)
    table = with_room(table, nodes, 0, len(seeds))
    count = number(table, seeds, nodes, 0, np.empty(len(seeds), np.int64))
    return table, nodes, count


@njit(cache=True, nogil=True)
def _relabel_edges(csc: Csc, table: Table, edges: Array, nodes: Array, count: int, local: Array) -> int:
    """Write the numbers of the sources of ``edges`` to ``local``; return how many nodes have one."""
    # Reading a chunk of ids first lets the processor have many of those misses under way at once.
    chunk = np.empty(min(_CHUNK, len(edges)), csc.indices.dtype)
    for first in range(0, len(edges), _CHUNK):
        length = min(_CHUNK, len(edges) - first)
        for i in range(length):
            chunk[i] = csc.indices[edges[first + i] - csc.first_edge]
        count = number(table, chunk[:length], nodes, count, local[first : first + length])
    return count


@njit(cache=True, nogil=True)
def sample_batch(
    csc: Csc, seeds: Array, fanouts: Array, streams: Array, rule: Rule, table: Table, like: Array
) -> tuple[RawBatch, Table]:
    """Sample all hops of ``seeds`` and number the nodes that appear.

    Args:
        csc: The whole structure.
        seeds: (B,) int64 distinct ids; a repeat shows as ``node_ends[0] < B`` and the rest is unset.
        fanouts: (L,) int64, hop 0 (at the seeds) first; -1 for all in-edges.
        streams: (L,) uint64 keys of the hops.
        rule: How to draw.
        table: The calling thread's own.
        like: Any array of the dtype that indptr, sources and edge ids shall have.

    Returns:
        The batch, and the table to pass next time.
    """
    num_hops = len(fanouts)
    node_ends = np.zeros(num_hops + 1, np.int64)
    edge_ends = np.zeros(num_hops + 1, np.int64)
    table, nodes, count = number_seeds(table, seeds)
    node_ends[0] = count
    indptr = np.empty(0, like.dtype)
    sources = np.empty(0, like.dtype)
    edge_ids = np.empty(0, like.dtype)
    if count == len(seeds):
        for hop in range(num_hops):
            row_end = len(indptr)
            indptr = _longer(indptr, row_end, row_end + count + 1)
            starts = np.empty(count, np.int64)
            rows = indptr[row_end:]
            largest = count_hop(csc, nodes[:count], fanouts[hop], rule, rows, starts)
            first, new = edge_ends[hop], np.int64(rows[count])
            edge_ids = _longer(edge_ids, first, first + new)
            sources = _longer(sources, first, first + new)
            space = (rows, starts, largest)
            draw_hop(csc, nodes[:count], streams[hop], fanouts[hop] < 0, rule, space, edge_ids[first:])
            nodes = _longer(nodes, count, count + new + 1)
            table = with_room(table, nodes, count, new)
            count = _relabel_edges(csc, table, edge_ids[first:], nodes, count, sources[first:])
            node_ends[hop + 1] = count
            edge_ends[hop + 1] = first + new
    used = Table(table.slots, table.keys, table.base + count)
    return RawBatch(nodes[:count], node_ends, indptr, sources, edge_ids, edge_ends), used


@njit(cache=True, nogil=True)
def gather_rows(rows: Array, ids: Array, first_id: int, out: Array) -> None:
    """Copy ``rows[ids - first_id]`` to ``out``; (n, words) and (K, words) of one integer dtype."""
    words = rows.shape[1]
    for i in range(len(ids)):
        row = ids[i] - first_id
        for j in range(words):
            out[i, j] = rows[row, j]
