"""The controller: sends a graph server's tasks to workers, resends lost and late ones, tunes their number.

The graph server decides which rows it accepts, half by half. For the controller a task is done when all rows
of one attempt have arrived; later attempts are duplicates.
"""

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.strategies.serverless.cost import Counts, PriceTable, billed_gb_seconds
from dglx_dist.strategies.serverless.executors.base import Executor
from dglx_dist.strategies.serverless.tasks import Direction, Task, TaskKey

MOST_WORKERS = 100
WORKER_BYTES_PER_S = 25e6
"""200 Mbit/s: the share of a server's network per function, with 100 functions."""
_LEAST_POWER = 1 / 16
_USUAL_FACTOR, _USUAL_KEEP = 5.0, 0.95
"""A time-out is so many moving averages, in which the past has this weight."""
_FIRST_S = 10.0
"""Time-out before the first task of a kind has finished, because workers may have to start and import."""
_LEAST_S = 0.5
"""Least time-out after the first task."""
_MAX_BACKOFF = 8.0
"""Largest factor of the time-outs of further attempts."""
_TICK_S, _TUNE_S = 0.05, 1.0
"""Intervals of the check for deaths and time-outs, and of tuning."""
_JOIN_TIMEOUT_S = 5.0


def most_workers(intervals: int, link_bytes_per_s: float | None = None) -> int:
    """Return the largest useful number of workers, in [1, 100], on a network of this rate."""
    network = math.inf if link_bytes_per_s is None else link_bytes_per_s / WORKER_BYTES_PER_S
    return int(max(1, min(intervals, MOST_WORKERS, network)))


@final
class Autotuner:
    """Adapts the number of workers to the trend of the graph server's task queue; it starts at ``most``.

    A growing queue means that workers produce more than the server's cores process: fewer workers. An empty
    or quickly shrinking queue means that cores wait: more workers. The number is halved or doubled at first.
    Each change of direction takes the root of the factor and three steps in one direction square it, so the
    number settles where both sides keep up, and still follows a change.
    """

    def __init__(self, most: int) -> None:
        self._most = self.workers = most
        """Current number of workers."""
        self._power = 1.0
        self._last: float | None = None
        self._direction, self._num_same = 0, 0

    def observe(self, queue: float) -> int:
        """Take the length of the queue >= 0, at regular intervals; return the number of workers."""
        before, self._last = self._last, queue
        direction = 0 if before is None else self._trend(before, queue)
        if direction:
            self._adapt_step(direction)
            target = round(self.workers * 2.0 ** (direction * self._power))
            moved = max(target, self.workers + 1) if direction > 0 else min(target, self.workers - 1)
            self.workers = min(max(moved, 1), self._most)
        return self.workers

    def _trend(self, before: float, queue: float) -> int:
        # -1 for fewer workers, 1 for more. In a full pipeline the queue varies by a tenth of the workers.
        noise = max(1.0, self.workers / 10)
        if queue - before > noise:
            return -1
        shrinks_fast = before - queue > max(noise, queue)
        return 1 if queue == 0 or shrinks_fast else 0

    def _adapt_step(self, direction: int) -> None:
        if self._direction and direction != self._direction:
            self._power = max(_LEAST_POWER, self._power / 2)
            self._num_same = 0
        self._num_same += 1
        if self._num_same > 3:
            self._power = min(2 * self._power, 1.0)
            self._num_same = 1
        self._direction = direction


def _timeout_s(average_s: float | None, attempt: int) -> float:
    # Each further attempt has twice the time: if the machine is slow and the worker alive, relaunching slows
    # it down further.
    usual = _FIRST_S if average_s is None else max(_LEAST_S, _USUAL_FACTOR * average_s)
    return usual * min(2.0**attempt, _MAX_BACKOFF)


@dataclass
class _Pending:
    task: Task
    """Newest attempt."""
    order: int
    ready: float | None = None
    """When its rows became ready."""
    sent: dict[int, float] = field(default_factory=dict)
    """Time at which each attempt was sent."""


