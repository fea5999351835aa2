"""Memory budget, and files that hold what does not fit: buckets, scattered rows, spills, finished stages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
import pyarrow as pa

from dglx_dist.data.allocator import return_memory
from dglx_dist.data.storage.files import (
    PARTIAL_SUFFIX,
    discard,
    locked,
    named_failures,
    partial_folder,
    publish,
    read_small,
    remove_abandoned,
    replaced_file,
    resident,
)
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.progress import say
from dglx_dist.records import Array

LIBRARY_BYTES = 48 * 2**20
"""Library code that is not loaded yet, and buffers that do not depend on the limit."""
PROGRAM_BYTES = 192 * 2**20
"""Approximate memory of Python and its libraries, :data:`LIBRARY_BYTES` included; used in messages."""
BUDGET_SHARES = 6
"""A bucket takes one of so many shares of the budget."""
MIN_WORK_BYTES = 24 * 2**20
"""Least budget beside the program itself; with less the pieces become too small."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory beside the program itself; steps run one at a time."""

    work: int

    @property
    def batch(self) -> int:
        """Bytes of table rows read at a time; converting them takes a multiple of it."""
        return self.work // 32

    @property
    def bucket(self) -> int:
        """Bytes sorted or looked up at a time."""
        return self.work // BUDGET_SHARES


