"""Executor interface, its base with a pool of worker threads, and emulated faults and latency."""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from types import TracebackType
from typing import Annotated, ClassVar, TypeAlias, final

from dglx_dist.comm.rpc import Handler
from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.registry import Registry
from dglx_dist.serverless.json_fields import Fields, Within
from dglx_dist.serverless.tasks import Task, TaskKey
from dglx_dist.serverless.worker import TaskPhase, WorkerAnswer
from dglx_dist.serverless.worker_process import MAX_SECONDS, Fault

_ANY = "any"
_Share: TypeAlias = Annotated[float, Within(0, 1)]
DEFAULT_MEMORY_MB, MAX_MEMORY_MB = 192, 1 << 20
DEFAULT_SIGMA = 0.5
"""Standard deviation of the logarithm that is typical of functions."""
_MAX_SIGMA = 3.0
log = logging.getLogger(__name__)
_END_S = 10.0


@final
@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """What a graph server provides to its executor."""

    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Where the executor may create a folder of its own, which it removes when it is closed."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """The user's own stages: name to ``module:Class``."""
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    """Handlers of a worker's operations, for executors in this process."""
    notice: Callable[[], None] = lambda: None
    """Called on any thread when :meth:`Executor.lost` has something new; must return quickly."""


@final
@dataclass(frozen=True, kw_only=True)
class Lost:
    """One attempt that failed."""

    key: TaskKey
    attempt: int
    reason: str


@final
@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One finished call of a worker, as a functions service bills it."""

    duration_s: float
    cold: bool
    """Whether a worker had to start for it."""
    memory_mb: int


class Executor(ABC):
    """Runs tasks on workers. Thread-safe.

    Results bypass the executor: a worker sends its rows to the graph server and its gradients to the
    parameter server. An executor may therefore lose an attempt silently; the caller watches the time.

    Raises:
        ConfigError: an option is unknown, or this machine does not support it.
    """

    simulated: bool = True
    """Whether no provider is paid, so that dollars are an estimate."""
    in_process: ClassVar[bool] = False
    """Whether workers are threads of this process and can import everything that it can."""
    option_names: ClassVar[tuple[str, ...]] = ()
    """All supported options; others are rejected before anything is opened."""

    @abstractmethod
    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None: ...

    @abstractmethod
    def invoke(self, event: bytes) -> None:
        """Start the task of ``event`` (``Task.to_event``) on a worker; returns at once.

        Raises PeerError if the executor is closed or cannot take the event.
        """

    @abstractmethod
    def size(self, workers: int) -> None:
        """Use at most ``workers`` >= 1 workers at the same time from now on."""

    @abstractmethod
    def lost(self) -> list[Lost]:
        """Return the attempts that failed since the last call, as far as known."""

    @abstractmethod
    def billed(self) -> list[Invocation]:
        """Return the invocations that ended since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Stop all workers at once, also in the middle of a task; may be called twice."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_memory_mb(fields: Fields) -> int:
    """Read the option ``memory_mb``, for the bill; 192 by default, as in the paper."""
    return fields.maybe("memory_mb", lambda name: fields.whole(name, 1, MAX_MEMORY_MB), DEFAULT_MEMORY_MB)


