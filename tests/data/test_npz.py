"""The npz format: small hand-made files, and the real graphs where they are at hand."""

from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.sources import NpzSource, load_dataset
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, SPLITS, Array, RawGraph, SparseRows

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data"

PATH_OF_FOUR = {
    "src": np.array([0, 1, 2], dtype=np.int32),
    "dst": np.array([1, 2, 3], dtype=np.int32),
    "num_nodes": np.array(4),
    "labels": np.array([0, 1, -1, 1], dtype=np.int16),
    "split": np.array("made by hand"),
    "both_directions": np.array(False),
}


def saved(folder: Path, **arrays: Array) -> Path:
    np.savez(folder / "graph.npz", **(PATH_OF_FOUR | arrays))  # type: ignore[arg-type]
    return folder / "graph.npz"


def load(path: Path) -> RawGraph:
    return NpzSource(str(path), {}).load()


def test_a_node_graph_keeps_edges_labels_and_its_other_columns(tmp_path: Path) -> None:
    graph = load(saved(tmp_path, weight=np.array([0.5, 1.0, 1.5]), age=np.array([1, 2, 3, 4])))
    assert graph.name == "graph"
    assert graph.num_nodes == {NODE_TYPE: 4}
    assert [ids.tolist() for ids in graph.edges[EDGE_TYPE]] == [[0, 1, 2], [1, 2, 3]]
    columns = graph.node_data[NODE_TYPE]
    assert set(columns) == {"label", "age"}
    assert np.array_equal(columns["label"], [0, 1, -1, 1])  # type: ignore[arg-type]
    assert graph.num_classes == {NODE_TYPE: 2}
    assert graph.edge_data[EDGE_TYPE]["weight"].tolist() == [0.5, 1.0, 1.5]


def test_whole_number_features_become_floats(tmp_path: Path) -> None:
    features = load(saved(tmp_path, features=np.eye(4, dtype=np.uint8))).node_data[NODE_TYPE]["feat"]
    assert features.dtype == np.float32
    assert np.array_equal(features, np.eye(4))  # type: ignore[arg-type]


def test_sparse_features_stay_sparse(tmp_path: Path) -> None:
    path = saved(
        tmp_path,
        feat_indptr=np.array([0, 1, 1, 3, 3], dtype=np.int32),
        feat_indices=np.array([2, 0, 1], dtype=np.int32),
        feat_data=np.array([7, 8, 9], dtype=np.uint8),
        feat_dim=np.array(3),
    )
    features = load(path).node_data[NODE_TYPE]["feat"]
    assert isinstance(features, SparseRows)
    assert features.indptr.dtype == np.int64
    assert features.dense(np.array([2, 0])).tolist() == [[8.0, 9.0, 0.0], [0.0, 0.0, 7.0]]


def test_relations_become_edge_types_with_their_own_edges_and_columns(tmp_path: Path) -> None:
    path = saved(
        tmp_path,
        etype=np.array([1, 0, 1]),
        etype_names=np.array(["<http://a.org/x#likes>", "<http://a.org/knows>", "<http://a.org/unused>"]),
        weight=np.array([10, 20, 30]),
    )
    graph = load(path)
    likes, knows = (NODE_TYPE, "likes", NODE_TYPE), (NODE_TYPE, "knows", NODE_TYPE)
    assert set(graph.edges) == {likes, knows}
    assert [ids.tolist() for ids in graph.edges[knows]] == [[0, 2], [1, 3]]
    assert graph.edge_data[knows]["weight"].tolist() == [10, 30]
    assert graph.edge_data[likes]["weight"].tolist() == [20]


def test_names_that_share_their_last_piece_keep_the_whole(tmp_path: Path) -> None:
    names = np.array(["<http://a.org/name>", "<http://b.org/name>", "plain"])
    graph = load(saved(tmp_path, etype=np.array([0, 1, 2]), etype_names=names))
    assert [relation for _, relation, _ in graph.edges] == ["http___a_org_name", "http___b_org_name", "plain"]


def test_a_knowledge_graph_carries_its_splits_on_the_edges(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "kg.npz",
        head=np.array([0, 1, 2, 0]),
        rel=np.array([0, 0, 1, 0]),
        tail=np.array([1, 2, 0, 2]),
        triple_split=np.array([0, 2, 0, 1], dtype=np.uint8),
        num_entities=np.array(3),
        relation_names=np.array(["_has", "_is"]),
    )
    graph = load_dataset(tmp_path / "kg.npz")
    masks = graph.edge_data[(NODE_TYPE, "_has", NODE_TYPE)]
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "train_mask": [True, False, False],
        "test_mask": [False, True, False],
        "val_mask": [False, False, True],
    }
    assert set(graph.edge_data[(NODE_TYPE, "_is", NODE_TYPE)]) == {"train_mask"}


