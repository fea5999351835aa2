"""Task queues and thread pool of one graph server (Dorylus, section 4): oldest work first."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol, final

from dglx_dist.comm.trace import GRAPH_SERVER, NETWORK, WAIT, WORKER, Span, Timeline
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.serverless.controller import Finished
from dglx_dist.serverless.program import Program
from dglx_dist.serverless.tasks import Direction, TaskKey
from dglx_dist.strategies.serverless.ghost_exchange import GhostExchange
from dglx_dist.strategies.serverless.graph_server import (
    Barrier,
    GraphServer,
    ScheduledTask,
    TaskKind,
)
from dglx_dist.strategies.serverless.options import StalenessPolicy


@final
class SyncSwitch:
    """Sums correct predictions by epoch and sets ``StalenessPolicy.synchronous_from``. Not thread-safe.

    When the sum of epoch e is known, intervals may be S epochs further, so the first epoch that no interval
    can have begun is e + S + 1. It does not begin before the sum is known, because graph servers would
    otherwise begin it in different modes.
    """

    def __init__(self, policy: StalenessPolicy, num_servers: int) -> None:
        self._policy, self._num_servers = policy, num_servers
        self._undecided = policy.first_epoch
        self._counts: dict[int, dict[int, int]] = {}

    @property
    def is_over(self) -> bool:
        """True if there is nothing to decide: no target is set, or the epoch is known."""
        return self._policy.target is None or self._policy.synchronous_from is not None

    def is_known(self, epoch: int) -> bool:
        """True if it is known whether ``epoch`` is synchronous."""
        return self.is_over or epoch - self._policy.staleness - 1 < self._undecided

    def has_decided(self, end: int) -> bool:
        """True if no count of an epoch before ``end`` is missing."""
        return self.is_over or self._undecided >= end

    def missing(self) -> list[int]:
        """Return the graph servers whose count of the next undecided epoch is missing."""
        known = self._counts.get(self._undecided, {})
        return [server for server in range(self._num_servers) if server not in known]

    def record(self, server: int, epoch: int, correct: int) -> None:
        """Record that ``server`` has ``correct`` correct predictions in ``epoch``; in any order, but once."""
        known = self._counts.setdefault(epoch, {})
        if not 0 <= server < self._num_servers or server in known:
            raise ConfigError(
                f"graph server {server} of {self._num_servers} counted the predictions of epoch {epoch} "
                "twice, or does not exist"
            )
        known[server] = correct
        while not self.is_over and len(self._counts.get(self._undecided, ())) == self._num_servers:
            self._decide(sum(self._counts.pop(self._undecided).values()))

    def _decide(self, correct: int) -> None:
        assert self._policy.target is not None
        if correct >= self._policy.target:
            self._policy.synchronous_from = self._undecided + self._policy.staleness + 1
        self._undecided += 1


@final
class Progress:
    """Positions of the intervals of one graph server: epoch x tasks per epoch + task. Not thread-safe."""

    def __init__(
        self,
        schedule: Sequence[ScheduledTask],
        num_intervals: int,
        policy: StalenessPolicy,
        peers: Sequence[int],
    ) -> None:
        self._schedule, self.policy = tuple(schedule), policy
        self.switch = SyncSwitch(policy, len(peers) + 1)
        """Receives the correct predictions of each epoch if the policy has a target."""
        start = policy.first_epoch * len(schedule)
        self.position = [start] * num_intervals
        """Position of the next or running task of each interval."""
        self.running: set[int] = set()
        """Intervals with a running task."""
        self.updates = policy.first_epoch
        """Weight updates that all parameter servers have made."""
        self.end = policy.first_epoch
        """The epoch before which training stops."""
        self.floor = start
        """The least position of all intervals."""
        self._at_floor = num_intervals
        self._peer_positions = dict.fromkeys(peers, start)
        self._announced = start
        self._loss_index = next(at for at, task in enumerate(self._schedule) if _has_loss(task))
        self._next_loss_epoch = policy.first_epoch

    @property
    def is_done(self) -> bool:
        """True if all intervals and the weights are at the end, and no count of predictions is missing."""
        over = self.floor >= self.end * len(self._schedule) and self.updates >= self.end
        return over and self.switch.has_decided(self.end)

    def task_of(self, interval: int) -> tuple[int, ScheduledTask]:
        """Return the epoch of ``interval`` and its next or running task."""
        epoch, index = divmod(self.position[interval], len(self._schedule))
        return epoch, self._schedule[index]

    def next_task(self, interval: int) -> ScheduledTask | None:
        """Return the task after that, if it is in the same epoch."""
        index = self.position[interval] % len(self._schedule) + 1
        return self._schedule[index] if index < len(self._schedule) else None

    def can_start(self, interval: int) -> bool:
        """True if ``interval`` may start its next task now."""
        if interval in self.running:
            return False
        position = self.position[interval]
        epoch, index = divmod(position, len(self._schedule))
        may_begin = self.switch.is_known(epoch) and epoch <= self.updates + self.policy.lead(epoch)
        if epoch >= self.end or (index == 0 and not may_begin):
            return False
        if not self.policy.is_synchronous(epoch):
            return True
        barrier = self._schedule[index].barrier
        if self.floor < position and (barrier is not Barrier.NONE or self.policy.mode == "no_pipe"):
            return False
        return barrier is not Barrier.GLOBAL or not self.behind(position)

    def startable(self) -> list[int]:
        """Return all intervals that can start their next task."""
        return [interval for interval in range(len(self.position)) if self.can_start(interval)]

    def behind(self, position: int) -> list[int]:
        """Return the peers that have not reported ``position`` yet."""
        return [peer for peer, floor in self._peer_positions.items() if floor < position]

    def start(self, interval: int) -> tuple[int, ScheduledTask]:
        """Mark the next task of ``interval`` as running; return its epoch and the task."""
        assert self.can_start(interval), f"interval {interval} cannot start"
        self.running.add(interval)
        return self.task_of(interval)

    def finish(self, interval: int) -> bool:
        """Mark the task of ``interval`` as finished; return True if the least position advanced."""
        self.running.remove(interval)
        before = self.position[interval]
        self.position[interval] += 1
        if before > self.floor:
            return False
        self._at_floor -= 1
        if self._at_floor:
            return False
        self.floor = min(self.position)
        self._at_floor = self.position.count(self.floor)
        return True

    def new_barrier(self) -> int | None:
        """Return the furthest global barrier that all own intervals reached and that is not announced yet."""
        num_tasks = len(self._schedule)
        for position in range(self.floor, self._announced, -1):
            epoch, index = divmod(position, num_tasks)
            if self._schedule[index].barrier is Barrier.GLOBAL and self.policy.is_synchronous(epoch):
                self._announced = position
                return position
        self._announced = self.floor
        return None

    def epochs_with_loss(self) -> range:
        """Return the epochs whose losses all own intervals have computed, each once, if there is a target."""
        if self.switch.is_over:
            return range(0)
        end = (self.floor - self._loss_index - 1) // len(self._schedule) + 1
        found = range(self._next_loss_epoch, end)
        self._next_loss_epoch = max(self._next_loss_epoch, end)
        return found

    def record_peer(self, peer: int, position: int) -> None:
        """Record that all intervals of ``peer`` reached ``position``."""
        if peer not in self._peer_positions:
            raise ConfigError(f"graph server {peer} is not one of the peers {sorted(self._peer_positions)}")
        self._peer_positions[peer] = max(self._peer_positions[peer], position)


def _has_loss(task: ScheduledTask) -> bool:
    return task.kind is TaskKind.LOSS or task.direction is Direction.FUSED


_NAMES = {
    TaskKind.WORK: "open {}",
    TaskKind.LOSS: "loss of {}",
    TaskKind.PUBLISH: "publish {}",
    TaskKind.DROP_GRADIENT: "grad{}",
    TaskKind.SEND_BACK: "grad{}",
    TaskKind.COLLECT: "collect {}",
}
_TASKS = {Direction.FORWARD: "{}", Direction.BACKWARD: "grad{}", Direction.FUSED: "{}+grad"}


def server_span_name(step: str, kind: TaskKind) -> str:
    """Return "GA1", "SC1", "gradSC1", "open AV1" and so on for a task of a graph server."""
    return _NAMES.get(kind, "{}").format(step)


def worker_span_name(program: Program, key: TaskKey) -> str:
    """Return "AV1", "gradAV1", or "AV2+grad" for a fused task."""
    return _TASKS[key.direction].format(program.steps[key.step].name)


@final
class WorkerSpans:
    """Records a span for each completed task; observes a controller with clock ``time.perf_counter``."""

    def __init__(self, timeline: Timeline, program: Program) -> None:
        self._timeline, self._program = timeline, program

    def __call__(self, done: Finished) -> None:
        """Record the worker's wait for its rows, and its work."""
        if not self._timeline.on:
            return
        work = max(done.sent, done.ready)
        if done.sent < work:
            self._note(done, f"{WAIT} for rows", done.sent, work)
        self._note(done, worker_span_name(self._program, done.key), work, done.done)

    def _note(self, done: Finished, name: str, begin_s: float, end_s: float) -> None:
        self._timeline.note(
            Span(
                name=name,
                row=WORKER,
                begin_s=begin_s,
                end_s=end_s,
                batch=done.key.epoch,
                interval=done.key.interval,
            )
        )


