"""Control groups of the kernel that hold processes to a fraction of the cores; versions 1 and 2."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from dglx_dist.errors import LabError

# Short periods: a server that has used up its time pauses for less than this, which would otherwise look like
# a slow network. The kernel takes no quota below 1 ms.
_PERIOD_US = 10_000
_LEAST_QUOTA_US = 1_000
_REMOVE_S = 10.0


def make(name: str, share: float) -> Path | None:
    """Make a control group for processes that together get ``share`` cores' worth of time.

    Returns:
        Its folder; None where this machine lets none be made.
    """
    for parent in _parents():
        folder = parent / name
        _hand_down_cpu(parent)
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            set_quota(folder, share)
        except OSError:
            # The controller is not handed down to here, or the group above has less.
            folder.rmdir()
            continue
        return folder
    return None


def quota_of(folder: Path) -> float:
    """Return the cores' worth of time that the group in ``folder`` gets at most; infinity: no limit."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    quota_us = int((folder / "cpu.cfs_quota_us").read_text())
    return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else float("inf")


def find(name: str) -> list[Path]:
    """Return the folders of groups called ``name``."""
    return [parent / name for parent in _parents() if (parent / name).is_dir()]


def matching(pattern: str) -> list[Path]:
    """Return the folders of groups whose names match ``pattern``, as of a shell."""
    return [folder for parent in _parents() for folder in sorted(parent.glob(pattern)) if folder.is_dir()]


def remove(folder: Path) -> None:
    """Remove a group whose processes have been killed; one that is gone is no error.

    Raises:
        LabError: processes are in it still after 10 s.
    """
    deadline = time.monotonic() + _REMOVE_S
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LabError(f"the control group {folder} cannot be removed: {error.strerror}") from error
            time.sleep(0.005)
        else:
            return


def set_quota(folder: Path, share: float) -> None:
    """Hold the group in ``folder`` to ``share`` cores' worth of time.

    Raises:
        OSError: the kernel does not, or not for this group.
    """
    period = max(_PERIOD_US, round(_LEAST_QUOTA_US / share))
    quota = max(_LEAST_QUOTA_US, round(period * share))
    if (folder / "cpu.cfs_quota_us").exists():
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
    elif (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota} {period}")
    else:
        raise FileNotFoundError(f"no controller of processor time in {folder}")


def parents(mounts: str, own: str) -> list[Path]:
    """Return folders below which a group may be made: this process's own group, then the topmost one.

    Args:
        mounts: As in ``/proc/self/mounts``.
        own: As in ``/proc/self/cgroup``.
    """
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    found: list[Path] = []
    for line in mounts.splitlines():
        _, point, kind, options = line.split()[:4]
        if kind == "cgroup2":
            found += [Path(point, paths.get("", "")), Path(point)]
        elif kind == "cgroup" and "cpu" in options.split(","):
            found += [Path(point, paths.get("cpu", "")), Path(point)]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def _parents() -> list[Path]:
    return parents(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text())


def _hand_down_cpu(parent: Path) -> None:
    # Version 2 gives children a controller only once their parent hands it down; init systems usually do.
    with contextlib.suppress(OSError):
        if "cpu" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+cpu")
