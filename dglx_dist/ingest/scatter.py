"""Rows that come in any order, given back in that of their positions, without holding them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np

from dglx_dist.records import Array


@final
class Scatter:
    """Positions are cut into ranges of which one fits into memory; a range is a file until it is read.

    Args:
        folder: Where the files lie; made here.
        num_rows: Positions are in [0, num_rows).
        dtype: Of the values.
        row_shape: Of one row.
        memory: Bytes for one range.
        fill: What stands where nothing was put.
    """

    def __init__(
        self,
        folder: Path,
        num_rows: int,
        dtype: Any,
        row_shape: tuple[int, ...] = (),
        *,
        memory: int,
        fill: int = 0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._num_rows = num_rows
        self._entry = np.dtype([("at", np.int64), ("row", dtype, row_shape)])
        self._row = np.dtype((dtype, row_shape))
        self._fill = fill
        # What is read and what it becomes, side by side.
        self.range_rows = max(1, memory // (self._entry.itemsize + self._row.itemsize))

    def put(self, positions: Array, rows: Array) -> None:
        """Put (k, *row) at ``positions`` ((k,) integers); of several at one position the last stays."""
        if not len(positions):
            return
        ranges = positions // self.range_rows
        order = np.argsort(ranges, kind="stable")
        entries = np.empty(len(positions), self._entry)
        entries["at"] = positions[order]
        entries["row"] = rows[order]
        ranges = ranges[order]
        starts = np.flatnonzero(np.diff(ranges, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(ranges)], strict=True):
            with self._file(int(ranges[start])).open("ab") as file:
                entries[start:end].tofile(file)

    def chunks(self) -> Iterator[Array]:
        """Yield all rows in order, a range at a time, and delete what was read."""
        for first in range(0, self._num_rows, self.range_rows):
            count = min(self.range_rows, self._num_rows - first)
            rows = np.full((count, *self._row.shape), self._fill, dtype=self._row.base)
            path = self._file(first // self.range_rows)
            if path.exists():
                entries = np.fromfile(path, dtype=self._entry)
                rows[entries["at"] - first] = entries["row"]
                path.unlink()
                del entries
            yield rows

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.rows"
