"""Are files what was written, and ids in range? Read once, and remembered by size and time of change."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from dglx_dist.errors import DatasetError, StorageError
from dglx_dist.progress import progress
from dglx_dist.records import Array
from dglx_dist.storage.columns import FileInfo, checksum, read_column
from dglx_dist.storage.layout import CACHE, edge_folder, node_folder
from dglx_dist.storage.manifest import Manifest

Verify: TypeAlias = Literal["auto", "full", "never"]

_LOG = logging.getLogger(__name__)
_WORTH_SHOWING = 1 << 28
"""Bytes that take long enough to read for somebody to wonder."""

_VALUES = 1 << 20
"""Ids that are compared at a time."""

Stamps: TypeAlias = dict[str, list[object]]
"""Path -> [size, time of change in ns, checksum] of a file that was read and found whole, and behind those,
where it holds ids that were found in range, the checksum of the manifest that has the ranges."""


@dataclass(frozen=True, kw_only=True)
class _Ids:
    """An array that compiled code indexes with, unchecked."""

    path: str
    part: int
    num_rows: int
    bound: int
    """Above all values."""
    of: str
    """What has these ids."""

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def is_indptr(self) -> bool:
        return self.name == "indptr"


def verify_files(folder: Path, manifest: Manifest, verify: Verify) -> None:
    """Compare the files that are on this machine with their checksums, and ids with their ranges.

    ``auto`` reads each file once: files whose size and time of change are as they were when they were
    last read are taken as whole. What was read is remembered in ``cache/verified.json`` of the dataset;
    in a folder that cannot be written every opening reads all files, and logs that. ``full`` reads all.

    Raises:
        StorageError: naming the first file that is not what was written.
        DatasetError: naming the first id that is out of range.
    """
    if verify == "never":
        return
    files, ids = manifest.files, {one.path: one for one in _arrays_of_ids(manifest)}
    stamps = _read_stamps(folder) if verify == "auto" else {}
    found = {
        path: [*_stamp(folder / path, info), *([manifest.checksum] if path in ids else [])]
        for path, info in files.items()
        if (folder / path).exists()
    }
    changed = [path for path in found if stamps.get(path) != found[path]]
    if not changed:
        return
    num_bytes = sum(files[path].num_bytes for path in changed)
    with progress("Checking files", num_bytes, enabled=num_bytes > _WORTH_SHOWING) as advance:
        for path in changed:
            _check_file(folder / path, files[path])
            if path in ids:
                _check_ids(folder, ids[path])
            advance(files[path].num_bytes)
    _write_stamps(folder, found)


def _arrays_of_ids(manifest: Manifest) -> Iterator[_Ids]:
    for part in range(manifest.num_parts):
        for ntype, offsets in manifest.node_offsets.items():
            path, num_nodes = f"{node_folder(part, ntype)}/original_ids.arrow", int(offsets[-1])
            owned = int(offsets[part + 1] - offsets[part])
            yield _Ids(path=path, part=part, num_rows=owned, bound=num_nodes, of=f"{ntype!r} nodes")
        for etype, offsets in manifest.edge_offsets.items():
            owned, nodes = int(offsets[part + 1] - offsets[part]), manifest.node_offsets[etype[2]]
            for name, num_rows, bound, of in (
                ("indptr", int(nodes[part + 1] - nodes[part]) + 1, owned + 1, f"edges {etype} of the part"),
                ("indices", owned, manifest.num_nodes(etype[0]), f"{etype[0]!r} nodes"),
                ("original_ids", owned, int(offsets[-1]), f"edges {etype}"),
            ):
                path = f"{edge_folder(part, etype)}/{name}.arrow"
                yield _Ids(path=path, part=part, num_rows=num_rows, bound=bound, of=of)


def _check_ids(folder: Path, ids: _Ids) -> None:
    values = read_column(folder / ids.path, ids.name, num_rows=ids.num_rows)
    where = f"{folder}: part {ids.part} is wrong: in {ids.path}, {ids.name}"
    remedy = "copy the part again or partition the graph again"
    dtypes = ("int32", "int64") if ids.name == "indices" else ("int64",)
    if values.ndim != 1 or values.dtype.name not in dtypes:
        kinds = " or ".join(dtypes)
        raise DatasetError(f"{where} is {values.dtype} of shape {values.shape}, expected {kinds}; {remedy}")
    at = _first_wrong(values, ids)
    if at is not None:
        ranges = f"0 to {ids.bound - 1}"
        if ids.is_indptr:
            ranges = f"numbers that never fall, from 0 at first to {ids.bound - 1} at last"
        raise DatasetError(f"{where}[{at}] is {values[at]}, expected {ranges} ({ids.of}); {remedy}")


def _first_wrong(values: Array, ids: _Ids) -> int | None:
    if ids.is_indptr and values[0] != 0:
        return 0
    for start in range(0, len(values), _VALUES):
        # With the last value of the chunk before, for comparing neighbours.
        first = max(start - 1, 0)
        chunk = values[first : start + _VALUES]
        wrong = (chunk < 0) | (chunk >= ids.bound)
        if ids.is_indptr:
            wrong[1:] |= chunk[1:] < chunk[:-1]
        if wrong.any():
            return first + int(wrong.argmax())
    return len(values) - 1 if ids.is_indptr and values[-1] != ids.bound - 1 else None


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
