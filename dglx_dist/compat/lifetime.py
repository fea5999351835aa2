"""Freeing tensors that a script has let go of, which no rank can do alone."""

from __future__ import annotations

import weakref
from typing import cast, final

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.opening import together

_LIFETIMES = "compat.lifetimes"


@final
class Lifetimes:
    """Which tensors that are not persistent a script still refers to, on this rank."""

    def __init__(self) -> None:
        self._users: dict[str, list[weakref.ref[object]]] = {}

    def add(self, key: str, user: object) -> None:
        """Free the tensor ``key`` once ``user``, and whoever else uses it by then, is gone."""
        self._users[key] = [weakref.ref(user)]

    def use(self, key: str, user: object) -> None:
        """Keep the tensor ``key``, if it is one that may be freed, as long as ``user`` is there."""
        if key in self._users:
            self._users[key].append(weakref.ref(user))

    def free(self, store: KVStore) -> None:
        """Free what no rank refers to any more. Every rank must call it."""
        unused = [key for key, users in self._users.items() if not any(user() is not None for user in users)]
        unused = [key for key in unused if store.has(key)]
        # The answers come when all have asked, so nobody reads these rows any more.
        together(store.session, store.fence)
        told = [set(one) for one in cast("list[list[str]]", gather_json(unused, store.session))]
        for key in sorted(set.intersection(*told)):
            store.remove(key)
            del self._users[key]


def lifetimes_of(session: Session) -> Lifetimes:
    """Return those of a session."""
    return cast("Lifetimes", session.attached.setdefault(_LIFETIMES, Lifetimes()))
