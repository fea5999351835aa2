"""Training engine: every rank is a graph server, the first ones also parameter servers (Dorylus)."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Generic, NamedTuple, TypeVar, final

import numpy as np

from dglx_dist.comm.collectives import barrier, gather_int64, raise_for_missing
from dglx_dist.comm.endpoints import open_client_access
from dglx_dist.comm.ledger import WORKER as WORKERS
from dglx_dist.comm.rendezvous import link_speed
from dglx_dist.comm.rpc import Handler, PeerAddress
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.comm.trace import WAIT, WORKER, Span, Timeline
from dglx_dist.comm.wire import payload_bytes
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.records import Array
from dglx_dist.serverless.aws.package import stages_of
from dglx_dist.serverless.controller import Controller, ControllerOptions, Finished, most_workers
from dglx_dist.serverless.cost import Bill, Counts, bill, dollars
from dglx_dist.serverless.executors.base import EXECUTORS, ExecutorContext
from dglx_dist.serverless.json_fields import printable
from dglx_dist.serverless.parameter_server import ParameterPlan, ParameterServer, Update, assign
from dglx_dist.serverless.parameter_service import ParameterClient, ParameterService, what_misses
from dglx_dist.serverless.program import Program
from dglx_dist.serverless.tasks import (
    MAX_TIMEOUT_S,
    Address,
    Secrets,
    Task,
    TaskKey,
    TaskOptions,
    kernels,
    parse_attempt,
    parse_half,
)
from dglx_dist.serverless.worker import GIVE, GRADIENTS, PROGRAM, PULL, WEIGHTS
from dglx_dist.strategies.serverless.graph_partition import Part
from dglx_dist.strategies.serverless.graph_server import GraphServer, SubmitResult
from dglx_dist.strategies.serverless.options import LambdaOptions, StalenessPolicy
from dglx_dist.strategies.serverless.scheduler import Progress, ThreadScheduler, Workers, span_name


@final
@dataclass(frozen=True, kw_only=True)
class Account:
    """Work and server time of one rank, or of all ranks together."""

    counts: Counts = field(default_factory=Counts)
    server_seconds: float = 0.0
    """Seconds that graph servers trained, summed over the ranks."""

    def __add__(self, other: Account) -> Account:
        seconds = self.server_seconds + other.server_seconds
        return Account(counts=self.counts + other.counts, server_seconds=seconds)

    def bill(self, options: LambdaOptions, *, simulated: bool) -> Bill:
        used = Counts() if options.in_process else self.counts
        return bill(used, {options.server: self.server_seconds}, options.price_table, simulated=simulated)

    def describe(self, options: LambdaOptions, *, simulated: bool) -> dict[str, object]:
        """Return counts, dollars and labels as JSON values."""
        paid = self.bill(options, simulated=simulated)
        return {
            **asdict(self.counts),
            "server_seconds": self.server_seconds,
            "server": options.server,
            "dollars_functions": paid.functions,
            "dollars_servers": paid.servers,
            "dollars": paid.total,
            "label": paid.label,
            "text": str(paid),
        }


def gather_numbers(values: Sequence[float] | Array, session: Session) -> Array:
    """Collect (K,) numbers from every rank: (W, K) float64. Collective.

    As their bits: as text, their length, and the bytes that are counted, would differ between runs.
    """
    own = np.ascontiguousarray(values, dtype=np.float64).reshape(-1)
    return gather_int64(own.view(np.int64), session).view(np.float64)


def account_of_ranks(own: Account, session: Session) -> Account:
    """Return the sum of the accounts of all ranks. Collective."""
    counts = vars(own.counts)
    rows = gather_numbers([*counts.values(), own.server_seconds], session)
    *sums, seconds = (math.fsum(column) for column in rows.T)
    added = {name: type(counts[name])(one) for name, one in zip(counts, sums, strict=True)}
    return Account(counts=Counts(**added), server_seconds=seconds)


@final
class WorkerPool:
    """:class:`Workers` of this rank, behind a controller, from construction until :meth:`close`."""

    def __init__(
        self,
        session: Session,
        program: Program,
        plan: ParameterPlan,
        options: LambdaOptions,
        handlers: Mapping[str, Handler],
    ) -> None:
        self._plan, rank = plan, session.topology.rank
        access = open_client_access(session, options.interface)
        shown = access.credentials
        self._addresses = {peer: _address(one) for peer, one in access.addresses.items()}
        own_host = self._addresses[rank].endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        self._task = partial(
            Task,
            program=program.digest,
            graph_server=self._addresses[rank],
            secrets=Secrets(
                secret=shown.secret.decode(),
                public_key=_text(shown.public_key),
                secret_key=_text(shown.secret_key),
            ),
            timeout_s=min(session.timeout_s, MAX_TIMEOUT_S),
            options=TaskOptions(streaming=options.streaming, rematerialise=options.rematerialise),
        )
        # The executor may give notice before the controller exists.
        self._wake: Callable[[], None] = lambda: None
        with ExitStack() as undo:
            executor = EXECUTORS.get(options.executor)(
                ExecutorContext(
                    # The session removes it, however the rank ends.
                    folder=session.scratch,
                    stages=stages_of(program.steps),
                    handlers=handlers,
                    notice=lambda: self._wake(),
                ),
                options.executor_options,
            )
            undo.callback(executor.close)
            check_reachable(own_host, paid=not executor.simulated)
            self.simulated = executor.simulated
            """True if no provider is paid."""
            self.controller = Controller(
                executor,
                ControllerOptions(
                    most=most_workers(options.intervals, link_speed(own_host)),
                    workers=options.workers or None,
                    batch=options.batch,
                    retries=options.retries,
                    prices=options.price_table,
                ),
                clock=time.perf_counter,
                observer=partial(_note_spans, session.timeline, program),
            )
            self._wake, self.ready = self.controller.wake, self.controller.ready
            self.raise_if_failed = self.controller.raise_if_failed
            undo.enter_context(self.controller.run())
            self.close = undo.pop_all().close
            """Stops all workers immediately; idempotent."""

    @property
    def counts(self) -> Counts:
        return self.controller.counts

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        server = self._addresses[int(self._plan.server_of_interval[key.interval])]
        self.controller.launch(self._task(key=key, rows=rows, parameter_server=server), ready=ready)

    def done(self, key: TaskKey, attempt: int) -> None:
        self.controller.finished(key, attempt)


def check_reachable(host: str, *, paid: bool) -> None:
    """Raise ConfigError if functions of a paid cloud would have to call ``host``, a loopback address."""
    if paid and ip_address(host).is_loopback:
        raise ConfigError(
            f"workers run in a cloud, but this rank answers at {host}, which only this machine can reach; "
            "with one rank set the option interface=NAME, with several set GLOO_SOCKET_IFNAME=NAME "
            "(see `ip addr`)"
        )


def _address(peer: PeerAddress) -> Address:
    return Address(rank=peer.rank, host=peer.host, endpoint=peer.endpoint, public_key=_text(peer.public_key))


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode()


def _note_spans(timeline: Timeline, program: Program, done: Finished) -> None:
    # The worker's wait for its rows, and its work, with the clock of the timeline.
    key, work = done.key, max(done.sent, done.ready)
    note = partial(Span, row=WORKER, batch=key.epoch, interval=key.interval)
    if done.sent < work:
        timeline.note(note(name=f"{WAIT} for rows", begin_s=done.sent, end_s=work))
    name = span_name(program, key.step, key.direction)
    timeline.note(note(name=name, begin_s=work, end_s=done.done))


PROGRAM_PHASE, DOWN, UP = "lambda_program", "lambda_down", "lambda_up"
"""Ledger phases. Workers have no ledger, so the graph server counts their traffic."""
_MOST_KERNELS, _LONGEST_KERNELS = 16, 400
_PEER_CHECK_S = 5.0

W = TypeVar("W", bound=Workers)


class EpochTotals(NamedTuple):
    """Totals of one epoch over all ranks; equal on all."""

    epoch: int
    loss_sum: float
    """Over all training nodes; not divided."""
    correct: int
    """Training nodes whose largest output is at their label."""
    seconds: float
    """Between the weight updates before and after the epoch, on the slowest rank. Epochs may overlap."""


@final
class Engine(Generic[W]):
    """Runs epochs on this rank together with all others. All methods but :meth:`abandon` are collective.

    Args:
        plan, policy: Equal on all ranks.
        parameters: This rank's parameter server, if it has one.
        start_workers: Starts the workers of this rank, given the handlers of their operations in this
            process. The engine closes them.
    """

    def __init__(
        self,
        session: Session,
        server: GraphServer,
        plan: ParameterPlan,
        policy: StalenessPolicy,
        parameters: ParameterServer | None,
        start_workers: Callable[[Mapping[str, Handler]], W],
        *,
        threads: int = 1,
    ) -> None:
        self._session, self._server, self._parameter_server = session, server, parameters
        rank, self._num_servers = session.topology.rank, plan.num_servers
        self._peers = [peer for peer in range(session.topology.world_size) if peer != rank]
        self.progress = Progress(server.schedule, server.part.num_intervals, policy, self._peers)
        self._updated_at = {policy.first_epoch: time.perf_counter()}
        self._program = np.frombuffer(server.program.to_json(), np.uint8)
        self.kernels = {_one_line(kernels())}
        """Numerical kernels of this process and those that workers reported; see ``kernels`` of tasks."""
        self.epoch = policy.first_epoch
        """The next epoch; all intervals have completed the one before it."""
        with ExitStack() as undo:
            handlers = self._answer_workers(undo)
            self.parameters = ParameterClient(session.rpc, plan, self._updated)
            """The latest weights and the optimizer's state, between runs."""
            undo.callback(self.parameters.close)
            if parameters is not None:
                world_size, timeline = session.topology.world_size, session.timeline
                service = ParameterService(session.rpc, parameters, world_size, timeline, server.run)
                undo.callback(service.close)
            self.workers = start_workers(handlers)
            undo.callback(self.workers.close)
            self.scheduler = ThreadScheduler(
                session.rpc,
                server,
                self.progress,
                self.workers,
                session.timeline,
                threads=threads,
                early=policy.mode != "no_pipe",
            )
            undo.callback(self.scheduler.close)
            barrier(session, "making the engines of all graph servers")
            self.abandon = undo.pop_all().close
            """Releases everything after a failure, without waiting for other ranks."""

    def run(self, epochs: int) -> list[EpochTotals]:
        """Train ``epochs`` more epochs; no rank has work in flight afterwards. Collective.

        Raises PeerError, naming who is missing, if a rank is dead or there was no progress for the session's
        time-out; or if a task failed in all allowed attempts.
        """
        first, end = self.epoch, self.epoch + epochs
        self._updated_at = {first: time.perf_counter()}
        self.scheduler.run(end, self._check)
        self.epoch = end
        barrier(self._session, f"the end of epoch {end - 1}")
        if self._parameter_server is not None:
            self._parameter_server.drain()
        local = [
            [*self._server.statistics(epoch), self._updated_at[epoch + 1] - self._updated_at[epoch]]
            for epoch in range(first, end)
        ]
        per_rank = gather_numbers(np.array(local), self._session).reshape(-1, epochs, 3)
        return [
            EpochTotals(epoch, math.fsum(losses), int(correct.sum()), float(seconds.max()))
            for epoch, (losses, correct, seconds) in enumerate(per_rank.transpose(1, 2, 0), first)
        ]

    def close(self) -> None:
        """Release everything once no rank needs another one. Collective."""
        # Workers first. A cloud function cannot be stopped: a late one sends this run's number, which the
        # servers of the next run reject.
        self.workers.close()
        barrier(self._session, "closing the engines of all graph servers")
        self.abandon()

    def _answer_workers(self, undo: ExitStack) -> dict[str, Handler]:
        """Register the operations of workers; return those for workers in this process, uncounted."""
        handlers: dict[str, Handler] = {
            PROGRAM: self._send_program,
            PULL: lambda name, _arrays: self._server.task_table.pull(*parse_half(name)) or [],
            GIVE: self._submit,
        }
        for op, handler in handlers.items():
            self._session.rpc.register(op, self._counted(op, handler), for_clients=True)
            undo.callback(self._session.rpc.unregister, op)

        def take_gradients(name: str, arrays: Sequence[Array]) -> list[Array]:
            self.parameters.gradients(TaskKey.parse(name), arrays)
            return []

        return {
            **handlers,
            WEIGHTS: lambda name, _arrays: self.parameters.weights(TaskKey.parse(name)),
            GRADIENTS: take_gradients,
        }

    def _counted(self, op: str, handler: Handler) -> Handler:
        count = self._session.rpc.count

        def answer(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            layer = 0 if op == PROGRAM else TaskKey.parse(name.partition("/")[0]).step
            if op == GIVE:
                # First: these rows may end the epoch, and with it what is counted as the epoch's.
                count(UP, layer, WORKERS, None, payload_bytes(arrays))
                return handler(name, arrays)
            answers = handler(name, arrays)
            count(PROGRAM_PHASE if op == PROGRAM else DOWN, layer, None, WORKERS, payload_bytes(answers))
            return answers

        return answer

    def _send_program(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        if name and len(self.kernels) < _MOST_KERNELS:
            self.kernels.add(_one_line(name))
        return [self._program]

    def _submit(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        key, half, attempt = parse_attempt(name)
        result = self._server.submit(key, half, arrays)
        if result is SubmitResult.LAST:
            self.scheduler.task_done(key, attempt)
        elif result is SubmitResult.LATE and half == 1:
            self.scheduler.duplicate_done(key, attempt)
        return [np.array([result.accepted], dtype=np.int64)]

    def _updated(self, updates: int) -> None:
        now = time.perf_counter()
        for number in range(max(self._updated_at) + 1, updates + 1):
            self._updated_at[number] = now
        self.scheduler.weights_updated(updates)

    def _check(self, quiet_s: float, behind: Sequence[int]) -> None:
        self.parameters.raise_if_stopped()
        late = quiet_s >= self._session.timeout_s
        if not late and quiet_s < _PEER_CHECK_S:
            return
        # At the staleness bound no particular peer is late, but the update needs all of them.
        if missing := behind or self._peers:
            raise_for_missing(
                self._session,
                list(missing),
                "the rows of its next Scatter" if behind else "its gradients for the next update",
                advice="look at its output and its workers",
                late=late and bool(behind),
            )
        if late:
            open_tasks = [str(key) for key in self._server.task_table.keys[:5]]
            tasks = f"no worker gave rows for {', '.join(open_tasks)}; " if open_tasks else ""
            misses = what_misses(self._session.rpc, range(self._num_servers))
            raise PeerError(
                f"graph server {self._server.rank} made no progress for {quiet_s:.0f} s: {tasks}{misses}; "
                "look at the output of the workers, or raise timeout_s (DGLX_TIMEOUT)"
            )


def _one_line(text: str) -> str:
    return printable(text, _LONGEST_KERNELS).replace("\n", " ")


_RUN_NUMBERS: SessionField[Iterator[int]] = SessionField(lambda _: itertools.count(1))


def open_engine(
    session: Session,
    program: Program,
    part: Part,
    interval_sizes: Array,
    options: LambdaOptions,
    policy: StalenessPolicy,
    weights: Sequence[Array],
    update: Update,
) -> Engine[WorkerPool]:
    """Return an engine with workers as ``options`` say. Collective.

    Args:
        interval_sizes: Nodes of each interval of all graph servers.
        weights: To start from, in the order of the program; equal on all ranks, as is ``update``.
    """
    num_servers, rank = options.parameter_servers, session.topology.rank
    plan = ParameterPlan(
        program=program,
        server_of_interval=assign(interval_sizes, num_servers),
        staleness=options.staleness,
        first_epoch=policy.first_epoch,
    )
    server = GraphServer(
        part,
        program,
        fused=options.fusion,
        rematerialise=options.rematerialise,
        run=next(_RUN_NUMBERS.of(session)),
        seed=session.seed,
    )
    # This rank's share of the cores of its machine, at least 1.
    cores = len(os.sched_getaffinity(0)) // Counter(session.hosts)[session.hosts[rank]]
    engine = Engine(
        session,
        server,
        plan,
        policy,
        ParameterServer(plan, rank, weights, update) if rank < num_servers else None,
        partial(WorkerPool, session, program, plan, options),
        threads=options.threads or max(1, cores),
    )
    engine.workers.controller.watch(lambda: engine.scheduler.queue_length)
    return engine


def progress_line(engine: Engine[WorkerPool], options: LambdaOptions, account: Account) -> str:
    """Return ``epoch 3 | AV1 3 GA1 2 | 4 workers | queue 2 | 0 relaunched | $0.0012 simulated``."""
    epoch, stages = engine.scheduler.state()
    workers = engine.workers.controller.workers
    paid = account.bill(options, simulated=engine.workers.simulated)
    return (
        f"epoch {epoch} | {stages} | {workers} worker{'' if workers == 1 else 's'} | "
        f"queue {engine.scheduler.queue_length} | {account.counts.relaunched} relaunched | "
        f"{dollars(paid.total)}{' simulated' if paid.simulated else ''}"
    )


_PROGRESS_INTERVAL_S = 0.5


@contextmanager
def repeated(action: Callable[[float], None] | None) -> Iterator[None]:
    """Call ``action`` with the seconds since the start, every half a second, on a thread."""
    if action is None:
        yield
        return
    over, began = threading.Event(), time.perf_counter()

    def repeat() -> None:
        while not over.wait(_PROGRESS_INTERVAL_S):
            action(time.perf_counter() - began)

    thread = threading.Thread(target=repeat, name="lambda-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
