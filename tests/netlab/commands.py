"""Scripts for the ranks of a lab that need no torch, and how to see whether their processes are left."""

from __future__ import annotations

import time
from pathlib import Path

WHO = """\
import os, sys
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
words = ("who", *(os.environ[name] for name in names), str(sorted(os.sched_getaffinity(0))), *sys.argv[1:])
# In one piece: output is not buffered, and another rank writes to the same pipe.
sys.stdout.write(" ".join(words) + "\\n")
sys.stderr.write(f"error of {os.environ['RANK']}\\n")
"""
# The last rank fails at once, the others would go on for ever.
FAILS = """\
import os, signal, sys, time
if int(os.environ["RANK"]) + 1 < int(os.environ["WORLD_SIZE"]):
    print("waits", flush=True)
    time.sleep(1000)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[1]))
"""
WAITS = """\
import os, time
print("waits", os.environ["RANK"], flush=True)
time.sleep(1000)
"""


def script(folder: Path, text: str) -> str:
    """Write a script whose path no other process of this machine has in its arguments."""
    path = folder / "ranks.py"
    path.write_text(text)
    return str(path)


def processes_with(word: str) -> list[str]:
    """Return the command lines of all processes, those in namespaces too, that have ``word`` in them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_text().replace("\0", " ")
        except OSError:
            continue  # just ended
        if word in line:
            found.append(line)
    return found


def wait_until_gone(word: str, timeout_s: float = 20.0) -> list[str]:
    """Wait until no process has ``word`` in its arguments; return those that still have."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_with(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
