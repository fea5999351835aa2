"""The queue of pushes beside a fake of the calls, in one process."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dglx_dist.errors import PeerError, RemoteError
from dglx_dist.graph import kvstore as async_pushes
from dglx_dist.graph.kvstore import MAX_IN_FLIGHT, AsyncPushQueue, Send


class FakeRpc:
    """Answers when ``gate`` is open; calls with a negative number fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.sent: list[int] = []
        self.left = threading.Semaphore(0)

    def submit(self, rank: int, op: str, name: str, arrays: Any, *, phase: str, layer: int) -> Any:
        number = int(arrays[0][0])
        self.sent.append(number)
        self.left.release()

        def result() -> list[Any]:
            assert self.gate.wait(20)
            if number < 0:
                raise RemoteError(f"rank {rank} failed at {number}")
            return []

        return SimpleNamespace(result=result)


def send(number: int, rank: int = 1) -> Send:
    return Send(rank=rank, op="op", name="x", arrays=[np.array([number])], phase="push", layer=0)


@pytest.fixture
def rpc() -> FakeRpc:
    return FakeRpc()


@pytest.fixture
def queue(rpc: FakeRpc) -> Any:
    session = SimpleNamespace(rpc=rpc, timeout_s=20.0, hosts=["a", "b", "c"])
    made = AsyncPushQueue(session)  # type: ignore[arg-type]
    yield made
    rpc.gate.set()
    made.close()


def test_a_fence_without_requests_returns(queue: AsyncPushQueue) -> None:
    queue.fence(0.0)


def test_requests_leave_in_order_before_the_first_is_answered(queue: AsyncPushQueue, rpc: FakeRpc) -> None:
    queue.put([send(number) for number in range(MAX_IN_FLIGHT + 3)])
    for _ in range(MAX_IN_FLIGHT):
        assert rpc.left.acquire(timeout=20)
    assert rpc.sent == list(range(MAX_IN_FLIGHT))
    rpc.gate.set()
    queue.fence()
    assert rpc.sent == list(range(MAX_IN_FLIGHT + 3))


def test_a_fence_that_waits_in_vain_names_who_is_missing(queue: AsyncPushQueue, rpc: FakeRpc) -> None:
    queue.put([send(1), send(2, rank=2), send(3)])
    with pytest.raises(PeerError, match=r"fence\(\) waited 0.05 s .* rank 1 on b \(2\), rank 2 on c \(1\)"):
        queue.fence(0.05)
    rpc.gate.set()
    queue.fence()


def test_errors_are_raised_at_the_fence_once_and_counted(queue: AsyncPushQueue, rpc: FakeRpc) -> None:
    rpc.gate.set()
    queue.put([send(1), send(-2), send(3), send(-4), send(-5)])
    with pytest.raises(RemoteError, match="failed at -2") as caught:
        queue.fence()
    assert caught.value.__notes__ == ["2 more pushes with wait=False failed too"]
    queue.fence()
    queue.put([send(6)])
    queue.fence()
    assert rpc.sent == [1, -2, 3, -4, -5, 6]


def test_who_pushes_too_much_waits_for_room(
    queue: AsyncPushQueue, rpc: FakeRpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_pushes, "MAX_BYTES", 16)
    queue.put([send(1), send(2)])  # 16 bytes
    entered = threading.Event()

    def put_one_more() -> None:
        entered.set()
        queue.put([send(3)])

    thread = threading.Thread(target=put_one_more)
    thread.start()
    assert entered.wait(20)
    for _ in range(2):
        assert rpc.left.acquire(timeout=20)
    assert rpc.sent == [1, 2]
    rpc.gate.set()
    thread.join(20)
    queue.fence()
    assert rpc.sent == [1, 2, 3]


def test_a_fence_does_not_wait_for_what_is_pushed_after_it(queue: AsyncPushQueue, rpc: FakeRpc) -> None:
    rpc.gate.set()
    queue.put([send(1)])
    queue.fence()
    rpc.gate.clear()
    queue.put([send(2)])
    with pytest.raises(PeerError):
        queue.fence(0.0)
