"""Store arrays in folders that are complete or absent, and keep a bounded cache of them beside a dataset.

A folder has a ``.npy`` file for each array and a stamp with their checksums. It is written under a temporary
name and renamed, see :mod:`dglx_dist.data.storage.files`.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import shutil
import threading
import time
import tokenize
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from dglx_dist.data.storage.columns import FileInfo, checksum
from dglx_dist.data.storage.files import (
    PARTIAL_SUFFIX,
    lock_shared,
    partial_folder,
    publish,
    read_small_file,
    remove_abandoned,
    replace_folder,
    try_lock,
)
from dglx_dist.errors import StorageError
from dglx_dist.memory import format_bytes
from dglx_dist.records import Array

STAMP = "stamp.json"
"""Name of the file that holds an array folder's checksums and metadata."""

CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors for missing permission or space. A run then continues without the cache."""

_MAX_AGE_S = 30 * 86400.0
_IN_USE_S = 86400.0
"""Entries count as in use if they were opened at most this long before the last opened entry."""

_SHARE_OF_DISK = 4
_UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
    *(SyntaxError, tokenize.TokenError),  # NumPy raises them for damaged headers.
)
_LOG = logging.getLogger(__name__)


@final
class ArrayStream:
    """Writes one array's rows in order.

    Raises OSError if the file cannot be written, or the disk has too little space for all rows.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._path = path
        self._dtype = dtype
        self._shape = shape
        num_bytes = math.prod(shape) * dtype.itemsize
        if shutil.disk_usage(path.parent).free < num_bytes:
            raise OSError(errno.ENOSPC, f"no room for {num_bytes} bytes", str(path.parent))

        header = io.BytesIO()
        fields = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(header, fields)
        self._file = path.open("xb", buffering=0)
        self._checksum = 0
        self.num_rows = 0
        """Number of rows in the file."""
        self._put(header.getbuffer())

    def append(self, rows: Array) -> None:
        """Write the next (k, *row) rows. After an OSError, rows from earlier calls are still there."""
        data = np.ascontiguousarray(rows, self._dtype).reshape(-1).view(np.uint8).data
        self._put(data)
        self.num_rows += len(rows)

    def finish(self) -> FileInfo:
        """Flush to disk and return the file's size and checksum. Raise StorageError if rows are missing."""
        if self.num_rows != self._shape[0]:
            raise StorageError(
                f"{self._path} has {self.num_rows} rows instead of {self._shape[0]}; check "
                "its dataset with verify='full'"
            )

        os.fsync(self._file.fileno())
        return FileInfo(num_bytes=self._file.tell(), checksum=f"{self._checksum:08x}")

    def close(self) -> None:
        self._file.close()

    def _put(self, data: memoryview) -> None:
        num_written = 0
        while num_written < len(data):
            num_written += self._file.write(data[num_written:]) or 0
        self._checksum = zlib.crc32(data, self._checksum)


