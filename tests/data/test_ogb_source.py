"""What OGB yields, in hand-made dictionaries of its shape; the package itself need not be there."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.sources import cache_set_aside, load_dataset, raw_graph_from_ogb
from dglx_dist.data.validate import check_raw_graph
from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE

WRITES = ("author", "writes", "paper")


def test_one_node_type() -> None:
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
    columns = {name: np.asarray(column) for name, column in graph.node_data[NODE_TYPE].items()}
    assert set(columns) == {"feat", "year", "label", "train_mask", "val_mask", "test_mask"}
    assert [ids.tolist() for ids in graph.edges[EDGE_TYPE]] == [[0, 1, 2], [1, 2, 3]]
    assert columns["label"].tolist() == [0, 2, 1, 0]
    assert columns["year"].tolist() == [2010, 2011, 2012, 2013]
    assert columns["train_mask"].tolist() == [True, False, False, True]
    assert graph.num_classes == {NODE_TYPE: 3}


def test_several_node_types_and_gaps_in_the_labels() -> None:
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
        {
            "train": {"paper": np.array([0])},
            "valid": {"paper": np.array([2])},
            "test": {"paper": np.array([], dtype=np.int64)},
        },
    )
    assert graph.num_nodes == {"author": 2, "paper": 3}
    assert [ids.tolist() for ids in graph.edges[WRITES]] == [[0, 1], [2, 0]]
    assert graph.edge_data[WRITES]["reltype"].tolist() == [0, 0]
    assert np.asarray(graph.node_data["paper"]["label"]).tolist() == [1, -1, 0]
    assert set(graph.node_data["author"]) == set()
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


def test_other_tasks_of_ogb_are_refused() -> None:
    with pytest.raises(ConfigError, match="ogb:ogbl-collab is not a node dataset"):
        load_dataset("ogb:ogbl-collab")
