"""Sampling with a tree for each seed, with or without times. The design is in :mod:`dglx_dist.data.times`.

A row in a batch is a pair (node, tree). Trees share no rows, so a node that two trees reach has two rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np
from numba import njit

from dglx_dist.data.times import TimeDtype, TimeOrder, subtract_window
from dglx_dist.dataloading.kernels import (
    NodeTable,
    RawBatch,
    SampleRequest,
    Schema,
    find_slot,
    grow_array,
    make_larger_table,
)
from dglx_dist.graph.sampling import pack_hop_parameters
from dglx_dist.graph.structure import NO_EDGES, CSCShard, Draw, InEdges, Structure
from dglx_dist.keyed_random import draw_uniform, item_key, merge_ids, mix
from dglx_dist.records import Array, EdgeType

_NO_POSITIONS: Array = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class TreeRule:
    """Rule for drawing a row's in-edges."""

    replace: bool = False
    """Whether an edge may be drawn more than once."""
    takes_last: bool = False
    """Whether the most recent edges are taken, instead of uniform draws."""
    window: float | None = None
    """Longest time between an edge and its seed, or None for no limit."""
    dtype: TimeDtype | None = None
    """Dtype of the times, or None for trees without times."""


class _TimedCsc(NamedTuple):
    """In-edges in one shard. Without times, ``positions`` and ``keys`` are empty."""

    indptr: Array
    indices: Array
    positions: Array
    keys: Array
    first_node: int
    first_edge: int


@njit(cache=True, nogil=True)
def _find_first_above(keys: Array, firsts: Array, lasts: Array, bounds: Array, out: Array) -> None:
    """For each row, find the first position in [first, last) with a key above its bound, or ``last``."""
    for i in range(len(firsts)):
        first = firsts[i]
        last = lasts[i]
        bound = bounds[i]

        # The processor guesses the branches and reads the next keys ahead, which is faster than selecting.
        while first < last:
            middle = (first + last) >> 1
            if keys[np.uint64(middle)] > bound:
                last = middle
            else:
                first = middle + 1

        out[i] = first


@njit(cache=True, nogil=True)
def _find_ranges(csc: _TimedCsc, rows: Array, firsts: Array, lasts: Array) -> None:
    """Write each row's range of drawable edges: the first and the last position in time order."""
    # Take the arrays out of their tuple before the loops. Each access would count a reference.
    indptr = csc.indptr
    nodes = rows[0]
    for i in range(len(nodes)):
        row = np.uint64(nodes[i] - csc.first_node)
        firsts[i] = indptr[row]
        lasts[i] = indptr[row + np.uint64(1)]

    if len(csc.keys):
        _find_first_above(csc.keys, firsts, lasts, rows[2], lasts)
        if len(rows) > 3:
            _find_first_above(csc.keys, firsts, lasts, rows[3] - 1, firsts)


@njit(cache=True, nogil=True)
def _has_excluded(csc: _TimedCsc, exclude: Array, node: int) -> bool:
    """Return whether ``exclude``, ascending, contains an in-edge into ``node``."""
    row = node - csc.first_node
    first = np.searchsorted(exclude, csc.indptr[row] + csc.first_edge)
    return bool(first < len(exclude) and exclude[first] < csc.indptr[row + 1] + csc.first_edge)


@njit(cache=True, nogil=True)
def _list_candidates(csc: _TimedCsc, exclude: Array, first: int, last: int, out: Array) -> int:
    """Write the positions in [first, last) that are not excluded to ``out``. Return how many there are."""
    count = 0
    for position in range(first, last):
        edge = position if len(csc.positions) == 0 else csc.positions[position]
        nearest = np.searchsorted(exclude, edge + csc.first_edge)
        if nearest == len(exclude) or exclude[nearest] != edge + csc.first_edge:
            out[count] = position
            count += 1
    return count


