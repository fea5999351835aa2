"""What becomes of a column on its way into a tensor; the names and settings are GraphStorm's."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.data.ingest.config import FeatureSpec, LabelSpec
from dglx_dist.data.ingest.external_memory import Budget, Scatter, Spill, give_back
from dglx_dist.data.ingest.id_map import IdMap, refuse_unknown
from dglx_dist.data.ingest.tables import Piece, Table, ids_of, numbers_of_text
from dglx_dist.data.storage.columns import FileInfo, data_path, write_column
from dglx_dist.data.tables import number_values
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.progress import Advance
from dglx_dist.records import FEATURE, LABEL, SPLITS, Array, ColumnInfo

_SETTLED = ("max_val", "min_val", "sum", "mapping")
MOST_CATEGORIES = 1 << 14
"""Distinct texts beyond which a column is no category but a name."""


class Transform(ABC):
    """Of one column: first shown all its rows if it asks for that, then applied to them.

    Args:
        column: Name in the table.
        settings: As the description has them.
    """

    looks_first = False
    """Whether :meth:`look` must see every row before :meth:`apply` can be called."""
    dtype: np.dtype[Any] = np.dtype(np.float32)
    """Of what it gives."""

    def __init__(self, column: str, settings: Mapping[str, Any]) -> None:
        self.column = column
        self.settings = settings

    def look(self, values: Any, where: str, first_row: int) -> None:  # noqa: B027  # most need not
        """See some rows (a pyarrow array); ``where`` and ``first_row`` say which, for messages."""

    def settle(self, where: str) -> Mapping[str, Any]:
        """Return what was found in the table ``where``, as settings that transform later ones alike.

        Raises:
            DatasetError: what was found cannot be used, such as a column of one value.
        """
        return self.settings

    @abstractmethod
    def apply(self, values: Any, where: str, first_row: int) -> Array:
        """Return (K, width) of some rows.

        Raises:
            DatasetError: naming file, row and column of what is no number.
        """


def make_transforms(spec: FeatureSpec) -> tuple[Transform, ...]:
    """Return one transform for each column of a feature.

    Raises:
        ConfigError: a setting has a value that cannot be honoured.
    """
    kinds: Mapping[str, type[Transform]] = {
        "max_min_norm": MaxMin,
        "standard": Standard,
        "to_categorical": Categorical,
        "no-op": Unchanged,
    }
    settings: Sequence[Mapping[str, Any]] = [
        _of_column(spec.settings, i, len(spec.columns)) for i in range(len(spec.columns))
    ]
    return tuple(
        kinds[spec.transform](column, own) for column, own in zip(spec.columns, settings, strict=True)
    )


def _of_column(settings: Mapping[str, Any], number: int, count: int) -> Mapping[str, Any]:
    """Return the settings of one of ``count`` columns; see :func:`join_settled`."""
    if count == 1:
        return settings
    return {
        key: value[number] if isinstance(value, list) and len(value) == count else value
        for key, value in settings.items()
    }


def join_settled(settled: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return what was settled for each column of a feature as its settings: lists, where it differs."""
    if len(settled) == 1:
        return settled[0]
    keys = dict.fromkeys(key for one in settled for key in one)
    columns = {key: [one.get(key) for one in settled] for key in keys}
    return {key: found if key in _SETTLED else found[0] for key, found in columns.items()}


@final
class Unchanged(Transform):
    """The numbers as they are; texts are split at ``separator``."""

    def __init__(self, column: str, settings: Mapping[str, Any]) -> None:
        super().__init__(column, settings)
        self._separator = _text(settings, "separator", column)
        self._width = settings.get("truncate_dim")
        if self._width is not None and (type(self._width) is not int or self._width < 1):
            raise ConfigError(f"truncate_dim of {column!r} is {self._width!r}; give a whole number above 0")

    def apply(self, values: Any, where: str, first_row: int) -> Array:
        """See :meth:`Transform.apply`."""
        rows = _matrix(values, self.column, where, first_row, self._separator)
        if self._width is not None and rows.shape[1] < self._width:
            raise DatasetError(
                f"{where}: column {self.column!r}, row {first_row}: {rows.shape[1]} numbers, but "
                f"truncate_dim asks for {self._width}"
            )
        return rows[:, : self._width]


