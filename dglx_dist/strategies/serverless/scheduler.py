"""Schedule of one graph server (Dorylus, section 4): which interval may proceed, threads, messages, workers.

The oldest work goes first. Graph servers exchange halo rows, progress and accuracy by one-sided RPC.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from itertools import pairwise
from queue import PriorityQueue
from typing import TypeAlias, final

import numpy as np

from dglx_dist.comm.endpoints import ClientAccess, open_client_access
from dglx_dist.comm.ledger import CONTROL
from dglx_dist.comm.rendezvous import read_link_speed
from dglx_dist.comm.rpc import Handler
from dglx_dist.comm.session import Session
from dglx_dist.comm.trace import GRAPH_SERVER, NETWORK, WAIT, WORKER, Span, Timeline
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.controller import Controller, most_workers
from dglx_dist.strategies.serverless.executors.base import EXECUTORS, Executor, ExecutorContext
from dglx_dist.strategies.serverless.graph_server import (
    Barrier,
    GraphServer,
    ScheduledTask,
    TaskKind,
    epoch_schedule,
)
from dglx_dist.strategies.serverless.options import LambdaOptions
from dglx_dist.strategies.serverless.parameter_server import ParameterPlan
from dglx_dist.strategies.serverless.parameter_service import pair_name, parse_pair
from dglx_dist.strategies.serverless.program import Program
from dglx_dist.strategies.serverless.tasks import MAX_TIMEOUT_S, Address, Direction, Secrets, Task, TaskKey


@final
class IntervalProgress:
    """Positions of the intervals of one graph server: epoch x tasks per epoch + task. Not thread-safe.

    With ``switch_at``, the correct predictions of an epoch, summed over the graph servers, set
    :attr:`synchronous_from`, unless it is given. When the sum of epoch e is known, intervals may be S epochs
    further, so the first epoch that no interval can have begun is e + S + 1. It does not begin before the sum
    is known, because graph servers would otherwise begin it in different modes.

    ``first_epoch`` is always synchronous, because no stale values exist yet.
    """

    def __init__(
        self,
        program: Program,
        options: LambdaOptions,
        num_intervals: int,
        peers: Sequence[int],
        first_epoch: int = 0,
        synchronous_from: int | None = None,
    ) -> None:
        self._options, self._num_train = options, program.num_train
        self._schedule = epoch_schedule(program)
        self.floor = start = first_epoch * len(self._schedule)
        """The least position."""
        self.position = [start] * num_intervals
        """Positions of the next or running task of each interval."""
        self.running: set[int] = set()
        """Intervals with a running task."""
        self._first = self.updates = self.end = first_epoch
        """Weight updates that all parameter servers have made; the epoch before which training stops."""
        self.synchronous_from = synchronous_from
        """The epoch from which asynchronous training is synchronous; None: not known yet, or never."""
        self._peer_positions = dict.fromkeys(peers, start)
        self._correct: dict[int, dict[int, int]] = {}
        self._undecided = first_epoch

    @property
    def is_done(self) -> bool:
        """True if all intervals and the weights are at the end, and no count of predictions is missing."""
        over = self.floor >= self.end * len(self._schedule) and self.updates >= self.end
        return over and (not self._may_switch or self._undecided >= self.end)

    @property
    def _may_switch(self) -> bool:
        return self._options.switch_at > 0 and self.synchronous_from is None

    def is_synchronous(self, epoch: int) -> bool:
        """True if ``epoch`` has a barrier at every Scatter."""
        late = self.synchronous_from is not None and epoch >= self.synchronous_from
        return self._options.mode != "async" or epoch <= self._first or late

    def is_known(self, epoch: int) -> bool:
        """True if it is known whether ``epoch`` is synchronous."""
        return not self._may_switch or epoch - self._options.staleness - 1 < self._undecided

    def task_of(self, interval: int) -> tuple[int, ScheduledTask]:
        epoch, index = divmod(self.position[interval], len(self._schedule))
        return epoch, self._schedule[index]

    def can_start(self, interval: int) -> bool:
        position = self.position[interval]
        epoch, index = divmod(position, len(self._schedule))
        if interval in self.running or epoch >= self.end:
            return False

        if index == 0:
            lead = 0 if self.is_synchronous(epoch) else self._options.staleness
            if not self.is_known(epoch) or epoch > self.updates + lead:
                return False

        if not self.is_synchronous(epoch):
            return True
        barrier = self._schedule[index].barrier
        if self.floor < position and (barrier is not Barrier.NONE or self._options.mode == "no_pipe"):
            return False
        return barrier is not Barrier.GLOBAL or not self.behind(position)

    def startable(self) -> list[int]:
        return [interval for interval in range(len(self.position)) if self.can_start(interval)]

    def behind(self, position: int) -> list[int]:
        return [peer for peer, floor in self._peer_positions.items() if floor < position]

    def waited_for(self) -> list[int]:
        """Return the peers at whose barrier all own intervals wait, or whose counts are missing."""
        epoch, index = divmod(self.floor, len(self._schedule))
        if not self.is_known(epoch):
            return [
                peer for peer in self._peer_positions if peer not in self._correct.get(self._undecided, ())
            ]
        waits = self._schedule[index].barrier is Barrier.GLOBAL and self.is_synchronous(epoch)
        return self.behind(self.floor) if waits else []

    def start(self, interval: int) -> tuple[int, ScheduledTask]:
        assert self.can_start(interval), f"interval {interval} cannot start"
        self.running.add(interval)
        return self.task_of(interval)

    def finish(self, interval: int) -> bool:
        """Mark the task of ``interval`` as finished; return True if the least position advanced."""
        self.running.remove(interval)
        self.position[interval] += 1
        before = self.floor
        self.floor = min(self.position)
        return self.floor > before

    def news(self) -> tuple[bool, int | None]:
        """Return whether the peers wait for :attr:`floor`, now reached, and the epoch that they count there.

        They wait for global barriers, and, with ``switch_at``, for the correct predictions after a loss.
        """
        epoch, index = divmod(self.floor, len(self._schedule))
        at_barrier = self._schedule[index].barrier is Barrier.GLOBAL and self.is_synchronous(epoch)
        epoch, index = divmod(self.floor - 1, len(self._schedule))
        is_counted = self._may_switch and self._schedule[index].direction is Direction.FUSED
        return at_barrier or is_counted, epoch if is_counted else None

    def record_position(self, peer: int, position: int) -> None:
        self._peer_positions[peer] = max(self._peer_positions[peer], position)

    def record_correct(self, server: int, epoch: int, correct: int) -> None:
        """Record that ``server`` has ``correct`` correct predictions in ``epoch``; in any order, but once."""
        num_servers = len(self._peer_positions) + 1
        self._correct.setdefault(epoch, {})[server] = correct
        while self._may_switch and len(self._correct.get(self._undecided, ())) == num_servers:
            correct = sum(self._correct.pop(self._undecided).values())
            if correct / self._num_train >= self._options.switch_at:
                self.synchronous_from = self._undecided + self._options.staleness + 1
            self._undecided += 1


@final
class WorkerPool:
    """The workers of this rank, behind a controller, from construction until :meth:`close`. Thread-safe.

    ``handlers`` are those of workers' operations in this process.
    """

    def __init__(
        self,
        session: Session,
        program: Program,
        plan: ParameterPlan,
        options: LambdaOptions,
        handlers: Mapping[str, Handler],
    ) -> None:
        self._plan, rank = plan, session.topology.rank
        self._addresses, secrets = addresses_of(open_client_access(session, options.interface))
        own_host = self._addresses[rank].endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        self._task = partial(
            Task,
            program=program.digest,
            graph_server=self._addresses[rank],
            secrets=secrets,
            timeout_s=min(session.timeout_s, MAX_TIMEOUT_S),
            seed=session.seed,
        )

        # The executor may give notice before the controller exists.
        self._wake: Callable[[], None] = lambda: None
        with ExitStack() as undo:
            context = ExecutorContext(
                # The session removes it, however the rank ends.
                folder=session.scratch,
                handlers=handlers,
                notice=lambda: self._wake(),
            )
            open_executor: Callable[..., Executor] = EXECUTORS.get(options.executor)
            executor = open_executor(context, options.executor_options)
            undo.callback(executor.close)
            check_reachable(own_host, paid=not executor.simulated)
            self.simulated = executor.simulated
            """True if no provider is paid."""
            self.controller = Controller(
                executor,
                most=most_workers(options.intervals, read_link_speed(own_host)),
                workers=options.workers,
                retries=options.retries,
                prices=options.price_table,
                clock=time.perf_counter,
                observer=partial(_note_spans, session.timeline, program),
            )
            self._wake = self.controller.wake
            self.ready = self.controller.ready
            self.done = self.controller.finish
            self.raise_if_failed = self.controller.raise_if_failed
            undo.enter_context(self.controller.run())
            self.close = undo.pop_all().close
            """Stops all workers immediately; idempotent."""

    def launch(self, key: TaskKey, rows: slice, first_id: int, *, ready: bool) -> None:
        """Launch a task on the local ``rows``, whose global ids begin at ``first_id`` for row 0.

        ``ready`` tells whether its rows can be pulled already.
        """
        server = self._addresses[int(self._plan.server_of_interval[key.interval])]
        first_row = first_id + rows.start
        task = self._task(key=key, rows=rows.stop - rows.start, first_row=first_row, parameter_server=server)
        self.controller.launch(task, ready=ready)


def check_reachable(host: str, *, paid: bool) -> None:
    """Raise ConfigError if functions of a paid cloud would have to call ``host``, a loopback address."""
    if paid and ip_address(host).is_loopback:
        raise ConfigError(
            f"workers run in a cloud, but this rank answers at {host}, which only this machine can reach; "
            "with one rank set the option interface=NAME, with several set GLOO_SOCKET_IFNAME=NAME "
            "(see `ip addr`)"
        )


def addresses_of(access: ClientAccess) -> tuple[dict[int, Address], Secrets]:
    def text(key: bytes | None) -> str | None:
        return None if key is None else key.decode()

    addresses = {
        rank: Address(
            rank=rank,
            host=address.host,
            endpoint=address.endpoint,
            public_key=text(address.public_key),
        )
        for rank, address in access.addresses.items()
    }
    shown = access.credentials
    keys = {"public_key": text(shown.public_key), "secret_key": text(shown.secret_key)}
    return addresses, Secrets(secret=shown.secret.decode(), **keys)


def _note_spans(
    timeline: Timeline, program: Program, key: TaskKey, sent: float, ready: float, done: float
) -> None:
    # The worker's wait for its rows, and its work, with the clock of the timeline.
    work = max(sent, ready)
    note = partial(Span, row=WORKER, batch=key.epoch, interval=key.interval)
    if sent < work:
        timeline.note(note(name=f"{WAIT} for rows", begin_s=sent, end_s=work))
    spans = {Direction.FORWARD: "{}", Direction.BACKWARD: "grad{}", Direction.FUSED: "{}+grad"}
    name = spans[key.direction].format(program.steps[key.step].name)
    timeline.note(note(name=name, begin_s=work, end_s=done))


_SPANS = {
    TaskKind.WORK: "open {}",
    TaskKind.PUBLISH: "publish {}",
    TaskKind.SOFTMAX_GRADIENT: "grad{}",
    TaskKind.SEND_BACK: "grad{}",
    TaskKind.COLLECT: "collect {}",
}
"""Names of spans; of other tasks that of the step."""
HALO_ROWS, HALO_GRADIENTS = "lambda.ghosts", "lambda.ghost_gradients"
"""Operations named "step/sender"."""
REACHED = "lambda.reached"
"""Named "position/sender"; with ``switch_at``, after a loss with the number of correct predictions."""
EXCHANGED = {TaskKind.SCATTER: (HALO_ROWS, "ghosts"), TaskKind.SEND_BACK: (HALO_GRADIENTS, "ghost_gradients")}
"""Operation and ledger phase: |G| (4 + s d) bytes per Scatter, epoch and direction; the layer is the step."""
_CHECK_INTERVAL_S, _JOIN_TIMEOUT_S = 0.5, 5.0
_NETWORK_THREADS = 2
"""They mostly wait for replies: one waits while the other packs."""
# These come before all positions.
_STOP = -3
_ANNOUNCE = -2
_IMMEDIATELY = -1

_Queue: TypeAlias = PriorityQueue[tuple[int, int, Callable[[], None] | None]]
"""(position, interval or announced position, action), least first; no action: the thread ends."""


@final
class ThreadScheduler:
    """Runs the epochs of one graph server on compute threads, one per core, and network threads. Thread-safe.

    Graph server r is rank r. Every rank constructs its scheduler before any rank runs, and closes it after
    all have stopped sending. Unless the mode is no_pipe, a worker is launched when the task before its own
    starts, to hide its start-up.
    """

    def __init__(
        self, session: Session, server: GraphServer, progress: IntervalProgress, workers: WorkerPool
    ) -> None:
        self._server = server
        self._progress = progress
        self._workers = workers
        self._rpc, self._timeline = session.rpc, session.timeline

        # This rank's share of the cores of its machine, at least 1.
        cores = len(os.sched_getaffinity(0)) // Counter(session.hosts)[session.hosts[server.rank]]
        self._num_threads = server.options.threads or max(1, cores)
        self._early: dict[ScheduledTask, ScheduledTask] = {
            before: task
            for before, task in pairwise(server.schedule if server.options.mode != "no_pipe" else ())
            if task.kind is TaskKind.WORK
            and task.barrier is Barrier.NONE
            and before.kind is not TaskKind.WORK
        }
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queues: dict[str, _Queue] = {row: PriorityQueue() for row in (GRAPH_SERVER, NETWORK)}
        self._failure: BaseException | None = None
        self._stopping = True
        self._progress_at = time.monotonic()
        self._handlers: dict[str, Handler] = {
            HALO_ROWS: partial(self._receive_rows, TaskKind.SCATTER),
            HALO_GRADIENTS: partial(self._receive_rows, TaskKind.SEND_BACK),
            REACHED: self._receive_position,
        }
        for op, handler in self._handlers.items():
            self._rpc.register(op, handler)

    def close(self) -> None:
        for op in self._handlers:
            self._rpc.unregister(op)

    @property
    def queue_length(self) -> int:
        """Tasks that wait for a thread; the number of workers is tuned by it."""
        return self._queues[GRAPH_SERVER].qsize()

    def state(self) -> tuple[int, str]:
        """Return the least epoch, and the number of intervals at each step ("AV1 3 GA1 2"); thread-safe."""
        with self._lock:
            tasks = [self._progress.task_of(interval) for interval in range(len(self._progress.position))]
            end = self._progress.end
        steps = Counter(self._server.program.steps[task.step].name for epoch, task in tasks if epoch < end)
        text = " ".join(f"{step} {number}" for step, number in sorted(steps.items()))
        return min(epoch for epoch, _ in tasks), text or "drained"

    def run(self, end: int, check: Callable[[float, Sequence[int]], None]) -> None:
        """Train until all own intervals have completed the epoch before ``end``, and its update is made.

        ``check`` is called every half a second with the seconds without progress and the peers that are
        waited for; it raises if something is wrong. After any error the scheduler cannot run again.
        """
        rows = [GRAPH_SERVER] * self._num_threads + [NETWORK] * _NETWORK_THREADS
        threads = [
            threading.Thread(
                target=self._serve, args=(self._queues[row],), name=f"dglx-graph-server-{number}", daemon=True
            )
            for number, row in enumerate(rows)
        ]
        for thread in threads:
            thread.start()
        try:
            with self._lock:
                self._stopping = False
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
            for row in rows:
                self._queues[row].put((_STOP, 0, None))
            for thread in threads:
                # After a failure a thread may wait for a reply that never comes.
                thread.join(None if self._failure is None else _JOIN_TIMEOUT_S)

    def weights_updated(self, updates: int) -> None:
        with self._lock:
            self._progress.updates = max(self._progress.updates, updates)
            self._enqueue_all()

    def task_done(self, key: TaskKey, attempt: int) -> None:
        # First: until the controller knows, it would count the loss of another attempt as one of the task.
        self.duplicate_done(key, attempt)
        with self._lock:
            self._finish(key.interval - self._server.part.first_interval)

    def duplicate_done(self, key: TaskKey, attempt: int) -> None:
        try:
            self._workers.done(key, attempt)
        except DglxError as error:
            # The next task could not be sent, which must not fail the call of the worker served here.
            self._fail(error)

    def _receive_rows(self, kind: TaskKind, name: str, arrays: Sequence[Array]) -> list[Array]:
        step, sender = parse_pair(name)
        self._server.receive(sender, kind, step, arrays)
        return []

    def _receive_position(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        position, sender = parse_pair(name)
        with self._lock:
            self._progress.record_position(sender, position)
            for (correct,) in arrays:
                epoch = (position - 1) // len(self._server.schedule)
                self._progress.record_correct(sender, epoch, int(correct))
            self._enqueue_all()
        return []

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _wait(self, check: Callable[[float, Sequence[int]], None]) -> None:
        while True:
            with self._lock:
                if self._failure is None and not self._progress.is_done:
                    self._changed.wait(_CHECK_INTERVAL_S)
                failure, done = self._failure, self._progress.is_done
                quiet_s = time.monotonic() - self._progress_at
                behind = self._progress.waited_for()

            if failure is not None:
                raise failure
            if done:
                return
            self._workers.raise_if_failed()
            check(quiet_s, behind)

    def _enqueue_all(self) -> None:
        for interval in self._progress.startable():
            self._enqueue(interval)
        if self._progress.is_done:
            self._changed.notify_all()

    def _enqueue(self, interval: int) -> None:
        position = self._progress.position[interval]
        epoch, task = self._progress.start(interval)
        row = NETWORK if task.kind in EXCHANGED else GRAPH_SERVER
        # Opening a task costs nothing and lets a worker begin. Queued after all gathers of its phase, workers
        # and graph server would take turns.
        first = _IMMEDIATELY if task.kind is TaskKind.WORK else position
        self._queues[row].put((first, interval, partial(self._execute, interval, epoch, task, row)))

    def _finish(self, interval: int) -> None:
        # The caller holds the lock.
        self._progress_at = time.monotonic()
        if self._stopping:
            return
        if self._progress.finish(interval):
            position = self._progress.floor
            is_awaited, counted = self._progress.news()
            if is_awaited:
                self._queues[NETWORK].put((_ANNOUNCE, position, partial(self._announce, position, counted)))
            self._enqueue_all()
        elif self._progress.can_start(interval):
            self._enqueue(interval)

    def _serve(self, queue: _Queue) -> None:
        while (action := queue.get()[2]) is not None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - the thread that waits in run() raises it
                self._fail(error)
                return

    def _execute(self, interval: int, epoch: int, task: ScheduledTask, row: str) -> None:
        server = self._server
        name = _SPANS.get(task.kind, "{}").format(server.program.steps[task.step].name)
        number = server.part.first_interval + interval
        with self._timeline.span(name, row, epoch, number):
            if task.kind is TaskKind.WORK:
                self._open(interval, epoch, task)
                return
            if (work := self._early.get(task)) is not None:
                key = server.key_of(interval, epoch, work)
                self._launch(interval, key, ready=False)
            if task.kind in EXCHANGED:
                self._send(interval, task)
            else:
                server.compute(interval, epoch, task)

        with self._lock:
            self._finish(interval)

    def _open(self, interval: int, epoch: int, task: ScheduledTask) -> None:
        key = self._server.key_of(interval, epoch, task)
        self._server.open(interval, epoch, task)
        if task in self._early.values():
            self._workers.ready(key)
        else:
            self._launch(interval, key, ready=True)

    def _launch(self, interval: int, key: TaskKey, *, ready: bool) -> None:
        rows = self._server.rows_of(interval, key.step)
        first_id = self._server.first_id(key.step)
        self._workers.launch(key, rows, first_id, ready=ready)

    def _send(self, interval: int, task: ScheduledTask) -> None:
        op, phase = EXCHANGED[task.kind]
        name = pair_name(task.step, self._server.rank)
        submit = self._rpc.submit
        sent = [
            submit(peer, op, name, arrays, phase=phase, layer=task.step)
            for peer, arrays in self._server.halo_messages(interval, task)
        ]
        for pending in sent:
            pending.result()

    def _announce(self, position: int, counted: int | None) -> None:
        # To all peers; waits for their replies.
        rank = self._server.rank
        counts = list[Array]()
        if counted is not None:
            counts = [np.array([self._server.correct(counted)], dtype=np.int64)]
        peers = {*range(self._server.part.graph.num_servers)} - {rank}
        self._rpc.call_all(peers, REACHED, pair_name(position, rank), counts, phase=CONTROL)

        if counted is not None:
            # Only after the peers know it, because a graph server that is done sends nothing more.
            with self._lock:
                self._progress.record_correct(rank, counted, int(counts[0][0]))
                self._enqueue_all()
