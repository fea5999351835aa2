"""Real ranks, two on plain loopback, that do the job "echo"."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.errors import JobError
from scripts.bench import worker
from scripts.bench.pool import WorkerPool
from scripts.bench.records import Job
from scripts.bench.worker import Failure
from scripts.netlab import alive
from scripts.netlab.base import Lab, LabSpec
from scripts.netlab.labs import open_lab

ECHO = Job(kind="echo", params={"word": "hello"})


@pytest.fixture
def lab() -> Iterator[Lab]:
    with open_lab(LabSpec(servers=2, external=None), force_loopback=True) as opened:
        yield opened


class Absent:
    """A launcher whose ranks never come; the test plays them."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.stopped = False

    def poll(self) -> int | None:
        return self.code

    def stop(self) -> None:
        self.code = -15
        self.stopped = True


def ends(folder: Path, rank: int) -> bool:
    """Wait for the end of a rank, which need not be the very moment at which its pool is closed."""
    deadline = time.monotonic() + 30
    while not alive.has_ended(worker.alive_path(folder, rank)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive.has_ended(worker.alive_path(folder, rank))


def pool_without_ranks(lab: Lab, folder: Path, per_server: int = 1) -> tuple[WorkerPool, Absent]:
    absent = Absent()
    return WorkerPool(lab, per_server, folder, start=lambda *_: absent), absent


@pytest.mark.wide
def test_the_same_ranks_do_job_after_job_until_the_pool_is_closed(lab: Lab, tmp_path: Path) -> None:
    with WorkerPool(lab, 1, tmp_path / "pool") as pool:
        first, second = (pool.do(ECHO, 120.0) for _ in range(2))
        assert [report["rank"] for report in first] == [0, 1]
        assert [report["server"] for report in first] == [0, 1]
        assert [report["params"] for report in first] == [{"word": "hello"}] * 2
        assert [report["process"] for report in first] == [report["process"] for report in second]
        assert [report["number"] for report in second] == [1, 1]
        pool.close()
        for rank in range(2):
            assert ends(tmp_path / "pool", rank)


@pytest.mark.wide
def test_an_error_on_one_rank_is_told_with_its_log_and_ends_the_pool(lab: Lab, tmp_path: Path) -> None:
    with WorkerPool(lab, 1, tmp_path / "pool") as pool:
        # Both are there before one fails: the other might else be ended before it has a sign of life.
        pool.do(ECHO, 120.0)
        with pytest.raises(
            JobError, match=r"rank 1 failed in job 1 \(echo\): ConfigError: .*told to fail"
        ) as failed:
            pool.do(Job(kind="echo", params={"fails_on": 1}), 120.0)
        assert "rank-1.log" in str(failed.value)
        with pytest.raises(JobError, match="takes no job after one that failed"):
            pool.do(ECHO, 120.0)
        assert ends(tmp_path / "pool", 0)


@pytest.mark.wide
def test_a_killed_rank_is_named_long_before_the_time_is_up(lab: Lab, tmp_path: Path) -> None:
    with WorkerPool(lab, 1, tmp_path / "pool") as pool:
        pool.do(ECHO, 120.0)
        before = time.monotonic()
        with pytest.raises(JobError, match=r"rank 1 died in job 1"):
            pool.do(Job(kind="echo", params={"dies_on": 1}), 120.0)
        assert time.monotonic() - before < 60


@pytest.mark.wide
def test_a_silent_rank_is_named_and_says_where_it_hangs(lab: Lab, tmp_path: Path) -> None:
    with WorkerPool(lab, 1, tmp_path / "pool") as pool:
        pool.do(ECHO, 120.0)
        with pytest.raises(JobError, match=r"rank 0 did not finish job 1 \(echo\) in 3 s") as silent:
            pool.do(Job(kind="echo", params={"silent_on": 0}), 3.0)
    assert "echo.py" in str(silent.value)


def test_the_failure_that_others_follow_from_is_told(lab: Lab, tmp_path: Path) -> None:
    pool, absent = pool_without_ranks(lab, tmp_path)
    # Reported first, but it says itself that somebody else is to blame.
    lost = Failure(rank=0, text="PeerError: rank 1 is gone", at_ns=10, lost_a_peer=True)
    cause = Failure(rank=1, text="MemoryError: none left", at_ns=20, lost_a_peer=False)
    for failure in (lost, cause):
        worker.write_failure(tmp_path, 0, failure)
    with pytest.raises(JobError, match=r"rank 1 failed in job 0 .* MemoryError"):
        pool.do(ECHO, 5.0)
    assert absent.stopped


def test_a_rank_that_died_is_named_before_one_that_lost_it(lab: Lab, tmp_path: Path) -> None:
    pool, _ = pool_without_ranks(lab, tmp_path)
    os.close(alive.hold(alive_path := worker.alive_path(tmp_path, 1)))
    assert alive_path.is_file()
    lost = Failure(rank=0, text="PeerError: a rank is gone", at_ns=10, lost_a_peer=True)
    worker.write_failure(tmp_path, 0, lost)
    with pytest.raises(JobError, match=r"rank 1 died in job 0"):
        pool.do(ECHO, 5.0)


def test_ranks_that_never_report_are_all_named(lab: Lab, tmp_path: Path) -> None:
    pool, _ = pool_without_ranks(lab, tmp_path, per_server=2)
    worker.write_result(tmp_path, 0, 2, {})
    with pytest.raises(JobError, match=r"ranks 0, 1, 3 did not finish job 0 \(echo\) in 0.2 s"):
        pool.do(ECHO, 0.2)


def test_a_launcher_that_ended_is_told_with_what_it_said(lab: Lab, tmp_path: Path) -> None:
    pool, absent = pool_without_ranks(lab, tmp_path)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "server-0.log").write_text("no such module\n")
    absent.code = 3
    with pytest.raises(JobError, match=r"(?s)exit code 3 in job 0 .*missing: ranks 0, 1.*no such module"):
        pool.do(ECHO, 30.0)


def test_closing_asks_the_ranks_to_leave_and_stops_those_that_do_not(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.bench.pool.LEAVE_S", 0.1)
    pool, absent = pool_without_ranks(lab, tmp_path)
    pool.close()
    pool.close()
    found: Any = worker.read_job(tmp_path, 0)
    assert found[0].kind == worker.END
    assert absent.stopped
    assert alive.has_ended(tmp_path / worker.DRIVER)