class Workers(Protocol):
    """Executes tasks. Thread-safe."""

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        """Launch a task of ``rows`` nodes; ``ready``: whether its rows can be pulled already."""

    def ready(self, key: TaskKey) -> None:
        """Signal that the rows of a launched task can be pulled now."""

    def done(self, key: TaskKey, attempt: int) -> None:
        """Signal that all rows of ``attempt`` arrived, including those of a rejected duplicate."""

    def raise_if_failed(self) -> None:
        """Raise the error that prevents tasks from being executed."""


_CHECK_INTERVAL_S, _JOIN_TIMEOUT_S = 0.5, 5.0
_NETWORK_THREADS = 2
"""They mostly wait for replies: one waits while the other packs."""
_EXCHANGED_KINDS = (TaskKind.SCATTER, TaskKind.SEND_BACK)
_ANNOUNCE_POSITION, _ANNOUNCE_CORRECT, _IMMEDIATELY = -3, -2, -1


class Snapshot(NamedTuple):
    """Current state of a graph server."""

    epochs: tuple[int, ...]
    steps: tuple[str, ...]
    """Name of the step of each interval; "" at the end."""
    queue: int
    """Tasks that wait for a thread."""
    tasks: int
    """Tasks that workers have."""


class _TaskQueue:
    def __init__(self, lock: threading.Lock) -> None:
        self.heap: list[tuple[int, int]] = []
        """(position, interval), least position first. ``_ANNOUNCE_POSITION``, ``_ANNOUNCE_CORRECT`` and
        ``_IMMEDIATELY`` go first; the former two carry a position and an epoch in place of the interval."""
        self.changed = threading.Condition(lock)


