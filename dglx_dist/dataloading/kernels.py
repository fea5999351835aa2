"""Compiled sampling kernels: all hops of a mini-batch in one call.

Each hop goes through the edge types. It draws in-edges for the destinations that earlier hops have reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from dglx_dist.keyed_random import Csc, Rule, count_hop, draw_by_source, draw_hop, item_key
from dglx_dist.records import Array, EdgeType


class NodeTable(NamedTuple):
    """Table that maps a node to its number within the batch."""

    slots: Array
    """Direct: (N,) uint32, one per node. Hashed: (C,) uint32, one per slot. C is a power of two."""
    keys: Array
    """Direct: length 0. Hashed: (C,) int64, the node in each slot."""
    base: int
    """Smallest entry in the current batch. Smaller entries belong to earlier batches."""


@njit(cache=True, nogil=True)
def find_slot(table: NodeTable, node: int) -> np.uint64:
    """Return the slot of ``node`` in a hashed table, or the free slot where it belongs."""
    # The product is meant to overflow: its upper bits depend on all the node's bits.
    slot_mask = np.uint64(len(table.keys) - 1)
    hashed = np.uint64(node) * np.uint64(0x9E3779B97F4A7C15)
    slot = (hashed >> np.uint64(20)) & slot_mask
    while table.slots[slot] >= table.base and table.keys[slot] != node:
        slot = (slot + np.uint64(1)) & slot_mask
    return slot


@njit(cache=True, nogil=True)
def _number_direct(table: NodeTable, sources: Array, nodes: Array, count: int, numbers: Array) -> np.int64:
    """Do the work of :func:`number_nodes` with a direct table."""
    slots = table.slots
    base = np.uint32(table.base)
    # Positions are unsigned, because every access by a signed one would first test for negative values.
    end = np.uint64(count)
    for i in range(len(sources)):
        node = np.uint64(sources[i])
        entry = slots[node]
        is_new = entry < base
        value = np.uint32(base + np.uint32(end)) if is_new else entry

        # Unconditional stores cost less than an unpredictable branch. The last entry in ``nodes`` is
        # overwritten later if the node is not new.
        slots[node] = value
        nodes[end] = node
        end += np.uint64(is_new)
        numbers[i] = value - base
    return np.int64(end)


@njit(cache=True, nogil=True)
def _number_hashed(table: NodeTable, sources: Array, nodes: Array, count: int, numbers: Array) -> int:
    """Do the work of :func:`number_nodes` with a hashed table."""
    base = np.uint32(table.base)
    for i in range(len(sources)):
        node = np.int64(sources[i])
        slot = find_slot(table, node)
        if table.slots[slot] < base:
            table.slots[slot] = base + np.uint32(count)
            table.keys[slot] = node
            nodes[count] = node
            count += 1
        numbers[i] = table.slots[slot] - base
    return count


@njit(cache=True, nogil=True)
def number_nodes(table: NodeTable, sources: Array, nodes: Array, count: int, numbers: Array) -> int:
    """Look up each source's number within the batch, and write it to ``numbers``.

    A node that is new to the batch gets the next number and is appended to ``nodes``.

    Args:
        table: Numbers of the batch's nodes, which are updated. A hashed table must have at least twice as
            many slots as the batch has nodes afterwards, see :func:`grow_table`.
        sources: (K,) global ids, which may be repeated.
        nodes: Global ids by number. The first ``count`` are set. The length is at least ``count`` + K + 1,
            because an id is written before it is known to be new.
        count: Number of nodes in the batch before the call.
        numbers: (K,) output.

    Returns:
        Number of nodes in the batch after the call.
    """
    if len(table.keys) == 0:
        return int(_number_direct(table, sources, nodes, count, numbers))
    return _number_hashed(table, sources, nodes, count, numbers)


@njit(cache=True, nogil=True)
def make_larger_table(table: NodeTable, slots: int) -> NodeTable:
    """Return an empty hashed table with at least ``slots`` slots and the same base as ``table``."""
    capacity = np.int64(len(table.keys))
    while capacity < slots:
        capacity *= 2
    return NodeTable(np.zeros(capacity, np.uint32), np.empty(capacity, np.int64), table.base)


_CHUNK = 2048
"""Number of edges to read and number at a time."""


@njit(cache=True, nogil=True)
def copy_to(out: Array, values: Array) -> None:
    """Copy ``values`` to the front of ``out``. A slice assignment would take 2 s longer to compile."""
    for i in range(len(values)):
        out[i] = values[i]


@njit(cache=True, nogil=True)
def grow_array(array: Array, num_used: int, length: int) -> Array:
    """Return a new array with ``length`` entries. The first ``num_used`` entries come from ``array``."""
    out = np.empty(length, array.dtype)
    copy_to(out, array[:num_used])
    return out


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Node and edge types in a graph. A type's number is its index in ``ntypes`` or ``etypes``."""

    ntypes: tuple[str, ...]
    num_nodes: tuple[int, ...]
    """(T,) node count by type."""
    etypes: tuple[EdgeType, ...]

    @property
    def offsets(self) -> Array:
        """(T + 1,) int64 offsets. Node i of type t has the unique key ``offsets[t] + i``."""
        return np.cumsum([0, *self.num_nodes])

    @property
    def source_types(self) -> Array:
        return np.array([self.ntypes.index(source) for source, _, _ in self.etypes], np.int64)

    @property
    def destination_types(self) -> Array:
        return np.array([self.ntypes.index(destination) for _, _, destination in self.etypes], np.int64)


