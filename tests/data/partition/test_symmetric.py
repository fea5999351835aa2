import numpy as np
import pytest

from dglx_dist.data.partition.graph_views import SymmetricGraph, first_ids, symmetrise
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, TWO_TRIANGLES, communities, homogeneous


def rows(graph: SymmetricGraph) -> list[dict[int, int]]:
    """Neighbour -> weight of every row."""
    weights = np.ones(len(graph.indices), int) if graph.edge_weights is None else graph.edge_weights
    return [
        dict(zip(graph.indices[a:b].tolist(), weights[a:b].tolist(), strict=True))
        for a, b in zip(graph.indptr[:-1], graph.indptr[1:], strict=True)
    ]


def test_direction_is_forgotten() -> None:
    neighbours = [sorted(row) for row in rows(symmetrise(TWO_TRIANGLES))]
    assert neighbours == [[1, 2], [0, 2], [0, 1, 3], [2, 4, 5], [3, 5], [3, 4]]


def test_parallel_and_opposite_edges_become_a_weight_and_loops_nothing() -> None:
    graph = homogeneous(4, [(0, 1), (0, 1), (1, 0), (2, 2), (1, 2)])
    assert rows(symmetrise(graph)) == [{1: 3}, {0: 3, 2: 1}, {1: 1}, {}]
    assert symmetrise(graph, weighted=False).edge_weights is None
    assert [sorted(r) for r in rows(symmetrise(graph, weighted=False))] == [[1], [0, 2], [1], []]


def test_equal_weights_are_left_out() -> None:
    both_ways = homogeneous(3, [(0, 1), (1, 0), (1, 2), (2, 1)])
    assert symmetrise(both_ways).edge_weights is None


def test_weights_that_hardly_differ_are_left_out() -> None:
    ring = [(i, (i + 1) % 400) for i in range(400)]
    assert symmetrise(homogeneous(400, [*ring, *ring[:4]])).edge_weights is None
    kept = symmetrise(homogeneous(400, [*ring, *ring[:5]])).edge_weights
    assert kept is not None
    assert sorted(kept.tolist()) == [1] * 790 + [2] * 10


def test_node_types_follow_each_other() -> None:
    assert first_ids(AUTHORS_AND_PAPERS) == {"author": 0, "paper": 2, "venue": 5}
    assert [sorted(r) for r in rows(symmetrise(AUTHORS_AND_PAPERS))] == [[2, 3], [4], [0, 4], [0], [1, 2], []]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_indices_have_the_asked_dtype(dtype: type) -> None:
    graph = symmetrise(TWO_TRIANGLES, dtype=dtype)
    assert (graph.indices.dtype, graph.indptr.dtype) == (dtype, np.int64)


def test_a_larger_graph_agrees_with_the_plain_way() -> None:
    graph = communities(num_nodes=320)
    ((src, dst),) = graph.edges.values()
    plain: list[dict[int, int]] = [{} for _ in range(320)]
    for u, v in zip(src.tolist(), dst.tolist(), strict=True):
        if u != v:
            plain[u][v] = plain[u].get(v, 0) + 1
            plain[v][u] = plain[v].get(u, 0) + 1
    symmetric = symmetrise(graph)
    assert symmetric.edge_weights is not None
    assert rows(symmetric) == plain


@pytest.mark.parametrize("num_nodes", [0, 3])
def test_no_edges(num_nodes: int) -> None:
    graph = symmetrise(homogeneous(num_nodes, []))
    assert graph.indptr.tolist() == [0] * (num_nodes + 1)
    assert len(graph.indices) == 0
