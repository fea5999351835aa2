"""Read labels, splits and tensors for one node or edge type, and write them to the dataset."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.data.external_memory import Budget, ScatteredRows, Spill, release_memory
from dglx_dist.data.ingest.config import DEFAULT_SPLIT, SPLIT_FILES, LabelSpec, TypeSpec
from dglx_dist.data.ingest.features import Features, add_texts
from dglx_dist.data.ingest.node_ids import IdMap
from dglx_dist.data.storage.columns import FileInfo, data_path, write_column
from dglx_dist.data.table_graphs import SPLIT, split_codes
from dglx_dist.data.tables import (
    LINE_COLUMN,
    PiecewiseTable,
    TableColumn,
    TablePiece,
    as_numpy,
    find_first_true,
    numbers_of_text,
)
from dglx_dist.data.validate import MAX_CLASSES, column_error, warn_of_unknown
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.progress import Advance
from dglx_dist.records import LABEL, SPLITS, Array, ColumnInfo

_CLASS_NUMBER = re.compile(r"(-1|0|[1-9][0-9]{0,14})(\.0+)?")


@final
class Labels:
    """One type's labels: int64 classes, or float32 targets for regression.

    Rows without a label have -1 or NaN. Texts are numbered in alphabetical order, unless all are whole
    numbers (as in CSV), which may be written as "2.0".
    """

    def __init__(self, column: str, is_regression: bool) -> None:
        self.column = column
        self.is_regression = is_regression
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if is_regression else np.int64)
        self.num_classes: int | None = None
        self.names: tuple[str, ...] = ()
        """Class names, if labels are texts."""
        self._is_text: bool | None = None
        self._texts: set[str] = set()
        self._class_names: Any = None
        self._largest = -1

    def scan(self, rows: TableColumn) -> None:
        if self.is_regression:
            return
        if self._is_text not in (None, rows.is_text):
            earlier_values = "numbers" if rows.is_text else "texts"
            raise rows.error(
                f"holds {rows.values.type}, but an earlier file holds {earlier_values}; use one type"
            )
        self._is_text = rows.is_text

        if rows.is_text:
            texts = rows.values.filter(pc.not_equal(pc.fill_null(rows.values, ""), ""))
            add_texts(self._texts, texts, rows, "check whether it is a name, or a task of regression")
        else:
            self._largest = max(self._largest, int(_read_integers(rows).max(initial=-1)))

    def finalize(self, where: str) -> None:
        """Count the classes after all rows in the table ``where`` are scanned."""
        if self.is_regression:
            return
        if self._is_text:
            names = sorted(self._texts)
            if all(map(_CLASS_NUMBER.fullmatch, names)):
                self._largest = max((int(float(name)) for name in names), default=-1)
            else:
                self._largest = len(names) - 1
                self._class_names = pa.array(names, pa.large_string())
                self.names = tuple(names)
                warn_of_unknown(names, where, self.column)

        if self._largest < 0:
            raise column_error(where, self.column, "has no label in any row; leave labels out")
        if self._largest >= MAX_CLASSES:
            problem = f"has the label {self._largest}, which needs more than {MAX_CLASSES} classes"
            remedy = "check whether it is an id, or a task of regression"
            raise column_error(where, self.column, f"{problem}; {remedy}")

        self.num_classes = self._largest + 1

    def codes(self, rows: TableColumn) -> Array:
        """Return (K,) labels for some rows, with -1 or NaN for rows without a label."""
        if self.is_regression:
            return _read_targets(rows)

        if not rows.is_text:
            return _read_integers(rows)
        texts = pc.if_else(pc.equal(rows.values, ""), None, rows.values).cast(pa.large_string())
        if self._class_names is None:
            numbers = texts.cast(pa.float64())
        else:
            numbers = pc.index_in(texts, value_set=self._class_names, skip_nulls=True)

        return as_numpy(pc.fill_null(numbers, -1)).astype(np.int64)


def _read_targets(rows: TableColumn) -> Array:
    if not rows.is_text:
        numbers = _convert_to_floats(rows)
        rows.refuse(np.isinf(numbers), "is not finite")
        return numbers.astype(np.float32)

    texts = pc.utf8_trim_whitespace(pc.fill_null(rows.values, ""))
    is_empty = pc.is_in(pc.utf8_lower(texts), pa.array(["", "nan"], texts.type))
    # Empty texts are no numbers, so they are read as 0 and then replaced by NaN.
    numbers = numbers_of_text(replace(rows, values=pc.if_else(is_empty, "0", texts)))
    return np.where(as_numpy(is_empty), np.nan, numbers).astype(np.float32)


def _convert_to_floats(rows: TableColumn) -> Array:
    try:
        return as_numpy(rows.values.cast(pa.float64(), safe=False))
    except pa.ArrowException as error:
        raise rows.error(f"must hold labels, numbers or texts; it holds {rows.values.type}") from error


def _read_integers(rows: TableColumn) -> Array:
    """Read some rows' classes, with -1 for rows without a label."""
    numbers = _convert_to_floats(rows)
    classes = np.where(np.isnan(numbers), -1.0, numbers)
    is_invalid = (classes != np.floor(classes)) | (classes < -1) | np.isinf(classes)
    remedy = "give whole numbers from 0 on (-1 or nothing for no label), or make it a task of regression"
    rows.refuse(is_invalid, f"is not a class; {remedy}")
    return classes.astype(np.int64)


