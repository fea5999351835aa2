"""Where the structure that other owners pushed waits until a loader's thread comes for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import final

from dglx_dist.cluster.missing import raise_for_missing
from dglx_dist.cluster.session import Session
from dglx_dist.errors import DglxError
from dglx_dist.records import Array
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.structure import Place

_CHECK_EVERY_S = 1.0
"""How often a waiting thread asks whether those it waits for are still there."""


class IterationLeft(DglxError):
    """The loop over a loader ended while its threads waited; nobody sees it who did not leave."""


@final
class StructureInbox:
    """What arrived, by iteration, step and owner.

    Loaders of all ranks run equally far ahead and none without the others, so that no more than twice their
    depth of batches wait here.

    Args:
        session: The run.
        group: Who sends.
    """

    def __init__(self, session: Session, group: Group) -> None:
        self._session, self._group = session, group
        self._arrived: dict[tuple[int, int], dict[int, list[Array]]] = {}
        self._changed = threading.Condition()
        self._first_visit = 0
        self._reason: BaseException | None = None

    def __len__(self) -> int:
        """Batches of which something waits here."""
        return len(self._arrived)

    def put(self, visit: int, step: int, part: int, arrays: Sequence[Array]) -> None:
        """Add what the owner ``part`` sent; any thread. What is for an iteration that ended is dropped."""
        with self._changed:
            if visit >= self._first_visit:
                self._arrived.setdefault((visit, step), {})[part] = list(arrays)
                self._changed.notify_all()

    def begin(self, visit: int) -> None:
        """Drop what is of earlier iterations, and let who waits for it end."""
        with self._changed:
            self._forget_before(visit, None)

    def leave(self, visit: int, reason: BaseException | None = None) -> None:
        """Let who waits for something of iteration ``visit`` end with ``reason``; any thread."""
        with self._changed:
            self._forget_before(visit + 1, reason)

    def take(self, place: Place) -> dict[int, list[Array]]:
        """Wait for what all other members sent for a batch, and return it by part.

        Raises:
            PeerError: a rank is dead, or sent nothing within the session's time-out; it is named.
            IterationLeft: the iteration was left meanwhile; or the reason that was given for that.
        """
        deadline = time.monotonic() + self._session.timeout_s
        while missing := self._missing(place, min(_CHECK_EVERY_S, deadline - time.monotonic())):
            self._check(place, missing, late=time.monotonic() >= deadline)
        with self._changed:
            return self._arrived.pop((place.visit, place.step), {})

    def _forget_before(self, visit: int, reason: BaseException | None) -> None:
        if visit > self._first_visit:
            self._first_visit, self._reason = visit, reason
            self._arrived = {key: value for key, value in self._arrived.items() if key[0] >= visit}
        self._changed.notify_all()

    def _missing(self, place: Place, timeout_s: float) -> list[int]:
        """Wait until all are there, or for ``timeout_s``; return the ranks that are missing."""

        def missing() -> list[int]:
            here = self._arrived.get((place.visit, place.step), {})
            return [rank for part, rank in self._group.others if part not in here]

        def ready() -> bool:
            return place.visit < self._first_visit or not missing()

        with self._changed:
            self._changed.wait_for(ready, max(timeout_s, 0.0))
            if place.visit < self._first_visit:
                raise self._reason or IterationLeft(f"iteration {place.visit} of the loader was left")
            return missing()

    def _check(self, place: Place, missing: list[int], *, late: bool) -> None:
        what = f"the structure of step {place.step} of epoch {place.epoch}"
        raise_for_missing(
            self._session,
            missing,
            what,
            before=f"before it sent {what}",
            undone=f"did not send {what}",
            advice="every rank must iterate over the loader alike",
            late=late,
        )
