"""Cutting a graph server's nodes into intervals, the unit of its pipeline (Dorylus, section 4)."""

from __future__ import annotations

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array

_ROUNDS = 4


def cut_intervals(indptr: Array, sources: Array, num_intervals: int) -> Array:
    """Cut n nodes into contiguous runs alike in nodes and in edges that come from outside of them.

    Half of a run's share is counted in nodes, half in such edges, so that no run has more than twice the
    mean of either, but for one node's. Which edges come from outside depends on the cut, so it is refined.

    Args:
        indptr: (n + 1,) int64 of the in-edges.
        sources: (E,) local ids; those of n and above are ghosts.
        num_intervals: k; some are empty where there are fewer nodes.

    Returns:
        (k + 1,) int64: interval i has the nodes ``bounds[i]:bounds[i + 1]``.

    Raises:
        ConfigError: ``num_intervals`` is below 1.
    """
    if num_intervals < 1:
        raise ConfigError(f"intervals={num_intervals} per graph server must be at least 1")
    num_nodes = len(indptr) - 1
    bounds = num_nodes * np.arange(num_intervals + 1, dtype=np.int64) // num_intervals
    best, best_load = bounds, np.inf
    for _ in range(_ROUNDS):
        crossing = crossing_edges(indptr, sources, bounds)
        load = _load(crossing, bounds)
        if load < best_load:
            best, best_load = bounds, load
        bounds = _equal_shares(_shares(crossing), num_intervals)
    return bounds if _load(crossing_edges(indptr, sources, bounds), bounds) < best_load else best


def crossing_edges(indptr: Array, sources: Array, bounds: Array) -> Array:
    """Return (n,) int64: in-edges of each node whose source is in another interval, or a ghost."""
    num_nodes = len(indptr) - 1
    interval_of = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    targets = np.repeat(np.arange(num_nodes), np.diff(indptr))
    is_own = sources < num_nodes
    crosses = ~is_own
    crosses[is_own] = interval_of[sources[is_own]] != interval_of[targets[is_own]]
    return np.bincount(targets[crosses], minlength=num_nodes).astype(np.int64)


def _shares(crossing: Array) -> Array:
    """(n,) share of each node, half in nodes, half in edges; together 1."""
    edges = crossing.sum()
    by_node = np.full(len(crossing), 1 / max(len(crossing), 1))
    return by_node if not edges else (by_node + crossing / edges) / 2


def _load(crossing: Array, bounds: Array) -> float:
    """Largest share of an interval."""
    sums = np.concatenate([[0.0], np.cumsum(_shares(crossing))])
    return float(np.diff(sums[bounds]).max())


def _equal_shares(shares: Array, num_intervals: int) -> Array:
    ends = np.cumsum(shares)
    wanted = np.arange(1, num_intervals) / num_intervals
    # A node goes to the side where most of its share lies.
    inner = np.searchsorted(ends - shares / 2, wanted)
    return np.concatenate([[0], inner, [len(shares)]]).astype(np.int64)
