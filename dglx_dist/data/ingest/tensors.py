"""Labels, splits and the tensors of one node or edge type, written to the dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.data.ingest.config import LabelSpec
from dglx_dist.data.ingest.external_memory import Budget, Scatter, Spill, release_memory
from dglx_dist.data.ingest.features import MAX_CATEGORIES, Features
from dglx_dist.data.ingest.id_map import IdMap, check_known
from dglx_dist.data.ingest.tables import Table, ids_of, numbers_of_text
from dglx_dist.data.storage.columns import FileInfo, data_path, write_column
from dglx_dist.data.tables import holds_text, number_values
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.progress import Advance
from dglx_dist.records import LABEL, SPLITS, Array, ColumnInfo

_MAX_CLASSES = 1 << 24
"""A model has an output for each class; a larger label is an id or a measurement."""
_CLASS_NUMBER = re.compile(r"(-1|0|[1-9][0-9]{0,14})(\.0+)?")


@final
class Labels:
    """Labels of one type: int64 class numbers, -1 where a row has none; float32 for regression.

    Texts are numbered in alphabetical order, unless all are whole numbers, as in CSV, also written as "2.0".
    """

    def __init__(self, column: str, is_regression: bool) -> None:
        self.column = column
        self.is_regression = is_regression
        self.num_classes: int | None = None
        self.names: tuple[str, ...] = ()
        """Class names, where labels are texts."""
        self._is_text: bool | None = None
        self._texts: set[str] | None = None
        self._class_names: Any = None
        self._largest = -1

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32 if self.is_regression else np.int64)

    def scan(self, values: Any, where: str, first_row: int) -> None:
        if self.is_regression:
            return
        has_text = holds_text(values)
        if self._is_text not in (None, has_text):
            raise DatasetError(
                f"{where}: column {self.column!r} holds {values.type}, and a file before it "
                f"{'numbers' if has_text else 'texts'}; write it alike in all files"
            )
        self._is_text = has_text
        if not has_text:
            self._largest = max(self._largest, int(self._whole(values, where, first_row).max(initial=-1)))
            return
        self._texts = self._texts or set()
        self._texts.update(text for text in pc.unique(values).to_pylist() if text)
        if len(self._texts) > MAX_CATEGORIES:
            raise DatasetError(
                f"{where}: column {self.column!r} has more than {MAX_CATEGORIES} different labels up to row "
                f"{first_row + len(values) - 1}; is it a name, or a task of regression?"
            )

    def finalize(self, where: str) -> None:
        """Count the classes, after all rows of the table ``where`` are scanned."""
        if self.is_regression:
            return
        if self._texts is not None:
            names = sorted(self._texts)
            if all(_is_class_number(name) for name in names):
                self._largest = max((int(float(name)) for name in names), default=-1)
            else:
                self._largest = len(names) - 1
                self._class_names = pa.array(names, pa.large_string())
                self.names = tuple(names)
        if self._largest < 0:
            raise DatasetError(f"{where}: column {self.column!r} has no label in any row; leave labels out")
        if self._largest >= _MAX_CLASSES:
            raise DatasetError(
                f"{where}: column {self.column!r} has the label {self._largest}, which takes more than "
                f"{_MAX_CLASSES} classes; is it an id, or a task of regression?"
            )
        self.num_classes = self._largest + 1

    def codes(self, values: Any, where: str, first_row: int) -> Array:
        """Return (K,) labels of some rows."""
        if self.is_regression:
            read = numbers_of_text if holds_text(values) else number_values
            return read(values, self.column, where, first_row).astype(np.float32)
        if not holds_text(values):
            return self._whole(values, where, first_row)
        known = pc.if_else(pc.equal(values, ""), None, values).cast(pa.large_string())
        if self._class_names is None:
            numbers = pc.fill_null(known.cast(pa.float64()), -1)
        else:
            numbers = pc.fill_null(pc.index_in(known, value_set=self._class_names, skip_nulls=True), -1)
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
                f"{where}: column {self.column!r}, row {first_row + row}: {values[row].as_py()!r} is not "
                "a class; give whole numbers from 0 on (-1 or nothing: none), or make it a task of regression"
            )
        return numbers.astype(np.int64)


def _is_class_number(text: str) -> bool:
    return _CLASS_NUMBER.fullmatch(text) is not None


NO_SPLIT = 255
"""Code of rows in no split; train, validation and test are 0, 1 and 2."""

_BLOCK = 1 << 16
_MAX_DRAWN = 10**9
"""Limit of NumPy's hypergeometric draw."""
_LINES = 1 << 12


