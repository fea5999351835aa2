from __future__ import annotations

import numpy as np
import pytest
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import (
    add_rows,
    check_summable,
    numpy_view,
    plan_remote,
    sum_repeated,
    tensor_view,
)
from dglx_dist.records import ColumnInfo

DTYPES = ["float32", "float64", "int64", "int8", "uint16", "float16", "bfloat16"]


def plan_of(ids: list[int]):
    """All of ``ids`` are another server's: the own one, the second, has no rows."""
    return plan_remote(np.array(ids, dtype=np.int64), np.array([0, 10, 10]), 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_id_are_summed(dtype: str) -> None:
    info = ColumnInfo(dtype=dtype, row_shape=(2,))
    rows = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]).to(getattr(torch, dtype))
    plan = plan_of([4, 1, 4, 4])
    sums = tensor_view(sum_repeated(numpy_view(rows), plan, info), info)
    assert sums.dtype == rows.dtype
    assert plan.ids.tolist() == [4, 1]
    assert sums.tolist() == [[13, 16], [3, 4]]


def test_the_order_of_the_sum_is_the_one_given() -> None:
    # In float32, 1e8 + 1 is 1e8: the other order would give 1.
    rows = np.array([1, 1e8, -1e8], dtype=np.float32)
    info = ColumnInfo(dtype="float32", row_shape=())
    assert sum_repeated(rows, plan_of([3, 3, 3]), info).tolist() == [0]
    assert sum_repeated(rows[[1, 2, 0]], plan_of([3, 3, 3]), info).tolist() == [1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype: str) -> None:
    # One unit of a row of 1024 at a time would be lost in bfloat16, and 0.25 in float16.
    info, torch_dtype = ColumnInfo(dtype=dtype, row_shape=()), getattr(torch, dtype)
    rows = torch.cat([torch.tensor([1024.0]), torch.full((64,), 0.25)]).to(torch_dtype)
    sums = tensor_view(sum_repeated(numpy_view(rows), plan_of([5] * 65), info), info)
    assert sums.tolist() == [1040.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_touches_only_the_rows_that_are_named_and_here(dtype: str) -> None:
    info = ColumnInfo(dtype=dtype, row_shape=(2,))
    target = torch.arange(6).reshape(3, 2).to(getattr(torch, dtype))
    rows = torch.tensor([[10, 20], [30, 40], [50, 60]]).to(getattr(torch, dtype))
    add_rows(numpy_view(target), 7, np.array([9, 6, 7]), numpy_view(rows), info)
    assert target.tolist() == [[50, 61], [2, 3], [14, 25]]


def test_rows_without_columns_and_no_rows_at_all() -> None:
    wide, narrow = ColumnInfo(dtype="float32", row_shape=(0,)), ColumnInfo(dtype="float32", row_shape=(3,))
    assert sum_repeated(np.zeros((2, 0), np.float32), plan_of([1, 1]), wide).shape == (1, 0)
    assert sum_repeated(np.zeros((0, 3), np.float32), plan_of([]), narrow).shape == (0, 3)
    target = np.ones((2, 3), np.float32)
    add_rows(target, 0, np.empty(0, np.int64), np.empty((0, 3), np.float32), narrow)
    assert target.tolist() == [[1] * 3] * 2


def test_bool_has_no_sum() -> None:
    with pytest.raises(ConfigError, match="'mask' holds bool, which cannot be added"):
        check_summable("mask", ColumnInfo(dtype="bool", row_shape=()))
