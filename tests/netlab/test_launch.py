"""Commands on servers under real launchers of torchrun; the scripts need no torch, which makes them quick."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from dglx_dist.errors import ConfigError, PeerError
from scripts.netlab.base import Lab, LabSpec, LoopbackLab
from scripts.netlab.launch import Launcher, Started, run, server_environment, start, with_changes
from tests.netlab.commands import FAILS, WAITS, WHO, script, wait_until_gone


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
            Launcher(
                server,
                ["sh", "-c", text],
                {"PATH": "/usr/bin:/bin"},
                screen=None,
                log=None,
                failure_file=tmp_path / f"server-{server.number}.json",
            )
            for server, text in zip(lab.servers, scripts, strict=True)
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


def test_leaving_the_block_ends_all(shells: Callable[..., Started], tmp_path: Path) -> None:
    with shells(f"sleep 1000 # {tmp_path}", f"sleep 1000 # {tmp_path}") as started:
        assert started.poll() is None
    assert started.poll() == 1
    assert started.failure is None
    assert wait_until_gone(str(tmp_path)) == []
