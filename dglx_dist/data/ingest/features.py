"""Transform features, and write one type's feature tensors. Names and settings are GraphStorm's."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.data.ingest.config import FeatureSpec
from dglx_dist.data.json_fields import Fields, Within
from dglx_dist.data.tables import (
    PiecewiseTable,
    TableColumn,
    TablePiece,
    as_numpy,
    find_first_true,
    numbers_of_text,
)
from dglx_dist.data.validate import column_error
from dglx_dist.records import FEATURE, Array, ColumnInfo

_STATISTIC_SETTINGS = ("max_val", "min_val", "sum", "mapping")
MAX_CATEGORIES = 1 << 14
"""Maximum number of distinct texts in a categorical column."""
_Text: TypeAlias = Annotated[str, Within(1)]
_Number: TypeAlias = Annotated[float, Within(-1e308, 1e308)]
_Numbers: TypeAlias = Annotated[tuple[_Number, ...], Within(1)]
_Codes: TypeAlias = Annotated[Mapping[str, int], Within(1)]


class Transform(ABC):
    """Transforms one column. If ``needs_scan`` is set, all rows must be scanned first."""

    needs_scan = False

    def __init__(self, column: str, settings: Fields) -> None:
        self.column = column
        self.settings = settings.mapping

    def scan(self, rows: TableColumn) -> None:  # noqa: B027  # Most transforms do not need it.
        """Update the statistics with some rows."""

    def finalize(self, where: str) -> Mapping[str, Any]:
        """Return settings that include the statistics from the table ``where``, for later tables."""
        return self.settings

    @abstractmethod
    def apply(self, rows: TableColumn) -> Array:
        """Return the (K, width) transformed rows."""


def make_transforms(spec: FeatureSpec) -> tuple[Transform, ...]:
    """Make one transform for each column that a feature reads."""
    classes: Mapping[str, type[Transform]] = {
        "max_min_norm": MaxMin,
        "standard": Standard,
        "to_categorical": Categorical,
        "no-op": Unchanged,
    }
    transform_class = classes[spec.transform]
    num_columns = len(spec.columns)
    transforms = []
    for i, column in enumerate(spec.columns):
        settings = dict(spec.settings)
        for key, value in spec.settings.items():
            # For several columns, the statistics are lists; see join_settings.
            if num_columns > 1 and isinstance(value, list) and len(value) == num_columns:
                settings[key] = value[i]
        fields = Fields(settings, f"{spec.transform} of the column {column!r}")
        transforms.append(transform_class(column, fields))
    return tuple(transforms)


def join_settings(column_settings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Join the settings for a feature's columns. Statistics become lists."""
    if len(column_settings) == 1:
        return column_settings[0]
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for settings in column_settings for key in settings):
        values = [settings.get(key) for settings in column_settings]
        joined[key] = values if key in _STATISTIC_SETTINGS else values[0]
    return joined


@final
class Unchanged(Transform):
    """Numbers without change. Texts are split at ``separator``."""

    def __init__(self, column: str, settings: Fields) -> None:
        super().__init__(column, settings)
        self._separator = settings.value("separator", _Text | None)
        self._width = settings.value("truncate_dim", Annotated[int, Within(1)] | None)

    def apply(self, rows: TableColumn) -> Array:
        matrix = _read_matrix(rows, self._separator)
        if self._width is not None and matrix.shape[1] < self._width:
            raise rows.error(f"a row of {matrix.shape[1]} numbers is below truncate_dim={self._width}", 0)
        return matrix[:, : self._width]


class _Scaled(Transform):
    """Scales numbers by statistics. Each position in a list has its own statistics."""

    needs_scan = True
    _reductions: ClassVar[Mapping[str, np.ufunc]]
    """Functions that compute the statistics, by the setting's name."""

    def __init__(self, column: str, settings: Fields) -> None:
        super().__init__(column, settings)
        self._statistics: dict[str, Array] = {}
        for key in filter(settings.has, self._reductions):
            value_type = _Numbers if isinstance(settings.mapping[key], list) else _Number
            self._statistics[key] = np.array(settings.value(key, value_type), np.float64, ndmin=1)
        self._missing = [key for key in self._reductions if key not in self._statistics]

    def scan(self, rows: TableColumn) -> None:
        matrix = self._read_matrix(rows)
        if len(matrix) == 0:
            return
        for key in self._missing:
            function = self._reductions[key]
            statistic = function.reduce(matrix, axis=0, dtype=np.float64)
            if key in self._statistics:
                statistic = function(self._statistics[key], statistic)
            self._statistics[key] = statistic

    def _read_matrix(self, rows: TableColumn) -> Array:
        matrix = _read_matrix(rows)
        if len(matrix) == 0:
            return matrix
        for statistic in self._statistics.values():
            # A statistic with length 1 comes from the settings and is for all positions.
            if len(statistic) not in (1, matrix.shape[1]):
                raise rows.error(f"a row of {matrix.shape[1]} numbers, but earlier have {len(statistic)}", 0)
        return matrix


