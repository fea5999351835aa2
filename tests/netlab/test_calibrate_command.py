"""`python scripts/netlab calibrate` as a user types it, on a lab that is only written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dglx_dist.errors import ConfigError, LabError
from scripts.netlab import calibrate, cli, labs
from tests.netlab.paper import PaperLab, ranks_that_train


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command; what runs it leaves what ranks would that compute 2 s and send 10 MB per epoch."""
    monkeypatch.setattr(labs, "what_is_missing", lambda: None)
    monkeypatch.setattr(cli, "open_lab", PaperLab)
    monkeypatch.setattr(calibrate, "run", ranks_that_train(3))
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def _calibrate(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["calibrate", *arguments], env={"COLUMNS": "150"})


def test_it_shows_the_tries_and_writes_the_rate(script: str, tmp_path: Path) -> None:
    done = _calibrate("--phi", "0.5", "--out", str(tmp_path / "out"), "--", script, "--epochs", "3")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["not", "limited", "2.000"] in lines
    assert ["40mbit", "4.000", "0.500", "use", "this"] in lines
    assert f"use --external 40mbit; written to {tmp_path / 'out' / 'calibration.json'}" in done.output
    written = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert (written["rate"], written["command"]) == ("40mbit", [script, "--epochs", "3"])


def test_without_out_nothing_is_left(script: str, tmp_path: Path) -> None:
    assert _calibrate("--", script).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--phi", "1.0"), "phi=1.0 must lie"),
        (("--tries", "0"), "max_tries=0"),
        (("--tolerance", "2"), "2.0"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_runs(
    script: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str], message: str
) -> None:
    monkeypatch.setattr(cli, "open_lab", lambda _spec: pytest.fail("a lab was made"))
    refused = _calibrate(*arguments, "--", script).exception
    assert isinstance(refused, ConfigError)
    assert message in str(refused)


def test_a_command_that_is_not_there_is_told(script: str) -> None:
    refused = _calibrate("--", script + "x.py").exception
    assert isinstance(refused, ConfigError)


def test_without_emulated_servers_it_says_what_is_missing(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labs, "what_is_missing", lambda: "tc: not installed, apt-get install iproute2")
    refused = _calibrate("--", script).exception
    assert isinstance(refused, LabError)
    assert "links can be limited: tc: not installed, apt-get install iproute2" in str(refused)
