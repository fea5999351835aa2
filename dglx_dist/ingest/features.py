"""The tensors of one type: which columns make each, and their rows in the order of the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dglx_dist.errors import DatasetError
from dglx_dist.ingest.config import FeatureSpec
from dglx_dist.ingest.tables import Piece, Table
from dglx_dist.ingest.transforms import Transform, join_settled, make_transforms
from dglx_dist.records import FEATURE, Array, ColumnInfo


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
