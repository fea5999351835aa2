"""What is missing for emulated servers, and what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.netlab import labs


def test_names_tools_and_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("tc", "nsenter") else f"/bin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert labs.what_is_missing() == (
        "tc: not installed, apt-get install iproute2; nsenter: not installed, apt-get install util-linux"
    )


def test_a_normal_user_learns_of_root_without_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a normal user tried namespaces"))
    missing = labs.what_is_missing()
    assert missing is not None
    assert "root" in missing
    assert "sudo" in missing


def _machine_without(tool: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a ``tool`` in front of the real one that refuses."""
    fake = folder / tool
    fake.write_text(f"#!/bin/sh\necho '{tool}: RTNETLINK answers: Not supported' >&2\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("unshare", "new namespaces are refused"),
        ("mount", "mounts are refused"),
        ("ip", "no virtual cards"),
        ("tc", "cannot limit rates"),
    ],
)
def test_names_what_the_kernel_refuses(
    tool: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_lab: None
) -> None:
    _machine_without(tool, tmp_path, monkeypatch)
    missing = labs.what_is_missing()
    assert missing is not None
    assert reason in missing
    assert "Not supported" in missing


def test_the_trial_leaves_nothing(needs_lab: None) -> None:
    def devices() -> set[str]:
        return set(os.listdir("/sys/class/net"))

    before = devices()
    assert labs.what_is_missing() is None
    assert devices() == before
