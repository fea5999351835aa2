"""A worker's secret opens the operations of workers, at a port of their own, and nothing else of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.endpoints import ClientAccess, open_client_access
from dglx_dist.comm.session import start_session
from dglx_dist.errors import PeerError, RemoteError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Placement
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.scheduler import addresses_of
from dglx_dist.strategies.serverless.tasks import Direction, TaskComputation, TaskKey, attempt_name, half_name
from dglx_dist.strategies.serverless.trainer import Engine
from dglx_dist.strategies.serverless.worker import GRADIENTS, PROGRAM, PULL, SUBMIT, WEIGHTS, RemoteCaller
from tests.helpers.ranks import run_ranks

from . import cases

OF_WORKERS = {PROGRAM, PULL, SUBMIT, WEIGHTS, GRADIENTS}
LARGE: Array = np.zeros(1 << 18)
"""2 MiB: travels in pieces."""


class WorkerClient:
    """Asks one rank of a job as a worker does: by sockets, with a worker's secret."""

    def __init__(self, access: ClientAccess, rank: int = 0) -> None:
        addresses, self.secrets = addresses_of(access)
        self.address = addresses[rank]
        self.caller = RemoteCaller()

    def ask(self, op: str, name: str, arrays: Sequence[Array] = ()) -> list[Array]:
        return self.caller.send(self.address, self.secrets, op, name, arrays)(20.0)

    def is_refused(self, op: str, name: str, arrays: Sequence[Array] = (), *, match: str) -> None:
        with pytest.raises(RemoteError, match=match):
            self.ask(op, name, arrays)


def request(client: WorkerClient, op: str) -> str:
    try:
        answer = client.ask(op, "r0.e0.s1.i0.f", [LARGE])
    except RemoteError as error:
        return str(error)
    return f"{len(answer)} arrays"


def is_kept_out(access: ClientAccess, rank: int) -> None:
    client = WorkerClient(access, rank=rank)
    with pytest.raises(PeerError, match="refused the connection"):
        client.ask(PROGRAM, "")
    client.caller.close()


def knock() -> dict[str, str]:
    with start_session(timeout_s=60.0) as session:
        KVStore(session, Placement(2, session.topology))
        engine = cases.engine(session, "gcn", parameter_servers=2)
        access, peer = open_client_access(session), 1 - session.topology.rank
        assert open_client_access(session) is access
        before = engine.parameters.latest()
        client = WorkerClient(access, rank=peer)
        answers = {op: request(client, op) for op in sorted(session.rpc._handlers)}
        client.caller.close()
        assert session.rpc.credentials is not None
        is_kept_out(replace(access, addresses=session.rpc.addresses), peer)
        is_kept_out(replace(access, credentials=session.rpc.credentials), peer)
        barrier(session, "both have asked")
        for name, value in engine.parameters.latest().items():
            assert value.tobytes() == before[name].tobytes()
        engine.parameters.raise_if_stopped()
        engine.close()
        return answers


@pytest.mark.parametrize("environment", [{}, {"DGLX_CURVE": "1"}], ids=["plain", "curve"])
def test_a_workers_secret_opens_the_operations_of_workers_alone(environment: dict[str, str]) -> None:
    for answers in run_ranks(knock, 2, environment=environment):
        assert set(answers) >= {"kv.pull", "lambda.state", "lambda.ghosts"} | OF_WORKERS
        opened = {op for op, answer in answers.items() if "no operation" not in answer}
        assert opened == OF_WORKERS
        assert answers[PROGRAM] == "1 arrays"
        assert "names no half" in answers[PULL]
        known = ", ".join(sorted(OF_WORKERS))
        assert (
            f"no operation 'lambda.state' is registered here (there are: {known})" in answers["lambda.state"]
        )


