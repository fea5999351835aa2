"""A mini-batch of a graph with several node and edge types in one compiled call, whatever their number.

Each hop draws, for every edge type, in-edges of the nodes of its destination type that earlier hops saw. A
graph with one node and one edge type is drawn as ``sample_batch`` draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from dglx_dist.errors import ConfigError
from dglx_dist.graph.structure import NO_EDGES
from dglx_dist.keyed_random import Csc, Rule, count_hop, draw_hop
from dglx_dist.records import Array, EdgeType


class Table(NamedTuple):
    """Where the number of a node is noted."""

    slots: Array
    """Direct: (N,) uint32, one per node. Hashed: (C,) uint32, C a power of two, one per slot."""
    keys: Array
    """Direct: length 0. Hashed: (C,) int64, the node in each slot."""
    base: int
    """Entries below it are of earlier batches."""


@njit(cache=True, nogil=True)
def _slot_of(table: Table, node: int) -> np.uint64:
    """Return the slot of ``node``, or the free slot where it belongs (hashed tables only)."""
    last = np.uint64(len(table.keys) - 1)
    word = np.uint64(node) * np.uint64(0x9E3779B97F4A7C15)
    slot = (word >> np.uint64(20)) & last
    while table.slots[slot] >= table.base and table.keys[slot] != node:
        slot = (slot + np.uint64(1)) & last
    return slot


@njit(cache=True, nogil=True)
def number_direct(table: Table, sources: Array, nodes: Array, count: int, local: Array) -> np.int64:
    """Number ``sources``; see :func:`number`."""
    slots = table.slots
    base = np.uint32(table.base)
    # Unsigned positions, because for signed ones every access would first ask whether they are negative.
    end = np.uint64(count)
    for i in range(len(sources)):
        node = np.uint64(sources[i])
        seen = slots[node]
        # Always storing costs less than a branch that the processor cannot foresee.
        fresh = seen < base
        value = np.uint32(base + np.uint32(end)) if fresh else seen
        slots[node] = value
        nodes[end] = node
        end += np.uint64(fresh)
        local[i] = value - base
    return np.int64(end)


@njit(cache=True, nogil=True)
def number_hashed(table: Table, sources: Array, nodes: Array, count: int, local: Array) -> int:
    """Number ``sources``; see :func:`number`."""
    base = np.uint32(table.base)
    for i in range(len(sources)):
        node = np.int64(sources[i])
        slot = _slot_of(table, node)
        if table.slots[slot] < base:
            table.slots[slot] = base + np.uint32(count)
            table.keys[slot] = node
            nodes[count] = node
            count += 1
        local[i] = table.slots[slot] - base
    return count


@njit(cache=True, nogil=True)
def number(table: Table, sources: Array, nodes: Array, count: int, local: Array) -> int:
    """Write the number of each of ``sources`` to ``local``, giving new nodes the next ones.

    Args:
        table: With room: hashed ones need at least twice as many slots as distinct nodes.
        sources: (K,) global ids.
        nodes: (count + K + 1,) global ids by number; the first ``count`` are set.
        count: How many nodes have a number.
        local: (K,) output.

    Returns:
        The new count.
    """
    if len(table.keys) == 0:
        return int(number_direct(table, sources, nodes, count, local))
    return number_hashed(table, sources, nodes, count, local)


@njit(cache=True, nogil=True)
def with_room(table: Table, nodes: Array, count: int, more: int) -> Table:
    """Return a table that can take ``more`` nodes, holding the numbers of ``nodes[:count]``."""
    if len(table.keys) == 0 or len(table.keys) >= 2 * (count + more):
        return table
    table = enlarged(table, 2 * (count + more))
    insert(table, nodes, count)
    return table


@njit(cache=True, nogil=True)
def enlarged(table: Table, slots: int) -> Table:
    """Return an empty hashed table with at least ``slots`` slots and the base of ``table``."""
    capacity = np.int64(len(table.keys))
    while capacity < slots:
        capacity *= 2
    return Table(np.zeros(capacity, np.uint32), np.empty(capacity, np.int64), table.base)


@njit(cache=True, nogil=True)
def insert(table: Table, nodes: Array, count: int) -> None:
    """Give ``nodes[:count]``, not in the hashed ``table`` yet, the numbers 0 ... count - 1."""
    for i in range(count):
        slot = _slot_of(table, nodes[i])
        table.slots[slot] = np.uint32(table.base) + np.uint32(i)
        table.keys[slot] = nodes[i]


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


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The types of a graph and their numbers: positions in these lists."""

    ntypes: tuple[str, ...]
    num_nodes: tuple[int, ...]
    """Nodes of each type."""
    etypes: tuple[EdgeType, ...]

    @property
    def offsets(self) -> Array:
        """(T + 1,) int64: node i of type t has the key ``offsets[t] + i``, and keys are distinct."""
        return np.cumsum([0, *self.num_nodes])

    @property
    def source_types(self) -> Array:
        """(R,) int64 numbers of the source types."""
        return np.array([self.ntypes.index(source) for source, _, _ in self.etypes], np.int64)

    @property
    def destination_types(self) -> Array:
        """(R,) int64 numbers of the destination types."""
        return np.array([self.ntypes.index(destination) for _, _, destination in self.etypes], np.int64)


