"""What a loader visits in an epoch: nodes or edges, of one type or several, as one list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from dglx_dist.draws.rng import hash_ids, stream_key
from dglx_dist.errors import ConfigError
from dglx_dist.graph.ids import Ids
from dglx_dist.graph.neighbors import by_type
from dglx_dist.records import Array

K = TypeVar("K")

_SHUFFLE = -1
"""The hop number under which the order of an epoch is drawn for type 0; further types count down."""


@dataclass(frozen=True, kw_only=True)
class Items(Generic[K]):
    """This rank's ids by type, thought of as one list in the order of the types."""

    ids: Mapping[K, Array]
    """(n_t,) int64 distinct ids of every type of the graph, in the graph's order; often of no length."""

    def __len__(self) -> int:
        return sum(len(ids) for ids in self.ids.values())

    def order(self, *, shuffle: bool, seed: int, epoch: int) -> Array:
        """Return the (n,) positions in the order of ``epoch``: by keyed hash of type and id, or as given."""
        if not shuffle:
            return np.arange(len(self))
        keys = [
            hash_ids(ids, stream_key(seed, epoch, _SHUFFLE - number))
            for number, ids in enumerate(self.ids.values())
        ]
        return np.argsort(np.concatenate(keys), kind="stable")

    def take(self, positions: Array) -> dict[K, Array]:
        """Return the ids at (k,) ``positions``, type by type in their order; all types, some maybe empty."""
        if len(self.ids) == 1:
            return {key: ids[positions] for key, ids in self.ids.items()}
        taken, first = {}, 0
        for key, ids in self.ids.items():
            mine = positions[(positions >= first) & (positions < first + len(ids))]
            taken[key] = ids[mine - first]
            first += len(ids)
        return taken

    def digest(self) -> int:
        """Return one number that differs, almost surely, when the sets of ids do."""
        digest = np.uint64(0)
        for number, ids in enumerate(self.ids.values()):
            digest ^= np.bitwise_xor.reduce(hash_ids(ids, stream_key(0, 0, number)), initial=np.uint64(0))
        return int(digest.view(np.int64))


def read_items(given: Ids | Mapping[Any, Ids], counts: Mapping[K, int], what: str) -> Items[K]:
    """Return what a loader was told to visit.

    Args:
        given: (K,) ids or a mask over all, where there is one type; else a dict of either by type, an edge
            type named by its triple or its relation.
        counts: Every type in the graph's order, with the number of its nodes or edges.
        what: ``node`` or ``edge``, for messages.

    Raises:
        ConfigError: an unknown or ambiguous type, no dict although there are several types, or an id twice.
        IndexError: an id is out of range.
    """
    found = by_type(given, counts, what)
    for key, ids in found.items():
        distinct, times = np.unique(ids, return_counts=True)
        if len(distinct) != len(ids):
            raise ConfigError(
                f"indices of type {key!r} have {what} {distinct[times > 1][0]} more than once ({len(ids)} "
                f"ids, {len(distinct)} distinct); each is visited once an epoch: pass torch.unique(indices)"
            )
    none = np.empty(0, np.int64)
    # A copy, because the caller may write to its array while threads read.
    return Items(ids={key: found[key].copy() if key in found else none for key in counts})