EPOCHS, RUN = 3, 1
NO_KEYS = (
    *("", "r0", "e0.s1.i0.f/0", "r0.e0.s1.i0.f/2", "r0.e0.s1.i0.f/00", "r0.e1e9.s1.i0.f/0"),
    *("r0.e9999999999.s1.i0.f/0", "r9999999999.e0.s1.i0.f/0", "r-1.e0.s1.i0.f/0", "r0.e0.s1.i-1.f/0"),
    *("../../etc/passwd", "r0.e0.s1.i0.f/0/1000000", "r0.e٣.s1.i0.f/0", "\x00", "x" * 4096),
)
"""Neither halves nor attempts."""


class Attacker:
    """Does what somebody with a worker's secret can do to each task before a worker takes it."""

    def __init__(self, access: ClientAccess, engine: Engine) -> None:
        self._attacker, self._works = WorkerClient(access), engine._server.works
        self._launch = engine.workers.launch
        engine.workers.launch = self.launch  # type: ignore[method-assign]
        self.attacked: set[tuple[int, Direction]] = set()

    def launch(self, key: TaskKey, where: slice, first_id: int, *, ready: bool) -> None:
        work, rows = self._works[key.step, key.direction], where.stop - where.start
        if not self.attacked:
            self._by_names()
        if (key.step, key.direction) not in self.attacked:
            self._by_rows(key, rows, work)
            self._by_gradients(key, work)
            self._by_other_runs(key, rows, work)
        if key.interval == 1:
            self._by_keys(key, work)
        self.attacked.add((key.step, key.direction))
        self._launch(key, where, first_id, ready=ready)

    def _by_names(self) -> None:
        for op in (PULL, SUBMIT):
            for name in NO_KEYS:
                self._attacker.is_refused(op, name, match="names no|no key of a task")
        for op in (WEIGHTS, GRADIENTS):
            for name in (*NO_KEYS, "r0.e0.s1.i0.f/0"):
                self._attacker.is_refused(op, name, match="no key of a task")
        for op in ("", "os:system", "lambda.exec", "__class__", "lambda.pull\x00"):
            self._attacker.is_refused(op, "r0.e0.s1.i0.f/0", match="no operation")

    def _by_keys(self, key: TaskKey, work: TaskComputation) -> None:
        """Intervals, steps and epochs that are not there, not yet, or no more."""
        attacker, end = self._attacker, f"s{key.step}.i{key.interval}.{key.direction.value}"
        no_interval = [f"s1.i{interval}" for interval in (cases.INTERVALS, 999_999_999)]
        no_work = [f"s{step}.i0" for step in (0, 2, 5, 9999)]
        for names, no_rows, no_weights in (
            (no_interval, "of no interval", "there is no interval"),
            (no_work, "no worker does step", "has no weights"),
        ):
            for name in names:
                for op, half in ((PULL, "/0"), (SUBMIT, "/0/0")):
                    attacker.is_refused(op, f"r{RUN}.e{key.epoch}.{name}.f{half}", match=no_rows)
                for op in (WEIGHTS, GRADIENTS):
                    attacker.is_refused(op, f"r{RUN}.e{key.epoch}.{name}.b", match=no_weights)
        for epoch in (key.epoch + 1, 999_999_999):
            assert attacker.ask(PULL, f"r{RUN}.e{epoch}.{end}/0") == []  # not there yet: that tells nothing
            attacker.is_refused(SUBMIT, f"r{RUN}.e{epoch}.{end}/0/0", match="came before it began")
            attacker.is_refused(WEIGHTS, f"r{RUN}.e{epoch}.{end}", match="beyond staleness 0")
            gradients = [np.ones(shape) for shape in work.weights.values()]
            way = "forward" if key.direction is Direction.FORWARD else "beyond staleness 0"
            attacker.is_refused(GRADIENTS, f"r{RUN}.e{epoch}.{end}", gradients, match=way)
        for epoch in range(key.epoch):
            (over,) = attacker.ask(PULL, f"r{RUN}.e{epoch}.{end}/0")
            assert (over.size, over.dtype) == (0, np.bool_)
            assert attacker.ask(SUBMIT, f"r{RUN}.e{epoch}.{end}/0/0", [np.full((1, 1), np.nan)]) == []
            if key.direction is not Direction.FORWARD:
                self._by_old_gradients(f"r{RUN}.e{epoch}.{end}", key.epoch - epoch, gradients)

    def _by_old_gradients(self, name: str, age: int, gradients: Sequence[Array]) -> None:
        self._attacker.is_refused(WEIGHTS, name, match="are gone")
        if age == 1:
            self._attacker.is_refused(GRADIENTS, name, gradients, match="twice with different bits")
        else:
            assert self._attacker.ask(GRADIENTS, name, gradients) == []  # dropped

    def _by_rows(self, key: TaskKey, rows: int, work: TaskComputation) -> None:
        """Rows of the open task in every wrong form; none of them is taken."""
        for bad in _other_forms(_first_half(rows, work)):
            self._attacker.is_refused(SUBMIT, f"{key}/0/0", bad, match=rf"what came of {key} has")

    def _by_other_runs(self, of_run: TaskKey, num_rows: int, work: TaskComputation) -> None:
        """A worker that was given up in an earlier run of this session, which began at the same epoch."""
        rows = _first_half(num_rows, work)
        gradients = [np.ones(shape) for shape in work.weights.values()]
        for run in (RUN - 1, RUN + 1):
            key = replace(of_run, run=run)
            message = f"task {key} is of run {run} of this session, and this is run {RUN}"
            self._attacker.is_refused(PULL, half_name(key, 0), match=message)
            self._attacker.is_refused(SUBMIT, attempt_name(key, 0, 0), rows, match=message)
            self._attacker.is_refused(WEIGHTS, str(key), match=message)
            self._attacker.is_refused(GRADIENTS, str(key), gradients, match=message)

    def _by_gradients(self, key: TaskKey, work: TaskComputation) -> None:
        gradients = [np.ones(shape) for shape in work.weights.values()]
        if key.direction is Direction.FORWARD:
            self._attacker.is_refused(GRADIENTS, str(key), gradients, match="goes forward")
            return
        for bad in _other_forms(gradients):
            self._attacker.is_refused(GRADIENTS, str(key), bad, match="gradients of interval")


