"""How much memory each step may take, and how much was taken."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from dglx_dist.errors import ConfigError

LEAST_WORK = 24 * 2**20
"""Bytes beside the program itself, below which pieces become too small to be worth anything."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What ingesting may hold beside the program: one step at a time, each a fixed share."""

    work: int

    @property
    def batch(self) -> int:
        """Bytes of table rows read at a time; turning them into arrays takes some times as much."""
        return self.work // 32

    @property
    def bucket(self) -> int:
        """Bytes of what is sorted or looked up at a time."""
        return self.work // 4


def open_budget(limit: int) -> Budget:
    """Return what is left of ``limit`` bytes beside what this process holds now.

    Raises:
        ConfigError: too little is; the message names the least.
    """
    used = resident()
    if limit - used < LEAST_WORK:
        least = -(-(used + LEAST_WORK) // 2**20)
        raise ConfigError(
            f"--memory {limit // 2**20}MB leaves too little beside the {used // 2**20} MB of the program "
            f"itself; grant at least {least}MB"
        )
    return Budget(work=limit - used)


def resident() -> int:
    """Return the bytes that this process holds in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def peak() -> int:
    """Return the most that it has held since it was started."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no peak")
