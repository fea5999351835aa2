"""New ids are contiguous per part and keep the order; edges follow (destination, source)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglx_dist.data.storage.writer import relabel_edges, relabel_nodes
from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, Assignment, RawGraph
from tests.data.storage.graphs import (
    FOLLOWS,
    ODD_ONES_OUT,
    RATES,
    TWO_TRIANGLES,
    random_heterogeneous,
    random_homogeneous,
    random_owners,
)


def test_nodes_of_a_part_keep_their_order() -> None:
    order = relabel_nodes(TWO_TRIANGLES, ODD_ONES_OUT)[NODE_TYPE]
    assert order.new_to_old.tolist() == [0, 2, 4, 1, 3, 5]
    assert order.old_to_new.tolist() == [0, 3, 1, 4, 2, 5]
    assert order.offsets.tolist() == [0, 3, 6]
    assert order.new_to_old.dtype == np.int32


def test_edges_lie_with_their_destination() -> None:
    order = relabel_nodes(TWO_TRIANGLES, ODD_ONES_OUT)[NODE_TYPE]
    edges = relabel_edges(TWO_TRIANGLES, EDGE_TYPE, order, order)
    # By new destination 0..5 = old 0, 2, 4 | 1, 3, 5: from old 2 | 1 | 3 | 0 | 2, 5 | 4.
    assert edges.indptr.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert edges.indices.tolist() == [1, 3, 4, 0, 1, 5, 2]
    assert edges.new_to_old.tolist() == [2, 1, 3, 0, 6, 5, 4]
    assert edges.offsets.tolist() == [0, 3, 7]


@given(st.integers(0, 10_000), st.integers(1, 7), st.integers(1, 30), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_it_is_the_plain_sort(seed: int, num_parts: int, num_nodes: int, num_edges: int) -> None:
    graph = random_homogeneous(seed, num_nodes, num_edges)
    assignment = random_owners(graph, num_parts, seed)
    part_of = assignment.part_of[NODE_TYPE]
    order = relabel_nodes(graph, assignment)[NODE_TYPE]
    assert order.new_to_old.tolist() == sorted(range(num_nodes), key=lambda node: (part_of[node], node))
    assert order.old_to_new[order.new_to_old].tolist() == list(range(num_nodes))
    assert np.diff(order.offsets).tolist() == np.bincount(part_of, minlength=num_parts).tolist()

    edges = relabel_edges(graph, EDGE_TYPE, order, order)
    src, dst = (order.old_to_new[end] for end in graph.edges[EDGE_TYPE])
    expected = sorted(range(num_edges), key=lambda edge: (dst[edge], src[edge], edge))
    assert edges.new_to_old.tolist() == expected
    assert edges.indices.tolist() == src[expected].tolist()
    assert np.diff(edges.indptr).tolist() == np.bincount(dst, minlength=num_nodes).tolist()
    owners = part_of[graph.edges[EDGE_TYPE][1]]
    assert np.diff(edges.offsets).tolist() == np.bincount(owners, minlength=num_parts).tolist()


def test_two_types_have_ids_of_their_own() -> None:
    graph = random_heterogeneous(0)
    assignment = random_owners(graph, 3, 1)
    orders = relabel_nodes(graph, assignment)
    for etype in (RATES, FOLLOWS):
        edges = relabel_edges(graph, etype, orders[etype[0]], orders[etype[2]])
        sources, destinations = graph.edges[etype]
        assert orders[etype[0]].new_to_old[edges.indices].tolist() == sources[edges.new_to_old].tolist()
        owners = assignment.part_of[etype[2]][destinations[edges.new_to_old]]
        assert owners.tolist() == sorted(owners.tolist())


def owned_by(part_of: object, num_parts: int = 2) -> Assignment:
    return Assignment(num_parts=num_parts, part_of={NODE_TYPE: np.array(part_of)}, method="", seed=0)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (owned_by([0, 1, 0, 1, 0, 2]), "node 5 .* part 2"),
        (owned_by([0, -1, 0, 1, 0, 1]), "node 1 .* part -1"),
        (owned_by([0, 1]), "6 nodes"),
        (owned_by([0.0] * 6), "whole number"),
        (owned_by([0] * 6, 0), "at least 1"),
        (Assignment(num_parts=1, part_of={}, method="", seed=0), "no owners .*'_N'"),
    ],
)
def test_wrong_owners_are_refused(assignment: Assignment, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        relabel_nodes(TWO_TRIANGLES, assignment)


def test_an_edge_to_nowhere_is_refused() -> None:
    graph = RawGraph(
        name="", num_nodes={NODE_TYPE: 2}, edges={EDGE_TYPE: (np.array([0, 1]), np.array([1, 2]))}
    )
    order = relabel_nodes(graph, owned_by([0, 1]))[NODE_TYPE]
    with pytest.raises(ConfigError, match=r"edge 1 .* destination 2"):
        relabel_edges(graph, EDGE_TYPE, order, order)


@pytest.mark.parametrize("ends", [np.array([0.0, 1.0]), np.array([[0, 1]])])
def test_ends_that_are_no_whole_numbers_are_refused(ends: Array) -> None:
    graph = RawGraph(name="", num_nodes={NODE_TYPE: 2}, edges={EDGE_TYPE: (ends, ends)})
    order = relabel_nodes(graph, owned_by([0, 1]))[NODE_TYPE]
    with pytest.raises(ConfigError, match=r"source ids of .*; give one whole number an edge"):
        relabel_edges(graph, EDGE_TYPE, order, order)
