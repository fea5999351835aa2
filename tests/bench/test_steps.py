import pytest

from scripts.bench.driver import Step, Steps


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("scripts.bench.driver.time", clock)
    return clock


def test_jobs_are_counted_and_the_time_left_follows_from_them(clock: Clock) -> None:
    told: list[Step] = []
    steps = Steps("D1", told.append)
    steps.say("making its datasets")
    steps.expect(4)
    for _ in range(3):
        steps.begin("a job")
        clock.now += 10.0
    assert [step.done for step in told] == [0, 0, 1, 2]
    assert [step.total for step in told] == [0, 4, 4, 4]
    assert [step.seconds_left for step in told] == [None, None, 30.0, 20.0]


def test_the_estimate_forgets_the_slow_start(clock: Clock) -> None:
    told: list[Step] = []
    steps = Steps("D1", told.append)
    steps.expect(6)
    for seconds in (1000.0, 2.0, 2.0, 2.0, 2.0, 0.0):
        steps.begin("a job")
        clock.now += seconds
    assert told[-1].seconds_left == 2.0
