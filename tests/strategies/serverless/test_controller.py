"""Tasks leave in order and within bounds, are repeated when a worker dies or is late, and count once."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Mapping

import pytest

from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.strategies.serverless.controller import Autotuner, Controller, most_workers
from dglx_dist.strategies.serverless.cost import prices
from dglx_dist.strategies.serverless.executors.base import Executor, ExecutorContext, Invocation, Lost
from dglx_dist.strategies.serverless.tasks import Address, Direction, Secrets, Task, TaskKey

SERVER = Address(rank=0, host="here", endpoint="tcp://127.0.0.1:1")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Noted(Executor):
    def __init__(
        self, context: ExecutorContext | None = None, options: Mapping[str, object] | None = None
    ) -> None:
        self.sent: list[str] = []
        self.sizes: list[int] = []
        self.dead: list[Lost] = []
        self.ended: list[Invocation] = []

    def invoke(self, task: Task) -> None:
        self.sent.append(f"{task.key}/{task.attempt}")

    def size(self, workers: int) -> None:
        self.sizes.append(workers)

    def take_lost(self) -> list[Lost]:
        message, self.dead = self.dead, []
        return message

    def take_billed(self) -> list[Invocation]:
        message, self.ended = self.ended, []
        return message

    def close(self) -> None: ...


make_controller = functools.partial(Controller, retries=8, prices=prices())


class Scene:
    """A controller with a clock that stands still and an executor that only notes."""

    def __init__(self, workers: int = 2, intervals: int = 100, **options: object) -> None:
        self.clock, self.executor, self.seen = Clock(), Noted(), list[tuple[TaskKey, float, float, float]]()
        self.controller = make_controller(
            self.executor,
            most=most_workers(intervals),
            workers=workers,
            clock=self.clock,
            observer=lambda *told: self.seen.append(told),
            **options,
        )

    def launch(self, interval: int, epoch: int = 0, *, ready: bool = True) -> TaskKey:
        task = make_task(interval, epoch)
        self.controller.launch(task, ready=ready)
        return task.key

    def wait(self, seconds: float) -> list[str]:
        before = len(self.executor.sent)
        self.clock.now += seconds
        self.controller.tick()
        return self.executor.sent[before:]


def make_task(interval: int, epoch: int = 0, step: int = 1) -> Task:
    key = TaskKey(epoch, step, interval, Direction.FORWARD)
    return Task(
        key=key,
        rows=3,
        first_row=0,
        seed=0,
        program="0" * 64,
        graph_server=SERVER,
        parameter_server=SERVER,
        secrets=Secrets(secret="s"),
        timeout_s=5.0,
    )


def test_no_more_than_the_workers_are_under_way_and_older_epochs_go_first() -> None:
    scene = Scene(workers=2)
    first, _, later, older = (scene.launch(i, epoch) for i, epoch in [(0, 1), (1, 1), (2, 1), (3, 0)])
    assert scene.executor.sent == ["r0.e1.s1.i0.f/0", "r0.e1.s1.i1.f/0"]
    assert (len(scene.controller._running), scene.executor.sizes) == (2, [2])
    assert scene.controller.finish(first, 0)
    assert scene.executor.sent[2:] == [f"{older}/0"]
    assert scene.controller.finish(older, 0)
    assert scene.executor.sent[3:] == [f"{later}/0"]


def test_early_workers_leave_one_to_tasks_that_others_may_wait_for() -> None:
    scene = Scene(workers=2)
    early = [scene.launch(i, ready=False) for i in range(3)]
    assert scene.executor.sent == [f"{early[0]}/0"]
    ready = scene.launch(7)
    assert scene.executor.sent[1:] == [f"{ready}/0"]
    scene.controller.ready(early[2])
    scene.controller.ready(early[2])
    assert scene.controller.finish(ready, 0)
    assert scene.executor.sent[2:] == [f"{early[2]}/0"]
    # The first is ready now and takes no early place any more.
    scene.controller.ready(early[0])
    assert scene.controller.finish(early[2], 0)
    assert scene.executor.sent[3:] == [f"{early[1]}/0"]
    alone = Scene(workers=1)
    alone.launch(0, ready=False)
    assert alone.executor.sent == []


def test_the_first_result_counts_and_others_are_refused() -> None:
    scene = Scene()
    key = scene.launch(0)
    assert scene.wait(10.1) == [f"{key}/1"]
    assert scene.controller.finish(key, 0)
    assert not scene.controller.finish(key, 1)
    assert not scene.controller.finish(make_task(9).key, 0)
    counts = scene.controller.counts
    assert (counts.invocations, counts.relaunched, counts.lost, counts.refused) == (2, 1, 0, 2)
    assert scene.controller._running == {}


def test_a_number_of_an_attempt_that_nobody_made_does_not_have_the_task_done_again() -> None:
    scene = Scene()
    key = scene.launch(0)
    assert scene.controller.finish(key, 999_999)
    assert scene.wait(60) == []
    assert scene.controller._running == {}


def test_time_counts_from_when_the_rows_are_there() -> None:
    scene = Scene()
    key = scene.launch(0, ready=False)
    assert scene.wait(100) == []
    scene.controller.ready(key)
    assert scene.wait(9.9) == []
    assert scene.wait(0.2) == [f"{key}/1"]
    scene.clock.now += 1
    assert scene.controller.finish(key, 1)
    ((seen, sent, ready, done),) = scene.seen
    assert (seen, ready - sent, done - sent) == (key, pytest.approx(-10.1), pytest.approx(1))


def test_the_time_out_is_five_times_the_usual_of_its_step_and_doubles_up_to_eight_times() -> None:
    """The usual is a moving average, of which nothing is known at first; half a second is the least."""
    scene = Scene()
    for interval, seconds in enumerate((1.0, 3.0)):
        key = scene.launch(interval)
        scene.clock.now += seconds
        assert scene.controller.finish(key, 0)
    late = scene.launch(2)
    usual = 0.95 * 1.0 + 0.05 * 3.0
    for attempt, factor in enumerate((1, 2, 4, 8, 8), start=1):
        assert scene.wait(5 * usual * factor - 0.01) == []
        assert scene.wait(0.02) == [f"{late}/{attempt}"]
    for interval, limit in enumerate((10.0, 0.5)):
        task = make_task(interval, step=2)
        scene.controller.launch(task, ready=True)
        assert scene.wait(limit - 0.01) == []
        assert scene.wait(0.02) == [f"{task.key}/1"]
        scene.clock.now += 0.01
        assert scene.controller.finish(task.key, 1)


def test_the_dead_are_replaced_at_once_and_once() -> None:
    scene = Scene()
    key = scene.launch(0, ready=False)
    scene.executor.dead = [Lost(key=key, attempt=0, reason="killed")] * 2
    assert scene.wait(0) == [f"{key}/1"]
    scene.executor.dead = [Lost(key=key, attempt=0, reason="told late")]
    assert scene.wait(0) == []
    assert scene.controller.finish(key, 1)
    scene.executor.dead = [Lost(key=key, attempt=1, reason="after it gave")]
    assert scene.wait(0) == []
    assert (scene.controller.counts.lost, scene.controller.counts.relaunched) == (1, 1)


def test_error_after_all_retries_has_the_last_reason() -> None:
    scene = Scene(retries=2)
    key = scene.launch(0)
    for attempt in range(2):
        scene.executor.dead = [Lost(key=key, attempt=attempt, reason="out of memory")]
        assert scene.wait(0) == [f"{key}/{attempt + 1}"]
    scene.executor.dead = [Lost(key=key, attempt=2, reason="out of memory")]
    with pytest.raises(PeerError, match=rf"{key} in 3 attempts; the last: out of memory.*retries"):
        scene.wait(0)


def test_ended_invocations_are_counted_and_billed_by_the_step() -> None:
    scene = Scene(prices=prices("dorylus"))
    for interval in range(3):
        scene.controller.finish(scene.launch(interval), 0)
    scene.executor.ended = [Invocation(duration_s=0.25, cold=cold, memory_mb=192) for cold in (True, False)]
    scene.wait(0)
    counts = scene.controller.counts
    assert (counts.invocations, counts.cold, counts.warm, counts.num_unbilled) == (3, 1, 1, 1)
    assert (counts.billed_s, counts.gb_s) == pytest.approx((0.5, 2 * 0.3 * 0.1875))


def test_the_number_of_workers_follows_the_queue() -> None:
    scene, queue = Scene(workers=0, intervals=8), [0.0]
    scene.controller.watch(lambda: queue[0])
    assert (scene.controller.workers, scene.executor.sizes) == (8, [8])
    for length in (10.0, 20.0, 40.0):
        queue[0] = length
        scene.wait(1.0)
        scene.wait(0.5)
        scene.clock.now -= 0.5
    assert (scene.controller.workers, scene.executor.sizes) == (2, [8, 4, 2])
    for interval in range(4):
        scene.launch(interval)
    assert len(scene.controller._running) == 2
    queue[0] = 0
    scene.wait(1.0)
    assert len(scene.controller._running) == scene.controller.workers > 2


def test_reducing_workers_keeps_one_for_tasks_that_early_ones_wait_for() -> None:
    """All places of three who wait for rows would leave none to the task that gives them, when it dies."""
    scene, queue = Scene(workers=0, intervals=4), [0.0]
    scene.controller.watch(lambda: queue[0])
    first = scene.launch(0)
    early = [scene.launch(interval, ready=False) for interval in (1, 2, 3)]
    assert len(scene.controller._running) == 4
    for length in (10.0, 20.0, 40.0):
        queue[0] = length
        scene.wait(1.0)
    assert scene.controller.workers == 4
    scene.executor.dead = [Lost(key=first, attempt=0, reason="killed")]
    assert scene.wait(0) == [f"{first}/1"]
    for key in (first, *early):
        scene.controller.ready(key)
    queue[0] = 60.0
    scene.wait(1.0)
    assert scene.controller.workers == scene.executor.sizes[-1] == 1


def test_a_thread_ticks_when_it_is_woken_and_its_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dglx_dist.strategies.serverless.controller._TICK_S", 60)
    executor = Noted()
    controller = make_controller(executor, most=1, workers=1, retries=0)
    task = make_task(0)
    controller.launch(task, ready=True)
    executor.dead = [Lost(key=task.key, attempt=0, reason="killed")]
    with pytest.raises(PeerError, match="killed"), controller.run():
        wake_until_it_fails(controller)


def test_bug_that_ends_the_thread_is_reported() -> None:
    controller = make_controller(Noted(), most=1, clock=itertools.count().__next__)
    controller.watch(lambda: 1 / 0)
    with pytest.raises(PeerError, match="stopped: ZeroDivisionError"), controller.run():
        wake_until_it_fails(controller)


def wake_until_it_fails(controller: Controller) -> None:
    controller.raise_if_failed()
    controller.wake()
    pause = threading.Event()
    for _ in range(10_000):
        pause.wait(0.001)
        controller.raise_if_failed()


def test_a_task_is_launched_once() -> None:
    scene = Scene()
    scene.launch(0)
    with pytest.raises(ConfigError, match="was already launched"):
        scene.launch(0)


def settle(start: int, best: float, steps: int) -> list[int]:
    """Numbers of workers where ``best`` workers give as much in one step as the server's cores take."""
    tuner, queue, result = Autotuner(start), 0.0, []
    for _ in range(steps):
        queue = max(0.0, queue + tuner.workers - best)
        result.append(tuner.observe(queue))
    return result


@pytest.mark.parametrize("best", [50, 30, 12, 5, 77])
def test_number_of_workers_settles_within_ten_steps(best: int) -> None:
    """A server half as fast as 100 workers is ``best`` = 50."""
    numbers = settle(100, best, 40)
    assert abs(numbers[9] - best) <= 0.3 * best
    assert all(1 <= number <= 100 for number in numbers)
    assert all(0.5 * best <= number <= 1.5 * best for number in numbers[10:])


def test_bounds_are_the_intervals_a_hundred_and_the_network() -> None:
    assert [most_workers(intervals) for intervals in (7, 1000, 0)] == [7, 100, 1]
    assert [most_workers(1000, rate) for rate in (1.25e9, 1.25e6)] == [50, 1]
    tuner = Autotuner(3)
    assert {tuner.observe(0) for _ in range(9)} == {3}
    assert [tuner.observe(queue) for queue in (50, 100, 200, 400)][-1] == 1
