"""Control groups (versions 1 and 2) that limit cores."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from scripts.netlab.base import LabError

# Short periods: a server that has used up its time pauses for less than this, which would otherwise look like
# a slow network. The kernel accepts no quota below 1 ms.
_PERIOD_US = 10_000
_MIN_QUOTA_US = 1_000
_REMOVE_S = 10.0


def make(name: str, share: float) -> Path | None:
    """Make a control group limited to ``share`` cores; return its folder, None where that is not possible."""
    for folder in (parent / name for parent in _parents()):
        # In version 2 children get a controller only if the parent delegates it; init systems usually do.
        with suppress(OSError), (folder.parent / "cgroup.subtree_control").open("r+") as control:
            control.write("+cpu")
        with suppress(OSError):
            folder.mkdir()
            try:
                set_quota(folder, share)
            except OSError:
                # The controller is not delegated to this group, or the parent has a smaller quota.
                folder.rmdir()
                raise
            return folder
    return None


def find(pattern: str) -> list[Path]:
    """Return the folders of groups whose names match ``pattern``, with the shell's wildcards."""
    return [folder for parent in _parents() for folder in sorted(parent.glob(pattern)) if folder.is_dir()]


def remove(folder: Path) -> None:
    """Remove a group whose processes have been killed, if it exists; LabError if it has some after 10 s."""
    deadline = time.monotonic() + _REMOVE_S
    while folder.is_dir():
        try:
            folder.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise LabError(f"the control group {folder} cannot be removed: {error.strerror}") from error
            time.sleep(0.005)


def set_quota(folder: Path, share: float) -> None:
    """Limit the group in ``folder`` to ``share`` cores; OSError when the kernel does not support it there."""
    period = max(_PERIOD_US, round(_MIN_QUOTA_US / share))
    quota = max(_MIN_QUOTA_US, round(period * share))
    if (folder / "cpu.cfs_quota_us").exists():
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
    elif (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota} {period}")
    else:
        raise FileNotFoundError(f"no controller of processor time in {folder}")


def parents(mounts: str, own: str) -> list[Path]:
    """Return folders below which a group may be made: this process's own group, then the topmost one.

    ``mounts`` and ``own`` have the formats of ``/proc/self/mounts`` and ``/proc/self/cgroup``.
    """
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    folders: list[Path] = []
    for line in mounts.splitlines():
        _, point, kind, options = line.split()[:4]
        if kind == "cgroup2":
            folders += [Path(point, paths.get("", "")), Path(point)]
        elif kind == "cgroup" and "cpu" in options.split(","):
            folders += [Path(point, paths.get("cpu", "")), Path(point)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _parents() -> list[Path]:
    return parents(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text())
