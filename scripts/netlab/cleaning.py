"""Taking labs down by their notes: those that someone is done with, and those whose owner was killed."""

from __future__ import annotations

import os
from pathlib import Path

from dglx_dist.comm import system as cgroups
from dglx_dist.errors import ConfigError, LabError
from scripts.netlab import state
from scripts.netlab.holder import wait_until_ended
from scripts.netlab.server import cgroup_name
from scripts.netlab.state import LabState


def clean_stale() -> list[str]:
    """Remove what is left of labs that ended without being taken down; return their names.

    Damaged notes stay, as nobody can tell whether their lab is in use; ``down_all`` removes them.
    """
    removed = []
    for name in state.names():
        try:
            found = state.read(name)
        except (ConfigError, LabError):
            continue
        if not found.alive:
            remove(found)
            removed.append(name)
    return removed


def down(name: str) -> None:
    """Take a lab down, whoever made it: end its processes, remove its control groups and its notes.

    Raises:
        ConfigError: there is no lab of this name.
        LabError: it is another user's, or a process or a control group did not go.
    """
    state.check_name(name)
    if name in state.names() and not os.access(state.folder(), os.W_OK):
        raise LabError(f"the lab {name!r} is root's: sudo python scripts/netlab down {name}")
    try:
        found = state.read(name)
    except LabError:
        _remove_groups_called(name)
        state.forget(name)
        return
    remove(found)


def down_all() -> list[str]:
    """Take all labs down, damaged notes included; return their names.

    Raises:
        LabError: one is another user's, or a process or a control group did not go.
    """
    names = state.names()
    for name in names:
        try:
            down(name)
        except ConfigError:
            continue  # another process was faster
    return names


def remove(found: LabState) -> None:
    """End the processes of a lab, remove its control groups, then its notes.

    Raises:
        LabError: a process or a control group did not go.
    """
    if found.boot == state.boot_id():
        for process in found.processes:
            process.kill()
        wait_until_ended(found.processes)
    for folder in _groups_of(found):
        cgroups.remove(folder)
    state.forget(found.name)


def _groups_of(found: LabState) -> set[Path]:
    """Return its control groups, also one that was made and not noted any more."""
    names = [cgroup_name(found.name, server) for server in range(found.spec.servers)]
    noted = {Path(server.cgroup) for server in found.servers if server.cgroup is not None}
    groups = {folder for folder in noted if folder.name in names}
    return groups.union(*(cgroups.find(name) for name in names))


def _remove_groups_called(name: str) -> None:
    """Remove control groups of a lab whose number of servers is not known."""
    server = 0
    while folders := cgroups.find(cgroup_name(name, server)):
        for folder in folders:
            cgroups.remove(folder)
        server += 1
