"""Writing the tensors of one node or edge type, in whatever order its rows are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dglx_dist.errors import DatasetError
from dglx_dist.ingest.features import Features
from dglx_dist.ingest.labels import Labels
from dglx_dist.ingest.memory import Budget, give_back
from dglx_dist.ingest.spill import Spill
from dglx_dist.ingest.splits import NONE
from dglx_dist.ingest.tables import Table
from dglx_dist.progress import Advance
from dglx_dist.records import LABEL, SPLITS, Array, ColumnInfo
from dglx_dist.storage.columns import FileInfo, write_column
from dglx_dist.storage.layout import data_path

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
