import os
import time
from pathlib import Path

import pytest

from scripts.bench import worker
from scripts.bench.records import Job
from scripts.bench.worker import Failure, JobContext, Place, wait_for_job
from scripts.netlab import alive


def test_a_rank_takes_the_job_that_is_there(tmp_path: Path) -> None:
    worker.write_job(tmp_path, 3, Job(kind="echo"), 5.0)
    assert wait_for_job(tmp_path, 3) == (Job(kind="echo"), 5.0)


def test_a_rank_leaves_when_its_driver_is_gone(tmp_path: Path) -> None:
    os.close(alive.hold(tmp_path / worker.DRIVER))
    assert wait_for_job(tmp_path, 0) is None


def test_a_rank_leaves_when_the_folder_is_gone(tmp_path: Path) -> None:
    assert wait_for_job(tmp_path / "removed", 0) is None


def test_a_rank_leaves_a_driver_that_lives_and_is_silent(tmp_path: Path) -> None:
    held = alive.hold(tmp_path / worker.DRIVER)
    before = time.monotonic()
    assert wait_for_job(tmp_path, 0, silent_s=0.5) is None
    assert time.monotonic() - before > 0.5
    os.close(held)


def test_what_goes_wrong_before_the_job_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise PermissionError("clear_refs")

    monkeypatch.setattr(worker, "_start_afresh", fails)
    context = JobContext(
        rank=0,
        world_size=1,
        ranks_per_server=1,
        places=(Place(address="127.0.0.1", device=None),),
        folder=tmp_path,
        number=0,
        timeout_s=60.0,
    )
    with pytest.raises(SystemExit):
        worker._do(Job(kind="echo"), context)
    found = worker.read_report(tmp_path, 0, 0)
    assert isinstance(found, Failure)
    assert found.text == "PermissionError: clear_refs"
