"""Trains on all ranks: each is a graph server, the first ones are parameter servers too (Dorylus)."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from ipaddress import ip_address
from types import TracebackType
from typing import Any, TypeAlias, final

import numpy as np

from dglx_dist.comm.collectives import barrier, gather_json, raise_for_missing
from dglx_dist.comm.endpoints import open_client_access
from dglx_dist.comm.ledger import WORKER
from dglx_dist.comm.rpc import Handler, PeerAddress, Rpc
from dglx_dist.comm.session import Session
from dglx_dist.comm.topology import link_speed
from dglx_dist.comm.wire import payload_bytes
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.records import Array
from dglx_dist.serverless.aws.package import stages_of
from dglx_dist.serverless.controller import Controller, ControllerOptions, Counts, RelaunchRule, TunerLimits
from dglx_dist.serverless.cost import Bill, PriceTable, Servers, Usage, bill, dollars
from dglx_dist.serverless.executors.base import EXECUTORS, ExecutorContext
from dglx_dist.serverless.json_fields import printable
from dglx_dist.serverless.parameter_server import ParameterPlan, ParameterServer, assign
from dglx_dist.serverless.parameter_service import ParameterClient, ParameterService, Places, what_misses
from dglx_dist.serverless.parameter_updates import Update
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
from dglx_dist.strategies.serverless.options import LambdaOptions, LambdaSettings, StalenessPolicy, threads_of
from dglx_dist.strategies.serverless.scheduler import (
    ControlledWorkers,
    Progress,
    Snapshot,
    ThreadSchedule,
    Workers,
    WorkerSpans,
)


@final
@dataclass(frozen=True, kw_only=True)
class Account:
    """Of one rank, or of all together."""

    counts: Counts = field(default_factory=Counts)
    server_seconds: float = 0.0
    """Seconds that graph servers trained, added over the ranks."""

    def __add__(self, other: Account) -> Account:
        names = [one.name for one in fields(Counts)]
        counts = {name: getattr(self.counts, name) + getattr(other.counts, name) for name in names}
        return Account(counts=Counts(**counts), server_seconds=self.server_seconds + other.server_seconds)

    def bill(self, kind: str, prices: PriceTable, *, simulated: bool, alone: bool = False) -> Bill:
        """Return the dollars, each graph server a server of ``kind``; ``alone``: there are no functions."""
        servers = [Servers(kind=kind, number=1, seconds=self.server_seconds)]
        used = Usage() if alone else self.counts.usage
        return bill(used, servers, prices, simulated=simulated)

    def describe(
        self, kind: str, prices: PriceTable, *, simulated: bool, alone: bool = False
    ) -> dict[str, object]:
        """Return numbers, dollars and how to read them, JSON values."""
        paid = self.bill(kind, prices, simulated=simulated, alone=alone)
        return {
            **asdict(self.counts),
            "server_seconds": self.server_seconds,
            "server": kind,
            "dollars_functions": paid.functions,
            "dollars_servers": paid.servers,
            "dollars": paid.total,
            "label": paid.label,
            "text": str(paid),
        }


NOTHING = Account()


def as_json(account: Account) -> dict[str, Any]:
    """Return what :func:`account_of_ranks` reads."""
    return {"counts": asdict(account.counts), "server_seconds": account.server_seconds}


def account_of_ranks(ranks: Iterable[Mapping[str, Any]]) -> Account:
    """Return the sum of what :func:`as_json` gave on each rank."""
    total = NOTHING
    for one in ranks:
        total += Account(counts=Counts(**one["counts"]), server_seconds=one["server_seconds"])
    return total


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
@dataclass(frozen=True, kw_only=True, eq=False)
class WorkerPoolPlan:
    """What a crew works on; equal on all ranks."""

    program: Program
    plan: ParameterPlan
    places: Places
    options: LambdaOptions
    executor_options: Mapping[str, object]
    prices: PriceTable
    interface: str = ""
    """See LambdaSettings."""


@final
class WorkerPool:
    """Up from now until :meth:`close`.

    Args:
        session: The run.
        plan: What is worked on.
        handlers: What answers the workers' operations in this process.

    Raises:
        ConfigError: the executor cannot be made with these options, or its workers cannot reach this rank.
    """

    def __init__(self, session: Session, plan: WorkerPoolPlan, handlers: Mapping[str, Handler]) -> None:
        self._plan, self._rank = plan, session.topology.rank
        self._digest = plan.program.digest
        self._task_options = TaskOptions(
            streaming=plan.options.streaming, rematerialise=plan.options.rematerialise
        )
        self._timeout_s = min(session.timeout_s, MAX_TIMEOUT_S)
        access = open_client_access(session, plan.interface)
        self._addresses = {rank: _address(peer) for rank, peer in access.addresses.items()}
        credentials = access.credentials
        self._secrets = Secrets(
            secret=credentials.secret.decode(),
            public_key=_text(credentials.public_key),
            secret_key=_text(credentials.secret_key),
        )
        self._controllers: list[Controller] = []
        with ExitStack() as undo:
            executor = EXECUTORS.get(plan.options.executor)(
                ExecutorContext(
                    # Gone with the rank, however it ends.
                    folder=session.scratch,
                    stages=stages_of(plan.program.steps),
                    handlers=handlers,
                    notice=self._wake,
                ),
                plan.executor_options,
            )
            undo.callback(executor.close)
            check_reachable(self._own_host, paid=not executor.simulated)
            self.simulated = executor.simulated
            """Whether no provider is paid."""
            self.controller = Controller(
                executor,
                self._controller_options(),
                clock=time.perf_counter,
                observer=WorkerSpans(session.timeline, plan.program),
            )
            self._controllers.append(self.controller)
            self.workers = ControlledWorkers(self.controller, self._task_of)
            """For the engine."""
            undo.enter_context(self.controller.run())
            self._open = undo.pop_all()

    @property
    def counts(self) -> Counts:
        """What has happened so far."""
        return self.controller.counts

    def close(self) -> None:
        """End all workers, at once; may be called twice."""
        self._open.close()

    def _controller_options(self) -> ControllerOptions:
        options = self._plan.options
        return ControllerOptions(
            limits=TunerLimits(intervals=options.intervals, link_bytes_per_s=link_speed(self._own_host)),
            workers=options.workers or None,
            batch=options.batch,
            relaunch=RelaunchRule(retries=options.retries),
            prices=self._plan.prices,
        )

    @property
    def _own_host(self) -> str:
        """Numeric address at which this rank answers workers."""
        return self._addresses[self._rank].endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def _wake(self) -> None:
        # The executor may have news before there is a controller.
        for controller in self._controllers:
            controller.wake()

    def _task_of(self, key: TaskKey, rows: int) -> Task:
        server = int(self._plan.plan.server_of_interval[key.interval])
        return Task(
            key=key,
            rows=rows,
            program=self._digest,
            graph_server=self._addresses[self._rank],
            parameter_server=self._addresses[self._plan.places.parameter_servers[server]],
            secrets=self._secrets,
            timeout_s=self._timeout_s,
            options=self._task_options,
        )


def check_reachable(host: str, *, paid: bool) -> None:
    """Raise ConfigError where functions of a provider, which are elsewhere, would call this machine alone.

    Args:
        host: Numeric address at which this rank answers.
        paid: Whether a provider runs the workers.
    """
    if paid and ip_address(host).is_loopback:
        raise ConfigError(
            f"workers run in a cloud, and this rank answers at {host}, which is this machine alone; with one "
            "rank give the option interface=NAME, with several set GLOO_SOCKET_IFNAME=NAME (see `ip addr`)"
        )


def _address(peer: PeerAddress) -> Address:
    return Address(rank=peer.rank, host=peer.host, endpoint=peer.endpoint, public_key=_text(peer.public_key))


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode()


PROGRAM_PHASE, DOWN, UP = "lambda_program", "lambda_down", "lambda_up"
"""Phases of the ledger; a worker has none, so the graph server counts."""

_MOST_KERNELS, _LONGEST_KERNELS = 16, 400


@final
class WorkerService:
    """Answers workers from now until :meth:`close`.

    Args:
        rpc: This rank's calls.
        server: Whose tasks.
        over: Called with the key and attempt by which a task is over; any thread, quick.
        refused: Called with those of a duplicate that is whole.
    """

    def __init__(
        self,
        rpc: Rpc,
        server: GraphServer,
        over: Callable[[TaskKey, int], None],
        refused: Callable[[TaskKey, int], None],
    ) -> None:
        self._rpc, self._server, self._over, self._refused = rpc, server, over, refused
        self._program = np.frombuffer(server.program.to_json(), np.uint8)
        self._handlers: dict[str, Handler] = {PROGRAM: self._tell, PULL: self._pull, GIVE: self._give}
        phases = {PROGRAM: PROGRAM_PHASE, PULL: DOWN, GIVE: UP}
        self.kernels = {kernels()}
        """Of this process, and those that workers said theirs are."""
        for op, handler in self._handlers.items():
            rpc.register(op, self._counted(op, phases[op], handler), for_clients=True)

    def handlers(self, parameters: Parameters) -> dict[str, Handler]:
        """Return what answers the operations of a worker in this process, without a byte on any wire."""

        def weights(name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
            return parameters.weights(TaskKey.parse(name))

        def gradients(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            parameters.gradients(TaskKey.parse(name), arrays)
            return []

        return {**self._handlers, WEIGHTS: weights, GRADIENTS: gradients}

    def close(self) -> None:
        """Answer no more."""
        for op in self._handlers:
            self._rpc.unregister(op)

    def _counted(self, op: str, phase: str, handler: Handler) -> Handler:
        def answer(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            answers = handler(name, arrays)
            layer = 0 if op == PROGRAM else TaskKey.parse(name.partition("/")[0]).step
            if op == GIVE:
                self._rpc.count(phase, layer, WORKER, None, payload_bytes(arrays))
            else:
                self._rpc.count(phase, layer, None, WORKER, payload_bytes(answers))
            return answers

        return answer

    def _tell(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        if name and len(self.kernels) < _MOST_KERNELS:
            self.kernels.add(printable(name, _LONGEST_KERNELS).replace("\n", " "))
        return [self._program]

    def _pull(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        return self._server.desk.pull(*parse_half(name)) or []

    def _give(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        key, half, attempt = parse_attempt(name)
        result = self._server.give(key, half, arrays)
        if result is SubmitResult.LAST:
            self._over(key, attempt)
        elif result is SubmitResult.LATE and half == 1:
            self._refused(key, attempt)
        return [np.array([result.accepted], dtype=np.int64)]


_PEER_CHECK_S = 5.0

StartWorkers: TypeAlias = Callable[[Mapping[str, Handler]], Workers]
"""Makes the workers of this rank from what answers their operations in this process."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EngineConfig:
    """What all ranks agree on, but for ``threads``."""

    plan: ParameterPlan
    places: Places
    pace: StalenessPolicy
    threads: int = 1
    """Threads of this rank that make moves: its cores."""


