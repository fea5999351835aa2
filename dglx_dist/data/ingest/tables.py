"""Tables of many CSV or Parquet files, read a piece at a time."""

import csv
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from dglx_dist.data.ingest.config import FileSet
from dglx_dist.data.tables import TableColumn, as_numpy, check_names, open_table, plain
from dglx_dist.data.validate import check_finite
from dglx_dist.errors import DatasetError
from dglx_dist.records import Array

_MIN_ROW_BYTES = 32
_MAX_ROWS = 1 << 16
_MIN_BLOCK, _MAX_BLOCK = 1 << 16, 1 << 20
_PROBED_ROWS = 1 << 8
_LINES = 1 << 12
LINE_COLUMN = "id"
"""The only column of files with one text per line."""
_TEXTS = "BYTE_ARRAY"
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
"""Parquet type -> bytes of one value in memory."""


@dataclass(frozen=True, kw_only=True)
class TablePiece:
    """Some rows of one file."""

    row: int
    """Number of the first row in the table."""
    columns: dict[str, TableColumn]
    """By name; all columns of a CSV file are texts as written."""
    num_rows: int


class PiecewiseTable:
    """The files of one node or edge type, read about ``batch_bytes`` at a time; :meth:`check` comes first."""

    def __init__(self, files: FileSet, batch_bytes: int) -> None:
        self.files = files
        self._batch_bytes = batch_bytes
        self._ends: list[int] = []

    @property
    def num_rows(self) -> int:
        """Valid after :meth:`count` or all :meth:`pieces`, as :meth:`locate`."""
        return self._ends[-1] if self._ends else 0

    def pieces(self, names: Sequence[str]) -> Iterator[TablePiece]:
        """Yield the columns ``names`` of all rows in order; without names, pieces have a row count only."""
        row, ends = 0, []
        for path in self.files.paths:
            first = row
            for batch in self._read(path, list(dict.fromkeys(names))):
                if not batch.num_rows:
                    continue
                columns = {
                    name: TableColumn(plain(batch.column(name)), name, str(path), row - first)
                    for name in names
                }
                yield TablePiece(row=row, columns=columns, num_rows=batch.num_rows)
                row += batch.num_rows
            ends.append(row)
        self._ends = ends

    def count(self) -> int:
        """Return the number of rows; reads CSV files in full."""
        if self.files.format == "csv":
            return sum(piece.num_rows for piece in self.pieces([]))
        self._ends = list(accumulate(_metadata(path).num_rows for path in self.files.paths))
        return self.num_rows

    def locate(self, row: int) -> tuple[Path, int]:
        """Return the file of a row and its number there."""
        at = bisect_right(self._ends, row)
        return self.files.paths[at], row - (self._ends[at - 1] if at else 0)

    def check(self, names: Sequence[str]) -> None:
        """Raise DatasetError unless every file is readable and has each of these columns once."""
        for path in self.files.paths:
            check_names(self.names(path), names, str(path))

    def has(self, name: str) -> bool:
        return all(name in self.names(path) for path in self.files.paths)

    def names(self, path: Path) -> list[str]:
        is_csv = self.files.format == "csv"
        return _header(path, self.files.separator) if is_csv else list(_schema(path).names)

    def is_whole_number(self, name: str) -> bool:
        """Whether every file holds ``name`` as whole numbers; CSV columns are texts."""
        if self.files.format == "csv":
            return False
        return all(pa.types.is_integer(_schema(path).field(name).type) for path in self.files.paths)

    def _read(self, path: Path, names: list[str]) -> Iterator[Any]:
        if self.files.format == "lines":
            return _read_lines(path)
        return (self._read_csv if self.files.format == "csv" else self._read_parquet)(path, names)

    def _read_parquet(self, path: Path, names: list[str]) -> Iterator[Any]:
        names = names or _schema(path).names[:1]
        with (
            open_table(path, "parquet") as source,
            pyarrow.parquet.ParquetFile(source, buffer_size=1 << 16, pre_buffer=False) as file,
        ):
            for number in range(file.metadata.num_row_groups):
                row_bytes = max(_row_bytes(file, number, names), _MIN_ROW_BYTES)
                rows = min(max(self._batch_bytes // row_bytes, 1), _MAX_ROWS)
                yield from file.iter_batches(
                    batch_size=rows, row_groups=[number], columns=names, use_threads=False
                )

    def _block_bytes(self) -> int:
        # Arrow reads 32 blocks ahead.
        return min(max(self._batch_bytes // 4, _MIN_BLOCK), _MAX_BLOCK)

    def _read_csv(self, path: Path, names: list[str]) -> Iterator[Any]:
        names = names or _header(path, self.files.separator)[:1]
        with (
            open_table(path, "csv", self._block_bytes()) as source,
            pyarrow.csv.open_csv(
                source,
                read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=self._block_bytes()),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=self.files.separator, newlines_in_values=True
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    include_columns=names, column_types=dict.fromkeys(names, pa.string())
                ),
            ) as reader,
        ):
            yield from reader


def _read_lines(path: Path) -> Iterator[Any]:
    # Empty lines are no rows.
    try:
        with path.open(encoding="utf-8-sig") as file:
            texts = (text.strip() for text in file if text.strip())
            ids = (_id_of_line(text, path, row) for row, text in enumerate(texts))
            while piece := list(islice(ids, _LINES)):
                yield pa.record_batch([pa.array(piece, pa.large_string())], [LINE_COLUMN])
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{path}: holds no text with one id a line; for a table, give custom_split_filenames the column"
        ) from error


def _id_of_line(text: str, path: Path, row: int) -> str:
    if text[0] not in '"[{':
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, str):
        raise DatasetError(f"{path}: row {row}: {text[:60]!r} is not a node id; write one id a line")
    return value


