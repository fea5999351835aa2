"""Are the files still what was written? Read them once, and remember that by size and time of change."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from dglx_dist.errors import StorageError
from dglx_dist.progress import progress
from dglx_dist.storage.columns import FileInfo, checksum
from dglx_dist.storage.layout import CACHE

Verify: TypeAlias = Literal["auto", "full", "never"]

_LOG = logging.getLogger(__name__)
_WORTH_SHOWING = 1 << 28
"""Bytes that take long enough to read for somebody to wonder."""

Stamps: TypeAlias = dict[str, list[object]]
"""Path -> [size, time of change in ns, checksum] of a file that was read and found whole."""


def verify_files(folder: Path, files: Mapping[str, FileInfo], verify: Verify) -> None:
    """Compare the files that are on this machine with their checksums.

    ``auto`` reads each file once: files whose size and time of change are as they were when they were
    last read are taken as whole. What was read is remembered in ``cache/verified.json`` of the dataset;
    in a folder that cannot be written every opening reads all files, and logs that. ``full`` reads all.

    Raises:
        StorageError: naming the first file that is not what was written.
    """
    if verify == "never":
        return
    present = {path: info for path, info in files.items() if (folder / path).exists()}
    stamps = _read_stamps(folder) if verify == "auto" else {}
    found = {path: _stamp(folder / path, info) for path, info in present.items()}
    changed = [path for path in present if stamps.get(path) != found[path]]
    if not changed:
        return
    num_bytes = sum(files[path].num_bytes for path in changed)
    with progress("Checking files", num_bytes, enabled=num_bytes > _WORTH_SHOWING) as advance:
        for path in changed:
            _check_file(folder / path, files[path])
            advance(files[path].num_bytes)
    _write_stamps(folder, found)


def _check_file(path: Path, expected: FileInfo) -> None:
    # The size first: it costs nothing, and tells a half-copied file from a damaged one.
    size = path.stat().st_size
    if size != expected.num_bytes:
        raise StorageError(
            f"{path} has {size} bytes instead of {expected.num_bytes}; "
            f"copy it again or partition the graph again"
        )
    found = checksum(path)
    if found != expected:
        raise StorageError(
            f"{path} is damaged: its checksum is {found.checksum}, the manifest says {expected.checksum}; "
            f"copy it again or partition the graph again"
        )


def _stamp(path: Path, info: FileInfo) -> list[object]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, info.checksum]


def _stamp_file(folder: Path) -> Path:
    return folder / CACHE / "verified.json"


def _read_stamps(folder: Path) -> Stamps:
    try:
        stamps = json.loads(_stamp_file(folder).read_bytes())
    except (OSError, ValueError):
        # No stamp, or a broken one, only means that the files are read again.
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _write_stamps(folder: Path, stamps: Stamps) -> None:
    target = _stamp_file(folder)
    partial = target.with_name(f"{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(exist_ok=True)
        partial.write_text(json.dumps(stamps))
        partial.replace(target)
    except OSError as problem:
        _LOG.warning(
            "%s cannot be written (%s), so every opening of this dataset reads all its files; "
            "open it with verify='never' to avoid that",
            target,
            problem.strerror,
        )
