"""The guard as a process: shells and sleeps in place of launchers and ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from scripts.netlab import guard

FOREVER = "1000"


def guarded(grace_s: float, script: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(grace_s), "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and the rest of the output, which ends only when nobody is left who could write."""
    rest = process.stdout.read()
    return process.wait(timeout=30), rest


def test_it_ends_as_its_command_does() -> None:
    assert ended(guarded(5, "echo out; exit 7")) == (7, "out\n")
    assert ended(guarded(5, "kill -KILL $$")) == (128 + signal.SIGKILL, "")


def test_a_command_that_does_not_exist_is_said() -> None:
    done = subprocess.run(
        [sys.executable, guard.__file__, "5", "/no/such/program"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (127, "/no/such/program: No such file or directory\n")


def test_at_the_end_of_its_input_the_command_is_asked_to_end() -> None:
    # A shell handles signals between commands only, hence the short sleeps.
    process = guarded(60, "trap 'echo asked; exit 3' TERM; echo ready; while true; do sleep 0.05; done")
    assert process.stdout.readline() == "ready\n"
    process.stdin.close()
    assert ended(process) == (3, "asked\n")


def test_a_command_that_does_not_listen_is_killed_after_the_grace() -> None:
    process = guarded(0.3, f"trap '' TERM; echo ready; sleep {FOREVER}")
    assert process.stdout.readline() == "ready\n"
    process.stdin.close()
    assert ended(process) == (128 + signal.SIGKILL, "")


def test_what_the_command_leaves_behind_is_killed_also_in_a_session_of_its_own(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    orphan = f'trap "" TERM; echo ready; echo go > {fifo}; sleep {FOREVER}'
    process = guarded(5, f"setsid sh -c '{orphan}' & read line < {fifo}; exit 0")
    assert ended(process) == (0, "ready\n")


def test_a_signal_is_like_the_end_of_the_input() -> None:
    process = guarded(5, f"echo ready; exec sleep {FOREVER}")
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert ended(process) == (128 + signal.SIGTERM, "")
