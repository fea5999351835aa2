from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.graph.structure import CSCShard, InEdges, Piece, all_in_edges, from_wire, join_pieces, to_wire

# Nodes 10, 11, 12 with in-edges from {1, 2}, {}, {3}; edge ids start at 100.
SHARD = CSCShard(
    indptr=np.array([0, 2, 2, 3]), indices=np.array([1, 2, 3], np.int32), first_node=10, first_edge=100
)


def test_all_in_edges_in_the_order_asked() -> None:
    edges = all_in_edges(SHARD, np.array([12, 11, 10]))
    assert edges.indptr.tolist() == [0, 1, 1, 3]
    assert (edges.sources.tolist(), edges.edge_ids.tolist()) == ([3, 1, 2], [102, 100, 101])


def test_the_wire_carries_24_bytes_an_edge_and_gives_back_the_same() -> None:
    nodes = np.array([12, 11, 10])
    edges = all_in_edges(SHARD, nodes)
    arrays = to_wire(nodes, edges)
    assert sum(array.nbytes for array in arrays) == 24 * 3
    back = from_wire(nodes, arrays)
    assert back.indptr.tolist() == edges.indptr.tolist()
    assert back.edge_ids.tolist() == edges.edge_ids.tolist()


def test_an_answer_for_other_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="not requested"):
        from_wire(np.array([10, 12]), to_wire(np.array([12, 10]), all_in_edges(SHARD, np.array([12, 10]))))


def test_pieces_are_joined_at_every_place_of_a_node() -> None:
    one = InEdges(indptr=np.array([0, 2]), sources=np.array([7, 8]), edge_ids=np.array([70, 80]))
    two = InEdges(indptr=np.array([0, 0, 1]), sources=np.array([9]), edge_ids=np.array([90]))
    joined = join_pieces(
        4,
        [
            Piece(edges=one, starts=np.array([0, 2]), positions=np.array([0, 3])),
            Piece(edges=two, starts=np.array([0, 1, 2]), positions=np.array([1, 2])),
        ],
    )
    assert joined.indptr.tolist() == [0, 2, 2, 3, 5]
    assert joined.edge_ids.tolist() == [70, 80, 90, 70, 80]
