"""Fixtures of the tests with emulated servers."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dglx_dist.planner.records import Rate
from scripts.netlab import state
from scripts.netlab.labs import NamespaceLab, what_is_missing
from tests.netlab.helpers import lab_of


@pytest.fixture(scope="session")
def needs_lab() -> None:
    """Skip where this machine can make no emulated servers."""
    missing = what_is_missing()
    if missing:
        pytest.skip(f"no servers can be emulated here: {missing}")


@pytest.fixture
def own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep notes of labs in a folder of the test, which other tests on this machine do not see."""
    folder = tmp_path / "notes"
    monkeypatch.setattr(state, "notes_folder", lambda: folder)
    return folder


@pytest.fixture
def lab_name() -> Iterator[str]:
    """A name that no other lab has; what the test leaves of it is removed."""
    name = state.random_name().replace("run", "test")
    yield name
    if name in state.lab_names():
        state.take_down(name)


@pytest.fixture(scope="module")
def pair(needs_lab: None) -> Iterator[NamespaceLab]:
    lab = lab_of(2, external=Rate.parse("20mbit"))
    yield lab
    lab.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()
