"""Training engine: every rank is a graph server, the first ones also parameter servers (Dorylus)."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import final

import numpy as np

from dglx_dist.comm.collectives import barrier, gather_int64, raise_for_missing
from dglx_dist.comm.ledger import WORKER
from dglx_dist.comm.rpc import Handler
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.comm.wire import payload_bytes
from dglx_dist.data.json_fields import printable
from dglx_dist.errors import PeerError
from dglx_dist.records import Array, EpochRecord
from dglx_dist.serverless.cost import Bill, Counts, bill, dollars
from dglx_dist.serverless.parameter_server import ParameterPlan, ParameterServer, Update, assign
from dglx_dist.serverless.parameter_service import ParameterClient, ParameterService, what_misses
from dglx_dist.serverless.program import Program
from dglx_dist.serverless.tasks import TaskKey, kernels, parse_attempt, parse_half
from dglx_dist.serverless.worker import GIVE, GRADIENTS, PROGRAM, PULL, WEIGHTS
from dglx_dist.strategies.serverless.graph_partition import Part
from dglx_dist.strategies.serverless.graph_server import GraphServer, SubmitResult
from dglx_dist.strategies.serverless.options import LambdaOptions
from dglx_dist.strategies.serverless.scheduler import Progress, ThreadScheduler, WorkerPool


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


PROGRAM_PHASE, DOWN, UP = "lambda_program", "lambda_down", "lambda_up"
"""Ledger phases. Workers have no ledger, so the graph server counts their traffic."""
_MOST_KERNELS, _LONGEST_KERNELS = 16, 400
_PEER_CHECK_S = 5.0


_RUN_NUMBERS: SessionField[Iterator[int]] = SessionField(lambda _: itertools.count(1))


@final
class Engine:
    """Runs epochs on this rank together with all others. All methods but :meth:`abandon` are collective.

    ``weights``, to start from, are in the order of the program and, as ``update``, equal on all ranks; the
    others are as in :class:`Progress`.
    """

    def __init__(
        self,
        session: Session,
        program: Program,
        part: Part,
        options: LambdaOptions,
        weights: Sequence[Array],
        update: Update,
        first_epoch: int = 0,
        synchronous_from: int | None = None,
    ) -> None:
        self._session, rank, rpc = session, session.topology.rank, session.rpc
        self._peers = [peer for peer in range(session.topology.world_size) if peer != rank]
        num_servers = self._num_servers = options.parameter_servers
        plan = ParameterPlan(
            program=program,
            server_of_interval=assign(part.interval_sizes, num_servers),
            staleness=options.staleness,
            first_epoch=first_epoch,
        )
        self._server = server = GraphServer(
            part, program, options, run=next(_RUN_NUMBERS.of(session)), seed=session.seed
        )
        self.progress = Progress(
            program, options, part.num_intervals, self._peers, first_epoch, synchronous_from
        )
        self._updated_at = {first_epoch: time.perf_counter()}
        self._show: Callable[[], None] = lambda: None
        self._program = np.frombuffer(program.to_json(), np.uint8)
        self.kernels = {_one_line(kernels())}
        """Numerical kernels of this process and those that workers reported; see ``kernels`` of tasks."""
        self.epoch = first_epoch
        """The next epoch; all intervals have completed the one before it."""
        self._parameter_server = ParameterServer(plan, rank, weights, update) if rank < num_servers else None
        with ExitStack() as undo:
            handlers = self._answer_workers(undo)
            self.parameters = ParameterClient(rpc, plan, self._updated)
            """The latest weights and the optimizer's state, between runs."""
            undo.callback(self.parameters.close)
            if self._parameter_server is not None:
                world_size, timeline = session.topology.world_size, session.timeline
                service = ParameterService(rpc, self._parameter_server, world_size, timeline, server.run)
                undo.callback(service.close)
            self.workers = WorkerPool(session, program, plan, options, handlers)
            undo.callback(self.workers.close)
            self.scheduler = ThreadScheduler(session, server, self.progress, self.workers)
            undo.callback(self.scheduler.close)
            self.workers.controller.watch(lambda: self.scheduler.queue_length)
            barrier(session, "making the engines of all graph servers")
            self.abandon = undo.pop_all().close
            """Releases everything after a failure, without waiting for other ranks."""

    def run(self, epochs: int, show: Callable[[], None] = lambda: None) -> list[EpochRecord]:
        """Train ``epochs`` more epochs; no rank has work in flight afterwards. Collective.

        The records are of all ranks, without bytes. An epoch takes the time between the weight updates before
        and after it, on the slowest rank; epochs may overlap. Calls ``show`` every half a second. Raises
        PeerError, naming who is missing, if a rank is dead or there was no progress for the session's
        time-out; or if a task failed in all allowed attempts.
        """
        first, end = self.epoch, self.epoch + epochs
        self._updated_at, self._show = {first: time.perf_counter()}, show
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
        num_train = self._server.program.num_train
        return [
            EpochRecord(
                epoch=epoch,
                loss=math.fsum(losses) / num_train,
                train_accuracy=int(correct.sum()) / num_train,
                val_accuracy=None,
                seconds=float(seconds.max()),
                num_samples=num_train,
                sample_s=0.0,
                fetch_s=0.0,
                wait_s=0.0,
                compute_s=float(seconds.max()),
                exchange_s=0.0,
                bytes_inside=0,
                bytes_outside=0,
            )
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
        handlers: dict[str, Handler] = {
            PROGRAM: self._send_program,
            PULL: lambda name, _arrays: self._server.pull(*parse_half(name)),
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
        count, own = self._session.ledger.add, self._session.topology.rank

        def answer(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            layer = 0 if op == PROGRAM else TaskKey.parse(name.partition("/")[0]).step
            if op == GIVE:
                # First: these rows may end the epoch, and with it what is counted as the epoch's.
                count(UP, layer, WORKER, own, payload_bytes(arrays))
                return handler(name, arrays)
            answers = handler(name, arrays)
            count(PROGRAM_PHASE if op == PROGRAM else DOWN, layer, own, WORKER, payload_bytes(answers))
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
        return [np.array([result in (SubmitResult.TAKEN, SubmitResult.LAST)], dtype=np.int64)]

    def _updated(self, updates: int) -> None:
        now = time.perf_counter()
        for number in range(max(self._updated_at) + 1, updates + 1):
            self._updated_at[number] = now
        self.scheduler.weights_updated(updates)

    def _check(self, quiet_s: float, behind: Sequence[int]) -> None:
        self._show()
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
            open_tasks = [str(key) for key in self._server.open_tasks[:5]]
            tasks = f"no worker gave rows for {', '.join(open_tasks)}; " if open_tasks else ""
            misses = what_misses(self._session.rpc, range(self._num_servers))
            raise PeerError(
                f"graph server {self._server.rank} made no progress for {quiet_s:.0f} s: {tasks}{misses}; "
                "look at the output of the workers, or raise timeout_s (DGLX_TIMEOUT)"
            )


def _one_line(text: str) -> str:
    return printable(text, _LONGEST_KERNELS).replace("\n", " ")


def progress_line(engine: Engine, options: LambdaOptions, account: Account) -> str:
    """Return ``epoch 3 | AV1 3 GA1 2 | 4 workers | queue 2 | 0 relaunched | $0.0012 simulated``."""
    epoch, stages = engine.scheduler.state()
    workers = engine.workers.controller.workers
    paid = account.bill(options, simulated=engine.workers.simulated)
    return (
        f"epoch {epoch} | {stages} | {workers} worker{'' if workers == 1 else 's'} | "
        f"queue {engine.scheduler.queue_length} | {account.counts.relaunched} relaunched | "
        f"{dollars(paid.total)}{' simulated' if paid.simulated else ''}"
    )
