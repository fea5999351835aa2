"""One array in one file: equal after the round trip, memory-mapped, read-only; and the paths of a part."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglx_dist.data.storage.columns import (
    DTYPES,
    checksum,
    make_column_info,
    numpy_dtype,
    read_column,
    read_strings,
    safe_name,
    write_column,
)
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import ColumnInfo


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 2), (0,), (0, 3), (5, 0)])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    values = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(numpy_dtype(dtype))
    info = ColumnInfo(dtype=dtype, row_shape=shape[1:])
    path = tmp_path / "x.arrow"
    written = write_column(path, info, shape[0], [values[:2], values[2:]])
    rows = read_column(path, "x", info, shape[0])
    assert rows.dtype == values.dtype
    np.testing.assert_array_equal(rows, values)
    assert not rows.flags.writeable
    assert rows.flags.c_contiguous
    assert checksum(path) == written


def test_the_file_is_plain_arrow(tmp_path: Path) -> None:
    info = ColumnInfo(dtype="float32", row_shape=(2,))
    write_column(tmp_path / "x.arrow", info, 3, [np.arange(6, dtype=np.float32).reshape(3, 2)])
    table = pa.ipc.open_file(tmp_path / "x.arrow").read_all()
    assert table.column("values").to_pylist() == [0, 1, 2, 3, 4, 5]
    assert table.schema.metadata == {b"dtype": b"float32", b"shape": b"[3, 2]"}


def test_a_dtype_that_cannot_be_stored_is_named() -> None:
    with pytest.raises(ConfigError, match="w has dtype complex64"):
        make_column_info(np.zeros(3, np.complex64), "w")


def test_chunks_that_do_not_add_up_are_our_bug(tmp_path: Path) -> None:
    info = ColumnInfo(dtype="int64", row_shape=())
    with pytest.raises(AssertionError, match="add up"):
        write_column(tmp_path / "x.arrow", info, 3, [np.zeros(2, np.int64)])


def test_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    write_column(path, ColumnInfo(dtype="int64", row_shape=()), 3, [np.arange(3)])
    with pytest.raises(StorageError, match=r"x\.arrow holds int64 of shape \(3,\)"):
        read_column(path, "x", ColumnInfo(dtype="int64", row_shape=()), 4)
    with pytest.raises(StorageError, match="manifest says float32"):
        read_column(path, "x", ColumnInfo(dtype="float32", row_shape=()), 3)
    with pytest.raises(StorageError, match="does not hold 3 strings"):
        read_strings(path, "x", 3)
    with pytest.raises(StorageError, match=r"y\.arrow.* is missing"):
        read_column(tmp_path / "y.arrow", "x")


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"nothing of Arrow's, but long enough to look like it"])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"x\.arrow.* is damaged"):
        read_column(path, "x")


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


def test_odd_names_are_harmless() -> None:
    names = {"..": "%2E%2E", "a/b": "a%2Fb", "": "%", "A b": "A%20b", "ü": "%C3%BC"}
    assert {name: safe_name(name) for name in names} == names


@given(names, names)
def test_different_names_stay_different(one: str, other: str) -> None:
    assert (safe_name(one) == safe_name(other)) == (one == other)


@given(names)
def test_it_is_a_file_name(name: str) -> None:
    file_name = safe_name(name)
    assert 0 < len(file_name) <= 80
    assert file_name.isascii()
    assert not set(file_name) & set("./\\:~ \0")
