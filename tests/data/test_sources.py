"""Sources of raw graphs: npz, DGL, OGB, arrays; options and the registry."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor

from dglx_dist.data.sources import (
    DATASETS,
    cache_set_aside,
    load_dataset,
    raw_graph_from_ogb,
    standard_columns,
)
from dglx_dist.data.validate import check_raw_graph
from dglx_dist.errors import ConfigError, DatasetError, UnknownNameError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph, SparseRows
from tests.data.raw_graphs import columns_of, edges_of
from tests.helpers import refusal


def test_a_standard_name_that_is_taken_is_not_overwritten() -> None:
    columns = standard_columns({"feat": np.array([1.0]), "features": np.array([2.0])}, "here")
    assert {name: np.asarray(column).tolist() for name, column in columns.items()} == {
        "feat": [1.0],
        "features": [2.0],
    }


BUYS, MADE_BY = ("user", "buys", "item"), ("item", "made_by", "user")


def triangle(**columns: Tensor) -> dgl.DGLGraph:
    graph = dgl.graph(([2, 0, 1], [0, 1, 2]))
    graph.ndata["features"] = torch.arange(6, dtype=torch.int64).reshape(3, 2)
    graph.ndata["labels"] = torch.tensor([1, 0, -1], dtype=torch.int32)
    graph.ndata["train_mask"] = torch.tensor([1, 0, 0], dtype=torch.uint8)
    graph.edata["weight"] = torch.tensor([0.5, 1.5, 2.5])
    for name, column in columns.items():
        graph.ndata[name] = column
    return graph


def shop() -> dgl.DGLGraph:
    graph = dgl.heterograph({BUYS: ([0, 1], [1, 2]), MADE_BY: ([0], [3])}, {"user": 4, "item": 3})
    graph.nodes["user"].data["label"] = torch.tensor([0, 2, -1, 1])
    graph.nodes["item"].data["feat"] = torch.ones(3, 2, dtype=torch.bfloat16)
    graph.edges[BUYS].data["train_mask"] = torch.tensor([True, False])
    return graph


@pytest.mark.parametrize("formats", ["coo", "csc", "csr"])
def test_a_homogeneous_graph_keeps_edge_order_and_gets_standard_columns(formats: str) -> None:
    graph = load_dataset(triangle().formats(formats))
    assert graph.num_nodes == {NODE_TYPE: 3}
    assert edges_of(graph) == [[2, 0, 1], [0, 1, 2]]
    assert graph.edge_data[EDGE_TYPE]["weight"].tolist() == [0.5, 1.5, 2.5]
    columns = columns_of(graph)
    assert columns["feat"].dtype == np.float32
    assert columns["feat"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert columns["label"].tolist() == [1, 0, -1]
    assert columns["train_mask"].tolist() == [True, False, False]
    assert graph.num_classes == {NODE_TYPE: 2}


def test_columns_of_a_script_stay_what_they_are() -> None:
    labels = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)
    kept = load_dataset(triangle(feat=torch.arange(3, dtype=torch.int32), label=labels), rename=False)
    columns = columns_of(kept)
    assert columns["features"].dtype == np.int64
    assert columns["labels"].dtype == columns["feat"].dtype == np.int32
    assert columns["label"].tolist() == [[0.5], [1.0], [2.0]]
    assert kept.num_classes == {NODE_TYPE: 1}  # its width, as of several answers a node
    # Gaps would be refused, so such labels number classes; and whole numbers do.
    for label in ([1.0, torch.nan, 0.0], [1, -1, 0]):
        kept = load_dataset(triangle(label=torch.tensor(label)), rename=False)
        assert columns_of(kept)["label"].tolist() == [1, -1, 0]
        assert kept.num_classes == {NODE_TYPE: 2}


@pytest.mark.parametrize("label", [[3.0, -1.0, 0.0], [3.0, -2.0, 0.0], [3.0, 0.5, 0.0]])
def test_floating_point_numbers_that_cannot_number_classes_are_targets(label: list[float]) -> None:
    graph = triangle(label=torch.tensor(label, dtype=torch.float64))
    del graph.ndata["labels"]
    kept = load_dataset(graph)
    assert columns_of(kept)["label"].dtype == np.float64
    assert columns_of(kept)["label"].tolist() == label
    assert kept.num_classes == {}


SPLITS = torch.tensor([[1, 0], [0, 1], [0, 0]])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([0, 1], ConfigError, r"a DGLGraph, not builtins\.list"),
        (dgl.to_block(triangle()), ConfigError, "block of a mini-batch"),
        (triangle(train_mask=SPLITS), DatasetError, "has 2 splits; choose one with split=0 to 1"),
        (triangle(features=torch.tensor([0, 1, torch.nan])), DatasetError, "'graph': column 'feat', row 2"),
    ],
)  # fmt: skip
def test_something_else_than_a_graph_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_dataset(given)


def test_one_of_several_splits_is_chosen_and_ids_of_a_larger_graph_are_left_out() -> None:
    part = dgl.node_subgraph(triangle(train_mask=SPLITS), [0, 1])
    assert dgl.NID in part.ndata
    graph = load_dataset(part, split=1)
    assert columns_of(graph)["train_mask"].tolist() == [False, True]
    assert dgl.NID not in graph.node_data[NODE_TYPE]
    assert dgl.EID not in graph.edge_data[EDGE_TYPE]


@pytest.mark.wide
def test_several_saved_graphs_need_an_index(tmp_path: Path) -> None:
    path = tmp_path / "two.bin"
    dgl.save_graphs(str(path), [shop(), dgl.graph(([0], [1]))])
    assert load_dataset(path, index=1).total_edges == 1
    graph = load_dataset(path, index=0)
    assert (graph.name, graph.num_nodes, graph.num_classes) == ("two", {"user": 4, "item": 3}, {"user": 3})
    assert (edges_of(graph, BUYS), edges_of(graph, MADE_BY)) == ([[0, 1], [1, 2]], [[0], [3]])
    assert columns_of(graph, "user")["label"].tolist() == [0, 2, -1, 1]
    assert graph.node_data["item"]["feat"].dtype == np.float32
    assert graph.edge_data[BUYS]["train_mask"].tolist() == [True, False]
    for options, message in (
        ({}, r"two\.bin has 2 graphs and no index was given; choose index=0 to 1"),
        ({"index": 2}, "index=2 is not among them"),
        ({"index": "first"}, "index='first' must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_dataset(path, **options)


def test_files_that_are_no_saved_graphs_are_refused_without_dgls_stack(tmp_path: Path) -> None:
    dgl.save_graphs(str(tmp_path / "half.bin"), [triangle()])
    (tmp_path / "half.bin").write_bytes((tmp_path / "half.bin").read_bytes()[:60])
    (tmp_path / "noise.bin").write_bytes(bytes(range(64)))
    for name, message in (
        ("half", "is not a file of saved DGL graphs, or is damaged"),
        ("noise", "is not a file of saved DGL graphs, or is damaged"),
        ("absent", "; expected a dgl.save_graphs file"),
    ):
        text = refusal(lambda name=name: load_dataset(f"dgl_binary:{tmp_path / name}.bin"), DatasetError)
        assert f"{name}.bin" in text
        assert message in text
        assert "Check failed" not in text


def test_a_dataset_of_dgl_is_loaded_by_its_class_name(tmp_path: Path) -> None:
    # This one is computed, not downloaded.
    options = {"num_base_nodes": 30, "num_base_edges_per_node": 2, "num_motifs": 4, "raw_dir": str(tmp_path)}
    graph = load_dataset("dgl:BAShapeDataset", **options, seed=0)
    assert graph.name == "BAShapeDataset"
    assert graph.num_nodes == {NODE_TYPE: 50}  # 30, and four houses of five nodes
    assert graph.num_classes == {NODE_TYPE: 4}


def test_a_failed_download_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offline(dgl.data.DGLDataset):
        def __init__(self, raw_dir: str = "", verbose: bool = False) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setattr(dgl.data, "CoraGraphDataset", Offline)
    with pytest.raises(DatasetError, match=r"dgl:CoraGraphDataset could not be .*no route.*raw_dir="):
        load_dataset("dgl:CoraGraphDataset")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.savez(tmp_path / "friends.npz", src=np.array([0, 1]), dst=np.array([1, 2]))
    (tmp_path / "notes.md").write_text("hello")
    (tmp_path / "edges.csv").write_text("src,dst\n0,1\n1,2\n")
    return tmp_path


def test_a_path_says_its_source_by_its_kind(folder: Path) -> None:
    for spec in (folder / "friends.npz", f"npz:{folder / 'friends.npz'}", str(folder)):
        assert edges_of(load_dataset(spec)) == [[0, 1], [1, 2]]


def test_a_folder_may_be_called_as_a_source_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tables").mkdir()
    (folder / "tables" / "edges.csv").write_text("src,dst\n0,2\n")
    monkeypatch.chdir(folder)
    assert edges_of(load_dataset("tables")) == [[0], [1]]


@pytest.mark.parametrize(
    ("spec", "options", "error", "named"),
    [
        ("{}/freinds.npz", {}, DatasetError, r"/freinds\.npz .*near it: friends\.npz.* Expected a `\.npz`"),
        ("{}/nowhere/a.npz", {}, DatasetError, r"the folder .*nowhere does not exist either"),
        ("sinthetic:nodes=10", {}, UnknownNameError, "did you mean 'synthetic'"),
        ("sinthetic", {}, DatasetError, "near it: synthetic"),
        ("nothere", {}, DatasetError, r"nothere\)\. Expected"),
        ("{}/notes.md", {}, DatasetError, r"notes\.md: the suffix '\.md' belongs to no dataset source"),
        ("synthetic", {"spec": "x"}, ConfigError, "no option 'spec'"),
        ("dgl:CoraGraphDatase", {}, UnknownNameError, "'CoraGraphDatase'; did you mean 'CoraGraphDataset'"),
        ("dgl:BAShapeDataset", {"num_motif": 3}, ConfigError, "'dgl:BAShapeDataset' has no option"),
        ("ogb:ogbl-collab", {}, ConfigError, "ogb:ogbl-collab is not a node dataset"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_named(
    folder: Path, spec: str, options: dict[str, object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        load_dataset(spec.format(folder), **options)


@pytest.mark.parametrize("name", DATASETS.names())
def test_an_unknown_option_is_refused_before_anything_is_read(name: str) -> None:
    location = {"synthetic": "", "dgl": "BAShapeDataset", "ogb": "ogbn-arxiv"}.get(name, "absent")
    with pytest.raises(ConfigError, match="has no option 'no_such_option'"):
        DATASETS.get(name)(location, {"no_such_option": 1})


def test_reading_a_file_needs_neither_dgl_nor_torch(folder: Path) -> None:
    code = (
        "import sys; from dglx_dist.data.sources import load_dataset; "
        f"load_dataset({str(folder / 'friends.npz')!r}); "
        "assert not {'dgl', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


PATH_OF_FOUR = {
    "src": np.array([0, 1, 2], dtype=np.int32),
    "dst": np.array([1, 2, 3], dtype=np.int32),
    "num_nodes": np.array(4),
    "labels": np.array([0, 1, -1, 1], dtype=np.int16),
    "split": np.array("made by hand"),
    "both_directions": np.array(False),
}


def load_npz(folder: Path, arrays: dict[str, Array] = PATH_OF_FOUR, **more: Array) -> RawGraph:
    np.savez(folder / "graph.npz", **(arrays | more))  # type: ignore[arg-type]
    return load_dataset(folder / "graph.npz")


def test_a_node_graph_keeps_edges_labels_and_its_other_columns(tmp_path: Path) -> None:
    graph = load_npz(tmp_path, weight=np.array([0.5, 1.0, 1.5]), age=np.array([1, 2, 3, 4]))
    assert (graph.name, graph.num_nodes) == ("graph", {NODE_TYPE: 4})
    assert edges_of(graph) == [[0, 1, 2], [1, 2, 3]]
    columns = columns_of(graph)
    assert set(columns) == {"label", "age"}
    assert columns["label"].tolist() == [0, 1, -1, 1]
    assert graph.num_classes == {NODE_TYPE: 2}
    assert graph.edge_data[EDGE_TYPE]["weight"].tolist() == [0.5, 1.0, 1.5]


def test_sparse_features_stay_sparse(tmp_path: Path) -> None:
    graph = load_npz(
        tmp_path,
        feat_indptr=np.array([0, 1, 1, 3, 3], dtype=np.int32),
        feat_indices=np.array([2, 0, 1], dtype=np.int32),
        feat_data=np.array([7, 8, 9], dtype=np.uint8),
        feat_dim=np.array(3),
    )
    features = graph.node_data[NODE_TYPE]["feat"]
    assert isinstance(features, SparseRows)
    assert features.indptr.dtype == np.int64
    assert features.dense(np.array([2, 0])).tolist() == [[8.0, 9.0, 0.0], [0.0, 0.0, 7.0]]


def test_relations_become_edge_types_with_their_own_edges_and_columns(tmp_path: Path) -> None:
    names = np.array(["<http://a.org/x#likes>", "<http://a.org/knows>", "<http://a.org/unused>"])
    graph = load_npz(tmp_path, etype=np.array([1, 0, 1]), etype_names=names, weight=np.array([10, 20, 30]))
    likes, knows = ((NODE_TYPE, name, NODE_TYPE) for name in names[:2].tolist())
    assert set(graph.edges) == {likes, knows}
    assert edges_of(graph, knows) == [[0, 2], [1, 3]]
    assert graph.edge_data[knows]["weight"].tolist() == [10, 30]
    assert graph.edge_data[likes]["weight"].tolist() == [20]
    with pytest.raises(DatasetError, match="two relations have the name 'a'"):
        load_npz(tmp_path, etype=np.array([0, 1, 2]), etype_names=np.array(["a", "b", "a"]))


def test_a_knowledge_graph_carries_its_splits_on_the_edges(tmp_path: Path) -> None:
    triples = {
        "head": np.array([0, 1, 2, 0]),
        "rel": np.array([0, 0, 1, 0]),
        "tail": np.array([1, 2, 0, 2]),
        "triple_split": np.array([0, 2, 0, 1], dtype=np.uint8),
        "num_entities": np.array(3),
        "relation_names": np.array(["_has", "_is"]),
    }
    graph = load_npz(tmp_path, triples)
    masks = graph.edge_data[(NODE_TYPE, "_has", NODE_TYPE)]
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "train_mask": [True, False, False],
        "test_mask": [False, True, False],
        "val_mask": [False, False, True],
    }
    assert set(graph.edge_data[(NODE_TYPE, "_is", NODE_TYPE)]) == {"train_mask"}


def test_a_validation_mask_without_nodes_is_absent_and_so_are_classes_without_labels(tmp_path: Path) -> None:
    graph = load_npz(tmp_path, val_mask=np.zeros(4, dtype=bool), labels=np.full(4, -1))
    assert set(columns_of(graph)) == {"label"}
    assert graph.num_classes == {}


TWO_NAMES = np.array(["a", "b"])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"dst": np.array([1, 2, 9])}, r"column 'dst', row 2: node id 9 is outside 0\.\.3"),
        ({"num_classes": np.array(1)}, r"column 'label', row 1: label 1 is outside 0\.\.0"),
        ({"num_nodes": np.array([4, 4])}, r"num_nodes is array\(\[4, 4\]\); expected one whole number"),
        ({"num_nodes": np.array("abc")}, "num_nodes is .*expected one whole number"),
        ({"num_classes": np.array(2.5)}, "num_classes is .*expected one whole number"),
        ({"feats": np.zeros((7, 2))}, r"array 'feats' has shape \(7, 2\)"),
        ({"labels": np.array(["red"] * 4)}, "column 'label' must hold numbers"),
        ({"train_mask": np.array([0, 2, 1, 0])}, "column 'train_mask', row 1: 2 is neither 0 nor 1"),
        ({"train_mask": np.zeros(4, bool)}, "column 'train_mask' selects no row"),
        ({"feat_data": np.ones(2)}, "the array 'feat_indptr' is missing"),
        ({"etype": np.array([0, 1, 2**60]), "etype_names": TWO_NAMES}, f"row 2: relation {2**60} is outside"),
        (
            {"head": np.array([0]), "tail": np.array([1])},
            r"the array 'rel' is missing.* \(the file has .*head, ",
        ),
        ({"etype": np.array([0, 1])}, "3 edges but 2 relations"),
        ({"etype": np.array([0, 1, np.nan])}, "column 'rel or etype' must hold one whole number"),
        ({"src": np.array(0)}, r"column 'src' must hold one whole number a row; it is int64 of shape \(\)"),
        ({"etype": np.array([0, 1, 0]), "triple_split": np.array([0] * 4)}, "3 edges but 4 splits of edges"),
        ({"src": np.array([{"a": 1}], dtype=object)}, "not a readable .npz file of plain arrays"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arrays_are_refused(tmp_path: Path, arrays: dict[str, Array], message: str) -> None:
    with pytest.raises(DatasetError, match=rf"graph\.npz: .*{message}"):
        load_npz(tmp_path, **arrays)


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "no_edges.npz", src=np.array([0]))
    (tmp_path / "text.npz").write_text("not a zip file")
    for name, problem in (
        ("no_edges", ": the array 'dst' is missing"),
        ("text", ": not a readable .npz file"),
        ("absent", "; expected a .npz file"),
    ):
        with pytest.raises(DatasetError, match=rf"{name}\.npz{problem}"):
            load_dataset(f"npz:{tmp_path / name}.npz")


def test_features_without_edges_tell_how_many_nodes_there_are(tmp_path: Path) -> None:
    none, features = np.empty(0, np.int64), np.ones((3, 2))
    graph = load_npz(tmp_path, {"src": none, "dst": none, "features": features})
    assert (graph.num_nodes, graph.total_edges) == ({NODE_TYPE: 3}, 0)
    ends = {"src": np.array([0, 1, 0]), "dst": np.array([1, 0, 0])}
    with pytest.raises(
        DatasetError, match="give num_nodes=3 if it belongs to nodes, or rename it to 'edge_feat'"
    ):
        load_npz(tmp_path, {**ends, "feat": features})
    graph = load_npz(tmp_path, {**ends, "edge_feat": features})
    assert (graph.num_nodes, list(graph.edge_data[EDGE_TYPE])) == ({NODE_TYPE: 2}, ["edge_feat"])


RING = {"src": np.arange(6), "dst": (np.arange(6) + 1) % 6, "num_nodes": np.array(6)}


def test_refuses_an_array_with_as_many_rows_as_nodes_and_edges(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="rename it to 'node_weight' or 'edge_weight'"):
        load_npz(tmp_path, {**RING, "weight": np.arange(6.0)})
    graph = load_npz(
        tmp_path, {**RING, "edge_weight": np.arange(6.0), "node_age": np.arange(6), "feat": np.eye(6)}
    )
    assert sorted(graph.edge_data[EDGE_TYPE]) == ["edge_weight"]
    assert sorted(graph.node_data[NODE_TYPE]) == ["feat", "node_age"]


def test_values_of_a_matrix_are_edge_weights_also_with_as_many_nodes(tmp_path: Path) -> None:
    weights = np.arange(6) + 0.5
    scipy.sparse.save_npz(
        tmp_path / "m.npz", scipy.sparse.csr_matrix((weights, (RING["src"], RING["dst"])), shape=(6, 6))
    )
    graph = load_dataset(tmp_path / "m.npz")
    assert graph.edge_data[EDGE_TYPE]["weight"].tolist() == weights.tolist()
    assert not graph.node_data[NODE_TYPE]


@pytest.mark.parametrize(("stored", "loaded"), [("u1", "i4"), ("u8", "i8"), (">i8", "i8"), (">i4", "i8")])
def test_ids_have_the_dtypes_that_later_stages_compile_for(tmp_path: Path, stored: str, loaded: str) -> None:
    graph = load_npz(tmp_path, **{name: PATH_OF_FOUR[name].astype(stored) for name in ("src", "dst")})
    assert edges_of(graph) == [[0, 1, 2], [1, 2, 3]]
    assert [ids.dtype for ids in graph.edges[EDGE_TYPE]] == [loaded, loaded]


REAL = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.real_data
@pytest.mark.skipif(not REAL.exists(), reason="the real graphs are not here")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dblp_full", [17_716, 105_734, 1639, 4, 80, 120, 17_516]),
        ("coauthor_physics", [34_493, 495_924, 8415, 5, 100, 150, 34_243]),
    ],
)
def test_real_graphs_have_their_published_sizes(name: str, sizes: list[int]) -> None:
    graph = load_dataset(REAL / f"{name}.npz")
    columns = graph.node_data[NODE_TYPE]
    masks = (np.count_nonzero(columns[split]) for split in ("train_mask", "val_mask", "test_mask"))
    classes = graph.num_classes[NODE_TYPE]
    assert [graph.total_nodes, graph.total_edges, columns["feat"].shape[1], classes, *masks] == sizes


WRITES = ("author", "writes", "paper")


def test_reads_one_node_type_of_ogb() -> None:
    graph = raw_graph_from_ogb(
        "ogbn-tiny",
        {
            "edge_index": np.array([[0, 1, 2], [1, 2, 3]]),
            "edge_feat": None,
            "node_feat": np.ones((4, 2), dtype=np.float32),
            "node_year": np.array([[2010], [2011], [2012], [2013]]),
            "num_nodes": 4,
        },
        np.array([[0], [2], [1], [0]]),
        {"train": np.array([0, 3]), "valid": np.array([1]), "test": np.array([2])},
    )
    check_raw_graph(graph, "tiny")
    assert edges_of(graph) == [[0, 1, 2], [1, 2, 3]]
    assert {name: column.tolist() for name, column in columns_of(graph).items()} == {
        "feat": [[1, 1]] * 4,
        "year": [2010, 2011, 2012, 2013],
        "label": [0, 2, 1, 0],
        "train_mask": [True, False, False, True],
        "val_mask": [False, True, False, False],
        "test_mask": [False, False, True, False],
    }
    assert graph.num_classes == {NODE_TYPE: 3}


def test_reads_several_node_types_of_ogb_with_gaps_in_the_labels() -> None:
    graph = raw_graph_from_ogb(
        "ogbn-shop",
        {
            "edge_index_dict": {WRITES: np.array([[0, 1], [2, 0]])},
            "edge_feat_dict": {},
            "edge_reltype": {WRITES: np.array([[0], [0]])},
            "node_feat_dict": {"paper": np.zeros((3, 5), dtype=np.float32)},
            "num_nodes_dict": {"author": 2, "paper": 3},
        },
        {"paper": np.array([[1.0], [np.nan], [0.0]])},
        {"train": {"paper": np.array([0])}, "valid": {"paper": np.array([2])}, "test": {}},
    )
    assert graph.num_nodes == {"author": 2, "paper": 3}
    assert edges_of(graph, WRITES) == [[0, 1], [2, 0]]
    assert graph.edge_data[WRITES]["reltype"].tolist() == [0, 0]
    assert columns_of(graph, "paper")["label"].tolist() == [1, -1, 0]
    assert columns_of(graph, "author") == {}
    assert graph.num_classes == {"paper": 2}


def test_the_cache_of_ogb_is_neither_read_nor_changed(tmp_path: Path) -> None:
    cache = tmp_path / "processed" / "data_processed"
    with cache_set_aside(tmp_path):
        assert not cache.parent.exists()
    (tmp_path / "raw").mkdir()
    with cache_set_aside(tmp_path):
        cache.write_text("new")
    assert not cache.exists()
    cache.write_text("old")
    with cache_set_aside(tmp_path):
        assert not cache.exists()
        cache.write_text("new")
    assert [path.name for path in cache.parent.iterdir()] == ["data_processed"]
    assert cache.read_text() == "old"


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package ogb.*pip install 'dglx_dist\[ogb\]'"):
        load_dataset("ogb:ogbn-arxiv")


@pytest.mark.parametrize("base", [0, 10**12])
def test_codes_of_classes_are_numbered_and_kept_as_names(
    tmp_path: Path, base: int, caplog: pytest.LogCaptureFixture
) -> None:
    labels = np.array([*(base + np.array([7372, 2834] * 4)), -1])
    graph = load_npz(
        tmp_path, {"src": np.array([0]), "dst": np.array([1]), "num_nodes": np.array(9), "labels": labels}
    )
    assert graph.node_data[NODE_TYPE]["label"].tolist() == [1, 0] * 4 + [-1]
    assert graph.class_names == {NODE_TYPE: [str(base + 2834), str(base + 7372)]}
    assert graph.num_classes == {NODE_TYPE: 2}
    assert caplog.text.count("are numbered as 2 classes") == 1


@pytest.mark.parametrize("labels", [np.arange(8) * 1000, np.array([0, 1] * 4), np.array([0, 1000] * 4) / 2.5])
def test_measurements_and_small_classes_are_not_numbered(tmp_path: Path, labels: Array) -> None:
    graph = load_npz(
        tmp_path, {"src": np.array([0]), "dst": np.array([1]), "num_nodes": np.array(8), "labels": labels}
    )
    assert graph.node_data[NODE_TYPE]["label"].tolist() == labels.tolist()
    assert not graph.class_names
