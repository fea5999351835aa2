"""The compiled loops of expansion-aware sampling."""

from __future__ import annotations

import numpy as np
from numba import njit

from dglx_dist.draws.rng import item_key, mix
from dglx_dist.records import Array


@njit(cache=True, nogil=True)
def _is_in(value: int, ascending: Array) -> bool:
    place = np.searchsorted(ascending, value)
    return bool(place < len(ascending) and ascending[place] == value)


@njit(cache=True, nogil=True)
def _goes_before(score: int, draw: np.uint64, other_score: int, other_draw: np.uint64) -> bool:
    return score > other_score or (score == other_score and bool(draw < other_draw))


@njit(cache=True, nogil=True)
def choose(
    indptr: Array,
    sources: Array,
    nodes: Array,
    taken: Array,
    scores: Array,
    fanout: int,
    stream: np.uint64,
) -> Array:
    """Return the (c,) int64 sources chosen by ``nodes``, each at most ``fanout``; some are there repeatedly.

    A node ranks its candidates by score, then by a number keyed by (stream, node, candidate), and takes the
    first: a larger fan-out takes a superset.

    Args:
        indptr: (K + 1,) int64.
        sources: (E,) int64; those of one node are ascending.
        nodes: (K,) int64 global ids.
        taken: (T,) int64 ascending: no candidates.
        scores: (E,) int64 of each source, higher first; of length 0 where all are alike.
        fanout: -1 for all.
        stream: Key of the draws.
    """
    chosen = np.empty(_most(indptr, fanout), np.int64)
    width = max(fanout, 0)
    best, best_draw = np.empty(width, np.int64), np.empty(width, np.uint64)
    best_score = np.empty(width, np.int64)
    total = 0
    for i in range(len(nodes)):
        key = item_key(stream, nodes[i])
        count = 0
        for edge in range(indptr[i], indptr[i + 1]):
            source = sources[edge]
            # Parallel edges make a neighbour no likelier.
            if (edge > indptr[i] and sources[edge - 1] == source) or _is_in(source, taken):
                continue
            if fanout < 0:
                chosen[total] = source
                total += 1
                continue
            score = scores[edge] if len(scores) > 0 else 0
            draw = mix(key ^ mix(np.uint64(source)))
            if count == fanout:
                if not _goes_before(score, draw, best_score[count - 1], best_draw[count - 1]):
                    continue
                slot = count - 1
            else:
                slot = count
                count += 1
            while slot > 0 and _goes_before(score, draw, best_score[slot - 1], best_draw[slot - 1]):
                best[slot], best_draw[slot] = best[slot - 1], best_draw[slot - 1]
                best_score[slot] = best_score[slot - 1]
                slot -= 1
            best[slot], best_draw[slot], best_score[slot] = source, draw, score
        for slot in range(count):
            chosen[total] = best[slot]
            total += 1
    return chosen[:total]


@njit(cache=True, nogil=True)
def _most(indptr: Array, fanout: int) -> int:
    if fanout < 0:
        return indptr[-1]
    total = 0
    for i in range(len(indptr) - 1):
        total += min(indptr[i + 1] - indptr[i], fanout)
    return total


@njit(cache=True, nogil=True)
def count_outside(
    indptr: Array, indices: Array, first_node: int, nodes: Array, low: int, high: int, out: Array
) -> None:
    """Write how many in-edges of each of ``nodes`` come from outside [low, high) to (K,) int64 ``out``."""
    for i in range(len(nodes)):
        row = nodes[i] - first_node
        count = 0
        for edge in range(indptr[row], indptr[row + 1]):
            source = indices[edge]
            if source < low or source >= high:
                count += 1
        out[i] = count
