"""Which of a sorted set of ids each rank takes: pure arithmetic, the same on every rank."""

from __future__ import annotations

import numpy as np

from dglx_dist.cluster.topology import Topology
from dglx_dist.records import Array


def quotas(num_ids: int, topology: Topology) -> list[Array]:
    """Return how many of ``num_ids`` each rank takes, server by server; all differ by at most 1."""
    base, extra = divmod(num_ids, topology.world_size)
    by_position = np.full(topology.world_size, base, dtype=np.int64)
    by_position[:extra] += 1
    sizes = [len(topology.ranks_of_server(server)) for server in range(topology.num_servers)]
    return np.split(by_position, np.cumsum(sizes)[:-1])


def range_of_server(num_ids: int, topology: Topology, server: int) -> tuple[int, int]:
    """Return the positions [first, last) of the sorted ids that the ranks of ``server`` take together."""
    totals = [int(quota.sum()) for quota in quotas(num_ids, topology)]
    return sum(totals[:server]), sum(totals[: server + 1])


def share_of_rank(
    ids: Array, quota: Array, local_rank: int, seed: int, preferred: Array | None = None
) -> Array:
    """Deal the ids of one server to its ranks at random, the same deal on every rank.

    Args:
        ids: (n,) int64 ids that the ranks of the server share.
        quota: (ranks,) int64 how many each of them takes; sums to n.
        local_rank: Whose share to return.
        seed: Of the deal; the server's number, so that servers differ and runs repeat.
        preferred: (n,) the local rank that would like each id, or one that does not exist for "any";
            honoured up to the quotas.

    Returns:
        (``quota[local_rank]``,) int64, ascending.
    """
    order = np.random.default_rng(seed).permutation(len(ids))
    owner = np.repeat(np.arange(len(quota)), quota)
    if preferred is not None:
        owner = _honour(preferred[order], quota)
    return np.sort(ids[order[owner == local_rank]])


def even_quota(num_ids: int, num_ranks: int) -> Array:
    """Return (``num_ranks``,) counts that sum to ``num_ids`` and differ by at most 1."""
    base, extra = divmod(num_ids, num_ranks)
    return base + (np.arange(num_ranks) < extra).astype(np.int64)


def _honour(preferred: Array, quota: Array) -> Array:
    """Give each position to who prefers it while that rank's quota lasts, and the rest to who has room."""
    owner = np.full(len(preferred), -1, dtype=np.int64)
    for rank, size in enumerate(quota):
        owner[np.flatnonzero(preferred == rank)[:size]] = rank
    room = quota - np.bincount(owner[owner >= 0], minlength=len(quota))
    owner[owner < 0] = np.repeat(np.arange(len(quota)), room)
    return owner