def _first_half(rows: int, work: TaskComputation) -> list[Array]:
    half = (rows + 1) // 2
    return [np.zeros((half, item.width) if item.width else (2,), item.dtype) for item in work.given]


def _other_forms(good: Sequence[Array]) -> Iterator[list[Array]]:
    """Too many arrays, too few, larger, smaller, of other dtypes and dimensions."""
    huge = np.zeros((1 << 17, 4))
    yield [*good, *[np.zeros(1)] * (256 - len(good))]
    yield [*good, huge]
    if not good:
        return
    first, later = good[0], list(good[1:])
    yield list(later)
    for wrong in (
        *(huge, first[:-1], np.concatenate([first, first[:1]]), first[None], first.reshape(-1)[:0]),
        *(first.astype(dtype) for dtype in ("float32", "int64", "bool", "complex128")),
    ):
        yield [wrong, *later]


def test_attacks_on_the_tasks_of_a_run_change_nothing() -> None:
    with start_session(timeout_s=30.0) as session:
        engine = cases.engine(session, "gcn", mode="no_pipe", threads=1)
        attacker = Attacker(open_client_access(session), engine)
        totals = engine.run(EPOCHS)
        weights, losses = cases.plain_answer("gcn", EPOCHS)
        for name, value in engine.parameters.latest().items():
            np.testing.assert_allclose(value, weights[name], rtol=1e-10, atol=1e-12)
        assert [round(6 * total.train_accuracy) for total in totals] == [correct for _, correct in losses]
        forward, backward, fused = Direction.FORWARD, Direction.BACKWARD, Direction.FUSED
        assert attacker.attacked == {(1, forward), (1, backward), (4, fused)}
        engine.close()
