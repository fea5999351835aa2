"""Row kernels: gather, add, read-ahead, and the plan of a remote pull."""

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.graph import row_kernels
from dglx_dist.graph.row_kernels import (
    add_rows,
    check_summable,
    gather_rows,
    plan_remote,
    scatter_rows,
    spread_rows,
    sum_repeated,
    view_as_numpy,
    view_as_tensor,
    view_as_words,
)
from dglx_dist.records import Array, ColumnInfo


def plan_of(ids: list[int]):
    """All of ``ids`` are another server's: the own one, the second, has no rows."""
    return plan_remote(np.array(ids, dtype=np.int64), np.array([0, 10, 10]), 1)


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
    sums = view_as_tensor(sum_repeated(view_as_numpy(rows), plan_of([5] * 65), info), info)
    assert sums.tolist() == [1040.0]


@pytest.mark.parametrize("dtype", ["uint16", "bfloat16"])  # one dtype in NumPy
def test_adding_touches_only_the_rows_that_are_named_and_here(dtype: str) -> None:
    info = ColumnInfo(dtype=dtype, row_shape=(2,))
    target = torch.arange(6).reshape(3, 2).to(getattr(torch, dtype))
    rows = torch.tensor([[10, 20], [30, 40], [50, 60]]).to(getattr(torch, dtype))
    add_rows(view_as_numpy(target), 7, np.array([9, 6, 7]), view_as_numpy(rows), info)
    assert target.tolist() == [[50, 61], [2, 3], [14, 25]]


def test_bool_has_no_sum() -> None:
    with pytest.raises(ConfigError, match="'mask' holds bool, which cannot be added"):
        check_summable("mask", ColumnInfo(dtype="bool", row_shape=()))


ROWS = [
    ("float32", (100,)),
    ("float64", ()),
    ("bool", (3,)),
    ("uint16", (5,)),
    ("int8", ()),
    ("float32", (2, 3)),
]


def rows(count: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(0).integers(
        0, 256, size=(count, *shape, np.dtype(dtype).itemsize), dtype=np.uint8
    )
    if dtype == "bool":
        random &= 1
    return random.reshape(-1).view(dtype).reshape(count, *shape)


@pytest.mark.parametrize(("dtype", "shape"), ROWS)
def test_gather_equals_indexing_and_scatter_assignment(dtype: str, shape: tuple[int, ...]) -> None:
    table, ids = rows(20, dtype, shape), np.array([3, 19, 3, 0, 7, 8, 19])
    out, values = np.zeros((len(ids), *shape), dtype=dtype), rows(len(ids), dtype, shape)
    # Of two shards, and into one that has the rows 6 to 13.
    gather_rows(table[:8], 0, ids, out)
    gather_rows(table[8:].copy(), 8, ids, out)
    assert out.tobytes() == table[ids].tobytes()
    expected, part = table.copy(), table[6:14].copy()
    expected[ids] = values
    scatter_rows(values, part, 6, ids)
    assert part.tobytes() == expected[6:14].tobytes()


def test_a_buffer_off_the_word_boundary_is_read_in_smaller_words() -> None:
    raw = np.arange(1 + 3 * 8, dtype=np.uint8)[1:]
    source = raw.view(np.uint64)
    out = np.zeros(2, dtype=np.uint64)
    assert view_as_words(source, out)[0].dtype == np.uint8
    gather_rows(source, 0, np.array([2, 0]), out)
    assert out.tobytes() == raw[16:24].tobytes() + raw[:8].tobytes()


def test_rows_without_columns_and_no_rows_at_all_are_nothing_to_do() -> None:
    wide, narrow = ColumnInfo(dtype="float32", row_shape=(0,)), ColumnInfo(dtype="float32", row_shape=(3,))
    assert sum_repeated(np.zeros((2, 0), np.float32), plan_of([1, 1]), wide).shape == (1, 0)
    assert sum_repeated(np.zeros((0, 3), np.float32), plan_of([]), narrow).shape == (0, 3)
    gather_rows(np.zeros((4, 0), np.float32), 0, np.array([1, 2]), np.zeros((2, 0), np.float32))
    target, none = np.ones((2, 3), np.float32), np.empty((0, 3), np.float32)
    add_rows(target, 0, np.empty(0, np.int64), none, narrow)
    gather_rows(target, 0, np.empty(0, np.int64), none)
    assert target.tolist() == [[1] * 3] * 2


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((3, 2), np.float32),
        np.zeros((1, 2), np.float32),
        np.zeros((2, 3), np.float32),
        np.zeros((2, 2)),
    ],
)
def test_an_answer_of_other_rows_is_refused(rows: Array) -> None:
    plan, out = plan_remote(np.array([12, 3, 11, 12]), np.array([0, 10, 20]), 0), np.ones((4, 2), np.float32)
    spread_rows(np.zeros((2, 2), np.float32), out, plan.starts, plan.positions, 0, 2)
    assert out.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
    with pytest.raises(ValueError, match=r"request was for float32 of shape \(2, 2\)"):
        spread_rows(rows, out, plan.starts, plan.positions, 0, 2)


def _resident(rows: Array) -> set[int]:
    """Numbers of the 4 KiB pages of a mapped array that are in memory."""
    count = -(-rows.nbytes // mmap.PAGESIZE)
    result = (ctypes.c_ubyte * count)()
    address = ctypes.c_void_p(rows.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(rows.nbytes), result) == 0
    return {page for page, state in enumerate(result) if state & 1}


def test_rows_larger_than_memory_are_read_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, values = tmp_path / "rows", np.arange(1 << 21, dtype=np.int64).reshape(-1, 512)
    values.tofile(path)  # 4096 rows of a page each

    def map_file() -> Array:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            area = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(area, np.int64).reshape(values.shape)

    ids = np.array([3000, 17, 1000, 18, 9000, 3000])
    out = np.zeros((len(ids), 512), np.int64)
    rows = map_file()
    if _resident(rows):
        pytest.skip("this file system keeps its files in memory")
    assert not row_kernels.read_from_disk([rows])  # the memory holds them: the kernel may read around
    monkeypatch.setattr(row_kernels, "machine_memory", lambda: (values.nbytes, values.nbytes))
    assert row_kernels.read_from_disk([rows[:0], rows])
    row_kernels.request_rows(rows, 0, ids)
    # Asked for, and on their way; nothing has waited for them.
    expected, deadline = {17, 18, 1000, 3000}, time.monotonic() + 30
    while _resident(rows) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _resident(rows) == expected
    row_kernels.gather_rows(rows, 0, ids, out)
    assert out[:, 0].tolist() == [512 * row if row < len(rows) else 0 for row in ids]
    assert _resident(rows) == expected
    row_kernels.request_rows(rows[:0], 0, ids)
    row_kernels.request_rows(rows, 5000, ids[:4])
