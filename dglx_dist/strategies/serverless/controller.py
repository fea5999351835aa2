"""The controller sends a graph server's tasks to workers, and sends lost and late tasks again.

The controller also tunes how many workers there are. The graph server decides which rows it accepts, half by
half. For the controller a task is done when all rows from one attempt have arrived. Later attempts are
duplicates.
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

MAX_WORKERS = 100
WORKER_BYTES_PER_S = 25e6
"""Each function's share of a server's network with 100 functions: 200 Mbit/s, in bytes per second."""
_MIN_POWER = 1 / 16
_TIMEOUT_FACTOR = 5.0
"""The time-out is this factor times the moving average over durations."""
_WEIGHT_OF_PAST = 0.95
"""Weight of earlier durations in the moving average."""
_FIRST_TIMEOUT_S = 10.0
"""Time-out in seconds until the first task of a kind has finished. Workers may have to start and import."""
_MIN_TIMEOUT_S = 0.5
"""Least time-out in seconds after the first task."""
_MAX_BACKOFF = 8.0
"""Largest factor by which later attempts' time-outs grow."""
_TICK_S, _TUNE_S = 0.05, 1.0
"""Seconds between two checks for deaths and time-outs, and between two steps of tuning."""
_JOIN_TIMEOUT_S = 5.0


def most_workers(intervals: int, link_bytes_per_s: float | None = None) -> int:
    """Return how many workers are useful, from 1 to 100, on a network with this rate."""
    network = math.inf if link_bytes_per_s is None else link_bytes_per_s / WORKER_BYTES_PER_S
    return int(max(1, min(intervals, MAX_WORKERS, network)))


@final
class Autotuner:
    """Adapts the number of workers to how the graph server's task queue grows, beginning with ``most``.

    If the queue grows, workers produce more than the server's cores process, and their number falls. If the
    queue is empty or shrinks quickly, cores wait, and the number of workers rises. A change multiplies or
    divides the number by a factor, which is 2 at first. When the direction changes, the factor becomes its
    square root. After three steps in one direction it is squared. So the number settles where both sides keep
    up, and still follows a change.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.workers = most
        """Current number of workers."""
        self._power = 1.0
        """The next change multiplies or divides the number by 2 to this power."""
        self._last_length: float | None = None
        self._last_direction = 0
        self._num_same_direction = 0

    def observe(self, queue: float) -> int:
        """Return the number of workers for a queue with this length (>= 0). Call it at regular intervals."""
        last_length = self._last_length
        self._last_length = queue
        direction = 0
        if last_length is not None:
            direction = self._find_direction(last_length, queue)
        if direction == 0:
            return self.workers

        # The number changes by at least 1, even if the factor is so small that the product rounds to it.
        self._adapt_power(direction)
        target = round(self.workers * 2.0 ** (direction * self._power))
        if direction > 0:
            self.workers = min(max(target, self.workers + 1), self._most)
        else:
            self.workers = max(min(target, self.workers - 1), 1)
        return self.workers

    def _find_direction(self, last_length: float, length: float) -> int:
        """Return -1 if fewer workers are needed, 1 if more are needed, and 0 otherwise."""
        # In a full pipeline the length varies by about a tenth of the number of workers.
        noise = max(1.0, self.workers / 10)
        if length - last_length > noise:
            return -1
        shrinks_fast = last_length - length > max(noise, length)
        return 1 if length == 0 or shrinks_fast else 0

    def _adapt_power(self, direction: int) -> None:
        if direction == -self._last_direction:
            self._power = max(_MIN_POWER, self._power / 2)
            self._num_same_direction = 0
        self._num_same_direction += 1
        if self._num_same_direction > 3:
            self._power = min(2 * self._power, 1.0)
            self._num_same_direction = 1
        self._last_direction = direction


def _compute_timeout(average_s: float | None, attempt: int) -> float:
    """Return an attempt's time-out in seconds, where ``average_s`` is the usual duration, if known."""
    timeout_s = _FIRST_TIMEOUT_S
    if average_s is not None:
        timeout_s = max(_MIN_TIMEOUT_S, _TIMEOUT_FACTOR * average_s)
    # Each further attempt has twice the time. If a worker is alive on a slow machine, one more worker would
    # slow down the machine further.
    return timeout_s * min(2.0**attempt, _MAX_BACKOFF)