@njit(cache=True, nogil=True)
def _draw_positions(
    csc: _TimedCsc,
    rows: Array,
    fanout: int,
    stream: np.uint64,
    rule: tuple[bool, bool],
    exclude: Array,
) -> tuple[Array, Array]:
    """Draw in-edges for K rows. Return the (K + 1,) indptr and the edges' positions, in time order."""
    replace, takes_last = rule
    nodes = rows[0]
    tree_keys = rows[1]
    firsts = np.empty(len(nodes), np.int64)
    lasts = np.empty(len(nodes), np.int64)
    _find_ranges(csc, rows, firsts, lasts)
    largest = 0
    for i in range(len(nodes)):
        largest = max(largest, lasts[i] - firsts[i])

    # Count each row's edges first, so that one array has space for all.
    candidates = np.empty(largest if len(exclude) else 0, np.int64)
    indptr = np.zeros(len(nodes) + 1, np.int64)
    for i in range(len(nodes)):
        count = lasts[i] - firsts[i]
        if len(exclude) and _has_excluded(csc, exclude, nodes[i]):
            count = _list_candidates(csc, exclude, firsts[i], lasts[i], candidates)
        size = fanout if replace and count else min(fanout, count)
        indptr[i + 1] = indptr[i] + (count if fanout < 0 else size)

    positions = np.empty(indptr[-1], np.int64)
    bits = np.zeros((largest >> 6) + 1, np.uint64)
    for i in range(len(nodes)):
        out = positions[indptr[i] : indptr[i + 1]]
        if len(out) == 0:
            continue
        count = lasts[i] - firsts[i]
        is_listed = len(exclude) > 0 and _has_excluded(csc, exclude, nodes[i])
        if is_listed:
            count = _list_candidates(csc, exclude, firsts[i], lasts[i], candidates)

        # First write indices among the candidates. The most recent edges come last.
        if takes_last or fanout < 0 or (len(out) == count and not replace):
            for j in range(len(out)):
                out[j] = count - len(out) + j
        else:
            tree_stream = mix(stream ^ np.uint64(tree_keys[i]))
            draw_uniform(item_key(tree_stream, nodes[i]), count, replace, out, bits)

        # Without excluded edges, the candidates are the range itself.
        for j in range(len(out)):
            out[j] = candidates[out[j]] if is_listed else firsts[i] + out[j]
    return indptr, positions


@njit(cache=True, nogil=True)
def _draw_rows(
    csc: _TimedCsc, rows: Array, fanout: int, stream: np.uint64, rule: tuple[bool, bool], exclude: Array
) -> tuple[Array, Array, Array]:
    """Draw in-edges for K rows. Return the (K + 1,) indptr, sources and global edge ids, all int64.

    Args:
        rows: (C, K) int64: nodes, tree keys, and with times the largest and the smallest time key.
        fanout: Edges per row; -1 for all.
        rule: Whether edges may be repeated, and whether the last ones are taken.
        exclude: (X,) ascending edge ids that are not drawn.
    """
    indptr, edges = _draw_positions(csc, rows, fanout, stream, rule, exclude)
    sources = np.empty(len(edges), np.int64)
    positions = csc.positions
    indices = csc.indices
    # With separate loops, the processor reads many edges at once.
    if len(positions):
        for i in range(len(edges)):
            edges[i] = positions[np.uint64(edges[i])]
    for i in range(len(edges)):
        sources[i] = indices[np.uint64(edges[i])]
        edges[i] += csc.first_edge
    return indptr, sources, edges


def make_row_draw(rule: TreeRule, exclude: Array, orders: Mapping[int, TimeOrder] | None) -> Draw:
    """Return the function by which a server draws in-edges for rows. A request adds to the excluded edges.

    ``orders`` maps a shard's first node to the shard's order by time. It is None for a type without times.
    """

    # Each row has a node and a tree. With times it also has a time, and with a window the smallest time.
    num_columns = 2
    if rule.dtype is not None:
        num_columns = 3 if rule.window is None else 4

    def draw(shard: CSCShard, rows: Array, parameters: str, more_exclude: Array) -> InEdges:
        # Compiled code reads these columns without checks, and rows may come from another server.
        if rows.ndim != 2 or len(rows) != num_columns:
            raise ValueError(f"rows must have {num_columns} columns, not the shape {rows.shape}")

        positions = _NO_POSITIONS
        keys = NO_EDGES
        order = None if orders is None else orders.get(shard.first_node)
        if order is not None:
            positions = order.positions
            keys = order.keys
        csc = _TimedCsc(shard.indptr, shard.indices, positions, keys, shard.first_node, shard.first_edge)

        # Edge types without times have no order, so their edges are drawn uniformly.
        takes_last = rule.takes_last and orders is not None
        hop = json.loads(parameters)
        indptr, sources, edge_ids = _draw_rows(
            csc,
            rows,
            int(hop["fanout"]),
            np.uint64(hop["stream"]),
            (rule.replace, takes_last),
            merge_ids(exclude, more_exclude),
        )
        return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)

    return draw


@njit(cache=True, nogil=True)
def make_tree_keys(seeds: Array, times: Array, first_key: int, out: Array) -> None:
    """Write each tree's key for draws to ``out``. It is made from the tree's seed, and its time if any."""
    for i in range(len(seeds)):
        key = mix(np.uint64(seeds[i] + first_key))
        # The time is not hashed before, because seed 3 at time 5 would have the same key as seed 5 at time 3.
        out[i] = np.int64(mix(key ^ np.uint64(times[i])) if len(times) else key)