@final
class MaxMin(_Scaled):
    """(value - min) / (max - min), clipped to [0, 1]."""

    _reductions: ClassVar = {"min_val": np.minimum, "max_val": np.maximum}

    def __init__(self, column: str, settings: Fields) -> None:
        super().__init__(column, settings)
        self._bounds = {key: settings.value(key, _Number | None) for key in ("min_bound", "max_bound")}

    def finalize(self, where: str) -> Mapping[str, Any]:
        if len(self._statistics) < 2:
            raise column_error(where, self.column, "has no row to find its minimum and maximum in")

        # The bounds limit the table's statistics, but not statistics from the settings.
        for key, name, clip in (("min_val", "min_bound", np.maximum), ("max_val", "max_bound", np.minimum)):
            bound = self._bounds[name]
            if key in self._missing and bound is not None:
                self._statistics[key] = clip(self._statistics[key], bound)

        low = self._statistics["min_val"]
        high = self._statistics["max_val"]
        if (high <= low).any():
            problem = f"has the maximum {high.max()}, which is not above its minimum {low.min()}"
            remedy = "so max_min_norm would divide by 0; leave it out"
            raise column_error(where, self.column, f"{problem}, {remedy}")

        return {**self.settings, "min_val": low.tolist(), "max_val": high.tolist()}

    def apply(self, rows: TableColumn) -> Array:
        matrix = self._read_matrix(rows).astype(np.float64, copy=False)
        low = self._statistics["min_val"]
        high = self._statistics["max_val"]
        return np.clip((matrix - low) / (high - low), 0, 1).astype(np.float32)


@final
class Standard(_Scaled):
    """Divides values by their sum, which GraphStorm calls standard."""

    _reductions: ClassVar = {"sum": np.add}

    def finalize(self, where: str) -> Mapping[str, Any]:
        total = self._statistics.get("sum")
        if total is None or (total == 0).any():
            problem = "has the sum 0, so standard would divide by 0; use max_min_norm, or leave it out"
            raise column_error(where, self.column, problem)
        return {**self.settings, "sum": total.tolist()}

    def apply(self, rows: TableColumn) -> Array:
        return (self._read_matrix(rows) / self._statistics["sum"]).astype(np.float32)


@final
class Categorical(Transform):
    """One-hot columns (int8) for the distinct texts in alphabetical order. Rows without text are all 0."""

    needs_scan = True

    def __init__(self, column: str, settings: Fields) -> None:
        super().__init__(column, settings)
        self._separator = settings.value("separator", _Text | None)
        self._has_mapping = settings.has("mapping")
        self._seen: set[str] = set()
        self._codes: Mapping[str, int] = settings.value("mapping", _Codes | None) or {}
        if self._has_mapping and {*self._codes.values()} != {*range(len(self._codes))}:
            raise settings.field_error("mapping", "a number for each text, from 0 on without gaps")

    def scan(self, rows: TableColumn) -> None:
        if not self._has_mapping:
            hint = "to_categorical makes a column of each; encode it otherwise"
            _, texts = self._read_texts(rows)
            add_texts(self._seen, texts, rows, hint)

    def finalize(self, where: str) -> Mapping[str, Any]:
        if not self._has_mapping:
            self._codes = {text: code for code, text in enumerate(sorted(self._seen))}
        if not self._codes:
            raise column_error(where, self.column, "has no value to make a category of; leave it out")
        return {**self.settings, "mapping": dict(self._codes)}

    def apply(self, rows: TableColumn) -> Array:
        row_of, texts = self._read_texts(rows)
        known_texts = pa.array(list(self._codes), pa.large_string())
        columns = np.array(list(self._codes.values()), np.int64)
        indices = pc.index_in(texts, value_set=known_texts)

        # Texts that later tables add have no column.
        is_known = ~as_numpy(pc.is_null(indices))
        codes = as_numpy(pc.fill_null(indices, 0))
        one_hot = np.zeros((len(rows.values), len(self._codes)), np.int8)
        one_hot[row_of[is_known], columns[codes[is_known]]] = 1
        return one_hot

    def _read_texts(self, rows: TableColumn) -> tuple[Array, Any]:
        """Return the (T,) row for each text, and the texts. Empty texts are left out."""
        value_type = rows.values.type
        if pa.types.is_nested(value_type):
            raise rows.error(f"holds {value_type}; to_categorical needs one value or separated texts per row")

        texts = rows.texts()
        row_of = np.arange(len(texts))
        if self._separator is not None:
            lists = pc.fill_null(pc.split_pattern(texts, self._separator), [])
            row_of = np.repeat(row_of, as_numpy(pc.list_value_length(lists)))
            texts = lists.flatten()

        is_text = pc.not_equal(pc.fill_null(texts, ""), "")
        return row_of[as_numpy(is_text)], texts.filter(is_text)


