"""Memory budget, and files that hold what does not fit: id buckets, scattered rows and spills."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
import pyarrow as pa

from dglx_dist.data.storage.files import resident
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array

_BYTES_AT_ONCE = 1 << 13
"""Hashing expands each byte to a word; blocks of this size reuse the same memory."""
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def bucket_of(ids: Any, num_buckets: int) -> Array:
    """Return (K,) int64 in [0, num_buckets) for K pyarrow int64 or non-empty large_string ``ids``."""
    if pa.types.is_integer(ids.type):
        words = _splitmix64(ids.to_numpy(zero_copy_only=False).astype(np.uint64))
    else:
        offsets, _ = text_buffers(ids)
        position_words = _splitmix64(np.arange(np.diff(offsets).max(initial=0), dtype=np.uint64))
        firsts = np.flatnonzero(np.diff(offsets[:-1] // _BYTES_AT_ONCE, prepend=-1)).tolist()
        pieces = [
            _text_words(ids.slice(first, last - first), position_words)
            for first, last in zip(firsts, [*firsts[1:], len(ids)], strict=True)
        ]
        words = np.concatenate(pieces or [np.empty(0, np.uint64)])
    return (words % np.uint64(num_buckets)).astype(np.int64)


def _splitmix64(words: Array) -> Array:
    # Not the compiled kernel of keyed_random: loading a compiler would count against the memory budget.
    with np.errstate(over="ignore"):
        words = words + _GOLDEN
        words = (words ^ (words >> np.uint64(30))) * _MIX_1
        words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def text_buffers(ids: Any) -> tuple[Array, Array]:
    """Return (K + 1,) int64 offsets from 0 and the (offsets[-1],) bytes of a large_string array."""
    _, offsets, data = ids.buffers()
    ends = np.frombuffer(offsets, np.int64)[ids.offset : ids.offset + len(ids) + 1]
    first, last = int(ends[0]), int(ends[-1])
    values = np.frombuffer(data, np.uint8)[first:last] if data is not None else np.empty(0, np.uint8)
    return ends - first, values


def _text_words(ids: Any, position_words: Array) -> Array:
    """Return (K,) hashes: the mixed sum over a text's bytes of byte times the word of its position."""
    offsets, data = text_buffers(ids)
    lengths = np.diff(offsets)
    positions = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    with np.errstate(over="ignore"):
        products = position_words[positions] * (data.astype(np.uint64) + np.uint64(1))
        sums = np.add.reduceat(products, offsets[:-1])
    return _splitmix64(sums + lengths.astype(np.uint64))


