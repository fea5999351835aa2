"""The parts that ingesting is made of: rows by position, buckets of ids, sorted edges, splits, transforms."""

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dglx_dist.data.ingest.config import FeatureSpec, FileSet
from dglx_dist.data.ingest.external_memory import IdMap, Scatter, Spill
from dglx_dist.data.ingest.features import join_settings, make_transforms
from dglx_dist.data.ingest.graph import sort_edges
from dglx_dist.data.ingest.tables import Table, numbers_of_text
from dglx_dist.data.ingest.tensors import NO_SPLIT, Labels, draw_split_codes
from dglx_dist.data.tables import Column
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.records import Array


@pytest.mark.parametrize("memory", [1, 100, 10_000])
def test_scattered_rows_come_back_in_order(tmp_path: Path, memory: int) -> None:
    order = np.random.default_rng(0).permutation(50)
    rows = np.arange(150, dtype=np.float32).reshape(50, 3)
    scatter = Scatter(tmp_path, 52, np.float32, (3,), memory=memory, fill=7)
    for piece in np.array_split(order, 4):
        scatter.put(piece, rows[piece])
    found = np.concatenate(list(scatter.chunks()))
    assert np.array_equal(found[:50], rows)
    assert (found[50:] == 7).all()
    assert list(tmp_path.iterdir()) == []


def test_what_repeats_in_a_table_is_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(5000 * 200) % 2, pa.float64()), 200)
    names = pa.array(["a name that all have " * 50] * 5000)
    path = tmp_path / "n.parquet"
    pyarrow.parquet.write_table(pa.table({"x": rows, "name": names}), path, row_group_size=2000)
    table = Table(FileSet(paths=(path,), format="parquet"), 1 << 16)
    for names_read in (["x"], ["name"], ["x", "name"]):
        pieces = list(table.pieces(names_read))
        assert sum(piece.num_rows for piece in pieces) == 5000
        assert max(sum(one.values.nbytes for one in piece.columns.values()) for piece in pieces) <= 1 << 16
    assert path.stat().st_size < 1 << 17


