"""The task queue of one graph server and its thread pool (Dorylus, section 4): oldest work first."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol, final

from dglx_dist.cluster.timeline import GRAPH_SERVER, NETWORK, Timeline
from dglx_dist.errors import DglxError
from dglx_dist.offload.tasks import TaskKey
from dglx_dist.strategies.bounded.course import Barrier, Kind, Move
from dglx_dist.strategies.bounded.graph_server import GraphServer, Letter
from dglx_dist.strategies.bounded.progress import Progress
from dglx_dist.strategies.bounded.spans import move_name
from dglx_dist.strategies.bounded.workers import Workers

_LOOK_S, _ENDS_WITHIN_S = 0.5, 5.0
_MAIL_THREADS = 2
"""They mostly wait for answers: one may while the other packs."""
_MAIL = (Kind.SCATTER, Kind.SEND_BACK)
_NEWS, _ANSWERS, _AT_ONCE = -3, -2, -1


class Carrier(Protocol):
    """Who carries letters; see :class:`~dglx_dist.strategies.bounded.mail.Mail`."""

    def send(self, move: Move, letters: Sequence[Letter]) -> None:
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


class _Queue:
    """Moves and announcements that wait for threads, the least position first."""

    def __init__(self, lock: threading.Lock) -> None:
        self.heap: list[tuple[int, int]] = []
        """(position, interval), where ``_NEWS``, ``_ANSWERS`` and ``_AT_ONCE`` stand for positions before all
        others, and the first two have a position and an epoch for the interval."""
        self.changed = threading.Condition(lock)


@final
class ThreadSchedule:
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
        carrier: Carrier,
        *,
        threads: int,
        timeline: Timeline | None = None,
        early: bool = True,
    ) -> None:
        self._server, self._progress = server, progress
        self._workers, self._carrier = workers, carrier
        self._num_threads, self._timeline, self._early = threads, timeline, early
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._moves, self._mail = _Queue(self._lock), _Queue(self._lock)
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
            found = [self._progress.move_of(interval) for interval in numbers]
            end, queue = self._progress.end, len(self._moves.heap)
        steps = [self._server.program.steps[move.step].name if epoch < end else "" for epoch, move in found]
        return Snapshot(tuple(epoch for epoch, _ in found), tuple(steps), queue, len(self._server.desk.keys))

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
        targets = [(self._moves, GRAPH_SERVER)] * self._num_threads + [(self._mail, NETWORK)] * _MAIL_THREADS
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
                self._mail.heap.clear()
                for queue in (self._moves, self._mail):
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
        epoch, move = self._progress.move_of(self._progress.position.index(floor))
        if not self._progress.switch.is_known(epoch):
            return [peer for peer in self._progress.switch.missing() if peer != self._server.rank]
        stands = move.barrier is Barrier.GLOBAL and self._progress.pace.is_synchronous(epoch)
        return self._progress.behind(floor) if stands else []

    def _enqueue_all(self) -> None:
        for interval in self._progress.able():
            self._enqueue(interval)
        if self._progress.is_done:
            self._changed.notify_all()

    def _enqueue(self, interval: int) -> None:
        position = self._progress.position[interval]
        _, move = self._progress.start(interval)
        queue = self._mail if move.kind in _MAIL else self._moves
        # Opening a task costs nothing and lets a worker begin; behind all gathers of its phase it would have
        # workers and graph server take turns.
        heapq.heappush(queue.heap, (_AT_ONCE if move.kind is Kind.WORK else position, interval))
        queue.changed.notify()

    def _finish(self, interval: int) -> None:
        """Under the lock: the interval's move is over."""
        self._moved_at = time.monotonic()
        if self._stopping:
            return
        if self._progress.finish(interval):
            news = self._progress.news()
            if news is not None:
                heapq.heappush(self._mail.heap, (_NEWS, news))
                self._mail.changed.notify()
            for epoch in self._progress.answered():
                heapq.heappush(self._mail.heap, (_ANSWERS, epoch))
                self._mail.changed.notify()
            self._enqueue_all()
        elif self._progress.may_go(interval):
            self._enqueue(interval)

    def _serve(self, queue: _Queue, row: str) -> None:
        while True:
            with self._lock:
                while not queue.heap and not self._stopping:
                    queue.changed.wait()
                if self._stopping:
                    return
                position, interval = heapq.heappop(queue.heap)
            try:
                if position == _NEWS:
                    self._carrier.announce(interval)
                elif position == _ANSWERS:
                    self._answer(interval)
                else:
                    self._make(interval, row)
            except Exception as error:  # noqa: BLE001 - whoever waits for the epoch must hear of it
                self.fail(error)
                return

    def _make(self, interval: int, row: str) -> None:
        with self._lock:
            epoch, move = self._progress.move_of(interval)
            following = self._progress.following(interval)
        name = move_name(self._server.program.steps[move.step].name, move.kind)
        number = self._server.part.first_interval + interval
        with self._timeline.span(name, row, epoch, number) if self._timeline else nullcontext():
            if move.kind is Kind.WORK:
                self._open(interval, epoch, move)
                return
            if self._early and following is not None and _follows_at_once(following):
                self._launch_early(self._server.key_of(interval, epoch, following), interval)
            if move.kind in _MAIL:
                self._carrier.send(move, self._server.letters(interval, move))
            else:
                self._server.compute(interval, epoch, move)
        with self._lock:
            self._finish(interval)

    def _answer(self, epoch: int) -> None:
        correct = self._server.correct(epoch)
        self._carrier.answer(epoch, correct)
        # Only now: a graph server that is done with all epochs sends no more.
        self.counted(self._server.rank, epoch, correct)

    def _open(self, interval: int, epoch: int, move: Move) -> None:
        key = self._server.key_of(interval, epoch, move)
        self._server.open(interval, epoch, move)
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


def _follows_at_once(move: Move) -> bool:
    """Whether ``move`` is a task that needs nothing but the move before it."""
    return move.kind is Kind.WORK and move.barrier is Barrier.NONE
