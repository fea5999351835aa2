"""Store arrays as memory-mapped Arrow IPC files, and name the files in a dataset.

A file holds one record batch with one primitive column. Its values are contiguous, so NumPy can view them in
a memory map. Dtype and shape are in the schema's metadata, because Arrow has no byte-wide booleans, no
bfloat16 and no multi-dimensional rows.
"""

import hashlib
import io
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import Array, ColumnInfo, EdgeType

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
"""Dtypes that a dataset can store, with torch's names."""

IDS = ColumnInfo(dtype="int64", row_shape=())
"""Column with ids or offsets."""
STRINGS = ColumnInfo(dtype="string", row_shape=())
"""Column with texts, read by :func:`read_strings`."""

_STORED_AS = {"bool": "uint8", "bfloat16": "uint16"}
_COLUMN = "values"


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """One file's size and checksum."""

    num_bytes: int
    checksum: str
    """CRC-32 of all bytes, as eight hexadecimal digits."""


def id_dtype(count: int) -> type[np.signedinteger]:
    """Return the dtype for ids below ``count``: int32, or int64 if they do not fit."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


@cache
def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype that holds ``dtype`` in memory, which is uint16 for bfloat16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def make_column_info(array: Array, description: str) -> ColumnInfo:
    """Describe an (N, *row) array by dtype and row shape. Raise ConfigError if the dtype cannot be stored."""
    if array.dtype.name not in DTYPES:
        raise ConfigError(
            f"{description} has dtype {array.dtype}, which a dataset cannot hold; convert it "
            f"to one of {', '.join(DTYPES)}"
        )
    return ColumnInfo(dtype=array.dtype.name, row_shape=tuple(int(size) for size in array.shape[1:]))


def write_column(path: Path, info: ColumnInfo, num_rows: int, chunks: Iterable[Array]) -> FileInfo:
    """Write a column with ``num_rows`` rows as a new file. Create its folder if it is missing.

    Each of ``chunks`` has the next (k, *row_shape) rows. bfloat16 rows are passed as bits in uint16.
    """
    stored = np.dtype(_STORED_AS.get(info.dtype, info.dtype))
    num_values = num_rows * math.prod(info.row_shape)
    num_bytes = num_values * stored.itemsize

    # Arrow lays out the file for a body that is only reserved address space. When Arrow writes the body,
    # _write_file writes the chunks instead. So the column is never in memory as a whole.
    body = pa.py_buffer(_reserve_space(num_bytes)).slice(0, num_bytes)
    values = pa.Array.from_buffers(pa.from_numpy_dtype(stored), num_values, [None, body], 0)
    metadata = {"dtype": info.dtype, "shape": json.dumps([num_rows, *info.row_shape])}
    body_chunks = _Body(map(_view_bytes, chunks), num_bytes)
    return _write_file(path, values, metadata, [body_chunks])


def text_buffers(texts: Any) -> tuple[Array, Array]:
    """Return a large_string array's (K + 1,) int64 offsets, from 0, and its (offsets[-1],) bytes."""
    _, offset_buffer, data_buffer = texts.buffers()
    # A slice shares the whole array's buffers, so its offsets need not begin with 0.
    ends = np.frombuffer(offset_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first = int(ends[0])
    last = int(ends[-1])
    if data_buffer is None:
        return ends - first, np.empty(0, np.uint8)
    return ends - first, np.frombuffer(data_buffer, np.uint8)[first:last]


def write_strings(
    path: Path, num_rows: int, num_bytes: int, offset_texts: Iterable[Any], data_texts: Iterable[Any]
) -> FileInfo:
    """Write texts as a new file, one piece at a time. Create its folder if it is missing.

    An Arrow string column has an offset buffer, followed by a buffer with UTF-8 data. So the texts are read
    twice: first for the offsets, then for the data.

    Args:
        path: The new file.
        num_rows: Number of texts.
        num_bytes: Length that all texts have together in UTF-8.
        offset_texts: The texts in order, as non-empty large_string arrays. Only their lengths are used.
        data_texts: The same arrays again. They are read when ``offset_texts`` is exhausted.
    """
    offset_bytes = 8 * (num_rows + 1)

    def iterate_offsets() -> Iterator[Array]:
        offsets = np.zeros(1, np.int64)
        yield offsets
        for texts in offset_texts:
            text_ends, _ = text_buffers(texts)
            offsets = offsets[-1] + text_ends[1:]
            yield offsets

    # As in write_column, the column that Arrow writes is only reserved address space. Arrow takes the data
    # length from the last offset, so this offset must be correct.
    offset_space = _reserve_space(offset_bytes, writable=True)
    np.frombuffer(offset_space, np.int64)[num_rows] = num_bytes
    offset_buffer = pa.py_buffer(offset_space).slice(0, offset_bytes)
    buffers = [None, offset_buffer, pa.py_buffer(_reserve_space(num_bytes))]
    column = pa.Array.from_buffers(pa.large_string(), num_rows, buffers)
    offsets_body = _Body(map(_view_bytes, iterate_offsets()), offset_bytes)
    data_body = _Body((text_buffers(texts)[1] for texts in data_texts), num_bytes)
    return _write_file(path, column, {"dtype": "string"}, [offsets_body, data_body])


def read_column(path: Path, name: str, info: ColumnInfo | None = None, num_rows: int | None = None) -> Array:
    """Memory-map one file and return its read-only (N, *row) values. Messages call it ``name``.

    Raises:
        StorageError: the file is missing or damaged, or its dtype or shape differs from ``info`` and
            ``num_rows``. An argument that is None is not compared.
    """
    column, metadata = _open_column(path, name)
    try:
        dtype = metadata["dtype"]
        shape = tuple(int(size) for size in json.loads(metadata["shape"]))
        array = _view(column, dtype, shape)
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as problem:
        raise _make_damage_error(name, path, problem) from problem

    actual = ColumnInfo(dtype=dtype, row_shape=shape[1:])
    expected = info or actual
    if actual != expected or num_rows not in (None, shape[0]):
        raise StorageError(
            f"{path} holds {dtype} of shape {shape}, but the manifest says {expected.dtype} "
            f"of shape {(num_rows, *expected.row_shape)}; partition the graph again"
        )
    return array


def read_strings(path: Path, name: str, num_rows: int) -> Array:
    """Copy the ``num_rows`` texts in one file into a unicode array. Messages call the file ``name``.

    Raises StorageError if the file is missing or damaged, or has more or fewer texts.
    """
    return np.array(_open_strings(path, name, num_rows).to_pylist(), dtype=np.str_)


def string_pieces(path: Path, name: str, num_rows: int, step: int) -> Iterator[Array]:
    """Read like :func:`read_strings`, but yield up to ``step`` texts at a time. All arrays have one dtype."""
    column = _open_strings(path, name, num_rows)
    width = 1
    for first in range(0, num_rows, step):
        texts = column.slice(first, step).to_pylist()
        width = max(width, max(map(len, texts)))

    for first in range(0, num_rows, step):
        yield np.array(column.slice(first, step).to_pylist(), dtype=f"U{width}")


def _open_strings(path: Path, name: str, num_rows: int) -> pa.Array:
    column, metadata = _open_column(path, name)
    if metadata.get("dtype") != "string" or len(column) != num_rows:
        raise StorageError(f"{path} does not hold {num_rows} strings; partition the graph again")
    try:
        column.validate(full=True)  # The text offsets are used unchecked.
    except pa.ArrowException as problem:
        raise _make_damage_error(name, path, problem) from problem
    return column


def checksum(path: Path) -> FileInfo:
    """Return a file's size and CRC-32."""
    value = 0
    num_bytes = 0
    block = bytearray(1 << 15)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            value = zlib.crc32(memoryview(block)[:count], value)
            num_bytes += count
    return FileInfo(num_bytes=num_bytes, checksum=f"{value:08x}")


def check_file(path: Path, expected: FileInfo, remedy: str) -> None:
    """Raise StorageError with ``remedy`` unless the file has the expected size and checksum."""
    try:
        if not path.is_file():  # Reading a device or a pipe may never end.
            raise FileNotFoundError("there is no such file")
        # The size is cheap to check, and tells whether the file was copied only in part.
        size = path.stat().st_size
        if size != expected.num_bytes:
            raise StorageError(f"{path} has {size} bytes instead of {expected.num_bytes}; {remedy}")
        actual = checksum(path)
    except OSError as problem:
        raise StorageError(f"{path} cannot be read ({problem}); {remedy}") from problem
    if actual != expected:
        raise StorageError(
            f"{path} is damaged: its checksum is {actual.checksum} instead of {expected.checksum}; {remedy}"
        )


class _Body(NamedTuple):
    """An Arrow buffer's bytes in chunks."""

    chunks: Iterator[Array]
    num_bytes: int


def _reserve_space(num_bytes: int, *, writable: bool = False) -> mmap.mmap:
    """Reserve address space. Physical pages are only allocated where it is accessed."""
    access = mmap.PROT_READ
    if writable:
        access |= mmap.PROT_WRITE
    return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE, prot=access)


