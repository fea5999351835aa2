"""Folders that appear whole or not at all, and those that are compared with their checksums when read."""

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
"""Has the checksums of the other files of a folder that :func:`seal` has closed."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_ABANDONED_S = 86400.0
"""After so long a folder that nobody has renamed will not be, whoever made it."""
_MAKER = re.compile(rf"\.(?P<host>[^./]+)-(?P<process>\d+)-[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}$")


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target``, for the caller to fill and rename; remove it if left over.

    What a killed process left of the same target goes first, as :func:`remove_abandoned` would remove it.
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
    """Remove what :func:`partial_folder` made in ``folder`` and whoever filled it left: was killed.

    Anywhere in it, or with ``below`` False in itself only. That is where its process on this machine is gone,
    or, as of other machines nobody can tell, where it is a day old. What cannot be removed stays.
    """
    # Other ranks and other runs make and remove folders here meanwhile, which a walk does not mind.
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
        return True  # somebody else's
    return True


def _host() -> str:
    # No dots: the name of a folder stands before it and ends with one. Machines of a lab and containers may
    # share a name, and then not the numbers of their processes.
    return f"{os.uname().nodename.replace('.', '_')}-{Path('/proc/self/ns/pid').stat().st_ino}"


@contextmanager
def named_failures(folder: Path) -> Iterator[None]:
    """Turn what the system refuses (a full disk, a folder of somebody else's) into an error that says so.

    Raises:
        StorageError: in place of any OSError inside.
    """
    try:
        yield
    except OSError as problem:
        raise StorageError(f"{folder} cannot be written: {problem}; choose another place") from problem


def publish(folder: Path, target: Path) -> bool:
    """Rename ``folder`` to ``target``, which must not exist or be empty, once its content is on disk.

    Returns:
        False when ``target`` has come to hold something; ``folder`` is then unchanged.
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
    """Put ``folder`` in the place of ``target``, and remove what was there after that.

    One step where the system can exchange two names (Linux); elsewhere the old folder is set aside first,
    under a name ending in ``.partial``, and is removed only when the new one stands.
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


def seal(folder: Path, told: Mapping[str, Any], files: Mapping[str, FileInfo] | None = None) -> None:
    """Stamp what is in ``folder`` as whole, for :func:`unseal`.

    Args:
        folder: Has files only.
        told: JSON values that are kept with them.
        files: What is known of each file by its name; None: they are read.

    Raises:
        OSError: the system refuses.
    """
    known = {path.name: checksum(path) for path in folder.iterdir()} if files is None else files
    head = {"told": told, "files": {name: [one.num_bytes, one.checksum] for name, one in known.items()}}
    (folder / STAMP).write_text(json.dumps({"crc32": _checksum_of(head), "head": head}))


def unseal(folder: Path) -> Any:
    """Return what :func:`seal` was told, once every file was read and compared with its checksum.

    Raises:
        StorageError: a file, or the stamp itself, is not what was sealed.
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
    """Return the error that what is kept in ``folder`` cannot be used."""
    return StorageError(f"{folder} is damaged ({problem}); a run that opens it makes it anew")


def _checksum_of(head: object) -> int:
    # Of the values, not of the text: whoever reads the same values is not misled.
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
    """Return the bytes that this process holds in memory now, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def peak() -> int:
    """Return the most that it has held since its program was started, shared pages included.

    Not ``getrusage``: what that tells begins with the size of the process that started this one.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no peak")


_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}


def read_size(text: str) -> int:
    """Return the bytes of "4GB", "512MB" or "1000".

    Raises:
        ConfigError: it is no size.
    """
    digits = text.strip().upper().rstrip("BKMGT")
    unit = text.strip().upper()[len(digits) :]
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is no size in bytes; write it as '4GB', '512MB' or '1000'") from None
    if size < 1:
        raise ConfigError(f"a size of {text!r} leaves no room; write it as '4GB' or '512MB'")
    return size
