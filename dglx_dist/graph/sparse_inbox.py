"""Where the gradients of a step wait until those of all ranks are there."""

from __future__ import annotations

import threading
import time
from typing import final

from dglx_dist.cluster.collectives import peers_named
from dglx_dist.cluster.missing import raise_for_missing
from dglx_dist.cluster.session import Session
from dglx_dist.graph.sparse_message import StepMessage

_CHECK_EVERY_S = 1.0
"""How often a waiting rank asks whether those it waits for are still there."""


@final
class Inbox:
    """Messages by step and sender.

    Args:
        session: Who sends.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._arrived: dict[int, dict[int, StepMessage]] = {}
        self._changed = threading.Condition()

    def put(self, message: StepMessage) -> None:
        """Add a message; any thread."""
        with self._changed:
            self._arrived.setdefault(message.step, {})[message.sender] = message
            self._changed.notify_all()

    def take(self, step: int, what: str) -> list[StepMessage]:
        """Wait for the messages of all ranks for ``step``, and return them by rank.

        Raises:
            PeerError: a rank is dead, or did not send within the session's time-out; it is named.
        """
        ranks = range(self._session.topology.world_size)
        deadline = time.monotonic() + self._session.timeout_s
        with peers_named(self._session, what):
            while missing := self._missing(step, min(_CHECK_EVERY_S, deadline - time.monotonic())):
                self._check(missing, what, late=time.monotonic() >= deadline)
        with self._changed:
            messages = self._arrived.pop(step)
        return [messages[rank] for rank in ranks]

    def _missing(self, step: int, timeout_s: float) -> list[int]:
        """Wait until all are there, or for ``timeout_s``; return the ranks that are missing."""

        def missing() -> list[int]:
            ranks = range(self._session.topology.world_size)
            return [rank for rank in ranks if rank not in self._arrived.get(step, {})]

        with self._changed:
            self._changed.wait_for(lambda: not missing(), max(timeout_s, 0.0))
            return missing()

    def _check(self, missing: list[int], what: str, *, late: bool) -> None:
        raise_for_missing(
            self._session,
            missing,
            what,
            before=f"before {what!r}",
            undone=f"sent nothing for {what!r}",
            advice="every rank must call step(), also without gradients",
            late=late,
        )
