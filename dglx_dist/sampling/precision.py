"""Stored features to the floating-point type that a model computes in, in memory that is used again."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dtypes import column_info
from dglx_dist.sampling.row_memory import RowMemory

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