@final
class MaxMin(Transform):
    """(value - min) / (max - min), cut off below 0 and above 1; each position of a list by itself."""

    looks_first = True

    def __init__(self, column: str, settings: Mapping[str, Any]) -> None:
        super().__init__(column, settings)
        self._bounds = tuple(_number(settings, key, column) for key in ("min_bound", "max_bound"))
        self._given = tuple(_numbers(settings, key, column) for key in ("min_val", "max_val"))
        self._low, self._high = self._given

    def look(self, values: Any, where: str, first_row: int) -> None:
        """See :meth:`Transform.look`."""
        rows = _matrix(values, self.column, where, first_row).astype(np.float64, copy=False)
        _check_width(rows, self._low, self._high, self.column, where, first_row)
        if len(rows):
            if self._given[0] is None:
                low = rows.min(axis=0)
                self._low = low if self._low is None else np.minimum(self._low, low)
            if self._given[1] is None:
                high = rows.max(axis=0)
                self._high = high if self._high is None else np.maximum(self._high, high)

    def settle(self, where: str) -> Mapping[str, Any]:
        """See :meth:`Transform.settle`."""
        if self._low is None or self._high is None:
            raise DatasetError(
                f"{where}: column {self.column!r} has no row to find its minimum and maximum in"
            )
        low, high = self._low, self._high
        if self._given[0] is None and self._bounds[0] is not None:
            low = np.maximum(low, self._bounds[0])
        if self._given[1] is None and self._bounds[1] is not None:
            high = np.minimum(high, self._bounds[1])
        if (high <= low).any():
            raise DatasetError(
                f"{where}: column {self.column!r}: its maximum {high.max()} is not above its "
                f"minimum {low.min()}, and max_min_norm would divide by 0; leave the column out"
            )
        self._low, self._high = low, high
        return {**self.settings, "min_val": _plain(low), "max_val": _plain(high)}

    def apply(self, values: Any, where: str, first_row: int) -> Array:
        """See :meth:`Transform.apply`."""
        rows = _matrix(values, self.column, where, first_row).astype(np.float64, copy=False)
        assert self._low is not None
        assert self._high is not None
        return np.clip((rows - self._low) / (self._high - self._low), 0, 1).astype(np.float32)


@final
class Standard(Transform):
    """Value over the sum of all values, which is what GraphStorm calls standard."""

    looks_first = True

    def __init__(self, column: str, settings: Mapping[str, Any]) -> None:
        super().__init__(column, settings)
        self._given = _numbers(settings, "sum", column)
        self._sum = self._given

    def look(self, values: Any, where: str, first_row: int) -> None:
        """See :meth:`Transform.look`."""
        rows = _matrix(values, self.column, where, first_row)
        _check_width(rows, self._sum, None, self.column, where, first_row)
        if self._given is None and len(rows):
            found = rows.sum(axis=0, dtype=np.float64)
            self._sum = found if self._sum is None else self._sum + found

    def settle(self, where: str) -> Mapping[str, Any]:
        """See :meth:`Transform.settle`."""
        if self._sum is None or (self._sum == 0).any():
            raise DatasetError(
                f"{where}: column {self.column!r}: the sum of its values is 0, and standard would "
                "divide by it; take max_min_norm, or leave the column out"
            )
        return {**self.settings, "sum": _plain(self._sum)}

    def apply(self, values: Any, where: str, first_row: int) -> Array:
        """See :meth:`Transform.apply`."""
        rows = _matrix(values, self.column, where, first_row)
        assert self._sum is not None
        return (rows / self._sum).astype(np.float32)


