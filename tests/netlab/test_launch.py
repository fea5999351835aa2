"""Commands on servers: under real launchers of torchrun, and with shells in their place."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest

from dglx_dist.errors import ConfigError, LabError, PeerError
from scripts.netlab import guard, launch
from scripts.netlab.base import Lab, LabSpec, LoopbackLab, Server
from scripts.netlab.launch import (
    Failure,
    Launcher,
    Relay,
    Screen,
    Started,
    claimed_port,
    nobody_listens,
    run,
    server_environment,
    start,
    with_changes,
)
from tests.netlab.helpers import FAILS, WAITS, WHO, processes_with, script, wait_until_gone


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.delenv("DGLX_RANKS_PER_SERVER", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return LoopbackLab(LabSpec(servers=2), "a test")


def test_each_server_is_a_node_of_torchrun(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    done = run(
        lab,
        ["python", script(tmp_path, WHO), "--rate", "3"],
        ranks_per_server=2,
        log_folder=logs,
        timeout_s=120,
    )
    assert (done.exit_code, done.failure, done.cards_before, done.cards_after) == (0, None, (), ())
    said = [
        f"who {rank} 4 {rank // 2} 2 1 lo {sorted(lab.servers[rank // 2].cores)} --rate 3"
        for rank in range(4)
    ]
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == sorted([*said[:2], *(f"server 1 | {line}" for line in said[2:])])
    assert "server 1 | error of 3" in shown.err.splitlines()
    for server in range(2):
        logged = (logs / f"server-{server}.log").read_text().splitlines()
        assert {line for line in logged if line.startswith("who")} == set(said[2 * server : 2 * server + 2])


@pytest.mark.wide
def test_a_rank_that_is_killed_ends_all_and_is_told_of(lab: Lab, tmp_path: Path) -> None:
    path = script(tmp_path, FAILS)
    done = run(lab, [path, "killed"], ranks_per_server=1, show=False, timeout_s=120)
    assert done.exit_code == 137
    assert done.failure is not None
    assert done.failure.startswith("server 1: rank 1 (process ")
    assert "SIGKILL" in done.failure
    assert wait_until_gone(path) == []


def test_a_command_that_takes_too_long_is_ended_and_who_it_waited_for_is_named(
    lab: Lab, tmp_path: Path
) -> None:
    path = script(tmp_path, WAITS)
    with (
        start(lab, [path], ranks_per_server=1, show=False) as started,
        pytest.raises(PeerError, match=r"not ended after 0.5 s on server 0, 1; all of it was ended"),
    ):
        started.wait(0.5)
    assert wait_until_gone(path) == []


def test_what_cannot_start_is_refused_before_anything_starts(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path, WHO)
    with pytest.raises(ConfigError, match="ranks_per_server=0"):
        start(lab, [path], ranks_per_server=0)
    with pytest.raises(ConfigError, match="is nothing that torchrun can start"):
        start(lab, ["ls"], ranks_per_server=1)
    monkeypatch.setenv("DGLX_RANKS_PER_SERVER", "2")
    with pytest.raises(ConfigError, match="DGLX_RANKS_PER_SERVER='2' would cut the lab's servers"):
        start(lab, [path], ranks_per_server=1)
    assert wait_until_gone(path) == []


def test_ranks_have_their_share_of_their_servers_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    server = LoopbackLab(LabSpec(servers=1, cpus=1.0)).servers[0]
    server.cores, server.cpu_share = tuple(range(8)), 6.0
    assert server_environment(server, 3)["OMP_NUM_THREADS"] == "2"
    assert server_environment(server, 16)["OMP_NUM_THREADS"] == "1"
    assert server_environment(server, 1)["MALLOC_MMAP_MAX_"] == "0"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert server_environment(server, 3)["OMP_NUM_THREADS"] == "5"


def test_changes_set_and_unset() -> None:
    assert with_changes({"a": "1", "b": "2"}, {"b": None, "c": "3", "d": None}) == {"a": "1", "c": "3"}


@pytest.fixture
def shells(lab: Lab, tmp_path: Path) -> Callable[..., Started]:
    """Make a command of shell scripts, one per server, in the place of torchrun."""

    def make(*scripts: str) -> Started:
        launchers = [
            launcher(server, text, tmp_path) for server, text in zip(lab.servers, scripts, strict=True)
        ]
        return Started(launchers, ExitStack())

    return make


def told(folder: Path, server: int, message: str, second: int, *, lost: bool) -> str:
    """Shell that writes down a failure as a launcher does."""
    json = (
        f'{{"rank": {server}, "message": "{message}", "exit_code": {server + 3}, '
        f'"lost_a_peer": {str(lost).lower()}, "second": {second}}}'
    )
    return f"echo '{json}' > {folder}/server-{server}.json"


def test_the_cause_is_told_also_when_its_consequence_is_seen_first(
    shells: Callable[..., Started], tmp_path: Path
) -> None:
    consequence = f"{told(tmp_path, 0, 'lost', 1, lost=True)}; exit 3"
    cause = f"while [ ! -e {tmp_path}/server-0.json ]; do sleep 0.01; done; sleep 0.3; "
    cause += f"{told(tmp_path, 1, 'cause', 2, lost=False)}; exit 4"
    with shells(consequence, cause) as started:
        assert started.wait(30) == 4
        assert started.failure == "server 1: cause"
        assert started.poll() == 4


def test_the_others_end_soon_after_one_has_failed(shells: Callable[..., Started]) -> None:
    with shells("exit 9", "sleep 1000") as started:
        assert started.wait(30) == 9
    assert started.failure == "server 0: its launcher ended with code 9; see its output"


def test_of_several_causes_the_earliest_is_told(shells: Callable[..., Started], tmp_path: Path) -> None:
    late, early = told(tmp_path, 0, "late", 3, lost=False), told(tmp_path, 1, "early", 2, lost=False)
    with shells(f"{late}; exit 3", f"sleep 0.3; {early}; exit 4") as started:
        assert started.wait(30) == 4
    assert started.failure == "server 1: early"


def test_leaving_the_block_ends_all(shells: Callable[..., Started], tmp_path: Path) -> None:
    with shells(f"sleep 1000 # {tmp_path}", f"sleep 1000 # {tmp_path}") as started:
        assert started.poll() is None
    assert started.poll() == 1
    assert started.failure is None
    assert wait_until_gone(str(tmp_path)) == []


class Closed(io.StringIO):
    """A screen that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def pipe() -> tuple[io.BufferedReader, int]:
    read, write = os.pipe()
    return os.fdopen(read, "rb"), write


