"""How much memory each step may take, and how much was taken."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
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
"""A word of each byte then lies in memory that is used again and again, and needs no new one."""
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def bucket_of(ids: Any, num_buckets: int) -> Array:
    """Return (K,) int64 in [0, num_buckets) for ``ids``: K pyarrow int64, or large_string and none empty."""
    if pa.types.is_integer(ids.type):
        words = mixed(ids.to_numpy(zero_copy_only=False).astype(np.uint64))
    else:
        offsets, _ = text_buffers(ids)
        place_words = mixed(np.arange(np.diff(offsets).max(initial=0), dtype=np.uint64))
        firsts = np.flatnonzero(np.diff(offsets[:-1] // _BYTES_AT_ONCE, prepend=-1)).tolist()
        pieces = [
            _text_words(ids.slice(first, last - first), place_words)
            for first, last in zip(firsts, [*firsts[1:], len(ids)], strict=True)
        ]
        words = np.concatenate(pieces or [np.empty(0, np.uint64)])
    return (words % np.uint64(num_buckets)).astype(np.int64)


def mixed(words: Array) -> Array:
    """Return splitmix64's output for each of ``words`` ((K,) uint64)."""
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


def _text_words(ids: Any, place_words: Array) -> Array:
    """Return (K,) words: the sum over a text's bytes of byte times the word of its place, mixed."""
    offsets, data = text_buffers(ids)
    lengths = np.diff(offsets)
    places = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    with np.errstate(over="ignore"):
        products = place_words[places] * (data.astype(np.uint64) + np.uint64(1))
        sums = np.add.reduceat(products, offsets[:-1])
    return mixed(sums + lengths.astype(np.uint64))


_TEXT, _INTEGER = 1, 0


def append_ids(folder: Path, bucket: Array, numbers: Array, ids: Any) -> None:
    """Append each id to the file of its bucket.

    Args:
        folder: Of the files ``<bucket>.ids``.
        bucket: (K,) of each id.
        numbers: (K,) int64 of each id.
        ids: K pyarrow int64 or large_string values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = np.argsort(bucket, kind="stable")
    in_order = bucket[order]
    ids, numbers = ids.take(pa.array(order)), numbers[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        with (folder / f"{in_order[start]}.ids").open("ab") as file:
            _write(file, numbers[start:end], ids.slice(start, end - start))


def read_ids(path: Path, most_bytes: int | None) -> Iterator[tuple[Array, Any]]:
    """Yield (numbers, ids) in the order in which they were appended; nothing for a file that is not there.

    Args:
        path: The file.
        most_bytes: About how much is read at a time; None: all of it.
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


_MMAP_THRESHOLD = -3
"""Its number in <malloc.h>."""
_LARGE = 1 << 17

CODE = 48 * 2**20
"""What libraries have still to read of their own code, and buffers that do not depend on the limit."""
PROGRAM = 192 * 2**20
"""About what Python and its libraries take, with :data:`CODE`, for advice."""
SHARES = 6
"""In how many shares of its memory a step thinks, see :attr:`Budget.bucket`."""
LEAST_WORK = 24 * 2**20
"""Bytes beside the program itself, below which pieces become too small to be worth anything."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What ingesting may hold beside the program: one step at a time, each a fixed share."""

    work: int

    @property
    def batch(self) -> int:
        """Bytes of table rows read at a time; turning them into arrays takes some times as much."""
        return self.work // 32

    @property
    def bucket(self) -> int:
        """Bytes of what is sorted or looked up at a time."""
        return self.work // SHARES


def open_budget(limit: int) -> Budget:
    """Return what is left of ``limit`` bytes beside what this process holds now.

    Raises:
        ConfigError: too little is; the message names the least.
    """
    used = resident() + CODE
    if limit - used < LEAST_WORK:
        least = -(-(used + LEAST_WORK) // 2**20)
        raise ConfigError(
            f"--memory {limit // 2**20}MB leaves too little beside the {used // 2**20} MB of the program "
            f"itself; grant at least {least}MB"
        )
    return Budget(work=limit - used)


@contextmanager
def frugal() -> Iterator[None]:
    """Give freed memory back to the system meanwhile, in place of keeping it for the next step.

    Arrow's own pool keeps what it freed for a while, and glibc what is smaller than the largest piece freed
    so far: reading a column of 9 MB, a piece of 1 MB at a time, held 40 MB. The setting of glibc stays.
    """
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    _mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def give_back() -> None:
    """Return what was freed to the system; called between steps, whose small pieces fit nothing else."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _mallopt(name: int, value: int) -> None:
    # Not every C library has it.
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(name, value)


@final
class Scatter:
    """Positions are cut into ranges of which one fits into memory; a range is a file until it is read.

    Args:
        folder: Where the files lie; made here.
        num_rows: Positions are in [0, num_rows).
        dtype: Of the values.
        row_shape: Of one row.
        memory: Bytes for one range.
        fill: What stands where nothing was put.
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
        # What is read and what it becomes, side by side.
        self.range_rows = max(1, memory // (self._entry.itemsize + self._row.itemsize))

    def put(self, positions: Array, rows: Array) -> None:
        """Put (k, *row) at ``positions`` ((k,) integers); of several at one position the last stays."""
        if not len(positions):
            return
        ranges = positions // self.range_rows
        order = np.argsort(ranges, kind="stable")
        entries = np.empty(len(positions), self._entry)
        entries["at"] = positions[order]
        entries["row"] = rows[order]
        ranges = ranges[order]
        starts = np.flatnonzero(np.diff(ranges, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(ranges)], strict=True):
            with self._file(int(ranges[start])).open("ab") as file:
                entries[start:end].tofile(file)

    def chunks(self) -> Iterator[Array]:
        """Yield all rows in order, a range at a time, and delete what was read."""
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
    """Rows in one file; nothing is held in memory.

    Args:
        path: File to create.
        dtype: Of the values.
        row_shape: Of one row; () for one number.
    """

    def __init__(self, path: Path, dtype: Any, row_shape: tuple[int, ...] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self._path = path
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self.num_rows = 0

    def append(self, rows: Array) -> None:
        """Add (k, *row) at the end."""
        with self._path.open("ab") as file:
            np.ascontiguousarray(rows, dtype=self._dtype).tofile(file)
        self.num_rows += len(rows)

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows in order, at most ``num_rows`` at a time."""
        with self._path.open("rb") as file:
            left = self.num_rows
            while left:
                count = min(num_rows, left)
                values = np.fromfile(file, dtype=self._dtype, count=count * math.prod(self._row_shape))
                left -= count
                yield values.reshape(count, *self._row_shape)

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink()


@final
class Reader:
    """Takes rows of a spill from the front, as many as asked for."""

    def __init__(self, spill: Spill, num_rows: int) -> None:
        self._chunks = spill.chunks(num_rows)
        self._left: list[Array] = []

    def take(self, count: int) -> Array:
        """Return the next ``count`` rows."""
        taken: list[Array] = []
        missing = count
        while missing:
            rows = self._left.pop() if self._left else next(self._chunks)
            taken.append(rows[:missing])
            if len(rows) > missing:
                self._left.append(rows[missing:])
            missing -= len(taken[-1])
        return np.concatenate(taken) if taken else np.empty(0, np.int64)
