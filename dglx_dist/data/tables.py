"""Read table columns from CSV and Parquet files, at once or in pieces."""

from __future__ import annotations

import csv
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from dglx_dist.data.times import MISSING
from dglx_dist.data.validate import check_finite, column_error
from dglx_dist.errors import DatasetError
from dglx_dist.records import LABEL, Array

_MIN_ROW_BYTES = 32
_MAX_ROWS = 1 << 16
_MIN_BLOCK = 1 << 16
_MAX_BLOCK = 1 << 20
_SAMPLE_ROWS = 1 << 8
_LINES = 1 << 12
LINE_COLUMN = "id"
"""Name for the only column in files with one text per line."""
_TEXTS = "BYTE_ARRAY"
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
"""Bytes per value in memory, by Parquet type."""


@dataclass(frozen=True)
class TableColumn:
    """Rows in one table column. Errors name file, column and row."""

    values: Any
    """pyarrow array with :func:`plain` values in one chunk."""
    name: str
    where: str
    """The file's name."""
    first_row: int = 0
    """The first value's row number in the file."""

    def error(self, problem: str, at: int | None = None) -> DatasetError:
        """Return an error about a ``problem`` in the column, or in its value number ``at``."""
        return column_error(self.where, self.name, problem, None if at is None else self.first_row + at)

    @property
    def is_text(self) -> bool:
        return bool(pa.types.is_string(self.values.type) or pa.types.is_large_string(self.values.type))

    @property
    def is_integer(self) -> bool:
        return bool(pa.types.is_integer(self.values.type))

    def part(self, first: int, count: int) -> TableColumn:
        """Return ``count`` values, starting with value number ``first``."""
        return replace(self, values=self.values.slice(first, count), first_row=self.first_row + first)

    def refuse(self, is_invalid: Array, problem: str, prefix: str = "") -> None:
        """Raise an error for the first value that the (K,) bool ``is_invalid`` marks.

        ``prefix`` comes before the value in the message.
        """
        if is_invalid.any():
            row = find_first_true(is_invalid)
            raise self.error(f"{prefix}{self.values[row].as_py()!r} {problem}", row)

    def refuse_gaps(self) -> None:
        if self.values.null_count:
            row = find_first_true(pc.is_null(self.values))
            remedy = "; without labels, write 0 and leave 'split' empty" if LABEL in self.name else ""
            raise self.error(f"is empty, or NaN, NA or null ({self.values.null_count} rows){remedy}", row)

    def refuse_non_ids(self) -> None:
        self.refuse_gaps()
        if not self.is_text and not self.is_integer:
            raise self.error(f"must hold integer or string ids; it holds {self.values.type}")

    def as_int64(self) -> Any:
        """Return integers as a pyarrow int64 array."""
        return self._cast_values(pa.int64(), "has a number beyond 64 signed bits; write texts")

    def texts(self) -> Any:
        """Return the values as a pyarrow large_string array."""
        return self._cast_values(pa.large_string(), f"holds {self.values.type}; write texts or numbers")

    def _cast_values(self, dtype: Any, problem: str) -> Any:
        try:
            return self.values.cast(dtype)
        except pa.ArrowException as error:
            raise self.error(problem) from error

    def numbers(self) -> Array:
        """Return (K,) numbers or booleans, or (K, F) if rows are lists.

        Dates become int64 seconds since 1970 in UTC, and missing dates the smallest int64.

        Raises:
            DatasetError: If numbers are missing, NaN or infinite, dates have fractions of a second, values
                are neither numbers nor dates, or lists differ in length.
        """
        if pa.types.is_date(self.values.type) or pa.types.is_timestamp(self.values.type):
            problem = "has a date with fractions of a second; round it, or write seconds as numbers"
            seconds = replace(self, values=self._cast_values(pa.timestamp("s"), problem))
            return as_numpy(seconds.values.cast(pa.int64()).fill_null(MISSING))

        self.refuse_gaps()
        types = pa.types
        values = self.values
        width = None
        if types.is_list(values.type) or types.is_large_list(values.type):
            width = self.list_width(values)
        elif types.is_fixed_size_list(values.type):
            width = values.type.list_size
        if width is not None:
            values = values.flatten()

        is_number = types.is_integer(values.type) or types.is_floating(values.type)
        if not is_number and not types.is_boolean(values.type):
            raise self.error(
                f"must hold numbers; it holds {self.values.type}. Encode it as numbers or leave it out"
            )
        if values.null_count:
            position = find_first_true(pc.is_null(values))
            raise self.error("has an empty value", position if width is None else position // width)

        array = as_numpy(values)
        if width is not None:
            array = array.reshape(len(self.values), width)
        check_finite(array, self.name, self.where, self.first_row)
        return array

    def list_width(self, lists: Any) -> int:
        """Return the length that all ``lists`` have. Raise DatasetError if they differ in length."""
        lengths = as_numpy(pc.list_value_length(lists))
        row = find_first_true(lengths != lengths[:1])
        if row:
            raise self.error(f"a list of {lengths[row]}, but row {self.first_row} has {lengths[0]}", row)
        if len(lengths) == 0:
            return 0
        return int(lengths[0])


def as_numpy(values: Any) -> Array:
    """Return a pyarrow array as a NumPy array, without a copy if possible."""
    return np.asarray(values.to_numpy(zero_copy_only=False))


def find_first_true(mask: Any) -> int:
    """Return the position of the first True, or 0 if there is none."""
    if not isinstance(mask, np.ndarray):
        mask = as_numpy(mask)
    return int(np.argmax(mask)) if len(mask) else 0


@contextmanager
def open_table(path: Path, kind: str, max_row_bytes: int = 1 << 20) -> Iterator[Any]:
    """Open a table as an Arrow file. Messages name ``max_row_bytes``, the maximum size of a row.

    Raises DatasetError if the file, or the content that the block reads, is not a table in this format.
    """
    try:
        # Arrow itself refuses paths that are not UTF-8.
        with pa.OSFile(os.fsencode(path)) as file:
            yield file
    except (pa.ArrowException, csv.Error, OSError, UnicodeDecodeError) as error:
        hint = ""
        if "straddling" in str(error):  # Arrow's word for a row that does not end within a block.
            hint = f"; close a quote, or write Parquet if a row has over {max_row_bytes >> 10} KB"
        raise DatasetError(f"{path}: not readable as a {kind} table: {error}{hint}") from error


def read_table(path: Path, is_id: Callable[[str], bool] = lambda _name: False) -> Any:
    """Read a ``.csv`` with a header line or a ``.parquet`` as a pyarrow.Table.

    ``is_id`` recognises id columns by their names. Integers in such a CSV column are read as texts if one
    begins with 0.
    """
    with open_table(path, path.suffix[1:]) as file:
        if path.suffix != ".csv":
            return pyarrow.parquet.read_table(file)
        table = pyarrow.csv.read_csv(file)

        for name, dtype in zip(table.column_names, table.schema.types, strict=True):
            if pa.types.is_binary(dtype):
                raise OSError(f"column {name!r} is not text in UTF-8; save it as UTF-8")
        return _with_written_ids(path, table, is_id)


def _with_written_ids(path: Path, table: Any, is_id: Callable[[str], bool]) -> Any:
    """Return ``table`` with ids as texts if an id that was read as a number begins with 0, like 007."""
    names = []
    for name in table.column_names:
        if table.column_names.count(name) > 1 or not is_id(name):
            continue
        ids = table.column(name)
        if pa.types.is_integer(ids.type) and not ids.null_count:
            names.append(name)
    if not names:
        return table

    types = dict.fromkeys(names, pa.large_string())
    options = pyarrow.csv.ConvertOptions(include_columns=names, column_types=types)
    with open_table(path, "csv") as file:
        texts = pyarrow.csv.read_csv(file, convert_options=options)
    has_zeros = [pc.any(pc.match_substring_regex(ids, "^ *[-+]?0[0-9]")).as_py() for ids in texts.columns]
    if not any(has_zeros):
        return table
    for name in names:
        ids = pc.utf8_trim_whitespace(texts.column(name))
        table = table.set_column(table.column_names.index(name), name, ids)
    return table


def column(table: Any, name: str, where: str) -> TableColumn:
    """Return the column ``name``. Raise DatasetError if it is missing or not unique."""
    check_column_names(table.column_names, [name], where)
    values = table.column(name).combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # A column without chunks stays a ChunkedArray.
        values = values.combine_chunks()
    if pa.types.is_null(values.type) and len(values) == 0:
        values = values.cast(pa.float64())
    return TableColumn(plain(values), name, where)


def check_column_names(columns: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raise DatasetError unless each name in ``names`` occurs once in ``columns``."""
    if len(columns) == 1 and ";" in columns[0]:
        remedy = "save it with commas, or name the separator in a description for dglx ingest"
        raise DatasetError(f"{where}: the columns are separated by ';' ({columns[0]}); {remedy}")
    for name in names:
        if name not in columns:
            known = ", ".join(columns) or "none"
            raise DatasetError(f"{where}: has no column {name!r} of the description (it has {known})")
        count = list(columns).count(name)
        if count > 1:
            raise DatasetError(f"{where}: has {count} columns {name!r}; rename all but one")


def plain(values: Any) -> Any:
    """Return a pyarrow array with dictionaries (pandas) decoded and string views (Polars) as strings."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_string_view(values.type):
        values = values.cast(pa.large_string())
    return values


def id_column(table: Any, name: str, where: str) -> TableColumn:
    """Return the id column ``name`` as int64 or large_string without gaps."""
    ids = column(table, name, where)
    if pa.types.is_floating(ids.values.type) and not ids.values.null_count:
        numbers = as_numpy(ids.values)
        # numpy.savetxt and pandas may write whole numbers as floating point.
        if (np.abs(numbers) < 2**53).all() and (numbers % 1 == 0).all():
            ids = replace(ids, values=pa.array(numbers.astype(np.int64)))
    ids.refuse_non_ids()
    if ids.is_integer:
        return replace(ids, values=ids.as_int64())
    return replace(ids, values=ids.values.cast(pa.large_string()))


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """One table's files, in row order."""

    paths: tuple[Path, ...]
    format: str
    """``csv``, ``parquet``, or ``lines`` for one text per line."""
    separator: str = ","


@dataclass(frozen=True, kw_only=True)
class TablePiece:
    """Some rows in one file."""

    row: int
    """The first row's number in the table."""
    columns: dict[str, TableColumn]
    """Columns by name. In a CSV file, all columns are unparsed texts."""
    num_rows: int


class PiecewiseTable:
    """One node or edge type's files, read about ``batch_bytes`` at a time. Call :meth:`check` first."""

    def __init__(self, files: FileSet, batch_bytes: int) -> None:
        self.files = files
        self._batch_bytes = batch_bytes
        self._ends: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows in the table. It is valid after :meth:`count` or all :meth:`pieces`."""
        return self._ends[-1] if self._ends else 0

    def pieces(self, names: Sequence[str]) -> Iterator[TablePiece]:
        """Yield the columns ``names`` for all rows in order. Without names, pieces only have a row count."""
        row = 0
        ends = []
        unique_names = list(dict.fromkeys(names))
        for path in self.files.paths:
            first_row = row
            for batch in self._read(path, unique_names):
                if batch.num_rows == 0:
                    continue
                columns = {}
                for name in unique_names:
                    values = plain(batch.column(name))
                    columns[name] = TableColumn(values, name, str(path), row - first_row)
                yield TablePiece(row=row, columns=columns, num_rows=batch.num_rows)
                row += batch.num_rows
            ends.append(row)

        self._ends = ends

    def count(self) -> int:
        """Count the rows. CSV files are read in full."""
        if self.files.format == "csv":
            return sum(piece.num_rows for piece in self.pieces([]))
        self._ends = list(accumulate(_read_metadata(path).num_rows for path in self.files.paths))
        return self.num_rows

    def locate(self, row: int) -> tuple[Path, int]:
        """Return a row's file and its number in it. The result is valid when :attr:`num_rows` is."""
        file_index = bisect_right(self._ends, row)
        first_row = self._ends[file_index - 1] if file_index > 0 else 0
        return self.files.paths[file_index], row - first_row

    def check(self, names: Sequence[str]) -> None:
        """Raise DatasetError unless every file is readable and has each of these columns once."""
        for path in self.files.paths:
            check_column_names(self.names(path), names, str(path))

    def has(self, name: str) -> bool:
        return all(name in self.names(path) for path in self.files.paths)

    def names(self, path: Path) -> list[str]:
        if self.files.format == "csv":
            return _read_header(path, self.files.separator)
        return list(_read_schema(path).names)

    def is_integer(self, name: str) -> bool:
        """Return whether every file holds ``name`` as whole numbers. CSV columns are texts."""
        if self.files.format == "csv":
            return False
        return all(pa.types.is_integer(_read_schema(path).field(name).type) for path in self.files.paths)

    def _read(self, path: Path, names: list[str]) -> Iterator[Any]:
        if self.files.format == "lines":
            return _read_lines(path)
        if self.files.format == "csv":
            return self._read_csv(path, names)
        return self._read_parquet(path, names)

    def _read_parquet(self, path: Path, names: list[str]) -> Iterator[Any]:
        # Any column tells how many rows there are.
        names = names or _read_schema(path).names[:1]
        with (
            open_table(path, "parquet") as source,
            pyarrow.parquet.ParquetFile(source, buffer_size=1 << 16, pre_buffer=False) as file,
        ):
            for group in range(file.metadata.num_row_groups):
                row_bytes = max(_estimate_row_bytes(file, group, names), _MIN_ROW_BYTES)
                num_rows = min(max(self._batch_bytes // row_bytes, 1), _MAX_ROWS)
                yield from file.iter_batches(
                    batch_size=num_rows, row_groups=[group], columns=names, use_threads=False
                )

    def _estimate_block_bytes(self) -> int:
        # Arrow reads 32 blocks ahead.
        return min(max(self._batch_bytes // 4, _MIN_BLOCK), _MAX_BLOCK)

    def _read_csv(self, path: Path, names: list[str]) -> Iterator[Any]:
        names = names or _read_header(path, self.files.separator)[:1]
        block_bytes = self._estimate_block_bytes()
        column_types = dict.fromkeys(names, pa.string())
        with (
            open_table(path, "csv", block_bytes) as source,
            pyarrow.csv.open_csv(
                source,
                read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=block_bytes),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=self.files.separator, newlines_in_values=True
                ),
                convert_options=pyarrow.csv.ConvertOptions(include_columns=names, column_types=column_types),
            ) as reader,
        ):
            yield from reader


def _read_lines(path: Path) -> Iterator[Any]:
    """Yield the ids from a text with one id per line, in batches. Empty lines are skipped."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            texts = (text.strip() for text in file if text.strip())
            ids = (_parse_first_id(text, path, row) for row, text in enumerate(texts))
            while piece := list(islice(ids, _LINES)):
                yield pa.record_batch([pa.array(piece, pa.large_string())], [LINE_COLUMN])
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{path} is not a text with one id per line; for a table, give custom_split_filenames a column"
        ) from error


def _parse_first_id(text: str, path: Path, row: int) -> str:
    """Return a line's id, which is plain text or a JSON text."""
    if text[0] not in '"[{':
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = None

    if not isinstance(value, str):
        raise DatasetError(f"{path}: row {row}: {text[:60]!r} is not a node id; write one id per line")
    return value


def _estimate_row_bytes(file: Any, group_index: int, names: Sequence[str]) -> int:
    """Estimate the size in memory of a row in a row group, in bytes.

    A file may store repeated values only once, in a dictionary. So the number of values and their width give
    the size of numbers. Texts with a dictionary have no fixed width, so a few rows are read as a sample.
    """
    group = file.metadata.row_group(group_index)
    group_bytes = 0
    text_paths = []
    for i in range(group.num_columns):
        column = group.column(i)
        # A field in a nested column has a path such as column.list.element. The dot at the end keeps a name
        # from matching a longer one.
        path = f"{column.path_in_schema}."
        if not any(path.startswith(f"{name}.") for name in names):
            continue
        # Only byte arrays of fixed length have a length in the schema.
        width = _WIDTHS.get(column.physical_type, file.schema.column(i).length)
        group_bytes += max(column.total_uncompressed_size, column.num_values * width)
        if column.physical_type == _TEXTS and column.has_dictionary_page:
            text_paths.append(column.path_in_schema)

    text_bytes = 0
    if text_paths and group.num_rows:
        batches = file.iter_batches(
            batch_size=_SAMPLE_ROWS, row_groups=[group_index], columns=text_paths, use_threads=False
        )
        sample = next(batches)
        text_bytes = sum(plain(column).nbytes for column in sample.columns) // sample.num_rows

    return int(group_bytes // max(group.num_rows, 1)) + text_bytes


def _read_schema(path: Path) -> Any:
    return _read_metadata(path).schema.to_arrow_schema()


def _read_metadata(path: Path) -> Any:
    with open_table(path, "parquet") as file:
        return pyarrow.parquet.read_metadata(file)


def _read_header(path: Path, separator: str) -> list[str]:
    with open_table(path, "csv"), path.open(newline="", encoding="utf-8-sig") as file:
        return next(csv.reader(file, delimiter=separator), [])


_INTEGER = "^(0|-?[1-9][0-9]*)$"


def numbers_of_text(column: TableColumn, separator: str | None = None) -> Array:
    """Return texts as (K,) float64, or as (K, F) if each text has F numbers between separators."""
    column.refuse_gaps()
    width = None
    values = column.values
    if separator is not None:
        lists = pc.split_pattern(values, separator)
        width = column.list_width(lists)
        values = lists.flatten()

    trimmed = pc.utf8_trim_whitespace(values)
    try:
        numbers = as_numpy(trimmed.cast(pa.float64()))
    except pa.ArrowInvalid:
        position = _find_first_non_number(trimmed)
        row = position if width is None else position // width
        reason = "is not a number; correct the table (to_categorical encodes features that are texts)"
        raise column.error(f"{values[position].as_py()!r} {reason}", row) from None

    if width is not None:
        numbers = numbers.reshape(-1, width)
    check_finite(numbers, column.name, column.where, column.first_row)
    return numbers


def parse_ids(column: TableColumn, *, is_text: bool) -> Any:
    """Return ids as a pyarrow large_string array, or as int64 if ``is_text`` is False."""
    column.refuse_non_ids()
    if is_text:
        texts = column.values.cast(pa.large_string())
        column.refuse(as_numpy(pc.equal(texts, "")), "is empty", "node id ")
        return texts

    if column.is_text:
        # Arrow also parses 0x10 and 007, which would become other ids when written back.
        is_invalid = ~as_numpy(pc.match_substring_regex(column.values, _INTEGER))
        hint = "their row numbers where they have no node_id_col"
        column.refuse(is_invalid, f"is not a whole number, as those of its nodes are ({hint})", "node id ")
    return column.as_int64()


def _find_first_non_number(texts: Any) -> int:
    """Return where the first text is that Arrow does not read as a number."""
    for row, text in enumerate(texts.to_pylist()):
        try:
            pa.scalar(text).cast(pa.float64())
        except pa.ArrowInvalid:
            return row
    raise AssertionError("every text is a number by itself")
