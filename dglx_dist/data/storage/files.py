"""Atomic folders, checksum stamps, and memory sizes of the process."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dglx_dist.data.storage.columns import PARTIAL_SUFFIX, FileInfo, checksum
from dglx_dist.errors import ConfigError, StorageError

STAMP = "stamp.json"
"""Checksums of the other files of a folder, written by :func:`seal`."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_ABANDONED_S = 86400.0
"""Age from which a partial folder counts as abandoned, whoever made it."""
_MAKER = re.compile(rf"\.(?P<host>[^./]+)-(?P<process>\d+)-[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}$")


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` for the caller to fill and rename; remove it if it is left.

    Abandoned partial folders of the same target are removed first, see :func:`remove_abandoned`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for other in target.parent.iterdir():
        is_of_target = other.name.startswith(target.name) and _MAKER.match(other.name, len(target.name))
        if is_of_target and _is_abandoned(other):
            shutil.rmtree(other, ignore_errors=True)
    maker = f"{_host()}-{os.getpid()}"
    folder = target.with_name(f"{target.name}.{maker}-{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(folder: Path, *, below: bool = True) -> None:
    """Remove the partial folders of killed processes in ``folder``, with ``below`` also in its subfolders.

    A partial folder is abandoned if its process on this machine has ended, or, if it is from another machine,
    if it is a day old. Folders that cannot be removed stay.
    """
    # os.walk tolerates other ranks and runs that make and remove folders here at the same time.
    for parent, names, _ in os.walk(folder):
        for name in [name for name in names if name.endswith(PARTIAL_SUFFIX)]:
            names.remove(name)
            if _is_abandoned(Path(parent, name)):
                shutil.rmtree(Path(parent, name), ignore_errors=True)
        if not below:
            return


def _is_abandoned(partial: Path) -> bool:
    maker = _MAKER.search(partial.name)
    if maker is None:
        return False
    try:
        age_s = time.time() - partial.stat().st_mtime
    except OSError:
        return False  # another rank has just removed it
    return age_s > _ABANDONED_S or (maker["host"] == _host() and not _runs(int(maker["process"])))


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process
    return True


def _host() -> str:
    # Without dots, which separate it from the folder's name. Containers may share a host name but have their
    # own process ids, so the id of the pid namespace is included.
    return f"{os.uname().nodename.replace('.', '_')}-{Path('/proc/self/ns/pid').stat().st_ino}"


@contextmanager
def named_failures(folder: Path) -> Iterator[None]:
    """Raise StorageError naming ``folder`` for any OSError inside, such as a full disk."""
    try:
        yield
    except OSError as problem:
        raise StorageError(f"{folder} cannot be written: {problem}; choose another place") from problem


def publish(folder: Path, target: Path) -> bool:
    """Synchronise ``folder`` to disk and rename it to ``target``, which must not exist or be empty.

    Returns:
        False if ``target`` is not empty; ``folder`` is then unchanged.
    """
    _sync_tree(folder)
    try:
        folder.rename(target)
    except OSError:
        if not target.exists():
            raise
        return False
    _sync(target.parent)
    return True


def replace_folder(folder: Path, target: Path) -> None:
    """Replace ``target`` by ``folder``, then remove the old content.

    Atomic where the system can exchange two names (Linux); elsewhere the old folder is renamed to
    ``*.partial`` first and removed after the new one is in place.
    """
    _sync_tree(folder)
    if _exchange(folder, target):
        old = folder
    else:
        old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
        target.rename(old)
        folder.rename(target)
    _sync(target.parent)
    shutil.rmtree(old)


def seal(folder: Path, facts: Mapping[str, Any], files: Mapping[str, FileInfo] | None = None) -> None:
    """Write a stamp with the checksums of the files in ``folder``, for :func:`unseal`.

    Args:
        folder: Has files only.
        facts: JSON values to store in the stamp.
        files: Sizes and checksums by file name; None: computed here.
    """
    known = {path.name: checksum(path) for path in folder.iterdir()} if files is None else files
    head = {"told": facts, "files": {name: [one.num_bytes, one.checksum] for name, one in known.items()}}
    (folder / STAMP).write_text(json.dumps({"crc32": _checksum_of(head), "head": head}))


def unseal(folder: Path) -> Any:
    """Compare every file with its checksum and return the facts of :func:`seal`.

    Raises:
        StorageError: a file or the stamp is missing or damaged.
    """
    try:
        stamp = json.loads((folder / STAMP).read_bytes())
        if not isinstance(stamp, dict) or stamp.get("crc32") != _checksum_of(stamp.get("head")):
            raise ValueError(f"{STAMP} does not match its checksum")
        for name, (num_bytes, crc32) in stamp["head"]["files"].items():
            if checksum(folder / name) != FileInfo(num_bytes=num_bytes, checksum=crc32):
                raise ValueError(f"{name} does not match its checksum")
    except (OSError, ValueError, RecursionError) as problem:
        raise damaged(folder, problem) from problem
    return stamp["head"]["told"]


def damaged(folder: Path, problem: object) -> StorageError:
    """Return the error that the cached content of ``folder`` cannot be used."""
    return StorageError(f"{folder} is damaged ({problem}); a run that opens it writes it again")


def _checksum_of(head: object) -> int:
    # Of the values, not of the text, so that formatting does not matter.
    return zlib.crc32(json.dumps(head, sort_keys=True).encode())


def _exchange(one: Path, other: Path) -> bool:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    status = rename(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    return bool(status == 0)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resident() -> int:
    """Return the resident bytes of this process, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def peak() -> int:
    """Return the peak resident bytes of this process since its program started, shared pages included.

    Not from ``getrusage``, whose peak includes the process that started this one.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no peak")


_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}


def read_size(text: str) -> int:
    """Return the bytes of "4GB", "512MB" or "1000"; ConfigError if it is not a size."""
    digits = text.strip().upper().rstrip("BKMGT")
    unit = text.strip().upper()[len(digits) :]
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is not a size in bytes; write it as '4GB', '512MB' or '1000'") from None
    if size < 1:
        raise ConfigError(f"a size of {text!r} leaves no room; write it as '4GB' or '512MB'")
    return size


_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def readable_bytes(num_bytes: float) -> str:
    """Format a number of bytes with three digits and a decimal unit: 1536 -> ``1.54 KB``."""
    value, unit = float(num_bytes), _BYTE_UNITS[0]
    for unit in _BYTE_UNITS:
        # 999.5 would be written as 1e+03.
        if abs(value) < 999.5 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
