"""What every dataset source promises; a new one is tested by being registered and given an example."""

import importlib.util
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import dgl
import numpy as np
import pytest

from dglx_dist.data.sources import DATASETS, DatasetSource
from dglx_dist.data.validate import check_raw_graph
from dglx_dist.errors import ConfigError
from dglx_dist.records import SPLITS, RawGraph


def synthetic(folder: Path) -> str:
    return "nodes=300,degree=6,classes=3"


def npz(folder: Path) -> str:
    ends = {"src": np.array([0, 1, 2]), "dst": np.array([1, 2, 0])}
    np.savez(folder / "a.npz", **ends, train_mask=np.array([1, 0, 0]), test_mask=np.array([0, 1, 1]))
    return str(folder / "a.npz")


def dgl_data(folder: Path) -> str:
    return "BAShapeDataset"


def dgl_binary(folder: Path) -> str:
    graph = dgl.heterograph({("a", "to", "b"): ([0, 1], [2, 0]), ("b", "to", "a"): ([1], [1])})
    dgl.save_graphs(str(folder / "a.bin"), [graph])
    return str(folder / "a.bin")


def tables(folder: Path) -> str:
    (folder / "nodes.csv").write_text("id,split\nx,train\ny,test\nz,\n")
    (folder / "edges.csv").write_text("src,dst\nz,x\ny,z\n")
    return str(folder)


EXAMPLES: dict[str, Callable[[Path], str]] = {
    "synthetic": synthetic,
    "npz": npz,
    "dgl": dgl_data,
    "dgl_binary": dgl_binary,
    "tables": tables,
}
OPTIONS = {"dgl": {"num_base_nodes": 20, "num_motifs": 2, "seed": 0}}


def example(name: str, folder: Path) -> RawGraph:
    if name == "ogb":
        if importlib.util.find_spec("ogb") is None:
            pytest.skip("ogb is not installed")
        pytest.skip("every dataset of ogb must be downloaded; test_ogb_source.py has the conversion")
    options: dict[str, object] = dict(OPTIONS.get(name, {}))
    if name == "dgl":
        options["raw_dir"] = str(folder)
    return DATASETS.get(name)(EXAMPLES[name](folder), options).load()


every_source = pytest.mark.parametrize("name", DATASETS.names())


@every_source
def test_ids_are_those_of_the_nodes_and_columns_have_a_row_for_each(name: str, tmp_path: Path) -> None:
    graph = example(name, tmp_path)
    check_raw_graph(graph, name)
    for (source, _, destination), (source_ids, destination_ids) in graph.edges.items():
        assert source_ids.dtype in (np.int32, np.int64)
        assert len(source_ids) == len(destination_ids) > 0
        assert 0 <= source_ids.min() <= source_ids.max() < graph.num_nodes[source]
        assert 0 <= destination_ids.min() <= destination_ids.max() < graph.num_nodes[destination]
    for node_type, columns in graph.node_data.items():
        assert all(column.shape[0] == graph.num_nodes[node_type] for column in columns.values())


@every_source
def test_splits_do_not_overlap(name: str, tmp_path: Path) -> None:
    for columns in example(name, tmp_path).node_data.values():
        masks = [np.asarray(columns[split]) for split in SPLITS if split in columns]
        assert not any((one & other).any() for one, other in combinations(masks, 2))


@every_source
def test_loading_twice_gives_the_same_graph(name: str, tmp_path: Path) -> None:
    one, two = example(name, tmp_path), example(name, tmp_path)
    assert one.num_nodes == two.num_nodes
    for edge_type, ends in one.edges.items():
        assert all(np.array_equal(a, b) for a, b in zip(ends, two.edges[edge_type], strict=True))


@every_source
def test_an_unknown_option_is_refused_before_anything_is_read(name: str) -> None:
    location = {"synthetic": "", "dgl": "BAShapeDataset", "ogb": "ogbn-arxiv"}.get(name, "absent")
    with pytest.raises(ConfigError, match="has no option 'no_such_option'"):
        DATASETS.get(name)(location, {"no_such_option": 1})


def test_a_source_of_ones_own_is_registered_by_a_decorator() -> None:
    class Pair(DatasetSource):
        def __init__(self, location: str, options: object) -> None: ...

        def load(self) -> RawGraph:
            return RawGraph(name="pair", num_nodes={}, edges={})

    DATASETS.register("pair_of_this_test")(Pair)
    try:
        assert DATASETS.get("pair_of_this_test") is Pair
    finally:
        DATASETS._added.pop("pair_of_this_test")