@final
class Controller:
    """Sends tasks to an executor: ready ones first, then the oldest epoch, then as launched. Thread-safe.

    At most ``workers`` tasks run, and at most ``workers`` - 1 of them are not ready. One worker is always
    free for tasks that others wait for, which excludes deadlock.

    Call :meth:`launch` when the preceding task *starts*, so that a worker is up when the rows are ready, and
    :meth:`ready` when they are. The executor belongs to the caller, whose ``notice`` may call :meth:`wake`.
    ``observer`` is called with the key of each finished task and the times, by ``clock``, when its attempt
    was sent, when its rows became ready, and now; on the thread that calls :meth:`finish`.

    Args:
        most: Upper bound of a tuned number of workers; see :func:`most_workers`.
        workers: Maximum number of running tasks; 0: tuned, starting at ``most``.
        retries: Further attempts at one task before the run fails.
        prices: Defines how billed durations are rounded.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        most: int,
        workers: int = 0,
        retries: int,
        prices: PriceTable,
        clock: Callable[[], float] = time.monotonic,
        observer: Callable[[TaskKey, float, float, float], None] | None = None,
    ) -> None:
        self._executor = executor
        self._retries = retries
        self._prices = prices
        self._clock, self._observer = clock, observer
        self._tuner = None if workers else Autotuner(most)
        self.workers = workers or most
        """Current maximum number of running tasks."""
        self._pending: dict[TaskKey, _Pending] = {}
        self._running: dict[TaskKey, _Pending] = {}
        """Tasks whose newest attempt is sent."""
        self._order = itertools.count()
        self._heap: list[tuple[bool, int, int, TaskKey]] = []
        """Whether not ready, epoch, order, key. Entries of tasks that are done, running or now ready stay."""
        self._averages: dict[tuple[int, Direction], float] = {}
        """Moving average of the durations of each kind of task (step, direction)."""
        self._queue: Callable[[], float] | None = None
        self._tuned = clock()
        self._counts = Counts()
        self._lock = threading.Lock()
        self._awake = threading.Event()
        self._stopped = threading.Event()
        self._failure: DglxError | None = None
        executor.size(self.workers)

    @property
    def counts(self) -> Counts:
        with self._lock:
            return self._counts

    def watch(self, queue: Callable[[], float]) -> None:
        """Tune the number of workers by ``queue()``, the length of the graph server's queue."""
        self._queue = queue

    def launch(self, task: Task, *, ready: bool = False) -> None:
        """Send ``task`` as soon as a worker is free; DglxError if the executor rejects it."""
        with self._lock:
            if task.key in self._pending:
                raise ConfigError(f"task {task.key} was already launched; launch each task once")
            work = _Pending(task, next(self._order), ready=self._clock() if ready else None)
            self._pending[task.key] = work
            self._enqueue(work)
        self._send()

    def ready(self, key: TaskKey) -> None:
        """Note that the rows of ``key`` are ready, which starts its time-out; ignores tasks that are done."""
        with self._lock:
            work = self._pending.get(key)
            if work is None or work.ready is not None:
                return
            work.ready = self._clock()
            self._enqueue(work)
        self._send()

    def finish(self, key: TaskKey, attempt: int) -> bool:
        """Note that all rows of one attempt have arrived; return False for duplicates and unknown tasks."""
        now = self._clock()
        with self._lock:
            work = self._pending.pop(key, None)
            if work is None:
                self._counts += Counts(refused=1)
                return False
            self._running.pop(key, None)

            # Also for an attempt number that was never sent: the rows have arrived, so the task must not run
            # again because of a wrong number.
            sent = work.sent.get(attempt, now)
            ready = sent if work.ready is None else work.ready
            if attempt in work.sent:
                took = now - max(sent, ready)
                kind = (key.step, key.direction)
                before = self._averages.get(kind, took)
                self._averages[kind] = _USUAL_KEEP * before + (1 - _USUAL_KEEP) * took

        if self._observer is not None:
            self._observer(key, sent, ready, now)
        self._send()
        return True

    def tick(self) -> None:
        """Relaunch lost and late tasks, count finished invocations, tune the number of workers, send tasks.

        Raises PeerError if a task has used up its retries; other errors are the executor's.
        """
        self._count_ended()
        self._relaunch_lost()
        self._relaunch_late()
        self._tune()
        self._send()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Tick in a thread inside the context; :meth:`raise_if_failed` raises the thread's error."""
        self._stopped.clear()
        thread = threading.Thread(target=self._tick_until_stopped, name="lambda-controller", daemon=True)
        thread.start()

        try:
            yield
        finally:
            self._stopped.set()
            self._awake.set()
            thread.join(_JOIN_TIMEOUT_S)
            self._count_ended()

    def wake(self) -> None:
        """Make the thread of :meth:`run` tick now; returns at once."""
        self._awake.set()

    def raise_if_failed(self) -> None:
        """Raise the error that ended the thread of :meth:`run`, if any; see :meth:`tick`."""
        if self._failure is not None:
            raise self._failure

    def _tick_until_stopped(self) -> None:
        while True:
            self._awake.wait(_TICK_S)
            self._awake.clear()
            if self._stopped.is_set():
                return
            try:
                self.tick()
            except DglxError as error:
                self._failure = error
                return
            except Exception as error:  # noqa: BLE001 - raise_if_failed reports it
                self._failure = PeerError(
                    f"the controller of the workers stopped: {type(error).__name__}: {error}; this is a "
                    "bug in dglx_dist: report it, and resume from the last checkpoint"
                )
                self._failure.__cause__ = error
                return

    def _send(self) -> None:
        with self._lock:
            tasks = self._take()
            self._counts += Counts(invocations=len(tasks))
        # Outside the lock: an executor may run the task synchronously, which calls back.
        for task in tasks:
            self._executor.invoke(task)

    def _take(self) -> list[Task]:
        # Returns the tasks that may be sent now, and marks them as running.
        now = self._clock()
        tasks = list[Task]()
        while self._heap and len(self._running) < self.workers:
            is_early, _, _, key = self._heap[0]
            if is_early and self._num_early >= self.workers - 1:
                break
            heapq.heappop(self._heap)
            work = self._pending.get(key)
            if work is not None and key not in self._running and is_early is (work.ready is None):
                self._running[key] = work
                work.sent[work.task.attempt] = now
                tasks.append(work.task)

        return tasks

    def _enqueue(self, work: _Pending) -> None:
        key = work.task.key
        heapq.heappush(self._heap, (work.ready is None, key.epoch, work.order, key))

    @property
    def _num_early(self) -> int:
        return sum(work.ready is None for work in self._running.values())

    def _relaunch_lost(self) -> None:
        for lost in self._executor.take_lost():
            with self._lock:
                work = self._running.get(lost.key)
                if work is not None and lost.attempt == work.task.attempt:
                    self._counts += Counts(lost=1)
                    self._again(work, lost.reason)

    def _relaunch_late(self) -> None:
        with self._lock:
            now = self._clock()
            for work in list(self._running.values()):
                if work.ready is None:
                    continue
                took = now - max(work.sent[work.task.attempt], work.ready)
                average = self._averages.get((work.task.key.step, work.task.key.direction))
                allowed = _timeout_s(average, len(work.sent) - 1)
                if took > allowed:
                    self._again(work, f"it gave no rows for {took:.3g} s; the limit is {allowed:.3g} s")

    def _again(self, work: _Pending, reason: str) -> None:
        key = work.task.key
        if len(work.sent) > self._retries:
            raise PeerError(
                f"no worker did task {key} in {len(work.sent)} attempts; the last: {reason}. Check the "
                "workers' output, or allow more attempts with the option retries"
            )

        del self._running[key]
        work.task = work.task.again()
        self._enqueue(work)
        self._counts += Counts(relaunched=1)

    def _count_ended(self) -> None:
        for invocation in self._executor.take_billed():
            spent = billed_gb_seconds(invocation.duration_s, invocation.memory_mb, self._prices)
            with self._lock:
                self._counts += Counts(
                    cold=invocation.cold, warm=not invocation.cold, billed_s=invocation.duration_s, gb_s=spent
                )

    def _tune(self) -> None:
        now = self._clock()
        if self._tuner is None or self._queue is None or now - self._tuned < _TUNE_S:
            return
        self._tuned = now
        number = self._tuner.observe(self._queue())
        with self._lock:
            # Tasks that wait for rows keep their workers; one more must remain for what they wait for.
            number = max(number, self._num_early + 1)
            changed = number != self.workers
            self.workers = number

        if changed:
            self._executor.size(number)