def _view_bytes(chunk: Array) -> Array:
    return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)


class _Sink(io.RawIOBase):
    """File object that writes the real values where Arrow writes a buffer, and tracks size and checksum."""

    def __init__(self, file: BinaryIO, bodies: Sequence[_Body]) -> None:
        super().__init__()
        self._file = file
        # Arrow does not write empty buffers.
        self._bodies = [body for body in bodies if body.num_bytes]
        self._is_real = not self._bodies
        self.num_bytes = 0
        self.checksum = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        # Arrow writes column buffers as pa.Buffer, and everything else as bytes.
        if self._is_real or not isinstance(data, pa.Buffer):
            return self._put(memoryview(data))  # type: ignore[arg-type]  # any buffer
        body = self._bodies.pop(0)
        num_written = 0
        for chunk in body.chunks:
            num_written += self._put(chunk.data)
        assert num_written == body.num_bytes == data.size, "chunks do not add up to the column"
        return num_written

    def _put(self, data: memoryview) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        self.num_bytes += data.nbytes
        self._file.write(data)
        return data.nbytes


def _write_file(path: Path, values: pa.Array, metadata: dict[str, str], bodies: Sequence[_Body]) -> FileInfo:
    """Write ``values`` as an Arrow file, with the bytes from ``bodies`` in place of its buffers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([pa.field(_COLUMN, values.type, nullable=False)], metadata=metadata)

    with path.open("xb") as file:
        sink = _Sink(file, bodies)
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema) as writer:
            writer.write_batch(pa.record_batch([values], schema=schema))
    return FileInfo(num_bytes=sink.num_bytes, checksum=f"{sink.checksum:08x}")


def _open_column(path: Path, name: str) -> tuple[pa.Array, dict[str, str]]:
    try:
        with pa.memory_map(os.fsencode(path)) as source:
            reader = pa.ipc.open_file(source)
            column = reader.get_batch(0).column(_COLUMN)
            schema_metadata = reader.schema.metadata or {}
            metadata = {key.decode(): value.decode() for key, value in schema_metadata.items()}
    except FileNotFoundError as problem:
        raise StorageError(f"{path} ({name}) is missing; copy it here or partition again") from problem
    except (pa.ArrowException, OSError, ValueError, KeyError, IndexError) as problem:
        raise _make_damage_error(name, path, problem) from problem
    return column, metadata


def _view(column: pa.Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return a read-only view of an Arrow array. Raise ValueError if its type or length does not match."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    stored = np.dtype(_STORED_AS.get(dtype, dtype))
    is_complete = len(column) == math.prod(shape) and column.offset == 0
    if column.type != pa.from_numpy_dtype(stored) or not is_complete:
        raise ValueError(f"{len(column)} values of {column.type} are not {dtype} of shape {shape}")

    flat = np.empty(0, stored)
    if len(column):  # An empty array may have no buffer.
        flat = np.frombuffer(column.buffers()[1], stored, count=len(column))
    flat.flags.writeable = False
    return flat.view(numpy_dtype(dtype)).reshape(shape)


def _make_damage_error(name: str, path: Path, problem: Exception) -> StorageError:
    return StorageError(f"{path} ({name}) is damaged ({problem}); copy it again or partition the graph again")


MANIFEST = "manifest.json"
CACHE = "cache"
_MAX_NAME = 80
"""Maximum length of an encoded name. An edge type's folder joins three, and the system allows 255."""


def safe_name(name: str) -> str:
    """Encode ``name`` as a file name. All characters but letters, digits, ``_`` and ``-`` are %-encoded.

    Different names give different file names. A file name is never empty and has no dot or slash.
    """
    encoded = quote(name, safe="").replace(".", "%2E").replace("~", "%7E") or "%"
    if len(encoded) <= _MAX_NAME:
        return encoded
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{encoded[: _MAX_NAME - 34].rstrip('%')}%-{digest}"


def node_folder(part: int, ntype: str) -> str:
    return f"part{part}/nodes/{safe_name(ntype)}"


def edge_folder(part: int, etype: EdgeType) -> str:
    return f"part{part}/edges/{edge_type_name(etype)}"


def edge_type_name(etype: EdgeType) -> str:
    return ".".join(safe_name(piece) for piece in etype)


def data_path(folder: str, column: str) -> str:
    """Return the file that holds one feature, label, mask or weight."""
    return f"{folder}/data/{safe_name(column)}.arrow"