class Relations(NamedTuple):
    """In-edges for R edge types over T node types. The arrays behind its addresses must outlive it."""

    offsets: Array
    """(T + 1,) int64 first key for each node type."""
    source_types: Array
    """(R,) int64 index of each edge type's source type."""
    destination_types: Array
    """(R,) int64 index of each edge type's destination type."""
    indptr: Array
    """(R,) int64 addresses. Each array has shape (N + 1,) and dtype int64."""
    indices: Array
    """(R,) int64 addresses. Each array has shape (E,) and dtype int32, or int64 if ``wide``."""
    weights: Array
    """(R,) int64 addresses. Each array has ``num_weights`` float32 values."""
    num_destinations: Array
    """(R,) int64 destination counts N."""
    num_edges: Array
    """(R,) int64 edge counts E."""
    num_weights: Array
    """(R,) int64 weight counts: E, or 0 for uniform draws."""
    wide: Array
    """(R,) bool: whether the indices are int64."""


def make_relations(schema: Schema, cscs: Sequence[Csc]) -> Relations:
    """Collect addresses and sizes from ``cscs``, one complete structure per edge type.

    The caller must keep a reference to ``cscs``, because the result holds only addresses.
    """
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
    """Return array addresses. Compiled code can read each array as contiguous values in one of ``dtypes``."""
    for array in arrays:
        assert array.dtype in dtypes
        assert array.flags.c_contiguous
        assert array.flags.aligned
    return np.array([array.ctypes.data for array in arrays], np.int64)


