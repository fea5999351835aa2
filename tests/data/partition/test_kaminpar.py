"""KaMinPar and ParHIP files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.partition import multilevel
from dglx_dist.data.partition.balance import measure
from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.graph_views import symmetrise
from dglx_dist.data.partition.multilevel import Kaminpar, write_parhip
from dglx_dist.errors import ConfigError
from tests.data.partition.graphs import communities, flat, homogeneous


def test_two_weights_are_too_many() -> None:
    graph = communities(num_nodes=400)
    with pytest.raises(ConfigError, match=r"balances 1 weight at a time.*nodes, train.*metis"):
        Kaminpar(PartitionOptions(balance=("train",))).assign(graph, 2, 0)


def test_fast_is_another_answer() -> None:
    graph = communities(num_blocks=40, degree=4, inside=0.5)
    full, fast = (Kaminpar(PartitionOptions(fast=f)).assign(graph, 8, 0) for f in (False, True))
    assert flat(full.part_of) != flat(fast.part_of)


def test_the_answer_does_not_depend_on_what_ran_before() -> None:
    graph = communities()
    first = flat(Kaminpar(PartitionOptions()).assign(graph, 4, 5).part_of)
    Kaminpar(PartitionOptions(threads=2)).assign(graph, 3, 9)
    assert flat(Kaminpar(PartitionOptions()).assign(graph, 4, 5).part_of) == first


def test_without_shared_memory_the_temporary_folder_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = communities(num_nodes=400)
    first = flat(Kaminpar(PartitionOptions()).assign(graph, 2, 0).part_of)
    monkeypatch.setattr(multilevel, "_SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert flat(Kaminpar(PartitionOptions()).assign(graph, 2, 0).part_of) == first
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kaminpar", None)
    with pytest.raises(ConfigError, match="pip install kaminpar"):
        Kaminpar(PartitionOptions()).assign(communities(num_nodes=400), 2, 0)


def test_a_graph_with_weighted_pairs() -> None:
    graph = communities()
    ((edge_type, (src, dst)),) = graph.edges.items()
    doubled = (np.concatenate([src, src[:5000]]), np.concatenate([dst, dst[:5000]]))
    heavy = type(graph)(name="heavy", num_nodes=graph.num_nodes, edges={edge_type: doubled})
    quality = measure(heavy, Kaminpar(PartitionOptions()).assign(heavy, 4, 0))
    assert quality.edge_cut < 0.3
    assert quality.balance["nodes"] <= 1.05


kaminpar = pytest.importorskip("kaminpar")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("node_weights", [None, np.array([5, 0, 7, 1])])
def test_the_reader_sees_what_was_written(
    tmp_path: Path, dtype: type, weighted: bool, node_weights: np.ndarray | None
) -> None:
    graph = homogeneous(4, [(0, 1), (1, 0), (1, 0), (1, 2)])
    path = tmp_path / "graph.parhip"
    write_parhip(path, symmetrise(graph, dtype=dtype, weighted=weighted), node_weights)
    read = kaminpar.load_graph(str(path), kaminpar.GraphFileFormat.PARHIP)
    heavy = 3 if weighted else 1
    rows = [sorted(read.neighbors(u)) for u in range(read.n())]
    assert rows == [[(1, heavy)], [(0, heavy), (2, 1)], [(1, 1)], []]
    assert read.is_node_weighted() == (node_weights is not None)
    if node_weights is not None:
        assert [read.node_weight(u) for u in range(4)] == node_weights.tolist()
