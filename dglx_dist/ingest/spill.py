"""Arrays on disk that are written from front to end, and read so again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np

from dglx_dist.records import Array


@final
class Spill:
    """Rows in one file; nothing is held in memory.

    Args:
        path: File to create.
        dtype: Of the values.
        row_shape: Of one row; () for one number.
    """

    def __init__(self, path: Path, dtype: Any, row_shape: tuple[int, ...] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self._path = path
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self.num_rows = 0

    def append(self, rows: Array) -> None:
        """Add (k, *row) at the end."""
        with self._path.open("ab") as file:
            np.ascontiguousarray(rows, dtype=self._dtype).tofile(file)
        self.num_rows += len(rows)

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows in order, at most ``num_rows`` at a time."""
        with self._path.open("rb") as file:
            left = self.num_rows
            while left:
                count = min(num_rows, left)
                values = np.fromfile(file, dtype=self._dtype, count=count * math.prod(self._row_shape))
                left -= count
                yield values.reshape(count, *self._row_shape)

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink()


@final
class Reader:
    """Takes rows of a spill from the front, as many as asked for."""

    def __init__(self, spill: Spill, num_rows: int) -> None:
        self._chunks = spill.chunks(num_rows)
        self._left: list[Array] = []

    def take(self, count: int) -> Array:
        """Return the next ``count`` rows."""
        taken: list[Array] = []
        missing = count
        while missing:
            rows = self._left.pop() if self._left else next(self._chunks)
            taken.append(rows[:missing])
            if len(rows) > missing:
                self._left.append(rows[missing:])
            missing -= len(taken[-1])
        return np.concatenate(taken) if taken else np.empty(0, np.int64)
