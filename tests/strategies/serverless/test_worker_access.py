"""A worker's secret opens the operations of workers, at a port of their own, and nothing else of a rank."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.endpoints import ClientAccess, open_client_access
from dglx_dist.comm.rpc import Handler
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import PeerError, RemoteError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Placement
from dglx_dist.records import Array
from dglx_dist.serverless.program import Program
from dglx_dist.serverless.tasks import Direction, Task, TaskKey, Work, attempt_name, half_name
from dglx_dist.serverless.worker import GIVE, GRADIENTS, PROGRAM, PULL, WEIGHTS, Worker
from dglx_dist.strategies.serverless.engine import Engine
from dglx_dist.strategies.serverless.graph_server import GraphServer
from dglx_dist.strategies.serverless.options import StalenessPolicy
from tests.helpers.ranks import run_ranks

from . import cases
from .client import WorkerClient

OF_RANKS = {
    *("kv.pull", "kv.push", "kv.add", "kv.handle", "cluster.ping", "lambda.ghosts", "lambda.reached"),
    *("lambda.state", "lambda.latest", "lambda.sums", "lambda.updated", "lambda.stopped", "lambda.missing"),
    *("lambda.weights_for_rank", "lambda.gradients_of_rank", "lambda.ghost_gradients", "lambda.correct"),
}
OF_WORKERS = {PROGRAM, PULL, GIVE, WEIGHTS, GRADIENTS}
LARGE: Array = np.zeros(1 << 18)
"""2 MiB: travels in pieces."""


def asked(client: WorkerClient, op: str) -> str:
    """Return what ``op`` is answered with."""
    try:
        found = client.ask(op, "r0.e0.s1.i0.f", [LARGE])
    except RemoteError as error:
        return str(error)
    return f"{len(found)} arrays"


def is_kept_out(access: ClientAccess, rank: int) -> None:
    """Check that whoever shows and asks so is not let in by ``rank``."""
    client = WorkerClient(access, rank=rank)
    with pytest.raises(PeerError, match="refused the connection"):
        client.ask(PROGRAM, "")
    client.caller.close()


def knock() -> dict[str, str]:
    """Ask the other rank, as a worker, for all that it answers; return what it said."""
    with start_session(timeout_s=60.0) as session:
        KVStore(session, Placement(2, session.topology))
        engine = cases.engine(session, "gcn", parameter_servers=2)
        access, other = open_client_access(session), 1 - session.topology.rank
        assert open_client_access(session) is access
        before = engine.parameters.latest()
        client = WorkerClient(access, rank=other)
        answers = {op: asked(client, op) for op in sorted(session.rpc._handlers)}
        client.caller.close()
        assert session.rpc.credentials is not None
        is_kept_out(replace(access, addresses=session.rpc.addresses), other)
        is_kept_out(replace(access, credentials=session.rpc.credentials), other)
        barrier(session, "both have asked")
        for name, value in engine.parameters.latest().items():
            assert value.tobytes() == before[name].tobytes()
        engine.parameters.raise_if_stopped()
        engine.close()
        return answers


@pytest.mark.parametrize("environment", [{}, {"DGLX_CURVE": "1"}], ids=["plain", "curve"])
def test_a_workers_secret_opens_the_operations_of_workers_alone(environment: dict[str, str]) -> None:
    for answers in run_ranks(knock, 2, environment=environment):
        assert set(answers) >= OF_RANKS | OF_WORKERS
        opened = {op for op, said in answers.items() if "no operation" not in said}
        assert opened == OF_WORKERS
        assert answers[PROGRAM] == "1 arrays"
        assert "names no half" in answers[PULL]
        known = ", ".join(sorted(OF_WORKERS))
        assert (
            f"no operation 'lambda.state' is registered here (there are: {known})" in answers["lambda.state"]
        )


INTERVALS, EPOCHS, RUN = 3, 3, 2
NO_KEYS = (
    *("", "r0", "e0.s1.i0.f/0", "r0.e0.s1.i0.f/2", "r0.e0.s1.i0.f/00", "r0.e1e9.s1.i0.f/0"),
    *("r0.e9999999999.s1.i0.f/0", "r9999999999.e0.s1.i0.f/0", "r-1.e0.s1.i0.f/0", "r0.e0.s1.i-1.f/0"),
    *("../../etc/passwd", "r0.e0.s1.i0.f/0/1000000", "r0.e٣.s1.i0.f/0", "\x00", "x" * 4096),
)
"""Neither halves nor attempts."""


class Besieged:
    """A worker as workers are, by sockets; before it does a task, others do what they can to that task."""

    def __init__(self, access: ClientAccess, program: Program) -> None:
        self._program, self._client = program, WorkerClient(access)
        self._attacker = WorkerClient(access)
        self._waiting: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._launched: dict[TaskKey, Task] = {}
        self._failure: Exception | None = None
        self.attacked: set[tuple[int, Direction]] = set()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        client = self._client
        self._launched[key] = Task(
            key=key,
            rows=rows,
            program=self._program.digest,
            graph_server=client.address,
            parameter_server=client.address,
            secrets=client.secrets,
            timeout_s=20.0,
        )
        if ready:
            self.ready(key)

    def ready(self, key: TaskKey) -> None:
        self._waiting.put(self._launched[key])

    def done(self, key: TaskKey, attempt: int) -> None:
        """Nothing: whoever gave the rows, these are the task's."""

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _serve(self) -> None:
        worker = Worker(self._client.caller)
        try:
            while (task := self._waiting.get()) is not None:
                self._attack(task)
                assert worker.handle(task.to_event())["accepted"] is True
        except BaseException as error:
            self._failure = PeerError(f"{type(error).__name__}: {error}")
        finally:
            self._client.caller.close()
            self._attacker.caller.close()

    def _attack(self, task: Task) -> None:
        key = task.key
        work = Work(self._program, key.step, key.direction, True)
        if not self.attacked:
            self._by_names()
        if (key.step, key.direction) not in self.attacked:
            self._by_rows(task, work)
            self._by_gradients(key, work)
            self._by_other_runs(task, work)
        if key.interval == 1:
            self._by_keys(key, work)
        self.attacked.add((key.step, key.direction))

    def _by_names(self) -> None:
        for op in (PULL, GIVE):
            for name in NO_KEYS:
                self._attacker.is_refused(op, name, match="names no|no key of a task")
        for op in (WEIGHTS, GRADIENTS):
            for name in (*NO_KEYS, "r0.e0.s1.i0.f/0"):
                self._attacker.is_refused(op, name, match="no key of a task")
        for op in ("", "os:system", "lambda.exec", "__class__", "lambda.pull\x00"):
            self._attacker.is_refused(op, "r0.e0.s1.i0.f/0", match="no operation")

    def _by_keys(self, key: TaskKey, work: Work) -> None:
        """Intervals, steps and epochs that are not there, not yet, or no more."""
        attacker, end = self._attacker, f"s{key.step}.i{key.interval}.{key.direction.value}"
        for interval in (INTERVALS, 999_999_999):
            for op, half in ((PULL, "/0"), (GIVE, "/0/0")):
                attacker.is_refused(op, f"r{RUN}.e{key.epoch}.s1.i{interval}.f{half}", match="of no interval")
            for op in (WEIGHTS, GRADIENTS):
                attacker.is_refused(op, f"r{RUN}.e{key.epoch}.s1.i{interval}.b", match="there is no interval")
        for step in (0, 2, 5, 9999):
            for op, half in ((PULL, "/0"), (GIVE, "/0/0")):
                attacker.is_refused(
                    op, f"r{RUN}.e{key.epoch}.s{step}.i0.f{half}", match="no worker does step"
                )
            for op in (WEIGHTS, GRADIENTS):
                attacker.is_refused(op, f"r{RUN}.e{key.epoch}.s{step}.i0.b", match="has no weights")
        for epoch in (key.epoch + 1, 999_999_999):
            assert attacker.ask(PULL, f"r{RUN}.e{epoch}.{end}/0") == []  # not there yet: that tells nothing
            attacker.is_refused(GIVE, f"r{RUN}.e{epoch}.{end}/0/0", match="came before it began")
            attacker.is_refused(WEIGHTS, f"r{RUN}.e{epoch}.{end}", match="beyond staleness 0")
            gradients = [np.ones(shape) for shape in work.weights.values()]
            way = "forward" if key.direction is Direction.FORWARD else "beyond staleness 0"
            attacker.is_refused(GRADIENTS, f"r{RUN}.e{epoch}.{end}", gradients, match=way)
        for epoch in range(key.epoch):
            (over,) = attacker.ask(PULL, f"r{RUN}.e{epoch}.{end}/0")
            assert (over.size, over.dtype) == (0, np.bool_)
            (taken,) = attacker.ask(GIVE, f"r{RUN}.e{epoch}.{end}/0/0", [np.full((1, 1), np.nan)])
            assert taken.tolist() == [0]
            if key.direction is not Direction.FORWARD:
                self._by_old_gradients(f"r{RUN}.e{epoch}.{end}", key.epoch - epoch, gradients)

    def _by_old_gradients(self, name: str, age: int, gradients: Sequence[Array]) -> None:
        self._attacker.is_refused(WEIGHTS, name, match="are gone")
        if age == 1:
            self._attacker.is_refused(GRADIENTS, name, gradients, match="twice with different bits")
        else:
            assert self._attacker.ask(GRADIENTS, name, gradients) == []  # dropped

    def _by_rows(self, task: Task, work: Work) -> None:
        """Rows of the open task in every wrong form; none of them is taken."""
        good = [np.zeros(shape, dtype) for shape, dtype in _first_half(task, work)]
        for bad in _other_forms(good):
            self._attacker.is_refused(GIVE, f"{task.key}/0/0", bad, match=rf"what came of {task.key} has")

    def _by_other_runs(self, task: Task, work: Work) -> None:
        """A worker that was given up in an earlier run of this session, which began at the same epoch."""
        rows = [np.zeros(shape, dtype) for shape, dtype in _first_half(task, work)]
        gradients = [np.ones(shape) for shape in work.weights.values()]
        for run in (RUN - 1, RUN + 1):
            key = replace(task.key, run=run)
            said = f"task {key} is of run {run} of this session, and this is run {RUN}"
            self._attacker.is_refused(PULL, half_name(key, 0), match=said)
            self._attacker.is_refused(GIVE, attempt_name(key, 0, 0), rows, match=said)
            self._attacker.is_refused(WEIGHTS, str(key), match=said)
            self._attacker.is_refused(GRADIENTS, str(key), gradients, match=said)

    def _by_gradients(self, key: TaskKey, work: Work) -> None:
        gradients = [np.ones(shape) for shape in work.weights.values()]
        if key.direction is Direction.FORWARD:
            self._attacker.is_refused(GRADIENTS, str(key), gradients, match="goes forward")
            return
        for bad in _other_forms(gradients):
            self._attacker.is_refused(GRADIENTS, str(key), bad, match="gradients of interval")


