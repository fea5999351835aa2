"""The calls of dglx in scripts/demo.sh, with a dglx that only prints its arguments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "scripts" / "demo.sh"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    for name in ("scripts", ".venv/bin"):
        (folder / name).mkdir(parents=True)
    shutil.copy(DEMO, folder / "scripts" / "demo.sh")
    for name, text in (("scripts/setup.sh", "true"), (".venv/bin/dglx", 'printf "%s|" "$@"; echo')):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (tmp_path / "my graph.npz").write_text("one")
    return folder


def demo(where: Path, script: str, *arguments: str) -> str:
    done = subprocess.run([script, *arguments], cwd=where, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_ends_wherever_it_is_asked_for(copy: Path) -> None:
    assert "--data DATA" in demo(copy.parent, "copy/scripts/demo.sh", "--help")


def test_a_path_is_meant_from_where_it_was_typed(copy: Path) -> None:
    request = demo(copy.parent, "copy/scripts/demo.sh", "--data", "my graph.npz")
    assert f"partition|{copy.parent}/my graph.npz|--parts|2|" in request


def test_a_file_that_changed_is_cut_again(copy: Path) -> None:
    first = demo(copy.parent, "copy/scripts/demo.sh", "--data", "my graph.npz")
    assert demo(copy.parent, "copy/scripts/demo.sh", "--data", "my graph.npz") == first
    os.utime(copy.parent / "my graph.npz", (1, 1))
    assert demo(copy.parent, "copy/scripts/demo.sh", "--data", "my graph.npz") != first
