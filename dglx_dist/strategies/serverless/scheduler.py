"""One graph server's schedule (Dorylus, section 4): intervals, threads, messages and workers."""

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
    """Tracks how far one graph server's intervals are. Not thread-safe.

    An interval's position is epoch x tasks per epoch + task. ``first_epoch`` is always synchronous, because
    no stale values exist yet.

    With ``switch_at``, an epoch's correct predictions, summed over the graph servers, set
    :attr:`synchronous_from`, unless ``synchronous_from`` is given. When the sum for epoch e is known,
    intervals may be S epochs further. So e + S + 1 is the first epoch that no interval can have begun. That
    epoch begins after the sum is known, because graph servers would otherwise begin it in different modes.
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
        self._options = options
        self._num_train = program.num_train
        self._schedule = epoch_schedule(program)
        self._first_epoch = first_epoch
        first_position = first_epoch * len(self._schedule)
        self.floor = first_position
        """The least position among all intervals."""
        self.position = [first_position] * num_intervals
        """Position of each interval's next or running task."""
        self.running: set[int] = set()
        """Intervals with a running task."""
        self.updates = first_epoch
        """Number of weight updates that all parameter servers have made."""
        self.end = first_epoch
        """The epoch before which training stops."""
        self.synchronous_from = synchronous_from
        """The epoch from which asynchronous training is synchronous, or None if none is known."""
        self._peer_positions = dict.fromkeys(peers, first_position)
        self._correct_counts: dict[int, dict[int, int]] = {}
        """Correct prediction counts by epoch and server, from ``_undecided_epoch`` on."""
        self._undecided_epoch = first_epoch
        """The first epoch for which some server's correct predictions are not known."""

    @property
    def is_done(self) -> bool:
        """Whether all intervals and the weights are at the end, and no prediction count is missing."""
        if self.floor < self.end * len(self._schedule) or self.updates < self.end:
            return False
        return not self._may_switch or self._undecided_epoch >= self.end

    @property
    def _may_switch(self) -> bool:
        return self._options.switch_at > 0 and self.synchronous_from is None

    def is_synchronous(self, epoch: int) -> bool:
        """Return whether ``epoch`` has a barrier at every Scatter."""
        if self._options.mode != "async" or epoch <= self._first_epoch:
            return True
        return self.synchronous_from is not None and epoch >= self.synchronous_from

    def is_known(self, epoch: int) -> bool:
        """Return whether the mode of ``epoch``, synchronous or not, is decided."""
        # The predictions in epoch e decide on epoch e + S + 1, see the class.
        deciding_epoch = epoch - self._options.staleness - 1
        return not self._may_switch or deciding_epoch < self._undecided_epoch

    def task_of(self, interval: int) -> tuple[int, ScheduledTask]:
        """Return the epoch and the next or running task for ``interval``."""
        epoch, index = divmod(self.position[interval], len(self._schedule))
        return epoch, self._schedule[index]

    def can_start(self, interval: int) -> bool:
        position = self.position[interval]
        epoch, index = divmod(position, len(self._schedule))
        if interval in self.running or epoch >= self.end:
            return False

        # An epoch's first task waits until the weights are new enough.
        is_synchronous = self.is_synchronous(epoch)
        if index == 0:
            lead = 0 if is_synchronous else self._options.staleness
            if not self.is_known(epoch) or epoch > self.updates + lead:
                return False
        if not is_synchronous:
            return True

        # At a barrier, or before any task in mode no_pipe, the other intervals must have come as far.
        barrier = self._schedule[index].barrier
        has_local_barrier = barrier is not Barrier.NONE or self._options.mode == "no_pipe"
        if has_local_barrier and self.floor < position:
            return False
        return barrier is not Barrier.GLOBAL or not self.behind(position)

    def startable(self) -> list[int]:
        return [interval for interval in range(len(self.position)) if self.can_start(interval)]

    def behind(self, position: int) -> list[int]:
        """Return the peers with an interval that has not reached ``position``."""
        return [peer for peer, floor in self._peer_positions.items() if floor < position]

    def waited_for(self) -> list[int]:
        """Return the peers that all own intervals wait for, at a barrier or for prediction counts."""
        epoch, _ = divmod(self.floor, len(self._schedule))
        if not self.is_known(epoch):
            counting_servers = self._correct_counts.get(self._undecided_epoch, {})
            return [peer for peer in self._peer_positions if peer not in counting_servers]
        return self.behind(self.floor) if self._is_at_global_barrier() else []

    def _is_at_global_barrier(self) -> bool:
        """Return whether the slowest own interval's next task waits for all graph servers."""
        epoch, index = divmod(self.floor, len(self._schedule))
        return self._schedule[index].barrier is Barrier.GLOBAL and self.is_synchronous(epoch)

    def start(self, interval: int) -> tuple[int, ScheduledTask]:
        """Mark the next task for ``interval`` as running. Return its epoch and the task."""
        assert self.can_start(interval), f"interval {interval} cannot start"
        self.running.add(interval)
        return self.task_of(interval)

    def finish(self, interval: int) -> bool:
        """Mark the task for ``interval`` as finished. Return True if the least position advanced."""
        self.running.remove(interval)
        self.position[interval] += 1
        previous_floor = self.floor
        self.floor = min(self.position)
        return self.floor > previous_floor

    def news(self) -> tuple[bool, int | None]:
        """Return what the peers must learn now that :attr:`floor` has advanced.

        The first value is True if peers wait for this position, because a global barrier is there, or because
        a loss was computed and the peers count predictions. The second is that loss's epoch, or None.
        """
        counted_epoch = None
        finished_epoch, finished_index = divmod(self.floor - 1, len(self._schedule))
        if self._may_switch and self._schedule[finished_index].direction is Direction.FUSED:
            counted_epoch = finished_epoch
        return self._is_at_global_barrier() or counted_epoch is not None, counted_epoch

    def record_position(self, peer: int, position: int) -> None:
        # Messages may overtake each other.
        self._peer_positions[peer] = max(self._peer_positions[peer], position)

    def record_correct(self, server: int, epoch: int, correct: int) -> None:
        """Record how many predictions are ``correct`` on ``server`` in ``epoch``.

        Servers and epochs may come in any order, but each pair only once.
        """
        num_servers = len(self._peer_positions) + 1
        self._correct_counts.setdefault(epoch, {})[server] = correct

        # Decide on each epoch that all servers have counted, in epoch order.
        while self._may_switch:
            counts = self._correct_counts.get(self._undecided_epoch, {})
            if len(counts) < num_servers:
                return
            del self._correct_counts[self._undecided_epoch]
            if sum(counts.values()) / self._num_train >= self._options.switch_at:
                self.synchronous_from = self._undecided_epoch + self._options.staleness + 1
            self._undecided_epoch += 1


