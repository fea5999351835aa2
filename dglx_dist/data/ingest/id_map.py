"""Look-up of node numbers by id, for more ids than fit into memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow.compute as pc

from dglx_dist.data.ingest.external_memory import Scatter, append_ids, bucket_of, read_ids, release_memory
from dglx_dist.data.ingest.tables import Table
from dglx_dist.errors import DatasetError

_TABLE_BYTES = 96
"""Approximate bytes per id of a hash table and sorted copies, beside the id itself."""


@dataclass(frozen=True, kw_only=True)
class UnknownIds:
    """Ids that belong to no node: the first one, its row, and how many rows have one."""

    row: int
    id: object
    count: int


@dataclass(frozen=True, kw_only=True)
class FoundRows:
    """Node numbers of K ids, in their order."""

    rows: Scatter
    """(K,) int64; undefined for unknown ids."""
    unknown: UnknownIds | None


class IdMap(ABC):
    """The ids of one node type."""

    num_nodes: int

    @abstractmethod
    def find(self, asked: Iterable[Any], count: int, folder: Path) -> FoundRows:
        """Look up ``count`` ids that arrive as pyarrow arrays; ``folder`` is for temporary files."""


@final
class RangeIdMap(IdMap):
    """Ids 0..N-1 in the order of the table."""

    def __init__(self, num_nodes: int, memory: int) -> None:
        self.num_nodes = num_nodes
        self._memory = memory

    def find(self, asked: Iterable[Any], count: int, folder: Path) -> FoundRows:
        rows = Scatter(folder / "rows", count, np.int64, memory=self._memory)
        unknown_ids = _UnknownCounter()
        first = 0
        for ids in asked:
            numbers = np.asarray(ids.to_numpy(zero_copy_only=False))
            positions = np.arange(first, first + len(numbers))
            rows.put(positions, numbers)
            unknown_ids.note((numbers < 0) | (numbers >= self.num_nodes), positions, ids)
            first += len(numbers)
        return FoundRows(rows=rows, unknown=unknown_ids.result())


@final
class BucketIdMap(IdMap):
    """Any ids of ``id_bytes`` in all, hashed into files (buckets) that fit into ``memory`` bytes each."""

    def __init__(self, folder: Path, num_nodes: int, id_bytes: int, memory: int) -> None:
        self.num_nodes = num_nodes
        self._folder = folder
        self._memory = memory
        self._number = max(1, -(-(id_bytes + _TABLE_BYTES * num_nodes) // memory))

    def add(self, ids: Any, first_row: int) -> None:
        rows = np.arange(first_row, first_row + len(ids))
        append_ids(self._folder / "nodes", bucket_of(ids, self._number), rows, ids)

    def check_unique(self, table: Table, column: str) -> None:
        """Raise DatasetError naming both rows if an id occurs twice; called after all are added."""
        found = [repeat for number in range(self._number) for repeat in self._repeats(number)]
        if not found:
            return
        row, earlier, name = min(found, key=lambda one: one[0])
        (path, here), (before, there) = table.locate(row), table.locate(earlier)
        raise DatasetError(
            f"{path}: column {column!r}, row {here}: node id {name!r} occurs already in row {there}"
            f"{'' if before == path else f' of {before}'}; every node may have one row only"
        )

    def find(self, asked: Iterable[Any], count: int, folder: Path) -> FoundRows:
        first = 0
        for ids in asked:
            positions = np.arange(first, first + len(ids))
            append_ids(folder / "asked", bucket_of(ids, self._number), positions, ids)
            first += len(ids)
        found = Scatter(folder / "rows", count, np.int64, memory=self._memory)
        unknown_ids = _UnknownCounter()
        for number in range(self._number):
            known = next(read_ids(self._path(number), None), None)
            for positions, ids in read_ids(folder / "asked" / f"{number}.ids", self._memory // 8):
                places = None if known is None else pc.index_in(ids, value_set=known[1])
                missing = np.ones(len(ids), bool) if places is None else _gaps(places)
                unknown_ids.note(missing, positions, ids)
                if known is not None:
                    at = np.asarray(pc.fill_null(places, 0).to_numpy(zero_copy_only=False))
                    found.put(positions, known[0][at])
            (folder / "asked" / f"{number}.ids").unlink(missing_ok=True)
            del known
            release_memory()
        return FoundRows(rows=found, unknown=unknown_ids.result())

    def _repeats(self, number: int) -> list[tuple[int, int, object]]:
        """Return (row, earlier row, id) of the first repeated id of a bucket, if any."""
        path = self._path(number)
        # One id in most rows makes a bucket that does not fit; its first rows then hold a repeat.
        does_fit = not path.is_file() or path.stat().st_size <= self._memory
        for most_bytes in [None] if does_fit else [self._memory, None]:
            rows, ids = next(read_ids(path, most_bytes), (None, []))
            if len(ids) and len(pc.unique(ids)) < len(ids):
                return [_first_repeat(rows, ids)]
        return []

    def _path(self, number: int) -> Path:
        return self._folder / "nodes" / f"{number}.ids"


class _UnknownCounter:
    def __init__(self) -> None:
        self._first: tuple[int, object] | None = None
        self._count = 0

    def note(self, missing: Any, positions: Any, ids: Any) -> None:
        self._count += int(missing.sum())
        for at in np.flatnonzero(missing)[:1]:  # rows ascend within a bucket
            row = int(positions[at])
            if self._first is None or row < self._first[0]:
                self._first = row, ids[int(at)].as_py()

    def result(self) -> UnknownIds | None:
        if self._first is None:
            return None
        return UnknownIds(row=self._first[0], id=self._first[1], count=self._count)


def check_known(
    unknown: UnknownIds | None, where: Callable[[int], tuple[Path, int]], column: str, owner: str
) -> None:
    """Raise DatasetError naming file, row and column of the first unknown id."""
    if unknown is not None:
        path, row = where(unknown.row)
        raise DatasetError(
            f"{path}: column {column!r}, row {row}: node id {unknown.id!r} is not among the ids of {owner} "
            f"(rows of {column!r} with unknown ids: {unknown.count})"
        )


def _gaps(values: Any) -> Any:
    return pc.is_null(values).to_numpy(zero_copy_only=False)


def _first_repeat(rows: Any, ids: Any) -> tuple[int, int, object]:
    # Returns (row, earlier row, id); rows ascend.
    codes = ids.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    repeats = order[1:][codes[order][1:] == codes[order][:-1]]
    at = int(repeats.min())
    earlier = int(np.argmax(codes == codes[at]))
    return int(rows[at]), int(rows[earlier]), ids[at].as_py()
