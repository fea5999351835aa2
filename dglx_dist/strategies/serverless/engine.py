"""Training engine: every rank is a graph server, the first ones also parameter servers (Dorylus)."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from ipaddress import ip_address
from types import TracebackType
from typing import TypeAlias, final

import numpy as np

from dglx_dist.comm.collectives import barrier, gather_int64, raise_for_missing
from dglx_dist.comm.endpoints import open_client_access
from dglx_dist.comm.ledger import WORKER
from dglx_dist.comm.rendezvous import link_speed
from dglx_dist.comm.rpc import Handler, PeerAddress, Rpc
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.comm.wire import payload_bytes
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.records import Array
from dglx_dist.serverless.aws.package import stages_of
from dglx_dist.serverless.controller import Controller, ControllerOptions, most_workers
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
from dglx_dist.strategies.serverless.ghost_exchange import GhostExchange
from dglx_dist.strategies.serverless.graph_partition import Part
from dglx_dist.strategies.serverless.graph_server import GraphServer, Parameters, SubmitResult
from dglx_dist.strategies.serverless.options import (
    LambdaSettings,
    StalenessPolicy,
    num_threads,
)
from dglx_dist.strategies.serverless.scheduler import (
    Progress,
    Snapshot,
    ThreadScheduler,
    Workers,
    WorkerSpans,
)


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

    def bill(self, settings: LambdaSettings, *, simulated: bool) -> Bill:
        """Return the bill by the settings' prices."""
        used = Counts() if settings.servers_only else self.counts
        return bill(used, {settings.server: self.server_seconds}, settings.prices, simulated=simulated)

    def describe(self, settings: LambdaSettings, *, simulated: bool) -> dict[str, object]:
        """Return counts, dollars and labels as JSON values."""
        paid = self.bill(settings, simulated=simulated)
        return {
            **asdict(self.counts),
            "server_seconds": self.server_seconds,
            "server": settings.server,
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


def progress_line(now: Snapshot, counts: Counts, workers: int, bill_now: Bill) -> str:
    """Return ``epoch 3 | AV1 3 GA1 2 | 4 workers | queue 2 | 0 relaunched | $0.0012 simulated``."""
    stages = Counter(step for step in now.steps if step)
    parts = [
        f"epoch {min(now.epochs)}",
        " ".join(f"{step} {number}" for step, number in sorted(stages.items())) or "drained",
        f"{workers} worker{'' if workers == 1 else 's'}",
        f"queue {now.queue}",
        f"{counts.relaunched} relaunched",
        f"{dollars(bill_now.total)}{' simulated' if bill_now.simulated else ''}",
    ]
    return " | ".join(parts)


@final
class WorkerPool:
    """:class:`Workers` of this rank, behind a controller, from construction until :meth:`close`."""

    def __init__(
        self,
        session: Session,
        program: Program,
        plan: ParameterPlan,
        settings: LambdaSettings,
        handlers: Mapping[str, Handler],
    ) -> None:
        self._plan, self._rank = plan, session.topology.rank
        self._digest, options = program.digest, settings.options
        self._task_options = TaskOptions(streaming=options.streaming, rematerialise=options.rematerialise)
        self._timeout_s = min(session.timeout_s, MAX_TIMEOUT_S)
        access = open_client_access(session, settings.interface)
        self._addresses = {rank: _address(peer) for rank, peer in access.addresses.items()}
        credentials = access.credentials
        self._secrets = Secrets(
            secret=credentials.secret.decode(),
            public_key=_text(credentials.public_key),
            secret_key=_text(credentials.secret_key),
        )
        own_host = self._addresses[self._rank].endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        self._controllers: list[Controller] = []
        with ExitStack() as undo:
            executor = EXECUTORS.get(options.executor)(
                ExecutorContext(
                    # The session removes it, however the rank ends.
                    folder=session.scratch,
                    stages=stages_of(program.steps),
                    handlers=handlers,
                    notice=self._wake,
                ),
                settings.executor_options,
            )
            undo.callback(executor.close)
            check_reachable(own_host, paid=not executor.simulated)
            self.simulated = executor.simulated
            """True if no provider is paid."""
            self.controller = Controller(
                executor,
                _controller_options(settings, own_host),
                clock=time.perf_counter,
                observer=WorkerSpans(session.timeline, program),
            )
            self._controllers.append(self.controller)
            self.ready, self.raise_if_failed = self.controller.ready, self.controller.raise_if_failed
            undo.enter_context(self.controller.run())
            self._open = undo.pop_all()

    @property
    def counts(self) -> Counts:
        return self.controller.counts

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        server = int(self._plan.server_of_interval[key.interval])
        task = Task(
            key=key,
            rows=rows,
            program=self._digest,
            graph_server=self._addresses[self._rank],
            parameter_server=self._addresses[server],
            secrets=self._secrets,
            timeout_s=self._timeout_s,
            options=self._task_options,
        )
        self.controller.launch(task, ready=ready)

    def done(self, key: TaskKey, attempt: int) -> None:
        self.controller.finished(key, attempt)

    def close(self) -> None:
        """Stop all workers immediately; idempotent."""
        self._open.close()

    def _wake(self) -> None:
        # The executor may call this before the controller exists.
        for controller in self._controllers:
            controller.wake()


def _controller_options(settings: LambdaSettings, host: str) -> ControllerOptions:
    options = settings.options
    return ControllerOptions(
        most=most_workers(options.intervals, link_speed(host)),
        workers=options.workers or None,
        batch=options.batch,
        retries=options.retries,
        prices=settings.prices,
    )


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


PROGRAM_PHASE, DOWN, UP = "lambda_program", "lambda_down", "lambda_up"
"""Ledger phases. Workers have no ledger, so the graph server counts their traffic."""

_MOST_KERNELS, _LONGEST_KERNELS = 16, 400


@final
class WorkerService:
    """RPC service for the workers of one graph server, from construction until :meth:`close`.

    Args:
        on_done: Called with key and attempt when a task is complete; from any thread, must not block.
        on_duplicate: Called with key and attempt when all rows of a duplicate attempt arrived.
    """

    def __init__(
        self,
        rpc: Rpc,
        server: GraphServer,
        on_done: Callable[[TaskKey, int], None],
        on_duplicate: Callable[[TaskKey, int], None],
    ) -> None:
        self._rpc, self._server = rpc, server
        self._on_done, self._on_duplicate = on_done, on_duplicate
        self._program = np.frombuffer(server.program.to_json(), np.uint8)
        self._handlers: dict[str, Handler] = {
            PROGRAM: self._send_program,
            PULL: self._pull,
            GIVE: self._submit,
        }
        phases = {PROGRAM: PROGRAM_PHASE, PULL: DOWN, GIVE: UP}
        self.kernels = {printable(kernels(), _LONGEST_KERNELS).replace("\n", " ")}
        """Kernels of this process and those that workers reported."""
        for op, handler in self._handlers.items():
            rpc.register(op, self._counted(op, phases[op], handler), for_clients=True)

    def handlers(self, parameters: Parameters) -> dict[str, Handler]:
        """Return the handlers for workers in this process, which send no bytes."""

        def weights(name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
            return parameters.weights(TaskKey.parse(name))

        def gradients(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            parameters.gradients(TaskKey.parse(name), arrays)
            return []

        return {**self._handlers, WEIGHTS: weights, GRADIENTS: gradients}

    def close(self) -> None:
        for op in self._handlers:
            self._rpc.unregister(op)

    def _counted(self, op: str, phase: str, handler: Handler) -> Handler:
        def answer(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            layer = 0 if op == PROGRAM else TaskKey.parse(name.partition("/")[0]).step
            if op == GIVE:
                # First: these rows may end the epoch, and with it what is counted as the epoch's.
                self._rpc.count(phase, layer, WORKER, None, payload_bytes(arrays))
                return handler(name, arrays)
            answers = handler(name, arrays)
            self._rpc.count(phase, layer, None, WORKER, payload_bytes(answers))
            return answers

        return answer

    def _send_program(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        if name and len(self.kernels) < _MOST_KERNELS:
            self.kernels.add(printable(name, _LONGEST_KERNELS).replace("\n", " "))
        return [self._program]

    def _pull(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        return self._server.task_table.pull(*parse_half(name)) or []

    def _submit(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        key, half, attempt = parse_attempt(name)
        result = self._server.submit(key, half, arrays)
        if result is SubmitResult.LAST:
            self._on_done(key, attempt)
        elif result is SubmitResult.LATE and half == 1:
            self._on_duplicate(key, attempt)
        return [np.array([result.accepted], dtype=np.int64)]


_PEER_CHECK_S = 5.0

StartWorkers: TypeAlias = Callable[[Mapping[str, Handler]], Workers]
"""Starts the workers of this rank, given the handlers of their operations in this process."""


@final
@dataclass(frozen=True, kw_only=True)
class EpochTotals:
    """Totals of one epoch over all ranks; equal on all."""

    epoch: int
    loss_sum: float
    """Over all training nodes; not divided."""
    correct: int
    """Training nodes whose largest output is at their label."""
    seconds: float
    """Between the weight updates before and after the epoch, on the slowest rank. Epochs may overlap."""


@final
class Engine:
    """Runs epochs on this rank together with all others. All methods are collective.

    Args:
        plan, policy: Equal on all ranks.
        parameters: This rank's parameter server, if it has one.
        start_workers: Called once; when it raises, the engine is closed before the error is passed on.
    """

    def __init__(
        self,
        session: Session,
        server: GraphServer,
        plan: ParameterPlan,
        policy: StalenessPolicy,
        parameters: ParameterServer | None,
        start_workers: StartWorkers,
        *,
        threads: int = 1,
    ) -> None:
        self._session, self._server, self._policy = session, server, policy
        rank, self._num_servers = session.topology.rank, plan.num_servers
        self._peers = [peer for peer in range(session.topology.world_size) if peer != rank]
        progress = Progress(server.schedule, server.part.num_intervals, policy, self._peers)
        self._updated_at = {policy.first_epoch: time.perf_counter()}
        # Lambdas, because the scheduler is constructed after the services that call it.
        self._worker_service = WorkerService(
            session.rpc,
            server,
            on_done=lambda key, attempt: self.scheduler.task_done(key, attempt),
            on_duplicate=lambda key, attempt: self.scheduler.duplicate_done(key, attempt),
        )
        self._exchange = GhostExchange(
            session.rpc,
            server,
            on_position=lambda peer, position: self.scheduler.peer_reached(peer, position),
            on_correct=lambda peer, epoch, correct: self.scheduler.peer_counted(peer, epoch, correct),
        )
        self.parameters = ParameterClient(session.rpc, plan, self._updated)
        """The latest weights and the optimizer's state, between runs."""
        self._parameter_service = (
            None
            if parameters is None
            else ParameterService(
                session.rpc, parameters, session.topology.world_size, session.timeline, server.run
            )
        )
        try:
            workers = start_workers(self._worker_service.handlers(self.parameters))
        except BaseException:
            self.abandon()
            raise
        self.scheduler = ThreadScheduler(
            server,
            progress,
            workers,
            self._exchange,
            threads=threads,
            timeline=session.timeline,
            early=policy.mode != "no_pipe",
        )
        self.epoch = policy.first_epoch
        """The next epoch; all intervals have completed the one before it."""
        barrier(session, "making the engines of all graph servers")

    @property
    def kernels(self) -> list[str]:
        """Numerical kernels of this graph server and its workers; see ``kernels`` of tasks."""
        return sorted(self._worker_service.kernels.copy())

    @property
    def synchronous_from(self) -> int | None:
        """The epoch from which asynchronous training is synchronous; None: not known yet."""
        return self._policy.synchronous_from

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
        if self._parameter_service is not None:
            self._parameter_service.server.drain()
        return self._totals(first, end)

    def close(self) -> None:
        """Release everything once no rank needs another one. Collective."""
        barrier(self._session, "closing the engines of all graph servers")
        self.abandon()

    def abandon(self) -> None:
        """Release everything after a failure, without waiting for other ranks."""
        self._exchange.close()
        self._worker_service.close()
        self.parameters.close()
        if self._parameter_service is not None:
            self._parameter_service.close()

    def _totals(self, first: int, end: int) -> list[EpochTotals]:
        local = []
        for epoch in range(first, end):
            loss_sum, correct = self._server.statistics(epoch)
            seconds = self._updated_at[epoch + 1] - self._updated_at[epoch]
            local.append([loss_sum, correct, seconds])
        per_rank = gather_numbers(np.array(local), self._session).reshape(-1, end - first, 3)
        return [
            EpochTotals(
                epoch=epoch,
                loss_sum=math.fsum(per_rank[:, epoch - first, 0]),
                correct=int(per_rank[:, epoch - first, 1].sum()),
                seconds=float(per_rank[:, epoch - first, 2].max()),
            )
            for epoch in range(first, end)
        ]

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
            raise PeerError(self._stall_message(quiet_s))

    def _stall_message(self, quiet_s: float) -> str:
        open_tasks = [str(key) for key in self._server.task_table.keys[:5]]
        tasks = f"no worker gave rows for {', '.join(open_tasks)}; " if open_tasks else ""
        misses = what_misses(self._session.rpc, range(self._num_servers))
        return (
            f"graph server {self._server.rank} made no progress for {quiet_s:.0f} s: {tasks}{misses}; look "
            "at the output of the workers, or raise timeout_s (DGLX_TIMEOUT)"
        )


_RUN_NUMBERS: SessionField[Iterator[int]] = SessionField(lambda _: itertools.count(1))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """State from which training starts; weights and update are equal on all ranks."""

    weights: Sequence[Array]
    """In the order of the program."""
    update: Update
    epoch: int
    is_synchronous: bool = False
    """Whether training already became synchronous, as ``switch_at`` requests."""


@final
class TrainingRun:
    """Engine and workers from construction until :meth:`close`; both are collective."""

    def __init__(
        self,
        session: Session,
        program: Program,
        part: Part,
        interval_sizes: Array,
        settings: LambdaSettings,
        start: Start,
    ) -> None:
        options, topology = settings.options, session.topology
        num_servers = options.parameter_servers
        plan = ParameterPlan.of(
            program,
            assign(interval_sizes, num_servers),
            num_servers=num_servers,
            staleness=options.staleness,
            first_epoch=start.epoch,
        )
        pools: list[WorkerPool] = []

        def start_workers(handlers: Mapping[str, Handler]) -> Workers:
            pools.append(WorkerPool(session, program, plan, settings, handlers))
            return pools[0]

        parameters = (
            ParameterServer(plan, topology.rank, start.weights, start.update)
            if topology.rank < num_servers
            else None
        )
        policy = replace(
            options.staleness_policy(start.epoch, program.num_train),
            synchronous_from=start.epoch if start.is_synchronous else None,
        )
        threads = num_threads(session, options.threads)
        server = GraphServer(
            part,
            program,
            fused=options.fusion,
            rematerialise=options.rematerialise,
            run=next(_RUN_NUMBERS.of(session)),
            seed=session.seed,
        )
        try:
            self.engine = Engine(session, server, plan, policy, parameters, start_workers, threads=threads)
        except BaseException:
            for pool in pools:
                pool.close()
            raise
        self.pool = pools[0]
        self.pool.controller.watch(lambda: self.engine.scheduler.queue_length)

    def close(self, *, failed: bool = False) -> Counts:
        """Stop workers and engine and return the work done; after a failure it waits for no other rank."""
        # Workers first. A cloud function cannot be stopped: a late one sends this run's number, which the
        # servers of the next run reject.
        self.pool.close()
        if failed:
            self.engine.abandon()
        else:
            self.engine.close()
        return self.pool.counts


_PROGRESS_INTERVAL_S = 0.5


@final
class LiveProgress:
    """Thread that shows a progress line, with the bill since ``past``, every half a second."""

    def __init__(
        self,
        running: TrainingRun,
        settings: LambdaSettings,
        past: Account,
        show: Callable[[str], None] | None,
    ) -> None:
        self._running, self._settings, self._past, self._show = running, settings, past, show
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def line(self, seconds: float) -> str:
        pool = self._running.pool
        counts = pool.counts
        so_far = self._past + Account(counts=counts, server_seconds=seconds)
        bill = so_far.bill(self._settings, simulated=pool.simulated)
        now = self._running.engine.scheduler.snapshot()
        return progress_line(now, so_far.counts, pool.controller.workers, bill)

    def __enter__(self) -> LiveProgress:
        if self._show is not None:
            self._thread = threading.Thread(target=self._repeat, name="lambda-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _repeat(self) -> None:
        assert self._show is not None
        began = time.perf_counter()
        while not self._over.wait(_PROGRESS_INTERVAL_S):
            self._show(self.line(time.perf_counter() - began))
