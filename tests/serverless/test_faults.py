"""Faults on purpose: drawn by key and attempt, whoever runs first."""

from dataclasses import replace

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.executors.base import Faults
from dglx_dist.serverless.tasks import Direction, TaskKey
from dglx_dist.serverless.worker import TaskPhase
from dglx_dist.serverless.worker_process import Fault, FaultInjector

KEYS = [TaskKey(epoch, 1, interval, Direction.FORWARD) for epoch in range(30) for interval in range(30)]


def test_shares_are_kept_and_the_draw_is_by_key_attempt_and_seed() -> None:
    faults = Faults(kill=0.2, delay=0.1, duplicate=0.3, seed=5)
    drawn = [faults.draw(key, 0) for key in KEYS]
    assert drawn == [faults.draw(key, 0) for key in KEYS]
    assert drawn != [faults.draw(key, 1) for key in KEYS]
    assert drawn != [replace(faults, seed=6).draw(key, 0) for key in KEYS]
    killed = [fault for fault, _ in drawn if fault is not None and fault.seconds is None]
    delayed = [fault for fault, _ in drawn if fault is not None and fault.seconds == 1.0]
    shares = [len(killed), len(delayed), sum(times == 2 for _, times in drawn)]
    assert [share / len(KEYS) for share in shares] == pytest.approx([0.2, 0.1, 0.3], abs=0.05)
    assert {fault.place for fault in killed} == set(TaskPhase)
    assert {
        fault.place for fault, _ in map(replace(faults, place="half").draw, KEYS, [0] * 900) if fault
    } == {TaskPhase.HALF}
    assert all(Faults().draw(key, 0) == (None, 1) for key in KEYS)


def test_options_are_read_and_checked() -> None:
    assert Faults.read({"kill": 0.5, "place": "half"}) == Faults(kill=0.5, place="half")
    for bad, message in (({"kil": 1}, "kil"), ({"kill": 2}, "'kill'"), ({"place": "x"}, "'place'")):
        with pytest.raises(ConfigError, match=message):
            Faults.read(bad)
    for fault in (Fault(place=TaskPhase.HALF), Fault(place=TaskPhase.END, seconds=0.5)):
        assert Fault.read(fault.as_json()) == fault
    with pytest.raises(ConfigError, match="'place'"):
        Fault.read({"place": "nowhere", "seconds": None})


class Died(Exception):
    pass


def test_a_fault_happens_once_at_its_place() -> None:
    def die() -> None:
        raise Died

    at = FaultInjector(die)  # type: ignore[arg-type]
    at(TaskPhase.HALF)
    at.next = Fault(place=TaskPhase.PUSHED)
    at(TaskPhase.HALF)
    with pytest.raises(Died):
        at(TaskPhase.PUSHED)
    at(TaskPhase.PUSHED)
    at.next = Fault(place=TaskPhase.PUSHED, seconds=0.0)
    at(TaskPhase.PUSHED)
    assert at.next is None
