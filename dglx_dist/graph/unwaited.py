"""Calls that nobody waits for yet: sent by a thread of their own, bounded, and answered for at a fence."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from dglx_dist.cluster.rpc import Pending
from dglx_dist.cluster.session import Session
from dglx_dist.errors import PeerError
from dglx_dist.records import Array

MAX_BYTES = 64 << 20
"""Of all calls not yet answered; who adds to them beyond that waits."""

UNDER_WAY = 8
"""Calls sent before the first of them is answered."""


@dataclass(frozen=True, kw_only=True)
class Send:
    """One request; the arrays belong to it alone."""

    rank: int
    op: str
    name: str
    arrays: Sequence[Array]
    phase: str
    layer: int

    @property
    def num_bytes(self) -> int:
        """Memory that it holds until it is answered."""
        return sum(array.nbytes for array in self.arrays)


@final
class Unwaited:
    """Requests that leave in the order they are put, and what went wrong with them.

    :meth:`put` and :meth:`fence` are for any thread. The thread that sends starts with the first request.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue: deque[Send] = deque()
        self._bytes = 0
        self._num_put = self._num_answered = 0
        self._unanswered: Counter[int] = Counter()
        self._errors: list[Exception] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, sends: Sequence[Send]) -> None:
        """Let requests leave; waits only while more than ``MAX_BYTES`` are unanswered.

        Raises:
            PeerError: nothing was answered within the session's time-out; the ranks asked are named.
        """
        # Under one lock, or the thread may take the first and wait for its answer before the rest leaves.
        with self._changed:
            for send in sends:
                self._wait_until(lambda: self._bytes < MAX_BYTES, self._session.timeout_s, "a push")
                self._queue.append(send)
                self._bytes += send.num_bytes
                self._num_put += 1
                self._unanswered[send.rank] += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="dglx-push", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def fence(self, timeout_s: float | None = None) -> None:
        """Wait until every request put before is answered; an error of one of them is raised here, once.

        Raises:
            PeerError: ``timeout_s`` (None: the session's) passed; those who have not answered are named.
            DglxError: a request failed; how many more did is in a note.
        """
        limit_s = self._session.timeout_s if timeout_s is None else timeout_s
        with self._changed:
            wanted = self._num_put
            # Answers are taken in the order of the requests, so that a count tells which are there.
            self._wait_until(lambda: self._num_answered >= wanted, limit_s, "fence()")
            errors, self._errors = self._errors, []
        if errors:
            if len(errors) > 1:
                errors[0].add_note(f"{len(errors) - 1} more pushes that were not waited for failed too")
            raise errors[0]

    def close(self) -> None:
        """End the thread once all requests have left; :meth:`fence` belongs before it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _wait_until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        if not self._changed.wait_for(done, limit_s):
            missing = ", ".join(
                f"rank {rank} on {self._session.hosts[rank]} ({count})"
                for rank, count in sorted(self._unanswered.items())
            )
            raise PeerError(
                f"{what} waited {limit_s:g} s for pushes that were not answered by {missing}; look at the "
                "output there, or raise timeout_s (DGLX_TIMEOUT)"
            )

    def _work(self) -> None:
        """Send and take answers, on one thread, as calls must be; end when closed."""
        under_way: deque[tuple[Send, Pending | None]] = deque()
        while (send := self._next(wait=not under_way)) is not None or under_way:
            if send is not None:
                under_way.append((send, self._submit(send)))
            if send is None or len(under_way) >= UNDER_WAY:
                self._finish(*under_way.popleft())

    def _next(self, *, wait: bool) -> Send | None:
        with self._changed:
            while wait and not self._queue and not self._closing:
                self._changed.wait()
            return self._queue.popleft() if self._queue else None

    def _submit(self, send: Send) -> Pending | None:
        try:
            return self._session.rpc.submit(
                send.rank, send.op, send.name, send.arrays, phase=send.phase, layer=send.layer
            )
        except Exception as error:  # noqa: BLE001 - raised again at the fence
            self._note(error)
            return None

    def _finish(self, send: Send, pending: Pending | None) -> None:
        try:
            if pending is not None:
                pending.result()
        except Exception as error:  # noqa: BLE001 - raised again at the fence
            self._note(error)
        with self._changed:
            self._bytes -= send.num_bytes
            self._num_answered += 1
            self._unanswered[send.rank] -= 1
            self._unanswered += Counter()  # drops the zeros
            self._changed.notify_all()

    def _note(self, error: Exception) -> None:
        with self._changed:
            self._errors.append(error)