def open_budget(limit: int) -> Budget:
    """Return the budget, ``limit`` bytes minus the memory of this process now; ConfigError if too small."""
    used = resident() + LIBRARY_BYTES
    if limit - used < MIN_WORK_BYTES:
        least = -(-(used + MIN_WORK_BYTES) // 10**6)
        raise ConfigError(
            f"--memory {limit // 10**6}MB leaves too little beside the {used // 10**6} MB of the program "
            f"itself; grant at least {least}MB"
        )
    return Budget(work=limit - used)


@contextmanager
def low_memory_allocators() -> Iterator[None]:
    """Make allocators return freed memory to the system instead of keeping it.

    Arrow's own pool keeps freed memory for a while, and glibc keeps pieces smaller than the largest one freed
    so far: reading a column of 9 MB in pieces of 1 MB held 40 MB. The glibc setting is not reverted.
    """
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    release_memory()
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def release_memory() -> None:
    """Return freed memory to the system; called between steps, since malloc does not reuse small pieces."""
    return_memory(1 << 17)


def runs(values: Array) -> Iterator[tuple[int, slice]]:
    """Yield each run of equal values in an ascending (K,) integer array: the value and its positions."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    for start, end in pairwise([*starts.tolist(), len(values)]):
        yield int(values[start]), slice(start, end)


@final
class BucketFiles:
    """Records of one dtype in numbered files of a folder."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.dtype = folder, np.dtype(dtype)

    def append(self, buckets: Array, records: Array) -> None:
        """Append (K,) ``records``, each to the file that (K,) ``buckets`` names; their order is kept."""
        # NumPy sorts 16-bit keys in linear time.
        buckets = buckets.astype(np.uint16) if buckets.max(initial=0) < 1 << 16 else buckets
        order = np.argsort(buckets, kind="stable")
        records = records[order]
        for number, run in runs(buckets[order].astype(np.int64)):
            with (self._folder / str(number)).open("ab") as file:
                write_array(file, records[run])

    def take(self, bucket: int) -> Array:
        """Return the records of one file, and delete it."""
        path = self._folder / str(bucket)
        if not path.exists():
            return np.empty(0, self.dtype)
        records = np.fromfile(path, self.dtype)
        path.unlink()
        return records


@final
class Scatter:
    """Random writes to rows on disk, in files of position ranges that fit into ``memory`` bytes.

    Rows that are never put have the value ``fill``.
    """

    def __init__(
        self,
        folder: Path,
        num_rows: int,
        dtype: Any,
        row_shape: tuple[int, ...] = (),
        *,
        memory: int,
        fill: int = 0,
    ) -> None:
        self._num_rows, self._fill = num_rows, fill
        self._row = np.dtype((dtype, row_shape))
        self._files = BucketFiles(folder, [("at", np.int64), ("row", dtype, row_shape)])
        # The entries that are read and the rows that they become are in memory at the same time.
        self._range = max(1, memory // (self._files.dtype.itemsize + self._row.itemsize))

    def put(self, positions: Array, rows: Array) -> None:
        """Put (k, *row) at ``positions`` ((k,) integers); the last row at a position wins."""
        entries = np.empty(len(positions), self._files.dtype)
        entries["at"], entries["row"] = positions, rows
        self._files.append(positions // self._range, entries)

    def chunks(self) -> Iterator[Array]:
        """Yield all rows in order, a range at a time, and delete its file."""
        for first in range(0, self._num_rows, self._range):
            count = min(self._range, self._num_rows - first)
            rows = np.full((count, *self._row.shape), self._fill, dtype=self._row.base)
            entries = self._files.take(first // self._range)
            rows[entries["at"] - first] = entries["row"]
            del entries
            yield rows


def write_array(file: BinaryIO, rows: Array) -> None:
    """Append the values of ``rows``; OSError says what is wrong with the disk."""
    # Not tofile, whose error on a full disk does not say so.
    file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


def map_rows(path: Path, dtype: Any, row_shape: tuple[int, ...] = ()) -> Array:
    """Memory-map the rows (K, *row_shape) that a :class:`Spill` wrote, read-only."""
    values = math.prod(row_shape)
    if not (size := path.stat().st_size):
        return np.empty((0, *row_shape), dtype)
    flat = np.asarray(np.memmap(path, dtype, mode="r"))
    return flat.reshape(size // (values * flat.itemsize), *row_shape)


@final
class Spill:
    """Rows in one new file, none in memory."""

    def __init__(
        self, path: Path, dtype: Any, chunks: Iterable[Array] = (), row_shape: tuple[int, ...] = ()
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self.path, self._dtype, self._row_shape, self.num_rows = path, np.dtype(dtype), row_shape, 0
        for rows in chunks:
            self.append(rows)

    def append(self, rows: Array) -> None:
        with self.path.open("ab") as file:
            write_array(file, rows.astype(self._dtype, copy=False))
        self.num_rows += len(rows)

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows in order, at most ``num_rows`` at a time."""
        values = math.prod(self._row_shape)
        with self.path.open("rb") as file:
            for first in range(0, self.num_rows, num_rows):
                count = min(num_rows, self.num_rows - first)
                yield np.fromfile(file, self._dtype, count * values).reshape(count, *self._row_shape)


def spill(folder: Path, name: str, dtype: Any, chunks: Iterable[Array] = ()) -> Spill:
    """Return a new file of :func:`mapped`; ``dtype`` is part of its name."""
    return Spill(folder / f"{name}.{np.dtype(dtype).name}", dtype, chunks)


def mapped(folder: Path, name: str) -> Array:
    """Return the file of a :func:`spill` as a memory-mapped array; FileNotFoundError if there is none."""
    for path in folder.glob(f"{name}.*"):
        dtype = np.dtype(path.suffix[1:])
        # Opened for writing, so that compiled code does not have a second variant for read-only arrays.
        return np.memmap(path, dtype, "r+") if path.stat().st_size else np.empty(0, dtype)
    raise FileNotFoundError(f"there is no {name} in {folder}")


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where a graph larger than memory is worked on: a folder on disk, and the memory granted.

    Arrays of all nodes are in memory; those of edges are files in ``folder``, memory-mapped and read in
    order. The kernel drops pages of files when memory is short, so they do not count.
    """

    folder: Path
    budget: Budget

    def stage(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return ``folder / name``, which ``make`` fills unless it exists; it is complete or absent."""
        target = self.folder / name
        if not target.is_dir():
            with named_failures(self.folder), partial_folder(target) as partial:
                make(partial)
                publish(partial, target)
        return target

    def holds(self, num_bytes: int) -> bool:
        """Return whether ``num_bytes`` are within the memory granted."""
        return num_bytes <= self.budget.work

    def remaining(self, num_bytes: int, least: int, what: str) -> int:
        """Return the bytes granted beside ``num_bytes``; ConfigError if they are fewer than ``least``."""
        if not self.holds(num_bytes + least):
            needed = (num_bytes + least + PROGRAM_BYTES) // 10**6 + 1
            raise ConfigError(f"{what} takes {needed} MB of memory at least; grant --memory {needed}MB")
        return self.budget.work - num_bytes


_KEY, _LOCK = "key.json", "lock"
_IN_MEMORY = Path("/dev/shm")  # refused, not used


@contextmanager
def open_workspace(folder: Path, settings: Mapping[str, object], limit: int) -> Iterator[Workspace]:
    """Open the workspace of one job of ``limit`` bytes of memory, and remove it at the end.

    After an error or a kill its finished stages stay, and a job with the same ``settings`` (JSON values)
    takes them up; which ones is printed.

    Raises:
        ConfigError: ``folder`` is in memory, or ``limit`` is too small.
        StorageError: it holds stages of other settings or something else, is in use, or cannot be written.
    """
    folder = folder.absolute()
    if folder.resolve().is_relative_to(_IN_MEMORY):
        raise ConfigError(f"{folder} is in memory; choose a folder on a disk (--scratch DIR)")
    budget = open_budget(limit)
    with ExitStack() as stack:
        with named_failures(folder):
            folder.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in folder.iterdir()}
            if names and _LOCK not in names:
                raise StorageError(
                    f"{folder} holds something else than unfinished work; choose another --scratch"
                )
            (folder / _LOCK).touch()
            if not stack.enter_context(locked(folder / _LOCK)):
                raise StorageError(f"{folder} is in use by another process; wait for it")
            if stages := _check_key(folder, settings):
                say(f"resuming in {folder}; finished before: {', '.join(stages)}")
            remove_abandoned(folder)
        try:
            yield Workspace(folder=folder, budget=budget)
        except BaseException:
            if _stages(folder):
                say(f"finished stages are kept in {folder}: the same command resumes, or remove it")
            else:
                discard(folder)
            raise
        discard(folder)


def _stages(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in _finished(folder))


def _finished(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix == ".work":
            yield from _finished(path)
        elif path.is_dir() and path.suffix != PARTIAL_SUFFIX:
            yield path


def _check_key(folder: Path, settings: Mapping[str, object]) -> list[str]:
    # Returns the finished stages.
    path, asked = folder / _KEY, json.loads(json.dumps(settings))
    if not path.exists():
        with replaced_file(path) as partial:
            partial.write_text(json.dumps(asked, indent=1))
        return []
    try:
        found = json.loads(read_small(path))
        differing = [name for name in asked.keys() | found.keys() if asked.get(name) != found.get(name)]
    except (OSError, ValueError, AttributeError, RecursionError) as problem:
        raise StorageError(f"{path} is damaged ({problem}); remove {folder}") from problem
    if differing:
        what = ", ".join(f"{name} was {found.get(name)!r}" for name in sorted(differing))
        raise StorageError(
            f"{folder} holds unfinished work with other settings ({what}); repeat that command to finish it, "
            "or remove the folder"
        )
    return _stages(folder)