@final
class ArrayWriter:
    """Writes one folder's arrays under a temporary name. See :meth:`ArrayFolder.open_writer`."""

    def __init__(self, folder: ArrayFolder, partial: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._partial = partial
        self._stack = stack
        self._streams: dict[str, ArrayStream] = {}

    def stream(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ArrayStream:
        """Begin the array ``name``, and return the stream that takes its rows in pieces."""
        stream = ArrayStream(self._partial / f"{name}.npy", dtype, shape)
        self._streams[name] = stream
        self._stack.callback(stream.close)
        return stream

    def put(self, name: str, array: Array) -> None:
        self.stream(name, array.dtype, array.shape).append(array)

    def publish(self, metadata: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Finish the arrays, and give the folder its final name. The writer cannot be used afterwards.

        Args:
            metadata: JSON values that describe the arrays.
            overwrite: Whether to replace a folder that has this name already. By default an existing folder
                is kept if it is intact and has the same metadata.
        """
        checksums = {}
        for name, stream in self._streams.items():
            file = stream.finish()
            checksums[f"{name}.npy"] = [file.num_bytes, file.checksum]
        content = {"told": metadata, "files": checksums}
        stamp = {"crc32": checksum_of(content), "head": content}
        (self._partial / STAMP).write_text(json.dumps(stamp))

        target = self._folder.path
        if publish(self._partial, target):
            return
        if overwrite or self._folder.find(metadata, log=False) is None:
            replace_folder(self._partial, target)


@final
class ArrayFolder:
    """A folder whose arrays are written and read together.

    Args:
        path: The folder. It may not exist yet.
        trusted: Whether reading compares file sizes only, instead of checksums.
    """

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._trusted = trusted

    def subfolder(self, name: str) -> ArrayFolder:
        return ArrayFolder(self.path / name, trusted=self._trusted)

    def read(
        self, mode: Literal["r", "c"] = "r", metadata: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Array]]:
        """Check all files, and return the stored metadata and the memory-mapped arrays by name.

        Arrays are read-only, or with mode "c" they may be changed in memory (copy-on-write). Raises
        StorageError if a file is missing or damaged, or if ``metadata`` is not None and differs from the
        stored metadata.
        """
        try:
            stamp = json.loads(read_small_file(self.path / STAMP))
            if not isinstance(stamp, dict) or stamp.get("crc32") != checksum_of(stamp.get("head")):
                raise ValueError(f"{STAMP} does not match its checksum")

            stored_metadata = stamp["head"]["told"]
            arrays = {}
            for name, (num_bytes, crc32) in stamp["head"]["files"].items():
                self._check_file(name, FileInfo(num_bytes=num_bytes, checksum=crc32))
                path = self.path / name
                arrays[path.stem] = map_array(path, mode)

            if metadata is not None and stored_metadata != metadata:
                raise ValueError(f"it has {stored_metadata} instead of {metadata}")
        except _UNREADABLE as error:
            raise StorageError(f"{self.path} is damaged ({error}); the next run writes it again") from error
        return stored_metadata, arrays

    def _check_file(self, name: str, expected: FileInfo) -> None:
        path = self.path / name
        if path.parent != self.path or not path.is_file():
            raise ValueError(f"{name} is not a file in it")
        is_intact = path.stat().st_size == expected.num_bytes
        if not self._trusted:
            is_intact = checksum(path) == expected
        if not is_intact:
            raise ValueError(f"{name} does not match its checksum")

    def find(
        self,
        metadata: Mapping[str, Any] | None = None,
        mode: Literal["r", "c"] = "r",
        *,
        check: Callable[[Mapping[str, Array]], None] = lambda _: None,
        log: bool = True,
    ) -> tuple[Any, dict[str, Array]] | None:
        """Read like :meth:`read`, but return None if the folder is missing, damaged or must not be used.

        Args:
            metadata, mode: See :meth:`read`.
            check: Called with the arrays. It raises ValueError or LookupError if they must not be used, which
                is logged as a warning.
            log: Whether to log damage and different metadata, too.
        """
        if not self.path.exists():
            return None
        try:
            metadata, arrays = self.read(mode, metadata)
            check(arrays)
            return metadata, arrays
        except (ValueError, LookupError) as error:
            _LOG.warning("%s is not used (%s); it is written again", self.path, error)
            return None
        except StorageError as error:
            if log:
                _LOG.warning("%s", error)
            return None

    @contextmanager
    def open_writer(self) -> Iterator[ArrayWriter]:
        """Yield a writer for a new folder, which is removed unless it is published. May raise OSError."""
        with partial_folder(self.path) as partial, ExitStack() as stack:
            yield ArrayWriter(self, partial, stack)

    def save(self, arrays: Mapping[str, Array], metadata: Mapping[str, Any], description: str) -> bool:
        """Replace the folder's content with ``arrays``, and return whether it was written.

        If space or permission is missing, a warning says that ``description`` is not kept, and the result is
        False. Other disk errors raise StorageError.
        """
        try:
            with self.open_writer() as writer:
                for name, array in arrays.items():
                    writer.put(name, array)
                writer.publish(metadata, overwrite=True)
        except OSError as error:
            if error.errno in CANNOT_WRITE:
                _LOG.warning("%s cannot be written (%s): %s is not kept", self.path, error, description)
                return False
            raise StorageError(f"{self.path} cannot be written ({error}); check the disk") from error
        return True


_PARSING = threading.Lock()


def map_array(path: Path, mode: Literal["r", "c"]) -> Array:
    """Memory-map a ``.npy`` file. Mode "c" copies pages on write. Threads may call this at the same time.

    The array keeps the mapping open.
    """
    # NumPy parses the header as Python code. Before CPython 3.11.8, that sometimes fails in two threads.
    with _PARSING:
        return np.asarray(np.load(path, mmap_mode=mode, allow_pickle=False))


def checksum_of(values: object) -> int:
    """Return a CRC-32 over JSON values that does not depend on how their text is formatted."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


@dataclass(frozen=True, kw_only=True)
class _Entry:
    path: Path
    used_s: float
    num_bytes: int


@final
class ArrayCache:
    """Caches array folders beside a dataset. Missing folders are made again. Not collective.

    An entry is one array folder, or a folder that holds several, with a lock file beside it. Processes that
    use the entry hold a shared lock on that file. The file's modification time tells when the entry was last
    opened.

    Args:
        folder: Folder for all entries. It may not exist yet.
        content: The dataset's checksum, which is part of the entries' names.
        trusted: See :class:`ArrayFolder`.
    """

    def __init__(self, folder: Path, content: str, *, trusted: bool = False) -> None:
        self._folder = folder
        self._content = content
        self._trusted = trusted
        self._locks: dict[Path, int] = {}
        weakref.finalize(self, _release, self._locks)

    def entry(self, kind: str, name: str) -> ArrayFolder:
        """Return an entry, which may not exist yet. No process evicts it while this object lives."""
        path = self._folder / f"{kind}-{self._content}" / name
        if path not in self._locks:
            # If files cannot be locked, they cannot be evicted either.
            with suppress(OSError):
                lock = lock_shared(_lock_of(path))
                self._locks[path] = lock
                os.utime(lock)
        return ArrayFolder(path, trusted=self._trusted)

    def clean(self) -> None:
        """Remove files that killed processes left behind, and evict entries that no process uses.

        An entry is as old as the time between its last opening and the most recent opening in the cache.
        Entries older than 30 days are evicted. If the cache takes more than a quarter of the disk space that
        would be free without it, more entries are evicted: first those with other contents, then the least
        recently opened ones. Entries younger than a day are kept, because the next run needs them. If these
        are too large, a warning is logged.
        """
        if not self._folder.is_dir():
            return
        remove_abandoned(self._folder)

        entries = list(_list_entries(self._folder))
        entries.sort(key=lambda entry: (self._is_of_content(entry), entry.used_s))
        total = sum(entry.num_bytes for entry in entries)
        max_bytes = (total + shutil.disk_usage(self._folder).free) // _SHARE_OF_DISK
        # Ages do not count from now, because the whole dataset may be unused for months.
        last_s = max((entry.used_s for entry in entries), default=0.0)
        for entry in entries:
            age_s = last_s - entry.used_s
            is_unused = age_s > _IN_USE_S or not self._is_of_content(entry)
            is_empty = entry.num_bytes == 0
            should_evict = is_empty or age_s > _MAX_AGE_S or (total > max_bytes and is_unused)
            if not should_evict or not _evict(entry.path):
                continue
            total -= entry.num_bytes
            if not is_empty:
                size = format_bytes(entry.num_bytes)
                days = age_s / 86400
                _LOG.info("%s (%s, unused for %.1f days) was evicted", entry.path, size, days)

        if total > max_bytes:
            _LOG.warning(
                "%s takes %s, which is more than a quarter of the free disk (%s), but it is "
                "in use; make room",
                self._folder,
                format_bytes(total),
                format_bytes(max_bytes),
            )

    def _is_of_content(self, entry: _Entry) -> bool:
        return entry.path.relative_to(self._folder).parts[0].endswith(f"-{self._content}")


def _list_entries(folder: Path) -> Iterator[_Entry]:
    """Yield all cache entries. Those with a lock file but no folder yet have size 0."""
    for parent, folders, names in os.walk(folder):
        stems = {name.removesuffix(_LOCK) for name in names if name.endswith(_LOCK)}
        # Folders with a lock file are entries, which os.walk need not enter.
        folders[:] = [name for name in folders if name not in stems and not name.endswith(PARTIAL_SUFFIX)]
        entries = [(Path(parent, stem), Path(parent, stem + _LOCK)) for stem in stems]
        if STAMP in names:  # The entry may have been copied here without its lock file.
            entries.append((Path(parent), Path(parent, STAMP)))

        for path, time_file in entries:
            # Another process may evict the entry at the same time.
            with suppress(OSError):
                # A time in the future would make all other entries look old.
                used_s = min(time_file.stat().st_mtime, time.time())
                yield _Entry(path=path, used_s=used_s, num_bytes=_measure_size(path))


def _measure_size(folder: Path) -> int:
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            num_bytes += Path(parent, name).stat().st_size
    return num_bytes


def _evict(path: Path) -> bool:
    """Remove an entry unless a process uses it. Return whether it was removed."""
    is_evicted = False
    with suppress(OSError), partial_folder(path) as trash:
        lock = _lock_of(path)
        os.close(os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
        with try_lock(lock) as is_free:
            if is_free:
                if path.exists():
                    path.rename(trash)
                is_evicted = True
                lock.unlink()
    return is_evicted


_LOCK = ".lock"


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)


def _release(locks: Mapping[Path, int]) -> None:
    for lock in locks.values():
        os.close(lock)
