"""Neighbours of given nodes: sampled and whole."""

from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.graph.sampling import by_type, draw_parameters, draw_uniform, draw_weighted, fanout_by_type
from dglx_dist.graph.structure import CSCShard, all_in_edges

# Nodes 0 to 3 with 6, 0, 1 and 20 in-edges.
WHOLE = CSCShard(
    indptr=np.array([0, 6, 6, 7, 27]), indices=np.arange(27, dtype=np.int32), first_node=0, first_edge=0
)
LAST = CSCShard(
    indptr=np.array([0, 1, 21]), indices=np.arange(6, 27, dtype=np.int32), first_node=2, first_edge=6
)


def test_without_replacement_edges_are_distinct_and_of_the_node() -> None:
    for seed in range(200):
        edges = draw_uniform(WHOLE, np.arange(4), draw_parameters(5, False, seed))
        assert np.diff(edges.indptr).tolist() == [5, 0, 1, 5]
        assert len(set(edges.edge_ids.tolist())) == 11
        assert set(edges.edge_ids[6:].tolist()) <= set(range(7, 27))
        assert edges.sources.tolist() == edges.edge_ids.tolist()


def test_a_node_draws_the_same_wherever_it_lies() -> None:
    parameters = draw_parameters(5, False, 7)
    whole = draw_uniform(WHOLE, np.array([3]), parameters)
    part = draw_uniform(LAST, np.array([2, 3]), parameters)
    assert part.edge_ids[1:].tolist() == whole.edge_ids.tolist()


def test_other_seeds_draw_otherwise() -> None:
    drawn = {
        tuple(draw_uniform(WHOLE, np.array([3]), draw_parameters(5, False, s)).edge_ids) for s in range(9)
    }
    assert len(drawn) == 9


@pytest.mark.parametrize("replace", [False, True])
def test_draws_follow_the_weights(replace: bool) -> None:
    nodes = np.array([0])
    edges = all_in_edges(WHOLE, nodes)
    weights = np.array([0.0, 1.0, 1.0, 2.0, 0.0, 4.0])
    counts = np.zeros(6)
    for seed in range(4000):
        counts[draw_weighted(nodes, edges, weights, 1, replace, seed).edge_ids] += 1
    assert counts[[0, 4]].tolist() == [0, 0]
    # Four standard deviations of a share over 4000 draws.
    assert np.abs(counts / 4000 - weights / 8).max() < 4 * np.sqrt(0.25 / 4000)


def test_fewer_edges_of_some_weight_than_asked_for_gives_those() -> None:
    nodes = np.array([0, 1])
    drawn = draw_weighted(nodes, all_in_edges(WHOLE, nodes), np.array([0, 1, 0, 0, 3, 0.0]), 5, False, 0)
    assert (drawn.indptr.tolist(), drawn.edge_ids.tolist()) == ([0, 2, 2], [1, 4])


RATES, SEES, HATES = ("user", "rates", "item"), ("user", "sees", "item"), ("item", "sees", "user")


def test_ids_by_type_and_by_relation() -> None:
    assert by_type([2, 1], {"user": 3}, "node")["user"].tolist() == [2, 1]
    found = by_type({"rates": [0]}, {RATES: 2, SEES: 1}, "edge")
    assert {key: ids.tolist() for key, ids in found.items()} == {RATES: [0]}


def test_one_fanout_stands_for_all() -> None:
    assert fanout_by_type(3, [RATES, SEES]) == {RATES: 3, SEES: 3}
    assert fanout_by_type({"rates": 1, SEES: -1}, [RATES, SEES]) == {RATES: 1, SEES: -1}


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="several node types; give a dict of ids by type: user, item"):
        by_type([0], {"user": 3, "item": 2}, "node")
    with pytest.raises(ConfigError, match="no type 'book' among the node types user"):
        by_type({"book": [0]}, {"user": 3}, "node")
    with pytest.raises(ConfigError, match="several types are 'sees'"):
        fanout_by_type({"sees": 1}, [SEES, HATES])
    with pytest.raises(ConfigError, match="no entry for the edge type"):
        fanout_by_type({"rates": 1}, [RATES, SEES])
    with pytest.raises(IndexError, match="id 3 at position 0"):
        by_type([3], {"user": 3}, "node")
