"""Telling whether a process still lives, also from another pid namespace, however it ended.

A process holds a lock on a file for as long as it runs; the kernel lets go of it when the process ends.
Whoever can take the lock knows that nobody holds it any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX, _OWNER = "dglx-scratch-", "owner.alive"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder that is removed afterwards; remove those of processes that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another user's is not looked into.
        with suppress(PermissionError):
            if has_ended(left / _OWNER):
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        held = hold(folder / _OWNER)
        try:
            yield folder
        finally:
            os.close(held)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def hold(path: Path) -> int:
    """Make ``path`` a sign that this process lives, until it ends or the descriptor returned is closed.

    Children of this process do not inherit it.
    """
    # Locked before it has its name: a file of that name that nobody holds means the end of its process.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    temporary.replace(path)
    return descriptor


def has_ended(path: Path) -> bool:
    """Whether the process that held ``path`` is gone; False as long as there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
