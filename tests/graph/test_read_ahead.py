from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from dglx_dist.graph.row_kernels import change_ahead, read_ahead


@njit
def ask_for_all(rows: np.ndarray) -> None:
    for row in range(rows.shape[0]):
        read_ahead(rows, row)
        change_ahead(rows, row)


@pytest.mark.parametrize("shape", [(3, 1), (3, 17), (2, 0), (0, 4)])
def test_rows_that_are_asked_for_stay_as_they_are(shape: tuple[int, int]) -> None:
    for dtype in (np.float32, np.float64):
        rows = np.arange(shape[0] * shape[1], dtype=dtype).reshape(shape)
        before = rows.copy()
        ask_for_all(rows)
        assert np.array_equal(rows, before)
