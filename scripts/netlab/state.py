"""The notes of all labs of this machine, a JSON file each, and taking labs down by them."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dglx_dist.data.storage.files import replace_atomically
from dglx_dist.errors import ConfigError
from scripts.json_records import read_record
from scripts.netlab import cgroups, hold
from scripts.netlab.base import LabError, LabSpec
from scripts.netlab.servers import NamespaceServer, Process, cgroup_name, command_line, wait_until_ended

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}")
_FOLDER = "dglx-lab"
_FORMAT = 2
_HOLDER = str(Path(*Path(hold.__file__).parts[-3:]))
"""Stands in the command line of every process that holds namespaces, of whatever installation."""
_DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
"""Errors that reading a damaged file can raise."""


@dataclass(frozen=True, kw_only=True)
class LabState:
    """Persistent state of one lab."""

    name: str
    spec: LabSpec
    """With the rates that hold now."""
    held: Literal["process", "detached"]
    """Whether it ends with its owner."""
    owner: Process
    """Process that created the lab."""
    boot: str
    """Boot id of the machine. Process numbers of an earlier boot are meaningless."""
    created: str
    """ISO, UTC."""
    complete: bool = False
    """Whether all of it was made."""
    switch: tuple[Process, ...] = ()
    """Processes that hold the bridge."""
    servers: tuple[NamespaceServer, ...] = ()
    """Those made so far."""

    @property
    def alive(self) -> bool:
        """Whether it can be used, or is being made."""
        if self.boot != boot_id():
            return False
        if self.held == "process" or not self.complete:
            return self.owner.alive()
        return any(process.alive() for process in self.processes)

    @property
    def processes(self) -> tuple[Process, ...]:
        return (
            *self.switch,
            *(process for server in self.servers for process in (server.init, server.outer)),
        )


def notes_folder() -> Path:
    """Return where the notes of labs are, whether it exists or not; LabError: others could write there."""
    run = Path("/run")
    place = run / _FOLDER
    if not place.is_dir() and not (run.is_dir() and os.access(run, os.W_OK)):
        place = Path(tempfile.gettempdir()) / _FOLDER
    if os.path.lexists(place) and os.geteuid() == 0:
        status = place.lstat()
        # Processes that are named in there would be killed as root.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
            raise LabError(
                f"{place} is no folder that only root can write to; remove it first: rm -r {place}"
            )
    return place


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"lab name {name!r}: use up to 40 letters, digits and dashes, a dash not first")
    return name


def random_name() -> str:
    return f"run-{secrets.token_hex(5)}"


def write_notes(state: LabState, *, new: bool = False) -> None:
    """Replace the notes of a lab, or write its first ones, in one step; LabError: it was taken down."""
    path = _path(state.name)
    try:
        if new:
            path.parent.mkdir(mode=0o755, exist_ok=True)
        elif not path.exists():
            raise LabError(f"the lab {state.name!r} was taken down meanwhile by another process")
        with replace_atomically(path) as fresh:
            fresh.write_text(json.dumps({"format": _FORMAT, **asdict(state)}, indent=1) + "\n")
            if new:
                # A link, unlike a rename, refuses to replace: of two who ask at once, one gets the name.
                os.link(fresh, path)
    except FileExistsError:
        raise ConfigError(
            f"a lab called {state.name!r} exists; take it down with "
            f"`python scripts/netlab down {state.name}`, or choose another name"
        ) from None
    except OSError as error:
        raise LabError(
            f"what is known of labs cannot be written to {path.parent}: {error.strerror}; make room there, "
            "or make it writable for root"
        ) from error


def read_notes(name: str) -> LabState:
    """Read the notes of a lab (ConfigError: there is none of this name; LabError: they are damaged)."""
    path = _path(check_name(name))
    try:
        return _from_json(name, json.loads(path.read_text()))
    except FileNotFoundError:
        there = ", ".join(lab_names()) or "none"
        raise ConfigError(f"there is no lab called {name!r}; up are: {there}") from None
    except _DAMAGE as error:
        raise LabError(
            f"{path} is damaged ({error}); `python scripts/netlab down {name}` or `down --all` removes it"
        ) from error


def noted_still(noted: LabState) -> bool:
    """Whether the notes under this name are of this lab, and not gone or another's."""
    try:
        return read_notes(noted.name).switch == noted.switch
    except (ConfigError, LabError):
        return False


def lab_names() -> list[str]:
    return sorted(path.stem for path in notes_folder().glob("*.json") if _NAME.fullmatch(path.stem))


def list_labs() -> list[LabState]:
    """Return the notes of all labs, dead ones included, by name; LabError: which are damaged."""
    labs = []
    for name in lab_names():
        try:
            labs.append(read_notes(name))
        except ConfigError:
            continue  # taken down since the folder was listed
    return labs


def describe_life(found: LabState) -> str:
    """Say in a few words whether a lab is up, and until when."""
    if not found.alive:
        return "dead, `down --all` removes it"
    if not found.complete:
        return f"being made by process {found.owner.pid}"
    return "up" if found.held == "detached" else f"up while process {found.owner.pid} runs"


def _path(name: str) -> Path:
    return notes_folder() / f"{name}.json"


def _from_json(name: str, values: Any) -> LabState:
    if values["format"] != _FORMAT:
        raise ValueError(f"format {values['format']!r}, not {_FORMAT}")
    state: LabState = read_record(LabState, {**values, "name": name})
    for process in (state.owner, *state.processes):
        if process.pid < 2:
            raise ValueError(f"process number {process.pid}")
    for holder in state.processes:
        line = command_line(holder.pid)
        if line and _HOLDER not in line and holder.alive():
            raise ValueError(f"process {holder.pid} holds no lab")
    return state


def clean_stale() -> list[str]:
    """Remove what is left of labs that ended without being taken down, but damaged notes; return names."""
    removed = []
    for name in lab_names():
        try:
            state = read_notes(name)
        except (ConfigError, LabError):
            continue
        if not state.alive:
            remove_lab(state)
            removed.append(name)
    return removed


def take_down(name: str) -> list[str]:
    """Take a lab down, whoever made it: end its processes, remove its control groups and its notes."""
    check_name(name)
    if name in lab_names() and not os.access(notes_folder(), os.W_OK):
        raise LabError(f"the lab {name!r} is root's: sudo python scripts/netlab down {name}")
    try:
        state = read_notes(name)
    except LabError:
        _remove_groups(name)
    else:
        remove_lab(state)
    return [name]


def take_down_all() -> list[str]:
    """Take all labs down, damaged notes included; return their names."""
    names = lab_names()
    for name in names:
        try:
            take_down(name)
        except ConfigError:
            continue  # another process was faster
    return names


def remove_lab(found: LabState) -> None:
    """End the processes of a lab, remove its control groups, then its notes; LabError: one did not go."""
    if found.boot == boot_id():
        for process in found.processes:
            process.kill()
        wait_until_ended(found.processes)
    _remove_groups(found.name, [Path(server.cgroup) for server in found.servers if server.cgroup])


def _remove_groups(name: str, noted: Sequence[Path] = ()) -> None:
    """Remove the control groups called as those of a lab, and then its notes."""
    for folder in {*cgroups.find(cgroup_name(name, "*")), *noted}:
        # The name of another lab may begin with this one.
        if re.fullmatch(cgroup_name(name, r"\d+"), folder.name):
            cgroups.remove(folder)
    _path(name).unlink(missing_ok=True)
