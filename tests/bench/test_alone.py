"""One job in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dglx_dist.errors import JobError
from scripts.bench.records import Job
from scripts.bench.worker import do_alone
from tests.bench.test_stage import processes_that_name

ROOT = Path(__file__).parents[2]
PROGRAM = """
from scripts.bench.alone import do_alone
from scripts.bench.records import Job

do_alone(Job(kind="echo", params={"silent_on": 0}))
"""


def test_it_reports_from_another_process() -> None:
    report = do_alone(Job(kind="echo", params={"word": "hello"}))
    assert (report["params"], report["rank"]) == ({"word": "hello"}, 0)
    assert report["process"] != os.getpid()


def test_what_goes_wrong_in_it_is_told() -> None:
    with pytest.raises(JobError, match=r"(?s)job echo .* failed:.*was told to fail"):
        do_alone(Job(kind="echo", params={"fails_on": 0}))
    with pytest.raises(JobError, match=r"took over 0\.5 s"):
        do_alone(Job(kind="echo", params={"silent_on": 0}), timeout_s=0.5)


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment) as parent:
        deadline = time.monotonic() + 60
        while not processes_that_name(str(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_that_name(str(tmp_path))
        parent.kill()
    while processes_that_name(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_that_name(str(tmp_path)) == []
