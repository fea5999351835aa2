"""Worker processes: pools, faults, throttling; none lost, none left behind."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dglx_dist.errors import PeerError
from dglx_dist.strategies.serverless import worker_process
from dglx_dist.strategies.serverless.executors.base import Lost, PoolExecutor, WorkerHandle
from dglx_dist.strategies.serverless.tasks import Task, TaskKey
from dglx_dist.strategies.serverless.worker import WorkerAnswer
from dglx_dist.strategies.serverless.worker_process import CpuThrottle, Fault, Relay

from .programs import gcn
from .servers import Bench, keys_of, until

POOL_KEYS = [key for interval in range(3) for key in keys_of(gcn(), interval)]


class Made:
    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.done: list[TaskKey] = []
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None
        self.told = threading.Semaphore(0)

    def make(self) -> WorkerHandle:
        self.workers.append(FakeWorker(self))
        return self.workers[-1]

    def pool(self) -> PoolExecutor:
        return PoolExecutor(self.make, self.told.release, memory_mb=192)


class FakeWorker(WorkerHandle):
    def __init__(self, made: Made) -> None:
        self.made, self.calls, self.ended = made, 0, 0
        self.stopped = threading.Event()

    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer | None:
        task = Task.from_event(event)
        self.calls += 1
        while not self.made.go.acquire(timeout=0.002):
            if self.stopped.is_set():
                raise PeerError("stopped")
        if self.made.error is not None:
            raise self.made.error
        self.made.done.append(task.key)
        return WorkerAnswer(
            key=task.key, attempt=task.attempt, accepted=True, seconds=0.5, cold=self.calls == 1
        )

    def stop(self) -> None:
        self.stopped.set()

    def end(self) -> None:
        self.ended += 1


def event(key: TaskKey) -> bytes:
    return Bench(gcn(), [4] * 3).task(key).to_event()


def test_as_many_workers_as_there_is_work_for_warm_ones_first() -> None:
    made = Made()
    pool = made.pool()
    pool.size(3)
    assert pool._num_up == 0
    for _ in range(4):  # one after another: one worker does
        pool.invoke(event(POOL_KEYS[0]))
        made.go.release()
        until(lambda: len(pool._idle) == len(made.workers) > 0)
    assert len(made.workers) == 1
    for key in POOL_KEYS[:5]:
        pool.invoke(event(key))
    until(lambda: sum(worker.calls for worker in made.workers) == 4 + 3)
    assert pool._num_up == 3
    pool.size(5)
    until(lambda: sum(worker.calls for worker in made.workers) == 4 + 5)
    made.go.release(5)
    until(lambda: len(made.done) == 9)
    until(lambda: len(pool._billed) == 9)
    assert sorted(made.done[4:]) == sorted(POOL_KEYS[:5])
    assert sum(item.cold for item in pool.take_billed()) == len(made.workers) == 5
    pool.size(2)
    until(lambda: pool._num_up == 2)
    pool.close()
    assert [worker.ended for worker in made.workers] == [1] * 5


def test_error_of_a_worker_ends_its_task_and_not_the_thread() -> None:
    made = Made()
    pool = made.pool()
    made.error = OSError("no pipe")
    made.go.release()
    pool.invoke(event(POOL_KEYS[1]))
    assert made.told.acquire(timeout=20)
    assert pool.take_lost() == [Lost(key=POOL_KEYS[1], attempt=0, reason="OSError: no pipe")]
    made.error = None
    made.go.release()
    pool.invoke(event(POOL_KEYS[2]))
    until(lambda: made.done == [POOL_KEYS[2]])
    assert len(made.workers) == 1
    pool.close()


def test_late_worker_holds_no_slot_and_ends_when_it_returns() -> None:
    made = Made()
    pool = made.pool()
    first = Bench(gcn(), [4] * 3).task(POOL_KEYS[0])
    pool.invoke(first.to_event())
    until(lambda: [worker.calls for worker in made.workers] == [1])
    pool.invoke(event(POOL_KEYS[1]))
    pool.invoke(first.again().to_event())
    until(lambda: [worker.calls for worker in made.workers] == [1, 1])
    assert pool._num_up == 1
    # No more are late than there are places.
    pool.invoke(Bench(gcn(), [4] * 3).task(POOL_KEYS[1]).again().to_event())
    made.go.release(4)
    until(lambda: len(made.done) == 4)
    until(lambda: sum(worker.ended for worker in made.workers) == 1)
    assert len(made.workers) == 2
    assert pool._num_up == 1
    pool.close()


SIZE = 300_000


class Answering(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while piece := self.request.recv(1 << 16):
            self.request.sendall(piece)


@contextmanager
def echo() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answering) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), 20)


def there_and_back(one: socket.socket, data: bytes) -> bytes:
    threading.Thread(target=one.sendall, args=(data,), daemon=True).start()
    result = b""
    while len(result) < len(data):
        result += one.recv(1 << 16)
    return result


def test_a_relay_passes_everything_on_and_not_faster_than_it_may() -> None:
    data = bytes(range(256)) * (SIZE // 256)
    with echo() as endpoint:
        relay = Relay(1e6)
        assert relay.endpoint(endpoint) == relay.endpoint(endpoint) != endpoint
        with connect(relay.endpoint(endpoint)) as item, connect(relay.endpoint(endpoint)) as second:
            started = time.monotonic()
            assert there_and_back(item, data) == data
            assert time.monotonic() - started > 0.9 * len(data) / 1e6
            # Both directions have the whole rate, both connections share it.
            started = time.monotonic()
            thread = threading.Thread(target=there_and_back, args=(item, data))
            thread.start()
            assert there_and_back(second, data) == data
            thread.join()
            assert time.monotonic() - started > 0.9 * 2 * len(data) / 1e6


def test_the_end_of_one_side_is_the_end_of_the_other() -> None:
    with echo() as endpoint:
        relay = Relay(1e9)
        near = relay.endpoint(endpoint)
        with connect(near) as connection:
            assert there_and_back(connection, b"abc") == b"abc"
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    with connect(near) as connection:  # nobody is there any more
        assert connection.recv(1) == b""


def test_the_cpu_throttle_sleeps_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    used, slept = iter([0.25, 1.25, 1.25]), []
    monkeypatch.setattr(worker_process.time, "process_time", lambda: next(used))
    monkeypatch.setattr(worker_process.time, "sleep", slept.append)
    throttle = CpuThrottle(0.2)
    for _ in range(3):
        throttle.rest()
    assert slept == pytest.approx([1.0, 4.0, 0.0])
    assert 1.25 / (1.25 + sum(slept)) == pytest.approx(0.2)