@final
class WorkerPool:
    """This rank's workers, with a controller. They run from construction until :meth:`close`.

    ``handlers`` serve the workers' operations in this process. The pool is thread-safe.
    """

    def __init__(
        self,
        session: Session,
        program: Program,
        plan: ParameterPlan,
        options: LambdaOptions,
        handlers: Mapping[str, Handler],
    ) -> None:
        self._plan = plan
        self._addresses, secrets = addresses_of(open_client_access(session, options.interface))
        own_address = self._addresses[session.topology.rank]
        self._make_task = partial(
            Task,
            program=program.digest,
            graph_server=own_address,
            secrets=secrets,
            timeout_s=min(session.timeout_s, MAX_TIMEOUT_S),
            seed=session.seed,
        )

        # The executor may give notice before the controller exists.
        self._wake_controller: Callable[[], None] = lambda: None
        # The session removes its scratch folder, however the rank ends.
        context = ExecutorContext(
            folder=session.scratch, handlers=handlers, notice=lambda: self._wake_controller()
        )
        host_and_port = own_address.endpoint.removeprefix("tcp://")
        own_host = host_and_port.rpartition(":")[0].strip("[]")
        # If a later step fails, the executor is closed again.
        with ExitStack() as resources:
            open_executor: Callable[..., Executor] = EXECUTORS.get(options.executor)
            executor = open_executor(context, options.executor_options)
            resources.callback(executor.close)
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
            self._wake_controller = self.controller.wake
            self.ready = self.controller.ready
            self.done = self.controller.finish
            self.raise_if_failed = self.controller.raise_if_failed
            resources.enter_context(self.controller.run())
            self.close = resources.pop_all().close
            """Stops all workers immediately. May be called twice."""

    def launch(self, key: TaskKey, rows: slice, first_id: int, *, ready: bool) -> None:
        """Launch the task ``key`` on the local ``rows``. Local row 0 has the global id ``first_id``.

        ``ready`` tells whether the task's rows can be pulled already.
        """
        parameter_server = int(self._plan.server_of_interval[key.interval])
        task = self._make_task(
            key=key,
            rows=rows.stop - rows.start,
            first_row=first_id + rows.start,
            parameter_server=self._addresses[parameter_server],
        )
        self.controller.launch(task, ready=ready)


