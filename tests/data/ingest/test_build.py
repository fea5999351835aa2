"""From tables to a dataset, against what is known by hand and against the reader of tables in memory."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dglx_dist.data.external_memory import Budget
from dglx_dist.data.ingest import graph as build
from dglx_dist.data.ingest.config import IngestPlan, read_config
from dglx_dist.data.ingest.graph import Ingested, ingest, write_description
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.partition.prepare import load_graph
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.reader import StoredPart, open_dataset
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, DatasetError, StorageError
from tests.data.ingest.shop import (
    BUYS,
    FIRST_USERS,
    ITEMS,
    LAST_USERS,
    TABLES,
    USERS,
    describe,
    one_type,
    put_at,
    write_shop,
)
from tests.data.raw_graphs import write

BUYS_TYPE = ("user", "buys", "item")
PLENTY = "8GB"
"""More than the process of the tests holds, which counts."""


@pytest.fixture(params=[1 << 26, 1 << 11], ids=["all fits", "nothing fits"])
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Budget:
    """Few bytes, so that five rows make many buckets, beside what the program itself takes."""
    small_budget = Budget(work=request.param)
    monkeypatch.setattr(build, "open_budget", lambda limit: small_budget)
    return small_budget


def run(
    folder: Path,
    description: dict[str, Any] | None = None,
    tables: Mapping[str, Any] = TABLES,
    **options: Any,
) -> Ingested:
    config = read_config(write_shop(folder, description, tables))
    return ingest(config, IngestPlan(**({"out": folder / "out", "memory": PLENTY} | options)))


def part_of(folder: Path) -> StoredPart:
    return open_dataset(folder / "out", verify="full").part(0)


@pytest.mark.usefixtures("budget")
def test_what_is_in_the_tables_is_in_the_dataset(tmp_path: Path) -> None:
    done = run(tmp_path, reverse_edges=True)
    part = part_of(tmp_path)
    assert part.user_ids("user").tolist() == USERS["id"]
    assert part.user_ids("item").tolist() == ITEMS["number"]
    assert part.original_node_ids("user").tolist() == [0, 1, 2, 3, 4]
    # Age over its range; then Bonn, Jena, Ulm.
    assert part.node_data("user", "feat").tolist() == [
        [0.0, 0, 0, 1], [0.25, 1, 0, 0], [0.5, 0, 0, 1], [1.0, 0, 0, 0], [0.75, 0, 1, 0],
    ]  # fmt: skip
    assert part.node_data("user", "emb").dtype == np.float32
    assert part.node_data("user", "emb").tolist() == USERS["emb"]
    assert part.node_data("user", "label").tolist() == [0, 1, 0, -1, 1]
    masks = [part.node_data("user", f"{name}_mask") for name in ("train", "val", "test")]
    assert [mask.sum() for mask in masks] == [2, 1, 1]
    assert np.sum(masks, axis=0).tolist() == [1, 1, 1, 0, 1]  # dan has no label
    assert done.manifest.num_classes == {"user": 2}
    assert done.manifest.parameters["class_names"] == {"user": ["gold", "iron"]}
    assert part.node_data("item", "price").tolist() == [0.125, 0.375, 0.5]
    # In-edges of 70, of 5000000000 and of 9, sources ascending: rows 3, 2, 0 | 4 | 1, 5 of the table.
    assert part.indptr(BUYS_TYPE).tolist() == [0, 3, 4, 6]
    assert part.indices(BUYS_TYPE).tolist() == [0, 1, 4, 3, 0, 4]
    assert part.indices(BUYS_TYPE).dtype == np.int32
    assert part.original_edge_ids(BUYS_TYPE).tolist() == [3, 2, 0, 4, 1, 5]
    assert part.edge_data(BUYS_TYPE, "count").tolist() == [5, 2, 3, 4, 1, 6]
    assert part.edge_data(BUYS_TYPE, "count").dtype == np.int64  # whole numbers stay
    reverse = ("item", "buys-rev", "user")
    assert part.indptr(reverse).tolist() == [0, 2, 3, 3, 4, 6]
    assert part.indices(reverse).tolist() == [0, 2, 0, 1, 0, 2]
    assert part.original_edge_ids(reverse).tolist() == [3, 1, 2, 4, 0, 5]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("partial")] == []


def test_the_same_bytes_within_any_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = set()
    for work in (1 << 26, 1 << 11):
        monkeypatch.setattr(build, "open_budget", lambda limit, work=work: Budget(work=work))
        run(tmp_path, reverse_edges=True, overwrite=True)
        manifests.add((tmp_path / "out" / "manifest.json").read_text())  # it has the checksums of all files
    assert len(manifests) == 1


@pytest.mark.usefixtures("budget")
def test_equals_the_reader_of_tables_in_memory(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    ids = [f"n{number}" for number in random.permutation(150)]
    ends = random.integers(0, 150, (2, 800))
    features = pa.array(random.random((150, 3)).tolist(), pa.list_(pa.float32()))
    edges = {"src": [ids[i] for i in ends[0]], "dst": [ids[i] for i in ends[1]], "w": random.random(800)}
    tables = {"tables/nodes.parquet": {"id": ids, "feat": features}, "tables/edges.parquet": edges}
    ends_of = {"relation": ["_N", "_E", "_N"], "source_id_col": "src", "dest_id_col": "dst"}
    weights = [{"feature_col": "w", "out_dtype": "float64"}]
    description = one_type(
        "_N",
        {"files": "tables/nodes.parquet", "features": [{"feature_col": "feat"}]},
        {"files": "tables/edges.parquet", "features": weights} | ends_of,
    )
    run(tmp_path, description, tables)
    graph = load_dataset(tmp_path / "tables")
    assignment = PARTITIONERS.get("contiguous")(PartitionOptions()).assign(graph, 1, 0)
    write_dataset(graph, assignment, tmp_path / "other")
    ours, expected = (open_dataset(tmp_path / name).manifest.files for name in ("out", "other"))
    assert {path: info.checksum for path, info in ours.items()} == {
        path: info.checksum for path, info in expected.items()
    }


@pytest.mark.usefixtures("budget")
def test_one_part_is_cut_into_more_with_the_ids_of_the_tables(tmp_path: Path) -> None:
    run(tmp_path)
    graph = load_graph(tmp_path / "out")
    assert graph.user_ids["user"].tolist() == USERS["id"]
    (sources, destinations), rows = graph.edges[BUYS_TYPE], graph.edge_ids[BUYS_TYPE]
    assert [USERS["id"][i] for i in sources] == [BUYS["who"][row] for row in rows]
    assert [ITEMS["number"][i] for i in destinations] == [BUYS["what"][row] for row in rows]
    assert graph.edge_data[BUYS_TYPE]["count"].tolist() == [BUYS["count"][row] for row in rows]
    assert graph.num_classes == {"user": 2}
    with pytest.raises(ConfigError, match="no option 'ignore'"):
        load_graph(tmp_path / "out", ignore="x")
    cut = PARTITIONERS.get("random")(PartitionOptions()).assign(graph, 2, 0)
    write_dataset(graph, cut, tmp_path / "two")
    with pytest.raises(ConfigError, match="already has 2 parts"):
        load_graph(tmp_path / "two")


@pytest.mark.usefixtures("budget")
def test_a_column_names_the_split_where_nothing_else_does(tmp_path: Path) -> None:
    tables = {"n.csv": "y,split\n1,test\n,\n0,Train\n2,val\n1,train\n", "e.csv": "s,d\n2,1\n"}
    nodes: dict[str, Any] = {"files": "n.csv", "node_id_col": None}
    nodes["labels"] = [{"task_type": "classification", "label_col": "y"}]
    run(tmp_path, one_type("n", nodes, {"files": "e.csv"}), tables)
    masks = [part_of(tmp_path).node_data("n", f"{name}_mask").tolist() for name in ("train", "val", "test")]
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [[2, 4], [3], [0]]
    tables["n.csv"] = tables["n.csv"].replace("Train", "often")
    with pytest.raises(
        DatasetError, match=r"n.csv: column 'split', row 2: 'often' is not a split; write train"
    ):
        run(tmp_path, one_type("n", nodes, {"files": "e.csv"}), tables, overwrite=True)
    nodes["labels"][0]["split_pct"] = [1, 0, 0]
    run(tmp_path, one_type("n", nodes, {"files": "e.csv"}), tables, overwrite=True)
    assert part_of(tmp_path).node_data("n", "train_mask").tolist() == [True, False, True, True, True]


@pytest.mark.usefixtures("budget")
def test_warns_where_nodes_are_numbered_by_row_beside_a_column_of_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes: dict[str, Any] = {"files": "n.csv", "node_id_col": None}
    run(
        tmp_path,
        one_type("n", nodes, {"files": "e.csv"}),
        {"n.csv": "Node_ID\n1\n0\n", "e.csv": "s,d\n1,0\n"},
    )
    assert (
        "nodes 'n' are numbered by row; if column 'Node_ID' has their ids, give it as node_id_col"
        in caplog.text
    )


@pytest.mark.usefixtures("budget")
def test_reads_a_relation_without_rows(tmp_path: Path) -> None:
    nodes: dict[str, Any] = {"files": "n.csv", "node_id_col": None}
    run(tmp_path, one_type("n", nodes, {"files": "e.csv"}), {"n.csv": "x\n1\n0\n", "e.csv": "s,d\n"})
    graph = load_graph(tmp_path / "out")
    assert (graph.num_nodes, graph.total_edges) == ({"n": 2}, 0)
    with pytest.raises(DatasetError, match=r"n\.csv: the table of n has no row; leave it, or its features"):
        run(tmp_path, one_type("n", nodes, {"files": "e.csv"}), {"n.csv": "x\n"}, overwrite=True)


@pytest.mark.usefixtures("budget")
def test_files_name_the_split(tmp_path: Path) -> None:
    description = describe()
    (label,) = description["nodes"][0]["labels"]
    del label["split_pct"]
    label["custom_split_filenames"] = {"train": "train.json", "valid": ["valid.json"]}
    (tmp_path / "train.json").write_text('eve\n"ann"\n')
    (tmp_path / "valid.json").write_text("bob\n")
    run(tmp_path, description)
    part = part_of(tmp_path)
    assert part.node_data("user", "train_mask").tolist() == [True, False, False, False, True]
    assert part.node_data("user", "val_mask").tolist() == [False, True, False, False, False]
    assert "test_mask" not in open_dataset(tmp_path / "out").manifest.node_columns["user"]
    for text, message in (
        ("eve\nzoe\n", r"train.json: column 'id', row 1: node id 'zoe' is not among the ids of .*users-0"),
        ("eve\nbob\n", "1 ids are named more than once"),
        ("\n", r"train.json: names no node; leave 'train' out"),
        ("\x80", r"train.json is not a text with one id per line"),
        ("dan\n", r"users-1.parquet: column 'segment', row 0: no label, but the row is in the train split"),
    ):
        (tmp_path / "train.json").write_text(text, encoding="latin-1")
        with pytest.raises(DatasetError, match=message):
            run(tmp_path, description, overwrite=True)


@pytest.mark.usefixtures("budget")
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("users-1.parquet", LAST_USERS | {"id": ["dan", "ann"]},
         r"users-1.parquet: column 'id', row 1: node id 'ann' already occurs in row 0 of .*users-0.parquet"),
        ("users-1.parquet", LAST_USERS | {"id": ["dan", None]},
         r"users-1.parquet: column 'id', row 1: is empty"),
        ("users-1.parquet", LAST_USERS | {"id": ["dan", ""]}, r"column 'id', row 1: node id '' is empty"),
        ("users-1.parquet", LAST_USERS | {"age": [1.0, float("nan")]},
         r"users-1.parquet: column 'age', row 1: nan .*is not a finite number"),
        ("users-1.parquet", LAST_USERS | {"age": ["1", "old"]},
         r"users-1.parquet: column 'age', row 1: 'old' is not a number"),
        ("users-1.parquet", LAST_USERS | {"emb": [[1.0, 2.0], [1.0]]},
         r"users-1.parquet: column 'emb', row 1: .*1.*, but"),
        ("users-1.parquet", {"id": ["dan", "eve"]}, r"users-1.parquet: has no column 'age'"),
        ("buys.parquet", BUYS | {"who": ["eve", "ann", "zoe", "ann", "zoe", "eve"]},
         r"buys.parquet: column 'who', row 2: .*'zoe' is not among .* 'user' nodes \(rows of 'who' .*: 2\)"),
        ("buys.parquet", BUYS | {"what": [70, 9, 70, 70, 9, 8]},
         r"buys.parquet: column 'what', row 5: .* 8 is not among .* 'item' nodes \(rows of 'what' .*: 1\)"),
        ("buys.parquet", BUYS | {"who": [1.5] * 6}, r"'who' must hold integer or string ids"),
        ("users-1.parquet", LAST_USERS | {"emb": [[1.0, 2.0], [1e300, 1.0]]},
         r"users-1.parquet: column 'emb', row 1: 1e\+300 does not fit float32"),
        ("items.parquet", ITEMS | {"price": [0.0, 1.0, -1.0]}, "items.parquet: column 'price' has the sum 0"),
        ("users-0.parquet", FIRST_USERS | {"emb": pa.array([[]] * 3, pa.list_(pa.float32()))},
         r"users-0.parquet: column 'emb', row 0: an empty list"),
        ("knows.csv", "a;b\nann;bob\nann\n", r"knows.csv: not readable as a csv table: .*Expected 2 col"),
    ],
)  # fmt: skip
def test_names_bad_rows_and_writes_nothing(tmp_path: Path, file: str, content: object, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        run(tmp_path, tables=TABLES | {file: content})
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("partial")] == []


@pytest.mark.usefixtures("budget")
def test_ids_that_only_csv_names_are_texts_as_they_are_written(tmp_path: Path) -> None:
    tables = {"n.csv": 'id,x\n007,1\n7, 2.5\n"x,y",3e1\n', "e.csv": 's,d\n7,007\n"x,y",7\n'}
    nodes = {"files": "n.csv", "features": [{"feature_col": "x"}]}
    run(tmp_path, one_type("n", nodes, {"files": "e.csv"}), tables)
    part = part_of(tmp_path)
    assert part.user_ids("n").tolist() == ["007", "7", "x,y"]
    assert part.indices(("n", "e", "n")).tolist() == [1, 2]
    assert part.node_data("n", "x").tolist() == [1.0, 2.5, 30.0]


@pytest.mark.usefixtures("budget")
def test_rows_without_an_id_column_are_numbered(tmp_path: Path) -> None:
    tables = {"n.csv": "x\n1\n2\n3\n", "e.csv": "s,d\n2,1\n0,1\n"}
    nodes = {"files": "n.csv", "node_id_col": None, "features": [{"feature_col": "x"}]}
    labels = [{"task_type": "link_prediction", "split_pct": [0.5, 0.5, 0]}]
    description = one_type("n", nodes, {"files": "e.csv", "labels": labels})
    run(tmp_path, description, tables)
    part, etype = part_of(tmp_path), ("n", "e", "n")
    assert part.user_ids("n") is None
    assert part.indices(etype).tolist() == [0, 2]
    masks = [part.edge_data(etype, f"{name}_mask") for name in ("train", "val")]
    assert sorted(masks[0].tolist()) == [False, True]
    assert (masks[0] != masks[1]).all()
    for odd in ("'one'", "'0x1'", "'01'", "'+1'", "3", "-1"):
        tables["e.csv"] = f"s,d\n2,1\n0,{odd.strip(chr(39))}\n"
        with pytest.raises(DatasetError, match=rf"e.csv: column 'd', row 1: node id {re.escape(odd)} is no"):
            run(tmp_path, description, tables, overwrite=True)


def test_texts_are_the_same_however_a_program_keeps_them(tmp_path: Path) -> None:
    users, buys = pa.table(USERS), pa.table(BUYS)
    names = pa.array(USERS["id"], pa.string_view())
    users = users.set_column(0, "id", names).set_column(2, "city", users["city"].dictionary_encode())
    users = users.set_column(4, "segment", users["segment"].dictionary_encode())
    buys = buys.set_column(0, "who", buys["who"].dictionary_encode())
    kept = {"users-0.parquet": users.slice(0, 3), "users-1.parquet": users.slice(3), "buys.parquet": buys}
    manifests = [run(tmp_path, tables=TABLES | more, overwrite=True).manifest for more in ({}, kept)]
    assert manifests[0].checksum == manifests[1].checksum


def test_files_without_a_row_stand_among_others(tmp_path: Path) -> None:
    rows = {"n-a": "", "n-b": "x,1\n", "n-c": "", "n-d": "y,2\n"}
    tables = {f"{name}.csv": f"id,v\n{text}" for name, text in rows.items()}
    tables |= {"e-0.csv": "s,d\nx,y\n", "e-1.csv": "s,d\n"}
    nodes = {"files": "n-*.csv", "features": [{"feature_col": "v"}]}
    run(tmp_path, one_type("n", nodes, {"files": "e-*.csv"}), tables)
    part = part_of(tmp_path)
    assert part.user_ids("n").tolist() == ["x", "y"]
    assert part.node_data("n", "v").tolist() == [1.0, 2.0]
    assert part.indices(("n", "e", "n")).tolist() == [0]


@pytest.mark.parametrize(
    ("place", "value", "kind", "message"),
    [
        ("edges.1.dest_id_col", "bee", DatasetError, "knows.csv: has no column 'bee' of the desc"),
        ("edges.0.features.0.feature_col", "cost", DatasetError, "buys.parquet: has no column 'cost'"),
        ("nodes.1.features.0.transform", {"name": "standard", "sum": "3"}, ConfigError,
         r"standard of the column 'price': key 'sum' is '3', expected a number"),
        ("nodes.0.labels.0", {"task_type": "classification", "label_col": "segment",
                              "custom_split_filenames": {"train": "t.csv", "column": "i"}},
         DatasetError, "t.csv: has no column 'i'"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_description_is_told_before_a_table_is_read(
    tmp_path: Path, place: str, value: object, kind: type[Exception], message: str
) -> None:
    description = describe()
    put_at(description, place, value)
    bad = {"users-1.parquet": LAST_USERS | {"id": ["dan", "dan"]}, "t.csv": "id\n"}
    with pytest.raises(kind, match=message):
        run(tmp_path, description, TABLES | bad)


def test_what_was_found_transforms_later_tables_alike(tmp_path: Path) -> None:
    write_description(run(tmp_path), tmp_path / "again" / "shop.json")
    description = json.loads((tmp_path / "again" / "shop.json").read_text())
    features = description["nodes"][0]["features"]
    assert features[0]["transform"] == {"name": "max_min_norm", "min_val": [20.0], "max_val": [60.0]}
    assert features[1]["transform"]["mapping"] == {"Bonn": 0, "Jena": 1, "Ulm": 2}
    assert "transform" not in features[2]
    # Other people, other ages, another city: the same numbers for the same values all the same.
    changed = FIRST_USERS | {"city": ["Ulm", "Rom", "Ulm"], "age": [30.0, 90.0, 40.0]}
    run(tmp_path / "again", description, TABLES | {"users-0.parquet": changed})
    rows = part_of(tmp_path / "again").node_data("user", "feat")[:2].tolist()
    assert rows == [[0.25, 0, 0, 1], [1.0, 0, 0, 0]]


def test_a_target_that_holds_something_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path, {"out/mine.txt": "kept"})
    within = tmp_path / "new" / "x"
    for kind, message, options in (
        (StorageError, "exists already", {}),
        (StorageError, "does not hold a dataset of this program", {"overwrite": True}),
        (ConfigError, "the workspace .* is in .*new", {"out": tmp_path / "new", "workspace": within}),
        (ConfigError, "the output-conf-file .* is in .*new",
         {"out": tmp_path / "new", "output_description": within}),
        (ConfigError, r"--memory 10MB leaves too little .* grant --memory \d+MB",
         {"out": tmp_path / "new", "memory": "10MB"}),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            run(tmp_path, **options)


def test_reverse_edges_that_are_described_already_are_refused(tmp_path: Path) -> None:
    description = describe()
    description["edges"][1]["relation"] = ["item", "buys-rev", "user"]
    description["edges"][1] |= {"source_id_col": "what", "dest_id_col": "who", "files": "buys.parquet"}
    description["edges"][1]["format"] = {"name": "parquet"}
    with pytest.raises(ConfigError, match="described already"):
        run(tmp_path, description, reverse_edges=True)
