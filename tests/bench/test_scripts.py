"""The programs are run by hand only, so what they import must not move unseen."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import suites
from scripts.bench.__main__ import main

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def test_every_program_is_there_and_every_script_is_one() -> None:
    for name in suites.PROGRAMS:
        assert callable(suites.program(name))
        assert name.upper() not in {experiment.id for experiment in suites.everything()}
    named = {place.partition(":")[0] for place, _ in suites.PROGRAMS.values()}
    assert {f"micro.{path.stem}" for path in (BENCH / "micro").glob("*.py")} - named == {
        "micro.timing", "micro.__init__",
    }  # fmt: skip


def test_passes_arguments_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench", "halo", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python scripts/bench halo ")
    assert "--rounds" in shown


def test_it_runs_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--only", "D11", "--out", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'D1'" in done.stderr
