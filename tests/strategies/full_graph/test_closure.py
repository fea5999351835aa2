"""A closure grown on a graph that one can draw: 0 -> 1 -> 2 -> 3 -> 4, and 5 -> 3."""

from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.graph.structure import InEdges, ReplicatedStructure
from dglx_dist.records import EDGE_TYPE, Array
from dglx_dist.strategies.full_graph import expansion
from dglx_dist.strategies.full_graph.expansion import (
    KHopNeighborhood,
    NeighborhoodExpander,
    in_edges_of,
    only_from,
)

PATH = ReplicatedStructure(
    EDGE_TYPE, 6, np.array([0, 0, 1, 2, 4, 5, 5]), np.array([0, 1, 2, 5, 3], dtype=np.int32)
)


def grown(seeds: list[int], levels: int, allowed: Array | None = None) -> KHopNeighborhood:
    expander = NeighborhoodExpander(PATH, np.array(seeds), allowed)
    for _ in range(levels):
        expander.add(expander.sources())
    return expander.finish()


def test_two_hops_from_the_end() -> None:
    found = grown([4], 2)
    assert found.nodes.tolist() == [4, 3, 2, 5]
    assert found.counts.tolist() == [4, 2, 1]
    assert found.levels.tolist() == [2, 1, 0, 0]
    assert found.indptr.tolist() == [0, 1, 3]
    assert found.sources.tolist() == [3, 2, 5]
    assert found.edge_ids.tolist() == [4, 2, 3]
    assert found.in_degrees.tolist() == [1, 2, 0, 0]
    assert found.work.tolist() == [2 * 2, 1 * 3, 0, 0]


def test_edges_from_nodes_that_are_not_allowed_are_left_out() -> None:
    found = grown([4], 3, np.array([3, 4, 5]))
    assert found.nodes.tolist() == [4, 3, 5]
    assert found.counts.tolist() == [3, 3, 2, 1]
    assert found.sources.tolist() == [3, 5]
    assert found.edge_ids.tolist() == [4, 3]
    assert grown([4], 1, np.array([4])).sources.tolist() == []


def test_nothing_grows_from_nothing_and_nodes_without_in_edges_are_rows() -> None:
    assert grown([], 2).counts.tolist() == [0, 0, 0]
    assert grown([], 2).indptr.tolist() == [0]
    found = grown([0, 5], 2)
    assert found.counts.tolist() == [2, 2, 2]
    assert found.indptr.tolist() == [0, 0, 0]


def test_rows_that_are_known_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def noted(structure: ReplicatedStructure, nodes: Array) -> list[InEdges]:
        asked.append(nodes.tolist())
        return list(in_edges_of(structure, nodes))

    monkeypatch.setattr(expansion, "in_edges_of", noted)
    grown([3, 4], 3)
    assert asked == [[3, 4], [2, 5], [1]]


def test_many_nodes_are_asked_for_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "CHUNK", 1)
    pieces = list(in_edges_of(PATH, np.array([4, 0, 3, 1, 2])))
    assert [piece.sources.tolist() for piece in pieces] == [[3], [], [2, 5], [0], [1]]


def test_only_from_no_node_leaves_no_edge() -> None:
    edges = PATH.ask("in_edges", np.array([3, 4]))
    left = only_from(edges, np.empty(0, np.int64))
    assert (left.indptr.tolist(), left.sources.tolist(), left.edge_ids.tolist()) == ([0, 0, 0], [], [])
