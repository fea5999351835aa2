"""Tasks that are not done: which goes next, and which attempts at each are under way."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.tasks import Task, TaskKey

_Heap: TypeAlias = list[tuple[int, int, TaskKey]]
"""Epoch, turn, key."""


@dataclass
class Work:
    """A task that is not done."""

    task: Task
    """Its newest attempt."""
    turn: int
    queued: float
    ready: float | None = None
    """When its rows could be pulled."""
    sent: dict[int, float] = field(default_factory=dict)
    """When each attempt was sent."""
    out: bool = False
    """Whether the newest attempt is under way."""


@final
class PendingTasks:
    """Oldest epoch first, then in the order of launch; those that are ready before those that are not.

    At most ``workers`` are under way, of which at most ``workers`` - 1 are not ready: one worker is always
    left to those that the others may wait for, so nothing can lock up. Not thread-safe.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._work: dict[TaskKey, Work] = {}
        self._turns = itertools.count()
        # Entries of work that is done, sent or in the other heap by now are skipped when they come up.
        self._ready: _Heap = []
        self._early: _Heap = []
        self._num_ready_out = 0
        self.num_early_out = 0
        """Tasks under way whose rows cannot be pulled yet."""

    @property
    def num_out(self) -> int:
        """Tasks under way."""
        return self._num_ready_out + self.num_early_out

    @property
    def num_waiting(self) -> int:
        """Tasks that wait to be sent."""
        return len(self._work) - self.num_out

    def get(self, key: TaskKey) -> Work | None:
        """Return the work with ``key``; None where it is done or was never launched."""
        return self._work.get(key)

    def late_candidates(self) -> list[Work]:
        """Return the work that is ready and under way."""
        return [work for work in self._work.values() if work.out and work.ready is not None]

    def longest_wait_s(self, now: float) -> float:
        """Return for how long something has waited to be sent; 0 where nothing does."""
        return max((now - work.queued for work in self._work.values() if not work.out), default=0.0)

    def add(self, task: Task, now: float, *, ready: bool) -> None:
        """Take a new task.

        Raises:
            ConfigError: its key is here already.
        """
        if task.key in self._work:
            raise ConfigError(f"task {task.key} is launched already; each task is launched once")
        work = Work(task=task, turn=next(self._turns), queued=now, ready=now if ready else None)
        self._work[task.key] = work
        self._enqueue(work)

    def mark_ready(self, work: Work, now: float) -> None:
        """Note that the rows of ``work`` can be pulled from now on."""
        work.ready = now
        if work.out:
            self.num_early_out -= 1
            self._num_ready_out += 1
        else:
            self._enqueue(work)

    def take(self, now: float) -> Iterator[Task]:
        """Move what may be sent now to "under way", and yield it."""
        while (work := self._next()) is not None:
            work.out = True
            work.sent[work.task.attempt] = now
            if work.ready is not None:
                self._num_ready_out += 1
            else:
                self.num_early_out += 1
            yield work.task

    def again(self, work: Work, now: float) -> None:
        """Have ``work``, which is under way, sent once more."""
        self._free(work)
        work.task, work.queued = work.task.again(), now
        self._enqueue(work)

    def remove(self, key: TaskKey) -> None:
        """Forget what is done."""
        self._free(self._work.pop(key))

    def _next(self) -> Work | None:
        if self.num_out >= self.workers:
            return None
        found = self._pop(self._ready, ready=True)
        if found is None and self.num_early_out < self.workers - 1:
            found = self._pop(self._early, ready=False)
        return found

    def _pop(self, heap: _Heap, *, ready: bool) -> Work | None:
        while heap:
            work = self._work.get(heapq.heappop(heap)[2])
            if work is not None and not work.out and (work.ready is not None) is ready:
                return work
        return None

    def _enqueue(self, work: Work) -> None:
        heap = self._early if work.ready is None else self._ready
        heapq.heappush(heap, (work.task.key.epoch, work.turn, work.task.key))

    def _free(self, work: Work) -> None:
        if work.out and work.ready is not None:
            self._num_ready_out -= 1
        elif work.out:
            self.num_early_out -= 1
        work.out = False
