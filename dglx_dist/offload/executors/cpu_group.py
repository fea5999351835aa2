"""A control group of its own for one worker process, where this machine lets one be made."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import final

from dglx_dist.cluster import cgroups
from dglx_dist.errors import LabError

_PREFIX = "dglx-worker"


@final
class CpuGroup:
    """Holds one process to a share of a core; :meth:`close` it once that has ended.

    Args:
        folder: Of the group.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def close(self) -> None:
        """Remove the group."""
        with contextlib.suppress(LabError):  # it is empty, and the next executor sweeps it away
            cgroups.remove(self._folder)


def hold(pid: int, share: float) -> CpuGroup | None:
    """Hold process ``pid`` to ``share`` of a core; None where this machine does not let us."""
    folder = cgroups.make(f"{_PREFIX}-{os.getpid()}-{pid}", share)
    if folder is None:
        return None
    try:
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError:
        # It ended already, or another executor took the group for one that was left behind.
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return CpuGroup(folder)


def sweep() -> None:
    """Remove groups whose graph server was killed: those without processes."""
    for folder in cgroups.matching(f"{_PREFIX}-*"):
        with contextlib.suppress(OSError):  # processes are in it
            folder.rmdir()
