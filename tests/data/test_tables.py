"""CSV and Parquet tables with the user's own ids: layout, files, errors that name the row."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dglx_dist.data.sources import load_dataset
from dglx_dist.data.tables import column, read_table
from dglx_dist.errors import DatasetError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from tests.data.raw_graphs import columns_of, edges_of, write

FIXED = pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0, 3.0, 4.0]), 2)


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
        (pa.array([[1.0], []]), "column 'x', row 1: a list of 0, but row 0 has 1"),
        (pa.array([0, 86400]).cast(pa.timestamp("s")).cast(pa.date32()), [0, 86400]),
        (pa.array([5, None]).cast(pa.timestamp("s", "Europe/Berlin")), [5, -(2**63)]),
        (pa.array([5500]).cast(pa.timestamp("ms")), "column 'x' has a date with fractions of a second"),
        (pa.array(["a"]), "column 'x' must hold numbers; it holds string"),
    ],
)
def test_numbers_and_lists_of_numbers_become_arrays_or_are_refused(values: object, expected: Any) -> None:
    table_column = column(pa.table({"x": values}), "x", "t")
    if isinstance(expected, list):
        assert table_column.numbers().tolist() == expected
        return
    with pytest.raises(DatasetError, match=f"t: {expected}"):
        table_column.numbers()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["readme.txt"], r"has no table of edges; expected nodes\.csv \(optional\) and edges\.csv"),
        (["edges.csv", "edges.parquet"], r"has both edges\.csv and edges\.parquet; remove one"),
        (["edges/a-b.csv"], "an edge type is SOURCE__RELATION__DESTINATION, not 'a-b'"),
        (["manifest.json"], "is a partitioned dataset"),
        (["edges.parquet"], r"edges\.parquet: not readable as a parquet table"),
        (["edges.csv", "nodes.jsonl"], r"nodes\.jsonl: tables are \.csv or \.parquet; convert it"),
        (["edges.csv", "nodes.csv.gz"], r"nodes\.csv\.gz: tables are \.csv or \.parquet; convert it"),
        (["edges/a__r__b.csv", "nodes/a.tsv"], r"a\.tsv: tables are \.csv or \.parquet; convert it"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_dataset(write(tmp_path, dict.fromkeys(names, "")))


NODES = (
    "id,split,label,feat_1,feat_0\nbob,train,red,1,0.5\nann,val,blue,2,1.5\ncid,,,3,2.5\ndan,test,red,4,3.5\n"
)
EDGES = "src,dst,weight\nann,bob,1\nbob,cid,2\ndan,ann,3\n"


def test_string_ids_are_mapped_and_columns_get_their_meaning_from_their_names(tmp_path: Path) -> None:
    graph = load_dataset(write(tmp_path, {"nodes.csv": NODES, "edges.csv": EDGES}))
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


@pytest.mark.parametrize(
    ("files", "ids", "edges"),
    [
        ({"nodes.csv": "id\n70\n5000000000\n9\n", "edges.csv": "source,destination\n9,70\n70,5000000000\n"},
         [70, 5_000_000_000, 9], [[2, 0], [0, 1]]),
        ({"nodes.csv": "age\n30\n40\n50\n", "edges.csv": "src,dst\n2,0\n1,1\n"}, None, [[2, 1], [0, 1]]),
        ({"edges.csv": "src,dst\nx,c\nb,x\n"}, ["b", "c", "x"], [[2, 0], [1, 2]]),
        ({"nodes.csv": "id\n007\n7\nA1\n", "edges.csv": "src,dst\n7,007\nA1,7\n"},
         ["007", "7", "A1"], [[1, 2], [0, 1]]),
        ({"nodes.csv": "id\n1\n2\nA1\n", "edges.csv": "src,dst\n2,1\n"}, ["1", "2", "A1"], [[1], [0]]),
    ],
    ids=["integers with gaps", "from zero", "of edges", "with zeros before", "numbers of a text"],
)  # fmt: skip
def test_ids_of_any_kind_are_mapped(tmp_path: Path, files: dict[str, str], ids: Any, edges: Any) -> None:
    graph = load_dataset(write(tmp_path, files))
    assert edges_of(graph) == edges
    assert ids is None or graph.user_ids[NODE_TYPE].tolist() == ids
    assert bool(graph.user_ids) == (ids is not None)


def test_reads_parquet_with_lists_as_features(tmp_path: Path) -> None:
    ids = pa.array([4, 2], pa.int16())
    nodes = {"id": ids, "feat": [[1.0, 2.0], [3.0, 4.0]], "split": [0, -1], "age": [30, 40]}
    graph = load_dataset(write(tmp_path, {"nodes.parquet": nodes, "edges.parquet": {"src": [2], "dst": [4]}}))
    assert {name: rows.tolist() for name, rows in columns_of(graph).items()} == {
        "feat": [[1, 2], [3, 4]],
        "train_mask": [True, False],
        "age": [30, 40],
    }
    assert graph.user_ids[NODE_TYPE].dtype == np.int64
    assert edges_of(graph) == [[1], [0]]


def test_reads_several_types_from_folders(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        {
            "nodes/user.csv": "id,label\nu2,1\nu1,0\n",
            "edges/user__buys__item.csv": "src,dst\nu1,7\nu2,3\n",
            "edges/item__of__user.csv": "src,dst\n3,u1\n",
        },
    )
    graph = load_dataset(folder)
    assert graph.num_nodes == {"user": 2, "item": 2}
    assert [ids.tolist() for ids in graph.edges[("user", "buys", "item")]] == [[1, 0], [1, 0]]
    assert [ids.tolist() for ids in graph.edges[("item", "of", "user")]] == [[0], [1]]
    assert graph.user_ids["item"].tolist() == [3, 7]


WIDE = pa.array([0, 2**63], pa.uint64())


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ("src_id,dst_id,srcId\n0,1,5\n", "'srcId' or 'src_id' may be an end of edges"),
        ("Source,source,target\n0,1,5\n", "'source' or 'Source' may be an end of edges"),
        (":START_ID(A),:END_ID(B),:END_ID(C)\n0,1,5\n", r"':END_ID\(C\)' or ':END_ID\(B\)' may be"),
    ],
)
def test_refuses_two_columns_that_could_be_the_same_end(tmp_path: Path, edges: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_dataset(write(tmp_path, {"edges.csv": edges}))


def test_takes_src_and_dst_beside_columns_with_similar_names(tmp_path: Path) -> None:
    graph = load_dataset(write(tmp_path, {"edges.csv": "src,dst,SRC\n0,1,5\n"}))
    assert edges_of(graph) == [[0], [1]]


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ("id\na\nb\na\n", "a,b", r"nodes\.csv: column 'id', row 2: .*'a' already occurs in row 0"),
        ("id\na\nb\n", "a,b\nb,zoe",
         r"edges\.csv: column 'dst', row 1: .*'zoe' is not among .*nodes\.csv \(rows of 'dst' .*ids: 1\)"),
        ("age\n1\n2\n", "0,1\n2,1", r"edges\.csv: column 'src', row 1: node id 2"),
        ("id\na\nb\n", "1,2", r"column 'src', row 0: node id 1 is not among"),
        ("id\n1\n2\n", "1,02", r"column 'src' holds texts, but .* whole numbers; use the same kind in both"),
        ("id,x\n1,1\n,2\n", "1,1", r"nodes\.csv: column 'id', row 1: is empty"),
        ("id,x\n1,1\n2,nan\n", "1,1", r"nodes\.csv: column 'x', row 1: is empty, or NaN, NA or null"),
        ("id\n1.5\n", "1,1", r"column 'id' must hold integer or string ids; it holds double"),
        ('id,feat\n1,"0.1, 0.2"\n', "1,1", r"'feat' holds texts, such as '0\.1, 0\.2'; .* feat_0, feat_1"),
        ("id,city\n1,Rome\n", "1,1", r"nodes\.csv: column 'city' holds strings.*'label' if .*ignore=city"),
        ("id\n1\n", {"src": [1], "relation": ["is"], "dst": [1]}, r"'relation' holds.* triples as a \.tsv"),
        ("id\n1\n", {"head": [1], "relation": ["is"], "tail": [1]}, r"no columns src.* triples as a \.tsv"),
        ("id;label\n1;2\n", "0,0", r"nodes\.csv: the columns are separated by ';' \(id;label\); save"),
        ("id,label_0\n1,1\n2,\n", "1,2", "'label_0', row 1: is empty.* write 0 and leave 'split' empty"),
        ("id,label\n1,0\n2,-3\n", "1,2", r"nodes\.csv.* row 1: label -3 .* decimal point, such as -3\.0"),
        ("id,split\n1,train\n2,dev\n", "1,2", r"column 'split', row 1: 'dev' is not a split"),
        ("id,split\n1,\n2,7\n", "1,2", r"column 'split', row 1: 7 is not a split"),
        ("id,x,x\n1,1,2\n", "1,1", r"nodes\.csv: has 2 columns 'x'; rename"),
        ("id\n1\n2\n", "1,2\n1,2,3", r"edges\.csv: not readable as a csv table"),
        ("id\n", "", r"the graph has no nodes; there must be at least one"),
        ({"split": [[0], [1]]}, "0,1", "column 'split' holds list<.*>; write texts or numb"),
        ({"id": WIDE}, "0,1", r"nodes\.parquet: column 'id' has a number beyond 64 signed bits"),
        ({"id": [0, 1], "label": WIDE}, "0,1", r"nodes\.parquet: column 'label' has a number beyond"),
        ({"feat_0": [1, 2], "feat_1": [[1], [2]]}, "0,1", "column 'feat_1' holds lists; put all features"),
        ("id\n1\n", {"from": [1], "to": [1]},
         r"edges\.parquet: has no columns src and dst \(it has from, to\).* dglx ingest"),
        ("id\n1\n", {"src": [1, 1], "dst": [1, 1], "w": [1, np.inf]}, r"edges\.parquet: .* 'w', row 1: inf"),
    ],
)  # fmt: skip
def test_bad_tables_are_named_with_column_and_row(
    tmp_path: Path, nodes: str | dict[str, object], edges: str | dict[str, object], message: str
) -> None:
    edges = f"src,dst\n{edges}\n" if isinstance(edges, str) else edges
    files = {"nodes": nodes, "edges": edges}
    tables = {f"{name}.{'csv' if isinstance(of, str) else 'parquet'}": of for name, of in files.items()}
    with pytest.raises(DatasetError, match=message):
        load_dataset(write(tmp_path, tables))


def test_types_without_a_table_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    # New ids, and what a seed draws, follow the order of the types: it may not change from run to run.
    pairs = [("g", "a"), ("f", "c"), ("b", "e"), ("d", "h")]
    tables = {f"edges/{source}__r__{destination}.csv": "src,dst\n0,1\n" for source, destination in pairs}
    assert list(load_dataset(write(tmp_path, tables)).num_nodes) == list("abcdefgh")


def test_columns_can_be_left_out_by_option(tmp_path: Path) -> None:
    tables = {"nodes.csv": "id,city,boss\n1,Rome,Ann\n", "edges.csv": "src,dst\n1,1\n"}
    assert columns_of(load_dataset(write(tmp_path, tables), ignore="city,boss")) == {}


@pytest.mark.parametrize("text", ["id,name\n0,ä\n", "id,größe\n0,1\n"])
def test_tables_are_in_utf_8(tmp_path: Path, text: str) -> None:
    (tmp_path / "nodes.csv").write_text(text, encoding="latin-1")
    with pytest.raises(DatasetError, match=r"nodes\.csv: not readable as a csv table: .*(UTF-8|utf-8)"):
        read_table(tmp_path / "nodes.csv")


def test_says_that_a_description_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"edges.csv": "src,dst\n0,1\n", "graph.json": "{}"})
    assert load_dataset(tmp_path).total_edges == 1
    assert f"graph.json is ignored; use it with `dglx ingest {tmp_path}/graph.json`" in caplog.text


def test_an_empty_number_is_no_target_outside_of_the_split(tmp_path: Path) -> None:
    nodes = "id,label,split\n0,1.5,train\n1,,\n2,2,val\n3,-1,test\n"
    graph = load_dataset(write(tmp_path, {"nodes.csv": nodes, "edges.csv": "src,dst\n0,1\n2,3\n"}))
    label = graph.node_data[NODE_TYPE]["label"]
    np.testing.assert_array_equal(label, np.array([1.5, np.nan, 2, -1]))
    (tmp_path / "nodes.csv").write_text(nodes.replace("1,,", "1,,val"))
    with pytest.raises(
        DatasetError, match=r"'label', row 1: no label .*its split is val; leave 'split' empty"
    ):
        load_dataset(tmp_path)
    (tmp_path / "nodes.csv").write_text(nodes.replace("-1", "-inf"))
    with pytest.raises(DatasetError, match="column 'label', row 3: -inf is not a finite number"):
        load_dataset(tmp_path)


def test_numbered_columns_of_labels_are_one_label_with_several_columns(tmp_path: Path) -> None:
    nodes = "id,label_1,label_0\n0,1,0\n1,0,1\n"
    graph = load_dataset(write(tmp_path, {"nodes.csv": nodes, "edges.csv": "src,dst\n0,1\n"}))
    assert {name: column.tolist() for name, column in columns_of(graph).items()} == {
        "label": [[0, 1], [1, 0]]
    }
    assert graph.num_classes == {NODE_TYPE: 2}


def test_warns_of_skipped_numbers_of_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = "id,label_0,label_2,feat_1,feat_2\n0,1,0,1,1\n1,0,1,1,1\n"
    load_dataset(write(tmp_path, {"nodes.csv": nodes, "edges.csv": "src,dst\n0,1\n"}))
    assert "the 2 columns label_0, label_2 skip or repeat a number" in caplog.text
    assert "feat_1" not in caplog.text


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["1.5", "n.a.", "2", "3"], "column 'label', row 1: n.a. is no number, but most labels are"),
        (
            [str(1000 + n % 6) for n in range(24)],
            "the labels 1000 to 1005 are numbered as 6 classes; if they measure, write 1000.0",
        ),
        ([str(n) for n in range(24)], "has 24 classes for 24 labelled nodes"),
        ([str(n % 6) for n in range(24)], ""),
        (["1", "a", "b", ""], ""),
    ],
)
def test_labels_that_look_like_measurements_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, labels: list[str], message: str
) -> None:
    rows = "".join(f"{n},{label}\n" for n, label in enumerate(labels))
    load_dataset(write(tmp_path, {"nodes.csv": f"id,label\n{rows}", "edges.csv": "src,dst\n0,1\n"}))
    assert (message in caplog.text) if message else not caplog.text
    assert caplog.text.count("labelled nodes") < 2


def test_a_column_of_texts_without_ids_names_the_columns(tmp_path: Path) -> None:
    folder = write(tmp_path, {"nodes.csv": "paper,feat_0\na,1\nb,2\n", "edges.csv": "src,dst\n0,1\n"})
    with pytest.raises(
        DatasetError, match=r"'paper' holds strings.*to 'label' if .* or 'id' if .*--option ignore=paper"
    ):
        load_dataset(folder)


ROWS_OF_IDS = [[12, 2], [10, 0], [11, 1]]
"""Ids and features, the rows out of order."""


@pytest.mark.parametrize(
    "name",
    ["node_id", "nodeId", "NodeID", "nid", "node", "ids", ":ID", "_id", "movieId:ID(Movie)", "Id", "my"],
)
@pytest.mark.parametrize("kind", ["csv", "parquet", "type"])
def test_reads_ids_under_usual_names_or_the_one_of_the_option(tmp_path: Path, name: str, kind: str) -> None:
    text = "".join(f"{node},{feature}\n" for node, feature in ROWS_OF_IDS)
    nodes: Any = f"{name},feat_0\n{text}"
    if kind == "parquet":
        nodes = {name: [node for node, _ in ROWS_OF_IDS], "feat_0": [feature for _, feature in ROWS_OF_IDS]}
    suffix, ntype = ("csv", "user") if kind == "type" else (kind, NODE_TYPE)
    stems = ("nodes/user", "edges/user__likes__user") if kind == "type" else ("nodes", "edges")
    write(tmp_path, {f"{stems[0]}.{suffix}": nodes, f"{stems[1]}.csv": "src,dst\n10,11\n11,12\n"})
    graph = load_dataset(tmp_path, **({"id": "my"} if name == "my" else {}))
    assert graph.user_ids[ntype].tolist() == [12, 10, 11]
    assert {key: value.tolist() for key, value in columns_of(graph, ntype).items()} == {
        "feat": [[2], [0], [1]]
    }
    assert edges_of(graph, next(iter(graph.edges))) == [[1, 2], [2, 0]]


def test_reads_ids_named_by_the_type_on_both_sides(tmp_path: Path) -> None:
    files = {
        "nodes/users.csv": "user_id,feat_0\n007,1\n7,2\n",
        "nodes/item.parquet": {"itemId": ["b", "a"]},
        "edges/users__buys__item.csv": "userId,ITEM_ID,price\n7,a,3\n007,b,4\n",
    }
    graph = load_dataset(write(tmp_path, files))
    assert graph.user_ids["users"].tolist() == ["007", "7"]
    assert edges_of(graph, ("users", "buys", "item")) == [[1, 0], [1, 0]]
    assert graph.edge_data["users", "buys", "item"]["price"].tolist() == [3, 4]


@pytest.mark.parametrize(
    "names", ["Source,Target", "src_id,dst_id", ":START_ID,:END_ID(User)", "sourceId,targetId"]
)
def test_reads_ends_of_edges_under_their_usual_names(tmp_path: Path, names: str) -> None:
    graph = load_dataset(write(tmp_path, {"edges.csv": f"{names},w\n007,7,1\n8,007,2\n"}))
    assert graph.user_ids[NODE_TYPE].tolist() == ["007", "7", "8"]
    assert edges_of(graph) == [[0, 2], [1, 0]]


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        (
            "uid,feat_0\n2,1\n0,2\n1,3\n",
            "0,1\n1,2",
            r"'uid' \(2, \.\.\.\) looks like .* --id uid .* --id ''",
        ),
        ("code,x\n1,1\n2,2\n3,3\n", "1,2", r"'code' \(1, \.\.\.\) looks like the ids that edges use"),
        ("paper,x\nb,1\na,2\n", "a,b", r"'paper' \(b, \.\.\.\) looks like the ids"),
        ("uid,x\n10,1\n11,2\n", "10,12", r"id 10 is not among .*nodes\.csv \(the numbers of its rows.* --id"),
        (
            "nid,node\n1,1\n2,0\n",
            "1,2",
            r"both 'nid' and 'node' could be .*it has nid, node.* choose one with --id",
        ),
        ("node_id,x\n1,1\n1,2\n", "1,1", r"column 'node_id', row 1: node id 1 already occurs in row 0"),
    ],
)
def test_refuses_rows_as_ids_beside_a_column(tmp_path: Path, nodes: str, edges: str, message: str) -> None:
    write(tmp_path, {"nodes.csv": nodes, "edges.csv": f"src,dst\n{edges}\n"})
    with pytest.raises(DatasetError, match=message):
        load_dataset(tmp_path)


def test_numbers_nodes_by_row_where_the_option_says_so(tmp_path: Path) -> None:
    write(tmp_path, {"nodes.csv": "rank\n2\n0\n1\n", "edges.csv": "src,dst\n0,1\n1,2\n"})
    graph = load_dataset(tmp_path, id="")
    assert not graph.user_ids
    assert columns_of(graph)["rank"].tolist() == [2, 0, 1]


@pytest.mark.parametrize("asked", ["uid", "uid,", "id,uid", "uid,id", "name,uid"])
def test_refuses_an_asked_column_of_ids_that_no_table_has(tmp_path: Path, asked: str) -> None:
    write(tmp_path, {"nodes.csv": "id,name\n1,3\n2,5\n", "edges.csv": "src,dst\n1,2\n"})
    message = r"no table of nodes has the column 'uid' of --id.* \(columns: id, name\)"
    with pytest.raises(DatasetError, match=message):
        load_dataset(tmp_path, id=asked)
    with pytest.raises(DatasetError, match=r"the column 'name' of --id \(columns: id\)"):
        load_dataset(tmp_path, id="name", ignore="name")
    with pytest.raises(DatasetError, match=r"no table has the column 'nam' of ignore; .*'name'.*src, dst"):
        load_dataset(tmp_path, ignore="nam")
    (tmp_path / "nodes.csv").unlink()
    with pytest.raises(DatasetError, match=r"of --id.* \(columns: none\)"):
        load_dataset(tmp_path, id=asked)


def test_refuses_to_number_by_row_where_a_column_without_a_name_looks_like_ids(tmp_path: Path) -> None:
    """Pandas writes the index of a frame as such a column."""
    write(tmp_path, {"nodes.csv": ",feat_0\n2,0.5\n0,0.1\n1,0.2\n", "edges.csv": "src,dst\n0,1\n1,2\n"})
    with pytest.raises(DatasetError, match=r"looks like the ids that .*edges use"):
        load_dataset(tmp_path)


@pytest.mark.parametrize("asked", [",", ",,", " ,", "key,,", "key, ,", ",key"])
def test_refuses_blank_names_of_columns_of_ids(tmp_path: Path, asked: str) -> None:
    # The first column has no name.
    write(tmp_path, {"nodes.csv": ",id,key\n0,1,3\n1,2,5\n", "edges.csv": "src,dst\n1,2\n"})
    with pytest.raises(DatasetError, match=r"no table of nodes has the column '' of --id .*id, key\)"):
        load_dataset(tmp_path, id=asked)


def test_strips_blanks_around_names_of_columns(tmp_path: Path) -> None:
    write(tmp_path, {"nodes.csv": "key, age,note\n3,007,b\n5,8,a\n", "edges.csv": "src,dst\n3,5\n"})
    assert load_dataset(tmp_path, id=" key, ", ignore=" note").user_ids[NODE_TYPE].tolist() == [3, 5]
    with pytest.raises(DatasetError, match="is not among"):  # the header has a blank, too
        load_dataset(tmp_path, id=" age", ignore="note")


@pytest.mark.parametrize(("asked", "used"), [("a", "'a'"), ("", "the number of its row"), ("b,a", "'a'")])
@pytest.mark.parametrize("kind", ["number", "text"])
def test_says_what_becomes_of_the_column_id_beside_the_one_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: str, used: str, kind: str
) -> None:
    row = "x" if kind == "text" else "7"
    files = {"nodes/n.csv": f"id,a\n{row},1\n{row}y,0\n".replace("7y", "8"), "nodes/m.csv": "id,b\n0,0\n"}
    write(tmp_path, files | {"edges/n__r__n.csv": "src,dst\n0,1\n"})
    graph = load_dataset(tmp_path, id=asked)
    assert f"n.csv: by --id, the id of a node is {used}; the column 'id' is left out" in caplog.text
    assert "id" not in graph.node_data["n"]


def test_numbers_only_tables_without_ids_by_row_where_the_option_ends_in_a_comma(tmp_path: Path) -> None:
    files = {
        "nodes/user.csv": "key,feat_0\n12,0\n10,1\n",
        "nodes/item.csv": ",feat_0\n5,3\n4,4\n",  # the first column has no name
        "edges/user__buys__item.csv": "src,dst\n10,0\n12,1\n",
    }
    write(tmp_path, files)
    with pytest.raises(
        DatasetError, match=r"item\.csv: no column of --id is .*--id 'key,' numbers such nodes by row"
    ):
        load_dataset(tmp_path, id="key")
    with pytest.raises(DatasetError, match="no table of nodes has the column 'kye' of --id"):
        load_dataset(tmp_path, id="kye,")
    graph = load_dataset(tmp_path, id="key,")
    assert {ntype: ids.tolist() for ntype, ids in graph.user_ids.items()} == {"user": [12, 10]}
    assert edges_of(graph, ("user", "buys", "item")) == [[1, 0], [0, 1]]
    # Usual names are known, too.
    (tmp_path / "nodes" / "item.csv").write_text("id,feat_0\n1,3\n0,4\n")
    assert load_dataset(tmp_path, id="key,").user_ids["item"].tolist() == [1, 0]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_reads_relations_and_types_without_rows(tmp_path: Path, kind: str) -> None:
    nothing, ids = (
        pa.array([], pa.string()),
        {"id": pa.array([], pa.string()), "feat": pa.array([], pa.float32())},
    )
    is_csv = kind == "csv"
    files: dict[str, Any] = {
        f"nodes/c.{kind}": "id,feat,label,split\n" if is_csv else ids,
        "nodes/a.csv": "id,feat\nx,1\ny,2\n",
        "edges/a__r__b.csv": "src,dst\nx,0\ny,1\n",
        f"edges/a__s__b.{kind}": "src,dst,w\n" if is_csv else {"src": nothing, "dst": nothing},
        f"edges/c__t__d.{kind}": "src,dst\n" if is_csv else {"src": nothing, "dst": nothing},
    }
    graph = load_dataset(write(tmp_path, files))
    assert graph.num_nodes == {"a": 2, "c": 0, "b": 2, "d": 0}
    assert edges_of(graph, ("a", "r", "b")) == [[0, 1], [0, 1]]
    assert edges_of(graph, ("a", "s", "b")) == edges_of(graph, ("c", "t", "d")) == [[], []]


@pytest.mark.parametrize("text", ["unknown", "NA", "none", "?", "N/A"])
def test_a_class_that_may_stand_for_no_label_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    nodes = f"id,label\n0,red\n1,{text}\n2,{text}\n3,\n"
    graph = load_dataset(write(tmp_path, {"nodes.csv": nodes, "edges.csv": "src,dst\n0,1\n"}))
    assert graph.num_classes == {NODE_TYPE: 2}
    assert caplog.text.count(f"column 'label': '{text}' is read as a class; leave the column empty") == 1
    assert len(caplog.records) == 1
