"""``python scripts/netlab`` as a user starts it, on emulated servers and on plain loopback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dglx_dist.cli.app import app as dglx
from dglx_dist.comm.trace import UNFINISHED
from dglx_dist.errors import ConfigError, StorageError
from scripts.netlab import labs
from scripts.netlab.base import LabError
from scripts.netlab.cli import app
from scripts.netlab.traces import make_out
from tests.helpers import wide
from tests.netlab.helpers import WAITS, script, wait_until_gone

NETLAB = (sys.executable, str(Path(__file__).parents[2] / "scripts" / "netlab"))
GRAPH = "synthetic:nodes=2000,degree=10,classes=4,features=400,seed=1"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("DGLX_")}


def netlab(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*NETLAB, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**ENVIRONMENT, **environment},
        check=False,
    )


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command whose ranks say "waits" and wait until as many as there are servers have."""
    process = subprocess.Popen(
        [*NETLAB, "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )
    seen: list[str] = []
    while sum("waits" in line for line in seen) < 2:
        seen.append(process.stdout.readline())
        assert seen[-1], f"ended with {process.wait()}: {seen}"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.usefixtures("needs_lab")
def test_training_on_two_emulated_servers_is_counted_by_cards_and_ledger(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    dglx(["partition", GRAPH, "--parts", "2", "--out", str(data)], standalone_mode=False)
    done = netlab(
        *("run", "--servers", "2", "--external", "200mbit", "--out", str(out), "--"),
        *("dglx", "train", str(data), "--epochs", "4", "--eval-every", "0", "--out", str(tmp_path / "run")),
    )
    assert done.returncode == 0, done.stderr
    assert "2 servers of 1 rank; namespaces, 200mbit between servers" in done.stderr
    assert "test_accuracy" in done.stdout
    assert done.stdout.count("agrees") == 3
    assert "s per epoch after the first" in done.stdout
    record = json.loads((out / "lab.json").read_text())
    assert (record["lab"]["kind"], record["lab"]["external"], record["exit_code"]) == (
        "namespaces",
        "200mbit",
        0,
    )
    assert [abs(message["ratio"] - 1) < 0.08 for message in record["servers"]] == [True, True]
    assert len(record["epoch_seconds"]) == 4
    assert "test_accuracy" in (out / "server-0.log").read_text()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGTERM, "loopback"),
        *wide((signal.SIGKILL, "namespaces"), (signal.SIGTERM, "namespaces"), (signal.SIGKILL, "loopback")),
    ],
)
def test_a_command_that_is_ended_leaves_nothing(
    number: signal.Signals, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if kind == "namespaces":
        request.getfixturevalue("needs_lab")
    path = script(tmp_path, WAITS)
    with running(*(["--loopback"] if kind == "loopback" else []), "--", "python", path) as process:
        process.send_signal(number)
        code = process.wait(timeout=60)
        assert code == (128 + number if number == signal.SIGTERM else -number)
        assert wait_until_gone(path) == []


@pytest.mark.wide
@pytest.mark.parametrize(("code", "told"), [(0, True), (7, False)])
def test_names_missing_counts_of_a_command_that_ended_well(code: int, told: bool, tmp_path: Path) -> None:
    unfinished = f"open(os.environ['DGLX_TRACE'] + '/rank-0.json{UNFINISHED}', 'w').close()"
    path = script(tmp_path, f"import os, sys\n{unfinished}\nsys.exit({code})\n")
    done = netlab("run", "--loopback", "--servers", "1", "--", path)
    assert done.returncode == code
    assert ("rank-0.json was never written" in done.stderr) is told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--", "ls"], "'ls' is nothing that torchrun can start"),
        (["--", "dglx", "train", "x", "--ranks", "2"], "leave it out"),
        (["--external", "fast", "--", "-m", "x"], "rate 'fast' must be"),
        (["--servers", "0", "--", "-m", "x"], "servers=0"),
        (["--ranks-per-server", "0", "--", "-m", "x"], "--ranks-per-server 0"),
        (
            ["--name", "a", "--servers", "2", "--", "-m", "x"],
            "--name a uses a lab that is up as it is: leave out",
        ),
        (["--timeout", "0", "--", "-m", "x"], "--timeout 0"),
    ],
)
def test_mistakes_are_found_before_any_server_is_made(arguments: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        app(["run", *arguments], standalone_mode=False)
    assert says in str(refused.value)


def test_traces_of_an_earlier_command_are_removed_and_nothing_else(tmp_path: Path) -> None:
    make_out(tmp_path / "out")
    kept = [tmp_path / "out" / "D1.json", tmp_path / "out" / "trace" / "notes"]
    for path in (*kept, tmp_path / "out" / "trace" / "rank-0.json"):
        path.write_bytes(b"")
    make_out(tmp_path / "out")
    assert {path for path in (tmp_path / "out").rglob("*") if path.is_file()} == set(kept)


@pytest.mark.parametrize("command", ["run", "calibrate"])
@pytest.mark.parametrize("place", ["file", "/proc/nonesuch"])
def test_a_folder_that_cannot_be_written_is_told_before_any_server_is_made(
    command: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.netlab.cli.open_lab", lambda *_, **__: pytest.fail("a lab was made"))
    monkeypatch.setattr("scripts.netlab.labs.what_is_missing", lambda: None)
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"")
    path = script(tmp_path, "pass")
    with pytest.raises(StorageError, match=rf"cannot write to {place}: .*--out"):
        app([command, "--out", place, "--", str(path)], standalone_mode=False)


def lab(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "150"})


def test_up_status_down(own_notes: Path, needs_lab: None) -> None:
    made = lab("up", "slow", "--servers", "2", "--external", "100mbit", "--cpus", "0.25")
    try:
        assert made.exit_code == 0, made.output
        assert "slow: 2 servers, 10.77.0.1 to 10.77.0.2, 0.25 cores each" in made.output
        assert "python scripts/netlab run --name slow" in made.output
        listed = lab("status").output
        for word in ("slow", "100mbit", "unlimited", "0.25", "up"):
            assert word in listed
        assert isinstance(lab("up", "slow").exception, ConfigError)
    finally:
        gone = lab("down", "--all")
    assert gone.output == "down: slow\n"
    assert lab("status").output == "no lab is up\n"


def test_up_and_status_say_what_is_missing(own_notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "what_is_missing", lambda: "tc: not installed, apt-get install iproute2")
    refused, message = lab("up", "slow").exception, lab("status")
    assert isinstance(refused, LabError)
    assert "apt-get install iproute2" in str(refused)
    assert message.exit_code == 0
    assert "apt-get install iproute2" in message.output