def test_a_row_of_csv_that_does_not_end_is_told(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text('id\na\n"b\n' + "c\n" * 150_000)
    table = Table(FileSet(paths=(path,), format="csv"), 1 << 16)
    with pytest.raises(DatasetError, match=r"n.csv: .*; a quote is open, or a row has over 64 KB"):
        list(table.pieces(["id"]))


def test_one_id_in_all_rows_is_found_without_holding_them(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text("id\n" + "same\n" * 40_000)
    table = Table(FileSet(paths=(path,), format="csv"), 1 << 16)
    ids = IdMap(tmp_path / "map", 40_000, is_text=True, id_bytes=4 * 40_000, memory=1 << 16)
    for piece in table.pieces(["id"]):
        ids.add(piece.columns["id"].values.cast(pa.large_string()), piece.row)
    tracemalloc.start()
    with pytest.raises(
        DatasetError, match=r"n.csv: column 'id', row 1: node id 'same' occurs already in row 0"
    ):
        ids.check_unique(table, "id")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 40_000 * 16


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("memory", [500, 1 << 20])
def test_ids_are_found_in_the_order_in_which_they_are_asked_for(
    tmp_path: Path, memory: int, is_text: bool
) -> None:
    ids = IdMap(tmp_path / "map", 40, is_text=is_text, id_bytes=100, memory=memory)
    known = [
        pa.array([str(7 * i) if is_text else 7 * i for i in rows]) for rows in (range(30), range(30, 40))
    ]
    for first, values in zip((0, 30), known, strict=True):
        ids.add(values.cast(pa.large_string()) if is_text else values, first)
    path = tmp_path / "asked.parquet"
    pyarrow.parquet.write_table(pa.table({"id": pa.chunked_array(known).take([7, 39, 7, 0])}), path)
    table = Table(FileSet(paths=(path,), format="parquet"), 1 << 16)
    assert whole(ids.find(table, "id", "them", tmp_path / "asked")).tolist() == [7, 39, 7, 0]
    (tmp_path / "lines").write_text("7\n1\n\n14\n2\n")
    lines = Table(FileSet(paths=(tmp_path / "lines",), format="lines"), 1 << 16)
    with pytest.raises(DatasetError, match=r"row 1: node id '?1'? is not among the ids of them \(.*: 2\)"):
        ids.find(lines, "id", "them", tmp_path / "more")


@pytest.mark.parametrize("ids", [[str(number) for number in range(20_000)], range(20_000),
                                 [number << 40 for number in range(20_000)]])  # fmt: skip
def test_ids_spread_evenly_over_the_buckets(tmp_path: Path, ids: Any) -> None:
    found = IdMap(tmp_path, 20_000, is_text=ids[0] == "0", id_bytes=0, memory=240_000)._bucket_of(
        pa.array(ids)
    )
    assert np.bincount(found, minlength=8).min() > 2200


def test_row_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("2\n0\n3\n-1\n")
    table = Table(FileSet(paths=(tmp_path / "lines",), format="lines"), 1 << 16)
    with pytest.raises(DatasetError, match=r"row 2: node id 3 is not among the ids of them \(.*: 2\)"):
        IdMap(tmp_path, 3, is_text=False, id_bytes=None, memory=1000).find(table, "id", "them", tmp_path)


@pytest.mark.parametrize("memory", [4000, 1 << 20])
def test_edges_are_sorted_by_destination_source_and_row(tmp_path: Path, memory: int) -> None:
    random = np.random.default_rng(1)
    sources, destinations = random.integers(0, 20, 300), random.integers(0, 9, 300) ** 2 // 9
    ends = (Spill(tmp_path / "s", np.int64, [sources]), Spill(tmp_path / "d", np.int64, [destinations]))
    found = sort_edges(ends, 20, 10, tmp_path / "out", memory)
    order = np.lexsort((np.arange(300), sources, destinations))
    assert whole(found.rows).tolist() == order.tolist()
    assert whole(found.indices).tolist() == sources[order].tolist()
    assert whole(found.indptr).tolist() == [0, *np.cumsum(np.bincount(destinations, minlength=10))]
    with pytest.raises(ConfigError, match=r"edges end at the nodes of row 0 .* grant --memory 1\d\dMB"):
        sort_edges(ends, 20, 10, tmp_path / "less", 1000)


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
def test_shares_that_make_up_the_whole_leave_no_row_out(
    count: int, shares: tuple[float, ...], expected: list[int]
) -> None:
    codes = np.concatenate(list(draw_split_codes(iter([np.ones(count, bool)]), count, shares, 0)))
    assert np.bincount(codes, minlength=3)[:3].tolist() == expected


def test_more_rows_than_can_be_drawn_are_told() -> None:
    with pytest.raises(ConfigError, match="1000000000 labelled rows"):
        next(draw_split_codes(iter([np.ones(1, bool)]), 10**9, (0.8, 0.1, 0.1), 0))


def whole(spill: Spill) -> Array:
    return np.concatenate(list(spill.chunks(64)))


def test_a_draw_has_exact_shares_and_does_not_depend_on_the_pieces() -> None:
    labelled = np.random.default_rng(2).random(200_000) < 0.5
    count = int(labelled.sum())
    whole_draw = np.concatenate(list(draw_split_codes(iter([labelled]), count, (0.8, 0.1, 0.05), seed=5)))
    pieces = np.array_split(labelled, 7)
    assert np.array_equal(
        np.concatenate(list(draw_split_codes(iter(pieces), count, (0.8, 0.1, 0.05), 5))), whole_draw
    )
    assert (whole_draw[~labelled] == NO_SPLIT).all()
    counts = Counter(whole_draw[labelled].tolist())
    assert [counts[code] for code in range(3)] == [int(count * share + 1e-6) for share in (0.8, 0.1, 0.05)]
    # Every place is as likely: the first tenth has its tenth of the validation rows, within 5 deviations.
    first = (whole_draw[labelled][: count // 10] == 1).sum()
    assert abs(first - count / 100) < 5 * (count / 100) ** 0.5
    other_seed = np.concatenate(list(draw_split_codes(iter([labelled]), count, (0.8, 0.1, 0.05), 6)))
    assert not np.array_equal(other_seed, whole_draw)


@pytest.mark.parametrize(
    ("values", "codes", "classes"),
    [
        (["red", "", "blue", None], [1, -1, 0, -1], 2),
        (["10", "9", ""], [10, 9, -1], 11),
        (["10.0", "2.0", "", "-1"], [10, 2, -1, -1], 11),
        (["10", "nine"], [0, 1], 2),
        (["1.0", "1.5"], [0, 1], 2),
        ([3, None, 0], [3, -1, 0], 4),
        ([1.0, float("nan")], [1, -1], 2),
    ],
)
def test_labels_become_numbers(values: list[object], codes: list[int], classes: int) -> None:
    labels = Labels("y", is_regression=False)
    rows = Column(pa.array(values), "y", "t.csv")
    labels.scan(rows)
    labels.finalize("t.csv")
    assert labels.codes(rows).tolist() == codes
    assert labels.num_classes == classes


def test_what_is_no_label_is_refused() -> None:
    mixed = Labels("y", is_regression=False)
    mixed.scan(Column(pa.array(["a"]), "y", "t.parquet"))
    with pytest.raises(DatasetError, match="holds int64, and a file before it texts"):
        mixed.scan(Column(pa.array([1]), "y", "u.parquet"))
    with pytest.raises(DatasetError, match=r"t.csv: column 'y', row 11: 1.5 is not a class"):
        Labels("y", is_regression=False).scan(Column(pa.array([1.0, 1.5]), "y", "t.csv", 10))
    for values, problem in (
        (["", None], "has no label in any row; leave labels out"),
        ([10**9], "has the label 1000000000, .* is it an id"),
    ):
        labels = Labels("y", is_regression=False)
        labels.scan(Column(pa.array(values), "y", "t.csv"))
        with pytest.raises(DatasetError, match=f"t.csv: column 'y' {problem}"):
            labels.finalize("t.csv")
    with pytest.raises(DatasetError, match=r"t.csv: column 'y', row 1: is empty"):
        Labels("y", is_regression=True).codes(Column(pa.array([1.0, None]), "y", "t.csv"))


def test_texts_are_numbers_or_refused() -> None:
    def numbers(first_row: int, *texts: str) -> list[list[float]]:
        found: list[list[float]] = numbers_of_text(
            Column(pa.array(texts), "x", "t.csv", first_row), ";"
        ).tolist()
        return found

    assert numbers(0, "1;2", " 3 ; 4e1") == [[1.0, 2.0], [3.0, 40.0]]
    with pytest.raises(DatasetError, match=r"t.csv: column 'x', row 8: 'b' is not a number"):
        numbers(6, "1;2", "3;4", "b;5")
    with pytest.raises(DatasetError, match=r"row 7: a list of 1 values, but row 6 has 2"):
        numbers(6, "1;2", "3")


def transformed(values: list[Any], name: str, **settings: Any) -> list[Any]:
    """What one column becomes after a transform has seen it in two pieces."""
    (one,) = make_transforms(FeatureSpec(columns=("x",), name="f", transform=name, settings=settings))
    array = pa.array(values)
    for first in (0, 2):
        one.scan(Column(array.slice(first, 2), "x", "t.csv", first))
    one.finalize("t.csv")
    return [list(row) for row in one.apply(Column(array, "x", "t.csv")).tolist()]


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
        (["1;2;3", "4;5;6", "7;8;9", "0;0;0"], "no-op", {"separator": ";", "truncate_dim": 2},
         [[1, 2], [4, 5], [7, 8], [0, 0]]),
    ],
)  # fmt: skip
def test_a_column_becomes(
    values: list[Any], name: str, settings: dict[str, Any], expected: list[Any]
) -> None:
    assert transformed(values, name, **settings) == expected


@pytest.mark.parametrize(
    ("values", "name", "settings", "message"),
    [
        ([2, 2, 2, 2], "max_min_norm", {}, "t.csv: column 'x': its maximum 2.0 is not above its minimum 2.0"),
        (
            [[1, 2], [3, 4], [1], [2]],
            "max_min_norm",
            {},
            "t.csv: column 'x', row 2: 1 numbers, but there were 2",
        ),
        ([["a"], ["b"], [], []], "to_categorical", {}, "one value a row, or texts with a separator"),
        (["", None, "", None], "to_categorical", {}, "has no value to make a category of"),
        ([b"a", b"\xff", b"a", b"a"], "to_categorical", {}, "holds binary that is not text"),
        ([[1], [2], [3], [4]], "no-op", {"truncate_dim": 2}, "1 numbers, but truncate_dim asks for 2"),
        ([1, 2, None, 3], "standard", {}, "t.csv: column 'x', row 2: is empty"),
    ],
)
def test_what_cannot_be_transformed_is_named(
    values: list[Any], name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        transformed(values, name, **settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("max_min_norm", {"max_bound": "5"}),
        ("max_min_norm", {"min_val": []}),
        ("to_categorical", {"mapping": {"a": 1}}),
        ("to_categorical", {"mapping": {"a": 0, "b": "1"}}),
        ("to_categorical", {"mapping": {"a": 0, "b": None}}),
        ("to_categorical", {"separator": ""}),
        ("no-op", {"truncate_dim": 0}),
        ("no-op", {"truncate_dim": True}),
    ],
)
def test_a_wrong_setting_is_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_transforms(FeatureSpec(columns=("x",), name="f", transform=name, settings=settings))


def test_what_was_found_for_each_column_is_read_again() -> None:
    spec = FeatureSpec(columns=("x", "y"), name="f", transform="standard", settings={})
    made = make_transforms(spec)
    for one, values in zip(made, ([1.0, 3.0], [2.0, 6.0]), strict=True):
        one.scan(Column(pa.array(values), "x", "t.csv"))
    settled = join_settings([one.finalize("t.csv") for one in made])
    assert settled == {"sum": [[4.0], [8.0]]}
    again = make_transforms(FeatureSpec(columns=("x", "y"), name="f", transform="standard", settings=settled))
    assert [one.apply(Column(pa.array([2.0]), "x", "t.csv")).tolist() for one in again] == [[[0.5]], [[0.25]]]
