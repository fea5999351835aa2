"""Commands on servers: under real launchers of torchrun, and with shells in their place."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.errors import ConfigError, PeerError
from scripts.netlab import guard, launch
from scripts.netlab.base import Lab, LabSpec, LoopbackLab, Server
from scripts.netlab.launch import Launcher, Started, run, server_environment, start, with_changes
from tests.netlab.helpers import WAITS, WHO, processes_with, script, wait_until_gone


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.delenv("DGLX_RANKS_PER_SERVER", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return LoopbackLab(LabSpec(servers=2), "a test")


@pytest.mark.wide
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
    message = [
        f"who {rank} 4 {rank // 2} 2 1 lo {sorted(lab.servers[rank // 2].cores)} --rate 3"
        for rank in range(4)
    ]
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == sorted(
        [*message[:2], *(f"server 1 | {line}" for line in message[2:])]
    )
    assert "server 1 | error of 3" in shown.err.splitlines()
    for server in range(2):
        logged = (logs / f"server-{server}.log").read_text().splitlines()
        assert {line for line in logged if line.startswith("who")} == set(
            message[2 * server : 2 * server + 2]
        )


def test_a_command_that_takes_too_long_ends_and_names_the_servers(lab: Lab, tmp_path: Path) -> None:
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
    server = replace(LoopbackLab(LabSpec(servers=1, cpus=1.0)).servers[0], cores=range(8), cpu_share=6.0)
    assert server_environment(server, 3)["OMP_NUM_THREADS"] == "2"
    assert server_environment(server, 16)["OMP_NUM_THREADS"] == "1"
    assert server_environment(server, 1)["MALLOC_MMAP_MAX_"] == "0"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert server_environment(server, 3)["OMP_NUM_THREADS"] == "5"
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


def describe(server: int, message: str, second: int, *, lost: bool) -> str:
    code = server + 3
    failure = {"rank": server, "message": message, "exit_code": code, "lost_a_peer": lost, "second": second}
    return f"echo '{json.dumps(failure)}' > server-{server}.json; exit {code}"


@pytest.mark.parametrize(
    ("first", "second", "code", "cause"),
    [
        # A consequence is seen before its cause.
        (
            describe(0, "lost", 1, lost=True),
            "while [ ! -e server-0.json ]; do sleep 0.01; done; sleep 0.3; "
            + describe(1, "cause", 2, lost=False),
            4, "server 1: cause",
        ),
        # Of two causes the earlier one is told.
        (
            describe(0, "late", 3, lost=False), "sleep 0.3; " + describe(1, "early", 2, lost=False),
            4, "server 1: early",
        ),
        # The others end soon after one has failed.
        (
            "kill -KILL $$", "sleep 1000",
            128 + signal.SIGKILL, "server 0: its launcher ended with code 137; see its output",
        ),
    ],
)  # fmt: skip
def test_the_cause_of_a_failure_is_told(
    first: str,
    second: str,
    code: int,
    cause: str,
    shells: Callable[..., Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with shells(first, second) as started:
        assert started.wait(30) == started.poll() == code
    assert started.failure == cause


def test_leaving_the_block_ends_all(shells: Callable[..., Started], tmp_path: Path) -> None:
    with shells(f"sleep 1000 # {tmp_path}", f"sleep 1000 # {tmp_path}") as started:
        assert started.poll() is None
    assert started.poll() == 1
    assert started.failure is None
    assert wait_until_gone(str(tmp_path)) == []


ENVIRONMENT: Mapping[str, str] = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def servers() -> Sequence[Server]:
    return LoopbackLab(LabSpec(servers=2)).servers


def launcher(server: Server, script: str, folder: Path, **options: object) -> Launcher:
    inputs = {"screen": None, "log": None, "failure_file": folder / f"server-{server.number}.json", **options}
    return Launcher(server, ["sh", "-c", script], ENVIRONMENT, **inputs)  # type: ignore[arg-type]


def test_ranks_in_sessions_of_their_own_end_with_a_guard_that_does_not_answer(
    servers: Sequence[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", -4.9)
    rank = f"trap '' TERM; echo up > {tmp_path}/up; while true; do sleep 0.1; done"
    single = launcher(servers[1], f'setsid sh -c "{rank}" & wait', tmp_path)
    while not (tmp_path / "up").exists():
        time.sleep(0.01)
    (result,) = [pid for pid in guard.descendants(os.getpid()) if _is_guard_of(pid, tmp_path)]
    os.kill(result, signal.SIGSTOP)
    single.stop()
    # Not a moment later: whoever waited may use the cores, or the port, again.
    assert processes_with(str(tmp_path)) == []


def _is_guard_of(pid: int, folder: Path) -> bool:
    line = Path(f"/proc/{pid}/cmdline").read_text()
    return guard.__file__ in line and str(folder) in line
