"""Feature memory that is used again once nobody holds what was in it."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import column_info, empty_rows, tensor_view
from dglx_dist.records import Array, ColumnInfo


@final
class BufferPool:
    """Lends (n, words) arrays; a fresh one costs as much to be paged in as to be filled.

    There is no giving back: an array is free again when every view of it, every tensor over it included, is
    gone. Any thread may call it.

    Args:
        words: Columns of each array.
        dtype: Of each array.
        most: How many arrays are kept at most; what is needed beyond is not kept.
    """

    def __init__(self, words: int, dtype: np.dtype[np.generic], most: int) -> None:
        self._empty = np.empty((0, words), dtype)
        self._most = most
        self._kept: list[Array] = []
        self._lock = threading.Lock()
        # Interpreters differ in how many references a loop itself holds, so it is measured.
        self._references_of_idle = _references([np.empty(0)])[0]

    def borrow(self) -> Array:
        """Return the longest kept array that nobody uses; one of no rows when there is none."""
        with self._lock:
            idle = self._idle()
            return max((self._kept[place] for place in idle), key=len, default=self._empty)

    def keep(self, array: Array) -> None:
        """Remember ``array`` for later, in the place of a shorter idle one if there is no other."""
        with self._lock:
            if any(kept is array for kept in self._kept):
                return
            shorter = [place for place in self._idle() if len(self._kept[place]) < len(array)]
            if shorter:
                self._kept[shorter[0]] = array
            elif len(self._kept) < self._most:
                self._kept.append(array)

    def _idle(self) -> list[int]:
        counts = _references(self._kept)
        return [place for place, count in enumerate(counts) if count == self._references_of_idle]


def _references(arrays: Sequence[Array]) -> list[int]:
    """Return how many references each array has, those of this loop included."""
    counts = []
    for array in arrays:
        counts.append(sys.getrefcount(array))
    return counts


_ROOM = 8
"""One row in so many is spare, so that batches of about the same size find room."""


@final
class RowMemory:
    """Lends tensors for columns, one pool of memory for each key and info; any thread may call it.

    Args:
        num_batches: How many batches may be alive at a time; memory for more is fresh.
    """

    def __init__(self, num_batches: int = 4) -> None:
        self._num_batches = num_batches
        self._pools: dict[tuple[str, ColumnInfo], BufferPool] = {}
        self._lock = threading.Lock()

    def rows(self, key: str, count: int, info: ColumnInfo) -> Tensor:
        """Return uninitialised (``count``, *row) of memory that no living batch holds.

        Args:
            key: Of the column.
            count: Rows, may be 0.
            info: Dtype and row shape.
        """
        width, dtype = math.prod(info.row_shape), numpy_dtype(info.dtype)
        if count == 0 or width == 0:
            return empty_rows(count, info)
        with self._lock:
            pool = self._pools.setdefault((key, info), BufferPool(width, dtype, self._num_batches))
        array = pool.borrow()
        if len(array) < count:
            array = np.empty((count + count // _ROOM, width), dtype)
        pool.keep(array)
        return tensor_view(array[:count].reshape(count, *info.row_shape), info)


HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)


@final
class Precision:
    """Converts the floating-point columns of batches; any thread may call it.

    Features that are stored in half precision cost half the disk, memory and wire, but few models compute
    in it: they are handed out as float32 unless told otherwise. Integers and booleans stay what they are.

    Args:
        dtype: What floating-point columns become; None: float16 and bfloat16 become float32, others stay.
        num_batches: How many batches may be alive at a time: so many buffers are kept for each dtype and
            row shape.
    """

    def __init__(self, dtype: torch.dtype | None = None, num_batches: int = 4) -> None:
        self._dtype = check_float(dtype)
        self._memory = RowMemory(num_batches)

    def target(self, dtype: torch.dtype) -> torch.dtype:
        """Return what a column of ``dtype`` becomes."""
        if dtype not in FLOATS:
            return dtype
        return self._dtype or (torch.float32 if dtype in HALVES else dtype)

    def converted(self, rows: Tensor) -> Tensor:
        """Return (K, *row) ``rows`` in the type to compute in: itself where it has that type already."""
        dtype = self.target(rows.dtype)
        if dtype == rows.dtype:
            return rows
        return self._memory.rows("", len(rows), column_info(dtype, tuple(rows.shape[1:]))).copy_(rows)


def check_float(dtype: object) -> torch.dtype | None:
    """Return ``dtype``.

    Raises:
        ConfigError: it is neither None nor one of torch's floating-point types that a column can have.
    """
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise ConfigError(
            f"feature_dtype={dtype!r}; give one of {', '.join(map(str, FLOATS))}, or None for float32 where "
            "features are stored in half precision"
        )
    return dtype
