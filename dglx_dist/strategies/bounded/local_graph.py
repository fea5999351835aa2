"""What one graph server has of a graph: its nodes' in-edges, their sources by local id, its ghosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array

_MAX_LOCAL = 2**31 - 1


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LocalGraph:
    """n own nodes, which are local ids 0 to n - 1, and m ghosts, n to n + m - 1; E edges into own nodes.

    A ghost is a node of another graph server with an edge into an own node. The ghosts of an owner are in
    the order of their global ids, and so is the owner's list of them (:attr:`LocalGraph.ghost_ids` there,
    ``boundary`` here): a position in it names a row on both sides.
    """

    rank: int
    """Number of this graph server."""
    starts: Array
    """(W + 1,) int64 global id of the first node of each graph server."""
    indptr: Array
    """(n + 1,) int64."""
    sources: Array
    """(E,) int32 local ids."""
    ghosts: Array
    """(m,) int64 global ids, ascending."""
    ghost_starts: Array
    """(W + 1,) int64: the ghosts of server r are ``ghosts[ghost_starts[r]:ghost_starts[r + 1]]``."""
    out_indptr: Array
    """(n + m + 1,) int64 of the same edges by source."""
    out_targets: Array
    """(E,) int32 own nodes."""
    out_edges: Array
    """(E,) int64 positions in the order of ``sources``."""

    @property
    def num_own(self) -> int:
        """n."""
        return len(self.indptr) - 1

    @property
    def num_ghosts(self) -> int:
        """m."""
        return len(self.ghosts)

    @property
    def num_local(self) -> int:
        """n + m."""
        return self.num_own + self.num_ghosts

    @property
    def num_servers(self) -> int:
        """W."""
        return len(self.starts) - 1

    def ghost_ids(self, owner: int) -> Array:
        """Return the global ids of the ghosts that graph server ``owner`` has as its own; ascending."""
        return self.ghosts[self.ghost_starts[owner] : self.ghost_starts[owner + 1]]

    def own_positions(self, ids: Array, asker: int) -> Array:
        """Return (k,) int32 local ids of the nodes with the global ``ids``, which ``asker`` has as ghosts.

        Raises:
            ConfigError: they do not ascend, or are not all of this graph server.
        """
        first, end = int(self.starts[self.rank]), int(self.starts[self.rank + 1])
        ascending = ids.dtype == np.int64 and ids.ndim == 1 and bool((np.diff(ids) > 0).all())
        if not ascending or (len(ids) and not first <= ids[0] <= ids[-1] < end):
            raise ConfigError(
                f"graph server {asker} asked {self.rank} for rows that are not among its nodes {first} to "
                f"{end - 1}; do both have the same partition?"
            )
        return (ids - first).astype(np.int32)


def local_graph(rank: int, starts: Sequence[int] | Array, indptr: Array, sources: Array) -> LocalGraph:
    """Make the part of graph server ``rank`` from the in-edges of its nodes.

    Args:
        rank: Its number.
        starts: (W + 1,) global id of the first node of each graph server.
        indptr: (n + 1,) in-edges of its n nodes, from 0.
        sources: (E,) global ids.

    Raises:
        ConfigError: it has more nodes and ghosts, or edges, than local ids can count.
    """
    bounds = np.asarray(starts, dtype=np.int64)
    first, end = int(bounds[rank]), int(bounds[rank + 1])
    wide = sources.astype(np.int64, copy=False)
    is_own = (wide >= first) & (wide < end)
    ghosts = np.unique(wide[~is_own])
    num_own = end - first
    if num_own + len(ghosts) > _MAX_LOCAL:
        raise ConfigError(
            f"graph server {rank} has {num_own} nodes and {len(ghosts)} ghosts, above {_MAX_LOCAL}; use more "
            "ranks"
        )
    local = np.empty(len(wide), dtype=np.int32)
    local[is_own] = wide[is_own] - first
    local[~is_own] = num_own + np.searchsorted(ghosts, wide[~is_own])
    order = np.argsort(local, kind="stable")
    counts = np.bincount(local, minlength=num_own + len(ghosts))
    targets = np.repeat(np.arange(num_own, dtype=np.int32), np.diff(indptr))
    return LocalGraph(
        rank=rank,
        starts=bounds,
        indptr=np.ascontiguousarray(indptr, dtype=np.int64),
        sources=local,
        ghosts=ghosts,
        ghost_starts=np.searchsorted(ghosts, bounds),
        out_indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        out_targets=targets[order],
        out_edges=order.astype(np.int64),
    )
