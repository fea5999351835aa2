"""Store named tensors as row files, with one Arrow file per writer and tensor, and one index over all files.

A file holds some consecutive rows from a tensor. Readers may ask for any rows, so there may be more or fewer
readers than writers. Callers write into a partial folder, see :mod:`dglx_dist.data.storage.files`.
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
    """A file with rows ``first`` to ``first + num_rows - 1`` from the tensor ``name``."""

    name: str
    first: Annotated[int, Within(0)]
    num_rows: Annotated[int, Within(0)]
    dtype: str
    row_shape: tuple[Annotated[int, Within(0)], ...]
    path: str
    """Path relative to the folder."""
    num_bytes: int
    checksum: str
    """CRC-32 of all bytes, as eight hexadecimal digits."""

    @property
    def info(self) -> ColumnInfo:
        return ColumnInfo(dtype=self.dtype, row_shape=self.row_shape)

    @property
    def last(self) -> int:
        """The row after this file's last one."""
        return self.first + self.num_rows


@dataclass(frozen=True, kw_only=True)
class SavedRows:
    """One tensor in an index."""

    name: str
    info: ColumnInfo
    files: tuple[RowFile, ...]
    """Files in row order, without gaps."""

    @property
    def num_rows(self) -> int:
        return self.files[-1].last

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.info.row_shape)


@dataclass(frozen=True, kw_only=True)
class RowIndex:
    """The tensors in a folder."""

    tensors: Mapping[str, SavedRows]
    facts: Mapping[str, object]
    """JSON values that the writer passed to :func:`write_index`."""

    def tensor(self, name: str, folder: Path) -> SavedRows:
        """Return one tensor. Raise StorageError if it does not exist."""
        if name not in self.tensors:
            names = ", ".join(map(repr, self.tensors)) or "none"
            raise StorageError(f"{folder} has no tensor {name!r} (known: {names}); give another name")
        return self.tensors[name]


def write_rows(
    folder: Path, name: str, first: int, rows: Array, *, info: ColumnInfo | None = None
) -> RowFile:
    """Write the (n, *row) ``rows`` from row ``first`` on as one file, and return its index entry.

    Each writer calls this for its own range, even if the range is empty. bfloat16 rows are passed as uint16
    with their ``info``. Raises ConfigError if this dtype cannot be stored, and OSError if the file cannot be
    written.
    """
    if info is None:
        info = make_column_info(rows, name)
    path = f"{safe_name(name)}.{first}-{first + len(rows)}{SUFFIX}"
    file = FileInfo(num_bytes=0, checksum="")
    # An empty range gets no file, because two writers may both have an empty range at the same row.
    if len(rows):
        file = write_column(folder / path, info, len(rows), [rows])
        synchronise(folder / path)  # Another machine may publish the folder.
    return RowFile(name=name, first=first, num_rows=len(rows), path=path, **asdict(info), **asdict(file))


def write_index(folder: Path, files: Iterable[RowFile], facts: Mapping[str, object]) -> None:
    """Write one index for all writers' files. Call this in one writer after all have finished.

    ``files`` may be in any order. Raises StorageError if a tensor's files overlap, have gaps or differ in
    dtype or row shape.
    """
    index = _build_index(folder, files, facts)
    entries = [asdict(file) for tensor in index.tensors.values() for file in tensor.files]
    body = {"version": VERSION, "facts": dict(facts), "files": entries}
    text = json.dumps({"checksum": f"{checksum_of(body):08x}", **body}, indent=1)
    with replace_atomically(folder / INDEX) as temporary_path:
        temporary_path.write_text(text, encoding="utf-8")


