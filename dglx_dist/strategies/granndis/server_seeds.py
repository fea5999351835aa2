"""The seeds of all ranks, brought to the servers that own them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.draws.rng import hash_ids, stream_key
from dglx_dist.records import Array

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@final
@dataclass(frozen=True, kw_only=True)
class ServerSeeds:
    """What a server trains on, and how much the others have."""

    own: Array
    """(n,) int64 ascending distinct seeds that this server owns, whichever rank of the run named them."""
    counts: tuple[int, ...]
    """(S,) seeds of each server."""
    digest: int
    """Differs, almost surely, when the seeds of all servers do."""

    @property
    def total(self) -> int:
        """Seeds of all servers."""
        return sum(self.counts)

    def sizes(self, num_batches: int) -> Array:
        """Return (R, S) int64: how many seeds each server has in each of R co-batches."""
        counts, step = np.array(self.counts, np.int64), np.arange(num_batches)[:, None]
        return counts // num_batches + (step < counts % num_batches)


def gather_seeds(g: DistGraph, seeds: Array) -> ServerSeeds:
    """Return this server's seeds of those of all ranks; every rank must call it.

    A rank holds the seeds of all for a moment, 8 bytes each.

    Args:
        g: A graph of one node type.
        seeds: (K,) int64 existing ids of this rank; other ranks may have some of them too.

    Raises:
        PeerError: a rank did not take part.
    """
    most = int(gather_int64([len(seeds)], g.session).max())
    mine = np.full(most, -1, np.int64)
    mine[: len(seeds)] = seeds
    everyone = np.unique(gather_int64(mine, g.session))
    everyone = everyone[everyone >= 0]
    bounds = g.get_node_partition_policy(g.ntypes[0]).bounds
    at = np.searchsorted(everyone, bounds)
    server = g.session.topology.server
    digest = np.bitwise_xor.reduce(hash_ids(everyone, stream_key(0, 0, 0)), initial=np.uint64(0))
    return ServerSeeds(
        own=everyone[at[server] : at[server + 1]].copy(),
        counts=tuple(np.diff(at).tolist()),
        digest=int(digest),
    )