@final
@dataclass(frozen=True, kw_only=True)
class EpochTotals:
    """One epoch, over all ranks; equal on all."""

    epoch: int
    loss_sum: float
    """Over all training nodes; not divided."""
    correct: int
    """Training nodes whose largest output is at their label."""
    seconds: float
    """From the update before to the update after it, on the slowest rank: epochs may overlap."""


@final
class Engine:
    """Epochs from the first to wherever :meth:`run` is told, on this rank together with all others.

    Every rank must make it, run it and close it, together.

    Args:
        session: The run.
        server: This rank's graph server.
        config: How.
        parameters: This rank's parameter server, if it has one.
        hire: Who does tasks; called once, and what it raises leaves nothing behind.
    """

    def __init__(
        self,
        session: Session,
        server: GraphServer,
        config: EngineConfig,
        parameters: ParameterServer | None,
        start_workers: StartWorkers,
    ) -> None:
        self._session, self._server, self._config = session, server, config
        pace, rank = config.pace, session.topology.rank
        self._peers = [peer for peer in range(session.topology.world_size) if peer != rank]
        self._progress = Progress(server.course, server.part.num_intervals, pace, self._peers)
        self._updated_at = {pace.first_epoch: time.perf_counter()}
        self._service = WorkerService(session.rpc, server, self._given, self._refused)
        self._mail = GhostExchange(session.rpc, server, self._heard, self._counted)
        self.parameters = ParameterClient(session.rpc, config.plan, config.places, on_update=self._updated)
        """The latest weights and the optimizer's state, between runs."""
        self._service = (
            None
            if parameters is None
            else ParameterService(
                session.rpc, parameters, config.places, timeline=session.timeline, run=server.run
            )
        )
        try:
            self._workers = start_workers(self._service.handlers(self.parameters))
        except BaseException:
            self.abandon()
            raise
        self._schedule = ThreadSchedule(
            server,
            self._progress,
            self._workers,
            self._mail,
            threads=config.threads,
            timeline=session.timeline,
            early=pace.mode != "no_pipe",
        )
        self._epoch = pace.first_epoch
        barrier(session, "making the engines of all graph servers")

    @property
    def epoch(self) -> int:
        """The epoch that comes next: all intervals ended the one before it."""
        return self._epoch

    @property
    def queue_length(self) -> int:
        """Moves that wait for a thread."""
        return self._schedule.queue_length

    @property
    def kernels(self) -> list[str]:
        """What this graph server and its workers compute with; see ``kernels`` of tasks."""
        return sorted(self._service.kernels)

    def snapshot(self) -> Snapshot:
        """Return what this graph server does now; any thread."""
        return self._schedule.snapshot()

    @property
    def synchronous_from(self) -> int | None:
        """The epoch from which on asynchronous training is synchronous; None: it is not known yet."""
        return self._config.pace.synchronous_from

    def run(self, epochs: int) -> list[EpochTotals]:
        """Train ``epochs`` more epochs; afterwards nothing is in flight on any rank. Collective.

        Raises:
            PeerError: a rank is dead or silent, or nothing moved for the session's time-out; the message
                says who is missing. Or no worker did a task in as many attempts as allowed.
        """
        first, end = self._epoch, self._epoch + epochs
        self._updated_at = {first: time.perf_counter()}
        self._schedule.run(end, self._look)
        self._epoch = end
        barrier(self._session, f"the end of epoch {end - 1}")
        if self._service is not None:
            self._service.server.drain()
        return self._totals(first, end)

    def close(self) -> None:
        """Let go of everything, once no rank needs anything of another any more. Collective."""
        barrier(self._session, "closing the engines of all graph servers")
        self.abandon()

    def abandon(self) -> None:
        """As :meth:`close` where the run has failed: waits for nobody."""
        self._mail.close()
        self._service.close()
        self.parameters.close()
        if self._service is not None:
            self._service.close()

    def _totals(self, first: int, end: int) -> list[EpochTotals]:
        """Sums in the order of the ranks; returns when all ranks have drained."""
        mine = []
        for epoch in range(first, end):
            loss_sum, correct = self._server.statistics(epoch)
            seconds = self._updated_at[epoch + 1] - self._updated_at[epoch]
            mine.append([loss_sum, correct, seconds])
        gathered: Array = np.array(gather_json(mine, self._session), dtype=np.float64)
        per_rank = gathered.reshape(-1, end - first, 3)
        return [
            EpochTotals(
                epoch=epoch,
                loss_sum=math.fsum(per_rank[:, epoch - first, 0]),
                correct=int(per_rank[:, epoch - first, 1].sum()),
                seconds=float(per_rank[:, epoch - first, 2].max()),
            )
            for epoch in range(first, end)
        ]

    def _given(self, key: TaskKey, attempt: int) -> None:
        self._schedule.given(key, attempt)

    def _refused(self, key: TaskKey, attempt: int) -> None:
        self._schedule.refused(key, attempt)

    def _heard(self, peer: int, position: int) -> None:
        self._schedule.heard(peer, position)

    def _counted(self, peer: int, epoch: int, correct: int) -> None:
        self._schedule.counted(peer, epoch, correct)

    def _updated(self, updates: int) -> None:
        now = time.perf_counter()
        for number in range(max(self._updated_at) + 1, updates + 1):
            self._updated_at[number] = now
        self._schedule.updated(updates)

    def _look(self, quiet_s: float, behind: Sequence[int]) -> None:
        self.parameters.raise_if_stopped()
        late = quiet_s >= self._session.timeout_s
        if not late and quiet_s < _PEER_CHECK_S:
            return
        # At the gate nobody in particular is late, but the update needs all that are alive.
        if missing := behind or self._peers:
            raise_for_missing(
                self._session,
                list(missing),
                "the next Scatter of the intervals" if behind else "the next update of the weights",
                before="in an epoch",
                undone="did not end a Scatter",
                advice="look at its output and its workers",
                late=late and bool(behind),
            )
        if late:
            raise PeerError(self._standstill(quiet_s))

    def _standstill(self, quiet_s: float) -> str:
        open_tasks = [str(key) for key in self._server.desk.keys[:5]]
        tasks = f"no worker gave rows for {', '.join(open_tasks)}; " if open_tasks else ""
        behind = range(self._config.plan.num_servers)
        misses = what_misses(self._session.rpc, self._config.places, behind)
        return (
            f"nothing moved on graph server {self._server.rank} for {quiet_s:.0f} s: {tasks}{misses}; look "
            "at what the workers say, or raise timeout_s (DGLX_TIMEOUT)"
        )


