"""The launcher of one server: its process, its output and how it failed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.netlab import guard
from scripts.netlab.base import Server
from scripts.netlab.holder import wait_until_ended
from scripts.netlab.output import LogFile, Relay, Screen
from scripts.netlab.pids import Process, find

GRACE_S = 8.0
"""What a launcher has for ending its ranks before all of them are killed."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How the command failed on one server."""

    message: str
    exit_code: int
    lost_a_peer: bool
    """Whether it failed because another rank had."""
    second: int
    """When it was seen."""

    def order(self) -> tuple[bool, int]:
        """Return what sorts the cause before its consequences."""
        return (self.lost_a_peer, self.second)


class Launcher:
    """``command`` on ``server``, which ends with this object's process or when it is told to.

    Args:
        server: Where.
        command: torchrun and its arguments.
        environment: All of it.
        screen: Where its lines are shown; None: nowhere.
        log: File for all of them; None: none.
        failure_file: What the launcher writes when a rank of its own failed.
    """

    def __init__(
        self,
        server: Server,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        screen: Screen | None,
        log: Path | None,
        failure_file: Path,
    ) -> None:
        self.server = server
        self._failure_file = failure_file
        self._told_to_end = False
        self._log = None if log is None else LogFile(log)
        # Server 0 keeps the terminal, where there is one; a log wants what it writes too. Anywhere else its
        # lines go through the screen as the others' do, which would otherwise come in the middle of them.
        keeps = server.number == 0 and screen is not None and log is None
        self._process = subprocess.Popen(
            server.inside([sys.executable, "-I", "-S", guard.__file__, str(GRACE_S), *command]),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=None if keeps and sys.stdout.isatty() else subprocess.PIPE,
            stderr=None if keeps and sys.stderr.isatty() else subprocess.PIPE,
            # Ctrl-C is for this process, which ends the command in order.
            start_new_session=True,
        )
        self._relays = self._relay(screen)

    def poll(self) -> int | None:
        """Return the exit code once everything on this server has ended."""
        return self._process.poll()

    def end(self) -> None:
        """Let the guard end everything on this server; returns at once. May be called again."""
        if self._process.poll() is None:
            self._told_to_end = True
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()

    def wait_for_end(self) -> None:
        """Wait after :meth:`end`; what does not end is killed.

        Raises:
            LabError: as :meth:`abandon`.
        """
        try:
            self._process.wait(GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            self.abandon()

    def abandon(self) -> None:
        """Kill all that this launcher started, at once, and close the files.

        Raises:
            LabError: a process has not ended 10 s later; the message names it.
        """
        if self._process.poll() is None:
            # Ranks are in sessions of their own: with the guard alone they would lose who ends them.
            pids = [self._process.pid, *guard.descendants(self._process.pid)]
            left = [process for process in map(_look, pids) if process is not None]
            for process in left:
                process.kill()
            wait_until_ended(left)
            self._process.wait()
        self.close()

    def close(self) -> None:
        """Write the last lines and close the files, after the processes have ended. May be called twice."""
        self.end()
        for relay in self._relays:
            relay.join(5.0)
        if self._log is not None:
            self._log.close()

    def failed_by_itself(self) -> bool:
        """Whether it has ended with a code that is not 0 and not because of :meth:`end`."""
        return self.poll() not in (None, 0) and (not self._told_to_end or self._failure_file.exists())

    def failure(self, seen: float) -> Failure:
        """Return how it failed, once :meth:`failed_by_itself`; ``seen``: in which second of the clock."""
        code = self._process.returncode
        try:
            told = json.loads(self._failure_file.read_text())
        except FileNotFoundError:
            return Failure(
                message=f"server {self.server.number}: its launcher ended with code {code}; see its output",
                exit_code=code if code >= 0 else 128 - code,
                lost_a_peer=False,
                second=int(seen),
            )
        return Failure(
            message=f"server {self.server.number}: {told['message']}",
            exit_code=told["exit_code"],
            lost_a_peer=told["lost_a_peer"],
            second=told["second"],
        )

    def _relay(self, screen: Screen | None) -> list[Relay]:
        number = self.server.number
        prefix = f"server {number} | " if number else ""
        pipes = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        return [Relay(pipe, screen, stream, prefix, self._log) for pipe, stream in pipes if pipe is not None]


def _look(pid: int) -> Process | None:
    try:
        return find(pid)
    except ProcessLookupError:
        return None