def test_every_line_comes_whole_behind_its_prefix_and_as_it_was_in_the_file(tmp_path: Path) -> None:
    shown, log, screen = io.StringIO(), (tmp_path / "server-1.log").open("wb", buffering=0), Screen()
    pipes = [pipe() for _ in range(3)]
    relays = [Relay(source, screen, shown, f"server {n} | ", log) for n, (source, _) in enumerate(pipes)]
    lines = 500

    def fill(number: int, end: int) -> None:
        with os.fdopen(end, "wb") as target:
            for line in range(lines):
                target.write(f"{number} {line}\n".encode())
            # More than a pipe holds, and no end of the line.
            target.write(b"x" * 200_000)

    writers = [threading.Thread(target=fill, args=(n, end)) for n, (_, end) in enumerate(pipes)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join(30)
    for relay in relays:
        relay.join(30)
    log.close()
    found = shown.getvalue().splitlines()
    for number in range(3):
        own = [line for line in found if line.startswith(f"server {number} | ")]
        assert own == [
            *(f"server {number} | {number} {line}" for line in range(lines)),
            f"server {number} | " + "x" * 200_000,
        ]
    assert len(found) == 3 * (lines + 1)
    logged = (tmp_path / "server-1.log").read_bytes()
    assert len(logged) == sum(len(f"{n} {line}\n") for n in range(3) for line in range(lines)) + 600_000


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    shown = io.StringIO()
    source, end = pipe()
    relay = Relay(source, Screen(), shown, "", None)
    os.write(end, b"\xff\xfe ok\n\n")
    os.close(end)
    relay.join(30)
    assert shown.getvalue() == "\ufffd\ufffd ok\n\n"


def test_a_screen_that_is_gone_and_a_full_disk_stop_nobody() -> None:
    source, end = pipe()
    with Path("/dev/full").open("wb", buffering=0) as full:
        relay = Relay(source, Screen(), Closed(), "", full)
        # Writing returns only because the relay goes on reading.
        for _ in range(50):
            os.write(end, b"line\n" * 10_000)
        os.close(end)
        relay.join(30)


def test_a_claimed_port_is_nobody_elses_until_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_FIRST", 20_000)
    monkeypatch.setattr(launch, "_LAST", 20_002)
    monkeypatch.setattr(launch, "_TRIES", 2)
    first, elsewhere = (
        claimed_port(where, is_free=lambda _number: True) for where in ("a test", "another test")
    )
    with first as one, elsewhere:
        with claimed_port("a test", is_free=lambda _number: True) as other:
            assert {one, other} == {20_000, 20_001}
            with (
                pytest.raises(LabError, match="no free port between 20000 and 20002"),
                claimed_port("a test", is_free=lambda _number: True),
            ):
                pass
        with claimed_port("a test", is_free=lambda _number: True) as again:
            assert again == other


def test_a_port_that_somebody_listens_at_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        assert not nobody_listens(number)
        monkeypatch.setattr(launch, "_FIRST", number)
        monkeypatch.setattr(launch, "_LAST", number + 1)
        monkeypatch.setattr(launch, "_TRIES", 1)
        with pytest.raises(LabError), claimed_port("a test", is_free=nobody_listens):
            pass


ENVIRONMENT: Mapping[str, str] = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def servers() -> Sequence[Server]:
    return LoopbackLab(LabSpec(servers=2)).servers


def launcher(server: Server, script: str, folder: Path, **options: object) -> Launcher:
    given = {"screen": None, "log": None, "failure_file": folder / f"server-{server.number}.json", **options}
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
