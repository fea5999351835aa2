from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.graph.sampling import draw_parameters, draw_uniform, draw_weighted
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
