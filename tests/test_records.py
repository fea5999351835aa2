"""The records that have behaviour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dglx_dist.records import EDGE_TYPE, NODE_TYPE, EpochRecord, RawGraph, SparseRows

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


def test_a_graph_of_one_type_is_homogeneous() -> None:
    edges = (np.array([0, 1]), np.array([1, 2]))
    one = RawGraph(name="path", num_nodes={NODE_TYPE: 3}, edges={EDGE_TYPE: edges})
    assert one.is_homogeneous
    two = replace(one, num_nodes={NODE_TYPE: 3, "author": 2})
    assert not two.is_homogeneous
    assert (two.total_nodes, two.total_edges) == (5, 2)


def test_samples_per_second_of_an_epoch_that_took_no_time() -> None:
    record = EpochRecord(
        epoch=0,
        loss=1.0,
        train_accuracy=0.5,
        val_accuracy=None,
        seconds=2.0,
        num_samples=100,
        sample_s=0.0,
        fetch_s=0.0,
        wait_s=0.0,
        compute_s=0.0,
        exchange_s=0.0,
        bytes_inside=0,
        bytes_outside=0,
    )
    assert record.samples_per_second == 50
    assert replace(record, seconds=0.0).samples_per_second == 0
