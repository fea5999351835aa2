"""Sends a graph server's tasks to workers, and sends them again when a worker dies, hangs or is lost.

Which rows are taken is the graph server's to decide, half by half. Here a task is over by the first word of
all its rows, once; further ones are duplicates.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import final

from dglx_dist.errors import DglxError, PeerError
from dglx_dist.offload.autotuner import Autotuner
from dglx_dist.offload.controller_records import ControllerOptions, Counts, Finished
from dglx_dist.offload.cost import billed_gb_seconds
from dglx_dist.offload.executors.base import Executor
from dglx_dist.offload.pending import PendingTasks, Work
from dglx_dist.offload.relaunch import Durations
from dglx_dist.offload.tasks import Task, TaskKey

_ENDS_WITHIN_S = 5.0


@final
class Controller:
    """Sends tasks to an executor, at most ``workers`` at a time, oldest epoch first. Thread-safe.

    Call :meth:`launch` when the task before *starts*, so that a worker is up when the rows are, and
    :meth:`ready` when they are. The executor is made and closed by its owner, who may have its context's
    ``notice`` call :meth:`wake`.

    Args:
        executor: Where tasks run.
        options: How.
        clock: Seconds, never going back.
        observer: Told of each task done, on the thread that calls :meth:`finished`.
    """

    def __init__(
        self,
        executor: Executor,
        options: ControllerOptions,
        clock: Callable[[], float] = time.monotonic,
        observer: Callable[[Finished], None] | None = None,
    ) -> None:
        self._executor, self._options, self._clock, self._observer = executor, options, clock, observer
        self._tuner = Autotuner(options.limits) if options.workers is None else None
        self._pending = PendingTasks(options.workers or options.limits.most)
        self._durations = Durations(options.relaunch)
        self._queue: Callable[[], float] | None = None
        self._tuned = clock()
        self._counts = Counts()
        self._lock, self._ticking = threading.Lock(), threading.Lock()
        self._awake, self._stopped = threading.Event(), threading.Event()
        self._failure: DglxError | None = None
        executor.size(self._pending.workers)

    @property
    def counts(self) -> Counts:
        """What has happened so far."""
        with self._lock:
            return self._counts

    @property
    def workers(self) -> int:
        """Tasks under way at most, now."""
        with self._lock:
            return self._pending.workers

    @property
    def waiting(self) -> int:
        """Tasks launched here and not sent."""
        with self._lock:
            return self._pending.num_waiting

    @property
    def under_way(self) -> int:
        """Tasks sent and not done."""
        with self._lock:
            return self._pending.num_out

    def watch(self, queue: Callable[[], float]) -> None:
        """Tune the number of workers by ``queue()``, the length of the graph server's own queue of tasks."""
        self._queue = queue

    def launch(self, task: Task, *, ready: bool = False) -> None:
        """Send ``task`` as soon as a worker is free.

        Args:
            task: Its key must not be under way.
            ready: Whether its rows can be pulled already.

        Raises:
            ConfigError: its key is here already, or the executor cannot work.
            PeerError: the executor cannot work any more.
        """
        with self._lock:
            self._pending.add(task, self._clock(), ready=ready)
        self._send()

    def ready(self, key: TaskKey) -> None:
        """Say that the rows of ``key`` can be pulled: from now on its worker may take the usual time only.

        A task that is done, unknown or ready already is ignored.

        Raises:
            ConfigError, PeerError: as :meth:`launch`.
        """
        with self._lock:
            work = self._pending.get(key)
            if work is None or work.ready is not None:
                return
            self._pending.mark_ready(work, self._clock())
        self._send()

    def finished(self, key: TaskKey, attempt: int) -> bool:
        """Say that all rows of one attempt at ``key`` are there.

        Returns:
            Whether they are the first; else they are a duplicate, or of a task that was never launched.

        Raises:
            ConfigError, PeerError: as :meth:`launch`.
        """
        now = self._clock()
        with self._lock:
            work = self._pending.get(key)
            if work is None:
                self._count(refused=1)
                return False
            self._pending.remove(key)
            # By an attempt that was never sent, too: the rows are there, and a wrong number must not have the
            # task done again, which is over.
            sent = work.sent.get(attempt, now)
            ready = sent if work.ready is None else work.ready
            if attempt in work.sent:
                self._durations.add(_kind(key), now - max(sent, ready))
        if self._observer is not None:
            self._observer(Finished(key=key, attempt=attempt, sent=sent, ready=ready, done=now))
        self._send()
        return True

    def tick(self) -> None:
        """Launch again what is lost or late, count what ended, tune the number of workers, send what waits.

        Raises:
            PeerError: a task was launched again as often as allowed; or the executor cannot work any more.
            ConfigError: the executor cannot work.
        """
        # One at a time: what the executor tells, it tells once.
        with self._ticking:
            self._count_ended()
            self._relaunch_lost()
            self._relaunch_late()
            self._tune()
        self._send()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Tick in a thread of its own until left; what it raises, :meth:`raise_if_failed` raises."""
        self._stopped.clear()
        thread = threading.Thread(target=self._beat, name="lambda-controller", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._awake.set()
            thread.join(_ENDS_WITHIN_S)
            self._count_ended()

    def wake(self) -> None:
        """Have the thread of :meth:`run` tick now; any thread, returns at once."""
        self._awake.set()

    def raise_if_failed(self) -> None:
        """Raise what ended the thread of :meth:`run`, if something did.

        Raises:
            PeerError, ConfigError: as :meth:`tick`.
        """
        if self._failure is not None:
            raise self._failure

    def _beat(self) -> None:
        while True:
            self._awake.wait(self._options.pause_s)
            self._awake.clear()
            if self._stopped.is_set():
                return
            try:
                self.tick()
            except DglxError as error:
                self._failure = error
                return
            except Exception as error:  # noqa: BLE001 - nothing would be launched again, and nobody know why
                self._failure = PeerError(
                    f"the controller of the workers stopped: {type(error).__name__}: {error}; this is a "
                    "mistake in dglx_dist: go on from the last checkpoint, and report it"
                )
                self._failure.__cause__ = error
                return

    def _send(self) -> None:
        with self._lock:
            taken = [] if self._holds_back() else list(self._pending.take(self._clock()))
            self._count(invocations=len(taken))
        # Outside the lock: an executor may run a task here and now, and that calls back.
        for task in taken:
            self._executor.invoke(task.to_event())

    def _holds_back(self) -> bool:
        """Whether a batch is not full yet, nothing has waited long, and there is other work under way."""
        pending, options = self._pending, self._options
        if options.batch == 1 or pending.num_out == 0 or pending.num_waiting >= options.batch:
            return False
        return pending.longest_wait_s(self._clock()) < options.batch_wait_s

    def _relaunch_lost(self) -> None:
        for one in self._executor.lost():
            with self._lock:
                work = self._pending.get(one.key)
                if work is not None and work.out and one.attempt == work.task.attempt:
                    self._count(lost=1)
                    self._again(work, one.reason)

    def _relaunch_late(self) -> None:
        with self._lock:
            now = self._clock()
            for work in self._pending.late_candidates():
                took = now - max(work.sent[work.task.attempt], work.ready or 0.0)
                allowed = self._durations.timeout_s(_kind(work.task.key), len(work.sent) - 1)
                if took > allowed:
                    self._again(work, f"it gave no rows for {took:.3g} s, where {allowed:.3g} s are allowed")

    def _again(self, work: Work, reason: str) -> None:
        key, rule = work.task.key, self._options.relaunch
        if len(work.sent) > rule.retries:
            raise PeerError(
                f"no worker did task {key} in {len(work.sent)} attempts; the last: {reason}. See what the "
                "workers say, or allow more attempts with the option retries"
            )
        self._pending.again(work, self._clock())
        self._count(relaunched=1)

    def _count_ended(self) -> None:
        for one in self._executor.billed():
            spent = billed_gb_seconds(one.duration_s, one.memory_mb, self._options.prices)
            with self._lock:
                self._count(cold=one.cold, warm=not one.cold, billed_s=one.duration_s, gb_s=spent)

    def _tune(self) -> None:
        now = self._clock()
        if self._tuner is None or self._queue is None or now - self._tuned < self._options.tune_s:
            return
        self._tuned = now
        number = self._tuner.observe(self._queue())
        with self._lock:
            # Who waits for rows keeps a place. Were all places theirs, what they wait for would get none.
            number = max(number, self._pending.num_early_out + 1)
            changed, self._pending.workers = number != self._pending.workers, number
        if changed:
            self._executor.size(number)

    def _count(self, **more: float) -> None:
        now = self._counts
        self._counts = replace(now, **{name: getattr(now, name) + one for name, one in more.items()})


def _kind(key: TaskKey) -> tuple[int, str]:
    return key.step, key.direction.value
