"""Run a command and end all that it started once standard input closes; a program, run by its path.

    python -I -S guard.py GRACE COMMAND...

Whoever starts it keeps the other end of its standard input. When that process ends, even by SIGKILL, the
system closes the pipe: COMMAND gets SIGTERM and has GRACE seconds; after that, and also when COMMAND has
ended by itself, everything that descends from it is killed. Ends with COMMAND's exit code, or 128 + its
signal. Needs the standard library alone, so that it costs milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> int:
    """Run ``arguments``, which are GRACE and COMMAND; return the exit code."""
    grace_s, command = float(arguments[0]), arguments[1:]
    # Ranks are in sessions of their own: what their launcher leaves behind becomes a child of this process.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ending = Ending(grace_s)
    # Before the command starts: whoever sees its first line may ask for its end at once.
    signal.signal(signal.SIGTERM, lambda *_: ending.begin())
    signal.signal(signal.SIGINT, lambda *_: ending.begin())
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127
    ending.of(process)
    threading.Thread(target=_call_at_end_of_input, args=(ending.begin,), daemon=True).start()
    code = process.wait()
    kill_descendants()
    return code if code >= 0 else 128 - code


class Ending:
    """Ends a process, also when that was asked for before there was one."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False

    def of(self, process: subprocess.Popen[bytes]) -> None:
        """Say which process."""
        self._process = process
        if self._asked:
            self.begin()

    def begin(self) -> None:
        """Send SIGTERM now and SIGKILL after the grace."""
        self._asked = True
        if self._process is not None:
            self._process.terminate()
            timer = threading.Timer(self._grace_s, self._process.kill)
            timer.daemon = True
            timer.start()


def kill_descendants() -> None:
    """Kill all processes that descend from this one, until there are none."""
    while found := descendants(os.getpid()):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        # Orphans have become children; each that is waited for is gone from the next look.
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def descendants(ancestor: int) -> list[int]:
    """Return the ids of all processes below ``ancestor``, the ended ones that nobody waited for included."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # just ended
    found, last = [], {ancestor}
    while last:
        last = {pid for pid, parent in parents.items() if parent in last}
        found += sorted(last)
    return found


def _call_at_end_of_input(end: Callable[[], None]) -> None:
    while os.read(0, 4096):
        pass
    end()


if __name__ == "__main__":
    # Not sys.exit: the thread that waits for the end of the input would be waited for in turn.
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
