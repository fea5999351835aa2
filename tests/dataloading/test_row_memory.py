"""Memory of batches comes back once the batch is gone, and not before."""

from __future__ import annotations

import torch

from dglx_dist.dataloading.row_buffers import RowMemory
from dglx_dist.records import ColumnInfo

PAIR = ColumnInfo(dtype="float32", row_shape=(2, 3))


def test_rows_have_the_shape_of_the_column() -> None:
    memory = RowMemory()
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        info = ColumnInfo(dtype=str(dtype).removeprefix("torch."), row_shape=())
        assert memory.rows(str(dtype), 5, info).shape == (5,)
        assert memory.rows(str(dtype), 5, info).dtype == dtype
    assert memory.rows("pair", 7, PAIR).shape == (7, 2, 3)
    assert memory.rows("pair", 7, PAIR).is_contiguous()
    assert memory.rows("pair", 0, PAIR).shape == (0, 2, 3)
    assert memory.rows("none", 4, ColumnInfo(dtype="int64", row_shape=(0,))).shape == (4, 0)


def test_memory_is_lent_again_only_when_nobody_holds_it() -> None:
    memory = RowMemory(2)
    first = memory.rows("feat", 80, PAIR)
    at = first.data_ptr()
    second = memory.rows("feat", 80, PAIR)
    assert second.data_ptr() != at
    # A view is enough to hold it.
    first = first[3:4]
    assert memory.rows("feat", 80, PAIR).data_ptr() not in (at, second.data_ptr())
    del first
    # One row in eight is spare.
    assert memory.rows("feat", 90, PAIR).data_ptr() == at
    assert memory.rows("other", 80, PAIR).data_ptr() != at


def test_a_column_in_two_dtypes_has_two_pools() -> None:
    memory = RowMemory()
    for _ in range(2):
        narrow = memory.rows("feat", 4, ColumnInfo(dtype="float16", row_shape=(3,)))
        wide = memory.rows("feat", 4, ColumnInfo(dtype="float32", row_shape=(3,)))
        assert (narrow.dtype, wide.dtype) == (torch.float16, torch.float32)
        assert narrow.data_ptr() != wide.data_ptr()