NO_SPLIT = 255
"""Code for rows without a split. Train, validation and test are 0, 1 and 2."""

_BLOCK = 1 << 16
_MAX_DRAWN = 10**9
"""NumPy's limit for the hypergeometric distribution."""


def draw_split_codes(
    has_label: Iterable[Array], num_labelled: int, shares: Sequence[float], seed: int
) -> Iterator[Array]:
    """Yield (K,) uint8 random split codes for each (K,) bool piece in ``has_label``.

    Each split gets its exact share of the ``num_labelled`` True values. Shares that sum to 1 leave no row
    out. All subsets with that size are equally likely, and the result does not depend on how large the pieces
    are. For each block of labelled rows, a hypergeometric draw decides how many go to each split. The block
    is then permuted.
    """
    if num_labelled >= _MAX_DRAWN:
        raise ConfigError(
            f"split_pct of {num_labelled} labelled rows is not supported, only fewer than {_MAX_DRAWN}; name "
            "nodes in custom_split_filenames, or leave the labels out and split when training"
        )

    sizes = _count_shares(num_labelled, shares)
    remaining = np.array([*sizes, num_labelled - sum(sizes)], np.int64)
    random = np.random.Generator(np.random.PCG64(seed))
    unused_codes = np.empty(0, np.uint8)
    for piece in has_label:
        num_codes = int(piece.sum())
        while len(unused_codes) < num_codes:
            size = int(min(_BLOCK, remaining.sum()))
            assert size > 0, "more labelled rows than were counted"
            drawn = random.multivariate_hypergeometric(remaining, size, method="marginals")
            remaining -= drawn
            block = np.repeat(np.array([0, 1, 2, NO_SPLIT], np.uint8), drawn)
            unused_codes = np.concatenate([unused_codes, random.permutation(block)])

        codes = np.full(len(piece), NO_SPLIT, np.uint8)
        codes[piece] = unused_codes[:num_codes]
        unused_codes = unused_codes[num_codes:]
        yield codes


def _count_shares(count: int, shares: Sequence[float]) -> list[int]:
    """Return how many of ``count`` rows each share gets, rounded down.

    If the shares sum to 1, the remaining rows go to the largest remainders.
    """
    exact_sizes = [count * share for share in shares]
    # In floating point, 0.8 x 1000 may be slightly less than 800.
    sizes = [int(exact_size + 1e-6) for exact_size in exact_sizes]
    if sum(shares) > 1 - 1e-9:
        by_remainder = sorted(range(len(shares)), key=lambda i: sizes[i] - exact_sizes[i])
        for i in by_remainder[: count - sum(sizes)]:
            sizes[i] += 1
    return sizes


