"""Processes told apart for good: by number and start time, since numbers are used again."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of this machine."""

    pid: int
    started: int
    """Clock ticks since the machine started."""

    def alive(self) -> bool:
        """Whether it runs still; another process of the same number does not count, nor does a zombie."""
        return _look(self.pid) == self.started

    def kill(self) -> None:
        """End it at once, if it runs still."""
        if self.alive():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return  # it ended in between


def command_line(pid: int) -> str:
    """Return the command line of process ``pid``; empty where there is none, or it is just ending."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def find(pid: int) -> Process:
    """Return the process that now has number ``pid``.

    Raises:
        ProcessLookupError: there is none, or it has ended.
    """
    started = _look(pid)
    if started is None:
        raise ProcessLookupError(f"no process {pid}")
    return Process(pid=pid, started=started)


def _look(pid: int) -> int | None:
    try:
        fields = _fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _fields(pid: int) -> list[str]:
    # The name of the program, which may hold anything, ends with the last parenthesis.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
