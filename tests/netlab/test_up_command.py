"""`python scripts/netlab up`, `down` and `status` as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dglx_dist.errors import ConfigError, LabError
from scripts.netlab import labs, state
from scripts.netlab.cli import app


@pytest.fixture
def own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep notes of labs apart from those of this machine."""
    monkeypatch.setattr(state, "notes_folder", lambda: tmp_path / "notes")
    return tmp_path / "notes"


def lab(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "150"})


def test_up_status_down(own_notes: Path) -> None:
    if labs.what_is_missing():
        pytest.skip(f"no servers can be emulated here: {labs.what_is_missing()}")
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


@pytest.mark.parametrize("arguments", [(), ("slow", "--all")])
def test_down_wants_one_lab_or_all(arguments: tuple[str, ...], own_notes: Path) -> None:
    refused = lab("down", *arguments).exception
    assert isinstance(refused, ConfigError)
    assert "--all" in str(refused)


def test_down_of_an_unknown_lab_lists_those_there_are(own_notes: Path) -> None:
    refused = lab("down", "fast").exception
    assert isinstance(refused, ConfigError)
    assert str(refused) == "there is no lab called 'fast'; up are: none"
    assert lab("down", "--all").output == "no lab was up\n"


def test_up_says_what_is_missing(own_notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "what_is_missing", lambda: "tc: not installed, apt-get install iproute2")
    refused = lab("up", "slow").exception
    assert isinstance(refused, LabError)
    assert "apt-get install iproute2" in str(refused)


def test_status_says_what_is_missing(own_notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "what_is_missing", lambda: "namespaces and network devices need root: sudo")
    told = lab("status")
    assert told.exit_code == 0
    assert "need root" in told.output


def test_a_damaged_lab_is_named_and_down_all_removes_it(own_notes: Path) -> None:
    own_notes.mkdir()
    (own_notes / "slow.json").write_text("{")
    refused = lab("status").exception
    assert isinstance(refused, LabError)
    assert str(own_notes / "slow.json") in str(refused)
    assert lab("down", "--all").output == "down: slow\n"
    assert lab("status").output == "no lab is up\n"


def test_a_bad_rate_is_refused_before_anything_is_made(own_notes: Path) -> None:
    assert isinstance(lab("up", "slow", "--external", "fast").exception, ConfigError)
    assert not own_notes.exists()
