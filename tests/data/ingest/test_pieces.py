"""The parts that ingesting is made of: rows by position, buckets of ids, sorted edges, splits, transforms."""

import re
import tracemalloc
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dglx_dist.data.external_memory import Budget, EdgeStream, Spill, sort_edges
from dglx_dist.data.ingest.config import FeatureSpec
from dglx_dist.data.ingest.features import join_settings, make_transforms
from dglx_dist.data.ingest.node_ids import IdMap
from dglx_dist.data.ingest.tensors import NO_SPLIT, Labels, draw_split_codes
from dglx_dist.data.tables import FileSet, PiecewiseTable, TableColumn
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.records import Array
from tests.helpers import refusal


def test_what_repeats_in_a_table_is_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(5000 * 200) % 2, pa.float64()), 200)
    names = pa.array(["a name that all have " * 50] * 5000)
    path = tmp_path / "n.parquet"
    pyarrow.parquet.write_table(pa.table({"x": rows, "name": names}), path, row_group_size=2000)
    table = PiecewiseTable(FileSet(paths=(path,), format="parquet"), 1 << 16)
    for names_read in (["x"], ["name"], ["x", "name"]):
        pieces = list(table.pieces(names_read))
        assert sum(piece.num_rows for piece in pieces) == 5000
        assert (
            max(sum(column.values.nbytes for column in piece.columns.values()) for piece in pieces) <= 1 << 16
        )
    assert path.stat().st_size < 1 << 17