def check_reachable(host: str, *, paid: bool) -> None:
    """Raise ConfigError if functions in a paid cloud would have to call ``host``, a loopback address."""
    if paid and ip_address(host).is_loopback:
        raise ConfigError(
            f"workers run in a cloud, but this rank answers at {host}, which only this "
            "machine can reach; with one rank set the option interface=NAME, with several set "
            "GLOO_SOCKET_IFNAME=NAME (see `ip addr`)"
        )


def addresses_of(access: ClientAccess) -> tuple[dict[int, Address], Secrets]:
    """Return each rank's address and the secrets, as they travel to workers in JSON."""
    addresses = {}
    for rank, address in access.addresses.items():
        addresses[rank] = Address(
            rank=rank,
            host=address.host,
            endpoint=address.endpoint,
            public_key=_decode_key(address.public_key),
        )

    credentials = access.credentials
    secrets = Secrets(
        secret=credentials.secret.decode(),
        public_key=_decode_key(credentials.public_key),
        secret_key=_decode_key(credentials.secret_key),
    )
    return addresses, secrets


def _decode_key(key: bytes | None) -> str | None:
    return None if key is None else key.decode()


_WORKER_SPANS = {Direction.FORWARD: "{}", Direction.BACKWARD: "grad{}", Direction.FUSED: "{}+grad"}
"""Span names for workers. The brackets stand for the step's name."""


def _note_spans(
    timeline: Timeline, program: Program, key: TaskKey, sent_s: float, ready_s: float, done_s: float
) -> None:
    """Add the worker's wait for its rows, and its work, to ``timeline``. All times are on its clock."""
    work_start_s = max(sent_s, ready_s)
    make_span = partial(Span, row=WORKER, batch=key.epoch, interval=key.interval)
    if sent_s < work_start_s:
        timeline.note(make_span(name=f"{WAIT} for rows", begin_s=sent_s, end_s=work_start_s))
    name = _WORKER_SPANS[key.direction].format(program.steps[key.step].name)
    timeline.note(make_span(name=name, begin_s=work_start_s, end_s=done_s))


_SPANS = {
    TaskKind.WORK: "open {}",
    TaskKind.PUBLISH: "publish {}",
    TaskKind.SOFTMAX_GRADIENT: "grad{}",
    TaskKind.SEND_BACK: "grad{}",
    TaskKind.COLLECT: "collect {}",
}
"""Span names for tasks. Other kinds use the step's name alone."""
HALO_ROWS, HALO_GRADIENTS = "lambda.ghosts", "lambda.ghost_gradients"
"""Operations with the name "step/sender"."""
REACHED = "lambda.reached"
"""Operation with the name "position/sender".

With ``switch_at``, the call after a loss also carries how many predictions are correct.
"""
EXCHANGED = {TaskKind.SCATTER: (HALO_ROWS, "ghosts"), TaskKind.SEND_BACK: (HALO_GRADIENTS, "ghost_gradients")}
"""Operation and ledger phase.

A Scatter moves |G| (4 + s d) bytes per epoch and direction. The ledger's layer is the step.
"""
_CHECK_INTERVAL_S, _JOIN_TIMEOUT_S = 0.5, 5.0
_NETWORK_THREADS = 2
"""Network threads mostly wait for replies. With two of them, one waits while the other packs."""
# Priorities before all positions.
_STOP = -3
_ANNOUNCE = -2
_IMMEDIATELY = -1

_Queue: TypeAlias = PriorityQueue[tuple[int, int, Callable[[], None] | None]]
"""Actions for threads in the order (priority, interval or announced position). None ends a thread."""