@final
class Categorical(Transform):
    """One column of 0 and 1 for each distinct text, in alphabetical order; all 0 where there is none."""

    looks_first = True
    dtype = np.dtype(np.int8)

    def __init__(self, column: str, settings: Mapping[str, Any]) -> None:
        super().__init__(column, settings)
        self._separator = _text(settings, "separator", column)
        mapping = settings.get("mapping")
        self._given = mapping is not None
        self._seen: set[str] = set()
        self._places: Mapping[str, int] = {}
        if mapping is not None:
            self._places = mapping if isinstance(mapping, dict) else {}
            are_whole = all(type(place) is int for place in self._places.values())
            if not are_whole or not self._places or {*self._places.values()} != {*range(len(self._places))}:
                raise ConfigError(
                    f"mapping of {column!r} must give each text a number, from 0 on without gaps"
                )

    def look(self, values: Any, where: str, first_row: int) -> None:
        """See :meth:`Transform.look`."""
        if self._given:
            return
        _, texts = self._texts(values, where)
        self._seen.update(pc.unique(texts).to_pylist())
        if len(self._seen) > MOST_CATEGORIES:
            raise DatasetError(
                f"{where}: column {self.column!r} has more than {MOST_CATEGORIES} different values up to row "
                f"{first_row + len(values) - 1}; to_categorical makes a column of each; encode it otherwise"
            )

    def settle(self, where: str) -> Mapping[str, Any]:
        """See :meth:`Transform.settle`."""
        if not self._given:
            self._places = {text: place for place, text in enumerate(sorted(self._seen))}
        if not self._places:
            raise DatasetError(
                f"{where}: column {self.column!r} has no value to make a category of; leave it out"
            )
        return {**self.settings, "mapping": dict(self._places)}

    def apply(self, values: Any, where: str, first_row: int) -> Array:
        """See :meth:`Transform.apply`."""
        rows, texts = self._texts(values, where)
        known = pa.array(list(self._places), pa.large_string())
        numbers = np.array(list(self._places.values()), np.int64)
        found = pc.index_in(texts, value_set=known)
        is_known = ~np.asarray(pc.is_null(found).to_numpy(zero_copy_only=False))
        places = np.asarray(pc.fill_null(found, 0).to_numpy(zero_copy_only=False))
        out = np.zeros((len(values), len(self._places)), np.int8)
        out[rows[is_known], numbers[places[is_known]]] = 1
        return out

    def _texts(self, values: Any, where: str) -> tuple[Array, Any]:
        """Return the row of each text, (T,), and the texts; empty ones are left out."""
        if pa.types.is_nested(values.type):
            raise DatasetError(
                f"{where}: column {self.column!r} holds {values.type}; to_categorical takes one value a "
                "row, or texts with a separator"
            )
        try:
            texts = values.cast(pa.large_string())
        except pa.ArrowException as problem:
            raise DatasetError(
                f"{where}: column {self.column!r} holds {values.type} that is no text ({problem}); write "
                "texts or numbers"
            ) from problem
        rows = np.arange(len(texts))
        if self._separator is not None:
            lists = pc.fill_null(pc.split_pattern(texts, self._separator), [])
            rows = np.repeat(rows, pc.list_value_length(lists).to_numpy(zero_copy_only=False))
            texts = lists.flatten()
        kept = pc.not_equal(pc.fill_null(texts, ""), "")
        return rows[np.asarray(kept.to_numpy(zero_copy_only=False))], texts.filter(kept)


def _matrix(values: Any, column: str, where: str, first_row: int, separator: str | None = None) -> Array:
    """Return (K, width) finite numbers."""
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        rows = numbers_of_text(values, column, where, first_row, separator)
    else:
        rows = number_values(values, column, where, first_row)
    return rows.reshape(len(rows), -1) if rows.ndim == 1 else rows


def _check_width(
    rows: Array, one: Array | None, other: Array | None, column: str, where: str, first_row: int
) -> None:
    """Raise DatasetError unless rows are as wide as what was found, or given for all positions, before."""
    for found in (one, other):
        if found is not None and len(rows) and len(found) not in (1, rows.shape[1]):
            raise DatasetError(
                f"{where}: column {column!r}, row {first_row}: {rows.shape[1]} numbers, but there "
                f"were {len(found)} before"
            )


def _number(settings: Mapping[str, Any], key: str, column: str) -> float | None:
    value = settings.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{key} of {column!r} is {value!r}; give a number")
    return value


def _numbers(settings: Mapping[str, Any], key: str, column: str) -> Array | None:
    value = settings.get(key)
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    if not values or any(isinstance(one, bool) or not isinstance(one, int | float) for one in values):
        raise ConfigError(f"{key} of {column!r} is {value!r}; give a number, or a list of them")
    return np.array(values, np.float64)


def _text(settings: Mapping[str, Any], key: str, column: str) -> str | None:
    value = settings.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{key} of {column!r} is {value!r}; give a text that is not empty")
    return value