@final
class ThreadScheduler:
    """Runs the epochs of one graph server on compute threads, one per core, and network threads.

    ``early``: whether a worker is launched when the task before its own starts, to hide its start-up.
    """

    def __init__(
        self,
        server: GraphServer,
        progress: Progress,
        workers: Workers,
        exchange: GhostExchange,
        *,
        threads: int,
        timeline: Timeline | None = None,
        early: bool = True,
    ) -> None:
        self._server, self._progress = server, progress
        self._workers, self._exchange = workers, exchange
        self._num_threads, self._timeline, self._early = threads, timeline, early
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._compute_queue, self._network_queue = _TaskQueue(self._lock), _TaskQueue(self._lock)
        self._launched: set[TaskKey] = set()
        self._failure: BaseException | None = None
        self._stopping = True
        self._progress_at = time.monotonic()

    @property
    def queue_length(self) -> int:
        """Tasks that wait for a thread; the number of workers is tuned by it."""
        return len(self._compute_queue.heap)

    def snapshot(self) -> Snapshot:
        """Return the current state; thread-safe."""
        with self._lock:
            numbers = range(len(self._progress.position))
            found = [self._progress.task_of(interval) for interval in numbers]
            end, queue = self._progress.end, len(self._compute_queue.heap)
        steps = [self._server.program.steps[task.step].name if epoch < end else "" for epoch, task in found]
        return Snapshot(
            tuple(epoch for epoch, _ in found), tuple(steps), queue, len(self._server.task_table.keys)
        )

    def run(self, end: int, check: Callable[[float, Sequence[int]], None]) -> None:
        """Train until all own intervals have completed the epoch before ``end``, and its update is made.

        Args:
            check: Called periodically with the seconds without progress and the peers that are waited for;
                raises if something is wrong. After any error the scheduler cannot run again.
        """
        self._stopping, self._failure = False, None
        targets = [(self._compute_queue, GRAPH_SERVER)] * self._num_threads
        targets += [(self._network_queue, NETWORK)] * _NETWORK_THREADS
        threads = [
            threading.Thread(target=self._serve, args=target, name=f"dglx-graph-server-{number}", daemon=True)
            for number, target in enumerate(targets)
        ]
        for thread in threads:
            thread.start()
        try:
            with self._lock:
                self._progress_at = time.monotonic()
                self._progress.end = end
                self._enqueue_all()
            self._wait(check)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            with self._lock:
                self._stopping = True
                for queue in (self._compute_queue, self._network_queue):
                    queue.heap.clear()
                    queue.changed.notify_all()
            for thread in threads:
                # After a failure a thread may wait for a reply that never comes.
                thread.join(None if self._failure is None else _JOIN_TIMEOUT_S)

    def peer_reached(self, peer: int, position: int) -> None:
        """Record that ``peer`` reached ``position``; thread-safe."""
        with self._lock:
            self._progress.record_peer(peer, position)
            self._enqueue_all()

    def peer_counted(self, peer: int, epoch: int, correct: int) -> None:
        """Record that ``peer`` had ``correct`` correct predictions in ``epoch``; thread-safe."""
        with self._lock:
            self._progress.switch.record(peer, epoch, correct)
            self._enqueue_all()

    def weights_updated(self, updates: int) -> None:
        """Record that the parameter servers made ``updates`` updates; thread-safe."""
        with self._lock:
            self._progress.updates = max(self._progress.updates, updates)
            self._enqueue_all()

    def task_done(self, key: TaskKey, attempt: int) -> None:
        """Record that a worker completed a task; thread-safe."""
        # First: until the controller knows, it would count the loss of another attempt as one of the task.
        self.duplicate_done(key, attempt)
        with self._lock:
            self._finish(key.interval - self._server.part.first_interval)

    def duplicate_done(self, key: TaskKey, attempt: int) -> None:
        """Record that a worker finished an attempt of a task; thread-safe."""
        try:
            self._workers.done(key, attempt)
        except DglxError as error:
            # The next task could not be sent, which must not fail the call of the worker served here.
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _wait(self, check: Callable[[float, Sequence[int]], None]) -> None:
        while True:
            with self._lock:
                over = self._failure is not None or self._progress.is_done
                if not over:
                    self._changed.wait(_CHECK_INTERVAL_S)
                failure, done = self._failure, self._progress.is_done
                quiet_s, behind = time.monotonic() - self._progress_at, self._waited_for()
            if failure is not None:
                raise failure
            if done:
                return
            self._workers.raise_if_failed()
            check(quiet_s, behind)

    def _waited_for(self) -> list[int]:
        # The peers at whose barrier all own intervals wait, or whose counts of predictions are missing.
        floor = self._progress.floor
        epoch, task = self._progress.task_of(self._progress.position.index(floor))
        if not self._progress.switch.is_known(epoch):
            return [peer for peer in self._progress.switch.missing() if peer != self._server.rank]
        stands = task.barrier is Barrier.GLOBAL and self._progress.policy.is_synchronous(epoch)
        return self._progress.behind(floor) if stands else []

    def _enqueue_all(self) -> None:
        for interval in self._progress.startable():
            self._enqueue(interval)
        if self._progress.is_done:
            self._changed.notify_all()

    def _enqueue(self, interval: int) -> None:
        position = self._progress.position[interval]
        _, task = self._progress.start(interval)
        queue = self._network_queue if task.kind in _EXCHANGED_KINDS else self._compute_queue
        # Opening a task costs nothing and lets a worker begin. Queued after all gathers of its phase, workers
        # and graph server would take turns.
        heapq.heappush(queue.heap, (_IMMEDIATELY if task.kind is TaskKind.WORK else position, interval))
        queue.changed.notify()

    def _finish(self, interval: int) -> None:
        # The caller holds the lock.
        self._progress_at = time.monotonic()
        if self._stopping:
            return
        if self._progress.finish(interval):
            barrier = self._progress.new_barrier()
            announcements = [] if barrier is None else [(_ANNOUNCE_POSITION, barrier)]
            announcements += [(_ANNOUNCE_CORRECT, epoch) for epoch in self._progress.epochs_with_loss()]
            for announcement in announcements:
                heapq.heappush(self._network_queue.heap, announcement)
                self._network_queue.changed.notify()
            self._enqueue_all()
        elif self._progress.can_start(interval):
            self._enqueue(interval)

    def _serve(self, queue: _TaskQueue, row: str) -> None:
        while True:
            with self._lock:
                while not queue.heap and not self._stopping:
                    queue.changed.wait()
                if self._stopping:
                    return
                position, interval = heapq.heappop(queue.heap)
            try:
                if position == _ANNOUNCE_POSITION:
                    self._exchange.announce_position(interval)
                elif position == _ANNOUNCE_CORRECT:
                    self._announce_correct(interval)
                else:
                    self._execute(interval, row)
            except Exception as error:  # noqa: BLE001 - the thread that waits in run() raises it
                self._fail(error)
                return

    def _execute(self, interval: int, row: str) -> None:
        with self._lock:
            epoch, task = self._progress.task_of(interval)
            next_task = self._progress.next_task(interval)
        name = server_span_name(self._server.program.steps[task.step].name, task.kind)
        number = self._server.part.first_interval + interval
        with self._timeline.span(name, row, epoch, number) if self._timeline else nullcontext():
            if task.kind is TaskKind.WORK:
                self._open(interval, epoch, task)
                return
            if self._early and next_task is not None and _follows_at_once(next_task):
                self._launch_early(self._server.key_of(interval, epoch, next_task), interval)
            if task.kind in _EXCHANGED_KINDS:
                self._exchange.send(task, self._server.ghost_messages(interval, task))
            else:
                self._server.compute(interval, epoch, task)
        with self._lock:
            self._finish(interval)

    def _announce_correct(self, epoch: int) -> None:
        correct = self._server.correct(epoch)
        self._exchange.announce_correct(epoch, correct)
        # Counted only after the peers know it, because a graph server that is done sends nothing more.
        self.peer_counted(self._server.rank, epoch, correct)

    def _open(self, interval: int, epoch: int, task: ScheduledTask) -> None:
        key = self._server.key_of(interval, epoch, task)
        self._server.open(interval, epoch, task)
        with self._lock:
            launched = key in self._launched
            self._launched.discard(key)
        if launched:
            self._workers.ready(key)
        else:
            self._workers.launch(key, self._server.rows_of(interval), ready=True)

    def _launch_early(self, key: TaskKey, interval: int) -> None:
        with self._lock:
            self._launched.add(key)
        self._workers.launch(key, self._server.rows_of(interval), ready=False)


def _follows_at_once(task: ScheduledTask) -> bool:
    return task.kind is TaskKind.WORK and task.barrier is Barrier.NONE
