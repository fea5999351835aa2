"""A whole mini-batch in one compiled call: every hop, relabelling, and local feature rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from dglx_dist.draws.pick import Csc, Rule, count_hop, draw_hop
from dglx_dist.graph.in_edges import NO_EDGES
from dglx_dist.records import Array
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


class Ask(NamedTuple):
    """A mini-batch to sample."""

    seeds: Array
    """(B,) int64 distinct global ids."""
    fanouts: Array
    """(L,) int64, hop 0 (at the seeds) first; -1 for all in-edges."""
    streams: Array
    """(L,) uint64 keys of the hops."""
    rule: Rule
    """How edges are drawn."""
    like: Array
    """Any array of the dtype that indptr, sources and edge ids shall have."""
    once: Array = NO_EDGES
    """(X,) int64 those of ``rule.exclude`` that are of this batch alone, which other servers do not know."""


@njit(cache=True, nogil=True)
def longer(array: Array, used: int, length: int) -> Array:
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
            chunk[i] = csc.indices[np.uint64(edges[first + i] - csc.first_edge)]
        count = number(table, chunk[:length], nodes, count, local[first : first + length])
    return count


@njit(cache=True, nogil=True)
def sample_batch(csc: Csc, ask: Ask, table: Table) -> tuple[RawBatch, Table]:
    """Sample all hops of a batch and number the nodes that appear.

    Args:
        csc: The whole structure.
        ask: What to sample; a repeated seed shows as ``node_ends[0] < B``, and no hop is drawn.
        table: The calling thread's own.

    Returns:
        The batch, and the table to pass next time.
    """
    num_hops = len(ask.fanouts)
    like, rule = ask.like, ask.rule
    node_ends = np.zeros(num_hops + 1, np.int64)
    edge_ends = np.zeros(num_hops + 1, np.int64)
    table, nodes, count = number_seeds(table, ask.seeds)
    node_ends[0] = count
    indptr = np.empty(0, like.dtype)
    sources = np.empty(0, like.dtype)
    edge_ids = np.empty(0, like.dtype)
    if count < len(ask.seeds):
        num_hops = 0
    for hop in range(num_hops):
        fanout = ask.fanouts[hop]
        frontier = nodes[:count]
        row_end = len(indptr)
        indptr = longer(indptr, row_end, row_end + count + 1)
        starts = np.empty(count, np.int64)
        rows = indptr[row_end:]
        largest = count_hop(csc, frontier, fanout, rule, rows, starts)
        first, new = edge_ends[hop], np.int64(rows[count])
        edge_ids = longer(edge_ids, first, first + new)
        sources = longer(sources, first, first + new)
        draw_hop(csc, frontier, ask.streams[hop], fanout < 0, rule, (rows, starts, largest), edge_ids[first:])
        nodes = longer(nodes, count, count + new + 1)
        table = with_room(table, nodes, count, new)
        count = _relabel_edges(csc, table, edge_ids[first:], nodes, count, sources[first:])
        node_ends[hop + 1] = count
        edge_ends[hop + 1] = first + new
    used = Table(table.slots, table.keys, table.base + count)
    return RawBatch(nodes[:count], node_ends, indptr, sources, edge_ids, edge_ends), used


@njit(cache=True, nogil=True)
def copy_rows(rows: Array, ids: Array, out: Array) -> None:
    """Copy ``rows[ids]`` to ``out``: (n, words) and (K, words) of one unsigned dtype, ids in range."""
    words = rows.shape[1]
    for i in range(len(ids)):
        row = np.uint64(ids[i])
        for word in range(words):
            out[np.uint64(i), np.uint64(word)] = rows[row, np.uint64(word)]


@njit(cache=True, nogil=True)
def sample_and_slice(
    csc: Csc, ask: Ask, table: Table, rows: Array, out: Array
) -> tuple[RawBatch, Table, Array]:
    """Sample a batch and copy the feature rows of its nodes, in one call.

    Args:
        csc: The whole structure.
        ask: What to sample.
        table: The calling thread's own.
        rows: (N, words) the features of all nodes as words of one unsigned dtype.
        out: (any, words) memory to use if it is long enough.

    Returns:
        The batch, the table to pass next time, and the memory used; its first rows are the features.
    """
    batch, table = sample_batch(csc, ask, table)
    if len(out) < len(batch.nodes):
        # Batches differ a little in size: some room to spare saves the next ones from growing again.
        out = np.empty((len(batch.nodes) * 5 // 4, rows.shape[1]), rows.dtype)
    copy_rows(rows, batch.nodes, out)
    return batch, table, out
