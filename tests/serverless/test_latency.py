"""The pause of functions is log-normal with the median asked for, and drawn alike in every run."""

import math
from statistics import median, stdev

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.executors.base import Latency
from dglx_dist.serverless.json_fields import Fields
from dglx_dist.serverless.tasks import Direction, TaskKey
from dglx_dist.serverless.worker import TaskPhase

KEYS = [TaskKey(epoch=n, step=1, interval=3, direction=Direction.FORWARD) for n in range(2000)]


def seconds(latency: Latency, attempt: int = 0) -> list[float]:
    faults = [latency.draw(key, attempt) for key in KEYS]
    assert {one.place for one in faults} == {TaskPhase.COMPUTED}
    return [one.seconds or 0.0 for one in faults]


def read(**options: object) -> Latency | None:
    fields = Fields(options, "executor 'local'")
    latency = Latency.read(fields)
    fields.end()
    return latency


def test_the_logarithm_is_normal_around_the_median() -> None:
    drawn = seconds(Latency(median_s=0.02))
    assert median(drawn) == pytest.approx(0.02, rel=0.05)
    assert stdev(map(math.log, drawn)) == pytest.approx(0.5, rel=0.05)
    assert drawn == seconds(Latency(median_s=0.02))
    assert drawn != seconds(Latency(median_s=0.02), attempt=1)


def test_without_a_spread_all_pauses_are_alike() -> None:
    assert set(seconds(Latency(median_s=0.02, sigma=0.0))) == {0.02}


def test_options() -> None:
    assert read() is None
    assert read(latency_s=0.1) == Latency(median_s=0.1, sigma=0.5)
    assert read(latency_s=1, latency_sigma=0) == Latency(median_s=1.0, sigma=0.0)
    with pytest.raises(ConfigError, match=r"latency_sigma' = 0.5; give latency_s as well"):
        read(latency_sigma=0.5)
    with pytest.raises(ConfigError, match="latency_s' = -1; give a number from 0"):
        read(latency_s=-1)
