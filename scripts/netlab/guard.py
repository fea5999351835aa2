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
    """Run ``arguments``, which are GRACE and COMMAND, and return the exit code."""
    grace_s, command = float(arguments[0]), arguments[1:]
    # Ranks run in sessions of their own. Processes that outlive their launcher become children of this one.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    is_stopping, started = False, None

    def end() -> None:
        """Send SIGTERM to the command, if it has started, and SIGKILL after the grace period."""
        nonlocal is_stopping
        is_stopping = True
        if started is not None:
            started.terminate()
            timer = threading.Timer(grace_s, started.kill)
            timer.daemon = True
            timer.start()

    # The handlers are set first, because a signal may arrive as soon as the command prints its first line.
    signal.signal(signal.SIGTERM, lambda *_: end())
    signal.signal(signal.SIGINT, lambda *_: end())
    try:
        started = process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127
    if is_stopping:
        end()
    threading.Thread(target=_call_at_end_of_input, args=(end,), daemon=True).start()
    code = process.wait()
    kill_descendants()
    return code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """Kill all processes that descend from this one, until there are none."""
    while processes := descendants(os.getpid()):
        for pid in processes:
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
    children, last = [], {ancestor}
    while last:
        last = {pid for pid, parent in parents.items() if parent in last}
        children += sorted(last)
    return children


def _call_at_end_of_input(end: Callable[[], None]) -> None:
    while os.read(0, 4096):
        pass
    end()


if __name__ == "__main__":
    # Not sys.exit: the thread that waits for the end of the input would be waited for in turn.
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