def draw_split_codes(
    has_label: Iterable[Array], num_labelled: int, shares: Sequence[float], seed: int
) -> Iterator[Array]:
    """Yield random split codes, of which each split has its exact share of the labelled rows.

    All subsets of that size are equally likely, independent of the size of the pieces: each block of labelled
    rows gets its part of each split by a hypergeometric draw, then a permutation.

    Args:
        has_label: (K,) bool pieces, in the order of the rows; (K,) uint8 codes are yielded for each.
        num_labelled: Number of True values in all pieces.
        shares: Of train, validation and test; if they sum to 1, every row is in a split.
        seed: The same seed gives the same codes.

    Raises:
        ConfigError: there are 10**9 labelled rows or more.
    """
    draws = _SplitDraws(num_labelled, shares, seed)
    for piece in has_label:
        codes = np.full(len(piece), NO_SPLIT, np.uint8)
        codes[piece] = draws.take(int(piece.sum()))
        yield codes


class _SplitDraws:
    def __init__(self, num_labelled: int, shares: Sequence[float], seed: int) -> None:
        if num_labelled >= _MAX_DRAWN:
            raise ConfigError(
                f"split_pct of {num_labelled} labelled rows: fewer than {_MAX_DRAWN} can be drawn; name "
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
        codes = np.repeat(np.array([0, 1, 2, NO_SPLIT], np.uint8), counts)
        return self._random.permutation(codes)


def _whole_shares(count: int, shares: Sequence[float]) -> list[int]:
    # Rounded down; if the shares sum to 1, the remaining rows go to the largest remainders.
    exact = [count * share for share in shares]
    # In floating point, 0.8 x 1000 may be slightly below 800.
    whole = [int(one + 1e-6) for one in exact]
    if sum(shares) > 1 - 1e-9:
        by_rest = sorted(range(len(shares)), key=lambda i: whole[i] - exact[i])
        for i in by_rest[: count - sum(whole)]:
            whole[i] += 1
    return whole


def read_split_codes(
    spec: LabelSpec, ids: IdMap, owner: str, folder: Path, *, is_text: bool, memory: int
) -> Iterator[Array]:
    """Yield the split codes of all nodes, in order, from the files of ``custom_split_filenames``."""
    codes = Scatter(folder / "codes", ids.num_nodes, np.uint8, memory=memory, fill=NO_SPLIT)
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
        check_known(found.unknown, source.locate, spec.id_column or "id", owner)
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
    """Ids in a column of tables, or one per line of text files."""

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

    def locate(self, row: int) -> tuple[Path, int]:
        if self._column is not None:
            return self._table.locate(row)
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
    except OSError as error:
        raise DatasetError(f"{path}: not readable: {error.strerror}") from error
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
        raise DatasetError(f"{path}: row {row}: {text[:60]!r} is not a node id; write one id a line")
    return value


Reorder: TypeAlias = Callable[[Iterable[Array], ColumnInfo], Iterable[Array]]
"""Rows in table order -> the same rows in storage order."""

SplitCodes: TypeAlias = Callable[[Iterator[Array], int], Iterator[Array]]
"""(whether each row has a label, number of labelled rows) -> split code of each row."""

_MASK = ColumnInfo(dtype="bool", row_shape=())
_CODE = ColumnInfo(dtype="uint8", row_shape=())


@dataclass(frozen=True, kw_only=True)
class DatasetOutput:
    """The dataset folder being written, with scratch space, memory budget and progress."""

    folder: Path
    work: Path
    """Scratch folder."""
    budget: Budget
    advance: Advance
    """Called with 1 for each file."""
    files: dict[str, FileInfo] = field(default_factory=dict)
    """Files written so far, for the manifest."""

    def write(self, path: str, info: ColumnInfo, num_rows: int, chunks: Iterable[Array]) -> None:
        self.files[path] = write_column(self.folder / path, info, num_rows, chunks)
        self.advance(1)
        release_memory()


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The table of one type, and how its tensors are computed and ordered."""

    table: Table
    num_rows: int
    features: Features
    labels: Labels | None
    codes: SplitCodes | None
    """None: no split."""
    folder: str
    """Folder of the type in the dataset."""
    reorder: Reorder


def write_tensors(rows: Rows, output: DatasetOutput) -> Mapping[str, ColumnInfo]:
    """Write features, labels and masks of one type; return their dtype and shape by name."""
    columns: dict[str, ColumnInfo] = {}
    for name in rows.features.names:
        columns[name] = info = rows.features.info(name, rows.table)
        chunks = rows.reorder(rows.features.chunks(name, rows.table, info), info)
        output.write(data_path(rows.folder, name), info, rows.num_rows, chunks)
    labels = None if rows.labels is None else _spill_labels(rows, rows.labels, output)
    if labels is not None and rows.labels is not None:
        columns[LABEL] = info = ColumnInfo(dtype=rows.labels.dtype.name, row_shape=())
        chunks = rows.reorder(labels.chunks(_at_once(output)), info)
        output.write(data_path(rows.folder, LABEL), info, rows.num_rows, chunks)
    if rows.codes is not None:
        columns.update(_write_masks(rows, labels, rows.codes, output))
    return columns


def _at_once(output: DatasetOutput) -> int:
    return output.budget.batch // 16


def _spill_labels(rows: Rows, labels: Labels, output: DatasetOutput) -> Spill:
    return Spill(output.work / "labels", labels.dtype).extend(
        labels.codes(piece.columns[labels.column], piece.where, piece.first_row)
        for piece in rows.table.pieces([labels.column])
    )


def _write_masks(
    rows: Rows, labels: Spill | None, codes: SplitCodes, output: DatasetOutput
) -> dict[str, ColumnInfo]:
    at_once = _at_once(output)
    num_labelled = sum(int(piece.sum()) for piece in _has_label(rows, labels, at_once))
    by_row = Spill(output.work / "codes", np.uint8)
    counts = np.zeros(256, np.int64)
    for piece in codes(_has_label(rows, labels, at_once), num_labelled):
        by_row.append(piece)
        counts += np.bincount(piece, minlength=256)
    _check_labelled(rows, labels, by_row, at_once)
    reordered = rows.reorder(by_row.chunks(at_once), _CODE)
    stored = Spill(output.work / "stored_codes", np.uint8).extend(reordered)
    written = {}
    for code, name in enumerate(SPLITS):
        if counts[code]:
            chunks = (piece == code for piece in stored.chunks(at_once))
            output.write(data_path(rows.folder, name), _MASK, rows.num_rows, chunks)
            written[name] = _MASK
    return written


def _has_label(rows: Rows, labels: Spill | None, at_once: int) -> Iterator[Array]:
    # Every row counts as labelled where labels are not classes.
    if labels is None or rows.labels is None or rows.labels.is_regression:
        for first in range(0, rows.num_rows, at_once):
            yield np.ones(min(at_once, rows.num_rows - first), bool)
        return
    for piece in labels.chunks(at_once):
        yield piece >= 0


def _check_labelled(rows: Rows, labels: Spill | None, codes: Spill, at_once: int) -> None:
    first = 0
    pieces = zip(_has_label(rows, labels, at_once), codes.chunks(at_once), strict=True)
    for has_label, code in pieces:
        wrong = (code != NO_SPLIT) & ~has_label
        if wrong.any():
            path, row = rows.table.locate(first + int(np.argmax(wrong)))
            column = "" if rows.labels is None else rows.labels.column
            split = SPLITS[int(code[np.argmax(wrong)])].removesuffix("_mask")
            raise DatasetError(
                f"{path}: column {column!r}, row {row}: no label, but the row is in the {split} split; "
                "leave it out of the files that say so"
            )
        first += len(code)
