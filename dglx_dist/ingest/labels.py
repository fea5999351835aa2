"""Labels of one type: which classes there are, which rows have one, and what is stored."""

from __future__ import annotations

import re
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.datasets.table_files import number_values
from dglx_dist.errors import DatasetError
from dglx_dist.ingest.transforms import MOST_CATEGORIES
from dglx_dist.ingest.values import numbers_of_text
from dglx_dist.records import Array

_MOST_CLASSES = 1 << 24
"""Beyond it a number is an id or a measure, and no class: a model has an output for each."""
_CLASS_NUMBER = re.compile(r"(-1|0|[1-9][0-9]{0,14})(\.0+)?")


@final
class Labels:
    """Classes are whole numbers, or texts that get numbers in alphabetical order; -1 where there is none.

    Texts that are all whole numbers, as in CSV, are these numbers, also as "2.0", which other programs write
    where a column has gaps. For a regression labels are float32, and every row has one.

    Args:
        column: Name in the table.
        is_regression: Whether they are no classes.
    """

    def __init__(self, column: str, is_regression: bool) -> None:
        self.column = column
        self.is_regression = is_regression
        self.num_classes: int | None = None
        self.names: tuple[str, ...] = ()
        """Of the classes, where they are texts."""
        self._is_text: bool | None = None
        self._texts: set[str] | None = None
        self._places: Any = None
        self._largest = -1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what is stored."""
        return np.dtype(np.float32 if self.is_regression else np.int64)

    def look(self, values: Any, where: str, first_row: int) -> None:
        """See some rows, before :meth:`codes` is asked."""
        if self.is_regression:
            return
        is_text = _is_text(values)
        if self._is_text not in (None, is_text):
            raise DatasetError(
                f"{where}: column {self.column!r} holds {values.type}, and a file before it "
                f"{'numbers' if is_text else 'texts'}; write it alike in all files"
            )
        self._is_text = is_text
        if not is_text:
            self._largest = max(self._largest, int(self._whole(values, where, first_row).max(initial=-1)))
            return
        self._texts = self._texts or set()
        self._texts.update(text for text in pc.unique(values).to_pylist() if text)
        if len(self._texts) > MOST_CATEGORIES:
            raise DatasetError(
                f"{where}: column {self.column!r} has more than {MOST_CATEGORIES} different labels up to row "
                f"{first_row + len(values) - 1}; is it a name, or a task of regression?"
            )

    def settle(self, where: str) -> None:
        """Count the classes, once all rows of the table ``where`` were seen.

        Raises:
            DatasetError: no row has a label, or a number is too large to be that of a class.
        """
        if self.is_regression:
            return
        if self._texts is not None:
            names = sorted(self._texts)
            if all(_is_class_number(name) for name in names):
                self._largest = max((int(float(name)) for name in names), default=-1)
            else:
                self._largest = len(names) - 1
                self._places = pa.array(names, pa.large_string())
                self.names = tuple(names)
        if self._largest < 0:
            raise DatasetError(f"{where}: column {self.column!r} has no label in any row; leave labels out")
        if self._largest >= _MOST_CLASSES:
            raise DatasetError(
                f"{where}: column {self.column!r} has the label {self._largest}, which takes more than "
                f"{_MOST_CLASSES} classes; is it an id, or a task of regression?"
            )
        self.num_classes = self._largest + 1

    def codes(self, values: Any, where: str, first_row: int) -> Array:
        """Return (K,) labels of some rows.

        Raises:
            DatasetError: naming file, row and column of what is no label.
        """
        if self.is_regression:
            read = numbers_of_text if _is_text(values) else number_values
            return read(values, self.column, where, first_row).astype(np.float32)
        if not _is_text(values):
            return self._whole(values, where, first_row)
        known = pc.if_else(pc.equal(values, ""), None, values).cast(pa.large_string())
        if self._places is None:
            numbers = pc.fill_null(known.cast(pa.float64()), -1)
        else:
            numbers = pc.fill_null(pc.index_in(known, value_set=self._places, skip_nulls=True), -1)
        return np.asarray(numbers.to_numpy(zero_copy_only=False)).astype(np.int64)

    def _whole(self, values: Any, where: str, first_row: int) -> Array:
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            raise DatasetError(
                f"{where}: column {self.column!r} must hold labels, numbers or texts; it holds {values.type}"
            )
        filled = pc.fill_null(values.cast(pa.float64(), safe=False), -1)
        numbers = np.asarray(filled.to_numpy(zero_copy_only=False))
        numbers = np.where(np.isnan(numbers), -1.0, numbers)
        odd = (numbers != np.floor(numbers)) | (numbers < -1) | np.isinf(numbers)
        if odd.any():
            row = int(np.argmax(odd))
            raise DatasetError(
                f"{where}: column {self.column!r}, row {first_row + row}: {values[row].as_py()!r} is no "
                "class; give whole numbers from 0 on (-1 or nothing: none), or make it a task of regression"
            )
        return numbers.astype(np.int64)


def _is_text(values: Any) -> bool:
    return bool(pa.types.is_string(values.type) or pa.types.is_large_string(values.type))


def _is_class_number(text: str) -> bool:
    return _CLASS_NUMBER.fullmatch(text) is not None
