"""Executors: worker pools that run tasks."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, TypeAlias, final

from dglx_dist.comm.rpc import Handler
from dglx_dist.data.json_fields import Within
from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.registry import Registry
from dglx_dist.strategies.serverless.tasks import Task, TaskKey
from dglx_dist.strategies.serverless.worker import WorkerAnswer
from dglx_dist.strategies.serverless.worker_process import Fault

MemoryMb: TypeAlias = Annotated[int, Within(1, 1 << 20)]
DEFAULT_MEMORY_MB = 192
"""Memory of a function in the paper, in MB."""
log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0


@final
@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """Resources that a graph server provides to its executor."""

    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Folder in which the executor may create its own folder, which it removes when it is closed."""
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    """Handlers for a worker's operations, for executors in this process."""
    notice: Callable[[], None] = lambda: None
    """Called on any thread when :meth:`Executor.take_lost` has a new attempt. It must return quickly."""


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
    """One finished call to a worker, as a functions service bills it."""

    duration_s: float
    cold: bool
    """Whether a worker had to start for the call."""
    memory_mb: int


def names_of(record_type: type) -> tuple[str, ...]:
    """Return the option names, which are the fields in ``record_type``."""
    return tuple(option.name for option in fields(record_type))


class WorkerHandle(ABC):
    """One worker in a pool. Any thread may call :meth:`stop`. One thread calls the other methods."""

    @abstractmethod
    def invoke(self, task: Task, fault: Fault | None) -> WorkerAnswer | None:
        """Run a task and wait for its end. Return None if a service accepted the task and reports no end.

        Raises DglxError if the worker died or failed. After a death the next call starts another worker. Only
        workers on this machine have a ``fault``.
        """

    @abstractmethod
    def stop(self) -> None:
        """Abort :meth:`invoke` and end the worker. May be called twice."""

    def end(self) -> None:
        """Stop and release all resources. Only :meth:`stop` may be called afterwards."""
        self.stop()


