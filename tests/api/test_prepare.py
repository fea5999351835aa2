"""From a graph in memory to a partitioned dataset: one part a rank; an existing one is kept."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from dglx_dist.data.partition.balance import PartitionQuality
from dglx_dist.data.partition.base import PartitionOptions, PartitionPlan
from dglx_dist.data.partition.prepare import content_key, partition_to_disk
from dglx_dist.data.storage.reader import load_raw_graph, open_dataset
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, NodeColumn, RawGraph, SparseRows
from tests.api.graphs import DESTINATION, PAIRS, SOURCE, two_triangles


def test_weights_balance_but_are_not_written(tmp_path: Path) -> None:
    heavy = np.array([1, 1, 0, 0, 0, 0])
    plan = PartitionPlan(num_parts=2, method="metis", options=PartitionOptions(balance=("nodes", "heavy")))
    quality = partition_to_disk(two_triangles(), tmp_path / "x", plan, weights={"heavy": heavy})
    assert quality.balance["heavy"] == 1.0
    manifest = open_dataset(tmp_path / "x").manifest
    assert "heavy" not in manifest.node_columns[NODE_TYPE]
    assert manifest.quality["cut_edges"] == quality.cut_edges


@pytest.mark.parametrize(("balance", "warned"), [("etype", True), ("degree", False)])
def test_who_balances_too_much_at_once_is_told_what_it_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, balance: str, warned: bool
) -> None:
    graph = two_triangles()
    (ends,) = graph.edges.values()
    graph = replace(graph, edges={(NODE_TYPE, f"r{number}", NODE_TYPE): ends for number in range(11)})
    plan = PartitionPlan(num_parts=2, method="metis", options=PartitionOptions(balance=(balance,)))
    partition_to_disk(graph, tmp_path / "x", plan)
    assert ("11 weights are balanced at once" in caplog.text) is warned


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_parts": 0}, "number of parts is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"format": "x"}, "format"),
        ({"method": "metos"}, "'metis'"),
    ],
)
def test_a_wrong_plan_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _ = PartitionPlan(**{"num_parts": 2, **wrong}).partitioner


def test_the_key_changes_with_every_thing_that_matters() -> None:
    graph, plan = two_triangles(), PartitionPlan(num_parts=2, method="hash")
    feat = np.asarray(graph.node_data[NODE_TYPE]["feat"]).copy()
    feat[5, 1] += 1

    def with_feat(column: NodeColumn) -> RawGraph:
        return replace(graph, node_data={NODE_TYPE: {**graph.node_data[NODE_TYPE], "feat": column}})

    (source, destination) = graph.edges[EDGE_TYPE]
    rows = SparseRows(indptr=np.arange(7), indices=np.zeros(6, np.int32), values=np.ones(6), num_columns=2)
    remaining = (
        {"num_columns": 3},
        {"indices": np.ones(6, np.int32)},
        {"indptr": np.array([0, 0, *range(2, 7)])},
    )
    keys = {
        *(content_key(with_feat(replace(rows, **second)), plan) for second in ({}, *remaining)),
        content_key(graph, plan),
        content_key(with_feat(np.zeros((6, 2), np.float32)), plan),
        content_key(with_feat(feat), plan),
        content_key(with_feat(feat.view(np.int32)), plan),
        content_key(with_feat(feat.reshape(6, 1, 2)), plan),
        content_key(replace(graph, edges={EDGE_TYPE: (destination, source)}), plan),
        content_key(replace(graph, edges={EDGE_TYPE: (source[::-1], destination[::-1])}), plan),
        content_key(replace(graph, edge_data={EDGE_TYPE: {"w": source}}), plan),
        content_key(replace(graph, user_ids={NODE_TYPE: np.arange(6)}), plan),
        content_key(replace(graph, node_data={}), plan),
        content_key(graph, replace(plan, seed=1)),
        content_key(graph, replace(plan, num_parts=3)),
        content_key(graph, replace(plan, method="random")),
    }
    assert len(keys) == 17
    assert content_key(two_triangles(), plan) in keys


ONE_WAY = {EDGE_TYPE: (SOURCE[:7], DESTINATION[:7])}
"""Each edge of the two triangles once."""


def partition_and_read(
    graph: RawGraph, folder: Path, *, memory: str | None = None, **options: Any
) -> RawGraph:
    plan = PartitionPlan(num_parts=1, method="contiguous", memory=memory, **options)
    partition_to_disk(graph, folder, plan)
    return load_raw_graph(open_dataset(folder))


def weighted(graph: RawGraph, **columns: Array) -> RawGraph:
    ((etype, (src, _)),) = graph.edges.items()
    return replace(graph, edge_data={etype: {"weight": np.arange(len(src)) + 0.5, **columns}})


LIMITED = pytest.mark.parametrize("memory", [None, "2GB"])


@LIMITED
def test_each_edge_without_an_opposite_one_gets_it_as_in_dgl(tmp_path: Path, memory: str | None) -> None:
    mask = np.array([True, False, True, False, True, False, True, False])
    twice = np.append(SOURCE[:7], 1), np.append(DESTINATION[:7], 0)  # 0 -> 1 has its opposite edge
    graph = weighted(replace(two_triangles(), edges={EDGE_TYPE: twice}), train_mask=mask)
    result = partition_and_read(graph, tmp_path / "x", memory=memory, add_reverse_edges=True)
    ends = [ids.tolist() for ids in result.edges[EDGE_TYPE]]
    expected = dgl.to_bidirected(dgl.graph((torch.from_numpy(twice[0]), torch.from_numpy(twice[1]))))
    assert sorted(zip(*ends, strict=True)) == sorted(
        zip(*(e.tolist() for e in expected.edges()), strict=True)
    )
    columns = {name: np.asarray(column) for name, column in result.edge_data[EDGE_TYPE].items()}
    weight = dict(zip(zip(*ends, strict=True), columns["weight"].tolist(), strict=True))
    assert weight[1, 0] == 7.5
    assert all(weight[v, u] == weight[u, v] for u, v in PAIRS[1:])
    # An edge is a target once.
    assert columns["train_mask"].sum() == mask.sum()
    assert sorted(result.edge_ids[EDGE_TYPE].tolist()) == list(range(14))


@LIMITED
def test_each_node_without_a_loop_gets_one(tmp_path: Path, memory: str | None) -> None:
    graph = weighted(replace(two_triangles(), edges={EDGE_TYPE: (np.array([0, 2]), np.array([0, 3]))}))
    result = partition_and_read(graph, tmp_path / "x", memory=memory, add_self_loops=True)
    ends = zip(*(ids.tolist() for ids in result.edges[EDGE_TYPE]), strict=True)
    weight = dict(zip(ends, result.edge_data[EDGE_TYPE]["weight"].tolist(), strict=True))
    assert weight == {(0, 0): 0.5, (2, 3): 1.5, **{(node, node): 1.0 for node in range(1, 6)}}


@LIMITED
def test_rows_of_features_sum_to_one(tmp_path: Path, memory: str | None) -> None:
    dense = np.array([[1, 3], [0, 0], [-1, 1], [2, 0], [5, 5], [3, 0]], np.float32)
    sparse = sp.csr_array(dense)
    rows = SparseRows(
        indptr=sparse.indptr.astype(np.int64), indices=sparse.indices, values=sparse.data, num_columns=2
    )
    expected = [[0.25, 0.75], [0, 0], [-0.5, 0.5], [1, 0], [0.5, 0.5], [1, 0]]
    for number, column in enumerate((dense, rows, dense.astype(np.float16), dense.astype(np.int8))):
        graph = replace(two_triangles(), node_data={NODE_TYPE: {"feat": column, "age": np.arange(6)}})
        folder = tmp_path / str(number)
        record = partition_and_read(graph, folder, memory=memory, normalize_features="row").node_data[
            NODE_TYPE
        ]
        assert np.asarray(record["feat"]).tolist() == expected
        assert record["feat"].dtype == (column.dtype if column.dtype.kind == "f" else np.float32)
        assert np.asarray(record["age"]).tolist() == list(range(6))
        assert open_dataset(folder).manifest.parameters["normalize_features"] == "row"


def shop() -> RawGraph:
    buys, likes = ("user", "buys", "item"), ("user", "likes", "item")
    return RawGraph(
        name="shop",
        num_nodes={"user": 3, "item": 2},
        edges={buys: (np.array([0, 1, 2]), np.array([1, 0, 1])), likes: (np.array([2]), np.array([0]))},
        edge_data={buys: {"price": np.arange(3.0)}},
    )


@LIMITED
def test_edge_types_get_reverse_types_as_ingest_makes_them(tmp_path: Path, memory: str | None) -> None:
    result = partition_and_read(shop(), tmp_path / "x", memory=memory, add_reverse_edges=True)
    back = ("item", "buys-rev", "user")
    assert list(result.edges)[2:] == [back, ("item", "likes-rev", "user")]
    assert sorted(zip(*(ids.tolist() for ids in result.edges[back]), strict=True)) == [(0, 1), (1, 0), (1, 2)]
    assert result.edge_data[back] == {}
    # The dataset of one part, again: its reverse edges are there.
    with pytest.raises(ConfigError, match=r"reverse edges of .*buys.* already exist as .*buys-rev"):
        partition_and_read(result, tmp_path / "y", memory=memory, add_reverse_edges=True)
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"add_self_loops": True},
            "one node type and one edge type, but shop has 2 and 2; leave out --add-self-loops",
        ),
        ({"normalize_features": "row"}, "shop has no features 'feat'"),
        ({"normalize_features": "column"}, "normalize_features is 'column'; it is 'row'"),
    ],
)
@LIMITED
def test_what_a_graph_cannot_get_is_refused(
    tmp_path: Path, asked: dict[str, Any], said: str, memory: str | None
) -> None:
    with pytest.raises(ConfigError, match=said):
        partition_and_read(shop(), tmp_path / "x", memory=memory, **asked)
    assert list(tmp_path.iterdir()) == []


def test_edges_in_one_direction_only_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = "most edges of"
    partition_and_read(two_triangles(), tmp_path / "both")
    partition_and_read(shop(), tmp_path / "types")
    partition_and_read(replace(two_triangles(), edges=ONE_WAY), tmp_path / "added", add_reverse_edges=True)
    none = np.empty(0, np.int64)
    partition_and_read(replace(two_triangles(), edges={EDGE_TYPE: (none, none)}), tmp_path / "none")
    assert message not in caplog.text
    partition_and_read(replace(two_triangles(), edges=ONE_WAY), tmp_path / "once")
    assert message in caplog.text
    assert "add --add-reverse-edges" in caplog.text


def labelled_at_one_end() -> RawGraph:
    """A path of 40 nodes; those of the first half have labels."""
    nodes, first = np.arange(40), np.arange(40) < 16
    ends = np.append(nodes[:-1], nodes[1:]), np.append(nodes[1:], nodes[:-1])
    masks = {"train_mask": first & (nodes % 2 == 0), "val_mask": first & (nodes % 2 == 1)}
    return replace(
        two_triangles(), num_nodes={NODE_TYPE: 40}, edges={EDGE_TYPE: ends}, node_data={NODE_TYPE: masks}
    )


@pytest.mark.parametrize("memory", [None, "2GB"])
def test_training_nodes_are_balanced_where_nothing_else_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, memory: str | None
) -> None:
    def partition_quality(name: str, **options: Any) -> PartitionQuality:
        caplog.clear()
        plan = PartitionPlan(num_parts=2, memory=memory, **options)
        return partition_to_disk(labelled_at_one_end(), tmp_path / name, plan)

    assert partition_quality("default").balance["train"] <= 1.25
    assert (
        "with kaminpar the fullest part has 2.00 times its share of the training nodes; partitioning again "
        "with metis" in caplog.text
    )
    assert open_dataset(tmp_path / "default").manifest.method == "metis"
    assert partition_quality("metis", method="metis").balance["train"] <= 1.25
    # Asked for, or by a method without weights: only told.
    for options in ({"options": PartitionOptions(balance=("nodes",))}, {"method": "contiguous"}):
        quality = partition_quality(f"only {len(options)} {next(iter(options))}", **options)
        assert quality.balance["train"] == quality.balance["val"] == 2.0
        assert "partitioning again" not in caplog.text
        assert "the fullest part has 2.00 times its share of the train nodes and 2.00 times" in caplog.text
        assert "add --balance train,val, with metis" in caplog.text


def test_says_nothing_of_nodes_too_few_to_spread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    graph = two_triangles()  # with two training nodes
    partition_to_disk(graph, tmp_path / "x", PartitionPlan(num_parts=4, method="contiguous"))
    assert "share" not in caplog.text


@pytest.mark.parametrize("num_types", [2, 50])
def test_each_file_of_a_dataset_is_synchronised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_types: int
) -> None:
    synchronised: list[str] = []
    fsync = os.fsync

    def note_sync(descriptor: int) -> None:
        synchronised.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_sync)
    ends = (np.array([0, 1]), np.array([1, 2]))
    types = {(NODE_TYPE, f"r{number}", NODE_TYPE): ends for number in range(num_types)}
    partition_and_read(replace(two_triangles(), edges=types), tmp_path / "x")
    result = Counter(Path(*Path(name).parts[-4:]) for name in synchronised if name.endswith(".arrow"))
    expected = Counter(Path(*path.parts[-4:]) for path in (tmp_path / "x").rglob("*.arrow"))
    assert result == expected
    assert len(expected) > 3 * num_types


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_end_that_is_no_node_is_named_before_edges_are_added(tmp_path: Path, wrong: int) -> None:
    edges = {EDGE_TYPE: (np.array([0, wrong]), np.array([1, wrong]))}
    for name in ("add_reverse_edges", "add_self_loops"):
        with pytest.raises(DatasetError, match=rf"column 'src', row 1: node id {wrong} is outside 0\.\.5"):
            partition_and_read(replace(two_triangles(), edges=edges), tmp_path / "x", **{name: True})


def test_a_graph_without_edges_has_none_to_reverse(tmp_path: Path) -> None:
    none = np.empty(0, np.int64)
    graph = replace(two_triangles(), edges={EDGE_TYPE: (none, none)})
    assert partition_and_read(graph, tmp_path / "x", add_reverse_edges=True).total_edges == 0


@pytest.mark.parametrize(("num_both", "is_told"), [(60, False), (40, True)])
def test_a_few_edges_in_both_directions_do_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_both: int, is_told: bool
) -> None:
    """Make a ring of 1,000 edges in which ``num_both`` % of them have their opposite edge."""
    once, both = np.arange(10 * (100 - num_both)), np.arange(1000, 1000 + 5 * num_both)
    ends = np.concatenate([once, both, both + 1]), np.concatenate([once + 1, both + 1, both])
    graph = RawGraph(name="some", num_nodes={NODE_TYPE: 1500}, edges={EDGE_TYPE: ends})
    partition_and_read(graph, tmp_path / "x")
    assert ("most edges of some have no opposite edge" in caplog.text) is is_told