# Numba has no function that turns an integer into a pointer, so this emits the instruction.
@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    def generate(_compiler: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _compiler.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@njit(cache=True, nogil=True)
def read_csc(relations: Relations, number: int) -> Csc:
    """Return edge type ``number`` as arrays, without ``indices``, which the draw kernels do not read."""
    rows = np.int64(relations.num_destinations[number])
    indptr = carray(_pointer(relations.indptr[number]), rows + 1, dtype=np.int64)
    weights = carray(_pointer(relations.weights[number]), relations.num_weights[number], dtype=np.float32)
    return Csc(indptr, np.empty(0, np.int64), weights, 0, 0)


@njit(cache=True, nogil=True)
def _read_indices(relations: Relations, number: int, dtype: Any) -> Array:
    return carray(_pointer(relations.indices[number]), np.int64(relations.num_edges[number]), dtype=dtype)


@njit(cache=True, nogil=True)
def read_sources(relations: Relations, number: int, edges: Array, out: Array) -> None:
    """Write the int64 source keys for the (k,) ``edges`` to ``out``. ``number`` is their type's index."""
    first = relations.offsets[relations.source_types[number]]
    # Test the width outside the loops, because it is the same for all edges.
    if relations.wide[number]:
        wide_indices = _read_indices(relations, number, np.int64)
        for i in range(len(edges)):
            out[i] = first + wide_indices[np.uint64(edges[i])]
    else:
        narrow_indices = _read_indices(relations, number, np.int32)
        for i in range(len(edges)):
            out[i] = first + narrow_indices[np.uint64(edges[i])]


class SampleRequest(NamedTuple):
    """A mini-batch to sample, over T node types and R edge types."""

    seeds: Array
    """(B,) int64 global ids, type by type, distinct within a type."""
    seed_ends: Array
    """(T + 1,) int64 ends. Type t has the seeds ``[t]:[t + 1]``."""
    fanouts: Array
    """(L, R) int64 fan-outs, hop 0 (at the seeds) first. -1 draws all in-edges."""
    streams: Array
    """(L, R) uint64 keys by hop and edge type."""
    replace: bool
    """Whether an edge may be drawn more than once."""
    by_source: bool
    """Whether sources are drawn together with all their edges; see :class:`~dglx_dist.keyed_random.Rule`."""
    rounds: int
    """Number of rounds in :func:`draw_by_importance`, which runs if this is not 0 or edges have weights."""
    exclude: Array
    """(X,) int64 edges that are not drawn, edge type by edge type, ascending within a type."""
    exclude_ends: Array
    """(R + 1,) int64 ends of each edge type's range in ``exclude``."""


class RawBatch(NamedTuple):
    """All hops of a mini-batch, hop 0 (at the seeds) first. A hop lists edge type by edge type.

    Within type t, hop h draws for the first ``node_ends[h, t]`` nodes and reaches ``node_ends[h + 1, t]``.
    """

    nodes: Array
    """(n,) int64 global ids, type by type, distinct within a type. The seeds come first in their type."""
    node_starts: Array
    """(T + 1,) int64 starts. Type t has the nodes ``[t]:[t + 1]``."""
    node_ends: Array
    """(L + 1, T) int64 ends. The first row holds the seed counts."""
    indptr: Array
    """int64 row starts, relation by relation: one entry per destination and one more, from 0 on."""
    sources: Array
    """int64 positions among the source type's nodes."""
    edge_ids: Array
    """int64 global edge ids."""
    edge_ends: Array
    """(L * R + 1,) int64 ends. Hop h and edge type r have the edges ``[h * R + r]:[h * R + r + 1]``."""
    edge_weights: Array
    """float32 weights with mean 1 per destination if :func:`draw_by_importance` ran, else length 0."""


class NumberedNodes(NamedTuple):
    """The numbered nodes by type. ``counts`` and the arrays are updated in place."""

    keys: Array
    """Node keys by number. Type t begins at ``starts[t]``."""
    ids: Array
    """Global ids in the same order."""
    starts: Array
    """(T + 1,) int64 starts by type."""
    counts: Array
    """(T,) int64 node count by type."""


class _Hop(NamedTuple):
    fanouts: Array
    """(R,) int64 fan-outs."""
    streams: Array
    """(R,) uint64 keys for the draws."""
    sizes: Array
    """(T,) int64: how many nodes of each type to draw for."""
    indptr: Array
    """Row starts, edge type by edge type."""
    ends: Array
    """(R + 1,) int64: the batch's edge count before each edge type, and after the last one."""


@njit(cache=True, nogil=True)
def grow_nodes(nodes: NumberedNodes, more: Array) -> NumberedNodes:
    """Return a copy with space for ``more[t]`` further nodes in each type t."""
    num_types = len(nodes.counts)
    starts = np.zeros(num_types + 1, np.int64)
    # Each type gets one extra slot, because ``_number_direct`` writes before it knows whether a node is new.
    for node_type in range(num_types):
        starts[node_type + 1] = starts[node_type] + nodes.counts[node_type] + more[node_type] + 1

    keys = np.empty(starts[-1], np.int64)
    ids = np.empty(starts[-1], np.int64)
    for node_type in range(num_types):
        start = nodes.starts[node_type]
        stop = start + nodes.counts[node_type]
        copy_to(keys[starts[node_type] :], nodes.keys[start:stop])
        copy_to(ids[starts[node_type] :], nodes.ids[start:stop])
    return NumberedNodes(keys, ids, starts, nodes.counts)


@njit(cache=True, nogil=True)
def grow_table(table: NodeTable, nodes: NumberedNodes, more: int) -> NodeTable:
    """Return a table with space for ``more`` further nodes that holds the numbers of ``nodes``."""
    # Searches are short in a hashed table that is at most half full. A direct table has a slot for every
    # node.
    num_slots = 2 * (nodes.counts.sum() + more)
    if len(table.keys) == 0 or len(table.keys) >= num_slots:
        return table

    table = make_larger_table(table, num_slots)
    for node_type in range(len(nodes.counts)):
        keys = nodes.keys[nodes.starts[node_type] :]
        for i in range(nodes.counts[node_type]):
            slot = find_slot(table, keys[i])
            table.slots[slot] = np.uint32(table.base) + np.uint32(i)
            table.keys[slot] = keys[i]
    return table


@njit(cache=True, nogil=True)
def number_type(table: NodeTable, nodes: NumberedNodes, node_type: int, keys: Array, numbers: Array) -> None:
    """Write the numbers for the (K,) int64 ``keys`` to ``numbers``. All keys belong to ``node_type``."""
    segment = nodes.keys[nodes.starts[node_type] : nodes.starts[node_type + 1]]
    nodes.counts[node_type] = number_nodes(table, keys, segment, nodes.counts[node_type], numbers)


@njit(cache=True, nogil=True)
def number_seeds(
    table: NodeTable, offsets: Array, seeds: Array, seed_ends: Array
) -> tuple[NodeTable, NumberedNodes]:
    """Number the distinct seeds from 0 within each type. Return the table and the numbered nodes.

    Type t has the seeds ``seeds[seed_ends[t]:seed_ends[t + 1]]``. A key is the id plus ``offsets[t]``.
    """
    num_types = len(offsets) - 1
    no_ids = np.empty(0, np.int64)
    counts = np.zeros(num_types, np.int64)
    no_nodes = NumberedNodes(no_ids, no_ids, np.zeros(num_types + 1, np.int64), counts)
    nodes = grow_nodes(no_nodes, seed_ends[1:] - seed_ends[:-1])
    table = grow_table(table, nodes, len(seeds))

    numbers = np.empty(len(seeds), np.int64)
    for node_type in range(num_types):
        first = seed_ends[node_type]
        last = seed_ends[node_type + 1]
        number_type(table, nodes, node_type, seeds[first:last] + offsets[node_type], numbers[first:last])
    write_ids(nodes, offsets, np.zeros(num_types, np.int64))
    return table, nodes


@njit(cache=True, nogil=True)
def write_ids(nodes: NumberedNodes, offsets: Array, first_new: Array) -> None:
    """Fill in ``nodes.ids`` from number ``first_new[t]`` on, for each type t."""
    for node_type in range(len(nodes.counts)):
        start = nodes.starts[node_type]
        offset = offsets[node_type]
        for i in range(start + first_new[node_type], start + nodes.counts[node_type]):
            nodes.ids[i] = nodes.keys[i] - offset


@njit(cache=True, nogil=True)
def pack_ids(nodes: NumberedNodes) -> tuple[Array, Array]:
    """Return (ids, (T + 1,) starts) for all nodes, type by type without gaps."""
    starts = np.zeros(len(nodes.counts) + 1, np.int64)
    for node_type in range(len(nodes.counts)):
        starts[node_type + 1] = starts[node_type] + nodes.counts[node_type]
    ids = np.empty(starts[-1], np.int64)
    for node_type in range(len(nodes.counts)):
        first = nodes.starts[node_type]
        copy_to(ids[starts[node_type] :], nodes.ids[first : first + nodes.counts[node_type]])
    return ids, starts


@njit(cache=True, nogil=True)
def _make_rule(request: SampleRequest, relation: int) -> Rule:
    """Return the rule for drawing edges of type ``relation``, with this type's excluded edges."""
    first = request.exclude_ends[relation]
    last = request.exclude_ends[relation + 1]
    return Rule(request.replace, request.exclude[first:last], request.by_source)


@njit(cache=True, nogil=True)
def _scale(weights: Array, shares: Array, fanout: int) -> float:
    """Find the factor c for one destination, so that its estimate varies as in neighbor sampling.

    With this c, the sum over weight ** 2 / min(1, c * share) equals that in neighbor sampling.
    """
    degree = len(weights)
    if degree == 0:
        return 0.0
    if fanout < 0 or fanout >= degree:
        return 1.0 / shares.min()

    slack = weights.sum() ** 2 * (1.0 / fanout - 1.0 / degree)
    scale = 0.0
    last_num_uncertain = degree + 1
    while True:
        # Sum over the edges with a probability below 1.
        inverse_sum = 0.0
        square_sum = 0.0
        num_uncertain = 0
        for i in range(degree):
            if scale * shares[i] < 1.0:
                inverse_sum += weights[i] * weights[i] / shares[i]
                square_sum += weights[i] * weights[i]
                num_uncertain += 1

        # The scale grows until no further edge gets the probability 1.
        if num_uncertain == 0 or num_uncertain >= last_num_uncertain:
            return scale
        scale = inverse_sum / (slack + square_sum)
        last_num_uncertain = num_uncertain


@njit(cache=True, nogil=True)
def draw_by_importance(
    indptr: Array, sources: Array, weights: Array, fanout: int, stream: np.uint64, rounds: int, rows: Array
) -> tuple[Array, Array]:
    """Draw sources with unequal probabilities (LABOR-i, see :func:`~dglx_dist.keyed_random.draw_by_source`).

    An edge is kept with probability min(1, c pi). Each destination has its own c. It is chosen so that the
    variance of a weighted sum is as in neighbor sampling with the same fan-out. Without rounds, pi is the
    edge's weight. Otherwise pi is a value per source. Each round multiplies a source's pi by the largest c
    among its destinations, so that fewer sources are needed.

    Args:
        indptr: (K + 1,) int64 row starts of the candidates, for K destinations.
        sources, weights: (e,) int64 global ids, and float64 values above 0.
        fanout: Fan-out of the neighbor sampling to match. -1 keeps all edges.
        rounds: Number of fixed-point iterations. Below 0, they run until they converge.
        rows: (K + 1,) output: row starts of the kept edges.

    Returns:
        (k,) int64 positions of the kept edges, and for each edge weight / probability, which makes sums
        unbiased.
    """
    table = make_larger_table(NodeTable(np.empty(0, np.uint32), np.empty(1, np.int64), 1), 2 * len(sources))
    # Without rounds, sources need no values, so one entry serves all sources.
    source_indices = np.zeros(len(sources), np.int64)
    num_sources = 1
    if rounds != 0:
        num_sources = number_nodes(table, sources, np.empty(len(sources) + 1, np.int64), 0, source_indices)

    # ``shares`` has pi for each edge, and ``scales`` has the factor c for each destination.
    shares = weights.copy()
    scales = np.empty(len(indptr) - 1)
    pi = np.ones(num_sources)
    num_done = 0
    last_expected_size = np.inf
    while True:
        for i in range(len(scales)):
            scales[i] = _scale(weights[indptr[i] : indptr[i + 1]], shares[indptr[i] : indptr[i + 1]], fanout)
        if num_done == rounds:
            break

        max_scales = np.zeros(num_sources)
        for i in range(len(scales)):
            for j in range(indptr[i], indptr[i + 1]):
                share = scales[i] if num_done else scales[i] * shares[j]
                max_scales[source_indices[j]] = max(max_scales[source_indices[j]], share)

        pi *= max_scales
        shares[:] = pi[source_indices]
        num_done += 1
        # The rounds end when a round lowers the expected source count by less than 0.01 %.
        expected_size = np.minimum(pi, 1.0).sum()
        if expected_size >= last_expected_size * (1 - 1e-4):
            rounds = num_done
        last_expected_size = expected_size

    indices = np.empty(len(sources), np.int64)
    kept_weights = np.empty(len(sources))
    rows[0] = num_kept = 0
    for i in range(len(scales)):
        for j in range(indptr[i], indptr[i + 1]):
            probability = min(1.0, scales[i] * shares[j])
            # The key's upper 53 bits become a number in [0, 1).
            draw = (item_key(stream, sources[j]) >> np.uint64(11)) * 2.0**-53
            # Compare with <=, because an edge with probability 1 must be kept even if the draw rounds to 1.
            if draw <= probability:
                indices[num_kept] = j
                kept_weights[num_kept] = weights[j] / probability
                num_kept += 1
        rows[i + 1] = num_kept
    return indices[:num_kept], kept_weights[:num_kept]


@njit(cache=True, nogil=True)
def _draw_by_importance(
    relations: Relations, request: SampleRequest, hop: _Hop, relation: int, frontier: Array, rows: Array
) -> tuple[Array, Array]:
    """Return the drawn edges and their weights, which have mean 1 at each destination."""
    csc = read_csc(relations, relation)
    fanout = hop.fanouts[relation]
    stream = hop.streams[relation]
    rule = _make_rule(request, relation)
    num_rows = len(frontier)

    # List all in-edges that are not excluded.
    indptr = np.empty(num_rows + 1, np.int64)
    starts = np.empty(num_rows, np.int64)
    largest = count_hop(csc, frontier, -1, rule, indptr, starts)
    edges = np.empty(indptr[-1], np.int64)
    draw_hop(csc, frontier, stream, True, rule, (indptr, starts, largest), edges)
    sources = np.empty(indptr[-1], np.int64)
    read_sources(relations, relation, edges, sources)
    sources -= relations.offsets[relations.source_types[relation]]

    weights = csc.weights[edges].astype(np.float64) if len(csc.weights) else np.ones(len(edges))
    positions, weights = draw_by_importance(indptr, sources, weights, fanout, stream, request.rounds, rows)
    for i in range(num_rows):
        row_weights = weights[rows[i] : rows[i + 1]]
        row_weights *= len(row_weights) / row_weights.sum() if len(row_weights) else 1.0
    return edges[positions], weights


@njit(cache=True, nogil=True)
def _draw(
    relations: Relations,
    request: SampleRequest,
    nodes: NumberedNodes,
    hop: _Hop,
    edges_and_weights: tuple[Array, Array],
    by_source: bool | None,
) -> tuple[Array, Array]:
    """Draw one hop, type by type.

    Args:
        nodes: Nodes so far.
        hop: What to draw. ``hop.indptr``, and ``hop.ends`` after ``ends[0]``, are filled in.
        edges_and_weights: The batch's edges and weights before this hop.
        by_source: ``request.by_source``, or None for plain sampling, which has no weights.

    Returns:
        The batch's edges and weights, including this hop. Beyond the last end, edges are undefined.
    """
    edges, weights = edges_and_weights
    first_row = 0
    for relation in range(len(hop.fanouts)):
        node_type = relations.destination_types[relation]
        frontier = nodes.ids[nodes.starts[node_type] :][: hop.sizes[node_type]]
        rows = hop.indptr[first_row : first_row + len(frontier) + 1]
        first = hop.ends[relation]
        csc = read_csc(relations, relation)
        fanout = hop.fanouts[relation]
        stream = hop.streams[relation]
        rule = _make_rule(request, relation)
        if fanout == 0:
            rows[:] = 0
        elif by_source is None:
            starts = np.empty(len(frontier), np.int64)
            largest = count_hop(csc, frontier, fanout, rule, rows, starts)
            last = first + rows[len(frontier)]
            if last > len(edges):
                # Spare entries serve later edge types. Otherwise each type would copy all edges in the batch.
                edges = grow_array(edges, first, last if relation == len(hop.fanouts) - 1 else 2 * last)
            draw_hop(csc, frontier, stream, fanout < 0, rule, (rows, starts, largest), edges[first:last])
        elif request.rounds != 0 or len(csc.weights) > 0:
            hop_edges, new_weights = _draw_by_importance(relations, request, hop, relation, frontier, rows)
            edges = np.concatenate((edges[:first], hop_edges))
            weights = np.concatenate((weights, new_weights.astype(np.float32)))
        elif relations.wide[relation]:
            wide_csc = Csc(csc.indptr, _read_indices(relations, relation, np.int64), csc.weights, 0, 0)
            edges = draw_by_source(wide_csc, frontier, fanout, stream, rule.exclude, rows, edges, first)
        else:
            narrow_csc = Csc(csc.indptr, _read_indices(relations, relation, np.int32), csc.weights, 0, 0)
            edges = draw_by_source(narrow_csc, frontier, fanout, stream, rule.exclude, rows, edges, first)

        hop.ends[relation + 1] = first + rows[len(frontier)]
        first_row += len(frontier) + 1
    return edges, weights


def draw_first_hop(relations: Relations, request: SampleRequest) -> None:
    """Draw one hop and drop the result. This compiles its kernel before :func:`sample_batch` needs it."""
    nodes = NumberedNodes(request.seeds, request.seeds, request.seed_ends, np.ones(1, np.int64))
    rows = np.zeros(2, np.int64)
    ends = np.zeros(2, np.int64)
    hop = _Hop(request.fanouts[0], request.streams[0], nodes.counts, rows, ends)
    _draw(relations, request, nodes, hop, (np.empty(0, np.int64), np.empty(0, np.float32)), None)


@njit(cache=True, nogil=True)
def _number_sources(
    relations: Relations, table: NodeTable, nodes: NumberedNodes, hop: _Hop, edges: Array, sources: Array
) -> None:
    """Number the sources that a hop reaches. Write each edge's source number to ``sources``."""
    chunk = np.empty(_CHUNK, np.int64)
    for relation in range(len(hop.fanouts)):
        node_type = relations.source_types[relation]
        for first in range(hop.ends[relation], hop.ends[relation + 1], _CHUNK):
            last = min(first + _CHUNK, hop.ends[relation + 1])
            keys = chunk[: last - first]
            read_sources(relations, relation, edges[first:last], keys)
            number_type(table, nodes, node_type, keys, sources[first:last])


@njit(cache=True, nogil=True)
def sample_batch(
    relations: Relations, request: SampleRequest, table: NodeTable, by_source: bool | None
) -> tuple[RawBatch, NodeTable]:
    """Sample all hops of a batch and number its nodes, each type from 0.

    Args:
        request: What to sample. With repeated seeds, the first row in ``node_ends`` is smaller and no hop is
            drawn.
        table: The calling thread's table, with the keys of all node types.
        by_source: ``request.by_source or None``. For None, Numba does not compile the LABOR draws.

    Returns:
        The batch, and the table to pass for the next batch.
    """
    num_hops, num_relations = request.fanouts.shape
    node_ends = np.zeros((num_hops + 1, len(relations.offsets) - 1), np.int64)
    edge_ends = np.zeros(num_hops * num_relations + 1, np.int64)
    table, nodes = number_seeds(table, relations.offsets, request.seeds, request.seed_ends)
    copy_to(node_ends[0], nodes.counts)
    indptr = np.empty(0, np.int64)
    sources = np.empty(0, np.int64)
    edge_ids = np.empty(0, np.int64)
    weights = np.empty(0, np.float32)
    # The caller reports repeated seeds as an error.
    if nodes.counts.sum() < len(request.seeds):
        num_hops = 0

    for hop_index in range(num_hops):
        # Draw the in-edges. Each edge type has one more row start than it has destinations.
        sizes = node_ends[hop_index]
        num_rows = len(indptr)
        num_new_rows = sizes[relations.destination_types].sum() + num_relations
        indptr = grow_array(indptr, num_rows, num_rows + num_new_rows)
        first_relation = hop_index * num_relations
        ends = edge_ends[first_relation : first_relation + num_relations + 1]
        hop = _Hop(request.fanouts[hop_index], request.streams[hop_index], sizes, indptr[num_rows:], ends)
        edge_ids, weights = _draw(relations, request, nodes, hop, (edge_ids, weights), by_source)

        # Number the sources. Any source may be a new node.
        first = ends[0]
        last = ends[num_relations]
        sources = grow_array(sources, first, last)
        num_edges_by_type = np.zeros(len(sizes), np.int64)
        for relation in range(num_relations):
            num_edges_by_type[relations.source_types[relation]] += hop.ends[relation + 1] - hop.ends[relation]
        nodes = grow_nodes(nodes, num_edges_by_type)
        table = grow_table(table, nodes, last - first)
        _number_sources(relations, table, nodes, hop, edge_ids, sources)
        write_ids(nodes, relations.offsets, sizes)
        copy_to(node_ends[hop_index + 1], nodes.counts)

    ids, starts = pack_ids(nodes)
    next_table = NodeTable(table.slots, table.keys, table.base + nodes.counts.max())
    edges = edge_ids[: edge_ends[-1]]
    return RawBatch(ids, starts, node_ends, indptr, sources, edges, edge_ends, weights), next_table


_DIRECT_LIMIT = 1 << 26
"""Maximum node count for a direct table, which takes 4 bytes per node and thread."""

_FIRST_SLOTS = 1 << 16
_LAST_BASE = 1 << 31


@final
class ThreadTable:
    """Table in which one thread numbers the nodes of its batches."""

    def __init__(self, num_nodes: int) -> None:
        num_slots = num_nodes
        num_keys = 0
        if num_nodes > _DIRECT_LIMIT:
            num_slots = num_keys = _FIRST_SLOTS
        self._table = NodeTable(np.zeros(num_slots, np.uint32), np.empty(num_keys, np.int64), 1)

    @property
    def table(self) -> NodeTable:
        """The table for the next batch. The kernel returns a table to pass to :meth:`keep`."""
        # Numbers within a batch stay below 2**31, so the 32-bit entries cannot wrap.
        if self._table.base >= _LAST_BASE:
            self._table.slots[:] = 0
            self._table = NodeTable(self._table.slots, self._table.keys, 1)
        return self._table

    def keep(self, table: NodeTable) -> None:
        self._table = table
