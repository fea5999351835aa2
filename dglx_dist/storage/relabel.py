"""New ids: contiguous per (node type, part), and edges in the order of their new destinations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, Assignment, EdgeType, RawGraph


@dataclass(frozen=True, kw_only=True)
class NodeOrder:
    """The new ids of one node type; both permutations are int32 when N fits."""

    new_to_old: Array
    """(N,) original id of each new id; ascending within a part."""
    old_to_new: Array
    """(N,) new id of each original id."""
    offsets: Array
    """(P + 1,) int64: new ids of part p are ``offsets[p] .. offsets[p + 1] - 1``."""


@dataclass(frozen=True, kw_only=True)
class EdgeOrder:
    """The edges of one type as CSC over new ids, all parts together."""

    indptr: Array
    """(N_dst + 1,) int64."""
    indices: Array
    """(E,) new source ids, ascending within a destination; int32 when N_src fits."""
    new_to_old: Array
    """(E,) original edge id (position in the source's list) of each new edge id."""
    offsets: Array
    """(P + 1,) int64: edges owned by part p, which owns their destinations."""


def relabel_nodes(graph: RawGraph, assignment: Assignment) -> dict[str, NodeOrder]:
    """Return the new ids of every node type; nodes of one part keep their order.

    Raises:
        ConfigError: the assignment does not fit the graph.
    """
    if assignment.num_parts < 1:
        raise ConfigError(f"the assignment has {assignment.num_parts} parts; there must be at least 1")
    orders = {}
    for ntype, num_nodes in graph.num_nodes.items():
        if ntype not in assignment.part_of:
            raise ConfigError(f"the assignment names no owners for nodes of type {ntype!r}")
        part_of = np.asarray(assignment.part_of[ntype])
        _check_owners(part_of, num_nodes, assignment.num_parts, ntype)
        # Stable, so that nodes keep their order; NumPy's stable sort of 16-bit keys is a radix sort.
        narrow = part_of.astype(np.uint16 if assignment.num_parts <= 1 << 16 else np.int32)
        new_to_old = np.argsort(narrow, kind="stable").astype(_id_dtype(num_nodes), copy=False)
        old_to_new = np.empty_like(new_to_old)
        old_to_new[new_to_old] = np.arange(num_nodes, dtype=new_to_old.dtype)
        counts = np.bincount(part_of, minlength=assignment.num_parts)
        orders[ntype] = NodeOrder(new_to_old=new_to_old, old_to_new=old_to_new, offsets=_cumulate(counts))
    return orders


def relabel_edges(graph: RawGraph, etype: EdgeType, sources: NodeOrder, destinations: NodeOrder) -> EdgeOrder:
    """Return the edges of one type ordered by (new destination, new source, original edge id).

    Needs 2 E ids beside its result, and no sort by comparison.

    Raises:
        ConfigError: an edge names a node that does not exist, or the ids are no (E,) whole numbers.
    """
    src, dst = graph.edges[etype]
    _check_ends(src, len(sources.new_to_old), etype, "source")
    _check_ends(dst, len(destinations.new_to_old), etype, "destination")
    if len(src) != len(dst):
        raise ConfigError(f"edge type {etype} has {len(src)} sources but {len(dst)} destinations")
    id_dtype = _id_dtype(len(src))
    by_source = np.empty(len(src), dtype=id_dtype)
    _fill(src, sources.old_to_new, _count(src, sources.old_to_new), by_source)
    indptr = _count(dst, destinations.old_to_new)
    new_to_old = np.empty(len(src), dtype=id_dtype)
    # Sorting by source first and then stably by destination gives ascending sources per destination.
    _fill_in_order(dst, destinations.old_to_new, by_source, indptr[:-1].copy(), new_to_old)
    del by_source
    indices = np.empty(len(src), dtype=sources.old_to_new.dtype)
    _gather_twice(src, sources.old_to_new, new_to_old, indices)
    return EdgeOrder(
        indptr=indptr, indices=indices, new_to_old=new_to_old, offsets=indptr[destinations.offsets]
    )


def _id_dtype(count: int) -> type[np.signedinteger]:
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def _cumulate(counts: Array) -> Array:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _check_owners(part_of: Array, num_nodes: int, num_parts: int, ntype: str) -> None:
    if part_of.shape != (num_nodes,) or part_of.dtype.kind not in "iu":
        raise ConfigError(
            f"the owners of nodes of type {ntype!r} are {part_of.dtype} of shape {part_of.shape}; "
            f"expected one whole number for each of the {num_nodes} nodes"
        )
    bad = np.flatnonzero((part_of < 0) | (part_of >= num_parts))
    if len(bad):
        raise ConfigError(
            f"node {bad[0]} of type {ntype!r} is assigned to part {part_of[bad[0]]}, "
            f"but the parts are 0..{num_parts - 1}"
        )


def _check_ends(ids: Array, num_nodes: int, etype: EdgeType, end: str) -> None:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"edge type {etype} has {end} ids of {ids.dtype} and shape {ids.shape}; "
            f"give one whole number an edge"
        )
    if len(ids) and (ids.min() < 0 or ids.max() >= num_nodes):
        row = int(np.flatnonzero((ids < 0) | (ids >= num_nodes))[0])
        raise ConfigError(
            f"edge {row} of type {etype} has {end} {ids[row]}, but there are {num_nodes} such nodes"
        )


def _count(ids: Array, old_to_new: Array) -> Array:
    counts = np.zeros(len(old_to_new) + 1, dtype=np.int64)
    _count_into(ids, old_to_new, counts)
    return np.cumsum(counts, out=counts)


@njit(cache=True, nogil=True)
def _count_into(ids: Array, old_to_new: Array, counts: Array) -> None:
    for edge in range(len(ids)):
        counts[old_to_new[ids[edge]] + 1] += 1


@njit(cache=True, nogil=True)
def _fill(ids: Array, old_to_new: Array, cursor: Array, out: Array) -> None:
    for edge in range(len(ids)):
        node = old_to_new[ids[edge]]
        out[cursor[node]] = edge
        cursor[node] += 1


@njit(cache=True, nogil=True)
def _fill_in_order(ids: Array, old_to_new: Array, order: Array, cursor: Array, out: Array) -> None:
    for position in range(len(order)):
        edge = order[position]
        node = old_to_new[ids[edge]]
        out[cursor[node]] = edge
        cursor[node] += 1


@njit(cache=True, nogil=True)
def _gather_twice(ids: Array, old_to_new: Array, edges: Array, out: Array) -> None:
    for position in range(len(edges)):
        out[position] = old_to_new[ids[edges[position]]]
