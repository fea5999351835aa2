"""Named tensors as row files: one Arrow file per writer and tensor, with one index over all files.

A file holds a range of a tensor's rows, and readers may read any ranges, so the number of readers may differ
from the number of writers. Callers write into a partial folder, see :mod:`dglx_dist.data.storage.files`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from dglx_dist.data.json_fields import Fields, Within
from dglx_dist.data.storage.arrays import checksum_of
from dglx_dist.data.storage.columns import (
    DTYPES,
    FileInfo,
    check_file,
    make_column_info,
    read_column,
    safe_name,
    write_column,
)
from dglx_dist.data.storage.files import read_small_file, replace_atomically, synchronise
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import Array, ColumnInfo

INDEX = "index.json"
SUFFIX = ".arrow"
"""Suffix of row files."""
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """One file: the rows ``first`` to ``first + num_rows - 1`` of the tensor ``name``."""

    name: str
    first: Annotated[int, Within(0)]
    num_rows: Annotated[int, Within(0)]
    dtype: str
    row_shape: tuple[Annotated[int, Within(0)], ...]
    path: str
    """Relative to the folder."""
    num_bytes: int
    checksum: str
    """CRC-32 of all bytes, eight hexadecimal digits."""

    @property
    def info(self) -> ColumnInfo:
        return ColumnInfo(dtype=self.dtype, row_shape=self.row_shape)

    @property
    def last(self) -> int:
        """The row after the last one of this file."""
        return self.first + self.num_rows


@dataclass(frozen=True, kw_only=True)
class SavedRows:
    """One tensor of an index."""

    name: str
    info: ColumnInfo
    files: tuple[RowFile, ...]
    """In row order, without gaps."""

    @property
    def num_rows(self) -> int:
        return self.files[-1].last

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.info.row_shape)


@dataclass(frozen=True, kw_only=True)
class RowIndex:
    """The tensors of a folder."""

    tensors: Mapping[str, SavedRows]
    facts: Mapping[str, object]
    """JSON values of the writer."""

    def tensor(self, name: str, folder: Path) -> SavedRows:
        """Return one tensor; StorageError listing the known names if it does not exist."""
        if name not in self.tensors:
            known = ", ".join(map(repr, self.tensors)) or "none"
            raise StorageError(
                f"{folder} holds no tensor {name!r} (known: {known}); give another name or folder"
            )
        return self.tensors[name]


def write_rows(
    folder: Path, name: str, first: int, rows: Array, *, info: ColumnInfo | None = None
) -> RowFile:
    """Write the (n, *row) ``rows`` from row ``first`` on as one file, and return its index entry.

    Not collective: each writer calls it for its own range, also an empty one. ``info`` is required for
    bfloat16, which is passed as uint16.

    Raises:
        ConfigError: values of this dtype cannot be stored.
        OSError: the file cannot be written.
    """
    info = info or make_column_info(rows, name)
    path = f"{safe_name(name)}.{first}-{first + len(rows)}{SUFFIX}"
    written = FileInfo(num_bytes=0, checksum="")
    if len(rows):  # two writers may have an empty range at the same row
        written = write_column(folder / path, info, len(rows), [rows])
        synchronise(folder / path)  # who publishes the folder may be on another machine
    return RowFile(name=name, first=first, num_rows=len(rows), path=path, **asdict(info), **asdict(written))


def write_index(folder: Path, files: Iterable[RowFile], facts: Mapping[str, object]) -> None:
    """Write the index over the files of all writers, in any order; one writer calls it last.

    Raises:
        StorageError: the files of a tensor overlap, have gaps or differ in dtype or row shape.
    """
    index = _index_of(folder, files, facts)
    lines = [asdict(file) for tensor in index.tensors.values() for file in tensor.files]
    body = {"version": VERSION, "facts": dict(facts), "files": lines}
    text = json.dumps({"checksum": f"{checksum_of(body):08x}", **body}, indent=1)
    with replace_atomically(folder / INDEX) as partial:
        partial.write_text(text, encoding="utf-8")


def read_index(folder: Path) -> RowIndex:
    """Return the index of ``folder``; StorageError if it is missing, damaged or of another version."""
    path = folder / INDEX
    try:
        top = Fields.parse(read_small_file(path), INDEX)
        body = {name: value for name, value in top.mapping.items() if name != "checksum"}
        if top.text("checksum") != f"{checksum_of(body):08x}":
            raise top.error("its checksum differs")
        version, facts = top.integer("version"), top.nested("facts").mapping
        files = top.value("files", tuple[RowFile, ...])
        if any(Path(file.path).name != file.path for file in files):
            raise top.error("it names files outside the folder")
        if any(file.dtype not in DTYPES for file in files):
            raise top.error("it names a dtype that no tensor has")
    except FileNotFoundError:
        raise StorageError(
            f"{folder} has no {INDEX}: nothing was saved there; give the folder of a finished save"
        ) from None
    except (OSError, ConfigError) as problem:
        raise StorageError(f"{path} is damaged ({problem}); use another copy") from problem
    if version != VERSION:
        raise StorageError(f"{path} has version {version}, this package reads {VERSION}; save it again")
    return _index_of(folder, files, facts)


def check_replaceable(folder: Path) -> None:
    """Raise StorageError if ``folder`` holds anything other than saved rows."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise StorageError(f"{folder} is a file; choose another folder")
    names = sorted(path.name for path in folder.iterdir())
    other = [name for name in names if name != INDEX and not name.endswith(SUFFIX)]
    if other or (names and INDEX not in names):
        raise StorageError(
            f"{folder} holds something else than saved rows, such as {(other or names)[0]!r}; choose another "
            "folder, or empty it"
        )


