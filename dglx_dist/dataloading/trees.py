"""Sampling with a tree for each seed, with or without times. The design is in :mod:`dglx_dist.data.times`.

A row of a batch is a pair of tree and node. Its number is ``tree * N + node``, where N counts the nodes of
all types. So the rows of a batch are numbered like the nodes of an ordinary batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import numpy as np
from numba import njit

from dglx_dist.data.times import TimeDtype, TimeOrder, subtract_window
from dglx_dist.dataloading.kernels import RawBatch, SampleRequest, Schema, ThreadTable
from dglx_dist.dataloading.sampler import HopSampler
from dglx_dist.errors import ConfigError
from dglx_dist.graph.sampling import pack_hop_parameters
from dglx_dist.graph.structure import NO_EDGES, CSCShard, Draw, InEdges, Structure
from dglx_dist.keyed_random import draw_uniform, item_key, merge_ids, mix
from dglx_dist.records import Array, EdgeType

_NO_POSITIONS: Array = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class TreeRule:
    """How the in-edges of a row are drawn."""

    replace: bool = False
    """Whether an edge may be drawn more than once."""
    takes_last: bool = False
    """Whether the most recent edges are taken, instead of uniform draws."""
    window: float | None = None
    """Longest time between an edge and its seed, or None for no limit."""
    dtype: TimeDtype | None = None
    """Dtype of the times, or None for trees without times."""


class _TimedCsc(NamedTuple):
    """In-edges of one shard. Without times, ``positions`` and ``keys`` are empty."""

    indptr: Array
    indices: Array
    positions: Array
    keys: Array
    first_node: int
    first_edge: int


@njit(cache=True, nogil=True)
def _find_first_above(keys: Array, first: int, last: int, bound: int) -> int:
    """Return the first position in [first, last) of a key above ``bound``, or ``last``."""
    while first < last:
        middle = (first + last) >> 1
        if keys[middle] > bound:
            last = middle
        else:
            first = middle + 1
    return first


@njit(cache=True, nogil=True)
def _find_range(csc: _TimedCsc, rows: Array, i: int) -> tuple[int, int]:
    """Return the first and last position, in the order of times, of the edges that row i may draw."""
    row = rows[0, i] - csc.first_node
    first, last = csc.indptr[row], csc.indptr[row + 1]
    if len(csc.keys) == 0:
        return first, last
    last = _find_first_above(csc.keys, first, last, rows[2, i])
    if len(rows) > 3:
        first = _find_first_above(csc.keys, first, last, rows[3, i] - 1)
    return first, last


@njit(cache=True, nogil=True)
def _has_excluded(csc: _TimedCsc, exclude: Array, node: int) -> bool:
    """Return whether an in-edge of ``node`` is among the ascending ids ``exclude``."""
    row = node - csc.first_node
    first = np.searchsorted(exclude, csc.indptr[row] + csc.first_edge)
    return bool(first < len(exclude) and exclude[first] < csc.indptr[row + 1] + csc.first_edge)


@njit(cache=True, nogil=True)
def _list_candidates(csc: _TimedCsc, exclude: Array, first: int, last: int, out: Array) -> int:
    """Write the positions in [first, last) of edges that are not excluded to ``out``. Return their number."""
    count = 0
    for position in range(first, last):
        edge = position if len(csc.positions) == 0 else csc.positions[position]
        nearest = np.searchsorted(exclude, edge + csc.first_edge)
        if nearest == len(exclude) or exclude[nearest] != edge + csc.first_edge:
            out[count] = position
            count += 1
    return count


@njit(cache=True, nogil=True)
def _draw_rows(
    csc: _TimedCsc, rows: Array, fanout: int, stream: np.uint64, rule: tuple[bool, bool], exclude: Array
) -> tuple[Array, Array, Array]:
    """Return the (K + 1,) indptr, sources and global edge ids, all int64, of drawn in-edges of K rows.

    Args:
        rows: (C, K) int64: nodes, keys of their trees, and with times the largest and smallest key of times.
        fanout: Edges per row; -1 for all.
        rule: Whether edges may be repeated, and whether the last ones are taken.
        exclude: (X,) ascending ids of edges that are not drawn.
    """
    replace, takes_last = rule
    num_rows = rows.shape[1]
    indptr = np.zeros(num_rows + 1, np.int64)
    firsts = np.empty(num_rows, np.int64)
    lasts = np.empty(num_rows, np.int64)
    largest = 0
    for i in range(num_rows):
        firsts[i], lasts[i] = _find_range(csc, rows, i)
        largest = max(largest, lasts[i] - firsts[i])
    candidates = np.empty(largest if len(exclude) else 0, np.int64)
    for i in range(num_rows):
        count = lasts[i] - firsts[i]
        if len(exclude) and _has_excluded(csc, exclude, rows[0, i]):
            count = _list_candidates(csc, exclude, firsts[i], lasts[i], candidates)
        size = fanout if replace and count else min(fanout, count)
        indptr[i + 1] = indptr[i] + (count if fanout < 0 else size)
    edges = np.empty(indptr[-1], np.int64)
    sources = np.empty(indptr[-1], np.int64)
    bits = np.zeros((largest >> 6) + 1, np.uint64)
    for i in range(num_rows):
        out = edges[indptr[i] : indptr[i + 1]]
        if len(out) == 0:
            continue
        first, count = firsts[i], lasts[i] - firsts[i]
        is_listed = len(exclude) > 0 and _has_excluded(csc, exclude, rows[0, i])
        if is_listed:
            count = _list_candidates(csc, exclude, firsts[i], lasts[i], candidates)
        if takes_last or fanout < 0 or (len(out) == count and not replace):
            for j in range(len(out)):
                out[j] = count - len(out) + j
        else:
            tree_stream = mix(stream ^ np.uint64(rows[1, i]))
            draw_uniform(item_key(tree_stream, rows[0, i]), count, replace, out, bits)
        for j in range(len(out)):
            position = candidates[out[j]] if is_listed else first + out[j]
            edge = position if len(csc.positions) == 0 else np.int64(csc.positions[position])
            sources[indptr[i] + j] = csc.indices[edge]
            out[j] = edge + csc.first_edge
    return indptr, sources, edges


def make_row_draw(rule: TreeRule, exclude: Array, orders: Mapping[int, TimeOrder] | None) -> Draw:
    """Return the function by which a server draws in-edges of rows. A request adds to the excluded edges.

    ``orders`` maps the first node of a shard to its order by time. It is None for a type without times.
    """

    def draw(shard: CSCShard, rows: Array, parameters: str, more_exclude: Array) -> InEdges:
        hop = json.loads(parameters)
        order = None if orders is None else orders.get(shard.first_node)
        positions, keys = (_NO_POSITIONS, NO_EDGES) if order is None else (order.positions, order.keys)
        csc = _TimedCsc(shard.indptr, shard.indices, positions, keys, shard.first_node, shard.first_edge)
        # Edges of types without times have no last ones.
        drawing = rule.replace, rule.takes_last and orders is not None
        excluded = merge_ids(exclude, more_exclude)
        stream = np.uint64(hop["stream"])
        indptr, sources, edge_ids = _draw_rows(csc, rows, int(hop["fanout"]), stream, drawing, excluded)
        return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)

    return draw


@njit(cache=True, nogil=True)
def make_tree_keys(seeds: Array, times: Array, first_key: int, out: Array) -> None:
    """Write the key of the draws of each tree to ``out``, from its seed and its time, if there are times."""
    for i in range(len(seeds)):
        key = mix(np.uint64(seeds[i] + first_key))
        # The time is not hashed before, because seed 3 at time 5 would have the key of seed 5 at time 3.
        out[i] = np.int64(mix(key ^ np.uint64(times[i])) if len(times) else key)


@njit(cache=True, nogil=True)
def hash_rows(tree_keys: Array, trees: Array, nodes: Array) -> Array:
    """Return (n,) int64 ids of the rows of a batch, which depend only on seed, time and node."""
    out = np.empty(len(nodes), np.int64)
    for i in range(len(nodes)):
        # The key is hashed once more. Otherwise node 5 in the tree of 3 has the id of 3 in the tree of 5.
        tree_key = mix(np.uint64(tree_keys[trees[i]]))
        out[i] = np.int64(item_key(tree_key, nodes[i]) >> np.uint64(1))
    return out


@dataclass(frozen=True, kw_only=True)
class Trees:
    """The trees of a batch, in the order of its seeds."""

    keys: Array
    """(B,) int64 keys of the draws."""
    times: Array
    """(B,) int64 keys of the times, or length 0 without times."""


@final
class TreeSource:
    """Samples a tree for each seed, from a replicated or a partitioned structure. Thread-safe.

    For each hop and edge type, it makes one compiled call for local rows. For each remote row it sends 16
    bytes without times, 24 with times and 32 with a window. It receives 8 bytes per row and 16 per edge. A
    request also has 8 bytes for each edge that the batch excludes. All ranks serve ``op`` with
    :func:`make_row_draw`, by the rule of the loader without the exclusions of single batches.
    """

    def __init__(self, schema: Schema, structures: Sequence[Structure], op: str, rule: TreeRule) -> None:
        self.rule = rule
        self._schema = schema
        self._structures = tuple(structures)
        self._op = op
        self._hops = HopSampler(schema)
        self._num_nodes = int(schema.offsets[-1])

    def sample(
        self,
        request: SampleRequest,
        exclude: Mapping[EdgeType, Array],
        workspace: ThreadTable,
        times: Array = NO_EDGES,
    ) -> tuple[RawBatch, Array, Trees]:
        """Sample a batch.

        Args:
            exclude: Ascending edge ids by type that only this batch excludes.
            workspace: Table of the calling thread with hashed entries.
            times: (B,) int64 keys of the times of the seeds, if the trees have times.

        Returns:
            The batch, the (n,) int64 tree of each of its nodes, and the trees.
        """
        num_seeds = len(request.seeds)
        if num_seeds * self._num_nodes >= 1 << 62:
            raise ConfigError(
                f"a batch of {num_seeds} trees in a graph of {self._num_nodes} nodes has too many rows to "
                "number. Use a smaller batch_size."
            )
        tree_keys = np.empty(num_seeds, np.int64)
        for node_type, first_key in enumerate(self._schema.offsets[:-1].tolist()):
            of_type = slice(*request.seed_ends[node_type : node_type + 2].tolist())
            make_tree_keys(request.seeds[of_type], times[of_type], first_key, tree_keys[of_type])
        trees = Trees(keys=tree_keys, times=times)
        rows = request.seeds + np.arange(num_seeds) * self._num_nodes
        draw = partial(self._draw, request, exclude, self._make_columns(trees))
        batch = self._hops.sample(request._replace(seeds=rows), draw, workspace)
        tree_of_node, nodes = np.divmod(batch.nodes, self._num_nodes)
        return batch._replace(nodes=nodes), tree_of_node, trees

    def _make_columns(self, trees: Trees) -> Array:
        """Return (C - 1, B) int64 values of each tree that its rows send, see :func:`_draw_rows`."""
        columns = [trees.keys]
        if self.rule.dtype is not None:
            columns.append(trees.times)
            if self.rule.window is not None:
                columns.append(subtract_window(trees.times, self.rule.window, self.rule.dtype))
        return np.stack(columns)

    def _draw(
        self,
        request: SampleRequest,
        exclude: Mapping[EdgeType, Array],
        columns: Array,
        hop: int,
        frontiers: Sequence[Array],
    ) -> list[InEdges]:
        """Return the in-edges of one hop by edge type, with the numbers of rows as sources.

        Requests for all edge types are sent before the first answer is awaited.
        """
        waits: list[tuple[Array, Callable[[], InEdges]]] = []
        for relation, (structure, frontier) in enumerate(zip(self._structures, frontiers, strict=True)):
            trees, nodes = np.divmod(frontier, self._num_nodes)
            fanout = int(request.fanouts[hop, relation])
            if fanout == 0 or not len(frontier):
                starts = np.zeros(len(frontier) + 1, np.int64)
                waits.append((trees, partial(InEdges, indptr=starts, sources=NO_EDGES, edge_ids=NO_EDGES)))
                continue
            rows = np.concatenate([nodes[None], columns[:, trees]])
            parameters = pack_hop_parameters(fanout, int(request.streams[hop, relation]))
            excluded = exclude.get(self._schema.etypes[relation], NO_EDGES)
            layer = len(request.fanouts) - hop
            wait = structure.submit_rows(self._op, rows, parameters, exclude=excluded, layer=layer)
            waits.append((trees, wait))
        return [self._number_rows(trees, wait()) for trees, wait in waits]

    def _number_rows(self, trees: Array, edges: InEdges) -> InEdges:
        first_rows = np.repeat(trees * self._num_nodes, np.diff(edges.indptr))
        return InEdges(indptr=edges.indptr, sources=edges.sources + first_rows, edge_ids=edges.edge_ids)