def _plain(values: Array) -> list[float]:
    return [float(value) for value in values]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Columns of one feature of the description."""

    spec: FeatureSpec
    transforms: tuple[Transform, ...]


@final
class Features:
    """Features of one type; those of one name stand side by side in one tensor.

    Args:
        specs: Of the description, in its order.
        batch_bytes: About how much is transformed at a time.
    """

    def __init__(self, specs: Sequence[FeatureSpec], batch_bytes: int) -> None:
        self._parts = [_Part(spec=spec, transforms=make_transforms(spec)) for spec in specs]
        self._batch_bytes = batch_bytes

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors."""
        return tuple(dict.fromkeys(part.spec.name for part in self._parts))

    @property
    def looked_at(self) -> tuple[str, ...]:
        """Columns of which every row must be seen before any is transformed."""
        return tuple(one.column for part in self._parts for one in part.transforms if one.looks_first)

    def look(self, piece: Piece) -> None:
        """See some rows of these columns."""
        for part in self._parts:
            for one in part.transforms:
                if one.looks_first:
                    one.look(piece.columns[one.column], piece.where, piece.first_row)

    def settle(self, where: str) -> list[Mapping[str, Any]]:
        """Return the settings of each feature as they now are, for tables to come; ``where``: the table.

        Raises:
            DatasetError: a column cannot be transformed as asked.
        """
        return [join_settled([one.settle(where) for one in part.transforms]) for part in self._parts]

    def info(self, name: str, table: Table) -> ColumnInfo:
        """Return dtype and row shape of one tensor, from its first row.

        Raises:
            DatasetError: the first row is no number, or the table has none.
        """
        parts = self._of(name)
        for piece in table.pieces(_columns(parts)):
            rows = _rows(parts, piece, slice(0, 1))
            if not sum(one.shape[1] for one in rows):
                raise DatasetError(
                    f"{piece.where}: column {parts[0].spec.columns[0]!r}, row {piece.first_row}: an empty "
                    "list; give at least one number a row, or leave the column out"
                )
            return ColumnInfo(dtype=_dtype(name, parts, rows), row_shape=_row_shape(name, rows))
        raise DatasetError(f"{table.files.paths[0]}: the table has no row")

    def chunks(self, name: str, table: Table, info: ColumnInfo) -> Iterator[Array]:
        """Yield the rows of one tensor, (k, *row) of ``info``'s dtype.

        Raises:
            DatasetError: naming file, row and column of what is no number.
        """
        parts = self._of(name)
        width = max(1, int(np.prod(info.row_shape)))
        at_once = max(1, self._batch_bytes // (8 * width))
        for piece in table.pieces(_columns(parts)):
            for first in range(0, piece.num_rows, at_once):
                rows = np.concatenate(_rows(parts, piece, slice(first, first + at_once)), axis=1)
                if rows.shape[1] != width:
                    names = ", ".join(map(repr, _columns(parts)))
                    raise DatasetError(
                        f"{piece.path}: column {names}, row {piece.first_row + first}: "
                        f"{rows.shape[1]} numbers, but the first row has {width}"
                    )
                stored = _stored(rows, info, parts, piece.where, piece.first_row + first)
                yield stored.reshape(len(rows), *info.row_shape)

    def _of(self, name: str) -> list[_Part]:
        return [part for part in self._parts if part.spec.name == name]


def _stored(rows: Array, info: ColumnInfo, parts: Sequence[_Part], where: str, first_row: int) -> Array:
    """Return rows in the dtype that is stored, which the first row of the table decides where none is asked.

    Raises:
        DatasetError: naming the first row that it cannot hold.
    """
    names = ", ".join(map(repr, _columns(parts)))
    if np.dtype(info.dtype).kind != "f":
        if not np.can_cast(rows.dtype, info.dtype, "safe"):
            raise DatasetError(
                f"{where}: column {names}, row {first_row}: holds {rows.dtype}, and the first row "
                f"{info.dtype}; give out_dtype"
            )
        return rows.astype(info.dtype, copy=False)
    with np.errstate(over="ignore"):
        stored = rows.astype(info.dtype, copy=False)
    beyond = ~np.isfinite(stored).all(axis=1)
    if beyond.any():
        row = int(np.argmax(beyond))
        value = rows[row][~np.isfinite(stored[row])][0]
        raise DatasetError(
            f"{where}: column {names}, row {first_row + row}: {value} is beyond {info.dtype}; give a wider "
            "out_dtype, or scale the column"
        )
    return stored


def _columns(parts: Sequence[_Part]) -> list[str]:
    return [one.column for part in parts for one in part.transforms]


def _rows(parts: Sequence[_Part], piece: Piece, rows: slice) -> list[Array]:
    """Return what each column gives, (k, width) each."""
    count = len(range(piece.num_rows)[rows])
    return [
        one.apply(
            piece.columns[one.column].slice(rows.start, count), piece.where, piece.first_row + rows.start
        )
        for part in parts
        for one in part.transforms
    ]


def _dtype(name: str, parts: Sequence[_Part], rows: Sequence[Array]) -> str:
    """Return what is asked for, else float32, as models compute; whole numbers that are no input stay."""
    asked = [part.spec.dtype for part in parts if part.spec.dtype is not None]
    if asked:
        return asked[0]
    found = np.result_type(*(one.dtype for one in rows))
    return "float32" if found.kind == "f" or name == FEATURE else found.name


def _row_shape(name: str, rows: Sequence[Array]) -> tuple[int, ...]:
    """Return () for one number a row, but for the features of a model, which are a matrix."""
    width = sum(one.shape[1] for one in rows)
    return () if width == 1 and name != FEATURE else (width,)


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


NONE = 255
"""The code of rows in no split; the others are 0, 1 and 2."""

_BLOCK = 1 << 16
_MOST_DRAWN = 10**9
"""Where NumPy's draw ends."""
_LINES = 1 << 12


def drawn(
    has_label: Iterable[Array], num_labelled: int, shares: Sequence[float], seed: int
) -> Iterator[Array]:
    """Yield the codes of rows, drawn so that each split has its exact share of the labelled ones.

    Every choice of so many rows is equally likely, and it does not depend on how the rows arrive: a block of
    labelled rows gets its part of each split by a hypergeometric draw, and then an order.

    Args:
        has_label: (K,) bool pieces, in the order of the rows.
        num_labelled: True ones in all.
        shares: Of train, validation and test; together at most 1. Where they are 1, every row is in a split.
        seed: The same seed gives the same codes.

    Yields:
        (K,) uint8 for each piece.

    Raises:
        ConfigError: there are 10**9 labelled rows or more.
    """
    draws = _Draws(num_labelled, shares, seed)
    for piece in has_label:
        codes = np.full(len(piece), NONE, np.uint8)
        codes[piece] = draws.take(int(piece.sum()))
        yield codes


class _Draws:
    """Codes of labelled rows, made a block at a time."""

    def __init__(self, num_labelled: int, shares: Sequence[float], seed: int) -> None:
        if num_labelled >= _MOST_DRAWN:
            raise ConfigError(
                f"split_pct of {num_labelled} labelled rows: fewer than {_MOST_DRAWN} can be drawn; name "
                "nodes in custom_split_filenames, or leave the labels out and split when training"
            )
        counts = _whole_shares(num_labelled, shares)
        self._left = np.array([*counts, num_labelled - sum(counts)], np.int64)
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._ready = np.empty(0, np.uint8)

    def take(self, count: int) -> Array:
        while len(self._ready) < count:
            self._ready = np.concatenate([self._ready, self._block()])
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def _block(self) -> Array:
        size = int(min(_BLOCK, self._left.sum()))
        assert size > 0, "more labelled rows than were counted"
        counts = self._random.multivariate_hypergeometric(self._left, size, method="marginals")
        self._left -= counts
        codes = np.repeat(np.array([0, 1, 2, NONE], np.uint8), counts)
        return self._random.permutation(codes)


def _whole_shares(count: int, shares: Sequence[float]) -> list[int]:
    """Return each share of ``count`` rows, rounded down; what is then left goes where most was cut off."""
    exact = [count * share for share in shares]
    # As written, 0.8 x 1000 may be a little below 800.
    whole = [int(one + 1e-6) for one in exact]
    if sum(shares) > 1 - 1e-9:
        by_rest = sorted(range(len(shares)), key=lambda i: whole[i] - exact[i])
        for i in by_rest[: count - sum(whole)]:
            whole[i] += 1
    return whole


def named(
    spec: LabelSpec, ids: IdMap, owner: str, folder: Path, *, is_text: bool, memory: int
) -> Iterator[Array]:
    """Yield the codes of all nodes, in order, as the files of ``custom_split_filenames`` say.

    Raises:
        DatasetError: naming file and row of an id that is no node's, or is named twice.
    """
    codes = Scatter(folder / "codes", ids.num_nodes, np.uint8, memory=memory, fill=NONE)
    times = Scatter(folder / "times", ids.num_nodes, np.uint8, memory=memory)
    total = 0
    for code, name in enumerate(("train", "valid", "test")):
        if name not in spec.files:
            continue
        source = _IdFile(Table(spec.files[name], memory // 8), spec.id_column, is_text)
        count = source.count()
        if not count:
            raise DatasetError(f"{spec.files[name].paths[0]}: names no node; leave {name!r} out")
        found = ids.find(source.ids(), count, folder / name)
        refuse_unknown(found.unknown, source.place, spec.id_column or "id", owner)
        for nodes in found.rows.chunks():
            codes.put(nodes, np.full(len(nodes), code, np.uint8))
            times.put(nodes, np.ones(len(nodes), np.uint8))
            total += len(nodes)
    marked = sum(int(piece.sum()) for piece in times.chunks())
    if marked < total:
        names = ", ".join(str(path) for files in spec.files.values() for path in files.paths)
        raise DatasetError(
            f"{names}: {total - marked} ids are named more than once, in one file or in two; name each node "
            "of a split once"
        )
    yield from codes.chunks()


class _IdFile:
    """Ids in a column of tables, or one a line."""

    def __init__(self, table: Table, column: str | None, is_text: bool) -> None:
        self._table = table
        self._column = column
        self._is_text = is_text
        self._ends: list[int] = []

    def ids(self) -> Iterator[Any]:
        if self._column is not None:
            for piece in self._table.pieces([self._column]):
                values = piece.columns[self._column]
                yield ids_of(values, self._column, piece.where, piece.first_row, is_text=self._is_text)
            return
        for path, first_row, lines in self._lines():
            values = pa.array(lines, pa.large_string())
            yield ids_of(values, "id", str(path), first_row, is_text=self._is_text)

    def count(self) -> int:
        if self._column is not None:
            return sum(piece.num_rows for piece in self._table.pieces([self._column]))
        return sum(len(lines) for _, _, lines in self._lines())

    def place(self, row: int) -> tuple[Path, int]:
        if self._column is not None:
            return self._table.place(row)
        first = 0
        for path in self._table.files.paths:
            count = sum(len(lines) for _, _, lines in _lines_of(path))
            if row < first + count:
                return path, row - first
            first += count
        raise AssertionError(f"row {row} of {first}")

    def _lines(self) -> Iterator[tuple[Path, int, list[str]]]:
        for path in self._table.files.paths:
            yield from _lines_of(path)


def _lines_of(path: Path) -> Iterator[tuple[Path, int, list[str]]]:
    try:
        yield from _texts_of(path)
    except OSError as problem:
        raise DatasetError(f"{path}: not readable: {problem.strerror}") from problem
    except UnicodeDecodeError:
        raise DatasetError(
            f"{path}: holds no text with one id a line; for a table, give custom_split_filenames the column"
        ) from None


def _texts_of(path: Path) -> Iterator[tuple[Path, int, list[str]]]:
    lines: list[str] = []
    row = 0
    with path.open(encoding="utf-8-sig") as file:
        for text in file:
            if text.strip():
                lines.append(_id_of_line(text.strip(), path, row + len(lines)))
            if len(lines) == _LINES:
                yield path, row, lines
                row, lines = row + len(lines), []
    if lines:
        yield path, row, lines


def _id_of_line(text: str, path: Path, row: int) -> str:
    if text[0] not in '"[{':
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, str):
        raise DatasetError(f"{path}: row {row}: {text[:60]!r} is no node id; write one id a line")
    return value


Arrange: TypeAlias = Callable[[Iterable[Array], ColumnInfo], Iterable[Array]]
"""Rows in the order of the table -> the same rows in the order in which they are stored."""

Codes: TypeAlias = Callable[[Iterator[Array], int], Iterator[Array]]
"""(whether each row has a label, how many have) -> the split of each row."""

_MASK = ColumnInfo(dtype="bool", row_shape=())
_CODE = ColumnInfo(dtype="uint8", row_shape=())


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the dataset and what is needed on the way to it are written."""

    folder: Path
    """Of the dataset."""
    work: Path
    """For files that are needed meanwhile."""
    budget: Budget
    advance: Advance
    """Moved on by one for each file."""
    files: dict[str, FileInfo] = field(default_factory=dict)
    """Filled as files are written, for the manifest."""

    def write(self, path: str, info: ColumnInfo, num_rows: int, chunks: Iterable[Array]) -> None:
        """Write one column of the dataset."""
        self.files[path] = write_column(self.folder / path, info, num_rows, chunks)
        self.advance(1)
        give_back()


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one type, as far as writing its tensors needs to know them."""

    table: Table
    num_rows: int
    features: Features
    labels: Labels | None
    codes: Codes | None
    """None: nothing is split."""
    folder: str
    """Of the type, in the dataset."""
    arrange: Arrange


def write_tensors(rows: Rows, place: Place) -> Mapping[str, ColumnInfo]:
    """Write features, labels and masks of one type; return them by name.

    Raises:
        DatasetError: naming file, row and column of what is wrong in the table.
    """
    columns: dict[str, ColumnInfo] = {}
    for name in rows.features.names:
        columns[name] = info = rows.features.info(name, rows.table)
        chunks = rows.arrange(rows.features.chunks(name, rows.table, info), info)
        place.write(data_path(rows.folder, name), info, rows.num_rows, chunks)
    labels = None if rows.labels is None else _spill_labels(rows, rows.labels, place)
    if labels is not None and rows.labels is not None:
        columns[LABEL] = info = ColumnInfo(dtype=rows.labels.dtype.name, row_shape=())
        chunks = rows.arrange(labels.chunks(_at_once(place)), info)
        place.write(data_path(rows.folder, LABEL), info, rows.num_rows, chunks)
    if rows.codes is not None:
        columns.update(_write_masks(rows, labels, rows.codes, place))
    return columns


def _at_once(place: Place) -> int:
    return place.budget.batch // 16


def _spill_labels(rows: Rows, labels: Labels, place: Place) -> Spill:
    spill = Spill(place.work / "labels", labels.dtype)
    for piece in rows.table.pieces([labels.column]):
        spill.append(labels.codes(piece.columns[labels.column], piece.where, piece.first_row))
    return spill


def _write_masks(rows: Rows, labels: Spill | None, codes: Codes, place: Place) -> dict[str, ColumnInfo]:
    """Write one mask for each split that has a row."""
    at_once = _at_once(place)
    num_labelled = sum(int(piece.sum()) for piece in _has_label(rows, labels, at_once))
    by_row = Spill(place.work / "codes", np.uint8)
    counts = np.zeros(256, np.int64)
    for piece in codes(_has_label(rows, labels, at_once), num_labelled):
        by_row.append(piece)
        counts += np.bincount(piece, minlength=256)
    _refuse_unlabelled(rows, labels, by_row, at_once)
    stored = Spill(place.work / "stored_codes", np.uint8)
    for piece in rows.arrange(by_row.chunks(at_once), _CODE):
        stored.append(piece)
    written = {}
    for code, name in enumerate(SPLITS):
        if counts[code]:
            chunks = (piece == code for piece in stored.chunks(at_once))
            place.write(data_path(rows.folder, name), _MASK, rows.num_rows, chunks)
            written[name] = _MASK
    return written


def _has_label(rows: Rows, labels: Spill | None, at_once: int) -> Iterator[Array]:
    """Yield (k,) bool pieces; every row has one where there are no classes."""
    if labels is None or rows.labels is None or rows.labels.is_regression:
        for first in range(0, rows.num_rows, at_once):
            yield np.ones(min(at_once, rows.num_rows - first), bool)
        return
    for piece in labels.chunks(at_once):
        yield piece >= 0


def _refuse_unlabelled(rows: Rows, labels: Spill | None, codes: Spill, at_once: int) -> None:
    first = 0
    pieces = zip(_has_label(rows, labels, at_once), codes.chunks(at_once), strict=True)
    for has_label, code in pieces:
        wrong = (code != NONE) & ~has_label
        if wrong.any():
            path, row = rows.table.place(first + int(np.argmax(wrong)))
            column = "" if rows.labels is None else rows.labels.column
            split = SPLITS[int(code[np.argmax(wrong)])].removesuffix("_mask")
            raise DatasetError(
                f"{path}: column {column!r}, row {row}: no label, but the row is in the {split} split; "
                "leave it out of the files that say so"
            )
        first += len(code)
