"""A mini-batch of a graph with several node and edge types in one compiled call, whatever their number.

Each hop draws, for every edge type, in-edges of the nodes of its destination type that earlier hops saw. A
graph with one node and one edge type is drawn as :func:`~dglx_dist.sampling.kernel.sample_batch` draws it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from dglx_dist.draws.pick import Rule, count_hop, draw_hop
from dglx_dist.records import Array
from dglx_dist.sampling.kernel import longer
from dglx_dist.sampling.relabel import Table, enlarged, insert, number
from dglx_dist.sampling.relations import Relations, csc_at, read_sources

_CHUNK = 2048


class TypedAsk(NamedTuple):
    """A mini-batch to sample, over T node types and R edge types."""

    seeds: Array
    """(B,) int64 global ids, type by type, distinct within a type."""
    seed_ends: Array
    """(T + 1,) int64; those of type t are ``[t]:[t + 1]``."""
    fanouts: Array
    """(L, R) int64, hop 0 (at the seeds) first; -1 for all in-edges."""
    streams: Array
    """(L, R) uint64 keys of the hops and edge types."""
    replace: bool
    """Whether an edge may be drawn more than once."""
    exclude: Array
    """(X,) int64 edges that are not drawn, edge type by edge type, ascending within one."""
    exclude_ends: Array
    """(R + 1,) int64."""
    like: Array
    """Any array of the dtype that indptr, sources and edge ids shall have."""


class TypedBatch(NamedTuple):
    """All hops of a mini-batch, hop 0 (at the seeds) first, and in a hop edge type by edge type.

    Hop h draws for the first ``node_ends[h, t]`` nodes of type t, and sees the first ``node_ends[h + 1, t]``.
    """

    nodes: Array
    """(n,) int64 global ids, type by type, distinct within a type; seeds come first in theirs."""
    node_starts: Array
    """(T + 1,) int64; nodes of type t are ``[t]:[t + 1]``."""
    node_ends: Array
    """(L + 1, T) int64; the first row is the numbers of seeds."""
    indptr: Array
    """Each with an entry more than the hop has nodes of the destination type, and starting at 0."""
    sources: Array
    """Positions among the nodes of the source type."""
    edge_ids: Array
    """Global edge ids."""
    edge_ends: Array
    """(L * R + 1,) int64; hop h and edge type r have the edges ``[h * R + r]:[h * R + r + 1]``."""


class Numbered(NamedTuple):
    """The nodes that have a number, by type; ``counts`` and the arrays are written to as more are found."""

    keys: Array
    """Keys by number, those of type t from ``starts[t]`` on."""
    ids: Array
    """Global ids, likewise."""
    starts: Array
    """(T + 1,) int64."""
    counts: Array
    """(T,) int64."""


class _Hop(NamedTuple):
    """What one hop draws."""

    fanouts: Array
    """(R,) int64."""
    streams: Array
    """(R,) uint64."""
    sizes: Array
    """(T,) int64 nodes of each type that are drawn for."""
    indptr: Array
    """(rows,) of all edge types, one after another."""
    starts: Array
    """(rows,) int64 where the in-edges of each node begin."""
    largest: Array
    """(R,) int64 largest in-degree."""
    ends: Array
    """(R + 1,) int64 edges of the batch before each edge type, and after the last."""


@njit(cache=True, nogil=True)
def with_space(nodes: Numbered, more: Array) -> Numbered:
    """Return a copy that ``more`` ((T,) int64) nodes of each type fit into."""
    num_types = len(nodes.counts)
    starts = np.zeros(num_types + 1, np.int64)
    # One to spare, because numbering writes before it knows whether a node is new.
    starts[1:] = np.cumsum(nodes.counts + more + 1)
    keys, ids = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
    for node_type in range(num_types):
        count, old, new = nodes.counts[node_type], nodes.starts[node_type], starts[node_type]
        keys[new : new + count] = nodes.keys[old : old + count]
        ids[new : new + count] = nodes.ids[old : old + count]
    return Numbered(keys, ids, starts, nodes.counts)


@njit(cache=True, nogil=True)
def with_typed_room(table: Table, nodes: Numbered, more: int) -> Table:
    """Return a table that can take ``more`` nodes, holding the numbers of ``nodes``."""
    needed = 2 * (nodes.counts.sum() + more)
    if len(table.keys) == 0 or len(table.keys) >= needed:
        return table
    table = enlarged(table, needed)
    for node_type in range(len(nodes.counts)):
        first = nodes.starts[node_type]
        insert(table, nodes.keys[first:], nodes.counts[node_type])
    return table


@njit(cache=True, nogil=True)
def number_type(table: Table, nodes: Numbered, node_type: int, keys: Array, local: Array) -> None:
    """Write the numbers of ``keys`` ((K,) int64, of one type) to ``local``; new nodes get the next ones."""
    segment = nodes.keys[nodes.starts[node_type] : nodes.starts[node_type + 1]]
    nodes.counts[node_type] = number(table, keys, segment, nodes.counts[node_type], local)


@njit(cache=True, nogil=True)
def number_typed_seeds(
    table: Table, offsets: Array, seeds: Array, seed_ends: Array
) -> tuple[Table, Numbered]:
    """Number the seeds; fewer nodes than ``len(seeds)`` tell that some repeat."""
    num_types = len(offsets) - 1
    nothing = np.empty(0, np.int64)
    empty = Numbered(nothing, nothing, np.zeros(num_types + 1, np.int64), np.zeros(num_types, np.int64))
    nodes = with_space(empty, np.diff(seed_ends))
    table = with_typed_room(table, nodes, len(seeds))
    local = np.empty(len(seeds), np.int64)
    for node_type in range(num_types):
        first, last = seed_ends[node_type], seed_ends[node_type + 1]
        number_type(table, nodes, node_type, seeds[first:last] + offsets[node_type], local[first:last])
    note_ids(nodes, offsets, np.zeros(num_types, np.int64))
    return table, nodes


@njit(cache=True, nogil=True)
def note_ids(nodes: Numbered, offsets: Array, done: Array) -> None:
    """Write the ids of the nodes from the ``done[t]``-th of each type on."""
    for node_type in range(len(nodes.counts)):
        first, offset = nodes.starts[node_type], offsets[node_type]
        for i in range(first + done[node_type], first + nodes.counts[node_type]):
            nodes.ids[i] = nodes.keys[i] - offset


@njit(cache=True, nogil=True)
def gathered(nodes: Numbered) -> tuple[Array, Array]:
    """Return (ids, (T + 1,) starts), type by type without gaps."""
    starts = np.zeros(len(nodes.counts) + 1, np.int64)
    starts[1:] = np.cumsum(nodes.counts)
    ids = np.empty(starts[-1], np.int64)
    for node_type in range(len(nodes.counts)):
        first = nodes.starts[node_type]
        ids[starts[node_type] : starts[node_type + 1]] = nodes.ids[first : first + nodes.counts[node_type]]
    return ids, starts


@njit(cache=True, nogil=True)
def _rule(ask: TypedAsk, relation: int) -> Rule:
    return Rule(ask.replace, ask.exclude[ask.exclude_ends[relation] : ask.exclude_ends[relation + 1]])


@njit(cache=True, nogil=True)
def _frontier(relations: Relations, nodes: Numbered, hop: _Hop, relation: int) -> Array:
    """Return the global ids that edge type ``relation`` draws for."""
    node_type = relations.destination_types[relation]
    first = nodes.starts[node_type]
    return nodes.ids[first : first + hop.sizes[node_type]]


@njit(cache=True, nogil=True)
def _count(relations: Relations, ask: TypedAsk, nodes: Numbered, hop: _Hop) -> None:
    """Fill the indptr, starts, largest in-degrees and ends of a hop whose first end is set."""
    row = 0
    for relation in range(len(hop.fanouts)):
        frontier = _frontier(relations, nodes, hop, relation)
        rows = hop.indptr[row : row + len(frontier) + 1]
        fanout = hop.fanouts[relation]
        if fanout == 0:
            rows[:] = 0
        else:
            hop.largest[relation] = count_hop(
                csc_at(relations, relation), frontier, fanout, _rule(ask, relation), rows, hop.starts[row:]
            )
        hop.ends[relation + 1] = hop.ends[relation] + np.int64(rows[len(frontier)])
        row += len(frontier) + 1


@njit(cache=True, nogil=True)
def _draw(relations: Relations, ask: TypedAsk, nodes: Numbered, hop: _Hop, edges: Array) -> None:
    """Write the ids of the drawn edges to ``edges``, which is that of the batch."""
    row = 0
    for relation in range(len(hop.fanouts)):
        frontier = _frontier(relations, nodes, hop, relation)
        first, last = hop.ends[relation], hop.ends[relation + 1]
        if last > first:
            rows = hop.indptr[row : row + len(frontier) + 1]
            space = (rows, hop.starts[row : row + len(frontier)], hop.largest[relation])
            draw_hop(
                csc_at(relations, relation),
                frontier,
                hop.streams[relation],
                hop.fanouts[relation] < 0,
                _rule(ask, relation),
                space,
                edges[first:last],
            )
        row += len(frontier) + 1


@njit(cache=True, nogil=True)
def _number(
    relations: Relations, table: Table, nodes: Numbered, hop: _Hop, edges: Array, sources: Array
) -> None:
    """Write the numbers of the sources of the hop's ``edges`` to ``sources``; both are those of the batch."""
    chunk = np.empty(_CHUNK, np.int64)
    for relation in range(len(hop.fanouts)):
        node_type = relations.source_types[relation]
        for first in range(hop.ends[relation], hop.ends[relation + 1], _CHUNK):
            last = min(first + _CHUNK, hop.ends[relation + 1])
            keys = chunk[: last - first]
            read_sources(relations, relation, edges[first:last], keys)
            number_type(table, nodes, node_type, keys, sources[first:last])


