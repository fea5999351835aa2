"""Memory for the rows of batches' columns, used again from batch to batch."""

from __future__ import annotations

import math
import threading
from typing import final

import numpy as np
from torch import Tensor

from dglx_dist.graph.dtypes import empty_rows, tensor_view
from dglx_dist.records import ColumnInfo
from dglx_dist.sampling.buffers import BufferPool
from dglx_dist.storage.columns import numpy_dtype

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
