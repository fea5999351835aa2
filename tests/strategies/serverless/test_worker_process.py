"""Pools of workers: warm ones first, none lost, none left behind."""

from __future__ import annotations

import threading

from dglx_dist.errors import PeerError
from dglx_dist.strategies.serverless.executors.base import Executor, Lost, WorkerHandle
from dglx_dist.strategies.serverless.tasks import Task, TaskKey
from dglx_dist.strategies.serverless.worker import WorkerAnswer
from dglx_dist.strategies.serverless.worker_process import Fault

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

    def pool(self) -> Executor:
        return Executor(self.make, self.told.release, memory_mb=192)


class FakeWorker(WorkerHandle):
    def __init__(self, made: Made) -> None:
        self.made, self.calls, self.ended = made, 0, 0
        self.stopped = threading.Event()

    def invoke(self, task: Task, fault: Fault | None) -> WorkerAnswer | None:
        self.calls += 1
        while not self.made.go.acquire(timeout=0.002):
            if self.stopped.is_set():
                raise PeerError("stopped")
        if self.made.error is not None:
            raise self.made.error
        self.made.done.append(task.key)
        return WorkerAnswer(key=task.key, attempt=task.attempt, seconds=0.5, cold=self.calls == 1)

    def stop(self) -> None:
        self.stopped.set()

    def end(self) -> None:
        self.ended += 1


def task_of(key: TaskKey) -> Task:
    return Bench(gcn(), [4] * 3).task(key)


def test_as_many_workers_as_there_is_work_for_warm_ones_first() -> None:
    made = Made()
    pool = made.pool()
    pool.size(3)
    assert pool._num_up == 0
    for _ in range(4):  # one after another: one worker does
        pool.invoke(task_of(POOL_KEYS[0]))
        made.go.release()
        until(lambda: len(pool._idle) == len(made.workers) > 0)
    assert len(made.workers) == 1
    for key in POOL_KEYS[:5]:
        pool.invoke(task_of(key))
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
    pool.invoke(task_of(POOL_KEYS[1]))
    assert made.told.acquire(timeout=20)
    assert pool.take_lost() == [Lost(key=POOL_KEYS[1], attempt=0, reason="OSError: no pipe")]
    made.error = None
    made.go.release()
    pool.invoke(task_of(POOL_KEYS[2]))
    until(lambda: made.done == [POOL_KEYS[2]])
    assert len(made.workers) == 1
    pool.close()


def test_late_worker_holds_no_slot_and_ends_when_it_returns() -> None:
    made = Made()
    pool = made.pool()
    first = Bench(gcn(), [4] * 3).task(POOL_KEYS[0])
    pool.invoke(first)
    until(lambda: [worker.calls for worker in made.workers] == [1])
    pool.invoke(task_of(POOL_KEYS[1]))
    pool.invoke(first.again())
    until(lambda: [worker.calls for worker in made.workers] == [1, 1])
    assert pool._num_up == 1
    # No more are late than there are places.
    pool.invoke(Bench(gcn(), [4] * 3).task(POOL_KEYS[1]).again())
    made.go.release(4)
    until(lambda: len(made.done) == 4)
    until(lambda: sum(worker.ended for worker in made.workers) == 1)
    assert len(made.workers) == 2
    assert pool._num_up == 1
    pool.close()
