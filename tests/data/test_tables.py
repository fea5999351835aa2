"""CSV and Parquet tables with the user's own ids: layout, files, errors that name the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dglx_dist.data.sources import load_dataset
from dglx_dist.data.tables import column, find_layout, id_column, read_table, stacked_columns
from dglx_dist.errors import DatasetError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph

FIXED = pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0, 3.0, 4.0]), 2)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("no parquet")
    with pytest.raises(DatasetError, match=r"t\.parquet: not readable as a parquet table"):
        read_table(tmp_path / "t.parquet")


def test_ids_come_in_one_chunk_of_one_of_two_types() -> None:
    chunks = pa.chunked_array([pa.array([1, 2], pa.int16()), pa.array([3], pa.int16())])
    ids = id_column(pa.table({"id": chunks}), "id", "t")
    assert (ids.type, ids.to_pylist()) == (pa.int64(), [1, 2, 3])
    texts = pa.array(["x", "y", "x"])
    for kept in (texts.dictionary_encode(), texts.cast(pa.string_view())):
        assert id_column(pa.table({"id": kept}), "id", "t").to_pylist() == ["x", "y", "x"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([1, 2]), [1, 2]),
        (pa.array([True, False]), [True, False]),
        (pa.array([[1.0], [2.0]]), [[1.0], [2.0]]),
        (FIXED, [[1.0, 2.0], [3.0, 4.0]]),
        (FIXED.slice(1), [[3.0, 4.0]]),
        (pa.array([1.0, None]), "column 'x', row 1: is empty"),
        (pa.array([1.0, np.nan]), "column 'x', row 1: nan"),
        (pa.array([[1.0, 2.0], [3.0, None]]), "column 'x', row 1: has an empty value"),
        (pa.array([[1.0], []]), "column 'x', row 1: a list of 0 values, but row 0 has 1"),
        (pa.array(["a"]), "column 'x' must hold numbers; it holds string"),
    ],
)
def test_numbers_and_lists_of_numbers_become_arrays_or_are_refused(values: object, expected: Any) -> None:
    found = column(pa.table({"x": values}), "x", "t")
    if isinstance(expected, list):
        assert found.numbers().tolist() == expected
        return
    with pytest.raises(DatasetError, match=f"t: {expected}"):
        found.numbers()


def test_columns_stand_side_by_side_in_the_order_asked_for() -> None:
    table = pa.table({"a": [1, 2], "b": [0.5, 1.5], "c": [[1.0], [2.0]]})
    stacked = stacked_columns(table, ["b", "a"], "t")
    assert (stacked.dtype, stacked.tolist()) == (np.float32, [[0.5, 1.0], [1.5, 2.0]])
    with pytest.raises(DatasetError, match="column 'c' holds lists"):
        stacked_columns(table, ["a", "c"], "t")


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["readme.txt"], r"has no table of edges; expected nodes\.csv \(optional\) and edges\.csv"),
        (["edges.csv", "edges.parquet"], r"has both edges\.csv and edges\.parquet; remove one"),
        (["edges/a-b.csv"], "an edge type is SOURCE__RELATION__DESTINATION, not 'a-b'"),
        (["manifest.json"], "is a partitioned dataset"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        find_layout(touch(tmp_path, *names))


NODES = (
    "id,split,label,feat_1,feat_0\nbob,train,red,1,0.5\nann,val,blue,2,1.5\ncid,,,3,2.5\ndan,test,red,4,3.5\n"
)
EDGES = "src,dst,weight\nann,bob,1\nbob,cid,2\ndan,ann,3\n"


def write(folder: Path, **files: str) -> Path:
    """Write ``files`` (name with _dot_ and _in_ for . and /) below ``folder``."""
    for name, text in files.items():
        path = folder / name.replace("_dot_", ".").replace("_in_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def edges_of(graph: RawGraph) -> list[list[int]]:
    return [ids.tolist() for ids in graph.edges[EDGE_TYPE]]


def columns_of(graph: RawGraph, node_type: str = NODE_TYPE) -> dict[str, Array]:
    return {name: np.asarray(column) for name, column in graph.node_data[node_type].items()}


def test_string_ids_are_mapped_and_columns_get_their_meaning_from_their_names(tmp_path: Path) -> None:
    graph = load_dataset(write(tmp_path, nodes_dot_csv=NODES, edges_dot_csv=EDGES))
    assert graph.num_nodes == {NODE_TYPE: 4}
    assert graph.user_ids[NODE_TYPE].tolist() == ["bob", "ann", "cid", "dan"]
    assert graph.user_ids[NODE_TYPE].dtype.kind == "U"
    assert edges_of(graph) == [[1, 0, 3], [0, 2, 1]]
    assert graph.edges[EDGE_TYPE][0].dtype == np.int32
    assert graph.edge_data[EDGE_TYPE]["weight"].tolist() == [1, 2, 3]
    columns = columns_of(graph)
    assert set(columns) == {"feat", "label", "train_mask", "val_mask", "test_mask"}
    assert columns["feat"].dtype == np.float32
    assert columns["feat"].tolist() == [[0.5, 1], [1.5, 2], [2.5, 3], [3.5, 4]]
    assert columns["label"].tolist() == [1, 0, -1, 1]  # blue, red in alphabetical order
    assert columns["val_mask"].tolist() == [False, True, False, False]
    assert graph.num_classes == {NODE_TYPE: 2}


def test_integer_ids_with_gaps_are_mapped(tmp_path: Path) -> None:
    nodes, edges = "id\n70\n5000000000\n9\n", "source,destination\n9,70\n70,5000000000\n"
    graph = load_dataset(write(tmp_path, nodes_dot_csv=nodes, edges_dot_csv=edges))
    assert graph.user_ids[NODE_TYPE].tolist() == [70, 5_000_000_000, 9]
    assert graph.user_ids[NODE_TYPE].dtype == np.int64
    assert edges_of(graph) == [[2, 0], [0, 1]]


def test_ids_that_count_from_zero_need_no_mapping(tmp_path: Path) -> None:
    graph = load_dataset(
        write(tmp_path, nodes_dot_csv="age\n30\n40\n50\n", edges_dot_csv="src,dst\n2,0\n1,1\n")
    )
    assert graph.user_ids == {}
    assert edges_of(graph) == [[2, 1], [0, 1]]
    assert columns_of(graph)["age"].tolist() == [30, 40, 50]


def test_without_a_node_table_the_nodes_are_those_of_the_edges(tmp_path: Path) -> None:
    graph = load_dataset(write(tmp_path, edges_dot_csv="src,dst\nx,c\nb,x\n"))
    assert graph.user_ids[NODE_TYPE].tolist() == ["b", "c", "x"]
    assert edges_of(graph) == [[2, 0], [1, 2]]


def test_parquet_with_lists_as_features(tmp_path: Path) -> None:
    table = pa.table({"id": [4, 2], "feat": [[1.0, 2.0], [3.0, 4.0]], "train_mask": [True, False]})
    pyarrow.parquet.write_table(table, tmp_path / "nodes.parquet")
    pyarrow.parquet.write_table(pa.table({"src": [2], "dst": [4]}), tmp_path / "edges.parquet")
    graph = load_dataset(tmp_path)
    assert columns_of(graph)["feat"].tolist() == [[1, 2], [3, 4]]
    assert columns_of(graph)["train_mask"].tolist() == [True, False]
    assert edges_of(graph) == [[1], [0]]


def test_several_types_by_folders(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        nodes_in_user_dot_csv="id,label\nu2,1\nu1,0\n",
        edges_in_user__buys__item_dot_csv="src,dst\nu1,7\nu2,3\n",
        edges_in_item__of__user_dot_csv="src,dst\n3,u1\n",
    )
    graph = load_dataset(folder)
    assert graph.num_nodes == {"user": 2, "item": 2}
    assert [ids.tolist() for ids in graph.edges[("user", "buys", "item")]] == [[1, 0], [1, 0]]
    assert [ids.tolist() for ids in graph.edges[("item", "of", "user")]] == [[0], [1]]
    assert graph.user_ids["item"].tolist() == [3, 7]


BAD_TABLES = {
    "twice": (
        "id\na\nb\na\n",
        "src,dst\na,b\n",
        r"nodes\.csv: column 'id', row 2: .*'a' occurs already in row 0",
    ),
    "unknown end": (
        "id\na\nb\n",
        "src,dst\na,b\nb,zoe\n",
        r"edges\.csv: column 'dst', row 1: .*'zoe' is not among .*nodes\.csv \(rows of 'dst' .*ids: 1\)",
    ),
    "beyond the last row": (
        "age\n1\n2\n",
        "src,dst\n0,1\n2,1\n",
        r"edges\.csv: column 'src', row 1: node id 2",
    ),
    "kinds": ("id\na\nb\n", "src,dst\n1,2\n", r"column 'src' holds int64 ids, but .* are large_string"),
    "empty id": ("id,x\n1,1\n,2\n", "src,dst\n1,1\n", r"nodes\.csv: column 'id', row 1: is empty"),
    "fraction as id": (
        "id\n1.5\n",
        "src,dst\n1,1\n",
        r"column 'id' must hold integer or string ids; it holds double",
    ),
    "no ends": ("id\n1\n", "from,to\n1,1\n", r"edges\.csv: has no columns src and dst \(it has from, to\)"),
    "empty feature": (
        "id,feat_0\n1,\n2,1\n",
        "src,dst\n1,2\n",
        r"nodes\.csv: column 'feat_0', row 0: is empty",
    ),
    "strings": (
        "id,city\n1,Rome\n",
        "src,dst\n1,1\n",
        r"nodes\.csv: column 'city' holds strings.*ignore=city",
    ),
    "label": ("id,label\n1,0\n2,-3\n", "src,dst\n1,2\n", r"nodes\.csv: column 'label', row 1: label -3"),
    "split": ("id,split\n1,train\n2,dev\n", "src,dst\n1,2\n", r"column 'split', row 1: 'dev' is not a split"),
    "split number": ("id,split\n1,0\n2,7\n", "src,dst\n1,2\n", r"column 'split', row 1: 7 is not a split"),
    "overlap": (
        "id,train_mask,test_mask\n1,1,0\n2,1,1\n",
        "src,dst\n1,2\n",
        r"nodes\.csv: columns 'train_mask' and 'test_mask' overlap: row 1",
    ),
    "edge column": ("id\n1\n2\n", "src,dst,w\n1,2,1\n2,1,inf\n", r"edges\.csv: column 'w', row 1: inf"),
    "same name": ("id,x,x\n1,1,2\n", "src,dst\n1,1\n", r"nodes\.csv: has 2 columns 'x'; rename"),
    "ragged": ("id\n1\n2\n", "src,dst\n1,2\n1,2,3\n", r"edges\.csv: not readable as a csv table"),
    "no row": ("id\n1\n", "src,dst\n", r"edges\.csv: the table has no row"),
}


@pytest.mark.parametrize(("nodes", "edges", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_tables_are_named_with_column_and_row(
    tmp_path: Path, nodes: str, edges: str, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        load_dataset(write(tmp_path, nodes_dot_csv=nodes, edges_dot_csv=edges))


def test_types_without_a_table_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    # New ids, and what a seed draws, follow the order of the types: it may not change from run to run.
    pairs = [("g", "a"), ("f", "c"), ("b", "e"), ("d", "h")]
    tables = {f"edges_in_{one}__r__{other}_dot_csv": "src,dst\n0,1\n" for one, other in pairs}
    assert list(load_dataset(write(tmp_path, **tables)).num_nodes) == list("abcdefgh")


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        ({"id": pa.array([1, 2**63], pa.uint64())}, "column 'id' has a number beyond 64 signed bits"),
        ({"id": [0, 1], "label": pa.array([1, 2**63], pa.uint64())}, "column 'label' has a number beyond"),
    ],
)
def test_numbers_beyond_int64_are_refused(tmp_path: Path, nodes: dict[str, object], named: str) -> None:
    pyarrow.parquet.write_table(pa.table(nodes), tmp_path / "nodes.parquet")
    write(tmp_path, edges_dot_csv="src,dst\n0,1\n")
    with pytest.raises(DatasetError, match=rf"nodes\.parquet: {named}"):
        load_dataset(tmp_path)


def test_columns_can_be_left_out_by_option(tmp_path: Path) -> None:
    nodes = "id,city,boss\n1,Rome,Ann\n"
    folder = write(tmp_path, nodes_dot_csv=nodes, edges_dot_csv="src,dst\n1,1\n")
    assert columns_of(load_dataset(folder, ignore="city,boss")) == {}
