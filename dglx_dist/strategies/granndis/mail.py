"""What ranks tell each other while they plan: one-sided messages, so that any thread may plan.

Collectives of torch.distributed belong to the thread that trains; plans are made ahead on another one.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np

from dglx_dist.cluster.session import Session
from dglx_dist.errors import PeerError, RemoteError
from dglx_dist.records import Array

PLAN = "plan"
"""Phase under which the ids that ranks tell each other are counted."""

_CHECK_EVERY_S = 1.0
"""How often a waiting rank asks whether those it waits for are still there."""

_TELL_S = 5.0
"""How long a rank that fails waits until another one knows."""

_FAILED = "failed"


@final
class FailedElsewhereError(RemoteError):
    """Another rank ended the job, and has told everybody."""


@final
class Mail:
    """Rounds of messages among ranks, by the number of the job that they belong to.

    All ranks must have made theirs before one sends. Jobs follow each other; every rank takes part in each.

    Args:
        session: The run.
        label: Name of the remote calls, the same on all ranks and of nobody else.
    """

    def __init__(self, session: Session, label: str) -> None:
        self._session, self._op, self._busy = session, f"{label}.mail", f"{label}.busy"
        self._box = box = _Box()
        self._job = 0

        def receive(name: str, arrays: Sequence[Array]) -> list[Array]:
            job, source, step = name.split(" ", 2)
            box.put(int(job), int(source), step, arrays)
            return []

        # Not methods: the planner would live as long as the session.
        session.rpc.register(self._op, receive)
        session.rpc.register(self._busy, lambda _name, _arrays: [np.array([box.job], dtype=np.int64)])
        for op in (self._op, self._busy):
            weakref.finalize(self, session.rpc.unregister, op)

    @contextmanager
    def job(self) -> Iterator[int]:
        """Begin the next job, and yield its number; an error inside ends it on all ranks.

        Ranks that wait for this one go on waiting while it is inside, however long that takes.
        """
        self._job += 1
        self._box.begin(self._job)
        try:
            yield self._job
        except FailedElsewhereError:
            raise
        except Exception as error:
            self._tell_failure(error)
            raise
        finally:
            self._box.end()

    def exchange(
        self,
        step: str,
        outgoing: Mapping[int, Sequence[Array]],
        among: Collection[int],
        empty: Sequence[Array] = (),
    ) -> dict[int, list[Array]]:
        """Send each rank of ``among`` its arrays, and wait for theirs; all of ``among`` must call it.

        Args:
            step: What it is about, for messages; not used twice in a job.
            outgoing: Arrays by rank; the own rank gets its own without a copy.
            among: Who takes part.
            empty: What those of ``among`` get who are not in ``outgoing``.

        Returns:
            By rank, what each of ``among`` sent.

        Raises:
            RemoteError: another rank failed in this job; its text is told.
            PeerError: a rank is dead, or is not planning within the session's time-out; it is named.
        """
        self._send(step, {rank: outgoing.get(rank, empty) for rank in among})
        return self._take(step, among)

    def _send(self, step: str, outgoing: Mapping[int, Sequence[Array]]) -> None:
        """Send arrays by rank, and return when they are there."""
        topology = self._session.topology
        # Beginning with the next rank, so that not all send to the same one first.
        order = sorted(outgoing, key=lambda rank: (rank - topology.rank) % topology.world_size)
        name = f"{self._job} {topology.rank} {step}"
        sent = [
            self._session.rpc.submit(rank, self._op, name, list(outgoing[rank]), phase=PLAN) for rank in order
        ]
        for call in sent:
            call.result()

    def _take(self, step: str, ranks: Collection[int]) -> dict[int, list[Array]]:
        """Wait for what each of ``ranks`` sent in ``step``, and return it by rank."""
        deadline = time.monotonic() + self._session.timeout_s
        while missing := self._box.missing(step, ranks, _CHECK_EVERY_S):
            self._check(step, missing, late=time.monotonic() >= deadline)
            if time.monotonic() >= deadline:
                deadline = time.monotonic() + self._session.timeout_s
        return self._box.pop(step, ranks)

    def _check(self, step: str, missing: list[int], *, late: bool) -> None:
        """Raise what came of the ranks ``missing``; who is late but at work on this job has more time."""
        session, what = self._session, f"{step!r} of plan {self._job}"
        if (failure := self._box.failure()) is not None:
            who = f"rank {failure[0]} on {session.hosts[failure[0]]}"
            raise FailedElsewhereError(f"{who} could not make its plan: {failure[1]}")
        reported = session.store.first_failure() if session.store is not None else None
        if reported is not None and reported[0] in missing:
            raise PeerError(f"rank {reported[0]} failed before it sent {what}: {reported[1]}")
        session.raise_for_dead(missing, what)
        absent = [rank for rank in missing if late and self._job_of(rank) != self._job]
        if absent:
            names = ", ".join(f"rank {rank} on {session.hosts[rank]}" for rank in absent)
            raise PeerError(
                f"{names} did not come to {what} within {session.timeout_s:g} s; every rank must make its "
                "loaders alike, or raise timeout_s (DGLX_TIMEOUT)"
            )

    def _job_of(self, rank: int) -> int:
        (job,) = self._session.rpc.call(rank, self._busy, "", [], phase="control")
        return int(job[0])

    def _tell_failure(self, error: Exception) -> None:
        """Let the others end the job too; who is dead or hangs is not waited for."""
        topology, told = self._session.topology, []
        text = np.frombuffer(f"{type(error).__name__}: {error}".encode()[:2000], dtype=np.uint8)
        name = f"{self._job} {topology.rank} {_FAILED}"
        for rank in range(topology.world_size):
            with contextlib.suppress(PeerError, RemoteError):
                if rank != topology.rank:
                    told.append(self._session.rpc.submit(rank, self._op, name, [text], phase="control"))
        for call in told:
            with contextlib.suppress(PeerError, RemoteError):
                call.result(_TELL_S)


@final
class _Box:
    """What arrived, by job, step and rank; any thread."""

    def __init__(self) -> None:
        self.job = 0
        """At which this rank is; 0 while it is at none."""
        self._first_job = 0
        self._arrived: dict[tuple[int, str], dict[int, list[Array]]] = {}
        self._changed = threading.Condition()

    def put(self, job: int, source: int, step: str, arrays: Sequence[Array]) -> None:
        with self._changed:
            if job >= self._first_job:
                self._arrived.setdefault((job, step), {})[source] = list(arrays)
                self._changed.notify_all()

    def begin(self, job: int) -> None:
        """Drop what is left of earlier jobs."""
        with self._changed:
            self.job = self._first_job = job
            self._arrived = {key: value for key, value in self._arrived.items() if key[0] >= job}

    def end(self) -> None:
        self.job = 0

    def missing(self, step: str, ranks: Collection[int], timeout_s: float) -> list[int]:
        """Wait until all are there, one failed, or for ``timeout_s``; return the ranks that are missing."""
        key = (self._first_job, step)

        def ready() -> bool:
            return not (set(ranks) - self._arrived.get(key, {}).keys()) or self.failure() is not None

        with self._changed:
            self._changed.wait_for(ready, timeout_s)
            return sorted(set(ranks) - self._arrived.get(key, {}).keys())

    def pop(self, step: str, ranks: Collection[int]) -> dict[int, list[Array]]:
        with self._changed:
            arrived = self._arrived.pop((self._first_job, step), {})
            return {rank: arrived[rank] for rank in sorted(ranks)}

    def failure(self) -> tuple[int, str] | None:
        """Return the lowest rank that failed in this job, and why."""
        failed = self._arrived.get((self._first_job, _FAILED), {})
        if not failed:
            return None
        rank = min(failed)
        return rank, failed[rank][0].tobytes().decode(errors="replace")