def _first_half(task: Task, work: Work) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of what a worker gives for the first half."""
    half = (task.rows + 1) // 2
    return [((half, item.width) if item.width else (2,), item.dtype) for item in work.given]


def _other_forms(good: Sequence[Array]) -> Iterator[list[Array]]:
    """Too many arrays, too few, larger, smaller, of other dtypes and dimensions."""
    huge = np.zeros((1 << 17, 4))
    yield [*good, *[np.zeros(1)] * (256 - len(good))]
    yield [*good, huge]
    if not good:
        return
    first, rest = good[0], list(good[1:])
    yield list(rest)
    for other in (
        *(huge, first[:-1], np.concatenate([first, first[:1]]), first[None], first.reshape(-1)[:0]),
        *(first.astype(dtype) for dtype in ("float32", "int64", "bool", "complex128")),
    ):
        yield [other, *rest]


def engine_of(session: Session, access: ClientAccess) -> tuple[Engine[Besieged], Besieged]:
    program = cases.gcn()
    (part,) = cases.case().parts([0, cases.case().num_nodes], INTERVALS)
    plan = cases.plan_of(program, [part])
    started: list[Besieged] = []

    def start_workers(_handlers: Mapping[str, Handler]) -> Besieged:
        started.append(Besieged(access, program))
        return started[0]

    parameters = cases.parameter_server(program, plan, 0)
    server = GraphServer(part, program, run=RUN)
    return Engine(session, server, plan, StalenessPolicy(), parameters, start_workers), started[0]


def test_attacks_on_the_tasks_of_a_run_change_nothing() -> None:
    with start_session(timeout_s=30.0) as session:
        engine, besieged = engine_of(session, open_client_access(session))
        totals = engine.run(EPOCHS)
        weights, losses = cases.plain_answer("gcn", EPOCHS)
        for name, value in engine.parameters.latest().items():
            np.testing.assert_allclose(value, weights[name], rtol=1e-10, atol=1e-12)
        assert [one.correct for one in totals] == [correct for _, correct in losses]
        forward, backward, fused = Direction.FORWARD, Direction.BACKWARD, Direction.FUSED
        assert besieged.attacked == {(1, forward), (1, backward), (4, fused)}
        engine.close()
        besieged.close()
