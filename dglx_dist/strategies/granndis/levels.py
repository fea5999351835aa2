"""Which rows each server computes at which level, found by the servers together (algorithms 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from dglx_dist.graph.structure import Structure
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.closure import Closure, Grower, Selection
from dglx_dist.strategies.granndis.mail import Mail


@final
@dataclass(frozen=True, kw_only=True)
class Heads:
    """The first rank of every server, and which nodes the servers own."""

    ranks: tuple[int, ...]
    """(S,)."""
    server: int
    """Of this rank."""
    bounds: Array
    """(S + 1,) int64; server s owns the nodes ``bounds[s]:bounds[s + 1]``."""

    @property
    def own(self) -> tuple[int, int]:
        """First node of this rank's server, and the one after its last."""
        return int(self.bounds[self.server]), int(self.bounds[self.server + 1])

    def split(self, ids: Array) -> dict[int, Array]:
        """Cut the (n,) ascending int64 ``ids`` by owner: head to its ids."""
        at = np.searchsorted(ids, self.bounds)
        return {rank: ids[at[server] : at[server + 1]] for server, rank in enumerate(self.ranks)}


def grow_levels(
    structure: Structure,
    seeds: Array,
    depth: tuple[int, int],
    heads: Heads,
    mail: Mail,
    *,
    eas: Selection | None = None,
    advance: Callable[[int], None],
) -> Closure:
    """Return what this server computes; the heads of all servers must call it, in a job of ``mail``.

    At level ``hops`` and above a server computes those of its own nodes that anybody needs, so what its
    rows read from others' nodes is told to these; below it takes in whatever its rows read.

    Args:
        structure: Of the only edge type.
        seeds: (K,) ascending int64 ids without repeats, what this server computes of the output.
        depth: (L, hops).
        heads: Of this rank; it must be one of them.
        mail: Between the ranks.
        eas: Which nodes the server may use; only with hops equal to L.
        advance: Called with 1 after each level.

    Raises:
        PeerError: a rank is dead or silent.
        RemoteError: another head failed.
    """
    num_layers, hops = depth
    allowed = None if eas is None else np.union1d(eas(structure, heads.own, seeds), seeds)
    grower = Grower(structure, seeds, allowed)
    met = np.empty(0, np.int64)
    for level in range(num_layers - 1, -1, -1):
        sources = grower.sources()
        met = np.union1d(met, sources) if len(sources) else met
        if level >= hops:
            grower.add(_wanted_of_own(sources, level, heads, mail))
        else:
            # All that was met, not only now: above, others' rows were not taken in.
            grower.add(met)
        advance(1)
    return grower.finish()


def _wanted_of_own(sources: Array, level: int, heads: Heads, mail: Mail) -> Array:
    """Tell the other servers which of their nodes are read; return which of the own ones anybody reads."""
    outgoing: dict[int, Sequence[Array]] = {rank: [ids] for rank, ids in heads.split(sources).items()}
    told = mail.exchange(f"rows of level {level}", outgoing, heads.ranks)
    return np.unique(np.concatenate([ids for (ids,) in told.values()]))
