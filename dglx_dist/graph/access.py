"""How often a server's batches need each row: what a cache is chosen by (SALIENT++'s analysis among them).

Pure functions of CSC shards; ids are global, in [0, N) of their node type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numba import njit

from dglx_dist.graph.in_edges import CSCShard
from dglx_dist.records import Array, EdgeType


def count_sources(
    shards: Sequence[CSCShard], num_sources: int, nodes: tuple[int, int] | None = None
) -> Array:
    """Return how many in-edges each source has in ``shards``.

    Args:
        shards: In-edges of consecutive destinations.
        num_sources: N of the source type.
        nodes: (first, end) of the destinations to look at; None: all that are there.

    Returns:
        (N,) int64: out-degrees, when the shards hold all edges.
    """
    counts = np.zeros(num_sources, np.int64)
    for shard in shards:
        first, end = nodes if nodes is not None else (shard.first_node, shard.last_node)
        num_rows = shard.last_node - shard.first_node
        begin = min(max(first - shard.first_node, 0), num_rows)
        stop = min(max(end - shard.first_node, begin), num_rows)
        _count(shard.indices[shard.indptr[begin] : shard.indptr[stop]], counts)
    return counts


def access_probability(
    shards: Mapping[EdgeType, CSCShard],
    num_nodes: Mapping[str, int],
    seeds: Mapping[str, Array],
    fanouts: Sequence[Mapping[EdgeType, int]],
    batch_size: int,
) -> dict[str, Array]:
    """Return the probability that a batch of a rank needs each node as an input (SALIENT++, section 3.2).

    A seed is in a batch with p_0 = batch size / number of seeds. A node u in the frontier draws k of its
    deg(u) in-edges, so that hop h reaches v with

        p_h(v) = 1 - prod over edges v -> u of (1 - min(1, k / deg(u)) q_{h-1}(u)),

    taken as independent events. The frontier q_{h-1} is all nodes seen before hop h, the seeds included, as
    in DGL's blocks: q_h = 1 - (1 - q_{h-1}) (1 - p_h), q_0 = p_0. Edges of all types that end in v's out-
    neighbours count. O(edges) per hop.

    Args:
        shards: Edge type to its whole structure.
        num_nodes: Node type to N.
        seeds: Node type to the (T,) int64 distinct ids that the rank trains on.
        fanouts: Edge type to k, one mapping per layer, input-most first as for the samplers; -1: all.
        batch_size: Seeds of all types in one batch.

    Returns:
        Node type to (N,) float64 in [0, 1].
    """
    total = sum(len(ids) for ids in seeds.values())
    seen = {ntype: np.zeros(count) for ntype, count in num_nodes.items()}
    for ntype, ids in seeds.items():
        seen[ntype][ids] = min(1.0, batch_size / total) if total else 0.0
    for hop in reversed(fanouts):
        log_missed = {ntype: np.zeros(count) for ntype, count in num_nodes.items()}
        for etype, shard in shards.items():
            _add_log_missed(
                shard.indptr,
                shard.indices,
                shard.first_node,
                seen[etype[2]],
                hop[etype],
                log_missed[etype[0]],
            )
        for ntype, missed in log_missed.items():
            seen[ntype] = 1.0 - (1.0 - seen[ntype]) * np.exp(missed)
    return seen


def most_wanted(scores: Array, own: tuple[int, int], budget: int) -> Array:
    """Return the other servers' rows with the highest scores.

    Args:
        scores: (N,) of how much each row is wanted; rows of score 0 are never returned.
        own: (first, end) ids of the own server, which are left out.
        budget: Most rows to return.

    Returns:
        (C,) int64 ids, ascending; of equal scores the smaller ids.
    """
    wanted = scores.copy()
    wanted[own[0] : own[1]] = 0
    budget = min(budget, int(np.count_nonzero(wanted)))
    if budget == 0:
        return np.empty(0, np.int64)
    least = np.partition(wanted, len(wanted) - budget)[len(wanted) - budget]
    above = np.flatnonzero(wanted > least)
    equal = np.flatnonzero(wanted == least)[: budget - len(above)]
    return np.sort(np.concatenate([above, equal])).astype(np.int64)


def expected_hit_rate(scores: Array, own: tuple[int, int], cached: Array) -> float | None:
    """Return the share of the remote scores that ``cached`` rows have; None when nothing remote is wanted."""
    remote = float(scores[: own[0]].sum() + scores[own[1] :].sum())
    return float(scores[cached].sum()) / remote if remote > 0 else None


@njit(cache=True, nogil=True)
def _count(sources: Array, counts: Array) -> None:
    for edge in range(len(sources)):
        counts[np.uint64(sources[edge])] += 1


@njit(cache=True, nogil=True)
def _add_log_missed(
    indptr: Array, indices: Array, first_node: int, frontier: Array, fanout: int, log_missed: Array
) -> None:
    """Add to ``log_missed[v]`` the logarithm of the probability that no edge of v is drawn."""
    for row in range(len(indptr) - 1):
        probability = frontier[first_node + row]
        degree = indptr[row + 1] - indptr[row]
        if probability > 0 and degree > 0 and fanout != 0:
            share = 1.0 if fanout < 0 or fanout >= degree else fanout / degree
            log = np.log1p(-share * probability)
            for edge in range(indptr[row], indptr[row + 1]):
                log_missed[np.uint64(indices[np.uint64(edge)])] += log