_RUNS = "runs of strategy lambda"
"""Under which a session keeps how many there were."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """What training goes on from; weights and update are equal on all ranks."""

    weights: Sequence[Array]
    """In the order of the program."""
    update: Update
    epoch: int
    """The one that comes next."""
    is_synchronous: bool = False
    """Whether training became synchronous before, as ``switch_at`` asks."""


@final
class TrainingRun:
    """Up from now until :meth:`close`; every rank makes it and closes it, together.

    Args:
        session: The run.
        program: What is trained.
        part: This rank's.
        interval_sizes: (K,) nodes of every interval of all ranks.
        settings: Of the strategy.
        start: Where it begins.

    Raises:
        ConfigError: there are more parameter servers than intervals, or the executor cannot be made.
    """

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
        places = Places(
            parameter_servers=tuple(range(num_servers)), graph_servers=tuple(range(topology.world_size))
        )
        pool_plan = WorkerPoolPlan(
            program=program,
            plan=plan,
            places=places,
            options=options,
            executor_options=settings.executor_options,
            prices=settings.prices,
            interface=settings.interface,
        )
        crews: list[WorkerPool] = []

        def start_workers(handlers: Mapping[str, Handler]) -> Workers:
            crews.append(WorkerPool(session, pool_plan, handlers))
            return crews[0].workers

        parameters = (
            ParameterServer(plan, topology.rank, start.weights, start.update)
            if topology.rank < num_servers
            else None
        )
        config = EngineConfig(
            plan=plan,
            places=places,
            pace=replace(
                options.pace(start.epoch, program.num_train),
                synchronous_from=start.epoch if start.is_synchronous else None,
            ),
            threads=threads_of(session, options.threads),
        )
        server = GraphServer(
            part,
            program,
            fused=options.fusion,
            rematerialise=options.rematerialise,
            run=_next_run(session),
        )
        try:
            self.engine = Engine(session, server, config, parameters, start_workers)
        except BaseException:
            for crew in crews:
                crew.close()
            raise
        self.crew = crews[0]
        self.crew.controller.watch(lambda: self.engine.queue_length)

    def close(self, *, failed: bool = False) -> Counts:
        """End everything; return what the workers did. After a failure it waits for nobody."""
        # Workers first. A function cannot be ended: one that is late asks in the name of this run, and the
        # servers of the next one refuse it.
        self.crew.close()
        if failed:
            self.engine.abandon()
        else:
            self.engine.close()
        return self.crew.counts


def _next_run(session: Session) -> int:
    """Number the runs of a session from 1; equal on all ranks, which make them together."""
    before = session.attached.get(_RUNS, 0)
    assert isinstance(before, int)
    session.attached[_RUNS] = before + 1
    return before + 1


_EVERY_S = 0.5


@final
class Live:
    """A thread that shows a line every half a second, inside a ``with`` block; none where nobody looks.

    Args:
        running: What is shown.
        settings: For the bill.
        past: What was done before, which the bill has too.
        show: Called with each line; None: nobody looks.
    """

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
        """Return the line, ``seconds`` after the block was entered."""
        crew = self._running.crew
        counts = crew.counts
        so_far = self._past + Account(counts=counts, server_seconds=seconds)
        settings = self._settings
        bill = so_far.bill(settings.server, settings.prices, simulated=crew.simulated, alone=settings.alone)
        return progress_line(self._running.engine.snapshot(), so_far.counts, crew.controller.workers, bill)

    def __enter__(self) -> Live:
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
        while not self._over.wait(_EVERY_S):
            self._show(self.line(time.perf_counter() - began))