@njit(cache=True, nogil=True)
def hash_rows(tree_keys: Array, trees: Array, nodes: Array) -> Array:
    """Return (n,) int64 ids for a batch's rows, which depend only on seed, time and node."""
    out = np.empty(len(nodes), np.int64)
    for i in range(len(nodes)):
        # The key is hashed once more. Otherwise node 5 in seed 3's tree would have the same id as node 3 in
        # seed 5's tree.
        tree_key = mix(np.uint64(tree_keys[trees[i]]))
        out[i] = np.int64(item_key(tree_key, nodes[i]) >> np.uint64(1))
    return out


class TreeRows(NamedTuple):
    """A batch's rows for one node type: pairs (node, tree)."""

    nodes: Array
    """(n,) int64 global ids."""
    trees: Array
    """(n,) int64 trees. A tree's number is its seed's position in the batch."""


@njit(cache=True, nogil=True)
def _find_tree_starts(trees: Array, num_trees: int) -> Array:
    """Find where each tree starts in each of the S ascending runs. Return (S, num_trees + 1) int64."""
    num_runs = 1
    for i in range(1, len(trees)):
        num_runs += trees[i] < trees[i - 1]

    starts = np.empty((num_runs, num_trees + 1), np.int64)
    run = 0
    next_tree = 0
    for i in range(len(trees)):
        # A smaller tree begins a new run. The trees after the old run's last one are empty.
        if i and trees[i] < trees[i - 1]:
            starts[run, next_tree:] = i
            run += 1
            next_tree = 0
        while next_tree <= trees[i]:
            starts[run, next_tree] = i
            next_tree += 1

    starts[run, next_tree:] = len(trees)
    return starts


@njit(cache=True, nogil=True)
def _find_largest_tree(row_starts: Array, edge_starts: Array, indptr: Array) -> int:
    """Return the maximum number of rows and edges that a tree has."""
    largest = 0
    for tree in range(row_starts.shape[1] - 1):
        size = 0
        for run in range(len(row_starts)):
            size += row_starts[run, tree + 1] - row_starts[run, tree]
        for run in range(len(edge_starts)):
            size += indptr[edge_starts[run, tree + 1]] - indptr[edge_starts[run, tree]]
        largest = max(largest, size)
    return largest


@njit(cache=True, nogil=True)
def _number_sources(
    rows: TreeRows, destination_trees: Array, indptr: Array, sources: Array, num_trees: int
) -> tuple[Array, TreeRows]:
    """Number the sources of drawn edges among the rows for their node type.

    Args:
        rows: The rows so far, which are distinct.
        destination_trees: (K,) trees for the rows that edges were drawn for.
        indptr: (K + 1,) row starts in the edges.
        sources: (E,) nodes.

    Returns:
        The (E,) row number for each source, and the rows. New rows come after ``rows``, tree by tree.
    """
    num_rows = len(rows.nodes)
    nodes = grow_array(rows.nodes, num_rows, num_rows + len(sources))
    trees = grow_array(rows.trees, num_rows, num_rows + len(sources))
    row_starts = _find_tree_starts(rows.trees, num_trees)
    edge_starts = _find_tree_starts(destination_trees, num_trees)

    # A table for one tree fits the processor's cache, unlike a table for the whole batch.
    num_slots = 2 * _find_largest_tree(row_starts, edge_starts, indptr)
    table = make_larger_table(NodeTable(np.empty(0, np.uint32), np.empty(1, np.int64), 1), num_slots)
    slots = table.slots
    keys = table.keys
    numbers_in_table = np.empty(len(slots), np.int64)
    numbers = np.empty(len(sources), np.int64)
    for tree in range(num_trees):
        # Entries from earlier trees are smaller than this table's base, so they count as free.
        tree_table = NodeTable(slots, keys, tree + 1)
        for run in range(len(row_starts)):
            for number in range(row_starts[run, tree], row_starts[run, tree + 1]):
                slot = find_slot(tree_table, nodes[number])
                slots[slot] = tree + 1
                keys[slot] = nodes[number]
                numbers_in_table[slot] = number

        for run in range(len(edge_starts)):
            for edge in range(indptr[edge_starts[run, tree]], indptr[edge_starts[run, tree + 1]]):
                slot = find_slot(tree_table, sources[edge])
                if slots[slot] != tree + 1:
                    slots[slot] = tree + 1
                    keys[slot] = nodes[num_rows] = sources[edge]
                    numbers_in_table[slot] = num_rows
                    trees[num_rows] = tree
                    num_rows += 1
                numbers[edge] = numbers_in_table[slot]

    return numbers, TreeRows(nodes[:num_rows], trees[:num_rows])