def check_rows(folder: Path, saved: SavedRows, first: int, last: int) -> None:
    """Compare the files of the rows ``first`` to ``last - 1`` with their checksums, or raise StorageError."""
    for file in _overlapping(saved, first, last):
        expected = FileInfo(num_bytes=file.num_bytes, checksum=file.checksum)
        check_file(folder / file.path, expected, "use another copy")


def read_rows(folder: Path, saved: SavedRows, first: int, last: int, out: Array) -> None:
    """Copy the rows ``first`` to ``last - 1`` into ``out``, (last - first, *row); bfloat16 as uint16.

    Call :func:`check_rows` before. StorageError if a file or the tensor has no such rows.
    """
    if not 0 <= first <= last <= saved.num_rows:
        raise StorageError(
            f"{folder} has {saved.num_rows} rows of {saved.name!r}, not those from {first} to {last - 1}; "
            "load it into a tensor of its shape"
        )
    for file in _overlapping(saved, first, last):
        begin, end = max(first, file.first), min(last, file.last)
        rows = read_column(folder / file.path, file.name, saved.info, file.num_rows)
        np.copyto(out[begin - first : end - first], rows[begin - file.first : end - file.first], casting="no")


def _overlapping(saved: SavedRows, first: int, last: int) -> list[RowFile]:
    return [file for file in saved.files if file.num_rows and file.first < last and file.last > first]


def _index_of(folder: Path, files: Iterable[RowFile], facts: Mapping[str, object]) -> RowIndex:
    by_name: dict[str, list[RowFile]] = {}
    for file in files:
        by_name.setdefault(file.name, []).append(file)
    tensors = {}
    for name, parts in by_name.items():
        parts.sort(key=lambda file: (file.first, file.last))
        row = 0
        for part in parts:
            if part.first != row or part.info != parts[0].info:
                raise StorageError(
                    f"{folder}: row {row} of the tensor {name!r} should follow, but {part.path} has "
                    f"{part.dtype} rows of shape {part.row_shape} from {part.first} to {part.last - 1}; "
                    "save it again"
                )
            row = part.last
        tensors[name] = SavedRows(name=name, info=parts[0].info, files=tuple(parts))
    return RowIndex(tensors=tensors, facts=facts)
