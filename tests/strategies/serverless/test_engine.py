"""Engines on real ranks: equal to plain training, what is read, accounts, and errors that name dead ranks."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier, gather_int64
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.serverless.cost import Counts
from dglx_dist.strategies.serverless.graph_partition import exchange_boundaries, read_features, read_structure
from dglx_dist.strategies.serverless.options import read_lambda_options
from dglx_dist.strategies.serverless.scheduler import check_reachable
from dglx_dist.strategies.serverless.tasks import Direction, TaskKey
from dglx_dist.strategies.serverless.trainer import describe_costs, progress_line
from dglx_dist.strategies.serverless.worker import SUBMIT
from tests.helpers.ranks import run_ranks, start_ranks
from tests.strategies.equality import write_parts
from tests.strategies.serverless.faults import strike

from . import cases

EPOCHS = 4


def train(session: Session, name: str, mode: str, **options: Any) -> None:
    """Two runs of two epochs each, beside the plain answer where the mode is exact."""
    servers = min(2, session.topology.world_size)
    engine = cases.engine(session, name, mode=mode, parameter_servers=servers, **options)
    launch, was_ready = engine.workers.launch, set[bool]()

    def note(key: TaskKey, rows: slice, first_id: int, *, ready: bool) -> None:
        was_ready.add(ready)
        launch(key, rows, first_id, ready=ready)

    engine.workers.launch = note  # type: ignore[method-assign]
    totals = engine.run(EPOCHS // 2)
    assert engine.scheduler.state() == (EPOCHS // 2, "drained")
    totals += engine.run(EPOCHS - EPOCHS // 2)
    # A worker starts while the graph server still computes its rows, but where phases come one at a time.
    assert (False in was_ready) is (mode != "no_pipe")
    if mode != "async":
        weights, losses = cases.plain_answer(name, EPOCHS)
        for key, value in engine.parameters.latest().items():
            np.testing.assert_allclose(value, weights[key], rtol=1e-10, atol=1e-12, err_msg=key)
        assert [total.epoch for total in totals] == list(range(EPOCHS))
        # Of six training nodes, by the program.
        results = [(6 * total.loss, 6 * total.train_accuracy) for total in totals]
        np.testing.assert_allclose(results, losses, rtol=1e-10)
    assert all(total.seconds > 0 for total in totals)
    engine.close()


def check_bytes_read(session: Session, folder: str) -> None:
    """The list of halo nodes once, their features once, to the byte."""
    g = DistGraph(Path(folder) / "parts")
    before = session.ledger.snapshot()
    graph = read_structure(g)
    exchange_boundaries(session, graph)
    read_features(g, graph, "feat", "float64")
    barrier(session, "reading")
    own = sum(row.num_bytes for row in session.ledger.since(before) if row.phase == "preload")
    sent, halo = gather_int64([own, graph.num_halo], session).sum(axis=0)
    assert sent == halo * (8 + 8 + 8 * 7)
    g.close()


def four_ranks(folder: str) -> None:
    with start_session(timeout_s=30.0) as session:
        check_bytes_read(session, folder)
        before = session.ledger.snapshot()
        with pytest.MonkeyPatch.context() as patch:
            strike(patch)
            train(session, "gcn", "pipe")
        moved = Counter[str]()
        for row in session.ledger.since(before):
            moved[row.phase] += row.num_bytes
        halo = cases.case().graphs(cases.STARTS[4])[session.topology.rank].num_halo
        moved_bytes = gather_int64([moved["ghosts"], moved["ghost_gradients"], halo], session).sum(axis=0)
        assert moved_bytes[0] == moved_bytes[1] == EPOCHS * moved_bytes[2] * (4 + 8 * 4)
        train(session, "gat", "pipe", threads=2)
        train(session, "sage", "no_pipe")
        train(session, "gat", "async", staleness=1, threads=2)


def test_one_rank_trains_if_every_task_is_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    strike(monkeypatch)
    with start_session(timeout_s=30.0) as session:
        train(session, "dropping", "pipe", threads=2)


@pytest.mark.wide
def test_four_ranks_train_if_one_has_no_nodes(tmp_path: Path) -> None:
    write_parts(tmp_path)
    run_ranks(four_ranks, 4, args=(str(tmp_path),), ranks_per_server=1)


def a_death() -> str:
    with start_session(timeout_s=20.0) as session:
        engine = cases.engine(session, "gcn")
        engine.run(1)
        launch = engine.workers.launch

        def launch_or_die(key: TaskKey, rows: slice, first_id: int, *, ready: bool) -> None:
            if (key.step, key.direction) == (1, Direction.BACKWARD):
                # Until the other rank has done its part, too: it waits for no barrier any more.
                time.sleep(1.0)
                os._exit(3)
            launch(key, rows, first_id, ready=ready)

        if session.topology.rank == 1:
            engine.workers.launch = launch_or_die  # type: ignore[method-assign]
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
        engine = cases.engine(session, "gcn")
        engine.run(2)
        run, before = engine._server.run, engine.workers.controller.counts.refused
        for half in (0, 1):
            session.rpc.call(0, SUBMIT, f"r{run}.e1.s1.i0.f/{half}/7", [], phase="test")
            assert engine.workers.controller.counts.refused == before + half
        engine.close()


def fail(*_: object, **__: object) -> None:
    raise PeerError("no more workers")


def ignore(*_: object, **__: object) -> None:
    pass


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"launch": ignore}, r"no worker gave rows for r\d+.e0.s1.i0.f.*gradients of intervals 0, 1, 2"),
        ({"launch": ignore, "raise_if_failed": fail}, "no more workers"),
        ({"done": fail}, "no more workers"),
    ],
)
def test_workers_that_stand_still_or_fail_end_the_run(replaced: dict[str, Any], message: str) -> None:
    """And where the next task cannot be sent, the call of the worker that gave rows does not fail."""
    with start_session(timeout_s=1.0) as session:
        engine = cases.engine(session, "gcn")
        vars(engine.workers).update(replaced)
        with pytest.raises(PeerError, match=message):
            engine.run(1)
        assert engine.workers.controller.counts.lost == 0
        engine.abandon()


SETTINGS = read_lambda_options({"prices": "dorylus"})
# A million functions of 192 MB that took 100 ms each.
MILLION = Counts(invocations=10**6, cold=10, warm=10**6 - 10, billed_s=1e5, gb_s=1e5 * 192 / 1024)


def test_dollars_are_the_sum_of_functions_and_servers() -> None:
    """0.20 for the requests, 0.3125 for their time; two servers of 0.34 an hour for one hour."""
    costs = describe_costs(MILLION + Counts(server_seconds=7200.0), SETTINGS, simulated=True)
    assert costs["dollars_functions"] == pytest.approx(0.5125)
    assert costs["dollars_servers"] == pytest.approx(0.68)
    assert costs["dollars"] == pytest.approx(1.1925)
    assert str(costs["label"]).startswith("simulated")
    real = describe_costs(MILLION, SETTINGS, simulated=False)
    assert "simulated" not in str(real["label"])


def test_the_line_says_stages_workers_queue_relaunches_and_dollars() -> None:
    workers = SimpleNamespace(simulated=True, controller=SimpleNamespace(workers=4))
    scheduler = SimpleNamespace(state=lambda: (3, "AV1 2 GA1 1"), queue_length=2)
    engine: Any = SimpleNamespace(workers=workers, scheduler=scheduler)
    assert progress_line(engine, SETTINGS, MILLION + Counts(relaunched=5)) == (
        "epoch 3 | AV1 2 GA1 1 | 4 workers | queue 2 | 5 relaunched | $0.512 simulated"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_functions_of_a_cloud_cannot_call_a_loopback_address(host: str) -> None:
    with pytest.raises(ConfigError, match=r"interface=NAME.*GLOO_SOCKET_IFNAME"):
        check_reachable(host, paid=True)
    check_reachable(host, paid=False)
    check_reachable("10.0.0.5", paid=True)
