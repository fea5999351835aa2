"""The task queue of one graph server and its thread pool (Dorylus, section 4): oldest work first."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol, final

from dglx_dist.comm.trace import GRAPH_SERVER, NETWORK, WAIT, WORKER, Span, Timeline
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.serverless.controller import Controller, Finished
from dglx_dist.serverless.program import Program
from dglx_dist.serverless.tasks import Direction, Task, TaskKey
from dglx_dist.strategies.serverless.graph_server import (
    Barrier,
    GhostMessage,
    GraphServer,
    TaskKind,
    ScheduledTask,
)
from dglx_dist.strategies.serverless.options import StalenessPolicy


@final
class SyncSwitch:
    """Sum the right answers of each epoch and set ``StalenessPolicy.synchronous_from``. Not thread-safe.

    When those of epoch e are known, intervals may be S epochs further, so the first epoch that nobody can
    have begun is e + S + 1. It is not begun before they are known: else a graph server could begin it
    otherwise than another.

    Args:
        pace: Of this graph server.
        num_servers: W graph servers, this one among them.
    """

    def __init__(self, policy: StalenessPolicy, num_servers: int) -> None:
        self._policy, self._num_servers = policy, num_servers
        self._undecided = policy.first_epoch
        self._counts: dict[int, dict[int, int]] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be found out: nobody asked, or the epoch is known."""
        return self._policy.target is None or self._policy.synchronous_from is not None

    def is_known(self, epoch: int) -> bool:
        """Whether it is known if ``epoch`` is synchronous."""
        return self.is_over or epoch - self._policy.staleness - 1 < self._undecided

    def has_decided(self, end: int) -> bool:
        """Whether no count of an epoch before ``end`` is waited for."""
        return self.is_over or self._undecided >= end

    def missing(self) -> list[int]:
        """Return the graph servers whose count of the next epoch to judge is waited for."""
        known = self._counts.get(self._undecided, {})
        return [server for server in range(self._num_servers) if server not in known]

    def hear(self, server: int, epoch: int, correct: int) -> None:
        """Note that ``server`` has ``correct`` right answers in ``epoch``, which may come in any order.

        Raises:
            ConfigError: there is no such graph server, or it said so before.
        """
        known = self._counts.setdefault(epoch, {})
        if not 0 <= server < self._num_servers or server in known:
            raise ConfigError(
                f"graph server {server} of {self._num_servers} counted the answers of epoch {epoch} twice, "
                "or is none of them"
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
    """Positions of the intervals of one graph server. A position is epoch x moves + move. Not thread-safe.

    Args:
        course: The moves of an epoch.
        num_intervals: k of this graph server, at least 1.
        pace: See there.
        peers: Numbers of the other graph servers.
    """

    def __init__(
        self,
        schedule: Sequence[ScheduledTask],
        num_intervals: int,
        policy: StalenessPolicy,
        peers: Sequence[int],
    ) -> None:
        self._schedule, self.policy = tuple(schedule), policy
        self.switch = SyncSwitch(policy, len(peers) + 1)
        """Hears how many answers of each epoch were right, where the pace has a target."""
        start = policy.first_epoch * len(schedule)
        self.position = [start] * num_intervals
        """Of the next move, or of the one that is under way, of each interval."""
        self.running: set[int] = set()
        """Intervals with a move under way."""
        self.updates = policy.first_epoch
        """Updates of the weights that all parameter servers have made."""
        self.end = policy.first_epoch
        """The epoch before which everybody stops."""
        self.floor = start
        """The least position of an interval."""
        self._at_floor = num_intervals
        self._peer_positions = dict.fromkeys(peers, start)
        self._announced = start
        self._loss_index = next(at for at, task in enumerate(self._schedule) if _has_loss(task))
        self._next_loss_epoch = policy.first_epoch

    @property
    def is_done(self) -> bool:
        """Whether all intervals, and the weights, are at the end, and nobody waits for a count of answers."""
        over = self.floor >= self.end * len(self._schedule) and self.updates >= self.end
        return over and self.switch.has_decided(self.end)

    def task_of(self, interval: int) -> tuple[int, ScheduledTask]:
        """Return the epoch of ``interval`` and its next move, or the one under way."""
        epoch, index = divmod(self.position[interval], len(self._schedule))
        return epoch, self._schedule[index]

    def next_task(self, interval: int) -> ScheduledTask | None:
        """Return the move after that, if it is of the same epoch."""
        index = self.position[interval] % len(self._schedule) + 1
        return self._schedule[index] if index < len(self._schedule) else None

    def can_start(self, interval: int) -> bool:
        """Whether ``interval`` may take its next move now."""
        if interval in self.running:
            return False
        position = self.position[interval]
        epoch, index = divmod(position, len(self._schedule))
        if epoch >= self.end or (index == 0 and not self._may_begin(epoch)):
            return False
        if not self.policy.is_synchronous(epoch):
            return True
        barrier = self._schedule[index].barrier
        if self.floor < position and (barrier is not Barrier.NONE or self.policy.mode == "no_pipe"):
            return False
        return barrier is not Barrier.GLOBAL or not self.behind(position)

    def startable(self) -> list[int]:
        """Return all intervals that may go."""
        return [interval for interval in range(len(self.position)) if self.can_start(interval)]

    def behind(self, position: int) -> list[int]:
        """Return the peers that have not said that they came to ``position``."""
        return [peer for peer, floor in self._peer_positions.items() if floor < position]

    def start(self, interval: int) -> tuple[int, ScheduledTask]:
        """Note that ``interval`` begins its next move; return its epoch and the move."""
        assert self.can_start(interval), f"interval {interval} may not go"
        self.running.add(interval)
        return self.task_of(interval)

    def finish(self, interval: int) -> bool:
        """Note that ``interval`` ended its move; return whether all intervals came further by that."""
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
        """Return the furthest barrier of all graph servers that this one came to, if it is not told yet."""
        num_tasks = len(self._schedule)
        for position in range(self.floor, self._announced, -1):
            epoch, index = divmod(position, num_tasks)
            if self._schedule[index].barrier is Barrier.GLOBAL and self.policy.is_synchronous(epoch):
                self._announced = position
                return position
        self._announced = self.floor
        return None

    def epochs_with_loss(self) -> range:
        """Return the epochs whose losses all own intervals have by now, without those returned before.

        Empty where nobody asks how many answers were right.
        """
        if self.switch.is_over:
            return range(0)
        end = (self.floor - self._loss_index - 1) // len(self._schedule) + 1
        found = range(self._next_loss_epoch, end)
        self._next_loss_epoch = max(self._next_loss_epoch, end)
        return found

    def hear(self, peer: int, position: int) -> None:
        """Note that all intervals of ``peer`` came to ``position``.

        Raises:
            ConfigError: there is no such peer.
        """
        if peer not in self._peer_positions:
            raise ConfigError(f"graph server {peer} is none of the peers {sorted(self._peer_positions)}")
        self._peer_positions[peer] = max(self._peer_positions[peer], position)

    def _may_begin(self, epoch: int) -> bool:
        return self.switch.is_known(epoch) and epoch <= self.updates + self.policy.lead(epoch)


def _has_loss(task: ScheduledTask) -> bool:
    return task.kind is TaskKind.LOSS or task.direction is Direction.FUSED


_NAMES = {
    TaskKind.WORK: "open {}",
    TaskKind.LOSS: "loss of {}",
    TaskKind.PUBLISH: "publish {}",
    TaskKind.SEND_BACK: "grad{}",
    TaskKind.COLLECT: "collect {}",
}
_TASKS = {Direction.FORWARD: "{}", Direction.BACKWARD: "grad{}", Direction.FUSED: "{}+grad"}


def server_span_name(step: str, kind: TaskKind) -> str:
    """Return "GA1", "SC1", "gradSC1", "open AV1" and so on for a move of a graph server."""
    return _NAMES.get(kind, "{}").format(step)


def worker_span_name(program: Program, key: TaskKey) -> str:
    """Return "AV1", "gradAV1", or "AV2+grad" where forward and backward are one task."""
    return _TASKS[key.direction].format(program.steps[key.step].name)


@final
class WorkerSpans:
    """Notes each task that is done; give it to a controller, whose clock must be ``time.perf_counter``.

    Args:
        timeline: Of the rank.
        program: What is trained.
    """

    def __init__(self, timeline: Timeline, program: Program) -> None:
        self._timeline, self._program = timeline, program

    def __call__(self, done: Finished) -> None:
        """Note the wait of a worker that was up before its rows were there, and its work."""
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
    """Who does tasks. Thread-safe."""

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        """Have a task of ``rows`` nodes done; ``ready``: whether its rows can be pulled already."""

    def ready(self, key: TaskKey) -> None:
        """Say that the rows of a task that was launched before can be pulled now."""

    def done(self, key: TaskKey, attempt: int) -> None:
        """Say that all rows of ``attempt`` came; also of one that is refused."""

    def raise_if_failed(self) -> None:
        """Raise what keeps tasks from being done."""


@final
class ControlledWorkers:
    """Workers behind a controller, which is run and closed by its owner.

    Args:
        controller: Launches, and launches again.
        task_of: Makes the task from its key and its rows.
    """

    def __init__(self, controller: Controller, task_of: Callable[[TaskKey, int], Task]) -> None:
        self._controller, self._task_of = controller, task_of

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        """See :class:`Workers`."""
        self._controller.launch(self._task_of(key, rows), ready=ready)

    def ready(self, key: TaskKey) -> None:
        """See :class:`Workers`."""
        self._controller.ready(key)

    def done(self, key: TaskKey, attempt: int) -> None:
        """See :class:`Workers`. Which half of which attempt is used, the graph server has decided."""
        self._controller.finished(key, attempt)

    def raise_if_failed(self) -> None:
        """See :class:`Workers`."""
        self._controller.raise_if_failed()


_LOOK_S, _ENDS_WITHIN_S = 0.5, 5.0
_NETWORK_THREADS = 2
"""They mostly wait for answers: one may while the other packs."""
_EXCHANGED_KINDS = (TaskKind.SCATTER, TaskKind.SEND_BACK)
_ANNOUNCE_POSITION, _ANNOUNCE_CORRECT, _IMMEDIATELY = -3, -2, -1


class GhostTransport(Protocol):
    """Who carries letters; see :class:`~dglx_dist.strategies.serverless.ghost_exchange.GhostExchange`."""

    def send(self, task: ScheduledTask, messages: Sequence[GhostMessage]) -> None:
        """Send all letters and wait until they are read."""

    def announce(self, position: int) -> None:
        """Tell all others how far this graph server is."""

    def answer(self, epoch: int, correct: int) -> None:
        """Tell all others how many answers of ``epoch`` were right; returns when they know."""


class Snapshot(NamedTuple):
    """What a graph server does at this moment."""

    epochs: tuple[int, ...]
    """Of each interval."""
    steps: tuple[str, ...]
    """Name of the step of each interval; "" at the end."""
    queue: int
    """Moves that wait for a thread."""
    tasks: int
    """Tasks that workers have."""


class _TaskQueue:
    """Moves and announcements that wait for threads, the least position first."""

    def __init__(self, lock: threading.Lock) -> None:
        self.heap: list[tuple[int, int]] = []
        """(position, interval), where ``_ANNOUNCE_POSITION``, ``_ANNOUNCE_CORRECT`` and ``_IMMEDIATELY`` stand for positions before all
        others, and the first two have a position and an epoch for the interval."""
        self.changed = threading.Condition(lock)


@final
class ThreadScheduler:
    """Runs epochs of one graph server: as many threads as cores make moves, others carry mail.

    Args:
        server: Whose moves.
        progress: Of its intervals.
        workers: Who does tasks.
        carrier: Who carries letters.
        threads: Threads that compute; at least 1.
        timeline: Where spans are noted.
        early: Whether a task is launched when the move before it starts, so that its worker is up in time.
    """

    def __init__(
        self,
        server: GraphServer,
        progress: Progress,
        workers: Workers,
        transport: GhostTransport,
        *,
        threads: int,
        timeline: Timeline | None = None,
        early: bool = True,
    ) -> None:
        self._server, self._progress = server, progress
        self._workers, self._transport = workers, transport
        self._num_threads, self._timeline, self._early = threads, timeline, early
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._moves, self._exchange = _TaskQueue(self._lock), _TaskQueue(self._lock)
        self._launched: set[TaskKey] = set()
        self._failure: BaseException | None = None
        self._stopping = True
        self._moved_at = time.monotonic()

    @property
    def queue_length(self) -> int:
        """Moves that wait for a thread: what the number of workers is tuned by."""
        return len(self._moves.heap)

    def snapshot(self) -> Snapshot:
        """Return what goes on now; any thread."""
        with self._lock:
            numbers = range(len(self._progress.position))
            found = [self._progress.task_of(interval) for interval in numbers]
            end, queue = self._progress.end, len(self._moves.heap)
        steps = [self._server.program.steps[task.step].name if epoch < end else "" for epoch, task in found]
        return Snapshot(
            tuple(epoch for epoch, _ in found), tuple(steps), queue, len(self._server.task_table.keys)
        )

    def run(self, end: int, look: Callable[[float, Sequence[int]], None]) -> None:
        """Train until all own intervals have ended the epoch before ``end``, and its update is made.

        Args:
            end: The epoch that is not begun.
            look: Called now and then, with the seconds in which nothing moved and the peers that are waited
                for; raises when something is wrong.

        Raises:
            DglxError: whatever went wrong, here or on a thread; the schedule cannot run again then.
        """
        self._stopping, self._failure = False, None
        targets = [(self._moves, GRAPH_SERVER)] * self._num_threads + [
            (self._exchange, NETWORK)
        ] * _NETWORK_THREADS
        threads = [
            threading.Thread(target=self._serve, args=target, name=f"dglx-graph-server-{number}", daemon=True)
            for number, target in enumerate(targets)
        ]
        for thread in threads:
            thread.start()
        try:
            with self._lock:
                self._moved_at = time.monotonic()
                self._progress.end = end
                self._enqueue_all()
            self._wait(look)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            with self._lock:
                self._stopping = True
                self._moves.heap.clear()
                self._exchange.heap.clear()
                for queue in (self._moves, self._exchange):
                    queue.changed.notify_all()
            for thread in threads:
                # After a failure one may still wait for an answer that never comes.
                thread.join(None if self._failure is None else _ENDS_WITHIN_S)

    def heard(self, peer: int, position: int) -> None:
        """Note that ``peer`` came to ``position``; any thread."""
        with self._lock:
            self._progress.hear(peer, position)
            self._enqueue_all()

    def counted(self, peer: int, epoch: int, correct: int) -> None:
        """Note that ``peer`` had ``correct`` right answers in ``epoch``; any thread."""
        with self._lock:
            self._progress.switch.hear(peer, epoch, correct)
            self._enqueue_all()

    def updated(self, updates: int) -> None:
        """Note that the parameter servers made ``updates`` updates; any thread."""
        with self._lock:
            self._progress.updates = max(self._progress.updates, updates)
            self._enqueue_all()

    def given(self, key: TaskKey, attempt: int) -> None:
        """Note that a task is over; any thread."""
        interval = key.interval - self._server.part.first_interval
        with self._lock:
            self._finish(interval)
        self._done(key, attempt)

    def refused(self, key: TaskKey, attempt: int) -> None:
        """Note that a task that was over before is done once more; any thread."""
        self._done(key, attempt)

    def fail(self, error: BaseException) -> None:
        """End :meth:`run` with ``error``, unless it fails already; any thread."""
        with self._lock:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _done(self, key: TaskKey, attempt: int) -> None:
        try:
            self._workers.done(key, attempt)
        except DglxError as error:
            # The next task could not be sent: no affair of the worker that is served here.
            self.fail(error)

    def _wait(self, look: Callable[[float, Sequence[int]], None]) -> None:
        while True:
            with self._lock:
                over = self._failure is not None or self._progress.is_done
                if not over:
                    self._changed.wait(_LOOK_S)
                failure, done = self._failure, self._progress.is_done
                quiet_s, behind = time.monotonic() - self._moved_at, self._waited_for()
            if failure is not None:
                raise failure
            if done:
                return
            self._workers.raise_if_failed()
            look(quiet_s, behind)

    def _waited_for(self) -> list[int]:
        """Return the peers at whose barrier all own intervals stand, or whose right answers they wait for."""
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
        queue = self._exchange if task.kind in _EXCHANGED_KINDS else self._moves
        # Opening a task costs nothing and lets a worker begin; behind all gathers of its phase it would have
        # workers and graph server take turns.
        heapq.heappush(queue.heap, (_IMMEDIATELY if task.kind is TaskKind.WORK else position, interval))
        queue.changed.notify()

    def _finish(self, interval: int) -> None:
        """Under the lock: the interval's move is over."""
        self._moved_at = time.monotonic()
        if self._stopping:
            return
        if self._progress.finish(interval):
            new_barrier = self._progress.new_barrier()
            if new_barrier is not None:
                heapq.heappush(self._exchange.heap, (_ANNOUNCE_POSITION, new_barrier))
                self._exchange.changed.notify()
            for epoch in self._progress.epochs_with_loss():
                heapq.heappush(self._exchange.heap, (_ANNOUNCE_CORRECT, epoch))
                self._exchange.changed.notify()
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
                    self._transport.announce(interval)
                elif position == _ANNOUNCE_CORRECT:
                    self._loss_index(interval)
                else:
                    self._make(interval, row)
            except Exception as error:  # noqa: BLE001 - whoever waits for the epoch must hear of it
                self.fail(error)
                return

    def _make(self, interval: int, row: str) -> None:
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
                self._transport.send(task, self._server.messages(interval, task))
            else:
                self._server.compute(interval, epoch, task)
        with self._lock:
            self._finish(interval)

    def _loss_index(self, epoch: int) -> None:
        correct = self._server.correct(epoch)
        self._transport.answer(epoch, correct)
        # Only now: a graph server that is done with all epochs sends no more.
        self.counted(self._server.rank, epoch, correct)

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
    """Whether ``task`` is a task that needs nothing but the move before it."""
    return task.kind is TaskKind.WORK and task.barrier is Barrier.NONE
