"""Where ``python scripts/netlab run`` writes to, and what it leaves there."""

import signal
from pathlib import Path

import pytest

from dglx_dist.errors import StorageError
from scripts.netlab.cli import app, prepare
from tests.netlab.commands import WAITS, script, wait_until_gone
from tests.netlab.test_cli import ENVIRONMENT, netlab, running


def test_traces_of_an_earlier_command_are_removed_and_nothing_else(tmp_path: Path) -> None:
    prepare(tmp_path / "out")
    kept = [tmp_path / "out" / "D1.json", tmp_path / "out" / "trace" / "notes"]
    for path in (*kept, tmp_path / "out" / "trace" / "rank-0.json"):
        path.write_bytes(b"")
    prepare(tmp_path / "out")
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


@pytest.mark.wide
def test_what_a_killed_command_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(place))
    path = script(tmp_path, WAITS)
    with running("--loopback", "--", path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    wait_until_gone(path)
    assert list(place.iterdir())
    done = netlab("run", "--loopback", "--", script(tmp_path, "pass"))
    assert done.returncode == 0, done.stderr
    assert list(place.iterdir()) == []