@final
class ThreadScheduler:
    """Runs one graph server's epochs on compute threads, one per core, and network threads. Thread-safe.

    Graph server r is rank r. Every rank constructs its scheduler before any rank runs, and closes it after
    all have stopped sending. Unless the mode is no_pipe, a worker is launched when the task before the
    worker's own task starts, which hides the worker's start-up.
    """

    def __init__(
        self, session: Session, server: GraphServer, progress: IntervalProgress, workers: WorkerPool
    ) -> None:
        self._server = server
        self._progress = progress
        self._workers = workers
        self._rpc = session.rpc
        self._timeline = session.timeline

        # The ranks on a machine share its cores.
        num_ranks_here = session.hosts.count(session.hosts[server.rank])
        num_cores = max(1, len(os.sched_getaffinity(0)) // num_ranks_here)
        self._num_threads = server.options.threads or num_cores
        self._early_launches: dict[ScheduledTask, ScheduledTask] = {}
        """Maps a task to the worker task after it, which is launched when the first one starts."""
        if server.options.mode != "no_pipe":
            self._early_launches = _find_early_launches(server.schedule)

        self._lock = threading.Lock()
        self._done_or_failed = threading.Condition(self._lock)
        self._queues: dict[str, _Queue] = {row: PriorityQueue() for row in (GRAPH_SERVER, NETWORK)}
        self._failure: BaseException | None = None
        self._is_stopping = True
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
        """Number of tasks that wait for a thread. It decides how many workers run."""
        return self._queues[GRAPH_SERVER].qsize()

    def state(self) -> tuple[int, str]:
        """Return the least epoch, and how many intervals are at each step, such as "AV1 3 GA1 2"."""
        with self._lock:
            intervals = range(len(self._progress.position))
            tasks = [self._progress.task_of(interval) for interval in intervals]
            end = self._progress.end

        # Intervals that have completed the last epoch are at no step.
        num_intervals = Counter[str]()
        for epoch, task in tasks:
            if epoch < end:
                num_intervals[self._server.program.steps[task.step].name] += 1
        text = " ".join(f"{step} {number}" for step, number in sorted(num_intervals.items()))
        return min(epoch for epoch, _ in tasks), text or "drained"

    def run(self, end: int, check: Callable[[float, Sequence[int]], None]) -> None:
        """Train until all own intervals have completed the epoch before ``end``, and its update is made.

        ``check`` is called every half a second. It gets the seconds without progress and the peers that are
        waited for. It raises an error if something is wrong. After any error the scheduler cannot run again.
        """
        rows = [GRAPH_SERVER] * self._num_threads + [NETWORK] * _NETWORK_THREADS
        threads = []
        for index, row in enumerate(rows):
            name = f"dglx-graph-server-{index}"
            queue = self._queues[row]
            threads.append(threading.Thread(target=self._serve, args=(queue,), name=name, daemon=True))
        for thread in threads:
            thread.start()

        try:
            with self._lock:
                self._is_stopping = False
                self._progress_at = time.monotonic()
                self._progress.end = end
                self._enqueue_all()
            self._wait(check)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            with self._lock:
                self._is_stopping = True
            # Each thread takes one of these entries, and ends.
            for row in rows:
                self._queues[row].put((_STOP, 0, None))
            for thread in threads:
                # After a failure a thread may wait for a reply that never comes.
                thread.join(None if self._failure is None else _JOIN_TIMEOUT_S)

    def weights_updated(self, updates: int) -> None:
        """Record that all parameter servers have made ``updates`` updates, and start what waited for them."""
        with self._lock:
            self._progress.updates = max(self._progress.updates, updates)
            self._enqueue_all()

    def task_done(self, key: TaskKey, attempt: int) -> None:
        """Record that ``attempt`` has sent all rows for the task ``key``, and start what waited for them."""
        # Until the controller knows the end, it would count another attempt's loss as the task's loss.
        self.duplicate_done(key, attempt)
        with self._lock:
            self._finish(key.interval - self._server.part.first_interval)

    def duplicate_done(self, key: TaskKey, attempt: int) -> None:
        """Tell the controller that ``attempt`` has ended. Another attempt may have done the task before."""
        try:
            self._workers.done(key, attempt)
        except DglxError as error:
            # The controller could not send the next task. This worker's call must not fail for that.
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
                # The task before this position has computed the loss.
                epoch = (position - 1) // len(self._server.schedule)
                self._progress.record_correct(sender, epoch, int(correct))
            self._enqueue_all()
        return []

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._done_or_failed.notify_all()

    def _wait(self, check: Callable[[float, Sequence[int]], None]) -> None:
        """Return when all intervals are done. Raise the first failure in a thread, worker or ``check``."""
        while True:
            with self._lock:
                if self._failure is None and not self._progress.is_done:
                    self._done_or_failed.wait(_CHECK_INTERVAL_S)
                failure = self._failure
                is_done = self._progress.is_done
                quiet_s = time.monotonic() - self._progress_at
                awaited_peers = self._progress.waited_for()

            if failure is not None:
                raise failure
            if is_done:
                return
            self._workers.raise_if_failed()
            check(quiet_s, awaited_peers)

    def _enqueue_all(self) -> None:
        for interval in self._progress.startable():
            self._enqueue(interval)
        if self._progress.is_done:
            self._done_or_failed.notify_all()

    def _enqueue(self, interval: int) -> None:
        position = self._progress.position[interval]
        epoch, task = self._progress.start(interval)
        row = NETWORK if task.kind in EXCHANGED else GRAPH_SERVER

        # Opening a task costs nothing and lets a worker begin. If the opening were queued after all gathers
        # in its phase, workers and graph server would take turns.
        priority = _IMMEDIATELY if task.kind is TaskKind.WORK else position
        action = partial(self._execute, interval, epoch, task, row)
        self._queues[row].put((priority, interval, action))

    def _finish(self, interval: int) -> None:
        """Finish the task for ``interval``, and start what waited for its end. The caller holds the lock."""
        self._progress_at = time.monotonic()
        if self._is_stopping:
            return
        has_advanced = self._progress.finish(interval)
        if not has_advanced:
            # Only this interval's next task can have waited.
            if self._progress.can_start(interval):
                self._enqueue(interval)
            return

        # All intervals have reached a new position, for which intervals on this and other servers may wait.
        position = self._progress.floor
        is_awaited, counted_epoch = self._progress.news()
        if is_awaited:
            action = partial(self._announce, position, counted_epoch)
            self._queues[NETWORK].put((_ANNOUNCE, position, action))
        self._enqueue_all()

    def _serve(self, queue: _Queue) -> None:
        """Run actions from ``queue`` until one fails or an action is None. Each thread runs this."""
        while True:
            _, _, action = queue.get()
            if action is None:
                return
            try:
                action()
            except Exception as error:  # noqa: BLE001 - the thread that waits in run() raises it
                self._fail(error)
                return

    def _execute(self, interval: int, epoch: int, task: ScheduledTask, row: str) -> None:
        """Execute ``task``, or open it for a worker. A worker's task is finished by :meth:`task_done`."""
        server = self._server
        name = _SPANS.get(task.kind, "{}").format(server.program.steps[task.step].name)
        with self._timeline.span(name, row, epoch, server.part.first_interval + interval):
            if task.kind is TaskKind.WORK:
                self._open(interval, epoch, task)
                return

            worker_task = self._early_launches.get(task)
            if worker_task is not None:
                self._launch(interval, server.key_of(interval, epoch, worker_task), ready=False)
            if task.kind in EXCHANGED:
                self._send(interval, task)
            else:
                server.compute(interval, epoch, task)

        with self._lock:
            self._finish(interval)

    def _open(self, interval: int, epoch: int, task: ScheduledTask) -> None:
        """Let a worker pull the rows for ``task``, and launch the worker if that was not done before."""
        key = self._server.key_of(interval, epoch, task)
        self._server.open(interval, epoch, task)
        if task in self._early_launches.values():
            self._workers.ready(key)
        else:
            self._launch(interval, key, ready=True)

    def _launch(self, interval: int, key: TaskKey, *, ready: bool) -> None:
        rows = self._server.rows_of(interval, key.step)
        first_id = self._server.first_id(key.step)
        self._workers.launch(key, rows, first_id, ready=ready)

    def _send(self, interval: int, task: ScheduledTask) -> None:
        """Send the halo rows or halo gradients for ``interval`` to all peers, and wait for the replies."""
        op, phase = EXCHANGED[task.kind]
        name = pair_name(task.step, self._server.rank)
        calls = []
        for peer, arrays in self._server.halo_messages(interval, task):
            call = self._rpc.submit(peer, op, name, arrays, phase=phase, layer=task.step)
            calls.append(call)
        for call in calls:
            call.result()

    def _announce(self, position: int, counted_epoch: int | None) -> None:
        """Tell all peers that this server has reached ``position``, and wait for their replies.

        If ``counted_epoch`` is an epoch, the peers also learn how many of its predictions are correct.
        """
        rank = self._server.rank
        peers = {*range(self._server.part.graph.num_servers)} - {rank}
        name = pair_name(position, rank)
        if counted_epoch is None:
            self._rpc.call_all(peers, REACHED, name, [], phase=CONTROL)
            return

        correct = self._server.correct(counted_epoch)
        self._rpc.call_all(peers, REACHED, name, [np.array([correct], np.int64)], phase=CONTROL)
        # The count is recorded only after the peers know it. With it this server may be done, and a server
        # that is done sends nothing more.
        with self._lock:
            self._progress.record_correct(rank, counted_epoch, correct)
            self._enqueue_all()


def _find_early_launches(schedule: Sequence[ScheduledTask]) -> dict[ScheduledTask, ScheduledTask]:
    """Return the worker tasks that may be launched early, each under the task before it.

    The task before must run on the graph server, and there must be no barrier between the two.
    """
    early_launches = {}
    for previous, task in pairwise(schedule):
        is_work = task.kind is TaskKind.WORK and previous.kind is not TaskKind.WORK
        if is_work and task.barrier is Barrier.NONE:
            early_launches[previous] = task
    return early_launches
