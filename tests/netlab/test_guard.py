"""The guard as a process: shells and sleeps in place of launchers and ranks."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.netlab import guard

FOREVER = "1000"


def run_guarded(grace_s: float, script: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(grace_s), "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("grace_s", "script", "ending", "code", "said"),
    [
        (5, "echo ready; echo out; exit 7", None, 7, "out\n"),
        (5, "echo ready; kill -KILL $$", None, 128 + signal.SIGKILL, ""),
        # A shell handles signals between commands only, hence the short sleeps.
        (
            60, "trap 'echo asked; exit 3' TERM; echo ready; while true; do sleep 0.05; done",
            "end", 3, "asked\n",
        ),
        (0.3, f"trap '' TERM; echo ready; sleep {FOREVER}", "end", 128 + signal.SIGKILL, ""),
        (5, f"echo ready; exec sleep {FOREVER}", "signal", 128 + signal.SIGTERM, ""),
        # What it leaves behind is killed, in a session of its own too.
        (
            5, f"mkfifo fifo; setsid sh -c 'trap \"\" TERM; echo ready; echo go > fifo; sleep {FOREVER}' & "
            "read line < fifo; exit 0", None, 0, "",
        ),
    ],
)  # fmt: skip
def test_a_command_ends_by_itself_or_with_its_input_or_a_signal(
    grace_s: float,
    script: str,
    ending: str | None,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    process = run_guarded(grace_s, script)
    assert process.stdout.readline() == "ready\n"
    if ending == "end":
        process.stdin.close()
    if ending == "signal":
        process.terminate()
    # Output ends only when nobody is left who could write.
    assert (process.stdout.read(), process.wait(timeout=30)) == (said, code)
