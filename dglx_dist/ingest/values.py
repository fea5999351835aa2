"""Pieces of columns as numbers and ids, with messages that name file, row and column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.datasets.check import check_finite
from dglx_dist.datasets.table_files import as_int64, refuse_gaps
from dglx_dist.errors import DatasetError
from dglx_dist.records import Array

_WHOLE = "^(0|-?[1-9][0-9]*)$"
"""A whole number as it is written."""


def numbers_of_text(
    values: Any, name: str, where: str, first_row: int, separator: str | None = None
) -> Array:
    """Return texts as (K,) float64, or as (K, F) where each holds F numbers between separators.

    Raises:
        DatasetError: naming the first row that is empty, no number, not finite, or of another length.
    """
    refuse_gaps(values, name, where, first_row)
    width = None
    if separator is not None:
        lists = pc.split_pattern(values, separator)
        lengths = np.asarray(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
        if (lengths != lengths[:1]).any():
            row = int(np.argmax(lengths != lengths[0]))
            raise DatasetError(
                f"{where}: column {name!r}, row {first_row + row}: {lengths[row]} numbers, but row "
                f"{first_row} has {lengths[0]}"
            )
        width = int(lengths[0]) if len(lengths) else 0
        values = lists.flatten()
    trimmed = pc.utf8_trim_whitespace(values)
    try:
        numbers = np.asarray(trimmed.cast(pa.float64()).to_numpy(zero_copy_only=False))
    except pa.ArrowInvalid:
        row = _first_that_is_no_number(trimmed)
        raise DatasetError(
            f"{where}: column {name!r}, row {first_row + row // (width or 1)}: {values[row].as_py()!r} is no "
            "number; mend the table, or encode the column with to_categorical"
        ) from None
    numbers = numbers if width is None else numbers.reshape(-1, width)
    check_finite(numbers, name, where, first_row)
    return numbers


def ids_of(values: Any, name: str, where: str, first_row: int, *, is_text: bool) -> Any:
    """Return ids as a pyarrow large_string array, or int64 where ``is_text`` is False.

    Raises:
        DatasetError: naming the first row that is empty, or what the column holds instead of ids.
    """
    refuse_gaps(values, name, where, first_row)
    is_string = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    if not is_string and not pa.types.is_integer(values.type):
        raise DatasetError(
            f"{where}: column {name!r} must hold integer or string ids; it holds {values.type}"
        )
    if is_text:
        texts = values.cast(pa.large_string())
        empty = np.asarray(pc.equal(texts, "").to_numpy(zero_copy_only=False))
        if empty.any():
            raise DatasetError(
                f"{where}: column {name!r}, row {first_row + int(np.argmax(empty))}: the id is empty"
            )
        return texts
    if not is_string:
        return as_int64(values, name, where)
    # Arrow would read 0x10 and 007, too, which is not how the id is written.
    odd = ~np.asarray(pc.match_substring_regex(values, _WHOLE).to_numpy(zero_copy_only=False))
    if odd.any():
        row = int(np.argmax(odd))
        raise DatasetError(
            f"{where}: column {name!r}, row {first_row + row}: node id {values[row].as_py()!r} is no whole "
            "number, as those of its nodes are (their row numbers where they have no node_id_col)"
        )
    return as_int64(values, name, where)


def _first_that_is_no_number(texts: Any) -> int:
    for row, text in enumerate(texts.to_pylist()):
        try:
            pa.scalar(text).cast(pa.float64())
        except pa.ArrowInvalid:
            return row
    raise AssertionError("every text is a number by itself")
