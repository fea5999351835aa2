from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.graph.row_kernels import (
    as_words,
    first_outside,
    gather_rows,
    scatter_rows,
    spread_rows,
    take_rows,
)

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
def test_gather_from_two_shards_equals_indexing(dtype: str, shape: tuple[int, ...]) -> None:
    table, ids = rows(20, dtype, shape), np.array([3, 19, 3, 0, 7, 8, 19])
    out = np.zeros((len(ids), *shape), dtype=dtype)
    gather_rows(table[:8], 0, ids, out)
    gather_rows(table[8:].copy(), 8, ids, out)
    assert out.tobytes() == table[ids].tobytes()


@pytest.mark.parametrize(("dtype", "shape"), ROWS)
def test_scatter_equals_assignment(dtype: str, shape: tuple[int, ...]) -> None:
    values, ids = rows(4, dtype, shape), np.array([12, 3, 9, 12])
    table = np.zeros((8, *shape), dtype=dtype)
    expected = np.zeros((16, *shape), dtype=dtype)
    expected[ids] = values
    scatter_rows(values, table, 6, ids)
    assert table.tobytes() == expected[6:14].tobytes()


def test_spread_puts_a_row_at_each_of_its_places() -> None:
    out = np.zeros((5, 2), dtype=np.float32)
    starts, positions = np.array([0, 1, 3, 4]), np.array([4, 0, 2, 1])
    spread_rows(np.array([[1, 2], [3, 4]], dtype=np.float32), out, starts, positions, 1)
    assert out.tolist() == [[1, 2], [3, 4], [1, 2], [0, 0], [0, 0]]


def test_a_buffer_off_the_word_boundary_is_read_in_smaller_words() -> None:
    raw = np.arange(1 + 3 * 8, dtype=np.uint8)[1:]
    source = raw.view(np.uint64)
    out = np.zeros(2, dtype=np.uint64)
    assert as_words(source, out)[0].dtype == np.uint8
    gather_rows(source, 0, np.array([2, 0]), out)
    assert out.tobytes() == raw[16:24].tobytes() + raw[:8].tobytes()


def test_rows_without_columns_and_no_ids_are_nothing_to_do() -> None:
    gather_rows(np.zeros((4, 0), np.float32), 0, np.array([1, 2]), np.zeros((2, 0), np.float32))
    out = np.zeros((0, 3), np.float32)
    gather_rows(np.ones((4, 3), np.float32), 0, np.zeros(0, np.int64), out)
    assert out.shape == (0, 3)


@pytest.mark.parametrize(("ids", "position"), [([], -1), ([0, 4], -1), ([0, 5, 9], 1), ([2, 1, -1], 2)])
def test_the_first_id_out_of_range_is_found(ids: list[int], position: int) -> None:
    assert first_outside(np.array(ids, dtype=np.int64), 5) == position


@pytest.mark.parametrize(("dtype", "shape"), ROWS)
def test_taken_rows_are_those_that_indexing_gives(dtype: str, shape: tuple[int, ...]) -> None:
    source, places = rows(9, dtype, shape), np.array([8, 0, 3, 3])
    assert take_rows(source, places).tobytes() == source[places].tobytes()
    assert take_rows(source, places[:0]).shape == (0, *shape)
