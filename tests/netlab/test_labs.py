"""Missing requirements of emulated servers, and their remedies."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dglx_dist.errors import ConfigError
from scripts.netlab import labs, state
from scripts.netlab.base import LabSpec, usable_cores


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
    assert reason in missing
    assert "Not supported" in missing


ONE = LabSpec(servers=1)


@pytest.mark.parametrize(
    ("servers", "cpus", "name", "message"),
    [
        (251, None, "a", "251 servers: a lab has at most 250"),
        (1, len(usable_cores()) + 1.0, "a", "give each at most"),
        (1, None, "no/name", "letters, digits and dashes"),
    ],
)
def test_refuses_before_anything_is_made(
    servers: int,
    cpus: float | None,
    name: str,
    message: str,
    own_notes: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(labs, "Holder", lambda *_, **__: pytest.fail("namespaces were made"))
    monkeypatch.setattr(labs, "what_is_missing", lambda: None)
    for make in (lambda spec: labs.open_lab(spec, name=name), lambda spec: labs.open_detached(spec, name)):
        with pytest.raises(ConfigError, match=message):
            make(LabSpec(servers=servers, cpus=cpus))
    assert state.lab_names() == []


def test_attaches_to_no_lab_that_is_down_or_unfinished(
    own_notes: Path, monkeypatch: pytest.MonkeyPatch, needs_lab: None
) -> None:
    """While it is being made, a lab can be seen by others, and not used."""
    seen: list[str] = []

    def look(noted: state.LabState) -> None:
        with pytest.raises(ConfigError, match="not up any more, or not yet") as refused:
            labs.attach(noted.name)
        seen.append(str(refused.value))

    monkeypatch.setattr(labs, "_apply_rates", look)
    with labs.open_lab(ONE, name="a"):
        assert len(seen) == 1
    with pytest.raises(ConfigError, match="no lab called 'a'"):
        labs.attach("a")
