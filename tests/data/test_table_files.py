"""One table, one column at a time."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dglx_dist.data.tables import id_column, number_column, read_table, stacked_columns
from dglx_dist.errors import DatasetError

FIXED = pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0, 3.0, 4.0]), 2)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_both_kinds_of_file_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    if suffix == ".csv":
        path.write_text("a,b\n1,x\n2,y\n")
    else:
        pyarrow.parquet.write_table(pa.table({"a": [1, 2], "b": ["x", "y"]}), path)
    assert read_table(path).to_pydict() == {"a": [1, 2], "b": ["x", "y"]}


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("no parquet")
    (tmp_path / "t.txt").write_text("a\n1\n")
    with pytest.raises(DatasetError, match=r"t\.parquet: not readable as a parquet table"):
        read_table(tmp_path / "t.parquet")
    with pytest.raises(DatasetError, match=r"t\.txt: a table must be one of \.csv, \.parquet"):
        read_table(tmp_path / "t.txt")
    with pytest.raises(DatasetError, match=r"there is no table .*t\.csv"):
        read_table(tmp_path / "t.csv")


def test_ids_come_in_one_chunk_of_one_of_two_types() -> None:
    chunks = pa.chunked_array([pa.array([1, 2], pa.int16()), pa.array([3], pa.int16())])
    ids = id_column(pa.table({"id": chunks}), "id", "t")
    assert ids.type == pa.int64()
    assert ids.to_pylist() == [1, 2, 3]
    texts = pa.array(["x", "y", "x"])
    for kept in (texts.dictionary_encode(), texts.cast(pa.string_view())):
        assert id_column(pa.table({"id": kept}), "id", "t").to_pylist() == ["x", "y", "x"]
    with pytest.raises(DatasetError, match="t: the table has no row"):
        id_column(pa.table({"id": pa.array([], pa.int64())}), "id", "t")


def test_a_missing_column_lists_those_there_are() -> None:
    with pytest.raises(DatasetError, match=r"t: has no column 'id' \(it has a, b\)"):
        id_column(pa.table({"a": [1], "b": [2]}), "id", "t")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([1, 2]), [1, 2]),
        (pa.array([True, False]), [True, False]),
        (pa.array([[1.0], [2.0]]), [[1.0], [2.0]]),
        (FIXED, [[1.0, 2.0], [3.0, 4.0]]),
        (FIXED.slice(1), [[3.0, 4.0]]),
    ],
)
def test_numbers_and_lists_of_numbers_become_arrays(values: object, expected: list[object]) -> None:
    assert number_column(pa.table({"x": values}), "x", "t").tolist() == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([1.0, None]), "column 'x', row 1: is empty"),
        (pa.array([1.0, np.nan]), "column 'x', row 1: nan"),
        (pa.array([[1.0, 2.0], [3.0, None]]), "column 'x', row 1: has an empty value"),
        (pa.array([[1.0], []]), "column 'x', row 1: a list of 0 values, but row 0 has 1"),
        (pa.array(["a"]), "column 'x' must hold numbers; it holds string"),
    ],
)
def test_gaps_and_other_things_are_refused(values: object, message: str) -> None:
    with pytest.raises(DatasetError, match=f"t: {message}"):
        number_column(pa.table({"x": values}), "x", "t")


def test_columns_stand_side_by_side_in_the_order_asked_for() -> None:
    table = pa.table({"a": [1, 2], "b": [0.5, 1.5], "c": [[1.0], [2.0]]})
    stacked = stacked_columns(table, ["b", "a"], "t")
    assert stacked.dtype == np.float32
    assert stacked.tolist() == [[0.5, 1.0], [1.5, 2.0]]
    with pytest.raises(DatasetError, match="column 'c' holds lists"):
        stacked_columns(table, ["a", "c"], "t")