def test_a_validation_mask_without_nodes_is_absent_but_a_training_mask_is_refused(tmp_path: Path) -> None:
    none = np.zeros(4, dtype=bool)
    assert "val_mask" not in load_dataset(saved(tmp_path, val_mask=none)).node_data[NODE_TYPE]
    with pytest.raises(DatasetError, match=r"graph.npz: column 'train_mask' selects no row"):
        load_dataset(saved(tmp_path, train_mask=none))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"dst": np.array([1, 2, 9])}, r"column 'dst', row 2: node id 9 is outside 0\.\.3"),
        ({"num_classes": np.array(1)}, r"column 'label', row 1: label 1 is outside 0\.\.0"),
        ({"odd": np.zeros((7, 2))}, r"array 'odd' has shape \(7, 2\)"),
        ({"train_mask": np.array([0, 2, 1, 0])}, "column 'train_mask', row 1: 2 is neither 0 nor 1"),
        ({"feat_data": np.ones(2)}, "lacks the array 'feat_indptr'"),
        ({"etype": np.array([0, 1, 2]), "etype_names": np.array(["a", "b"])}, "row 2: relation 2 is outside"),
        ({"etype": np.array([0, 1]), "etype_names": np.array(["a", "b"])}, "3 edges but 2 relations"),
        ({"etype": np.array([0, 1, np.nan])}, "column 'rel or etype' must hold one whole number"),
        ({"src": np.array(0)}, r"column 'src' must hold one whole number a row; it is int64 of shape \(\)"),
        ({"etype": np.array([0, 1, 0]), "triple_split": np.array([0] * 4)}, "3 edges but 4 splits of edges"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arrays_are_refused(tmp_path: Path, arrays: dict[str, Array], message: str) -> None:
    with pytest.raises(DatasetError, match=rf"graph\.npz: .*{message}"):
        load_dataset(saved(tmp_path, **arrays))


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "no_edges.npz", src=np.array([0]))
    with pytest.raises(DatasetError, match=r"no_edges\.npz: lacks the array 'dst'"):
        load(tmp_path / "no_edges.npz")
    (tmp_path / "text.npz").write_text("not a zip file")
    with pytest.raises(DatasetError, match=r"text\.npz: not a readable \.npz file"):
        load(tmp_path / "text.npz")
    np.savez(tmp_path / "pickled.npz", src=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DatasetError, match=r"pickled\.npz: not a readable \.npz file of plain arrays"):
        load(tmp_path / "pickled.npz")
    whole = saved(tmp_path).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=r"cut\.npz: not a readable"):
        load(tmp_path / "cut.npz")
    with pytest.raises(DatasetError, match=r"there is no file .*absent\.npz"):
        load(tmp_path / "absent.npz")
    with pytest.raises(ConfigError, match="no option 'colour'"):
        NpzSource(str(tmp_path / "graph.npz"), {"colour": 1})


@pytest.mark.parametrize(("stored", "loaded"), [("u1", "i4"), ("u8", "i8"), (">i8", "i8"), (">i4", "i8")])
def test_ids_come_in_the_dtypes_that_every_later_stage_compiles_for(
    tmp_path: Path, stored: str, loaded: str
) -> None:
    ends = {name: PATH_OF_FOUR[name].astype(stored) for name in ("src", "dst")}
    found = load(saved(tmp_path, **ends)).edges[EDGE_TYPE]
    assert [(ids.dtype, ids.tolist()) for ids in found] == [(loaded, [0, 1, 2]), (loaded, [1, 2, 3])]


def test_no_damaged_byte_ends_in_another_error(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "graph.npz", src=np.arange(200), dst=np.arange(200), feat=np.eye(200))
    whole = (tmp_path / "graph.npz").read_bytes()
    refused = 0
    for place in range(0, len(whole), 5):
        (tmp_path / "graph.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            load_dataset(tmp_path / "graph.npz")
        except DatasetError:
            refused += 1
    assert refused > 50


def test_a_lone_array_under_the_wrong_suffix_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.arange(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    with pytest.raises(DatasetError, match=r"array\.npz: not a readable \.npz file"):
        load(tmp_path / "array.npz")


def real(name: str) -> RawGraph:
    path = REAL / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return load_dataset(path)


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes", "train", "val"),
    [
        ("cora", 2_708, 10_556, 1433, 7, 140, 500),
        ("dblp_full", 17_716, 105_734, 1639, 4, 80, 120),
        ("coauthor_physics", 34_493, 495_924, 8415, 5, 100, 150),
    ],
)
def test_real_node_graphs_have_their_published_sizes(
    name: str, nodes: int, edges: int, features: int, classes: int, train: int, val: int
) -> None:
    graph = real(name)
    columns = graph.node_data[NODE_TYPE]
    assert graph.is_homogeneous
    assert (graph.total_nodes, graph.total_edges) == (nodes, edges)
    assert isinstance(columns["feat"], SparseRows)
    assert columns["feat"].shape == (nodes, features)
    assert columns["feat"].dtype == np.float32
    assert graph.num_classes == {NODE_TYPE: classes}
    assert np.asarray(columns["train_mask"]).sum() == train
    assert np.asarray(columns["val_mask"]).sum() == val
    test = 1000 if name == "cora" else nodes - train - val
    assert np.asarray(columns["test_mask"]).sum() == test


@pytest.mark.real_data
def test_aifb_has_its_relations_and_official_split() -> None:
    graph = real("aifb")
    assert (graph.total_nodes, graph.total_edges, len(graph.edges)) == (8_285, 29_043, 45)
    columns = graph.node_data[NODE_TYPE]
    assert {name: int(np.asarray(columns[name]).sum()) for name in SPLITS if name in columns} == {
        "train_mask": 140,
        "test_mask": 36,
    }
    assert graph.num_classes == {NODE_TYPE: 4}


@pytest.mark.real_data
def test_wn18rr_has_its_triples_by_split() -> None:
    graph = real("wn18rr")
    assert (graph.total_nodes, graph.total_edges, len(graph.edges)) == (40_943, 93_003, 11)
    counts = dict.fromkeys(SPLITS, 0)
    for masks in graph.edge_data.values():
        for name, mask in masks.items():
            counts[name] += int(mask.sum())
    assert counts == {"train_mask": 86_835, "val_mask": 3_034, "test_mask": 3_134}
