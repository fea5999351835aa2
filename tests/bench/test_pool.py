"""The protocol of a worker pool, and real ranks on plain loopback that do the job "echo"."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dglx_dist.planner.records import Rate
from scripts.bench.pool import WorkerPool, open_stage
from scripts.bench.records import Job, JobError, Shape
from scripts.bench.worker import wait_for_job
from scripts.netlab.base import Lab, LabSpec, LoopbackLab
from tests.netlab.helpers import processes_with, wait_until_gone

ECHO = Job(kind="echo", params={"word": "hello"})


@pytest.fixture
def lab() -> Iterator[Lab]:
    with LoopbackLab(LabSpec(servers=2), "a test") as opened:
        yield opened


def test_a_rank_leaves_when_its_driver_is_silent_or_the_folder_is_gone(tmp_path: Path) -> None:
    assert wait_for_job(tmp_path, 0, silent_s=0.1) is None
    assert wait_for_job(tmp_path / "removed", 0) is None


@pytest.mark.wide
def test_the_same_ranks_do_job_after_job_until_the_pool_is_closed(lab: Lab, tmp_path: Path) -> None:
    with WorkerPool(lab, 1, tmp_path / "pool") as pool:
        first, second = (pool.do(ECHO, 120.0) for _ in range(2))
        assert [report["rank"] for report in first] == [report["server"] for report in first] == [0, 1]
        assert [report["params"] for report in first] == [{"word": "hello"}] * 2
        assert [report["process"] for report in first] == [report["process"] for report in second]
        assert [report["number"] for report in second] == [1, 1]
    assert processes_with(str(tmp_path)) == []


@pytest.mark.wide
@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            {"fails_on": 1},
            r"(?s)job 1 \(echo\) failed: server 1: rank 1 failed: ConfigError: .*to fail.*\n  server-1.log",
        ),
        # With where it hangs.
        ({"silent_on": 0}, r"(?s)rank 0 did not finish job 1 \(echo\) in 5 s; the others did.*echo\.py"),
        ({"dies_on": 1}, r"job 1 \(echo\) failed: server 1: rank 1 .*was ended by SIGKILL"),
    ],
)
def test_a_rank_that_fails_dies_or_is_silent_is_named_and_ends_the_pool(
    params: dict[str, int], said: str, lab: Lab, tmp_path: Path
) -> None:
    with WorkerPool(lab, 1, tmp_path / "pool") as pool:
        pool.do(ECHO, 120.0)
        with pytest.raises(JobError, match=said):
            pool.do(Job(kind="echo", params=params), 5.0 if "silent_on" in params else 120.0)
        with pytest.raises(JobError, match="takes no job after one that failed"):
            pool.do(ECHO, 120.0)
        assert processes_with(str(tmp_path)) == []


ROOT = Path(__file__).parents[2]
BENCH_PROGRAM = """
import signal
from scripts.bench.records import Job, JobError, Shape
from scripts.bench.pool import open_stage

signal.signal(signal.SIGTERM, signal.default_int_handler)
shape = Shape(servers=1)
with open_stage([shape]) as stage:
    stage.do(shape, Job(kind="echo"), None)
    print("ready", flush=True)
    stage.do(shape, Job(kind="echo", params={"silent_on": 0}), None)
"""


@pytest.mark.wide
def test_each_shape_has_servers_and_ranks_of_its_own() -> None:
    first, second, echo = Shape(servers=1), Shape(servers=2), Job(kind="echo")
    with open_stage([first, second]) as stage:
        assert [report["server"] for report in stage.do(second, echo, Rate.parse("100mbit"))] == [0, 1]
        assert [report["server"] for report in stage.do(first, echo, None)] == [0]
        described = stage.describe(second, Rate.parse("50mbit"))
        assert described["servers"] == 2
        if described["kind"] == "namespaces":
            assert described["external"] == "50mbit"
        assert stage.limits(second) == (described["kind"] == "namespaces")


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_bench_that_is_ended(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", BENCH_PROGRAM], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout.readline() == "ready\n"
        assert processes_with(str(tmp_path))
        driver.send_signal(number)
        driver.wait(timeout=60)
    assert wait_until_gone(str(tmp_path), 60.0) == []
    if number == signal.SIGKILL:
        # What it could not remove is removed by the next one.
        assert list(tmp_path.glob("dglx-scratch*"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with open_stage([]):
            pass
    assert list(tmp_path.iterdir()) == []
