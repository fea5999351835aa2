"""The records that have behaviour."""

from __future__ import annotations

import numpy as np

from dglx_dist.records import SparseRows

# . . 7
# . . .    (the dots are zeros)
# 1 2 .
ROWS = SparseRows(
    indptr=np.array([0, 1, 1, 3]),
    indices=np.array([2, 0, 1], dtype=np.int32),
    values=np.array([7.0, 1.0, 2.0], dtype=np.float32),
    num_columns=3,
)


def test_sparse_rows_become_dense_in_the_order_asked() -> None:
    assert ROWS.shape == (3, 3)
    assert ROWS.dtype == np.float32
    dense = ROWS.dense(np.array([2, 0, 1, 2]))
    assert dense.tolist() == [[1, 2, 0], [0, 0, 7], [0, 0, 0], [1, 2, 0]]
    assert dense.dtype == np.float32
    assert ROWS.dense(np.empty(0, np.int64)).shape == (0, 3)
