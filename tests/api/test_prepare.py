"""From a graph in memory to a partitioned dataset: one part a rank; an existing one is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.prepare import PartitionPlan, content_key, partition_to_disk
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, NodeColumn, RawGraph, SparseRows
from tests.api.graphs import two_triangles


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


def test_a_full_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    plan = PartitionPlan(num_parts=2, method="hash")
    with pytest.raises(StorageError, match="exists already"):
        partition_to_disk(two_triangles(), tmp_path, plan)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


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
    others = {"num_columns": 3}, {"indices": np.ones(6, np.int32)}, {"indptr": np.array([0, 0, *range(2, 7)])}
    keys = {
        *(content_key(with_feat(replace(rows, **other)), plan) for other in ({}, *others)),
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
