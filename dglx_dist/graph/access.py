"""How often a server's batches need each row: what a cache is chosen by (SALIENT++'s analysis among them).

Pure functions of CSC shards; ids are global, in [0, N) of their node type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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

    A seed is in a batch with p_0 = batch size / number of seeds, and a node u that is there draws k of its
    deg(u) in-edges at each hop from then on, as in DGL's blocks. An edge v -> u is missed by the hops 1 to h
    with

        m_h(v -> u) = 1 - q_{h-1}(u) + sum over j < h of (q_j - q_{j-1})(u) * (1 - min(1, k / deg(u)))^(h-j)

    (k may differ from hop to hop), and v is there after hop h with

        q_h(v) = 1 - (1 - p_0(v)) * product over the edges v -> u of m_h(v -> u),

    edges, of all types, being taken as independent. For the nodes that join at the hop before, this is the
    paper's p_h(v) = 1 - prod (1 - min(1, k / deg(u)) p_{h-1}(u)). O(edges) per hop.

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
    first = {ntype: np.zeros(count) for ntype, count in num_nodes.items()}
    for ntype, ids in seeds.items():
        first[ntype][ids] = min(1.0, batch_size / total) if total else 0.0
    seen, joined = first, first
    undrawn = {etype: np.zeros(num_nodes[etype[2]]) for etype in shards}
    for hop in reversed(fanouts):
        log_missed = {ntype: np.zeros(count) for ntype, count in num_nodes.items()}
        for etype, shard in shards.items():
            source, _, destination = etype
            frontier = _Frontier(seen[destination], joined[destination], undrawn[etype])
            _add_log_missed(
                shard.indptr, shard.indices, shard.first_node, frontier, hop[etype], log_missed[source]
            )
        now = {ntype: 1.0 - (1.0 - first[ntype]) * np.exp(missed) for ntype, missed in log_missed.items()}
        joined = {ntype: now[ntype] - seen[ntype] for ntype in now}
        seen = now
    return seen


class _Frontier(NamedTuple):
    """The destinations of an edge type before a hop, each (N,) float64."""

    seen: Array
    """Probability to be there."""
    joined: Array
    """Probability to have come with the hop before."""
    undrawn: Array
    """Probability to be there for longer, with one given in-edge not drawn so far; updated by the hop."""


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
    indptr: Array, indices: Array, first_node: int, frontier: _Frontier, fanout: int, log_missed: Array
) -> None:
    """Add to ``log_missed[v]`` the logarithm of the probability that no edge of v was drawn so far."""
    for row in range(len(indptr) - 1):
        node = first_node + row
        degree = indptr[row + 1] - indptr[row]
        if frontier.seen[node] > 0 and degree > 0:
            share = 1.0 if fanout < 0 or fanout >= degree else fanout / degree
            frontier.undrawn[node] = (frontier.undrawn[node] + frontier.joined[node]) * (1.0 - share)
            # Rounding may leave a hair below 0.
            missed = max(0.0, 1.0 - frontier.seen[node] + frontier.undrawn[node])
            log = np.log(missed)
            for edge in range(indptr[row], indptr[row + 1]):
                log_missed[np.uint64(indices[np.uint64(edge)])] += log
