"""What becomes of a column on its way into a tensor; the names and settings are GraphStorm's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.datasets.table_files import number_values
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.ingest.config import FeatureSpec
from dglx_dist.ingest.values import numbers_of_text
from dglx_dist.records import Array

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
