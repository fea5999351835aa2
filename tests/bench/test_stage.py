"""Real servers and ranks, brought up and ended."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dglx_dist.planner.records import Rate
from scripts.bench.pool import open_stage
from scripts.bench.records import Job, Shape
from tests.helpers import wide

ECHO = Job(kind="echo")
ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal
from scripts.bench.records import Job, Shape
from scripts.bench.stage import open_stage
from scripts.bench.cli import _interrupt

signal.signal(signal.SIGTERM, _interrupt)
shape = Shape(servers=1)
with open_stage([shape]) as stage:
    stage.do(shape, Job(kind="echo"), None)
    print("ready", flush=True)
    stage.do(shape, Job(kind="echo", params={"silent_on": 0}), None)
"""


def processes_that_name(text: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in words and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


@pytest.mark.wide
def test_each_shape_has_servers_and_ranks_of_its_own() -> None:
    one, two = Shape(servers=1), Shape(servers=2)
    with open_stage([one, two]) as stage:
        assert [report["server"] for report in stage.do(two, ECHO, Rate.parse("100mbit"))] == [0, 1]
        assert [report["server"] for report in stage.do(one, ECHO, None)] == [0]
        described = stage.describe(two, Rate.parse("50mbit"))
        assert described["servers"] == 2
        if described["kind"] == "namespaces":
            assert described["external"] == "50mbit"
            assert "50mbit" in described["label"]
        assert stage.limits(two) == (described["kind"] == "namespaces")


@pytest.mark.parametrize("number", [signal.SIGKILL, *wide(signal.SIGTERM)])
def test_nothing_outlives_a_bench_that_is_ended(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        assert len(processes_that_name(str(tmp_path))) >= 1
        driver.send_signal(number)
        driver.wait(timeout=60)
    deadline = time.monotonic() + 60
    while processes_that_name(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_that_name(str(tmp_path)) == []
    if number == signal.SIGKILL:
        # What it could not remove is removed by the next one.
        assert list(tmp_path.glob("dglx-scratch-*"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with open_stage([]):
            pass
    assert list(tmp_path.glob("dglx-scratch-*")) == []
    if number == signal.SIGTERM:
        assert list(tmp_path.iterdir()) == []
