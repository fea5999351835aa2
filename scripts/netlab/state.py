"""The notes of all labs of this machine, a JSON file each, and taking labs down by them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dglx_dist.comm import system as cgroups
from dglx_dist.errors import ConfigError, LabError
from scripts.json_records import read_record
from scripts.netlab import hold
from scripts.netlab.base import LabSpec
from scripts.netlab.servers import Process, ServerFacts, cgroup_name, command_line, wait_until_ended

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}")
_FOLDER = "dglx-lab"
_FORMAT = 2
_MOST_BYTES = 1 << 20
_HOLDER = str(Path(*Path(hold.__file__).parts[-3:]))
"""Stands in the command line of every process that holds namespaces, of whatever installation."""
_DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
"""What comes of reading a file that anything may have been written to."""


@dataclass(frozen=True, kw_only=True)
class LabState:
    """What is noted of one lab."""

    name: str
    spec: LabSpec
    """With the rates that hold now."""
    held: Literal["process", "detached"]
    """Whether it ends with its owner."""
    owner: Process
    """Who made it."""
    boot: str
    """Which start of this machine it belongs to; process numbers of another mean nothing."""
    created: str
    """ISO, UTC."""
    complete: bool = False
    """Whether all of it was made."""
    switch: tuple[Process, ...] = ()
    """Processes that hold the bridge."""
    servers: tuple[ServerFacts, ...] = ()
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
    """Return where the notes of labs are, whether it exists or not.

    Raises:
        LabError: someone else could write there.
    """
    run = Path("/run")
    place = run / _FOLDER
    if not place.is_dir() and not (run.is_dir() and os.access(run, os.W_OK)):
        place = Path(tempfile.gettempdir()) / _FOLDER
    if os.path.lexists(place) and os.geteuid() == 0:
        found = place.lstat()
        # Processes that are named in there would be killed as root.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
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


def reserve(state: LabState) -> None:
    """Write the first notes of a lab (ConfigError: one has this name; LabError: it cannot be written)."""
    try:
        notes_folder().mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise _unwritable(error) from error
    fresh = _write_beside(state)
    try:
        # A link, unlike a rename, refuses to replace: of two who ask at once, one gets the name.
        os.link(fresh, _path(state.name))
    except FileExistsError:
        raise ConfigError(
            f"a lab called {state.name!r} exists; take it down with "
            f"`python scripts/netlab down {state.name}`, or choose another name"
        ) from None
    finally:
        fresh.unlink()


def write_notes(state: LabState) -> None:
    """Replace the notes of a lab, in one step.

    Raises:
        LabError: there are none, as it was taken down meanwhile, or nothing can be written there.
    """
    if not _path(state.name).exists():
        raise LabError(f"the lab {state.name!r} was taken down meanwhile by another process")
    _write_beside(state).rename(_path(state.name))


def read_notes(name: str) -> LabState:
    """Read the notes of a lab (ConfigError: there is none of this name; LabError: they are damaged)."""
    path = _path(check_name(name))
    try:
        return _from_json(name, json.loads(_text_of(path)))
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
    found = [path for path in notes_folder().glob("*.json") if not path.is_dir()]
    return sorted(path.stem for path in found if _NAME.fullmatch(path.stem))


def forget(name: str) -> None:
    """Remove the notes of a lab, if there are any (LabError: a folder is in their place)."""
    path = _path(check_name(name))
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        raise LabError(f"{path} is a folder, which no lab makes; remove it: rm -r {path}") from None


def list_labs() -> list[LabState]:
    """Return the notes of all labs, dead ones included, by name.

    Raises:
        LabError: notes are damaged; the message names the file.
    """
    found = []
    for name in lab_names():
        try:
            found.append(read_notes(name))
        except ConfigError:
            continue  # taken down since the folder was listed
    return found


def describe_life(found: LabState) -> str:
    """Say in a few words whether a lab is up, and until when."""
    if not found.alive:
        return "dead, `down --all` removes it"
    if not found.complete:
        return f"being made by process {found.owner.pid}"
    return "up" if found.held == "detached" else f"up while process {found.owner.pid} runs"


def _path(name: str) -> Path:
    return notes_folder() / f"{name}.json"


def _text_of(path: Path) -> str:
    # A pipe in its place would be waited for, and a large file read for long.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise ValueError(f"no plain file of at most {_MOST_BYTES} bytes")
        return os.read(descriptor, _MOST_BYTES).decode()
    finally:
        os.close(descriptor)


def _write_beside(state: LabState) -> Path:
    fresh = notes_folder() / f".{state.name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        fresh.write_text(json.dumps({"format": _FORMAT, **asdict(state)}, indent=1) + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise _unwritable(error) from error
    return fresh


def _unwritable(error: OSError) -> LabError:
    return LabError(
        f"what is known of labs cannot be written to {notes_folder()}: {error.strerror}; make room there, or "
        "make it writable for root"
    )


def _from_json(name: str, values: Any) -> LabState:
    if values["format"] != _FORMAT:
        raise ValueError(f"format {values['format']!r}, not {_FORMAT}")
    found: LabState = read_record(LabState, {**values, "name": name})
    for process in (found.owner, *found.processes):
        if process.pid < 2:
            raise ValueError(f"process number {process.pid}")
    for holder in found.processes:
        line = command_line(holder.pid)
        if line and _HOLDER not in line and holder.alive():
            raise ValueError(f"process {holder.pid} holds no lab")
    return found


def clean_stale() -> list[str]:
    """Remove what is left of labs that ended without being taken down; return their names.

    Damaged notes stay, as nobody can tell whether their lab is in use; ``down_all`` removes them.
    """
    removed = []
    for name in lab_names():
        try:
            found = read_notes(name)
        except (ConfigError, LabError):
            continue
        if not found.alive:
            remove_lab(found)
            removed.append(name)
    return removed


def take_down(name: str) -> None:
    """Take a lab down, whoever made it: end its processes, remove its control groups and its notes."""
    check_name(name)
    if name in lab_names() and not os.access(notes_folder(), os.W_OK):
        raise LabError(f"the lab {name!r} is root's: sudo python scripts/netlab down {name}")
    try:
        found = read_notes(name)
    except LabError:
        _remove_groups_called(name)
        forget(name)
        return
    remove_lab(found)


def take_down_all() -> list[str]:
    """Take all labs down, damaged notes included; return their names.

    Raises:
        LabError: one is another user's, or a process or a control group did not go.
    """
    names = lab_names()
    for name in names:
        try:
            take_down(name)
        except ConfigError:
            continue  # another process was faster
    return names


def remove_lab(found: LabState) -> None:
    """End the processes of a lab, remove its control groups, then its notes.

    Raises:
        LabError: a process or a control group did not go.
    """
    if found.boot == boot_id():
        for process in found.processes:
            process.kill()
        wait_until_ended(found.processes)
    for folder in _groups_of(found):
        cgroups.remove(folder)
    forget(found.name)


def _groups_of(found: LabState) -> set[Path]:
    names = [cgroup_name(found.name, server) for server in range(found.spec.servers)]
    noted = {Path(server.cgroup) for server in found.servers if server.cgroup is not None}
    groups = {folder for folder in noted if folder.name in names}
    return groups.union(*(cgroups.find(name) for name in names))


def _remove_groups_called(name: str) -> None:
    server = 0
    while folders := cgroups.find(cgroup_name(name, server)):
        for folder in folders:
            cgroups.remove(folder)
        server += 1
