"""Freeing tensors that a script has let go of, which no rank can do alone."""

from __future__ import annotations

from typing import cast, final
from weakref import WeakSet

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.opening import together

_LIFETIMES = "compat.lifetimes"


@final
class Lifetimes:
    """Which tensors of a store that are not persistent a script still refers to, on this rank."""

    def __init__(self) -> None:
        self._users: dict[str, WeakSet[object]] = {}

    def add(self, key: str, user: object) -> None:
        """Free the tensor ``key`` once ``user``, and whoever else uses it by then, is gone."""
        self._users[key] = WeakSet([user])

    def use(self, key: str, user: object) -> None:
        """Keep the tensor ``key``, if it is one that may be freed, as long as ``user`` is there."""
        if key in self._users:
            self._users[key].add(user)

    def free(self, store: KVStore) -> None:
        """Free what no rank refers to any more. Every rank must call it.

        Args:
            store: Whose tensors these are.
        """
        unused = [key for key, users in self._users.items() if not users and store.has(key)]
        # The answers come when all have asked, so nobody reads these rows any more.
        together(store.session, store.fence)
        told = [set(one) for one in cast("list[list[str]]", gather_json(unused, store.session))]
        for key in sorted(set.intersection(*told)):
            store.remove(key)
            del self._users[key]


def lifetimes_of(store: KVStore) -> Lifetimes:
    """Return those of a graph's store: two graphs may have tensors of the same name."""
    by_store = store.session.attached.setdefault(_LIFETIMES, {})
    return cast("dict[str, Lifetimes]", by_store).setdefault(store.label, Lifetimes())
