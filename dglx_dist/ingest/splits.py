"""Train, validation and test rows: drawn by share, or named in files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.ingest.config import LabelSpec
from dglx_dist.ingest.id_map import IdMap, refuse_unknown
from dglx_dist.ingest.scatter import Scatter
from dglx_dist.ingest.tables import Table
from dglx_dist.ingest.values import ids_of
from dglx_dist.records import Array

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
