"""Files of ids with a number each: records of (how many, numbers, ids), appended and read in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from dglx_dist.ingest.id_hash import text_buffers
from dglx_dist.records import Array

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
