"""What DGL holds, as an object, as one of its datasets, as a file."""

from pathlib import Path

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.data.sources import DglBinarySource, DglDataSource, load_dataset, raw_graph_from_dgl
from dglx_dist.errors import ConfigError, DatasetError, UnknownNameError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE

BUYS, MADE_BY = ("user", "buys", "item"), ("item", "made_by", "user")


def triangle() -> dgl.DGLGraph:
    graph = dgl.graph(([2, 0, 1], [0, 1, 2]))
    graph.ndata["features"] = torch.arange(6, dtype=torch.int64).reshape(3, 2)
    graph.ndata["labels"] = torch.tensor([1, 0, -1], dtype=torch.int32)
    graph.ndata["train_mask"] = torch.tensor([1, 0, 0], dtype=torch.uint8)
    graph.edata["weight"] = torch.tensor([0.5, 1.5, 2.5])
    return graph


def shop() -> dgl.DGLGraph:
    graph = dgl.heterograph({BUYS: ([0, 1], [1, 2]), MADE_BY: ([0], [3])}, {"user": 4, "item": 3})
    graph.nodes["user"].data["label"] = torch.tensor([0, 2, -1, 1])
    graph.nodes["item"].data["feat"] = torch.ones(3, 2, dtype=torch.bfloat16)
    graph.edges[BUYS].data["train_mask"] = torch.tensor([True, False])
    return graph


def test_a_homogeneous_graph_keeps_edge_order_and_gets_standard_columns() -> None:
    graph = load_dataset(triangle())
    assert graph.num_nodes == {NODE_TYPE: 3}
    assert [ids.tolist() for ids in graph.edges[EDGE_TYPE]] == [[2, 0, 1], [0, 1, 2]]
    assert graph.edge_data[EDGE_TYPE]["weight"].tolist() == [0.5, 1.5, 2.5]
    columns = {name: np.asarray(column) for name, column in graph.node_data[NODE_TYPE].items()}
    assert columns["feat"].dtype == np.float32
    assert columns["feat"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert columns["label"].tolist() == [1, 0, -1]
    assert columns["train_mask"].tolist() == [True, False, False]
    assert graph.num_classes == {NODE_TYPE: 2}


def test_a_heterogeneous_graph_keeps_its_types() -> None:
    graph = load_dataset(shop())
    assert graph.num_nodes == {"user": 4, "item": 3}
    assert [ids.tolist() for ids in graph.edges[MADE_BY]] == [[0], [3]]
    assert graph.num_classes == {"user": 3}
    assert graph.node_data["item"]["feat"].dtype == np.float32
    assert graph.edge_data[BUYS]["train_mask"].tolist() == [True, False]


def test_columns_of_a_script_stay_what_they_are() -> None:
    graph = triangle()
    graph.ndata["feat"] = torch.arange(3, dtype=torch.int32)
    graph.ndata["label"] = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)
    kept = load_dataset(graph, rename=False)
    columns = {name: np.asarray(column) for name, column in kept.node_data[NODE_TYPE].items()}
    assert columns["features"].dtype == np.int64
    assert columns["labels"].dtype == columns["feat"].dtype == np.int32
    assert columns["label"].tolist() == [[0.5], [1.0], [2.0]]
    assert kept.num_classes == {NODE_TYPE: 1}  # its width, as of several answers a node
    # Gaps would be refused, so such labels number classes; and whole numbers do.
    for label in ([1.0, torch.nan, 0.0], [1, -1, 0]):
        graph.ndata["label"] = torch.tensor(label)
        kept = load_dataset(graph, rename=False)
        assert np.asarray(kept.node_data[NODE_TYPE]["label"]).tolist() == [1, -1, 0]
        assert kept.num_classes == {NODE_TYPE: 2}


@pytest.mark.parametrize("formats", ["csc", "csr"])
def test_a_graph_in_one_format_keeps_the_order_of_its_edges(formats: str) -> None:
    graph = load_dataset(triangle().formats(formats))
    assert [ids.tolist() for ids in graph.edges[EDGE_TYPE]] == [[2, 0, 1], [0, 1, 2]]


def test_a_block_is_no_graph() -> None:
    with pytest.raises(ConfigError, match="block of a mini-batch"):
        load_dataset(dgl.to_block(triangle()))


