"""Memory of emulated servers, seen from the process that started what runs on them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import final

import psutil

_EVERY_S = 1.0


@final
class MemoryWatch:
    """Largest memory of each server so far: all its processes together, shared pages counted once.

    Servers are told apart by their process namespaces, so that plain loopback has none of its own.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._mine = os.readlink("/proc/self/ns/pid")
        self._looked = 0.0

    def look(self) -> None:
        """Note what is used now; does nothing within a second of the last look."""
        if time.monotonic() - self._looked < _EVERY_S:
            return
        self._looked = time.monotonic()
        now: dict[str, int] = {}
        for process in psutil.Process().children(recursive=True):
            try:
                namespace = os.readlink(f"/proc/{process.pid}/ns/pid")
                if namespace != self._mine:
                    now[namespace] = now.get(namespace, 0) + _proportional(process.pid)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # just ended, or nobody may look at it
        for namespace, size in now.items():
            self._peaks[namespace] = max(self._peaks.get(namespace, 0), size)

    @property
    def peak_bytes(self) -> int | None:
        """Of the server that used most; None when no server was seen."""
        return max(self._peaks.values(), default=None)


def _proportional(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
