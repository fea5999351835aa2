"""First values of trainable rows: keyed by seed, tensor and row, so that any rank may make any of them."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dglx_dist.draws.rng import full_word, item_key
from dglx_dist.records import Array

_CHUNK_BYTES = 1 << 24
"""Rows made at a time where they have to be converted."""


def fill_uniform(rows: Tensor, first: int, seed: int, name: str) -> None:
    """Fill rows with draws uniform in [-1, 1), the same for a row wherever and by whomever it is made.

    Args:
        rows: (n, d) floating point, contiguous, on the CPU; overwritten.
        first: Id of the first row.
        seed: Of the run.
        name: Tells the streams of several tensors apart.
    """
    stream = np.uint64(zlib.crc32(name.encode()) | (seed & 0xFFFFFFFF) << 32)
    if rows.dtype in (torch.float32, torch.float64):
        _fill(rows.numpy(), first, stream)
        return
    step = max(1, _CHUNK_BYTES // max(4 * rows.shape[1], 1))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        wide = np.empty(piece.shape, dtype=np.float32)
        _fill(wide, first + start, stream)
        piece.copy_(torch.from_numpy(wide))


@njit(cache=True, nogil=True)
def _fill(rows: Array, first: int, stream: np.uint64) -> None:
    count, columns = rows.shape
    for row in range(count):
        key = item_key(stream, first + row)
        for column in range(columns):
            # 24 bits, so that float32 and float64 rows start alike and 1 is never reached.
            rows[row, column] = np.float64(full_word(key, column) >> np.uint64(40)) * 2.0**-23 - 1.0