@final
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Injected faults, by share of the invocations."""

    seed: Annotated[int, Within(0, 1 << 62)] = 0
    kill: _Share = 0.0
    """Share in which the worker dies."""
    delay: _Share = 0.0
    """Share in which the worker pauses for ``delay_s``."""
    duplicate: _Share = 0.0
    """Share that is invoked twice."""
    delay_s: Annotated[float, Within(0, MAX_SECONDS)] = 1.0
    place: str = _ANY
    """A TaskPhase, or "any": drawn at random."""

    def __post_init__(self) -> None:
        shares = [self.kill, self.delay, self.duplicate]
        if sum(shares) > 1:
            raise ConfigError(f"the shares {shares} add up to more than 1; lower one")

    @classmethod
    def read(cls, given: object) -> Faults:
        """Read the option ``faults``, an object with these fields; ConfigError if it is invalid."""
        fields = Fields(given, "option 'faults'")
        places = [_ANY, *(place.value for place in TaskPhase)]
        faults = fields.record(cls, defaults=True, place=lambda name: fields.choice(name, places))
        fields.end()
        return faults

    def draw(self, key: TaskKey, attempt: int) -> tuple[Fault | None, int]:
        """Return the fault of an attempt, and the number of its invocations, 1 or 2."""
        digest = hashlib.sha256(f"{self.seed}/{key}/{attempt}".encode()).digest()
        draw = int.from_bytes(digest[:6], "little") / (1 << 48)
        places = list(TaskPhase) if self.place == _ANY else [TaskPhase(self.place)]
        place = places[digest[6] % len(places)]
        if draw < self.kill:
            return Fault(place=place), 1
        if draw < self.kill + self.delay:
            return Fault(place=place, seconds=self.delay_s), 1
        return None, 2 if draw < self.kill + self.delay + self.duplicate else 1


@final
@dataclass(frozen=True, kw_only=True)
class Latency:
    """Emulated log-normal pause of every invocation between computing and submitting its results."""

    median_s: float
    sigma: float = DEFAULT_SIGMA
    """Standard deviation of the logarithm; 0: the median every time."""

    @classmethod
    def read(cls, fields: Fields) -> Latency | None:
        """Read the options ``latency_s``, the median, and ``latency_sigma``; None without latency_s."""
        median_s = fields.maybe("latency_s", lambda name: fields.number(name, 0, MAX_SECONDS), None)
        sigma = fields.maybe("latency_sigma", lambda name: fields.number(name, 0, _MAX_SIGMA), None)
        if median_s is None:
            if sigma is not None:
                fields.refuse("latency_sigma", "latency_s as well, or leave latency_sigma out")
            return None
        return cls(median_s=median_s, sigma=DEFAULT_SIGMA if sigma is None else sigma)

    def draw(self, key: TaskKey, attempt: int) -> Fault:
        """Return the pause of one attempt; it does not depend on the order of invocations."""
        digest = hashlib.sha256(f"latency/{key}/{attempt}".encode()).digest()
        # The middle of its cell, so that neither end of the distribution is drawn.
        share = (int.from_bytes(digest[:6], "little") + 0.5) / (1 << 48)
        factor = NormalDist(0.0, self.sigma).inv_cdf(share) if self.sigma else 0.0
        return Fault(place=TaskPhase.COMPUTED, seconds=min(self.median_s * math.exp(factor), MAX_SECONDS))


class WorkerHandle(ABC):
    """One worker of a pool. Any thread may call :meth:`stop`; one thread calls the other methods."""

    @abstractmethod
    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer | None:
        """Run a task and wait for its end; None: a service accepted it and reports nothing more.

        Raises DglxError if the worker died or failed; after a death the next call starts another worker.
        """

    @abstractmethod
    def stop(self) -> None:
        """Abort :meth:`invoke` and end the worker; may be called twice."""

    @abstractmethod
    def end(self) -> None:
        """Stop and release all resources; only :meth:`stop` may be called afterwards."""


class PoolExecutor(Executor):
    """Worker threads that take events in order; an idle worker is used before another one starts.

    A worker whose task is sent again counts as late: it may hang forever, so another worker may take its
    slot. At most as many workers as there are slots may be late at once. A late worker that returns ends if
    all slots are taken. ``make`` makes a worker, on the thread that will use it; errors belong to ``invoke``.
    """

    def __init__(
        self,
        make: Callable[[], WorkerHandle],
        notice: Callable[[], None],
        *,
        memory_mb: int,
        billed: bool = True,
        faults: Faults | None = None,
        latency: Latency | None = None,
    ) -> None:
        self._make, self._notice, self._memory_mb, self._is_billed = make, notice, memory_mb, billed
        self._faults, self._latency = faults or Faults(), latency
        self._changed = threading.Condition()
        self._events: deque[tuple[Task, bytes, Fault | None]] = deque()
        self._size, self._closed = 1, False
        self._idle, self._starting = 0, 0
        self._threads: dict[threading.Thread, WorkerHandle | None] = {}
        self._leaving: set[threading.Thread] = set()
        self._busy: dict[threading.Thread, Task] = {}
        self._late: set[threading.Thread] = set()
        self._lost: list[Lost] = []
        self._billed: list[Invocation] = []

    def invoke(self, event: bytes) -> None:
        task = Task.from_event(event)
        fault, times = self._faults.draw(task.key, task.attempt)
        if fault is None and self._latency is not None:
            fault = self._latency.draw(task.key, task.attempt)
        with self._changed:
            if self._closed:
                raise PeerError(f"the executor is closed; task {task.key} came too late")
            self._note_late(task)
            self._events.extend([(task, event, fault)] * times)
            self._start_threads()
            self._changed.notify_all()

    def size(self, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"{workers} workers cannot run tasks; give at least 1")
        with self._changed:
            self._size = workers
            self._start_threads()
            self._changed.notify_all()

    def lost(self) -> list[Lost]:
        with self._changed:
            found, self._lost = self._lost, []
            return found

    def billed(self) -> list[Invocation]:
        with self._changed:
            found, self._billed = self._billed, []
            return found

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._events.clear()
            threads = dict(self._threads)
            self._changed.notify_all()
        for worker in threads.values():
            if worker is not None:
                worker.stop()
        deadline = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                log.warning("%s did not end within %g s of the executor's", thread.name, _END_S)

    @property
    def _num_up(self) -> int:
        """Threads that occupy a slot; accessed with the lock held."""
        return len(self._threads) - len(self._leaving) - len(self._late)

    def _note_late(self, again: Task) -> None:
        """Mark threads that still run an earlier attempt of ``again`` as late; the lock is held."""
        for thread, task in self._busy.items():
            if task.key == again.key and task.attempt < again.attempt and len(self._late) < self._size:
                self._late.add(thread)

    def _start_threads(self) -> None:
        """Start as many threads as the waiting events need; the lock is held."""
        missing = min(len(self._events) - self._idle - self._starting, self._size - self._num_up)
        for _ in range(missing if not self._closed else 0):
            thread = threading.Thread(target=self._run, name="dglx-worker", daemon=True)
            self._threads[thread] = None
            self._starting += 1
            thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        worker = self._make()
        with self._changed:
            self._threads[me] = worker
            self._starting -= 1
        try:
            while (found := self._next()) is not None:
                self._invoke(worker, *found)
        finally:
            worker.end()
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
                # Other threads decide by the number of threads as well, so this one must stop counting now.
                self._leaving.add(threading.current_thread())
                return None
            found = self._events.popleft()
            self._busy[threading.current_thread()] = found[0]
            return found

    def _are_too_many(self) -> bool:
        return self._num_up > self._size

    def _free(self) -> None:
        """Note that this thread has no task; the lock is held."""
        me = threading.current_thread()
        self._busy.pop(me, None)
        self._late.discard(me)

    def _invoke(self, worker: WorkerHandle, task: Task, event: bytes, fault: Fault | None) -> None:
        started = time.monotonic()
        try:
            answer = worker.invoke(event, fault)
        except Exception as error:  # noqa: BLE001 - reported as a lost attempt
            reason = str(error) if isinstance(error, DglxError) else f"{type(error).__name__}: {error}"
            # A killed worker is billed as well, up to its death.
            self._report(task, time.monotonic() - started, cold=False, lost=reason)
            return
        if answer is not None:
            self._report(task, answer.seconds, cold=answer.cold, lost=answer.error or None)

    def _report(self, task: Task, duration_s: float, *, cold: bool, lost: str | None) -> None:
        with self._changed:
            # First: this report may cause the task to be sent again.
            self._free()
            if self._is_billed:
                self._billed.append(Invocation(duration_s=duration_s, cold=cold, memory_mb=self._memory_mb))
            if lost is None or self._closed:
                return
            self._lost.append(Lost(key=task.key, attempt=task.attempt, reason=lost))
        self._notice()


EXECUTORS: Registry[Executor] = Registry(
    "executor",
    Executor,  # type: ignore[type-abstract]  # the registry only asks for subclasses of it
    builtin={
        "aws": "dglx_dist.serverless.aws.executor:AwsExecutor",  # imports boto3, only when chosen
        "http": "dglx_dist.serverless.executors.http:HttpExecutor",
        "inline": "dglx_dist.serverless.executors.inline:InlineExecutor",
        "local": "dglx_dist.serverless.executors.local:LocalExecutor",
    },
    group="dglx_dist.executors",
)
