"""Threads with a worker each: no more than there is work for, none lost, none left."""

import threading
import time
from collections.abc import Callable

import pytest

from dglx_dist.errors import PeerError
from dglx_dist.serverless.executors.base import Lost, Pool, PoolPlan, WorkerHandle
from dglx_dist.serverless.tasks import Task, TaskKey
from dglx_dist.serverless.worker import WorkerAnswer
from dglx_dist.serverless.worker_process import Fault

from .programs import gcn
from .servers import Bench, keys_of

KEYS = [key for interval in range(3) for key in keys_of(gcn(), interval)]


class Made:
    """Workers that wait for a word each; what they did."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.done: list[TaskKey] = []
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None
        self.told = threading.Semaphore(0)

    def make(self) -> WorkerHandle:
        self.workers.append(FakeWorker(self))
        return self.workers[-1]

    def pool(self) -> Pool:
        return Pool(PoolPlan(make=self.make, notice=self.told.release, memory_mb=192))


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


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def event(key: TaskKey) -> bytes:
    return Bench(gcn(), [4] * 3).task(key).to_event()


def test_as_many_workers_as_there_is_work_for_warm_ones_first() -> None:
    made = Made()
    pool = made.pool()
    pool.size(3)
    assert pool.workers == 0
    for _ in range(4):  # one after another: one worker does
        pool.invoke(event(KEYS[0]))
        made.go.release()
        until(lambda: pool._idle == len(made.workers) > 0 and not pool._events)
    assert len(made.workers) == 1
    for key in KEYS[:5]:
        pool.invoke(event(key))
    until(lambda: sum(worker.calls for worker in made.workers) == 4 + 3)
    assert pool.workers == 3
    pool.size(5)
    until(lambda: sum(worker.calls for worker in made.workers) == 4 + 5)
    made.go.release(5)
    until(lambda: len(made.done) == 9)
    until(lambda: len(pool._billed) == 9)
    assert sorted(made.done[4:]) == sorted(KEYS[:5])
    assert sum(one.cold for one in pool.billed()) == len(made.workers) == 5
    pool.size(2)
    until(lambda: pool.workers == 2)
    pool.close()
    assert [worker.ended for worker in made.workers] == [1] * 5


def test_what_a_worker_raises_is_the_tasks_end_not_the_threads() -> None:
    made = Made()
    pool = made.pool()
    for error, reason in ((PeerError("it died"), "it died"), (OSError("no pipe"), "OSError: no pipe")):
        made.error = error
        made.go.release()
        pool.invoke(event(KEYS[1]))
        assert made.told.acquire(timeout=20)
        assert pool.lost() == [Lost(key=KEYS[1], attempt=0, reason=reason)]
    assert len(pool.billed()) == 2  # a function that dies is paid for
    made.error = None
    made.go.release()
    pool.invoke(event(KEYS[2]))
    until(lambda: made.done == [KEYS[2]])
    assert len(made.workers) == 1
    pool.close()


def test_who_is_late_holds_no_place_and_leaves_when_it_comes_back() -> None:
    made = Made()
    pool = made.pool()
    first = Bench(gcn(), [4] * 3).task(KEYS[0])
    pool.invoke(first.to_event())
    until(lambda: [worker.calls for worker in made.workers] == [1])
    pool.invoke(event(KEYS[1]))
    pool.invoke(first.again().to_event())
    until(lambda: [worker.calls for worker in made.workers] == [1, 1])
    assert pool.workers == 1
    # No more are late than there are places.
    pool.invoke(Bench(gcn(), [4] * 3).task(KEYS[1]).again().to_event())
    made.go.release(4)
    until(lambda: len(made.done) == 4)
    until(lambda: sum(worker.ended for worker in made.workers) == 1)
    assert len(made.workers) == 2
    assert pool.workers == 1
    pool.close()


def test_closing_ends_what_runs_and_forgets_what_waits() -> None:
    made = Made()
    pool = made.pool()
    for key in KEYS[:4]:
        pool.invoke(event(key))
    until(lambda: [worker.calls for worker in made.workers] == [1])
    pool.close()
    assert made.done == []
    assert pool.workers == 0
    assert pool.lost() == []
    assert [worker.ended for worker in made.workers] == [1]
    with pytest.raises(PeerError, match="closed"):
        pool.invoke(event(KEYS[0]))
