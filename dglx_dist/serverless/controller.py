"""Sends a graph server's tasks to workers, and sends them again when a worker dies, hangs or is lost.

Which rows are taken is the graph server's to decide, half by half. Here a task is over by the first word of
all its rows, once; further ones are duplicates.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, final

from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.serverless.cost import PriceTable, Usage, billed_gb_seconds, prices
from dglx_dist.serverless.executors.base import Executor
from dglx_dist.serverless.tasks import Task, TaskKey

MOST_WORKERS = 100
WORKER_BYTES_PER_S = 25e6
"""200 Mbit/s: what one of 100 functions has left of a server's network."""
_LEAST_POWER = 1 / 16


@final
@dataclass(frozen=True, kw_only=True)
class TunerLimits:
    """What bounds the number of workers of one graph server.

    Raises:
        ConfigError: a number is not above 0.
    """

    intervals: int
    """Intervals of the graph server: more workers than work help nobody. 0 counts as 1."""
    link_bytes_per_s: float | None = None
    """What the server's network carries; None: it is no bound."""
    worker_bytes_per_s: float = WORKER_BYTES_PER_S
    """What one worker should have of it."""

    def __post_init__(self) -> None:
        if self.intervals < 0:
            raise ConfigError(f"there are {self.intervals} intervals; give at least 0")
        for name in ("link_bytes_per_s", "worker_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ConfigError(f"{name} is {rate}; give bytes per second above 0")

    @property
    def most(self) -> int:
        """Most workers that can be of use, in [1, 100]."""
        network = math.inf
        if self.link_bytes_per_s is not None:
            network = self.link_bytes_per_s / self.worker_bytes_per_s
        return int(max(1, min(self.intervals, MOST_WORKERS, network)))


@final
class Autotuner:
    """Moves the number of workers by the trend of the graph server's queue of tasks.

    A queue that grows says that workers give more than the server's cores take: fewer. One that is empty or
    shrinks fast says that the cores wait: more. Else the number stays. It is halved or doubled at first; each
    turn takes the root of the factor and three moves one way square it, so the number settles where both
    keep up, and still follows a change.

    Args:
        limits: Bounds; the number starts at the upper one, min(intervals, 100).
    """

    def __init__(self, limits: TunerLimits) -> None:
        self._most = limits.most
        self.workers = self._most
        """How many there should be now."""
        self._power = 1.0
        self._last: float | None = None
        self._way, self._same = 0, 0

    def observe(self, queue: float) -> int:
        """Take the length of the queue, at equal intervals of time; return the number of workers.

        Raises:
            ConfigError: the length is negative.
        """
        if not queue >= 0:
            raise ConfigError(f"a queue of {queue} tasks; give at least 0")
        before, self._last = self._last, queue
        # One length is no trend.
        way = 0 if before is None else self._judge(before, queue)
        if way:
            self._turn(way)
            target = round(self.workers * 2.0 ** (way * self._power))
            moved = max(target, self.workers + 1) if way > 0 else min(target, self.workers - 1)
            self.workers = min(max(moved, 1), self._most)
        return self.workers

    def _judge(self, before: float, queue: float) -> int:
        """Return -1 for fewer, 1 for more, 0 to stay."""
        # A tenth of the workers' tasks more or less is how a full pipeline breathes.
        noise = max(1.0, self.workers / 10)
        if queue - before > noise:
            return -1
        shrinks_fast = before - queue > max(noise, queue)
        return 1 if queue == 0 or shrinks_fast else 0

    def _turn(self, way: int) -> None:
        if self._way and way != self._way:
            self._power, self._same = max(_LEAST_POWER, self._power / 2), 0
        self._same += 1
        if self._same > 3:
            self._power, self._same = min(2 * self._power, 1.0), 1
        self._way = way


MAX_BACKOFF = 8.0


@final
@dataclass(frozen=True, kw_only=True)
class RelaunchRule:
    """Time-out = max(``least_s``, ``factor`` x moving average), more for further attempts.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    least_s: float = 0.5
    factor: float = 5.0
    keep: float = 0.95
    """Weight of the past in the moving average."""
    first_s: float = 10.0
    """Time-out while no worker of the kind has finished: it may have to start, and import."""
    retries: int = 8
    """How often one piece of work is launched again before the run gives up."""

    def __post_init__(self) -> None:
        if not (self.least_s > 0 and self.first_s > 0 and self.factor >= 1 and 0 <= self.keep < 1):
            raise ConfigError(
                f"{self} makes no time-out; give least_s and first_s above 0, a factor of at least 1 and "
                "keep in [0, 1)"
            )
        if self.retries < 0:
            raise ConfigError(f"retries is {self.retries}; give at least 0")


@final
class Durations:
    """Moving averages of how long each kind of work takes, and the time-outs that follow. Not thread-safe."""

    def __init__(self, rule: RelaunchRule) -> None:
        self._rule = rule
        self._average: dict[tuple[int, str], float] = {}

    def add(self, kind: tuple[int, str], seconds: float) -> None:
        """Count one piece of work of ``kind`` (step, direction) that took ``seconds``."""
        before, keep = self._average.get(kind), self._rule.keep
        self._average[kind] = seconds if before is None else keep * before + (1 - keep) * seconds

    def average(self, kind: tuple[int, str]) -> float | None:
        """Return the moving average in seconds; None before the first."""
        return self._average.get(kind)

    def timeout_s(self, kind: tuple[int, str], attempt: int = 0) -> float:
        """Return how long attempt 0, 1, ... at ``kind`` may take, in seconds.

        Each further attempt has twice the time, up to 8 times: where the machine is slow, and not the
        worker dead, launching again makes it slower still.
        """
        average, rule = self._average.get(kind), self._rule
        usual = rule.first_s if average is None else max(rule.least_s, rule.factor * average)
        return usual * min(2.0**attempt, MAX_BACKOFF)


_LEAST_PAUSE_S = 0.001


@final
@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """How tasks are sent.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    limits: TunerLimits
    """Bounds of the number of workers when it is tuned."""
    workers: int | None = None
    """Tasks under way at most; None: tuned by the queue of the graph server, from min(intervals, 100)."""
    batch: int = 1
    """Tasks that are sent together, while others are under way; fewer when one waits ``batch_wait_s``."""
    batch_wait_s: float = 0.005
    tick_s: float = 0.05
    """How often deaths and time-outs are looked for."""
    tune_s: float = 1.0
    """How often the queue is looked at."""
    relaunch: RelaunchRule = field(default_factory=RelaunchRule)
    prices: PriceTable = field(default_factory=prices)
    """Says how durations are rounded when they are billed."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"there are {self.workers} workers; give at least 1, or none to have it tuned")
        if self.batch < 1:
            raise ConfigError(f"batches of {self.batch} tasks; give at least 1")
        if not (self.batch_wait_s >= 0 and self.tick_s > 0 and self.tune_s > 0):
            raise ConfigError(f"{self} has a time below 0; give batch_wait_s >= 0, tick_s and tune_s > 0")

    @property
    def pause_s(self) -> float:
        """How often a controller is to tick: also often enough for a batch that does not get full."""
        return self.tick_s if self.batch == 1 else min(self.tick_s, max(self.batch_wait_s, _LEAST_PAUSE_S))


@final
@dataclass(frozen=True, kw_only=True)
class Counts:
    """What has happened so far."""

    invocations: int = 0
    """Tasks sent, each attempt once."""
    cold: int = 0
    """Invocations known to have ended for which a worker had to start first."""
    warm: int = 0
    """Those that found one."""
    relaunched: int = 0
    lost: int = 0
    """Of those launched again: workers known dead, not late."""
    refused: int = 0
    """Results that were duplicates."""
    billed_s: float = 0.0
    """Seconds of the invocations known to have ended, not rounded."""
    gb_s: float = 0.0
    """Their GB-seconds, each rounded up as the price table says."""

    @property
    def usage(self) -> Usage:
        """What is to be paid for."""
        return Usage(invocations=self.invocations, gb_seconds=self.gb_s, unknown=self.unbilled)

    @property
    def unbilled(self) -> int:
        """Invocations of which no duration is known: under way, killed, or not told by the provider."""
        return self.invocations - self.cold - self.warm


@final
@dataclass(frozen=True, kw_only=True)
class Finished:
    """One task that was done, for traces; times are those of the controller's clock, in seconds."""

    key: TaskKey
    attempt: int
    sent: float
    ready: float
    """When its rows could be pulled; before that the worker waited."""
    done: float


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