def _row_bytes(file: Any, number: int, names: Sequence[str]) -> int:
    """Return the approximate bytes of a row of a row group in memory.

    The file stores repeated values once, so the size in memory follows from the number of values; for texts
    with a dictionary, a few rows are read as a sample.
    """
    group = file.metadata.row_group(number)
    total, texts = 0, []
    for i in range(group.num_columns):
        column = group.column(i)
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names):
            width = _WIDTHS.get(column.physical_type, file.schema.column(i).length)
            total += max(column.total_uncompressed_size, column.num_values * width)
            if column.physical_type == _TEXTS and column.has_dictionary_page:
                texts.append(column.path_in_schema)
    probe = 0
    if texts and group.num_rows:
        rows = file.iter_batches(
            batch_size=_PROBED_ROWS, row_groups=[number], columns=texts, use_threads=False
        )
        first = next(rows)
        probe = sum(plain(column).nbytes for column in first.columns) // first.num_rows
    return int(total // max(group.num_rows, 1)) + probe


def _schema(path: Path) -> Any:
    return _metadata(path).schema.to_arrow_schema()


def _metadata(path: Path) -> Any:
    with open_table(path, "parquet") as file:
        return pyarrow.parquet.read_metadata(file)


def _header(path: Path, separator: str) -> list[str]:
    with open_table(path, "csv"), path.open(newline="", encoding="utf-8-sig") as file:
        return next(csv.reader(file, delimiter=separator), [])


_WHOLE = "^(0|-?[1-9][0-9]*)$"


def numbers_of_text(column: TableColumn, separator: str | None = None) -> Array:
    """Return texts as (K,) float64, or as (K, F) where each holds F numbers between separators."""
    column.refuse_gaps()
    width, values = None, column.values
    if separator is not None:
        lists = pc.split_pattern(values, separator)
        width, values = column.list_width(lists), lists.flatten()
    trimmed = pc.utf8_trim_whitespace(values)
    try:
        numbers = as_numpy(trimmed.cast(pa.float64()))
    except pa.ArrowInvalid:
        at = _first_non_number(trimmed)
        problem = "is not a number; correct the table (to_categorical encodes features that are texts)"
        raise column.error(f"{values[at].as_py()!r} {problem}", at // (width or 1)) from None
    numbers = numbers if width is None else numbers.reshape(-1, width)
    check_finite(numbers, column.name, column.where, column.first_row)
    return numbers


def ids_of(column: TableColumn, *, is_text: bool) -> Any:
    """Return ids as a pyarrow large_string array, or int64 where ``is_text`` is False."""
    column.refuse_non_ids()
    if is_text:
        texts = column.values.cast(pa.large_string())
        column.refuse(as_numpy(pc.equal(texts, "")), "is empty", "node id ")
        return texts
    if column.is_text:
        # Arrow also parses 0x10 and 007, which would be other ids when written back.
        odd = ~as_numpy(pc.match_substring_regex(column.values, _WHOLE))
        rows = "their row numbers where they have no node_id_col"
        column.refuse(odd, f"is not a whole number, as those of its nodes are ({rows})", "node id ")
    return column.as_int64()


def _first_non_number(texts: Any) -> int:
    for row, text in enumerate(texts.to_pylist()):
        try:
            pa.scalar(text).cast(pa.float64())
        except pa.ArrowInvalid:
            return row
    raise AssertionError("every text is a number by itself")
