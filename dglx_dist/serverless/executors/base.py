"""What an executor is: it has workers do tasks somewhere, and says at once when one has failed."""

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
from typing import ClassVar, final

from dglx_dist.comm.rpc import Handler
from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.registry import Registry
from dglx_dist.serverless.json_fields import Fields
from dglx_dist.serverless.tasks import Task, TaskKey
from dglx_dist.serverless.worker import Place, WorkerAnswer
from dglx_dist.serverless.worker_process import MAX_SECONDS, Fault


def no_notice() -> None:
    """Tell nobody."""


@final
@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """What an executor is given by the graph server that has it."""

    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Where it may make a folder of its own, which it removes when it is closed."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """The user's own stages: name to ``module:Class``."""
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    """What answers a worker's operations in this process; for executors that need no socket."""
    notice: Callable[[], None] = no_notice
    """Called on any thread when :meth:`Executor.lost` has something new; returns quickly."""


@final
@dataclass(frozen=True, kw_only=True)
class Lost:
    """One attempt that will not bring its task to an end."""

    key: TaskKey
    attempt: int
    reason: str


@final
@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One call of a worker that has ended, as a functions service bills it."""

    duration_s: float
    cold: bool
    """Whether a worker was started for it."""
    memory_mb: int


class Executor(ABC):
    """Has workers do tasks. Usable once made; any thread may call.

    Results do not come back through it: a worker gives its rows to the graph server and its gradients to the
    parameter server. So an executor may lose an attempt silently, and whoever invokes watches the time.

    Args:
        context: What the graph server gives.
        options: The executor's own, by name; unknown ones are refused.

    Raises:
        ConfigError: an option is unknown, or cannot be honoured here; the message says what is missing.
    """

    simulated: bool = True
    """Whether no provider is paid: dollars are then what the run would have cost."""
    in_process: ClassVar[bool] = False
    """Whether its workers are in this process, and can import all that it can."""
    option_names: ClassVar[tuple[str, ...]] = ()
    """All options that it takes; others are refused before anything is opened."""

    @abstractmethod
    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None: ...

    @abstractmethod
    def invoke(self, event: bytes) -> None:
        """Have a worker do the task of ``event`` (``Task.to_event``); returns at once.

        Raises:
            PeerError: the executor is closed, or cannot take it.
        """

    @abstractmethod
    def size(self, workers: int) -> None:
        """Use at most ``workers`` workers at the same time from now on, at least 1."""

    @abstractmethod
    def lost(self) -> list[Lost]:
        """Return the attempts that are known to have failed since the last call."""

    @abstractmethod
    def billed(self) -> list[Invocation]:
        """Return the invocations that have ended since the last call."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """Workers that are up now, busy or idle; 0 where the executor cannot know."""

    @abstractmethod
    def close(self) -> None:
        """End all workers, at once, with what they do; may be called twice."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_ANY = "any"


@final
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Which share of invocations goes wrong, and how."""

    seed: int = 0
    kill: float = 0.0
    """Share of invocations in which the worker dies."""
    delay: float = 0.0
    """Share in which it stands still for ``delay_s``."""
    duplicate: float = 0.0
    """Share that is invoked twice."""
    delay_s: float = 1.0
    place: str = _ANY
    """A Place, or "any": drawn."""

    @classmethod
    def read(cls, given: object) -> Faults:
        """Read the option ``faults``, an object with the names of the fields.

        Raises:
            ConfigError: a field is unknown or out of bounds, or the shares add up to more than 1.
        """
        fields = Fields(given, "option 'faults'")
        shares = [
            fields.maybe(name, lambda name: fields.number(name, 0, 1), 0.0)
            for name in ("kill", "delay", "duplicate")
        ]
        places = [_ANY, *(place.value for place in Place)]
        faults = cls(
            seed=fields.maybe("seed", lambda name: fields.whole(name, 0, 1 << 62), 0),
            kill=shares[0],
            delay=shares[1],
            duplicate=shares[2],
            delay_s=fields.maybe("delay_s", lambda name: fields.number(name, 0, MAX_SECONDS), 1.0),
            place=fields.maybe("place", lambda name: fields.choice(name, places), _ANY),
        )
        fields.end()
        if sum(shares) > 1:
            raise ConfigError(f"option 'faults' has shares {shares} that add up to more than 1; lower one")
        return faults

    def draw(self, key: TaskKey, attempt: int) -> tuple[Fault | None, int]:
        """Return what happens to an attempt, and how often it is invoked, 1 or 2."""
        digest = hashlib.sha256(f"{self.seed}/{key}/{attempt}".encode()).digest()
        drawn = int.from_bytes(digest[:6], "little") / (1 << 48)
        places = list(Place) if self.place == _ANY else [Place(self.place)]
        place = places[digest[6] % len(places)]
        if drawn < self.kill:
            return Fault(place=place), 1
        if drawn < self.kill + self.delay:
            return Fault(place=place, seconds=self.delay_s), 1
        return None, 2 if drawn < self.kill + self.delay + self.duplicate else 1


DEFAULT_SIGMA = 0.5
"""Spread of the logarithm that is usual for functions."""
_MAX_SIGMA = 3.0


@final
@dataclass(frozen=True, kw_only=True)
class Latency:
    """A pause of every invocation when it has computed, before it hands in: emulated, and no cloud's."""

    median_s: float
    sigma: float = DEFAULT_SIGMA
    """Standard deviation of the logarithm; 0: always the median."""

    @classmethod
    def read(cls, fields: Fields) -> Latency | None:
        """Read the options ``latency_s``, the median in seconds, and ``latency_sigma``; None without.

        Raises:
            ConfigError: one is out of bounds, or there is a sigma without a median.
        """
        median_s = fields.maybe("latency_s", lambda name: fields.number(name, 0, MAX_SECONDS), None)
        sigma = fields.maybe("latency_sigma", lambda name: fields.number(name, 0, _MAX_SIGMA), None)
        if median_s is None:
            if sigma is not None:
                fields.refuse("latency_sigma", "left out, or the spread around a latency_s that is given")
            return None
        return cls(median_s=median_s, sigma=DEFAULT_SIGMA if sigma is None else sigma)

    def draw(self, key: TaskKey, attempt: int) -> Fault:
        """Return the pause of one attempt: the same in every run, whatever the order of invocations."""
        digest = hashlib.sha256(f"latency/{key}/{attempt}".encode()).digest()
        # In the middle of its cell, so that neither end of the distribution is drawn.
        share = (int.from_bytes(digest[:6], "little") + 0.5) / (1 << 48)
        factor = NormalDist(0.0, self.sigma).inv_cdf(share) if self.sigma else 0.0
        return Fault(place=Place.COMPUTED, seconds=min(self.median_s * math.exp(factor), MAX_SECONDS))


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
