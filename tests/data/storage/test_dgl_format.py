"""DGL's format, both ways: stock DGL loads what is written, and its folders are read, ids included."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.data import dgl_files
from dglx_dist.data.dgl_files import check_files
from dglx_dist.data.storage.dgl_format import import_dgl_format, write_dgl_format
from dglx_dist.data.storage.reader import StoredDataset, open_dataset
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, EdgeType, RawGraph
from tests.data.storage.graphs import (
    ODD_ONES_OUT,
    TWO_TRIANGLES,
    random_heterogeneous,
    random_homogeneous,
    random_owners,
    store,
)

BARE = RawGraph(
    name="no features", num_nodes={NODE_TYPE: 3}, edges={EDGE_TYPE: (np.array([0]), np.array([2]))}
)


def load(config: Path, part: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DGL_DIST_DEBUG", "1")
    return dgl.distributed.load_partition(str(config), part)


def in_edges(graph: dgl.DGLGraph, book, etype: EdgeType) -> list[tuple[int, int, int]]:
    inner = graph.edata["inner_edge"].bool()
    source, destination = graph.edges(order="eid")
    kinds, edges = book.map_to_per_etype(graph.edata[dgl.EID][inner])
    _, sources = book.map_to_per_ntype(graph.ndata[dgl.NID][source[inner]])
    _, destinations = book.map_to_per_ntype(graph.ndata[dgl.NID][destination[inner]])
    chosen = kinds == book.canonical_etypes.index(etype)
    columns = (array[chosen].tolist() for array in (edges, sources, destinations))
    return sorted(zip(*columns, strict=True))


def stored_in_edges(dataset: StoredDataset, part: int, etype: EdgeType) -> list[tuple[int, int, int]]:
    stored, manifest = dataset.part(part), dataset.manifest
    first_edge, first_node = manifest.edge_offsets[etype][part], manifest.node_offsets[etype[2]][part]
    indptr, indices = stored.indptr(etype), stored.indices(etype)
    destinations = first_node + np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    edges = first_edge + np.arange(len(indices))
    return list(zip(edges.tolist(), indices.tolist(), destinations.tolist(), strict=True))


def test_halo_nodes_follow_the_owned_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_dgl_format(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "dgl")
    graph, *_, name, ntypes, etypes = load(config, 1, monkeypatch)
    assert (name, ntypes, etypes) == ("two triangles", [NODE_TYPE], [EDGE_TYPE])
    # New ids 3, 4, 5 are old 1, 3, 5; their in-edges come from new 0, 1, 2 and 5.
    assert graph.ndata[dgl.NID].tolist() == [3, 4, 5, 0, 1, 2]
    assert graph.ndata["inner_node"].tolist() == graph.ndata["part_id"].tolist() == [1, 1, 1, 0, 0, 0]
    folder = config.parent / "part1"
    assert dgl.data.utils.load_tensors(str(folder / "orig_nids.dgl"))["_N"].tolist() == [1, 3, 5]
    assert dgl.data.utils.load_tensors(str(folder / "orig_eids.dgl"))["_N:_E:_N"].tolist() == [0, 6, 5, 4]


SHOP = random_heterogeneous(0)
# No node of a type in one part, no node at all in another.
GAPS = Assignment(
    num_parts=4,
    part_of={"user": np.repeat([0, 2], 10), "item": np.zeros(13, np.int64)},
    method="by hand",
    seed=0,
)


@pytest.mark.parametrize(
    ("graph", "assignment"),
    [
        *((graph, random_owners(graph, n, 5)) for graph in (random_homogeneous(1), SHOP) for n in (1, 3)),
        (BARE, random_owners(BARE, 2, 5)),
        (SHOP, GAPS),
    ],
)
def test_stock_dgl_reads_what_our_reader_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: RawGraph, assignment: Assignment
) -> None:
    dataset = store(graph, assignment, tmp_path / "ours")
    config = write_dgl_format(graph, assignment, tmp_path / "dgl")
    for part in range(assignment.num_parts):
        local, node_feats, edge_feats, book, *_ = load(config, part, monkeypatch)
        stored = dataset.part(part)
        for ntype, offsets in dataset.manifest.node_offsets.items():
            owned = range(int(offsets[part]), int(offsets[part + 1]))
            assert book.partid2nids(part, ntype).tolist() == list(owned)
            for name in dataset.manifest.node_columns[ntype]:
                np.testing.assert_array_equal(node_feats[f"{ntype}/{name}"], stored.node_data(ntype, name))
        for etype, columns in dataset.manifest.edge_columns.items():
            # In one part edges keep the ids of the source.
            is_kept, source = assignment.num_parts == 1, stored.original_edge_ids(etype)
            ours = stored_in_edges(dataset, part, etype)
            kept = sorted((int(source[edge]), *ends) for edge, *ends in ours) if is_kept else ours
            assert in_edges(local, book, etype) == kept
            for name in columns:
                column = edge_feats[f"{':'.join(etype)}/{name}"]
                expected = stored.edge_data(etype, name)
                np.testing.assert_array_equal(column.numpy()[source] if is_kept else column, expected)
    back = import_dgl_format(config, tmp_path / "back")
    offsets = {ntype: of_type.tolist() for ntype, of_type in dataset.manifest.node_offsets.items()}
    assert {ntype: of_type.tolist() for ntype, of_type in back.node_offsets.items()} == offsets


def test_names_that_dgl_would_divide_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["/a.b/c:d", "a b", "100%"]
    edges = {(NODE_TYPE, name, NODE_TYPE): (np.array([0]), np.array([1])) for name in names}
    weights = {etype: {"weight": np.array([float(number)])} for number, etype in enumerate(edges)}
    graph = RawGraph(name="kg", num_nodes={NODE_TYPE: 2}, edges=edges, edge_data=weights)
    config = write_dgl_format(graph, random_owners(graph, 1, 5), tmp_path / "dgl")
    assert "as '/' and ':' separate DGL's names: 2, such as /a.b/c:d, 100%" in caplog.text
    _, _, features, *_, etypes = load(config, 0, monkeypatch)
    assert [relation for _, relation, _ in etypes] == ["%2Fa.b%2Fc%3Ad", "a b", "100%25"]
    assert features["_N:%2Fa.b%2Fc%3Ad:_N/weight"].tolist() == [0.0]


def test_bfloat16_travels(tmp_path: Path) -> None:
    graph = random_homogeneous(0)
    graph.node_data[NODE_TYPE]["half"] = np.arange(40, dtype=np.uint16)
    owners = random_owners(graph, 2, 0)
    config = write_dgl_format(graph, owners, tmp_path / "dgl", bfloat16=[(NODE_TYPE, "half")])
    tensors = dgl.data.utils.load_tensors(str(tmp_path / "dgl/part0/node_feat.dgl"))
    assert tensors["_N/half"].dtype == torch.bfloat16
    manifest = import_dgl_format(config, tmp_path / "back")
    assert manifest.node_columns[NODE_TYPE]["half"].dtype == "bfloat16"
    part = open_dataset(tmp_path / "back").part(1)
    expected = part.user_ids(NODE_TYPE).tolist()
    assert part.node_data(NODE_TYPE, "half").tolist() == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_features_are_rounded_while_they_are_written(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dglx_dist.data.storage.dgl_format.CHUNK_BYTES", 100)
    graph = random_homogeneous(0)
    graph.node_data[NODE_TYPE]["x"] = np.arange(120, dtype=np.float64).reshape(40, 3) + 0.5
    config = write_dgl_format(graph, random_owners(graph, 2, 0), tmp_path / "dgl", feature_dtype={"x": dtype})
    manifest = import_dgl_format(config, tmp_path / "back")
    assert manifest.node_columns[NODE_TYPE]["x"].dtype == dtype
    for part in range(2):
        tensors = dgl.data.utils.load_tensors(str(tmp_path / f"dgl/part{part}/node_feat.dgl"))
        assert tensors["_N/x"].dtype == getattr(torch, dtype)
        # All of these are numbers of 8 bits.
        ids = open_dataset(tmp_path / "back").part(part).user_ids(NODE_TYPE)
        expected = torch.from_numpy(graph.node_data[NODE_TYPE]["x"][ids]).to(getattr(torch, dtype))
        assert torch.equal(tensors["_N/x"], expected)


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(StorageError, match="exists already"):
        write_dgl_format(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path)


def odd(name: str, dtype: str) -> RawGraph:
    edges = {(name, "e", name): (np.array([0]), np.array([0]))}
    data = {name: {"odd": np.ones(1).astype(dtype)}}
    return RawGraph(name="", num_nodes={name: 1}, edges=edges, node_data=data)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (odd("a:b", "f4"), "type name 'a:b'"),
        (odd("a/b", "f4"), "type name 'a/b'"),
        (odd("a", "U1"), "a/odd is <U1, which DGL's files cannot"),
        (odd("a", ">f4"), "a/odd is >f4, which DGL's files cannot"),
    ],
)
def test_what_dgl_cannot_hold_is_refused(tmp_path: Path, graph: RawGraph, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_dgl_format(graph, random_owners(graph, 1, 0), tmp_path / "dgl")


def as_dgl(graph: RawGraph) -> dgl.DGLGraph:
    ends = {etype: tuple(map(torch.from_numpy, pair)) for etype, pair in graph.edges.items()}
    made = dgl.heterograph(ends, dict(graph.num_nodes))
    for ntype, columns in graph.node_data.items():
        for name, column in columns.items():
            made.nodes[ntype].data[name] = torch.from_numpy(np.asarray(column))
    for etype, rows in graph.edge_data.items():
        for name, column in rows.items():
            made.edges[etype].data[name] = torch.from_numpy(column)
    return made


# An odd number of nodes: two parts of one size would fit each other's files.
ODD = random_homogeneous(1, num_nodes=29, num_edges=120)


@pytest.mark.parametrize("raw", [ODD, random_heterogeneous(1)])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_stock_partitions_open_here(tmp_path: Path, raw: RawGraph, num_parts: int) -> None:
    graph = as_dgl(raw)
    # DGL draws from the global stream; its own check needs a node of each type in each part.
    np.random.seed(1)
    original_nodes, original_edges = dgl.distributed.partition_graph(
        graph, "shop", num_parts, str(tmp_path / "dgl"), part_method="random", return_mapping=True
    )
    if graph.is_homogeneous:
        original_nodes, original_edges = {NODE_TYPE: original_nodes}, {EDGE_TYPE: original_edges}
    manifest = import_dgl_format(tmp_path / "dgl/shop.json", tmp_path / "ours")
    dataset = open_dataset(tmp_path / "ours")
    assert (manifest.name, manifest.method, manifest.num_parts) == ("shop", "random", num_parts)
    assert manifest.num_classes == ({NODE_TYPE: 4} if graph.is_homogeneous else {})
    for part in range(num_parts):
        local, node_feats, _, book, *_ = dgl.distributed.load_partition(str(tmp_path / "dgl/shop.json"), part)
        stored = dataset.part(part)
        for ntype in graph.ntypes:
            first, last = manifest.node_offsets[ntype][part : part + 2].tolist()
            assert book.partid2nids(part, ntype).tolist() == list(range(first, last))
            for name, column in graph.nodes[ntype].data.items():
                rows = stored.node_data(ntype, name)
                np.testing.assert_array_equal(rows, node_feats[f"{ntype}/{name}"])
                np.testing.assert_array_equal(rows, column[original_nodes[ntype][first:last]])
                assert rows.dtype == column.numpy().dtype
        for etype in graph.canonical_etypes:
            their_edges = {edge: ends for edge, *ends in in_edges(local, book, etype)}
            ours = stored_in_edges(dataset, part, etype)
            originals = stored.original_edge_ids(etype).tolist()
            assert sorted(originals) == sorted(their_edges)
            assert [their_edges[edge] for edge in originals] == [ends for _, *ends in ours]
            key = etype if etype in original_edges else etype[1]
            for name, column in graph.edges[etype].data.items():
                expected = column[original_edges[key][originals]]
                np.testing.assert_array_equal(stored.edge_data(etype, name), expected)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    dgl.distributed.partition_graph(as_dgl(ODD), "g", 2, str(tmp_path / "dgl"), part_method="random")
    return tmp_path / "dgl/g.json"


def edit_json(config: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(config.read_text())
    change(value)
    config.write_text(json.dumps(value))


def test_old_files_without_type_names_open_too(tmp_path: Path, config: Path) -> None:
    expected = import_dgl_format(config, tmp_path / "new")

    def as_it_was(value: dict[str, Any]) -> None:
        value["node_map"] = [end for _, end in value["node_map"]["_N"]]
        value["edge_map"] = [end for _, end in value["edge_map"]["_N:_E:_N"]]
        del value["ntypes"], value["etypes"]

    edit_json(config, as_it_was)
    assert import_dgl_format(config, tmp_path / "old").checksum == expected.checksum


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.pop("num_parts"), "'num_parts' is missing"),
        (lambda value: value.update(node_map="node_map.npy"), "'node_map' is 'node_map.npy'"),
        (lambda value: value["node_map"].update(_N=[[0, 9], [12, 30]]), "'node_map'"),
        (lambda value: value["node_map"].update(_N=[[0, 9], [9, 10**30]]), "'node_map'"),
        (lambda value: value.update(etypes={"_E": 0}, edge_map={"_E": [[0, 9], [9, 120]]}), "'_E' is not of"),
        (lambda value: value["part-1"].pop("part_graph"), r"'part-1\.part_graph' .*GraphBolt"),
        (lambda value: value.pop("part-1"), "'part-1' is missing"),
        (lambda value: value["part-0"].update(part_graph="part1/graph.dgl"), "graph.dgl owns .* nodes"),
        (lambda value: value["part-0"].update(node_feats="part1/node_feat.dgl"), "rows for"),
        (lambda value: value["part-0"].update(node_feats="none.dgl"), "none.dgl is missing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, config: Path, change, message: str) -> None:
    edit_json(config, change)
    with pytest.raises(StorageError, match=message):
        import_dgl_format(config, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_damaged_or_missing_file_is_named(tmp_path: Path, config: Path) -> None:
    (config.parent / "part1/graph.dgl").write_bytes(b"not a graph")
    with pytest.raises(StorageError, match=r"part1/graph\.dgl is damaged"):
        import_dgl_format(config, tmp_path / "d")
    config.unlink()
    with pytest.raises(StorageError, match=config.name):
        import_dgl_format(config, tmp_path / "d")


def test_a_node_that_the_graph_lacks_is_refused(tmp_path: Path, config: Path) -> None:
    path = config.parent / "part1/graph.dgl"
    (structure,), _ = dgl.load_graphs(str(path))
    structure.ndata[dgl.NID][structure.ndata["inner_node"] == 0] = 1 << 40
    dgl.save_graphs(str(path), [structure])
    with pytest.raises(StorageError, match=r"part1/graph\.dgl has ids of nodes that do not exist"):
        import_dgl_format(config, tmp_path / "d")


@pytest.mark.parametrize("name", [dgl.EID, "inner_edge"])
def test_a_graph_file_without_edge_ids_is_named(tmp_path: Path, config: Path, name: str) -> None:
    path = config.parent / "part1/graph.dgl"
    (structure,), _ = dgl.load_graphs(str(path))
    del structure.edata[name]
    dgl.save_graphs(str(path), [structure])
    with pytest.raises(StorageError, match=rf"part1/graph\.dgl lacks the node or edge data \['{name}'\]"):
        import_dgl_format(config, tmp_path / "d")


def test_damaged_files_are_refused_and_end_no_process(tmp_path: Path) -> None:
    config = write_dgl_format(
        random_heterogeneous(0), random_owners(random_heterogeneous(0), 2, 0), tmp_path / "d"
    )
    part, refused, messages = config.parent / "part1", list[str](), list[str]()
    for name in ("graph.dgl", "node_feat.dgl"):
        path = part / name
        content = path.read_bytes()
        cut, long = content[: len(content) // 2], content[:16] + b"\xff" * 8 + content[24:]
        for damaged in (cut, long):
            path.write_bytes(damaged)
            try:
                import_dgl_format(config, tmp_path / "ours", overwrite=True)
            except StorageError as problem:
                messages.append(str(problem))
                refused.append(str(path))
        path.write_bytes(content)
    assert len(messages) >= 3
    assert any("ended with status" in message for message in messages)
    assert all(path in message for path, message in zip(refused, messages, strict=True))
    import_dgl_format(config, tmp_path / "ours", overwrite=True)


def test_a_child_that_has_ended_is_started_again(tmp_path: Path) -> None:
    dgl.save_graphs(str(tmp_path / "g"), [dgl.rand_graph(3, 4)])
    for _ in range(2):
        (tmp_path / "g").touch()
        check_files([("graphs", tmp_path / "g")])
        # As after some idle seconds.
        child = dgl_files._Child.of(os.getpid())._process
        child.kill()
        child.wait()