def test_ids_of_a_larger_graph_are_left_out() -> None:
    part = dgl.node_subgraph(triangle(), [1, 2])
    assert dgl.NID in part.ndata
    graph = raw_graph_from_dgl(part)
    assert dgl.NID not in graph.node_data[NODE_TYPE]
    assert dgl.EID not in graph.edge_data[EDGE_TYPE]


def test_masks_of_several_splits_need_a_choice() -> None:
    graph = triangle()
    graph.ndata["train_mask"] = torch.tensor([[1, 0], [0, 1], [0, 0]])
    with pytest.raises(
        DatasetError, match="column 'train_mask' holds 2 splits; choose one with split=0 to 1"
    ):
        load_dataset(graph)
    chosen = load_dataset(graph, split=1)
    assert np.asarray(chosen.node_data[NODE_TYPE]["train_mask"]).tolist() == [False, True, False]


def test_bad_columns_of_an_object_are_found() -> None:
    graph = triangle()
    graph.ndata["features"] = torch.tensor([0.0, 1.0, torch.nan])
    with pytest.raises(DatasetError, match="the DGLGraph 'graph': column 'feat', row 2"):
        load_dataset(graph)


def test_something_else_than_a_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a DGLGraph, not as builtins\.list"):
        load_dataset([0, 1])  # type: ignore[arg-type]


def test_a_saved_graph_comes_back(tmp_path: Path) -> None:
    dgl.save_graphs(str(tmp_path / "shop.bin"), [shop()])
    graph = load_dataset(tmp_path / "shop.bin")
    assert graph.name == "shop"
    assert [ids.tolist() for ids in graph.edges[BUYS]] == [[0, 1], [1, 2]]
    assert np.asarray(graph.node_data["user"]["label"]).tolist() == [0, 2, -1, 1]


def test_several_saved_graphs_need_an_index(tmp_path: Path) -> None:
    path = tmp_path / "two.bin"
    dgl.save_graphs(str(path), [triangle(), dgl.graph(([0], [1]))])
    with pytest.raises(
        ConfigError, match=r"two\.bin has 2 graphs and no index was given; choose index=0 to 1"
    ):
        load_dataset(path)
    assert load_dataset(path, index=1).total_edges == 1
    with pytest.raises(ConfigError, match="index=2 is not among them"):
        load_dataset(path, index=2)
    with pytest.raises(ConfigError, match="index='first' must be a whole number"):
        load_dataset(path, index="first")


def test_a_file_that_is_no_saved_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.bin").write_bytes(bytes(range(64)))
    with pytest.raises(DatasetError, match=r"noise\.bin: not a file of saved DGL graphs; write"):
        load_dataset(tmp_path / "noise.bin")
    with pytest.raises(DatasetError, match=r"there is no file .*absent\.bin"):
        DglBinarySource(str(tmp_path / "absent.bin"), {}).load()


def test_half_a_saved_graph_is_refused_without_dgls_stack(tmp_path: Path) -> None:
    path = tmp_path / "half.bin"
    dgl.save_graphs(str(path), [triangle()])
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DatasetError, match=r"half\.bin: .* damaged or cut off") as refused:
        load_dataset(path)
    assert "Check failed" not in str(refused.value)


def test_a_dataset_of_dgl_is_loaded_by_its_class_name(tmp_path: Path) -> None:
    # This one is computed, not downloaded.
    options = {"num_base_nodes": 30, "num_base_edges_per_node": 2, "num_motifs": 4, "raw_dir": str(tmp_path)}
    graph = load_dataset("dgl:BAShapeDataset", **options, seed=0)
    assert graph.name == "BAShapeDataset"
    assert graph.num_nodes == {NODE_TYPE: 50}  # 30, and four houses of five nodes
    assert graph.num_classes == {NODE_TYPE: 4}


def test_wrong_names_and_options_of_datasets_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="'CoraGraphDatase'; did you mean 'CoraGraphDataset'"):
        DglDataSource("CoraGraphDatase", {})
    with pytest.raises(ConfigError, match="'dgl:BAShapeDataset' has no option 'num_motif'; did you mean"):
        DglDataSource("BAShapeDataset", {"num_motif": 3})


def test_a_failed_download_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offline(dgl.data.DGLDataset):
        def __init__(self, raw_dir: str = "", verbose: bool = False) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setattr(dgl.data, "CoraGraphDataset", Offline)
    with pytest.raises(DatasetError, match=r"dgl:CoraGraphDataset could not be .*no route.*raw_dir="):
        load_dataset("dgl:CoraGraphDataset")
