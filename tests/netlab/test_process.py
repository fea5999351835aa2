"""Launchers of servers with shells in the place of torchrun, on plain loopback."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import pytest

from scripts.netlab import guard, launch
from scripts.netlab.base import LabSpec, LoopbackLab, Server
from scripts.netlab.launch import Failure, Launcher, Screen
from tests.netlab.commands import processes_with, wait_until_gone

ENVIRONMENT: Mapping[str, str] = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def servers() -> Sequence[Server]:
    return LoopbackLab(LabSpec(servers=2)).servers


def launcher(server: Server, script: str, folder: Path, **options: object) -> Launcher:
    given = {"screen": None, "log": None, "failure_file": folder / f"{server.number}.json", **options}
    return Launcher(server, ["sh", "-c", script], ENVIRONMENT, **given)  # type: ignore[arg-type]


def test_output_is_shown_behind_the_name_of_the_server_and_kept(
    servers: Sequence[Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [
        launcher(
            server, "echo out $0; echo err >&2", tmp_path, screen=Screen(), log=tmp_path / f"{number}.log"
        )
        for number, server in enumerate(servers)
    ]
    for one in both:
        one.wait_for_end()
        one.close()
        assert one.poll() == 0
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["out sh", "server 1 | out sh"]
    assert sorted(shown.err.splitlines()) == ["err", "server 1 | err"]
    assert sorted((tmp_path / "1.log").read_text().split()) == ["err", "out", "sh"]


def test_server_0_has_the_terminal_itself_and_only_that(
    servers: Sequence[Server],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Quiet(Screen):
        def write(self, stream: TextIO, text: str) -> None:
            pass

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    one = launcher(servers[0], "echo direct; echo relayed >&2", tmp_path, screen=Quiet())
    one.wait_for_end()
    one.close()
    assert capfd.readouterr() == ("direct\n", "")


def test_what_the_launcher_wrote_down_is_its_failure(servers: Sequence[Server], tmp_path: Path) -> None:
    told = {"rank": 3, "message": "rank 3 failed: no", "exit_code": 5, "lost_a_peer": True, "second": 17}
    (tmp_path / "told.json").write_text(json.dumps(told))
    one = launcher(servers[1], "exit 5", tmp_path, failure_file=tmp_path / "told.json")
    one.wait_for_end()
    assert one.failed_by_itself()
    assert one.failure(99.5) == Failure(
        message="server 1: rank 3 failed: no", exit_code=5, lost_a_peer=True, second=17
    )
    one.close()


def test_a_launcher_that_wrote_nothing_down_is_named_with_its_code(
    servers: Sequence[Server], tmp_path: Path
) -> None:
    one = launcher(servers[1], "kill -KILL $$", tmp_path)
    one.wait_for_end()
    failure = one.failure(99.5)
    assert (failure.exit_code, failure.second) == (128 + signal.SIGKILL, 99)
    assert "server 1: its launcher ended with code 137" in failure.message
    one.close()


def test_one_that_was_told_to_end_has_not_failed(servers: Sequence[Server], tmp_path: Path) -> None:
    one = launcher(servers[1], f"sleep 1000 # {tmp_path}", tmp_path)
    one.end()
    one.wait_for_end()
    assert one.poll() == 128 + signal.SIGTERM
    assert not one.failed_by_itself()
    one.close()
    assert wait_until_gone(str(tmp_path)) == []


def test_an_abandoned_one_leaves_nothing(servers: Sequence[Server], tmp_path: Path) -> None:
    one = launcher(servers[1], f"trap '' TERM; while true; do sleep 0.1; done # {tmp_path}", tmp_path)
    one.abandon()
    one.abandon()
    assert wait_until_gone(str(tmp_path)) == []


def test_ranks_in_sessions_of_their_own_end_with_a_guard_that_does_not_answer(
    servers: Sequence[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", -4.9)
    rank = f"trap '' TERM; echo up > {tmp_path}/up; while true; do sleep 0.1; done"
    one = launcher(servers[1], f'setsid sh -c "{rank}" & wait', tmp_path)
    while not (tmp_path / "up").exists():
        time.sleep(0.01)
    (found,) = [pid for pid in guard.descendants(os.getpid()) if _is_guard_of(pid, tmp_path)]
    os.kill(found, signal.SIGSTOP)
    one.end()
    one.wait_for_end()
    # Not a moment later: whoever waited may use the cores, or the port, again.
    assert processes_with(str(tmp_path)) == []


def _is_guard_of(pid: int, folder: Path) -> bool:
    line = Path(f"/proc/{pid}/cmdline").read_text()
    return guard.__file__ in line and str(folder) in line


def test_a_cause_comes_before_what_it_caused() -> None:
    def failure(message: str, second: int, lost_a_peer: bool = False) -> Failure:
        return Failure(message=message, exit_code=1, lost_a_peer=lost_a_peer, second=second)

    failures = [failure("lost", 1, lost_a_peer=True), failure("late", 3), failure("early", 2)]
    assert [one.message for one in sorted(failures, key=Failure.order)] == ["early", "late", "lost"]
