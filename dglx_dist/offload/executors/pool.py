"""Threads that each have one worker: as many as there is work for, and no more than allowed."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.offload.executors.base import Invocation, Lost
from dglx_dist.offload.executors.faults import Faults
from dglx_dist.offload.executors.latency import Latency
from dglx_dist.offload.tasks import Task
from dglx_dist.offload.worker.answer import WorkerAnswer
from dglx_dist.offload.worker.faults import Fault

log = logging.getLogger(__name__)

_END_S = 10.0


class Hand(ABC):
    """One worker, seen from its thread. :meth:`stop` is for any thread, the others for one."""

    @abstractmethod
    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer | None:
        """Have the worker do a task and wait for its end; None: somebody took it and tells nothing more.

        Raises:
            DglxError: the worker died, or failed; the next call starts another one where it died.
        """

    @abstractmethod
    def stop(self) -> None:
        """Make :meth:`invoke` end now, and end the worker; may be called twice."""

    @abstractmethod
    def end(self) -> None:
        """Stop, and give everything back; nothing is called after it but :meth:`stop`."""


@final
@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """What a pool is made of."""

    make: Callable[[], Hand]
    """Called on the thread that will have it; raises nothing: what can go wrong goes wrong in its invoke."""
    notice: Callable[[], None]
    memory_mb: int
    billed: bool = True
    """Whether invocations are told of; False: nobody would bill them."""
    faults: Faults | None = None
    latency: Latency | None = None
    """Of invocations in which nothing goes wrong."""


@final
class Pool:
    """Takes events in order; a worker that is up is used before one is started.

    A worker whose task is sent again is late: it may hang for ever, so its place is another's from then on.
    As many as there are places may be late at once; who comes back goes where all places are taken.
    """

    def __init__(self, plan: PoolPlan) -> None:
        self._plan = plan
        self._changed = threading.Condition()
        self._events: deque[tuple[Task, bytes, Fault | None]] = deque()
        self._size, self._closed = 1, False
        self._idle, self._starting = 0, 0
        self._threads: dict[threading.Thread, Hand | None] = {}
        self._leaving: set[threading.Thread] = set()
        self._busy: dict[threading.Thread, Task] = {}
        self._late: set[threading.Thread] = set()
        self._lost: list[Lost] = []
        self._billed: list[Invocation] = []

    @property
    def workers(self) -> int:
        """Threads that are up and take events."""
        with self._changed:
            return self._num_up

    def invoke(self, event: bytes) -> None:
        """See Executor."""
        task = Task.from_event(event)
        fault, times = (self._plan.faults or Faults()).draw(task.key, task.attempt)
        if fault is None and self._plan.latency is not None:
            fault = self._plan.latency.draw(task.key, task.attempt)
        with self._changed:
            if self._closed:
                raise PeerError(f"the executor is closed; task {task.key} came too late")
            self._note_late(task)
            self._events.extend([(task, event, fault)] * times)
            self._start_threads()
            self._changed.notify_all()

    def size(self, workers: int) -> None:
        """See Executor."""
        if workers < 1:
            raise ConfigError(f"{workers} workers do no work; give at least 1")
        with self._changed:
            self._size = workers
            self._start_threads()
            self._changed.notify_all()

    def lost(self) -> list[Lost]:
        """See Executor."""
        with self._changed:
            found, self._lost = self._lost, []
            return found

    def billed(self) -> list[Invocation]:
        """See Executor."""
        with self._changed:
            found, self._billed = self._billed, []
            return found

    def close(self) -> None:
        """See Executor. Warns of a worker that does not end."""
        with self._changed:
            self._closed = True
            self._events.clear()
            threads = dict(self._threads)
            self._changed.notify_all()
        for hand in threads.values():
            if hand is not None:
                hand.stop()
        deadline = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                log.warning("%s did not end within %g s of the executor's", thread.name, _END_S)

    @property
    def _num_up(self) -> int:
        """Threads that hold a place; the lock is held."""
        return len(self._threads) - len(self._leaving) - len(self._late)

    def _note_late(self, again: Task) -> None:
        """Note who is still at an earlier attempt of the task ``again``; the lock is held."""
        for thread, task in self._busy.items():
            if task.key == again.key and task.attempt < again.attempt and len(self._late) < self._size:
                self._late.add(thread)

    def _start_threads(self) -> None:
        """Start what the waiting events need; the lock is held."""
        missing = min(len(self._events) - self._idle - self._starting, self._size - self._num_up)
        for _ in range(missing if not self._closed else 0):
            thread = threading.Thread(target=self._run, name="dglx-worker", daemon=True)
            self._threads[thread] = None
            self._starting += 1
            thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        hand = self._plan.make()
        with self._changed:
            self._threads[me] = hand
            self._starting -= 1
        try:
            while (found := self._next()) is not None:
                self._invoke(hand, *found)
        finally:
            hand.end()
            with self._changed:
                self._threads.pop(me)
                self._leaving.discard(me)

    def _next(self) -> tuple[Task, bytes, Fault | None] | None:
        with self._changed:
            self._free()
            self._idle += 1
            try:
                while not self._events and not self._closed and not self._are_too_many():
                    self._changed.wait()
            finally:
                self._idle -= 1
            if self._closed or self._are_too_many():
                # The others decide by the number of threads, too: this one counts no longer.
                self._leaving.add(threading.current_thread())
                return None
            found = self._events.popleft()
            self._busy[threading.current_thread()] = found[0]
            return found

    def _are_too_many(self) -> bool:
        return self._num_up > self._size

    def _free(self) -> None:
        """This thread has no task; the lock is held."""
        me = threading.current_thread()
        self._busy.pop(me, None)
        self._late.discard(me)

    def _invoke(self, hand: Hand, task: Task, event: bytes, fault: Fault | None) -> None:
        started = time.monotonic()
        try:
            answer = hand.invoke(event, fault)
        except Exception as error:  # noqa: BLE001 - whoever waits for the task must hear of it
            took_s = time.monotonic() - started
            reason = str(error) if isinstance(error, DglxError) else f"{type(error).__name__}: {error}"
            # Who was killed is billed, too, as far as it came.
            self._tell(Invocation(duration_s=took_s, cold=False, memory_mb=self._plan.memory_mb), None)
            self._tell(None, Lost(key=task.key, attempt=task.attempt, reason=reason))
            return
        if answer is None:
            return
        self._tell(
            Invocation(duration_s=answer.seconds, cold=answer.cold, memory_mb=self._plan.memory_mb), None
        )
        if answer.error:
            self._tell(None, Lost(key=task.key, attempt=task.attempt, reason=answer.error))

    def _tell(self, invocation: Invocation | None, lost: Lost | None) -> None:
        with self._changed:
            # First of all: the task may be sent again because of what is told here.
            self._free()
            if invocation is not None and self._plan.billed:
                self._billed.append(invocation)
            if lost is None or self._closed:
                return
            self._lost.append(lost)
        self._plan.notice()