def add_texts(seen: set[str], texts: Any, rows: TableColumn, hint: str) -> None:
    """Add the distinct texts in ``rows`` to ``seen``.

    If there are too many, DatasetError is raised with ``hint``.
    """
    seen.update(pc.unique(texts).to_pylist())
    if len(seen) > MAX_CATEGORIES:
        last = rows.first_row + len(rows.values) - 1
        raise rows.error(f"has more than {MAX_CATEGORIES} different values up to row {last}; {hint}")


def _read_matrix(rows: TableColumn, separator: str | None = None) -> Array:
    """Read some rows as (K, width) numbers. A column with one number per row has the width 1."""
    numbers = numbers_of_text(rows, separator) if rows.is_text else rows.numbers()
    if numbers.ndim == 1:
        return numbers.reshape(len(numbers), -1)
    return numbers


@final
class Features:
    """One type's features. Features with the same name are columns in one tensor."""

    def __init__(self, specs: Sequence[FeatureSpec], batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._dtypes = {spec.name: spec.dtype for spec in specs if spec.dtype is not None}
        self._spec_transforms = [make_transforms(spec) for spec in specs]
        self._tensors: dict[str, list[Transform]] = {}
        self._scanned: list[Transform] = []
        for spec, transforms in zip(specs, self._spec_transforms, strict=True):
            self._tensors.setdefault(spec.name, []).extend(transforms)
            self._scanned += [transform for transform in transforms if transform.needs_scan]
        self.names = tuple(self._tensors)
        self.scanned_columns = tuple(transform.column for transform in self._scanned)
        """Columns that must be scanned before they are transformed."""

    def scan(self, piece: TablePiece) -> None:
        for transform in self._scanned:
            transform.scan(piece.columns[transform.column])

    def finalize(self, where: str) -> list[Mapping[str, Any]]:
        """Return each feature's settings, including statistics from the table ``where``."""
        settings = []
        for transforms in self._spec_transforms:
            settings.append(join_settings([transform.finalize(where) for transform in transforms]))
        return settings

    def info(self, name: str, table: PiecewiseTable) -> ColumnInfo:
        """Return one tensor's dtype and row shape from the first row, which must exist.

        Without out_dtype, floating-point numbers become float32, and integers keep their dtype. One number
        per row is a scalar. The model's input is always a float32 matrix.
        """
        transforms = self._tensors[name]
        piece = next(table.pieces([transform.column for transform in transforms]))
        row = _transform_rows(transforms, piece, 0, 1)
        width = row.shape[1]
        if width == 0:
            message = "an empty list; give at least one number per row, or leave the column out"
            raise piece.columns[transforms[0].column].error(message, 0)

        dtype = self._dtypes.get(name, row.dtype.name)
        if name not in self._dtypes and (row.dtype.kind == "f" or name == FEATURE):
            dtype = "float32"
        row_shape = () if width == 1 and name != FEATURE else (width,)
        return ColumnInfo(dtype=dtype, row_shape=row_shape)

    def chunks(self, name: str, table: PiecewiseTable, info: ColumnInfo) -> Iterator[Array]:
        """Yield one tensor's (k, *row) rows, in the dtype that ``info`` names."""
        transforms = self._tensors[name]
        width = max(1, int(np.prod(info.row_shape)))
        chunk_rows = max(1, self._batch_bytes // (8 * width))
        column_names = [transform.column for transform in transforms]
        for piece in table.pieces(column_names):
            # Errors should name all columns in the tensor.
            columns = replace(piece.columns[column_names[0]], name=", ".join(column_names))
            for first in range(0, piece.num_rows, chunk_rows):
                rows = _transform_rows(transforms, piece, first, chunk_rows)
                if rows.shape[1] != width:
                    raise columns.error(f"{rows.shape[1]} numbers, but the first row has {width}", first)
                stored = _cast_rows(rows, info, columns.part(first, len(rows)))
                yield stored.reshape(len(rows), *info.row_shape)


def _transform_rows(transforms: Sequence[Transform], piece: TablePiece, first: int, count: int) -> Array:
    matrices = []
    for transform in transforms:
        rows = piece.columns[transform.column].part(first, count)
        matrices.append(transform.apply(rows))
    return np.concatenate(matrices, axis=1)


def _cast_rows(rows: Array, info: ColumnInfo, columns: TableColumn) -> Array:
    """Cast ``rows`` to the dtype that ``info`` names. Raise DatasetError if a value does not fit."""
    if np.dtype(info.dtype).kind != "f":
        if not np.can_cast(rows.dtype, info.dtype, "safe"):
            raise columns.error(f"holds {rows.dtype}, but the first row {info.dtype}; give out_dtype", 0)
        return rows.astype(info.dtype, copy=False)

    with np.errstate(over="ignore"):
        stored = rows.astype(info.dtype, copy=False)
    is_overflow = ~np.isfinite(stored)
    has_overflow = is_overflow.any(axis=1)
    if has_overflow.any():
        row = find_first_true(has_overflow)
        value = rows[row][is_overflow[row]][0]
        raise columns.error(f"{value} does not fit {info.dtype}; give a wider out_dtype, or scale it", row)
    return stored