class Executor:
    """Runs tasks on workers, in order. An idle worker is used before a new one starts. Thread-safe.

    Results bypass the executor: a worker sends its rows to the graph server and its gradients to the
    parameter server. So an executor may lose an attempt without a report, and the caller watches the time.

    A worker is late when its task is sent again. A late worker may hang forever, so it no longer occupies a
    slot, and a new worker may start. There are never more late workers than slots. A late worker that returns
    ends if all slots are taken. ``make`` creates a worker quickly: steps that take time or may fail belong to
    ``invoke``.
    """

    simulated: bool = True
    """Whether no provider is paid, so that dollars are an estimate."""
    in_process: ClassVar[bool] = False
    """Whether workers are threads in this process, so that no function is paid for."""
    option_names: ClassVar[tuple[str, ...]] = ()
    """All supported options. Other options are rejected before anything is opened."""

    def __init__(
        self,
        make: Callable[[], WorkerHandle],
        notice: Callable[[], None],
        *,
        memory_mb: int,
        billed: bool = True,
    ) -> None:
        self._make = make
        self._notice = notice
        self._memory_mb = memory_mb
        self._is_billed = billed
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._size = 1
        self._is_closed = False
        self._idle: list[WorkerHandle] = []
        self._busy: dict[threading.Thread, tuple[WorkerHandle, Task]] = {}
        self._late: set[threading.Thread] = set()
        self._lost: list[Lost] = []
        self._billed: list[Invocation] = []

    def fault_of(self, task: Task) -> Fault | None:
        """Return the fault to inject into ``task``'s worker. Tests and simulations replace this method."""
        return None

    def invoke(self, task: Task) -> None:
        """Start ``task`` on a worker and return at once. Raises PeerError if the executor is closed."""
        with self._lock:
            if self._is_closed:
                raise PeerError(f"the executor is closed; task {task.key} came too late")

            # Workers with an earlier attempt at the task are late now.
            for thread, (_, running_task) in self._busy.items():
                is_earlier = running_task.key == task.key and running_task.attempt < task.attempt
                if is_earlier and len(self._late) < self._size:
                    self._late.add(thread)

            self._tasks.append(task)
            self._start_threads()

    def size(self, workers: int) -> None:
        """Use at most ``workers`` >= 1 workers at the same time from now on."""
        if workers < 1:
            raise ConfigError(f"{workers} workers cannot run tasks; give at least 1")

        extra_workers = []
        with self._lock:
            self._size = workers
            self._start_threads()
            while self._idle and self._num_up > self._size:
                extra_workers.append(self._idle.pop())
        for worker in extra_workers:
            worker.end()

    def take_lost(self) -> list[Lost]:
        """Return the attempts that failed since the last call, as far as known."""
        with self._lock:
            attempts = self._lost
            self._lost = []
            return attempts

    def take_billed(self) -> list[Invocation]:
        """Return the invocations that ended since the last call."""
        with self._lock:
            invocations = self._billed
            self._billed = []
            return invocations

    def close(self) -> None:
        """Stop all workers at once, also in the middle of a task. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._tasks.clear()
            idle_workers = self._idle
            self._idle = []
            busy_workers = {thread: worker for thread, (worker, _) in self._busy.items()}

        for worker in busy_workers.values():
            worker.stop()
        for worker in idle_workers:
            worker.end()

        # All threads together have this time to end.
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in busy_workers:
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                log.warning("%s did not end within %g s of the executor's", thread.name, _CLOSE_TIMEOUT_S)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _num_up(self) -> int:
        """Number of workers that occupy a slot. The caller holds the lock."""
        return len(self._busy) - len(self._late) + len(self._idle)

    def _can_start(self) -> bool:
        """True if a task waits and a worker may take it. The caller holds the lock."""
        return bool(self._tasks) and len(self._busy) - len(self._late) < self._size

    def _start_threads(self) -> None:
        """Start a thread for each task that a worker may take. The caller holds the lock."""
        while self._can_start():
            task = self._tasks.popleft()
            worker = self._idle.pop() if self._idle else self._make()
            thread = threading.Thread(target=self._run, args=(worker, task), name="dglx-worker", daemon=True)
            self._busy[thread] = worker, task
            thread.start()

    def _run(self, worker: WorkerHandle, task: Task) -> None:
        """Run ``task`` and then further tasks on ``worker``, until no task waits or no slot is free."""
        thread = threading.current_thread()
        next_task: Task | None = task
        while next_task is not None:
            task = next_task
            invocation, reason = self._invoke(worker, task)

            # The lock is held until the next state is known. After the report the task may be sent again,
            # and must find this worker as busy with another task, idle or ended.
            with self._lock:
                if invocation is not None:
                    self._billed.append(invocation)
                is_lost = reason != "" and not self._is_closed
                if is_lost:
                    self._lost.append(Lost(key=task.key, attempt=task.attempt, reason=reason))
                del self._busy[thread]
                self._late.discard(thread)

                next_task = None
                is_idle = False
                if self._can_start():
                    next_task = self._tasks.popleft()
                    self._busy[thread] = worker, next_task
                elif not self._is_closed and self._num_up < self._size:
                    is_idle = True
                    self._idle.append(worker)
            if is_lost:
                self._notice()

        if not is_idle:
            worker.end()

    def _invoke(self, worker: WorkerHandle, task: Task) -> tuple[Invocation | None, str]:
        """Return the invocation, or None if it is not billed here, and a failure's reason, or ""."""
        start_s = time.monotonic()
        try:
            answer = worker.invoke(task, self.fault_of(task))
        except Exception as error:  # noqa: BLE001 - reported as a lost attempt
            # A killed worker is billed as well, up to its death.
            seconds = time.monotonic() - start_s
            is_cold = False
            reason = str(error) if isinstance(error, DglxError) else f"{type(error).__name__}: {error}"
        else:
            if answer is None:
                return None, ""
            seconds = answer.seconds
            is_cold = answer.cold
            reason = answer.error

        if not self._is_billed:
            return None, reason
        return Invocation(duration_s=seconds, cold=is_cold, memory_mb=self._memory_mb), reason


EXECUTORS: Registry[Executor] = Registry(
    "executor",
    Executor,
    builtin={
        "aws": "dglx_dist.strategies.serverless.aws.executor:AwsExecutor",  # imports boto3, only when chosen
        "http": "dglx_dist.strategies.serverless.executors.http:HttpExecutor",
        "inline": "dglx_dist.strategies.serverless.executors.local:InlineExecutor",
        "local": "dglx_dist.strategies.serverless.executors.local:LocalExecutor",
    },
    group="dglx_dist.executors",
)
