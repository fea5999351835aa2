"""What this process holds in memory, by what the kernel tells of it."""

from __future__ import annotations

import mmap
from pathlib import Path


def resident() -> int:
    """Return the bytes that this process holds in memory now, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def peak() -> int:
    """Return the most that it has held since its program was started, shared pages included.

    Not ``getrusage``: what that tells begins with the size of the process that started this one.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no peak")