def runs(values: Array) -> Iterator[tuple[int, slice]]:
    """Yield each run of equal values in an ascending (K,) integer array: the value and its positions."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(values)], strict=True):
        yield int(values[start]), slice(start, end)


_TEXT, _INTEGER = 1, 0


def append_ids(folder: Path, bucket: Array, numbers: Array, ids: Any) -> None:
    """Append (K,) int64 numbers and K pyarrow int64 or large_string ids to the files ``<bucket>.ids``."""
    folder.mkdir(parents=True, exist_ok=True)
    order = np.argsort(bucket, kind="stable")
    ids, numbers = ids.take(pa.array(order)), numbers[order]
    for number, run in runs(bucket[order]):
        with (folder / f"{number}.ids").open("ab") as file:
            _write(file, numbers[run], ids[run])


def read_ids(path: Path, most_bytes: int | None) -> Iterator[tuple[Array, Any]]:
    """Yield (numbers, ids) in the order in which they were appended; nothing if the file does not exist.

    About ``most_bytes`` are read at a time; None: all.
    """
    if not path.is_file():
        return
    numbers: list[Array] = []
    ids: list[Any] = []
    held = 0
    with path.open("rb") as file:
        while record := _read(file):
            numbers.append(record[0])
            ids.append(record[1])
            held += record[0].nbytes + record[1].nbytes
            if most_bytes is not None and held >= most_bytes:
                yield np.concatenate(numbers), pa.concat_arrays(ids)
                numbers, ids, held = [], [], 0
    if numbers:
        yield np.concatenate(numbers), pa.concat_arrays(ids)


def _write(file: BinaryIO, numbers: Array, ids: Any) -> None:
    is_text = not pa.types.is_integer(ids.type)
    np.array([len(ids), _TEXT if is_text else _INTEGER], np.int64).tofile(file)
    numbers.astype(np.int64, copy=False).tofile(file)
    if not is_text:
        ids.to_numpy(zero_copy_only=False).tofile(file)
        return
    offsets, data = text_buffers(ids)
    offsets.tofile(file)
    data.tofile(file)


def _read(file: BinaryIO) -> tuple[Array, Any] | None:
    head = np.fromfile(file, np.int64, 2)
    if not len(head):
        return None
    count = int(head[0])
    numbers = np.fromfile(file, np.int64, count)
    if head[1] == _INTEGER:
        return numbers, pa.array(np.fromfile(file, np.int64, count))
    offsets = np.fromfile(file, np.int64, count + 1)
    data = np.fromfile(file, np.uint8, int(offsets[-1]))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return numbers, pa.Array.from_buffers(pa.large_string(), count, buffers)


_M_MMAP_THRESHOLD = -3
"""Parameter number in <malloc.h>."""
_MMAP_THRESHOLD_BYTES = 1 << 17

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
    """Memory for ingesting beside the program itself; steps run one at a time."""

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
    """Return the budget: ``limit`` bytes minus the memory of this process now.

    Raises:
        ConfigError: it is below the minimum, which the message names.
    """
    used = resident() + LIBRARY_BYTES
    if limit - used < MIN_WORK_BYTES:
        least = -(-(used + MIN_WORK_BYTES) // 2**20)
        raise ConfigError(
            f"--memory {limit // 2**20}MB leaves too little beside the {used // 2**20} MB of the program "
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
    # Not every C library has mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def release_memory() -> None:
    """Return freed memory to the system; called between steps, since malloc does not reuse small pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._num_rows = num_rows
        self._entry = np.dtype([("at", np.int64), ("row", dtype, row_shape)])
        self._row = np.dtype((dtype, row_shape))
        self._fill = fill
        # The entries that are read and the rows that they become are in memory at the same time.
        self.range_rows = max(1, memory // (self._entry.itemsize + self._row.itemsize))

    def put(self, positions: Array, rows: Array) -> None:
        """Put (k, *row) at ``positions`` ((k,) integers); the last row at a position wins."""
        if not len(positions):
            return
        ranges = positions // self.range_rows
        order = np.argsort(ranges, kind="stable")
        entries = np.empty(len(positions), self._entry)
        entries["at"] = positions[order]
        entries["row"] = rows[order]
        for number, run in runs(ranges[order]):
            with self._file(number).open("ab") as file:
                entries[run].tofile(file)

    def chunks(self) -> Iterator[Array]:
        """Yield all rows in order, a range at a time, and delete its file."""
        for first in range(0, self._num_rows, self.range_rows):
            count = min(self.range_rows, self._num_rows - first)
            rows = np.full((count, *self._row.shape), self._fill, dtype=self._row.base)
            path = self._file(first // self.range_rows)
            if path.exists():
                entries = np.fromfile(path, dtype=self._entry)
                rows[entries["at"] - first] = entries["row"]
                path.unlink()
                del entries
            yield rows

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.rows"


@final
class Spill:
    """Rows in one new file, none in memory."""

    def __init__(self, path: Path, dtype: Any, row_shape: tuple[int, ...] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self._path = path
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self.num_rows = 0

    def append(self, rows: Array) -> None:
        with self._path.open("ab") as file:
            np.ascontiguousarray(rows, dtype=self._dtype).tofile(file)
        self.num_rows += len(rows)

    def extend(self, chunks: Iterable[Array]) -> Spill:
        for rows in chunks:
            self.append(rows)
        return self

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows in order, at most ``num_rows`` at a time."""
        with self._path.open("rb") as file:
            left = self.num_rows
            while left:
                count = min(num_rows, left)
                values = np.fromfile(file, dtype=self._dtype, count=count * math.prod(self._row_shape))
                left -= count
                yield values.reshape(count, *self._row_shape)


@final
class SpillReader:
    """Reads rows of a spill in order, any number at a time."""

    def __init__(self, spill: Spill, num_rows: int) -> None:
        self._chunks = spill.chunks(num_rows)
        self._left: list[Array] = []

    def take(self, count: int) -> Array:
        taken: list[Array] = []
        missing = count
        while missing:
            rows = self._left.pop() if self._left else next(self._chunks)
            taken.append(rows[:missing])
            if len(rows) > missing:
                self._left.append(rows[missing:])
            missing -= len(taken[-1])
        return np.concatenate(taken) if taken else np.empty(0, np.int64)
