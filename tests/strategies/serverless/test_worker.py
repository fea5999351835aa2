"""One task from event to result: the bits of a direct call, the bytes of the paper, refusals, no torch."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest

from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless import worker as caller_module
from dglx_dist.strategies.serverless.aws import function
from dglx_dist.strategies.serverless.tasks import TASK_OVER, Direction, TaskKey, kernels
from dglx_dist.strategies.serverless.worker import DirectCaller, RemoteCaller, TaskPhase, Worker, WorkerAnswer
from dglx_dist.strategies.serverless.worker_process import Fault, FaultInjector

from .programs import gcn, sage
from .servers import Bench, keys_of, serve

ROWS = [7, 0, 1]
AV1 = TaskKey(0, 1, 0, Direction.FORWARD)


@contextmanager
def remote() -> Iterator[RemoteCaller]:
    caller = RemoteCaller()
    try:
        yield caller
    finally:
        caller.close()


def count_moved(key: TaskKey) -> tuple[int, ...]:
    """Bytes of pull, give, weights, gradients of one task of 7 rows in the program of 5, 4, 3 columns."""
    bench = Bench(gcn(), [7])
    with serve(bench), remote() as caller:
        Worker(caller).handle(bench.task(key).to_event())
    return tuple(bench.bytes.values())[:4]


def test_bytes_are_those_of_the_paper() -> None:
    # Section 4.6 with n = 7, s = 8: AV l pulls n d and gives n d. gradAV pulls n (d_before + d), and gives
    # n d_before above layer 1. |W| goes down each time, and up backward.
    n, s, first, second = 7, 8, (5 * 4 + 4) * 8, (4 * 3 + 3) * 8
    av1, grad1 = AV1, TaskKey(0, 1, 0, Direction.BACKWARD)
    av2, grad2 = TaskKey(0, 4, 0, Direction.FORWARD), TaskKey(0, 4, 0, Direction.BACKWARD)
    fused = TaskKey(0, 4, 0, Direction.FUSED)
    assert count_moved(av1) == (n * 5 * s, n * 4 * s, first, 0)
    assert count_moved(grad1) == (n * (5 + 4) * s, 0, first, first)
    apart = [sum(pair) for pair in zip(count_moved(av2), count_moved(grad2), strict=True)]
    together = count_moved(fused)
    statistics = 2 * 2 * 8
    assert together == (n * 4 * s + n * 4, n * 4 * s + statistics, second, second)
    # Fusion saves the outputs up, the gradient down with the inputs a second time, and the weights once.
    saved = [left - right for left, right in zip(apart, together, strict=True)]
    assert saved == [n * (4 + 3) * s - n * 4, n * 3 * s - statistics, second, 0]


def test_gradients_arrive_before_rows_and_forward_rows_leave_half_by_half() -> None:
    bench = Bench(gcn(), [7])
    worker = Worker(DirectCaller(bench.handlers()))
    worker.handle(bench.task(TaskKey(0, 4, 0, Direction.FUSED)).to_event())
    done = [call for call, _ in bench.calls]
    assert done == ["program", "weights", "pull", "pull", "gradients", "give", "give"]
    bench.calls.clear()
    places: list[str] = []

    def at(place: TaskPhase) -> None:
        places.append(place.value)
        if place is TaskPhase.HALF:
            places.append(f"{sum(call == 'give' for call, _ in bench.calls)} given")

    worker = Worker(DirectCaller(bench.handlers()), at)
    worker.handle(bench.task(AV1).to_event())
    assert places == ["before_pull", "half", "0 given", "half", "1 given", "computed", "pushed", "end"]


def test_rows_that_are_late_are_asked_for_again_and_counted_once() -> None:
    bench, key = Bench(gcn(), [7]), AV1
    bench.late = 3
    with serve(bench), remote() as caller:
        Worker(caller).handle(bench.task(key).to_event())
        assert [name for call, name in bench.calls if call == "pull"] == ["r0.e0.s1.i0.f/0"] * 4 + [
            "r0.e0.s1.i0.f/1"
        ]
        assert bench.bytes["pull"] == 7 * 5 * 8
        bench.late = 10**9
        late = bench.task(replace(key, epoch=1), timeout_s=0.5)
        with pytest.raises(
            PeerError, match=r"task r0\.e1\.s1\.i0\.f, attempt 0: rank 0 on here had no rows for .*/0"
        ):
            Worker(caller).handle(late.to_event())
    bench.check(key)


def test_answer_reports_the_result_and_a_second_attempt_is_refused() -> None:
    bench, key = Bench(gcn(), [7]), TaskKey(0, 4, 0, Direction.FUSED)
    worker = Worker(DirectCaller(bench.handlers()))
    first = worker.handle(json.loads(bench.task(key).to_event()))
    second = WorkerAnswer.from_json(json.dumps(worker.handle(bench.task(key).again().to_event())))
    assert first == {
        **first,
        "key": "r0.e0.s4.i0.fb",
        "attempt": 0,
        "cold": True,
        "error": "",
    }
    assert (second.key, second.attempt, second.cold) == (key, 1, False)
    assert second.seconds > 0
    assert bench.pushes == [key, key]  # with the same bits, or Bench would have refused
    bench.check(key)


@pytest.mark.parametrize("place", TaskPhase)
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.FUSED])
def test_a_worker_that_dies_anywhere_loses_nothing(place: TaskPhase, direction: Direction) -> None:
    def die() -> NoReturn:
        raise PeerError("killed")

    bench, key, faults = Bench(gcn(), [7]), TaskKey(0, 4, 0, direction), FaultInjector(die)
    faults.next = Fault(place=place)
    worker, task = Worker(DirectCaller(bench.handlers()), faults), bench.task(key)
    with pytest.raises(PeerError, match="attempt 0: killed"):
        worker.handle(task.to_event())
    assert (len(bench.given.get(key, ())) == 2) is (place is TaskPhase.END)  # else the task is not done
    has_pushed = direction is Direction.FUSED and place in (TaskPhase.PUSHED, TaskPhase.END)
    assert bench.pushes == [key] * has_pushed
    worker.handle(task.again().to_event())
    bench.check(key)


def test_connections_and_program_are_kept_for_the_next_task_and_renewed_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, keys = Bench(gcn(), ROWS), keys_of(gcn())
    with serve(bench), remote() as caller:
        worker = Worker(caller)
        for key in keys[:2]:
            worker.handle(bench.task(key).to_event())
        client = caller._client
        assert len(client._links) == 1
        monkeypatch.setattr(caller_module, "_RECONNECT_AFTER_S", -1.0)
        worker.handle(bench.task(keys[2]).to_event())
        assert caller._client is not client
        assert [name for call, name in bench.calls if call == "program"] == [kernels()]
        # Each run hears which kernels a worker computes with.
        for epoch in range(2):
            worker.handle(bench.task(replace(keys[0], run=1, epoch=epoch)).to_event())
    assert [name for call, name in bench.calls if call == "program"] == [kernels(), kernels()]


def test_a_function_takes_tasks_as_events_and_as_requests() -> None:
    bench, keys = Bench(gcn(), ROWS), keys_of(gcn())
    with serve(bench):
        events = [bench.task(key).to_event() for key in keys]
        coded = base64.b64encode(events[2]).decode()
        assert function.handler(json.loads(events[0]))["error"] == ""
        assert function.handler({"body": events[1].decode(), "requestContext": {}})["cold"] is False
        assert function.handler({"body": coded, "isBase64Encoded": True}, object())["key"] == str(keys[2])
        for key in keys[:3]:
            bench.check(key)
        function._WORKER._caller.close()


def test_a_task_that_another_attempt_has_done_ends_without_an_error() -> None:
    bench = Bench(gcn(), ROWS)
    handlers = bench.handlers() | {"lambda.pull": lambda name, arrays: [TASK_OVER]}
    answer = Worker(DirectCaller(handlers)).handle(bench.task(AV1).to_event())
    assert answer["error"] == ""
    assert not bench.given


def test_a_dead_server_is_named() -> None:
    bench = Bench(gcn(), ROWS)
    with serve(bench):
        task = bench.task(AV1)
    with remote() as caller, pytest.raises(PeerError) as caught:
        Worker(caller).handle(task.to_event())
    assert "task r0.e0.s1.i0.f, attempt 0: rank 0 on here" in str(caught.value)
    assert "lambda.program" in str(caught.value)


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "encrypted"])
def test_a_worker_without_the_secret_is_refused(curve: bool, caplog: pytest.LogCaptureFixture) -> None:
    bench, key = Bench(gcn(), ROWS), AV1
    with serve(bench, curve=curve), remote() as caller, caplog.at_level(logging.WARNING):
        task = bench.task(key)
        public, secret = bench.secrets.public_key, bench.secrets.secret_key
        wrong = replace(task.secrets, secret="open barley")
        if curve:
            stranger = caller_module.zmq.curve_keypair()
            wrong = replace(wrong, public_key=stranger[0].decode(), secret_key=stranger[1].decode())
        with pytest.raises(PeerError, match="refused the connection") as caught:
            Worker(caller).handle(replace(task, secrets=wrong).to_event())
        assert "open" not in str(caught.value)
        assert bench.calls == []
        Worker(caller).handle(task.to_event())
        bench.check(key)
        assert (public is None) is (secret is None) is not curve
    assert "does not know this job's secret" in caplog.text


def test_an_encrypted_job_never_shows_its_secret_in_clear() -> None:
    bench = Bench(gcn(), ROWS)
    with serve(bench, curve=True), remote() as caller:
        task = bench.task(keys_of(gcn())[0])
        naked = replace(task, graph_server=replace(task.graph_server, public_key=None))
        with pytest.raises(ConfigError, match="has no public key"):
            Worker(caller).handle(naked.to_event())


@pytest.mark.parametrize("body", ["?", "\u00e9", "bm8gSlNPTg==", "e30="])
def test_malicious_bodies_of_requests_are_refused(body: str) -> None:
    with pytest.raises(ConfigError, match=r"not base64|not valid JSON|'version' is missing"):
        function.handler({"body": body, "isBase64Encoded": True})
    with pytest.raises(ConfigError, match="not valid JSON"):
        function.handler({"body": body})


@pytest.mark.parametrize(
    ("op", "answer", "message"),
    [
        ("lambda.program", [], "without one program"),
        ("lambda.program", [np.zeros(8, np.uint8)] * 2, "without one program"),
        ("lambda.program", [np.zeros((1 << 24) + 1, np.uint8)], "one program of at most 16777216 bytes"),
        ("lambda.program", [np.frombuffer(b"\x80\x04cos\nsystem\n.", np.uint8)], "not valid JSON"),
        (
            "lambda.program",
            [np.frombuffer(sage().to_json(), np.uint8)],
            "gave program .* instead of .*: it belongs to another run",
        ),
        ("lambda.pull", [np.zeros((4, 6))], "shape"),
        ("lambda.weights", [np.zeros((5, 4))], "got weights"),
    ],
)
def test_answers_that_a_task_does_not_ask_for_are_refused(op: str, answer: list[Array], message: str) -> None:
    bench = Bench(gcn(), ROWS)
    handlers = bench.handlers() | {op: lambda name, arrays: answer}
    with pytest.raises(ConfigError, match=rf"task r0\.e0\.s1\.i0\.f, attempt 0: .*{message}"):
        Worker(DirectCaller(handlers)).handle(bench.task(AV1).to_event())


def test_a_server_that_raises_is_named() -> None:
    bench = Bench(gcn(), ROWS)
    with serve(bench), remote() as caller:
        task = replace(bench.task(AV1), key=replace(AV1, interval=3))  # there is no such interval
        with pytest.raises(
            RemoteError, match=r"i3\.f, attempt 0: rank 0 on here failed at lambda\.pull 'r0\.e0\.s1\.i3"
        ):
            Worker(caller).handle(task.to_event())