@dataclass
class _PendingTask:
    task: Task
    """Newest attempt."""
    order: int
    ready_at: float | None = None
    """Time at which the rows became ready, or None if they are not."""
    sent_at: dict[int, float] = field(default_factory=dict)
    """Time at which each attempt was sent."""

    @property
    def is_early(self) -> bool:
        """Whether the task's rows are not ready yet."""
        return self.ready_at is None

    def run_seconds(self, attempt: int, now: float) -> float:
        """Return how long ``attempt`` has had its rows. It must be sent, and its rows must be ready."""
        assert self.ready_at is not None
        return now - max(self.sent_at[attempt], self.ready_at)


@final
class Controller:
    """Sends tasks to an executor. Ready tasks go first, then the oldest epoch, then as launched. Thread-safe.

    At most ``workers`` tasks run, and at most ``workers`` - 1 among them are not ready. So one worker is
    always free for a task that others wait for, which excludes deadlock.

    Call :meth:`launch` when the preceding task *starts*, so that a worker is up when the rows are ready. Call
    :meth:`ready` when the rows are ready. The executor belongs to the caller, and its ``notice`` may call
    :meth:`wake`.

    Args:
        most: Upper bound on a tuned number of workers. See :func:`most_workers`.
        workers: Maximum number of running tasks. With 0 the number is tuned, starting at ``most``.
        retries: Number of further attempts at one task before the run fails.
        prices: Defines how billed durations are rounded.
        observer: Called on the thread that calls :meth:`finish`. It gets the finished task's key, and the
            times, by ``clock``, when its attempt was sent, when its rows became ready, and now.
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
        self._clock = clock
        self._observer = observer
        self._tuner = None if workers else Autotuner(most)
        self.workers = workers or most
        """Current maximum number of running tasks."""
        self._pending: dict[TaskKey, _PendingTask] = {}
        self._running: dict[TaskKey, _PendingTask] = {}
        """Pending tasks whose newest attempt has been sent."""
        self._launch_order = itertools.count()
        self._heap: list[tuple[bool, int, int, TaskKey]] = []
        """Entries (is early, epoch, order, key).

        Outdated entries stay. Their task is done, running, or ready by now.
        """
        self._average_s: dict[tuple[int, Direction], float] = {}
        """Moving average over durations, by step and direction."""
        self._measure_queue: Callable[[], float] | None = None
        self._tuned_at = clock()
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
        self._measure_queue = queue

    def launch(self, task: Task, *, ready: bool = False) -> None:
        """Send ``task`` as soon as a worker is free. Raises DglxError if the executor rejects it."""
        with self._lock:
            if task.key in self._pending:
                raise ConfigError(f"task {task.key} was already launched; launch each task once")
            ready_at = self._clock() if ready else None
            pending = _PendingTask(task, next(self._launch_order), ready_at)
            self._pending[task.key] = pending
            self._enqueue(pending)
        self._send()

    def ready(self, key: TaskKey) -> None:
        """Note that the rows for ``key`` are ready, which starts its time-out. Ignore tasks that are done."""
        with self._lock:
            pending = self._pending.get(key)
            if pending is None or not pending.is_early:
                return
            pending.ready_at = self._clock()
            self._enqueue(pending)
        self._send()

    def finish(self, key: TaskKey, attempt: int) -> bool:
        """Note that all rows from one attempt have arrived. Return False for duplicates and unknown tasks."""
        now = self._clock()
        with self._lock:
            # The task is over even if this attempt was never sent, because its rows have arrived.
            pending = self._pending.pop(key, None)
            if pending is None:
                self._counts += Counts(refused=1)
                return False
            self._running.pop(key, None)

            sent_at = pending.sent_at.get(attempt, now)
            if pending.ready_at is None:
                pending.ready_at = sent_at
            if attempt in pending.sent_at:
                step_and_direction = (key.step, key.direction)
                duration_s = pending.run_seconds(attempt, now)
                average_s = self._average_s.get(step_and_direction, duration_s)
                average_s = _WEIGHT_OF_PAST * average_s + (1 - _WEIGHT_OF_PAST) * duration_s
                self._average_s[step_and_direction] = average_s

        if self._observer is not None:
            self._observer(key, sent_at, pending.ready_at, now)
        self._send()
        return True

    def tick(self) -> None:
        """Relaunch lost and late tasks, count finished invocations, tune the number of workers, send tasks.

        Raises PeerError if a task has used up its retries, and other errors that the executor raises.
        """
        self._count_finished()
        self._relaunch_lost()
        self._relaunch_late()
        self._tune()
        self._send()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Tick in a thread inside the context. :meth:`raise_if_failed` raises the thread's error."""
        self._stopped.clear()
        thread = threading.Thread(target=self._tick_until_stopped, name="lambda-controller", daemon=True)
        thread.start()

        try:
            yield
        finally:
            self._stopped.set()
            self._awake.set()
            thread.join(_JOIN_TIMEOUT_S)
            self._count_finished()

    def wake(self) -> None:
        """Make the thread that :meth:`run` started tick now, and return at once."""
        self._awake.set()

    def raise_if_failed(self) -> None:
        """Raise the error that ended the thread that :meth:`run` started, if any. See :meth:`tick`."""
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
                # The error is raised in the thread that calls raise_if_failed.
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
        """Send all tasks that may be sent now."""
        with self._lock:
            tasks = self._take_tasks()
            self._counts += Counts(invocations=len(tasks))
        # The lock is free here, because an executor may run a task at once, which calls the controller.
        for task in tasks:
            self._executor.invoke(task)

    def _take_tasks(self) -> list[Task]:
        """Return the tasks that may be sent now, and mark them as running. The caller holds the lock."""
        now = self._clock()
        tasks = list[Task]()
        while self._heap and len(self._running) < self.workers:
            was_early, _, _, key = self._heap[0]
            if was_early and self._num_early >= self.workers - 1:
                break

            heapq.heappop(self._heap)
            pending = self._pending.get(key)
            if pending is None or key in self._running or pending.is_early != was_early:
                continue  # The entry is outdated.
            self._running[key] = pending
            pending.sent_at[pending.task.attempt] = now
            tasks.append(pending.task)
        return tasks

    def _enqueue(self, pending: _PendingTask) -> None:
        key = pending.task.key
        heapq.heappush(self._heap, (pending.is_early, key.epoch, pending.order, key))

    @property
    def _num_early(self) -> int:
        return sum(pending.is_early for pending in self._running.values())

    def _relaunch_lost(self) -> None:
        for lost in self._executor.take_lost():
            with self._lock:
                pending = self._running.get(lost.key)
                if pending is not None and lost.attempt == pending.task.attempt:
                    self._counts += Counts(lost=1)
                    self._relaunch(pending, lost.reason)

    def _relaunch_late(self) -> None:
        with self._lock:
            now = self._clock()
            for pending in list(self._running.values()):
                # An attempt's time begins when its rows are ready.
                if pending.is_early:
                    continue
                key = pending.task.key
                average_s = self._average_s.get((key.step, key.direction))
                limit_s = _compute_timeout(average_s, len(pending.sent_at) - 1)
                run_s = pending.run_seconds(pending.task.attempt, now)
                if run_s > limit_s:
                    self._relaunch(
                        pending, f"it gave no rows for {run_s:.3g} s; the limit is {limit_s:.3g} s"
                    )

    def _relaunch(self, pending: _PendingTask, reason: str) -> None:
        """Enqueue the next attempt. Raises PeerError with ``reason`` if all attempts are used up."""
        key = pending.task.key
        num_attempts = len(pending.sent_at)
        if num_attempts > self._retries:
            raise PeerError(
                f"no worker did task {key} in {num_attempts} attempts; the last: {reason}. "
                "Check the workers' output, or allow more attempts with the option retries"
            )

        del self._running[key]
        pending.task = pending.task.again()
        self._enqueue(pending)
        self._counts += Counts(relaunched=1)

    def _count_finished(self) -> None:
        for invocation in self._executor.take_billed():
            is_cold = invocation.cold
            duration_s = invocation.duration_s
            gb_s = billed_gb_seconds(duration_s, invocation.memory_mb, self._prices)
            with self._lock:
                self._counts += Counts(cold=is_cold, warm=not is_cold, billed_s=duration_s, gb_s=gb_s)

    def _tune(self) -> None:
        now = self._clock()
        if self._tuner is None or self._measure_queue is None or now - self._tuned_at < _TUNE_S:
            return

        self._tuned_at = now
        num_workers = self._tuner.observe(self._measure_queue())
        with self._lock:
            # Tasks that wait for rows keep their workers. One more worker must run the tasks before them.
            num_workers = max(num_workers, self._num_early + 1)
            has_changed = num_workers != self.workers
            self.workers = num_workers
        if has_changed:
            self._executor.size(num_workers)
