"""Control groups of the kernel that hold processes to a fraction of the cores; versions 1 and 2."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from pathlib import Path

from dglx_dist.errors import LabError

log = logging.getLogger(__name__)

# Numbers of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER = 2**31 - 1
_DEFAULT_MMAP_MAX = 65536
_LARGE = 1 << 20
"""Bytes from which a tensor is mapped by itself, where memory is given back."""


def keep_memory() -> bool:
    """Tell glibc to keep what is freed for the next allocation, in this process, from now on.

    By default a tensor of more than 32 MiB is mapped anew each time, and its pages are faulted in and cleared
    again at every step: 37 % of the processor time of forward and backward of GraphSAGE 3 x 256 on
    sampled blocks. The price is memory: a process keeps the most it needed, which was 12 % more there.

    Returns:
        Whether it was done; not with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # The order matters only in that a refused first setting leaves everything as it was.
    done = mallopt(_MMAP_MAX, 0) == 1 and mallopt(_TRIM_THRESHOLD, _NEVER) == 1
    if done:
        log.info(
            "glibc keeps freed memory for the next step; set any MALLOC_ variable or GLIBC_TUNABLES to choose"
        )
    return bool(done)


def return_memory() -> bool:
    """Tell glibc to give what is freed back to the system, in this process, from now on.

    The contrary of :func:`keep_memory`, for those who have less memory than time. What is kept lies in
    pieces that fit nothing else: full-graph training of GraphSAGE held 1.4 to 1.6 times the memory that it
    had in use at any time.

    Returns:
        Whether it was done; not with another C library.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except AttributeError:
        return False
    # Setting the threshold also keeps glibc from raising it to what was freed last.
    settings = ((_MMAP_MAX, _DEFAULT_MMAP_MAX), (_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _LARGE))
    done = all(mallopt(name, value) == 1 for name, value in settings)
    trim(0)
    return done


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