def read_index(folder: Path) -> RowIndex:
    """Read the index in ``folder``. Raise StorageError if it is missing, damaged or in another version."""
    path = folder / INDEX
    try:
        top = Fields.parse(read_small_file(path), INDEX)
        body = dict(top.mapping)
        body.pop("checksum", None)
        if top.text("checksum") != f"{checksum_of(body):08x}":
            raise top.error("its checksum differs")

        version = top.integer("version")
        facts = top.nested_fields("facts").mapping
        files = top.value("files", tuple[RowFile, ...])
        for file in files:
            if Path(file.path).name != file.path:
                raise top.error("it names files outside the folder")
            if file.dtype not in DTYPES:
                raise top.error("it names a dtype that no tensor has")
    except FileNotFoundError:
        raise StorageError(
            f"{folder} has no {INDEX}: nothing was saved there; give the folder of a finished save"
        ) from None
    except (OSError, ConfigError) as problem:
        raise StorageError(f"{path} is damaged ({problem}); use another copy") from problem

    if version != VERSION:
        raise StorageError(f"{path} has version {version}, this package reads {VERSION}; save it again")
    return _build_index(folder, files, facts)


def check_replaceable(folder: Path) -> None:
    """Raise StorageError if ``folder`` holds anything other than saved rows."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise StorageError(f"{folder} is a file; choose another folder")

    names = sorted(path.name for path in folder.iterdir())
    foreign_names = [name for name in names if name != INDEX and not name.endswith(SUFFIX)]
    if names and INDEX not in names:
        foreign_names = foreign_names or names
    if foreign_names:
        raise StorageError(
            f"{folder} has files other than saved rows, such as {foreign_names[0]!r}; "
            "choose another folder, or empty it"
        )


def check_rows(folder: Path, saved: SavedRows, first: int, last: int) -> None:
    """Raise StorageError if a file with some of the rows ``first`` to ``last - 1`` fails its checksum."""
    for file in _find_overlapping(saved, first, last):
        expected = FileInfo(num_bytes=file.num_bytes, checksum=file.checksum)
        check_file(folder / file.path, expected, "use another copy")


def read_rows(folder: Path, saved: SavedRows, first: int, last: int, out: Array) -> None:
    """Copy the rows ``first`` to ``last - 1`` into the (last - first, *row) ``out``, bfloat16 as uint16.

    Call :func:`check_rows` first. Raises StorageError if a file or the tensor does not have these rows.
    """
    if not 0 <= first <= last <= saved.num_rows:
        raise StorageError(
            f"{folder} has {saved.num_rows} rows of {saved.name!r}, but not rows {first} to "
            f"{last - 1}; load it into a tensor of its shape"
        )

    for file in _find_overlapping(saved, first, last):
        start = max(first, file.first)
        stop = min(last, file.last)
        rows = read_column(folder / file.path, file.name, saved.info, file.num_rows)
        selected_rows = rows[start - file.first : stop - file.first]
        np.copyto(out[start - first : stop - first], selected_rows, casting="no")


def _find_overlapping(saved: SavedRows, first: int, last: int) -> list[RowFile]:
    """Return the files with at least one row from ``first`` to ``last - 1``."""
    return [file for file in saved.files if file.num_rows and file.first < last and file.last > first]


def _build_index(folder: Path, files: Iterable[RowFile], facts: Mapping[str, object]) -> RowIndex:
    """Group files by tensor. Raise StorageError unless a tensor's files hold each row once, in one format."""
    files_by_tensor: dict[str, list[RowFile]] = {}
    for file in files:
        files_by_tensor.setdefault(file.name, []).append(file)

    tensors = {}
    for name, tensor_files in files_by_tensor.items():
        # An empty range sorts before the file that begins at the same row.
        tensor_files.sort(key=lambda file: (file.first, file.last))
        info = tensor_files[0].info
        next_row = 0
        for file in tensor_files:
            if file.first != next_row or file.info != info:
                raise StorageError(
                    f"{folder}: row {next_row} of the tensor {name!r} should be next, but "
                    f"{file.path} has {file.dtype} rows of shape {file.row_shape} from "
                    f"{file.first} to {file.last - 1}; save it again"
                )
            next_row = file.last
        tensors[name] = SavedRows(name=name, info=info, files=tuple(tensor_files))

    return RowIndex(tensors=tensors, facts=facts)