def read_split_codes(spec: LabelSpec, ids: IdMap, owner: str, folder: Path, memory: int) -> Iterator[Array]:
    """Yield all nodes' split codes in order, from the files in ``custom_split_filenames``.

    Raises DatasetError if a split names no node, or if a node is named twice.
    """
    codes = ScatteredRows(folder / "codes", ids.num_nodes, np.uint8, memory=memory, fill=NO_SPLIT)
    num_named = 0
    column = spec.id_column or LINE_COLUMN
    for code, name in enumerate(SPLIT_FILES):
        if name not in spec.files:
            continue
        nodes = ids.find(PiecewiseTable(spec.files[name], memory // 8), column, owner, folder / name)
        if nodes.num_rows == 0:
            raise DatasetError(f"{spec.files[name].paths[0]}: names no node; leave {name!r} out")
        for chunk in nodes.chunks(memory // 64 + 1):
            codes.put(chunk, np.full(len(chunk), code, np.uint8))
        num_named += nodes.num_rows

    num_nodes = 0
    for piece in codes.chunks():
        num_nodes += int(np.count_nonzero(piece != NO_SPLIT))
        yield piece
    if num_named != num_nodes:
        names = ", ".join(str(path) for files in spec.files.values() for path in files.paths)
        raise DatasetError(
            f"{names}: {num_named - num_nodes} ids are named more than once, in one file or "
            "in two; name each node of a split once"
        )


Reorder: TypeAlias = Callable[[Iterable[Array], ColumnInfo], Iterable[Array]]
"""Function that reorders rows from table order to storage order."""

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
    """Function that is called with 1 for each file."""
    files: dict[str, FileInfo] = field(default_factory=dict)
    """Files written so far, for the manifest."""

    def write(self, path: str, info: ColumnInfo, num_rows: int, chunks: Iterable[Array]) -> None:
        self.files[path] = write_column(self.folder / path, info, num_rows, chunks)
        self.advance(1)
        release_memory()


@final
class TypeRows:
    """The table for one node or edge type, and its tensors.

    Args:
        output: Output with its own scratch folder.
    """

    def __init__(self, spec: TypeSpec[Any], folder: str, output: DatasetOutput) -> None:
        self.spec = spec
        self._folder = folder
        self._output = output
        self.table = PiecewiseTable(spec.files, output.budget.batch)
        self.num_rows = 0
        self.columns: dict[str, ColumnInfo] = {}
        """The tensors' dtype and shape, by name."""
        self.settings: list[Mapping[str, Any]] = []
        """Each feature's transform settings, with statistics."""
        self._features = Features(spec.features, output.budget.batch)
        self.labels: Labels | None = None
        if spec.label is not None and spec.label.column is not None:
            self.labels = Labels(spec.label.column, spec.label.task == "regression")
        self._rows_per_chunk = output.budget.batch // 16

    def scan(self, *more_columns: str) -> Iterator[TablePiece]:
        """Scan all rows for statistics, and yield the pieces, which also have ``more_columns``."""
        names = [*self._features.scanned_columns, *more_columns]
        if self.labels is not None:
            names.append(self.labels.column)
        if not names:
            self.num_rows = self.table.count()
        else:
            for piece in self.table.pieces(names):
                self._features.scan(piece)
                if self.labels is not None:
                    self.labels.scan(piece.columns[self.labels.column])
                yield piece
                self.num_rows += piece.num_rows

        spec = self.spec
        where = str(spec.files.paths[0])
        # An edge type may be empty, but features and labels need rows.
        needs_rows = isinstance(spec.kind, str) or spec.features or spec.label
        if self.num_rows == 0 and needs_rows:
            remedy = "leave it, or its features and labels, out of the description"
            raise DatasetError(f"{where}: the table of {spec.kind} has no row; {remedy}")

        release_memory()
        self.settings = self._features.finalize(where)
        if self.labels is not None:
            self.labels.finalize(where)

    def write(self, seed: int, *, ids: IdMap | None = None, reorder: Reorder = lambda rows, _: rows) -> None:
        """Write features, labels and masks for all rows. Call it after :meth:`scan` has read them.

        Args:
            seed: Seed for splits that are drawn at random.
            ids: Map from the ids in split files to nodes. Only needed if there are such files.
            reorder: Function that moves rows from table order to storage order.
        """

        for name in self._features.names:
            info = self._features.info(name, self.table)
            self._write_column(name, info, reorder(self._features.chunks(name, self.table, info), info))
        spilled_labels = self._write_labels(reorder)
        if self.spec.label is not None:
            row_codes = self._find_split_codes(self.spec.label, spilled_labels, seed, ids)
            self._write_masks(reorder(row_codes.chunks(self._rows_per_chunk), _CODE))

    def _write_labels(self, reorder: Reorder) -> Spill | None:
        """Write the labels, and return them in table order. Return None if there are no labels."""
        labels = self.labels
        if labels is None:
            return None
        pieces = self.table.pieces([labels.column])
        codes = (labels.codes(piece.columns[labels.column]) for piece in pieces)
        spilled_labels = Spill(self._output.work / "labels", labels.dtype, codes)
        info = ColumnInfo(dtype=labels.dtype.name, row_shape=())
        self._write_column(LABEL, info, reorder(spilled_labels.chunks(self._rows_per_chunk), info))
        return spilled_labels

    def _write_masks(self, codes: Iterable[Array]) -> None:
        """Write a mask for each split that has a row. ``codes`` are in storage order."""
        stored_codes = Spill(self._output.work / "stored_codes", np.uint8, codes)
        used_codes: set[int] = set()
        for chunk in stored_codes.chunks(self._rows_per_chunk):
            used_codes.update(np.unique(chunk).tolist())
        for code, name in enumerate(SPLITS):
            if code in used_codes:
                masks = (chunk == code for chunk in stored_codes.chunks(self._rows_per_chunk))
                self._write_column(name, _MASK, masks)

    def _write_column(self, name: str, info: ColumnInfo, chunks: Iterable[Array]) -> None:
        self.columns[name] = info
        self._output.write(data_path(self._folder, name), info, self.num_rows, chunks)

    def _find_split_codes(
        self, label: LabelSpec, labels: Spill | None, seed: int, ids: IdMap | None
    ) -> Spill:
        """Return split codes for the table's N rows, in table order.

        ``labels`` is None if the table has none. Raises DatasetError if a row in a split has no label.
        """
        if label.split is DEFAULT_SPLIT and self.table.has(SPLIT):  # There is no split_pct.
            pieces = self.table.pieces([SPLIT])  # As uint8, -1 is NO_SPLIT.
            codes: Iterator[Array] = (split_codes(piece.columns[SPLIT]).astype(np.uint8) for piece in pieces)
        elif label.split is not None:
            num_labelled = sum(int(piece.sum()) for piece in self._find_labelled(labels))
            codes = draw_split_codes(self._find_labelled(labels), num_labelled, label.split, seed)
        else:
            assert ids is not None, "only nodes have split files"
            paths = self.spec.files.paths
            owner = str(paths[0])
            if len(paths) > 1:
                owner = f"{owner} ..."
            folder = self._output.work / "split"
            codes = read_split_codes(label, ids, owner, folder, self._output.budget.bucket)

        row_codes = Spill(self._output.work / "codes", np.uint8, codes)
        first_row = 0
        row_chunks = row_codes.chunks(self._rows_per_chunk)
        for has_label, code in zip(self._find_labelled(labels), row_chunks, strict=True):
            lacks_label = (code != NO_SPLIT) & ~has_label
            if lacks_label.any():
                path, row = self.table.locate(first_row + find_first_true(lacks_label))
                split = SPLITS[int(code[lacks_label][0])].removesuffix("_mask")
                message = f"no label, but the row is in the {split} split; leave it out of that split"
                raise column_error(str(path), str(label.column), message, row)
            first_row += len(code)
        return row_codes

    def _find_labelled(self, labels: Spill | None) -> Iterator[Array]:
        """Yield masks that mark rows with a label. Without labels, every row counts as labelled."""
        if labels is None or self.labels is None:
            for first in range(0, self.num_rows, self._rows_per_chunk):
                yield np.ones(min(self._rows_per_chunk, self.num_rows - first), bool)
            return
        for piece in labels.chunks(self._rows_per_chunk):
            yield ~np.isnan(piece) if self.labels.is_regression else piece >= 0
