from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.partition import kaminpar
from dglx_dist.data.partition.balance import measure
from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.kaminpar import Kaminpar
from dglx_dist.errors import ConfigError
from tests.data.partition.graphs import communities, flat


def test_degree_is_balanced_within_its_tolerance() -> None:
    graph = communities()
    options = PartitionOptions(balance=("degree",), tolerance=0.02)
    quality = measure(graph, Kaminpar(options).assign(graph, 4, 0))
    assert quality.balance["degree"] <= 1.02
    assert quality.missed == {}


def test_unequal_machines_get_unequal_parts() -> None:
    graph = communities()
    options = PartitionOptions(target_weights=(5, 3, 2), tolerance=0.03)
    quality = measure(graph, Kaminpar(options).assign(graph, 3, 0))
    assert [n <= s * 1.03 for n, s in zip(quality.num_nodes, (1000, 600, 400), strict=True)] == [True] * 3
    assert quality.edge_cut < 0.3


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
    monkeypatch.setattr(kaminpar, "_SHARED_MEMORY", tmp_path / "absent")
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
