"""What makes a process on this machine as slow as a small function."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dglx_dist.serverless import worker_process
from dglx_dist.serverless.worker_process import CpuThrottle, Relay

SIZE = 300_000


@contextmanager
def echo() -> Iterator[str]:
    """An endpoint that gives back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(one: socket.socket) -> None:
        with one:
            while piece := one.recv(1 << 16):
                one.sendall(piece)

    def accept() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(one,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), 20)


def there_and_back(one: socket.socket, data: bytes) -> bytes:
    threading.Thread(target=one.sendall, args=(data,), daemon=True).start()
    found = b""
    while len(found) < len(data):
        found += one.recv(1 << 16)
    return found


def test_a_relay_passes_everything_on_and_not_faster_than_it_may() -> None:
    data = bytes(range(256)) * (SIZE // 256)
    with echo() as endpoint:
        relay = Relay(1e6)
        assert relay.endpoint(endpoint) == relay.endpoint(endpoint) != endpoint
        with connect(relay.endpoint(endpoint)) as one, connect(relay.endpoint(endpoint)) as other:
            started = time.monotonic()
            assert there_and_back(one, data) == data
            assert time.monotonic() - started > 0.9 * len(data) / 1e6
            # Both directions have the whole rate, both connections share it.
            started = time.monotonic()
            thread = threading.Thread(target=there_and_back, args=(one, data))
            thread.start()
            assert there_and_back(other, data) == data
            thread.join()
            assert time.monotonic() - started > 0.9 * 2 * len(data) / 1e6


def test_the_end_of_one_side_is_the_end_of_the_other() -> None:
    with echo() as endpoint:
        relay = Relay(1e9)
        near = relay.endpoint(endpoint)
        with connect(near) as one:
            assert there_and_back(one, b"abc") == b"abc"
            one.shutdown(socket.SHUT_WR)
            assert one.recv(1) == b""
    with connect(near) as one:  # nobody is there any more
        assert one.recv(1) == b""


def test_the_cpu_throttle_sleeps_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    used, slept = iter([0.25, 1.25, 1.25]), []
    monkeypatch.setattr(worker_process.time, "process_time", lambda: next(used))
    monkeypatch.setattr(worker_process.time, "sleep", slept.append)
    one = CpuThrottle(0.2)
    for _ in range(3):
        one.rest()
    assert slept == pytest.approx([1.0, 4.0, 0.0])
    assert 1.25 / (1.25 + sum(slept)) == pytest.approx(0.2)
