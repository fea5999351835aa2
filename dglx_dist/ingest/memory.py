"""How much memory each step may take, and how much was taken."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from dglx_dist.errors import ConfigError
from dglx_dist.storage.process_memory import resident

_MMAP_THRESHOLD = -3
"""Its number in <malloc.h>."""
_LARGE = 1 << 17

CODE = 48 * 2**20
"""What libraries have still to read of their own code, and buffers that do not depend on the limit."""
PROGRAM = 192 * 2**20
"""About what Python and its libraries take, with :data:`CODE`, for advice."""
SHARES = 6
"""In how many shares of its memory a step thinks, see :attr:`Budget.bucket`."""
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
        return self.work // SHARES


def open_budget(limit: int) -> Budget:
    """Return what is left of ``limit`` bytes beside what this process holds now.

    Raises:
        ConfigError: too little is; the message names the least.
    """
    used = resident() + CODE
    if limit - used < LEAST_WORK:
        least = -(-(used + LEAST_WORK) // 2**20)
        raise ConfigError(
            f"--memory {limit // 2**20}MB leaves too little beside the {used // 2**20} MB of the program "
            f"itself; grant at least {least}MB"
        )
    return Budget(work=limit - used)


@contextmanager
def frugal() -> Iterator[None]:
    """Give freed memory back to the system meanwhile, in place of keeping it for the next step.

    Arrow's own pool keeps what it freed for a while, and glibc what is smaller than the largest piece freed
    so far: reading a column of 9 MB, a piece of 1 MB at a time, held 40 MB. The setting of glibc stays.
    """
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    _mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def give_back() -> None:
    """Return what was freed to the system; called between steps, whose small pieces fit nothing else."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _mallopt(name: int, value: int) -> None:
    # Not every C library has it.
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(name, value)
