"""The folder of a server: shared, and gone with its last rank."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import uuid
from pathlib import Path

import pytest

from dglx_dist.comm.session import Scratch, start_session
from tests.helpers.ranks import run_ranks, start_ranks


def test_last_one_to_leave_removes_it() -> None:
    job = uuid.uuid4().hex[:12]
    first, second = Scratch(job, 0), Scratch(job, 0)
    assert first.path == second.path
    (first.path / "rows").write_text("x")
    first.close()
    first.close()
    assert (second.path / "rows").read_text() == "x"
    second.close()
    assert not second.path.exists()


def test_folders_in_use_are_left_alone_by_others() -> None:
    mine = Scratch(uuid.uuid4().hex[:12], 0)
    other = Scratch(uuid.uuid4().hex[:12], 0)
    assert mine.path.is_dir()
    other.close()
    mine.close()


def _open_and_die(job: str) -> None:
    Scratch(job, 3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_folder_of_a_killed_process_is_removed_by_the_next() -> None:
    job = uuid.uuid4().hex[:12]
    (outcome,) = start_ranks(_open_and_die, 1, args=(job,))
    assert outcome.exitcode == -signal.SIGKILL
    abandoned = Scratch("unused" + job, 0)
    left = list(abandoned.path.parent.glob(f"*{job}-s3"))
    abandoned.close()
    assert left == []


def _path() -> str:
    with start_session() as session:
        return str(session.scratch)


def test_ranks_of_a_server_share_one() -> None:
    a, b, c = run_ranks(_path, 3, ranks_per_server=2)
    assert a == b != c
    assert not any(os.path.exists(path) for path in (a, b, c))


def test_a_folder_taken_away_before_it_was_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = uuid.uuid4().hex[:12]
    real = fcntl.flock
    taken: list[Path] = []

    def lock(descriptor: int, kind: int) -> None:
        if kind == fcntl.LOCK_SH and not taken:
            # What a job does that starts at this moment and finds nobody's lock on the folder.
            taken.extend(Path("/dev/shm").glob(f"*{job}-s0"))
            shutil.rmtree(taken[0])
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", lock)
    mine = Scratch(job, 0)
    assert taken == [mine.path]
    (mine.path / "rows").write_text("x")
    mine.close()
    assert not mine.path.exists()


def test_a_survivor_removes_the_folder_of_a_killed_process() -> None:
    mine, job = Scratch(uuid.uuid4().hex[:12], 0), uuid.uuid4().hex[:12]
    start_ranks(_open_and_die, 1, args=(job,))
    parent = mine.path.parent
    mine.close()
    assert list(parent.glob(f"*{job}-s3")) == []
