"""Reusable feature buffers, reclaimed by reference count, and conversion of feature dtypes."""

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

_MARGIN = 8
"""New buffers get 1/8 spare rows, so that batches of about the same size fit."""


@final
class BufferPool:
    """Pool of (n, words) arrays, since page faults of a fresh one cost as much as filling it. Thread-safe.

    An array is not returned explicitly: it is idle again when all its views, including tensors over it, are
    gone. At most ``most`` are kept.
    """

    def __init__(self, words: int, dtype: np.dtype[np.generic], most: int) -> None:
        self._words, self._dtype, self._most = words, dtype, most
        self._kept: list[Array] = []
        self._lock = threading.Lock()
        # Measured, because interpreters differ in the references that a loop itself holds.
        self._references_of_idle = _references([np.empty(0)])[0]

    def take(self, count: int) -> Array:
        """Return ``count`` uninitialised rows: of the longest idle array, else of one that replaces it."""
        with self._lock:
            counts = _references(self._kept)
            idle = [place for place, n in enumerate(counts) if n == self._references_of_idle]
            longest = max(idle, key=lambda place: len(self._kept[place]), default=None)
            if longest is not None and len(self._kept[longest]) >= count:
                return self._kept[longest][:count]
            array = np.empty((count + count // _MARGIN, self._words), self._dtype)
            if longest is not None:
                self._kept[longest] = array
            elif len(self._kept) < self._most:
                self._kept.append(array)
            return array[:count]


def _references(arrays: Sequence[Array]) -> list[int]:
    # Includes the references of this loop. A comprehension would hold others.
    counts = []
    for array in arrays:
        counts.append(sys.getrefcount(array))
    return counts


@final
class RowMemory:
    """Tensors for columns from a buffer pool per key and info, for ``num_batches`` at a time. Thread-safe."""

    def __init__(self, num_batches: int = 4) -> None:
        self._num_batches = num_batches
        self._pools: dict[tuple[str, ColumnInfo], BufferPool] = {}
        self._lock = threading.Lock()

    def rows(self, key: str, count: int, info: ColumnInfo) -> Tensor:
        """Return an uninitialised (``count``, *row) tensor for column ``key``; ``count`` may be 0."""
        width, dtype = math.prod(info.row_shape), numpy_dtype(info.dtype)
        if count == 0 or width == 0:
            return empty_rows(count, info)
        with self._lock:
            pool = self._pools.setdefault((key, info), BufferPool(width, dtype, self._num_batches))
        return tensor_view(pool.take(count).reshape(count, *info.row_shape), info)


HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)


@final
class Precision:
    """Converts the floating-point columns of batches to ``dtype``. Thread-safe.

    Features stored in half precision save disk, memory and network traffic, but few models compute in it, so
    None converts float16 and bfloat16 to float32 and keeps others. Integers and booleans are not converted.
    """

    def __init__(self, dtype: torch.dtype | None = None, num_batches: int = 4) -> None:
        self._dtype = check_float(dtype)
        self._memory = RowMemory(num_batches)

    def target(self, dtype: torch.dtype) -> torch.dtype:
        """Return the output dtype for a column of ``dtype``."""
        if dtype not in FLOATS:
            return dtype
        return self._dtype or (torch.float32 if dtype in HALVES else dtype)

    def converted(self, rows: Tensor) -> Tensor:
        """Return (K, *row) ``rows`` in the output dtype; ``rows`` itself if it has that dtype."""
        dtype = self.target(rows.dtype)
        if dtype == rows.dtype:
            return rows
        return self._memory.rows("", len(rows), column_info(dtype, tuple(rows.shape[1:]))).copy_(rows)


def check_float(dtype: object) -> torch.dtype | None:
    """Return ``dtype``; raise ConfigError unless it is None or a floating-point dtype of columns."""
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise ConfigError(
            f"feature_dtype={dtype!r}; give one of {', '.join(map(str, FLOATS))}, or None for float32 if "
            "features are stored in half precision"
        )
    return dtype
