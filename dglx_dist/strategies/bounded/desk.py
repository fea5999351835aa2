"""Where workers pull the rows of a task and give what they computed: each half is taken once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.payload import Role, check_payload, half_rows, take_half
from dglx_dist.offload.tasks import Direction, TaskKey
from dglx_dist.offload.work import Work
from dglx_dist.records import Array


class Gift(Enum):
    """What became of a half that a worker gave."""

    TAKEN = "taken"
    LAST = "last"
    """Taken, and the task has both halves now: it is over."""
    AGAIN = "again"
    """Dropped: this half came before."""
    LATE = "late"
    """Dropped: the task is over."""

    @property
    def accepted(self) -> bool:
        """Whether the rows are used."""
        return self in (Gift.TAKEN, Gift.LAST)


@final
@dataclass(eq=False)
class _OpenTask:
    work: Work
    rows: int
    halves: tuple[list[Array], list[Array]]
    given: dict[int, Sequence[Array]] = field(default_factory=dict)


@final
class TaskDesk:
    """The tasks of one graph server that workers may take now. Thread-safe, and never blocks.

    Args:
        works: By step and direction, all that occur.
        order: Step and direction -> place in an epoch.
        intervals: Global numbers of this graph server's intervals.
        run: Number of the run in its session; no worker of another one is let near.
    """

    def __init__(
        self,
        works: dict[tuple[int, Direction], Work],
        order: dict[tuple[int, Direction], int],
        intervals: range,
        run: int = 0,
    ) -> None:
        self._works, self._order, self._intervals, self._run = works, order, intervals, run
        self._open: dict[TaskKey, _OpenTask] = {}
        self._over: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[TaskKey]:
        """Tasks that are open."""
        with self._lock:
            return sorted(self._open)

    def open(self, key: TaskKey, rows: int, arrays: Sequence[Array]) -> None:
        """Let workers take task ``key``; ``arrays`` are what its Work pulls, unchanged until it is over."""
        work = self._work(key)
        halves = tuple(take_half(work.pulled, arrays, rows, half) for half in (0, 1))
        with self._lock:
            self._open[key] = _OpenTask(work, rows, (halves[0], halves[1]))

    def pull(self, key: TaskKey, half: int) -> list[Array] | None:
        """Return what half 0 or 1 of a task pulls, None while its rows are not there yet.

        Raises:
            ConfigError: there is no such task here, or it is over.
        """
        self._work(key)
        with self._lock:
            task = self._open.get(key)
            if task is None and self._is_over(key):
                raise ConfigError(f"task {key} is over; the call comes from a worker that was given up")
        return None if task is None else task.halves[half]

    def give(self, key: TaskKey, half: int, arrays: Sequence[Array]) -> tuple[Gift, list[Sequence[Array]]]:
        """Take what a worker computed for half 0 or 1.

        Returns:
            What became of it, and when it was the last one the arrays of both halves, by half.

        Raises:
            ConfigError: there is no such task here, it has not begun, or the arrays are not what it gives.
        """
        work = self._work(key)
        with self._lock:
            task, refused = self._refused(key, half)
        if task is None or refused is not None:
            return refused or Gift.LATE, []
        nodes = half_rows(task.rows, half)
        edges = len(task.halves[half][0]) if _has_edges(work) else None
        check_payload(work.given, arrays, nodes.stop - nodes.start, f"what came of {key}", num_edges=edges)
        with self._lock:
            # Another attempt may have given the same meanwhile.
            _, refused = self._refused(key, half)
            if refused is not None:
                return refused, []
            task.given[half] = arrays
            if len(task.given) < 2:
                return Gift.TAKEN, []
            del self._open[key]
            self._over[key.interval] = key.epoch, self._order[key.step, key.direction]
        return Gift.LAST, [task.given[0], task.given[1]]

    def _refused(self, key: TaskKey, half: int) -> tuple[_OpenTask | None, Gift | None]:
        task = self._open.get(key)
        if task is not None:
            return task, Gift.AGAIN if half in task.given else None
        if not self._is_over(key):
            raise ConfigError(f"rows of task {key} came before it began")
        return None, Gift.LATE

    def _work(self, key: TaskKey) -> Work:
        key.check_run(self._run)
        if key.interval not in self._intervals:
            raise ConfigError(
                f"task {key} is of no interval from {self._intervals.start} to {self._intervals.stop - 1}, "
                "which this graph server has"
            )
        work = self._works.get((key.step, key.direction))
        if work is None:
            raise ConfigError(f"task {key}: no worker does step {key.step} in this direction here")
        return work

    def _is_over(self, key: TaskKey) -> bool:
        last = self._over.get(key.interval)
        return last is not None and (key.epoch, self._order[key.step, key.direction]) <= last


def _has_edges(work: Work) -> bool:
    return any(item.role is Role.SOURCES for item in work.pulled)
