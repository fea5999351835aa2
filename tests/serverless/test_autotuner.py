"""The number of workers follows the trend of the queue, within its bounds, and settles."""

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.controller import Autotuner, TunerLimits


def settle(start: int, best: float, steps: int) -> list[int]:
    """Numbers of workers where ``best`` workers give as much in one step as the server's cores take."""
    tuner, queue, found = Autotuner(TunerLimits(intervals=start)), 0.0, []
    for _ in range(steps):
        queue = max(0.0, queue + tuner.workers - best)
        found.append(tuner.observe(queue))
    return found


def test_a_growing_queue_means_fewer_a_shrinking_or_empty_one_more_a_steady_one_as_many() -> None:
    growing = Autotuner(TunerLimits(intervals=40))
    numbers = [growing.observe(queue) for queue in (10, 30, 60, 100)]
    assert numbers == [40, 20, 10, 5]
    assert [growing.observe(queue) for queue in (100, 101, 100)] == [5, 5, 5]
    assert growing.observe(20) > 5
    before = growing.workers
    assert growing.observe(0) > before
    assert growing.observe(0) > before + 1


@pytest.mark.parametrize("best", [50, 30, 12, 5, 77])
def test_it_settles_within_ten_steps(best: int) -> None:
    """A server half as fast as 100 workers is ``best`` = 50."""
    numbers = settle(100, best, 40)
    assert abs(numbers[9] - best) <= 0.3 * best
    assert all(1 <= number <= 100 for number in numbers)
    assert all(0.5 * best <= number <= 1.5 * best for number in numbers[10:])


def test_where_the_cpu_is_half_as_fast_as_the_workers_half_of_them_are_left() -> None:
    assert settle(100, 50, 10)[-1] == 50
    assert settle(8, 4, 10)[-1] == 4


def test_it_follows_a_change() -> None:
    tuner, queue = Autotuner(TunerLimits(intervals=100)), 0.0
    for best in [10.0] * 20 + [80.0] * 20:
        queue = max(0.0, queue + tuner.workers - best)
        tuner.observe(queue)
    assert 60 <= tuner.workers <= 100


def test_bounds_are_the_intervals_a_hundred_and_the_network() -> None:
    assert TunerLimits(intervals=7).most == 7
    assert TunerLimits(intervals=1000).most == 100
    assert TunerLimits(intervals=0).most == 1
    assert TunerLimits(intervals=1000, link_bytes_per_s=1.25e9).most == 50
    assert TunerLimits(intervals=1000, link_bytes_per_s=1.25e6).most == 1
    tuner = Autotuner(TunerLimits(intervals=3))
    assert {tuner.observe(0) for _ in range(9)} == {3}
    assert [tuner.observe(queue) for queue in (50, 100, 200, 400)][-1] == 1


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError):
        TunerLimits(intervals=-1)
    with pytest.raises(ConfigError, match="link_bytes_per_s"):
        TunerLimits(intervals=1, link_bytes_per_s=0)
    with pytest.raises(ConfigError, match="queue"):
        Autotuner(TunerLimits(intervals=1)).observe(-1)
