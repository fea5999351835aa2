"""A folder in shared memory for the ranks of one server, gone when they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import final

_PREFIX = "dglx-"
_LOCK = ".lock"
_SHARED_MEMORY = Path("/dev/shm")


@final
class Scratch:
    """The folder ``path``. Every rank of the server opens it with the same ``job`` and ``server``.

    Each holds a shared lock on it, which the kernel gives up when the process ends however it ends; folders
    whose lock is free belong to the dead and are removed by whoever comes next.
    """

    def __init__(self, job: str, server: int) -> None:
        base = _base()
        self.path = base / f"{_PREFIX}{os.getuid()}-{job}-s{server}"
        _remove_abandoned(base, self.path)
        self._lock = _joined(self.path)

    def close(self) -> None:
        """Leave the folder; the last one to leave removes it, and those of the dead. May be called twice."""
        if self._lock < 0:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        _remove_abandoned(self.path.parent, self.path)


def _base() -> Path:
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _joined(path: Path) -> int:
    """Make the folder if need be, and return the descriptor whose shared lock keeps it."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            # Before it was locked, the folder looked abandoned: another job may have removed it.
            if _is_at(lock, path / _LOCK):
                return lock
            os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_abandoned(base: Path, keep: Path) -> None:
    for folder in base.glob(f"{_PREFIX}{os.getuid()}-*"):
        if folder == keep:
            continue
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
