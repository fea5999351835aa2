"""Engines on real ranks: equal to plain training, exact bytes, accounts, and errors that name dead ranks."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.collectives import barrier, gather_int64, gather_json
from dglx_dist.comm.rpc import Handler
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import Array
from dglx_dist.serverless.controller import Counts
from dglx_dist.serverless.program import Program
from dglx_dist.serverless.tasks import (
    Direction,
    TaskKey,
    Work,
    add_gradients,
    attempt_name,
    half_name,
    half_rows,
)
from dglx_dist.serverless.worker import GIVE, GRADIENTS, PULL, WEIGHTS
from dglx_dist.strategies.serverless.engine import (
    Account,
    Engine,
    EpochTotals,
    account_of_ranks,
    check_reachable,
    progress_line,
    repeated,
)
from dglx_dist.strategies.serverless.graph_partition import (
    Part,
    exchange_boundaries,
    read_features,
    read_structure,
)
from dglx_dist.strategies.serverless.graph_server import GraphServer
from dglx_dist.strategies.serverless.options import StalenessPolicy, read_lambda_options
from tests.helpers.ranks import run_ranks, start_ranks
from tests.strategies.equality import write_parts

from . import cases

EPOCHS, INTERVALS = 4, 3
STARTS = {1: [0, 40], 2: [0, 17, 40], 4: [0, 9, 9, 24, 40]}
"""The second of four graph servers has no nodes."""


class ThreadWorkers:
    """Workers as threads that ask by the operations of real ones; some tasks are done twice."""

    def __init__(
        self, session: Session, program: Program, handlers: Mapping[str, Handler], twice: bool
    ) -> None:
        self._rpc, self._program, self._handlers, self._twice = session.rpc, program, handlers, twice
        self._tasks: queue.SimpleQueue[tuple[TaskKey, int] | None] = queue.SimpleQueue()
        self.launched: dict[TaskKey, bool] = {}
        self.early: set[TaskKey] = set()
        self.done_twice: list[TaskKey] = []
        self.failure: Exception | None = None
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        assert key not in self.launched
        self.launched[key] = ready
        if not ready:
            self.early.add(key)
        self._tasks.put((key, rows))

    def ready(self, key: TaskKey) -> None:
        assert self.launched[key] is False
        self.launched[key] = True

    def done(self, key: TaskKey, attempt: int) -> None:
        if attempt:
            self.done_twice.append(key)

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._do(*task)
            except Exception as error:
                self.failure = error
                return

    def _ask(self, op: str, name: str, arrays: Sequence[Array] = ()) -> list[Array]:
        return self._rpc.call(self._rpc.rank, op, name, arrays, phase="test")

    def _do(self, key: TaskKey, rows: int) -> None:
        work = Work(self._program, key.step, key.direction, True)
        weights = self._handlers[WEIGHTS](str(key), []) if work.weights else []
        found = []
        for half in (0, 1):
            while not (arrays := self._ask(PULL, half_name(key, half))):
                time.sleep(0.001)
            nodes = half_rows(rows, half)
            found.append(work.half(weights, arrays, nodes.stop - nodes.start))
        for attempt in (0, 1) if self._twice else (0,):
            if work.pushes and work.weights:
                self._handlers[GRADIENTS](str(key), add_gradients(found[0].gradients, found[1].gradients))
            for half in (0, 1):
                (taken,) = self._ask(GIVE, attempt_name(key, half, attempt), found[half].rows)
                assert taken.tolist() == [attempt == 0]


def engine_of(
    session: Session,
    program: Program,
    policy: StalenessPolicy,
    num_servers: int,
    *,
    twice: bool = False,
    **settings: Any,
) -> tuple[Engine[ThreadWorkers], ThreadWorkers]:
    rank, world = session.topology.rank, session.topology.world_size
    graph = cases.case().graphs(STARTS[world])[rank]
    boundary = exchange_boundaries(session, graph)
    part = cases.case().part(graph, boundary, INTERVALS)
    plan = cases.plan_of(program, parts_of(world), num_servers, policy.staleness)
    started: list[ThreadWorkers] = []

    def start_workers(handlers: Mapping[str, Handler]) -> ThreadWorkers:
        started.append(ThreadWorkers(session, program, handlers, twice))
        return started[0]

    parameters = cases.parameter_server(program, plan, rank) if rank < num_servers else None
    server = GraphServer(part, program)
    return Engine(session, server, plan, policy, parameters, start_workers, **settings), started[0]


def parts_of(world: int) -> list[Part]:
    return cases.case().parts(STARTS[world], INTERVALS)


def check_plain(name: str, engine: Engine[ThreadWorkers], totals: list[EpochTotals]) -> None:
    weights, losses = cases.plain_answer(name, EPOCHS)
    for key, value in engine.parameters.latest().items():
        np.testing.assert_allclose(value, weights[key], rtol=1e-10, atol=1e-12, err_msg=key)
    assert [one.epoch for one in totals] == list(range(EPOCHS))
    assert [one.correct for one in totals] == [correct for _, correct in losses]
    np.testing.assert_allclose([one.loss_sum for one in totals], [loss for loss, _ in losses], rtol=1e-10)
    assert all(one.seconds > 0 for one in totals)


def train(session: Session, name: str, policy: StalenessPolicy, **settings: Any) -> None:
    """Two runs of two epochs each, beside the plain answer where the mode is exact."""
    engine, workers = engine_of(
        session, cases.PROGRAMS[name](), policy, min(2, session.topology.world_size), **settings
    )
    totals = engine.run(EPOCHS // 2)
    assert engine.epoch == EPOCHS // 2
    assert engine.scheduler.state() == (EPOCHS // 2, "drained")
    totals += engine.run(EPOCHS - EPOCHS // 2)
    if policy.mode != "async":
        check_plain(name, engine, totals)
    assert all(workers.launched.values())
    behind_gather = {key for key in workers.launched if key.step == 1 and key.direction is Direction.FORWARD}
    if policy.mode == "no_pipe":
        assert not workers.early
    elif name != "gat":
        assert behind_gather <= workers.early
    engine.close()
    workers.close()


def one_rank() -> None:
    with start_session(timeout_s=30.0) as session:
        for name in cases.PROGRAMS:
            train(session, name, StalenessPolicy(mode="pipe"), threads=2)
        train(session, "gcn", StalenessPolicy(mode="no_pipe"), twice=True)


def check_what_is_read(session: Session, folder: str) -> None:
    """Structure and features of a rank's own nodes and ghosts are the graph's; bytes to the formula."""
    g = DistGraph(Path(folder) / "parts")
    before = session.ledger.snapshot()
    graph = read_structure(g)
    own = np.arange(graph.starts[graph.rank], graph.starts[graph.rank + 1])
    edges = g.structure(g.canonical_etypes[0]).ask("in_edges", own)
    ids = np.concatenate([own, graph.ghosts])
    assert (graph.indptr == edges.indptr).all()
    assert (ids[graph.sources] == edges.sources).all()
    boundary = exchange_boundaries(session, graph)
    assert [len(nodes) for nodes in boundary] == gather_int64(np.diff(graph.ghost_starts), session)[
        :, graph.rank
    ].tolist()
    features = read_features(g, graph, "feat", "float64")
    assert (features == g.ndata["feat"][torch.from_numpy(ids)].numpy()).all()
    assert read_features(g, graph, "feat", "float32").dtype == np.float32
    barrier(session, "reading")
    rows = [row for row in session.ledger.since(before) if row.phase == "preload"]
    asked = gather_json([row.num_bytes for row in rows], session)
    ghosts = gather_int64([graph.num_ghosts], session).sum()
    # The list once, the features twice.
    assert sum(sum(one) for one in asked) == ghosts * (8 + 2 * (8 + 8 * 7))
    g.close()


def four_ranks(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=30.0) as session:
        check_what_is_read(session, folder)
        before = session.ledger.snapshot()
        train(session, "gcn", StalenessPolicy(mode="pipe"), twice=True)
        rows = [(row.phase, row.layer, row.num_bytes) for row in session.ledger.since(before)]
        train(session, "gat", StalenessPolicy(mode="pipe"), threads=2)
        train(session, "sage", StalenessPolicy(mode="no_pipe"))
        train(session, "gat", StalenessPolicy(mode="async", staleness=1), threads=2)
        return {"rows": gather_json(rows, session)}


def test_one_rank_without_sockets() -> None:
    one_rank()


@pytest.mark.wide
def test_four_ranks_of_which_one_has_no_nodes(tmp_path: Path) -> None:
    write_parts(tmp_path)
    found = run_ranks(four_ranks, 4, args=(str(tmp_path),), ranks_per_server=1)[0]["rows"]
    sums: dict[tuple[str, int], int] = {}
    for rank in found:
        for phase, layer, size in rank:
            sums[phase, layer] = sums.get((phase, layer), 0) + size
    graphs = cases.case().graphs(STARTS[4])
    pairs = sum(graph.num_ghosts for graph in graphs)
    nodes, (d0, d1, s) = 40, (5, 4, 8)
    assert pairs > 0
    assert sums["ghosts", 2] == sums["ghost_gradients", 2] == EPOCHS * pairs * (4 + s * d1)
    assert sums["preload", 0] == 8 * pairs
    assert [layer for phase, layer in sums if phase.startswith("ghost")] == [2, 2]
    # Each task was given twice but pulled once; a fused one gives two numbers per half beside its rows.
    statistics = 2 * 2 * 8 * 4 * INTERVALS
    assert sums["lambda_down", 1] == EPOCHS * nodes * (d0 + d0 + d1) * s
    assert sums["lambda_down", 4] == EPOCHS * nodes * (d1 * s + 4)
    assert sums["lambda_up", 1] == 2 * EPOCHS * nodes * d1 * s
    assert sums["lambda_up", 4] == 2 * EPOCHS * (nodes * d1 * s + statistics)


def die_behind_the_barrier(do: Callable[[TaskKey, int], None]) -> Callable[[TaskKey, int], None]:
    def do_or_die(key: TaskKey, rows: int) -> None:
        if (key.step, key.direction) == (1, Direction.BACKWARD):
            time.sleep(1.0)  # until the other rank has done its part, too: it waits for no barrier any more
            os._exit(3)
        do(key, rows)

    return do_or_die


def a_death() -> str:
    with start_session(timeout_s=20.0) as session:
        engine, workers = engine_of(session, cases.gcn(), StalenessPolicy(), 1)
        engine.run(1)
        if session.topology.rank == 1:
            workers._do = die_behind_the_barrier(workers._do)  # type: ignore[method-assign]
        with pytest.raises((PeerError, RemoteError)) as caught:
            engine.run(100)
        engine.abandon()
        session.close(failed=True)
        return str(caught.value)


def test_a_graph_server_that_dies_is_named() -> None:
    """Also where all others wait for the weights alone."""
    outcomes = start_ranks(a_death, 2, timeout_s=90)
    assert outcomes[1].exitcode == 3
    assert "rank 1 on" in outcomes[0].result
    assert "the next update" in outcomes[0].result


def test_late_rows_end_a_duplicate_attempt() -> None:
    with start_session(timeout_s=30.0) as session:
        engine, workers = engine_of(session, cases.gcn(), StalenessPolicy(), 1)
        engine.run(2)
        for half in (0, 1):
            (taken,) = session.rpc.call(0, GIVE, f"r0.e1.s1.i0.f/{half}/7", [], phase="test")
            assert taken.tolist() == [0]
            assert workers.done_twice == ([TaskKey.parse("r0.e1.s1.i0.f")] if half else [])
        engine.close()
        workers.close()


def test_a_standstill_names_tasks_and_what_updates_wait_for() -> None:
    with start_session(timeout_s=1.0) as session:
        engine, workers = engine_of(session, cases.gcn(), StalenessPolicy(), 1)
        workers._do = lambda _key, _rows: None  # type: ignore[method-assign]
        with pytest.raises(
            PeerError, match=r"no worker gave rows for r0.e0.s1.i0.f.*gradients of intervals 0, 1, 2"
        ):
            engine.run(1)
        engine.abandon()
        workers.close()


def test_what_a_worker_fails_with_ends_the_run() -> None:
    with start_session(timeout_s=30.0) as session:
        engine, workers = engine_of(session, cases.gcn(), StalenessPolicy(), 1)

        def fail(_key: TaskKey, _rows: int) -> None:
            raise PeerError("no worker did it")

        workers._do = fail  # type: ignore[method-assign]
        with pytest.raises(PeerError, match="no worker did it"):
            engine.run(1)
        engine.abandon()
        workers.close()


def test_a_next_task_that_cannot_be_sent_ends_the_run_and_not_the_worker() -> None:
    with start_session(timeout_s=30.0) as session:
        engine, workers = engine_of(session, cases.gcn(), StalenessPolicy(), 1)

        def fail(_key: TaskKey, _attempt: int) -> None:
            raise PeerError("no more workers")

        workers.done = fail  # type: ignore[method-assign]
        with pytest.raises(PeerError, match="no more workers"):
            engine.run(1)
        assert workers.failure is None
        engine.abandon()
        workers.close()


SETTINGS = read_lambda_options({"prices": "dorylus"})
# A million functions of 192 MB that took 100 ms each.
MILLION = Counts(invocations=10**6, cold=10, warm=10**6 - 10, billed_s=1e5, gb_s=1e5 * 192 / 1024)


def accounts_of_two() -> tuple[Account, int]:
    with start_session(timeout_s=30.0) as session:
        halves = [
            Account(counts=Counts(invocations=3, gb_s=0.5), server_seconds=2.0 / 3),
            Account(counts=Counts(invocations=4, relaunched=1), server_seconds=5.0),
        ]
        before = session.ledger.snapshot()
        total = account_of_ranks(halves[session.topology.rank], session)
        return total, sum(row.num_bytes for row in session.ledger.since(before))


def test_ranks_add_up_and_send_as_many_bytes_whatever_the_numbers() -> None:
    counts = Counts(invocations=7, gb_s=0.5, relaunched=1)
    for total, num_bytes in run_ranks(accounts_of_two, 2):
        assert total == Account(counts=counts, server_seconds=math.fsum([2.0 / 3, 5.0]))
        assert num_bytes % (8 * (len(vars(counts)) + 1)) == 0


def test_dollars_of_functions_and_servers() -> None:
    """0.20 for the requests, 0.3125 for their time; two servers of 0.34 an hour for one hour."""
    told = Account(counts=MILLION, server_seconds=7200.0).describe(SETTINGS, simulated=True)
    assert told["dollars_functions"] == pytest.approx(0.5125)
    assert told["dollars_servers"] == pytest.approx(0.68)
    assert told["dollars"] == pytest.approx(1.1925)
    assert str(told["label"]).startswith("simulated")
    real = Account(counts=MILLION).describe(SETTINGS, simulated=False)
    assert "simulated" not in str(real["label"])


def test_the_line_says_stages_workers_queue_relaunches_and_dollars() -> None:
    workers = SimpleNamespace(simulated=True, controller=SimpleNamespace(workers=4))
    scheduler = SimpleNamespace(state=lambda: (3, "AV1 2 GA1 1"), queue_length=2)
    engine: Any = SimpleNamespace(workers=workers, scheduler=scheduler)
    account = Account(counts=MILLION + Counts(relaunched=5))
    assert progress_line(engine, SETTINGS, account) == (
        "epoch 3 | AV1 2 GA1 1 | 4 workers | queue 2 | 5 relaunched | $0.512 simulated"
    )


def test_lines_come_while_a_run_goes_on_and_no_longer() -> None:
    first = threading.Event()
    with repeated(lambda _seconds: first.set()):
        assert first.wait(20)
    assert not any(thread.name == "lambda-progress" for thread in threading.enumerate())
    with repeated(None):
        assert not any(thread.name == "lambda-progress" for thread in threading.enumerate())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_functions_of_a_cloud_cannot_call_a_loopback_address(host: str) -> None:
    with pytest.raises(ConfigError, match=r"interface=NAME.*GLOO_SOCKET_IFNAME"):
        check_reachable(host, paid=True)
    check_reachable(host, paid=False)
    check_reachable("10.0.0.5", paid=True)
