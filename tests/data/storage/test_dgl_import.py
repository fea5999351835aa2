"""What stock DGL partitioned opens here: the same owners, in-edges and rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.data.storage.dgl_format import import_dgl_format
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import StorageError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from tests.data.storage.graphs import FOLLOWS, RATES
from tests.data.storage.test_dgl_format import in_edges, stored_in_edges


def homogeneous() -> dgl.DGLGraph:
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, 30, (2, 120), generator=generator)
    graph = dgl.graph((ends[0], ends[1]), num_nodes=30)
    graph.ndata["feat"] = torch.rand(30, 3, generator=generator)
    graph.ndata["label"] = torch.arange(30) % 4
    graph.ndata["train_mask"] = torch.arange(30) % 2 == 0
    graph.edata["w"] = torch.rand(120, generator=generator)
    return graph


def heterogeneous() -> dgl.DGLGraph:
    generator = torch.Generator().manual_seed(1)

    def ends(num_sources: int, num_destinations: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randint(0, num_sources, (60,), generator=generator),
            torch.randint(0, num_destinations, (60,), generator=generator),
        )

    graph = dgl.heterograph(
        {RATES: ends(20, 15), FOLLOWS: ends(20, 20)}, num_nodes_dict={"user": 20, "item": 15}
    )
    graph.nodes["user"].data["feat"] = torch.rand(20, 3, generator=generator)
    graph.edges[RATES].data["stars"] = torch.arange(60)
    return graph


@pytest.mark.parametrize("make", [homogeneous, heterogeneous])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_stock_partitions_open_here(tmp_path: Path, make: Callable[[], dgl.DGLGraph], num_parts: int) -> None:
    graph = make()
    np.random.seed(0)  # DGL's random partitioning draws from the global stream.
    original_nodes, original_edges = dgl.distributed.partition_graph(
        graph, "shop", num_parts, str(tmp_path / "dgl"), part_method="random", return_mapping=True
    )
    if graph.is_homogeneous:
        original_nodes, original_edges = {NODE_TYPE: original_nodes}, {EDGE_TYPE: original_edges}
    manifest = import_dgl_format(tmp_path / "dgl/shop.json", tmp_path / "ours")
    dataset = open_dataset(tmp_path / "ours")
    assert (manifest.name, manifest.method, manifest.num_parts) == ("shop", "random", num_parts)
    for part in range(num_parts):
        local, node_feats, _, book, *_ = dgl.distributed.load_partition(str(tmp_path / "dgl/shop.json"), part)
        stored = dataset.part(part)
        for ntype in graph.ntypes:
            first, last = manifest.node_offsets[ntype][part : part + 2].tolist()
            assert book.partid2nids(part, ntype).tolist() == list(range(first, last))
            for name, column in graph.nodes[ntype].data.items():
                found = stored.node_data(ntype, name)
                np.testing.assert_array_equal(found, node_feats[f"{ntype}/{name}"])
                np.testing.assert_array_equal(found, column[original_nodes[ntype][first:last]])
                assert found.dtype == column.numpy().dtype
        for etype in graph.canonical_etypes:
            theirs = {edge: ends for edge, *ends in in_edges(local, book, etype)}
            ours = stored_in_edges(dataset, part, etype)
            originals = stored.original_edge_ids(etype).tolist()
            assert sorted(originals) == sorted(theirs)
            assert [theirs[edge] for edge in originals] == [ends for _, *ends in ours]
            key = etype if etype in original_edges else etype[1]
            for name, column in graph.edges[etype].data.items():
                expected = column[original_edges[key][originals]]
                np.testing.assert_array_equal(stored.edge_data(etype, name), expected)


def test_labels_give_the_number_of_classes(tmp_path: Path) -> None:
    dgl.distributed.partition_graph(homogeneous(), "g", 2, str(tmp_path / "dgl"), part_method="random")
    assert import_dgl_format(tmp_path / "dgl/g.json", tmp_path / "d").num_classes == {NODE_TYPE: 4}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    # An odd number of nodes: two parts of one size would fit each other's files.
    graph = dgl.remove_nodes(homogeneous(), 29)
    dgl.distributed.partition_graph(graph, "g", 2, str(tmp_path / "dgl"), part_method="random")
    return tmp_path / "dgl/g.json"


def edited(config: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(config.read_text())
    change(value)
    config.write_text(json.dumps(value))


def test_old_files_without_type_names_open_too(tmp_path: Path, config: Path) -> None:
    expected = import_dgl_format(config, tmp_path / "new")

    def as_it_was(value: dict[str, Any]) -> None:
        value["node_map"] = [end for _, end in value["node_map"]["_N"]]
        value["edge_map"] = [end for _, end in value["edge_map"]["_N:_E:_N"]]
        del value["ntypes"], value["etypes"]

    edited(config, as_it_was)
    assert import_dgl_format(config, tmp_path / "old").checksum == expected.checksum


def test_a_missing_json_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no\.json"):
        import_dgl_format(tmp_path / "no.json", tmp_path / "d")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.pop("num_parts"), "'num_parts' is missing"),
        (lambda value: value.update(node_map="node_map.npy"), "'node_map' is 'node_map.npy'"),
        (lambda value: value["node_map"].update(_N=[[0, 9], [12, 30]]), "'node_map'"),
        (lambda value: value.update(etypes={"_E": 0}, edge_map={"_E": [[0, 9], [9, 120]]}), "'_E' is not of"),
        (lambda value: value["part-1"].pop("part_graph"), r"'part-1\.part_graph' .*GraphBolt"),
        (lambda value: value.pop("part-1"), "'part-1' is missing"),
        (lambda value: value["part-0"].update(part_graph="part1/graph.dgl"), "graph.dgl owns .* nodes"),
        (lambda value: value["part-0"].update(node_feats="part1/node_feat.dgl"), "rows for"),
        (lambda value: value["part-0"].update(node_feats="none.dgl"), "none.dgl is missing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, config: Path, change, message: str) -> None:
    edited(config, change)
    with pytest.raises(StorageError, match=message):
        import_dgl_format(config, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_damaged_graph_file_is_named(tmp_path: Path, config: Path) -> None:
    path = config.parent / "part1/graph.dgl"
    path.write_bytes(b"not a graph")
    with pytest.raises(StorageError, match=r"part1/graph\.dgl cannot be read"):
        import_dgl_format(config, tmp_path / "d")


@pytest.mark.parametrize("name", [dgl.EID, "inner_edge"])
def test_a_graph_file_without_edge_ids_is_named(tmp_path: Path, config: Path, name: str) -> None:
    path = config.parent / "part1/graph.dgl"
    (structure,), _ = dgl.load_graphs(str(path))
    del structure.edata[name]
    dgl.save_graphs(str(path), [structure])
    with pytest.raises(StorageError, match=rf"part1/graph\.dgl has no '{name}'"):
        import_dgl_format(config, tmp_path / "d")