@final
class TreeSource:
    """Samples a tree for each seed, from a replicated or a partitioned structure. Thread-safe.

    For each hop and edge type, it makes one compiled call for local rows. For each remote row it sends 16
    bytes without times, 24 with times and 32 with a window. It receives 8 bytes per row and 16 per edge. A
    request also has 8 bytes for each edge that the batch excludes. All ranks serve ``op`` with
    :func:`make_row_draw`. Its rule excludes the loader's excluded edges. Edges that a single batch excludes
    travel with the request.
    """

    def __init__(self, schema: Schema, structures: Sequence[Structure], op: str, rule: TreeRule) -> None:
        self.rule = rule
        self._schema = schema
        self._structures = tuple(structures)
        self._op = op
        self._source_types = schema.source_types.tolist()
        self._destination_types = schema.destination_types.tolist()

    def sample(
        self, request: SampleRequest, exclude: Mapping[EdgeType, Array], times: Array = NO_EDGES
    ) -> tuple[RawBatch, Array, Array]:
        """Sample a batch.

        Args:
            exclude: Ascending edge ids by type that only this batch excludes.
            times: (B,) int64 time keys of the seeds, if the trees have times.

        Returns:
            The batch, the (n,) int64 tree that each node belongs to, and the (B,) int64 keys of the trees.
        """
        num_trees = len(request.seeds)
        tree_keys = np.empty(num_trees, np.int64)
        # Rows by node type. Each seed is the first row in its tree.
        rows: list[TreeRows] = []
        for (first, last), first_key in zip(pairwise(request.seed_ends), self._schema.offsets, strict=False):
            seeds = request.seeds[first:last]
            make_tree_keys(seeds, times[first:last], int(first_key), tree_keys[first:last])
            rows.append(TreeRows(seeds, np.arange(first, last)))

        columns = self._make_columns(tree_keys, times)
        node_ends = [[len(type_rows.nodes) for type_rows in rows]]
        # One array for each hop and edge type.
        indptrs: list[Array] = []
        sources: list[Array] = []
        edge_ids: list[Array] = []
        for hop in range(len(request.fanouts)):
            edges = self._draw(request, exclude, columns, hop, rows)
            # The edges belong to the rows before this hop, which adds rows.
            destination_trees = [rows[node_type].trees for node_type in self._destination_types]
            for in_edges, trees, node_type in zip(edges, destination_trees, self._source_types, strict=True):
                numbers, rows[node_type] = _number_sources(
                    rows[node_type], trees, in_edges.indptr, in_edges.sources, num_trees
                )
                indptrs.append(in_edges.indptr)
                sources.append(numbers)
                edge_ids.append(in_edges.edge_ids)
            node_ends.append([len(type_rows.nodes) for type_rows in rows])

        nodes, node_trees = rows[0]
        # A single array need not be copied.
        if len(rows) > 1:
            nodes = np.concatenate([type_rows.nodes for type_rows in rows])
            node_trees = np.concatenate([type_rows.trees for type_rows in rows])
        batch = RawBatch(
            nodes=nodes,
            node_starts=np.cumsum([0, *node_ends[-1]]),
            node_ends=np.array(node_ends),
            indptr=np.concatenate(indptrs),
            sources=np.concatenate(sources),
            edge_ids=np.concatenate(edge_ids),
            edge_ends=np.cumsum([0, *map(len, edge_ids)]),
            edge_weights=np.empty(0, np.float32),
        )
        return batch, node_trees, tree_keys

    def _make_columns(self, tree_keys: Array, times: Array) -> Array:
        """Return (C - 1, B) int64 values that a tree's rows send, see :func:`_draw_rows`."""
        columns = [tree_keys]
        if self.rule.dtype is not None:
            columns.append(times)
            if self.rule.window is not None:
                columns.append(subtract_window(times, self.rule.window, self.rule.dtype))
        return np.stack(columns)

    def _draw(
        self,
        request: SampleRequest,
        exclude: Mapping[EdgeType, Array],
        columns: Array,
        hop: int,
        rows: Sequence[TreeRows],
    ) -> list[InEdges]:
        """Draw one hop. Return the in-edges by edge type, for the ``rows`` by node type.

        Requests for all edge types are sent before the first answer is awaited.
        """
        waits: list[Callable[[], InEdges]] = []
        for relation, structure in enumerate(self._structures):
            nodes, trees = rows[self._destination_types[relation]]
            fanout = int(request.fanouts[hop, relation])
            if fanout == 0 or not len(nodes):
                starts = np.zeros(len(nodes) + 1, np.int64)
                waits.append(partial(InEdges, indptr=starts, sources=NO_EDGES, edge_ids=NO_EDGES))
                continue

            requested = np.concatenate([nodes[None], columns[:, trees]])
            parameters = pack_hop_parameters(fanout, int(request.streams[hop, relation]))
            excluded = exclude.get(self._schema.etypes[relation], NO_EDGES)
            layer = len(request.fanouts) - hop
            wait = structure.submit(self._op, requested, parameters, exclude=excluded, layer=layer)
            waits.append(wait)
        return [wait() for wait in waits]
