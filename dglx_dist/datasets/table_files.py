"""Reading one CSV or Parquet table and turning its columns into arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from dglx_dist.datasets.check import check_finite
from dglx_dist.errors import DatasetError
from dglx_dist.records import Array

SUFFIXES = (".csv", ".parquet")


def read_table(path: Path) -> Any:
    """Return the table in ``path``, a ``.csv`` with a header line or a ``.parquet``, as a pyarrow.Table.

    Raises:
        DatasetError: no such file, another suffix, or not readable as what the suffix says.
    """
    if not path.is_file():
        raise DatasetError(f"there is no table {path.absolute()}")
    if path.suffix not in SUFFIXES:
        raise DatasetError(f"{path}: a table must be one of {', '.join(SUFFIXES)}, not {path.suffix!r}")
    try:
        if path.suffix == ".csv":
            return pyarrow.csv.read_csv(path)
        return pyarrow.parquet.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"{path}: not readable as a {path.suffix[1:]} table: {error}") from error


def column(table: Any, name: str, where: str) -> Any:
    """Return the column ``name`` in one chunk; DatasetError when the table has none of it, or several."""
    count = table.column_names.count(name)
    if count == 0:
        raise DatasetError(f"{where}: has no column {name!r} (it has {', '.join(table.column_names)})")
    if count > 1:
        raise DatasetError(f"{where}: has {count} columns {name!r}; rename all but one")
    combined = table.column(name).combine_chunks()
    # A chunked column of no chunks combines to another type than one of several.
    return plain(combined.combine_chunks() if isinstance(combined, pa.ChunkedArray) else combined)


def plain(values: Any) -> Any:
    """Return a pyarrow array with what categories of pandas and views of Polars stand for spelt out."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return values.cast(pa.large_string()) if pa.types.is_string_view(values.type) else values


def id_column(table: Any, name: str, where: str) -> Any:
    """Return the ids in column ``name`` as a pyarrow int64 or string array without gaps.

    Raises:
        DatasetError: the table has no row; the column is missing, has an empty row, or holds neither
            integers nor strings.
    """
    ids = column(table, name, where)
    if table.num_rows == 0:
        raise DatasetError(f"{where}: the table has no row, which would leave the graph empty")
    refuse_gaps(ids, name, where)
    if pa.types.is_integer(ids.type):
        return as_int64(ids, name, where)
    if pa.types.is_string(ids.type) or pa.types.is_large_string(ids.type):
        return ids.cast(pa.large_string())
    raise DatasetError(f"{where}: column {name!r} must hold integer or string ids; it holds {ids.type}")


def as_int64(values: Any, name: str, where: str) -> Any:
    """Return integers (a pyarrow array) as int64; DatasetError where one is beyond."""
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise DatasetError(f"{where}: column {name!r} has a number beyond 64 signed bits: {error}") from error


def refuse_gaps(values: Any, name: str, where: str, first_row: int = 0) -> None:
    """Raise DatasetError naming the first row of ``values`` (a pyarrow array) that is empty."""
    if values.null_count:
        row = first_row + int(np.argmax(pc.is_null(values).to_numpy(zero_copy_only=False)))
        raise DatasetError(f"{where}: column {name!r}, row {row}: is empty ({values.null_count} rows in all)")


def number_column(table: Any, name: str, where: str) -> Array:
    """Return the column ``name`` as (K,) numbers or booleans, or (K, F) when its rows are lists.

    Raises:
        DatasetError: it is missing, has gaps, NaN or infinities, holds no numbers, or lists of
            different lengths.
    """
    return number_values(column(table, name, where), name, where)


def number_values(values: Any, name: str, where: str, first_row: int = 0) -> Array:
    """Return ``values`` (a pyarrow array) as (K,) numbers or booleans, or (K, F) when its rows are lists.

    Args:
        values: Some rows of a column.
        name: Of the column.
        where: The file.
        first_row: The number of the first row in the file.

    Raises:
        DatasetError: there are gaps, NaN or infinities, no numbers, or lists of different lengths.
    """
    refuse_gaps(values, name, where, first_row)
    width = None
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        if len(lengths) and (lengths != lengths[0]).any():
            row = int(np.argmax(lengths != lengths[0]))
            raise DatasetError(
                f"{where}: column {name!r}, row {first_row + row}: a list of {lengths[row]} values, but row "
                f"{first_row} has {lengths[0]}"
            )
        width = int(lengths[0]) if len(lengths) else 0
    elif pa.types.is_fixed_size_list(values.type):
        width = values.type.list_size
    flat = values if width is None else values.flatten()
    if not (
        pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type) or pa.types.is_boolean(flat.type)
    ):
        raise DatasetError(
            f"{where}: column {name!r} must hold numbers; it holds {values.type}. Encode it as numbers or "
            f"leave it out"
        )
    if flat.null_count:
        row = first_row + int(np.argmax(pc.is_null(flat).to_numpy(zero_copy_only=False))) // max(
            width or 1, 1
        )
        raise DatasetError(f"{where}: column {name!r}, row {row}: has an empty value")
    array = np.asarray(flat.to_numpy(zero_copy_only=False))
    array = array if width is None else array.reshape(len(values), width)
    check_finite(array, name, where, first_row)
    return array


def stacked_columns(table: Any, names: Sequence[str], where: str) -> Array:
    """Return the named number columns side by side as (K, F) float32.

    Raises:
        DatasetError: one of them is missing or has a row that is no finite number.
    """
    stacked = np.empty((table.num_rows, len(names)), dtype=np.float32)
    for position, name in enumerate(names):
        values = number_column(table, name, where)
        if values.ndim != 1:
            raise DatasetError(f"{where}: column {name!r} holds lists; name it alone as the features")
        stacked[:, position] = values
    return stacked