@njit(cache=True, nogil=True)
def _hop(relations: Relations, ask: TypedAsk, number_of_hop: int, sizes: Array, indptr: Array) -> _Hop:
    rows, num_relations = len(indptr), len(relations.source_types)
    return _Hop(
        ask.fanouts[number_of_hop],
        ask.streams[number_of_hop],
        sizes,
        indptr,
        np.empty(rows, np.int64),
        np.zeros(num_relations, np.int64),
        np.zeros(num_relations + 1, np.int64),
    )


@njit(cache=True, nogil=True)
def sample_relations(relations: Relations, ask: TypedAsk, table: Table) -> tuple[TypedBatch, Table]:
    """Sample all hops of a batch and number the nodes that appear, each type from 0.

    Args:
        relations: The whole structure.
        ask: What to sample; a repeated seed shows as a smaller first row of ``node_ends``, and no hop is
            drawn.
        table: The calling thread's own, over the keys of all node types.

    Returns:
        The batch, and the table to pass next time.
    """
    num_hops, num_relations = ask.fanouts.shape
    like = ask.like
    node_ends = np.zeros((num_hops + 1, len(relations.offsets) - 1), np.int64)
    edge_ends = np.zeros(num_hops * num_relations + 1, np.int64)
    table, nodes = number_typed_seeds(table, relations.offsets, ask.seeds, ask.seed_ends)
    node_ends[0] = nodes.counts
    indptr = np.empty(0, like.dtype)
    sources = np.empty(0, like.dtype)
    edge_ids = np.empty(0, like.dtype)
    if nodes.counts.sum() < len(ask.seeds):
        num_hops = 0
    for number_of_hop in range(num_hops):
        sizes = node_ends[number_of_hop]
        begin, row_end = number_of_hop * num_relations, len(indptr)
        new_rows = sizes[relations.destination_types].sum() + num_relations
        indptr = longer(indptr, row_end, row_end + new_rows)
        hop = _hop(relations, ask, number_of_hop, sizes, indptr[row_end:])
        hop.ends[0] = edge_ends[begin]
        _count(relations, ask, nodes, hop)
        edge_ends[begin : begin + num_relations + 1] = hop.ends
        first, last = hop.ends[0], hop.ends[num_relations]
        edge_ids, sources = longer(edge_ids, first, last), longer(sources, first, last)
        _draw(relations, ask, nodes, hop, edge_ids)
        more = np.zeros(len(sizes), np.int64)
        for relation in range(num_relations):
            more[relations.source_types[relation]] += hop.ends[relation + 1] - hop.ends[relation]
        nodes = with_space(nodes, more)
        table = with_typed_room(table, nodes, last - first)
        _number(relations, table, nodes, hop, edge_ids, sources)
        note_ids(nodes, relations.offsets, sizes)
        node_ends[number_of_hop + 1] = nodes.counts
    ids, starts = gathered(nodes)
    used = Table(table.slots, table.keys, table.base + nodes.counts.max())
    return TypedBatch(ids, starts, node_ends, indptr, sources, edge_ids, edge_ends), used