class Relations(NamedTuple):
    """In-edges of R edge types over T node types; what it points to must outlive it."""

    offsets: Array
    """(T + 1,) int64 first key of each node type."""
    source_types: Array
    """(R,) int64."""
    destination_types: Array
    """(R,) int64."""
    indptr: Array
    """(R,) int64 addresses of (N + 1,) int64."""
    indices: Array
    """(R,) int64 addresses of (E,) int32, or int64 where ``wide``."""
    weights: Array
    """(R,) int64 addresses of ``num_weights`` float32."""
    num_destinations: Array
    """(R,) int64 N."""
    num_edges: Array
    """(R,) int64 E."""
    num_weights: Array
    """(R,) int64: E, or 0 where all edges are alike."""
    wide: Array
    """(R,) bool."""


def relations_of(schema: Schema, cscs: Sequence[Csc]) -> Relations:
    """Return the record of ``cscs``, one whole structure per edge type, to be kept alive beside it."""
    return Relations(
        schema.offsets,
        schema.source_types,
        schema.destination_types,
        _addresses([csc.indptr for csc in cscs], (np.int64,)),
        _addresses([csc.indices for csc in cscs], (np.int32, np.int64)),
        _addresses([csc.weights for csc in cscs], (np.float32,)),
        np.array([len(csc.indptr) - 1 for csc in cscs], np.int64),
        np.array([len(csc.indices) for csc in cscs], np.int64),
        np.array([len(csc.weights) for csc in cscs], np.int64),
        np.array([csc.indices.dtype == np.int64 for csc in cscs], np.bool_),
    )


def _addresses(arrays: Sequence[Array], dtypes: tuple[Any, ...]) -> Array:
    for array in arrays:
        assert array.dtype in dtypes
        assert array.flags.c_contiguous
        assert array.flags.aligned
    return np.array([array.ctypes.data for array in arrays], np.int64)


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    """Return the address as a pointer."""

    def generate(_compiler: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _compiler.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@njit(cache=True, nogil=True)
def csc_at(relations: Relations, number: int) -> Csc:
    """Return edge type ``number`` as :mod:`pick` reads it, with no indices: drawing needs none."""
    rows = np.int64(relations.num_destinations[number])
    indptr = carray(_pointer(relations.indptr[number]), rows + 1, dtype=np.int64)
    weights = carray(
        _pointer(relations.weights[number]), np.int64(relations.num_weights[number]), dtype=np.float32
    )
    return Csc(indptr, np.empty(0, np.int64), weights, 0, 0)


@njit(cache=True, nogil=True)
def read_sources(relations: Relations, number: int, edges: Array, out: Array) -> None:
    """Write the keys of the sources of ``edges`` ((k,) ids of edge type ``number``) to ``out`` (int64)."""
    first = relations.offsets[relations.source_types[number]]
    length = np.int64(relations.num_edges[number])
    # Two loops: the width is known before the first edge, and a branch inside would be asked for each.
    if relations.wide[number]:
        wide = carray(_pointer(relations.indices[number]), length, dtype=np.int64)
        for i in range(len(edges)):
            out[i] = first + wide[np.uint64(edges[i])]
    else:
        narrow = carray(_pointer(relations.indices[number]), length, dtype=np.int32)
        for i in range(len(edges)):
            out[i] = first + narrow[np.uint64(edges[i])]


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


DIRECT_LIMIT = 1 << 26
"""Largest graph with a table entry per node (4 bytes each, 256 MiB a thread); larger ones are hashed."""

_FIRST_SLOTS = 1 << 16
_LAST_BASE = 1 << 31


@final
class Workspace:
    """One thread's relabelling table; not to be shared between threads.

    Args:
        num_nodes: N of the whole graph.
        direct_limit: Up to how many nodes the table has an entry per node.
    """

    def __init__(self, num_nodes: int, *, direct_limit: int = DIRECT_LIMIT) -> None:
        direct = num_nodes <= direct_limit
        slots = np.zeros(num_nodes if direct else _FIRST_SLOTS, np.uint32)
        self._table = Table(slots, np.empty(0 if direct else _FIRST_SLOTS, np.int64), 1)

    @property
    def table(self) -> Table:
        """The table, ready for a batch; give it back through :meth:`keep`."""
        # Numbers of a batch stay below 2**31, so the 32-bit entries cannot wrap within one.
        if self._table.base >= _LAST_BASE:
            self._table.slots[:] = 0
            self._table = Table(self._table.slots, self._table.keys, 1)
        return self._table

    def keep(self, table: Table) -> None:
        """Keep ``table``, as a kernel returned it, for the next batch."""
        self._table = table


def check_seeds(seeds: Array, num_distinct: int) -> None:
    """Raise ConfigError when fewer of ``seeds`` are distinct than there are, naming the first repeat."""
    if num_distinct == len(seeds):
        return
    ids, counts = np.unique(seeds, return_counts=True)
    raise ConfigError(
        f"the seeds have node {ids[counts > 1][0]} more than once ({len(seeds)} seeds, {num_distinct} "
        f"distinct); a block has one row per node: pass torch.unique(seeds)"
    )
