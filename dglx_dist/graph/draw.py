"""Drawing some of the in-edges of nodes, as ``DistGraph.sample_neighbors`` does for any sampler of DGL.

Draws depend on a seed and the node alone, so that they are the same wherever the node lives. The loader has
kernels of its own that draw whole mini-batches.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dglx_dist.graph.in_edges import NO_EDGES, CSCShard, InEdges
from dglx_dist.records import Array


def draw_parameters(fanout: int, replace: bool, seed: int) -> str:
    """Return what :func:`draw_uniform` needs to know, as text."""
    return f"{fanout} {int(replace)} {seed}"


def draw_uniform(shard: CSCShard, nodes: Array, parameters: str, _exclude: Array = NO_EDGES) -> InEdges:
    """Draw in-edges of ``nodes`` ((k,) int64 global ids in the shard), all of a node alike, none excluded.

    Args:
        shard: Piece of the structure.
        nodes: Whose in-edges.
        parameters: Of :func:`draw_parameters`. A fan-out of -1 takes all; without replacement at most as
            many as there are, with it none where there are none.
    """
    fanout, replace, seed = (int(text) for text in parameters.split())
    local = nodes - shard.first_node
    starts, ends = shard.indptr[local], shard.indptr[local + 1]
    indptr = _drawn(ends - starts, fanout, bool(replace))
    positions = np.empty(indptr[-1], dtype=np.int64)
    _draw_uniform(nodes, starts, ends, indptr, fanout, bool(replace), np.uint64(seed), positions)
    return InEdges(
        indptr=indptr,
        sources=shard.indices[positions].astype(np.int64),
        edge_ids=positions + shard.first_edge,
    )


def draw_weighted(
    nodes: Array, edges: InEdges, weights: Array, fanout: int, replace: bool, seed: int
) -> InEdges:
    """Draw among given in-edges, each as likely as its weight says; edges of weight 0 are never drawn.

    Args:
        nodes: (K,) int64, of which ``edges`` are the in-edges.
        edges: The candidates.
        weights: (e,) float64, not negative.
        fanout: Edges of a node; -1: all with a weight above 0.
        replace: Whether an edge may be drawn again.
        seed: Of the draw.
    """
    positive = weights > 0
    positions = np.flatnonzero(positive)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(positive)])
    bounds = before[edges.indptr]
    indptr = _drawn(np.diff(bounds), fanout, replace)
    picked = np.empty(indptr[-1], dtype=np.int64)
    _draw_weighted(nodes, bounds, weights[positions], indptr, fanout, replace, np.uint64(seed), picked)
    chosen = positions[picked]
    return InEdges(indptr=indptr, sources=edges.sources[chosen], edge_ids=edges.edge_ids[chosen])


def _drawn(degrees: Array, fanout: int, replace: bool) -> Array:
    if fanout < 0:
        sizes = degrees
    elif replace:
        sizes = np.where(degrees > 0, fanout, 0)
    else:
        sizes = np.minimum(degrees, fanout)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


@njit(cache=True, nogil=True)
def _mix(value: np.uint64) -> np.uint64:
    """Scramble 64 bits (splitmix64's finaliser)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True)
def _unit(key: np.uint64, counter: int) -> float:
    """Return the ``counter``-th number in (0, 1) of the stream ``key``."""
    bits = _mix(key + np.uint64(counter + 1) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    return (float(bits) + 0.5) / 9007199254740992.0


@njit(cache=True, nogil=True)
def _draw_uniform(
    nodes: Array,
    starts: Array,
    ends: Array,
    indptr: Array,
    fanout: int,
    replace: bool,
    seed: np.uint64,
    out: Array,
) -> None:
    for k in range(len(nodes)):
        first, degree, at = starts[k], ends[k] - starts[k], indptr[k]
        size = indptr[k + 1] - at
        key = _mix(seed ^ _mix(np.uint64(nodes[k])))
        if size == degree and not (replace and fanout >= 0):
            for i in range(size):
                out[at + i] = first + i
        elif replace:
            for i in range(size):
                out[at + i] = first + int(_unit(key, i) * degree)
        else:
            # Floyd's sampling: each step takes a new one of a range that grows by one, or its last.
            for i in range(size):
                top = degree - size + i
                pick = first + int(_unit(key, i) * (top + 1))
                for j in range(i):
                    if out[at + j] == pick:
                        pick = first + top
                        break
                out[at + i] = pick


@njit(cache=True, nogil=True)
def _draw_weighted(
    nodes: Array,
    bounds: Array,
    weights: Array,
    indptr: Array,
    fanout: int,
    replace: bool,
    seed: np.uint64,
    out: Array,
) -> None:
    for k in range(len(nodes)):
        first, degree, at = bounds[k], bounds[k + 1] - bounds[k], indptr[k]
        size = indptr[k + 1] - at
        key = _mix(seed ^ _mix(np.uint64(nodes[k])))
        if size == degree and not (replace and fanout >= 0):
            for i in range(size):
                out[at + i] = first + i
        elif replace:
            total = np.cumsum(weights[first : first + degree])
            for i in range(size):
                pick = np.searchsorted(total, _unit(key, i) * total[-1], side="right")
                out[at + i] = first + min(pick, degree - 1)
        else:
            # The largest of log(u) / weight are a draw without replacement (Efraimidis and Spirakis).
            score = np.empty(degree, np.float64)
            for i in range(degree):
                score[i] = -np.log(_unit(key, i)) / weights[first + i]
            order = np.argsort(score)
            for i in range(size):
                out[at + i] = first + order[i]