def test_a_row_of_csv_that_does_not_end_is_told(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text('id\na\n"b\n' + "c\n" * 150_000)
    table = PiecewiseTable(FileSet(paths=(path,), format="csv"), 1 << 16)
    with pytest.raises(
        DatasetError, match=r"n.csv: .*; close a quote, or write Parquet if a row has over 64 KB"
    ):
        list(table.pieces(["id"]))


def test_one_id_in_all_rows_is_found_without_holding_them(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text("id\n" + "same\n" * 40_000)
    table = PiecewiseTable(FileSet(paths=(path,), format="csv"), 1 << 16)
    ids = IdMap(tmp_path / "map", 40_000, is_text=True, id_bytes=4 * 40_000, memory=1 << 16)
    for piece in table.pieces(["id"]):
        ids.add(piece.columns["id"].values.cast(pa.large_string()), piece.row)
    tracemalloc.start()
    with pytest.raises(
        DatasetError, match=r"n.csv: column 'id', row 1: node id 'same' already occurs in row 0"
    ):
        ids.check_unique(table, "id")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 40_000 * 16


@pytest.mark.parametrize("memory", [500, 1 << 20], ids=["buckets", "one bucket"])
def test_the_first_of_the_unknown_ids_is_named(tmp_path: Path, memory: int) -> None:
    ids = IdMap(tmp_path / "map", 40, is_text=False, id_bytes=100, memory=memory)
    ids.add(pa.array(range(0, 280, 7)), 0)
    (tmp_path / "lines").write_text("273\n7\n1\n\n14\n2\n")
    lines = PiecewiseTable(FileSet(paths=(tmp_path / "lines",), format="lines"), 1 << 16)
    with pytest.raises(DatasetError, match=r"row 2: node id 1 is not among the ids of them \(.*: 2\)"):
        ids.find(lines, "id", "them", tmp_path / "asked")


@pytest.mark.parametrize("ids", [[str(number) for number in range(20_000)], range(20_000),
                                 [number << 40 for number in range(20_000)]])  # fmt: skip
def test_ids_spread_evenly_over_the_buckets(tmp_path: Path, ids: Any) -> None:
    buckets = IdMap(tmp_path, 20_000, is_text=ids[0] == "0", id_bytes=0, memory=240_000)._find_buckets(
        pa.array(ids)
    )
    assert np.bincount(buckets, minlength=8).min() > 2200


def test_more_edges_of_a_node_than_can_be_sorted_are_told(tmp_path: Path) -> None:
    zeros = Spill(tmp_path / "zeros", np.int64, [np.zeros(100)]).chunks
    edges = EdgeStream(sources=zeros, destinations=zeros, columns=[], num_sources=20, num_destinations=10)
    with pytest.raises(
        ConfigError, match=r"100 edges end at node 0, sorted together; grant --memory 2\d\dMB"
    ):
        sort_edges(edges, tmp_path / "out", Budget(work=6 * 700))


@pytest.mark.parametrize(
    ("count", "shares", "expected"),
    [
        (9, (0.8, 0.1, 0.1), [7, 1, 1]),
        (1, (0.8, 0.1, 0.1), [1, 0, 0]),
        (1000, (0.8, 0.1, 0.1), [800, 100, 100]),
        (9, (0.5, 0.0, 0.0), [4, 0, 0]),
        (5, (0.5, 0.5, 0.0), [3, 2, 0]),
    ],
)
def test_shares_of_1_leave_no_row_out(count: int, shares: tuple[float, ...], expected: list[int]) -> None:
    codes = draw_codes([np.ones(count, bool)], count, shares)
    assert np.bincount(codes, minlength=3)[:3].tolist() == expected


def draw_codes(pieces: list[Array], count: int, shares: tuple[float, ...], seed: int = 5) -> Array:
    return np.concatenate(list(draw_split_codes(iter(pieces), count, shares, seed)))


def test_a_draw_has_exact_shares_and_does_not_depend_on_the_pieces() -> None:
    labelled, shares = np.random.default_rng(2).random(200_000) < 0.5, (0.8, 0.1, 0.05)
    count = int(labelled.sum())
    codes = draw_codes([labelled], count, shares)
    assert np.array_equal(draw_codes(np.array_split(labelled, 7), count, shares), codes)
    assert not np.array_equal(draw_codes([labelled], count, shares, seed=6), codes)
    assert (codes[~labelled] == NO_SPLIT).all()
    assert np.bincount(codes[labelled])[:3].tolist() == [int(count * share + 1e-6) for share in shares]
    # Every place is as likely: the first tenth has its tenth of the validation rows, within 5 deviations.
    first = (codes[labelled][: count // 10] == 1).sum()
    assert abs(first - count / 100) < 5 * (count / 100) ** 0.5


def test_more_rows_than_can_be_drawn_are_told() -> None:
    with pytest.raises(ConfigError, match="1000000000 labelled rows"):
        next(draw_split_codes(iter([np.ones(1, bool)]), 10**9, (0.8, 0.1, 0.1), 0))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["red", "", "blue", None], [1, -1, 0, -1]),
        (["10", "9", ""], [10, 9, -1]),
        (["10.0", "2.0", "", "-1"], [10, 2, -1, -1]),
        (["10", "nine"], [0, 1]),
        (["1.0", "1.5"], [0, 1]),
        ([3, None, 0], [3, -1, 0]),
        ([1.0, float("nan")], [1, -1]),
        ([1.0, 1.5], ", row 11: 1.5 is not a class"),
        (["", None], " has no label in any row; leave labels out"),
        ([10**9], " has the label 1000000000, .* whether it is an id"),
    ],
)
def test_labels_become_numbers_or_are_refused(values: list[object], expected: Any) -> None:
    labels, rows = Labels("y", is_regression=False), TableColumn(pa.array(values), "y", "t.csv", 10)

    def scan() -> None:
        labels.scan(rows)
        labels.finalize("t.csv")

    if isinstance(expected, str):
        assert re.search(f"t.csv: column 'y'{expected}", refusal(scan, DatasetError))
        return
    scan()
    assert labels.codes(rows).tolist() == expected
    assert labels.num_classes == max(expected) + 1


def test_labels_of_two_kinds_are_refused() -> None:
    mixed = Labels("y", is_regression=False)
    mixed.scan(TableColumn(pa.array(["a"]), "y", "t.parquet"))
    with pytest.raises(DatasetError, match="holds int64, but an earlier file holds texts"):
        mixed.scan(TableColumn(pa.array([1]), "y", "u.parquet"))


@pytest.mark.parametrize(
    "values", [["1.5", " ", None, "2"], [1.5, None, float("nan"), 2.0], [1, None, None, 2]]
)
def test_a_regression_has_no_target_where_it_is_empty(values: list[Any]) -> None:
    codes = Labels("y", is_regression=True).codes(TableColumn(pa.array(values), "y", "t.csv"))
    assert np.isnan(codes).tolist() == [False, True, True, False]
    assert (codes[0], codes[3]) == (values[0] if values[0] == 1 else 1.5, 2)
    with pytest.raises(DatasetError, match=r"t.csv: column 'y', row 1: 'x' is not a number; correct"):
        Labels("y", is_regression=True).codes(TableColumn(pa.array(["", "x"]), "y", "t.csv"))


@pytest.mark.parametrize("is_regression", [False, True])
def test_labels_of_other_types_are_numbers_or_refused(is_regression: bool) -> None:
    labels = Labels("y", is_regression)
    for values in ([True, False, None], [Decimal("1.0"), Decimal(0), None]):
        codes = labels.codes(TableColumn(pa.array(values), "y", "t.parquet"))
        np.testing.assert_array_equal(codes, [1, 0, np.nan if is_regression else -1])
    none = labels.codes(TableColumn(pa.nulls(2), "y", "t.parquet"))
    np.testing.assert_array_equal(none, [np.nan if is_regression else -1] * 2)
    for wrong in ([[1.0]], [date(2020, 1, 1)]):
        with pytest.raises(DatasetError, match=r"column 'y'.* must hold labels, numbers or texts; it holds"):
            labels.codes(TableColumn(pa.array(wrong), "y", "t.parquet"))
    with pytest.raises(DatasetError, match="column 'y', row 1"):
        labels.codes(TableColumn(pa.array([1.0, float("inf")]), "y", "t.parquet"))


def apply_transform(values: list[Any], name: str, **settings: Any) -> list[Any]:
    """Transform one column that the transform has seen in two pieces."""
    (transform,) = make_transforms(FeatureSpec(columns=("x",), name="f", transform=name, settings=settings))
    array = pa.array(values)
    for first in (0, 2):
        transform.scan(TableColumn(array.slice(first, 2), "x", "t.csv", first))
    transform.finalize("t.csv")
    return [list(row) for row in transform.apply(TableColumn(array, "x", "t.csv")).tolist()]


@pytest.mark.parametrize(
    ("values", "name", "settings", "expected"),
    [
        ([1, 3, 5, 2], "max_min_norm", {}, [[0.0], [0.5], [1.0], [0.25]]),
        ([1, 3, 9, 2], "max_min_norm", {"max_bound": 5, "min_bound": -7}, [[0.0], [0.5], [1.0], [0.25]]),
        ([0, 3, 9, 2], "max_min_norm", {"max_val": [5], "min_val": 1}, [[0.0], [0.5], [1.0], [0.25]]),
        ([[0, 1], [1, 5], [2, 3], [4, 1]], "max_min_norm", {}, [[0, 0], [0.25, 1], [0.5, 0.5], [1, 0]]),
        ([1.0, 2.0, 4.0, 1.0], "standard", {}, [[0.125], [0.25], [0.5], [0.125]]),
        ([1.0, 2.0, 4.0, 1.0], "standard", {"sum": 2}, [[0.5], [1.0], [2.0], [0.5]]),
        (["b", None, "a", ""], "to_categorical", {}, [[0, 1], [0, 0], [1, 0], [0, 0]]),
        (["b,a", "c", "a", None], "to_categorical", {"separator": ","},
         [[1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]]),
        (["b", "x", "a", "b"], "to_categorical", {"mapping": {"b": 0, "a": 1}},
         [[1, 0], [0, 0], [0, 1], [1, 0]]),
        ([7, 8, 9, 7], "to_categorical", {}, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]),
        (["1; 2 ;3", "4;5e0;6", "7;8;9", "0;0;0"], "no-op", {"separator": ";", "truncate_dim": 2},
         [[1, 2], [4, 5], [7, 8], [0, 0]]),
        ([2, 2, 2, 2], "max_min_norm", {}, "t.csv: column 'x' has the maximum 2.0, which is not above"),
        ([[1, 2], [3, 4], [1], [2]], "max_min_norm", {}, "row 2: a row of 1 numbers, but earlier have"),
        ([["a"], ["b"], [], []], "to_categorical", {}, "one value or separated texts per row"),
        (["", None, "", None], "to_categorical", {}, "has no value to make a category of"),
        ([b"a", b"\xff", b"a", b"a"], "to_categorical", {}, "holds binary; write texts"),
        ([[1], [2], [3], [4]], "no-op", {"truncate_dim": 2}, "below truncate_dim=2"),
        (["1;2", "3;4", "b;5", ";"], "no-op", {"separator": ";"}, "column 'x', row 2: 'b' is not a number"),
        (["1;2", "3", "1", "2"], "no-op", {"separator": ";"}, "row 1: a list of 1, but row 0 has 2"),
        ([1, 2, None, 3], "standard", {}, "t.csv: column 'x', row 2: is empty"),
        ([], "max_min_norm", {"max_bound": "5"}, "of the column 'x': key 'max_bound' is '5', expected"),
        ([], "max_min_norm", {"min_val": []}, "'min_val' is .*, expected a list of at least 1"),
        ([], "standard", {"sum": [10**400]}, r"'sum\[0\]' is 1000.*, expected a number from"),
        ([], "to_categorical", {"mapping": {"a": 1}}, "a number for each text, from 0 on without gaps"),
        ([], "to_categorical", {"mapping": {}}, "'mapping' is .*, expected an object of at least 1 fields"),
        ([], "to_categorical", {"mapping": {"a": 0, "b": "1"}}, "'mapping.b' is '1', expected a whole"),
        ([], "to_categorical", {"mapping": {"a": 0, "b": None}}, "'mapping.b' is None"),
        ([], "to_categorical", {"separator": ""}, "'separator' is '', expected a text"),
        ([], "no-op", {"truncate_dim": 0}, "'truncate_dim' is 0, expected a whole number of at least 1"),
        ([], "no-op", {"truncate_dim": True}, "'truncate_dim' is True"),
    ],
)  # fmt: skip
def test_transforms_a_column(values: list[Any], name: str, settings: dict[str, Any], expected: Any) -> None:
    if isinstance(expected, list):
        assert apply_transform(values, name, **settings) == expected
        return
    with pytest.raises((ConfigError, DatasetError), match=expected):
        apply_transform(values, name, **settings)


def test_what_was_found_for_each_column_is_read_again() -> None:
    spec = FeatureSpec(columns=("x", "y"), name="f", transform="standard", settings={})
    made = make_transforms(spec)
    for transform, values in zip(made, ([1.0, 3.0], [2.0, 6.0]), strict=True):
        transform.scan(TableColumn(pa.array(values), "x", "t.csv"))
    settled = join_settings([transform.finalize("t.csv") for transform in made])
    assert settled == {"sum": [[4.0], [8.0]]}
    again = make_transforms(FeatureSpec(columns=("x", "y"), name="f", transform="standard", settings=settled))
    assert [transform.apply(TableColumn(pa.array([2.0]), "x", "t.csv")).tolist() for transform in again] == [
        [[0.5]],
        [[0.25]],
    ]
