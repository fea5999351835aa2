"""Ghosts and boundary lists of a graph that can be drawn, and of a random one."""

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.graph_partition import local_graph, routes_of

from . import cases
from .cases import boundaries_of

# Nodes 0 1 | 2 3 | 4; edges 0->1, 1->0, 2->0, 4->0, 4->1, 0->2, 0->3, 1->3.
STARTS = [0, 2, 4, 5]
IN_EDGES = [([0, 3, 5], [1, 2, 4, 0, 4]), ([0, 1, 3], [0, 0, 1]), ([0, 0], [])]


def graphs() -> list:
    return [
        local_graph(rank, STARTS, np.array(indptr), np.array(sources, dtype=np.int64))
        for rank, (indptr, sources) in enumerate(IN_EDGES)
    ]


def test_local_ids_and_ghosts_by_hand() -> None:
    first, second, third = graphs()
    assert first.ghosts.tolist() == [2, 4]
    assert first.sources.tolist() == [1, 2, 3, 0, 3]
    assert [first.ghost_ids(owner).tolist() for owner in range(3)] == [[], [2], [4]]
    assert first.out_indptr.tolist() == [0, 1, 2, 3, 5]
    assert first.out_targets.tolist() == [1, 0, 0, 0, 1]
    assert first.out_edges.tolist() == [3, 0, 1, 2, 4]
    assert second.ghosts.tolist() == [0, 1]
    assert (third.num_own, third.num_ghosts, third.num_local, third.num_servers) == (1, 0, 1, 3)


def test_routes_by_hand() -> None:
    """One node per interval on the first two; the third has no ghosts."""
    all_graphs = graphs()
    boundary = boundaries_of(all_graphs)
    assert [[nodes.tolist() for nodes in row] for row in boundary] == [
        [[], [0, 1], []],
        [[0], [], []],
        [[0], [], []],
    ]
    first = routes_of(all_graphs[0], np.array([0, 1, 2]), boundary[0])
    assert sum(len(nodes) for nodes in first.boundary) == 2
    assert first.boundary_bounds[1].tolist() == [0, 1, 2]
    # Ghost 2 has an edge to node 0 alone, ghost 4 to both: its home is the higher interval.
    assert [[some.tolist() for some in peer] for peer in first.returned] == [[[], []], [[0], []], [[], [0]]]
    second = routes_of(all_graphs[1], np.array([0, 0, 1, 2]), boundary[1])
    assert [some.tolist() for some in second.returned[0]] == [[], [], [0, 1]]
    third = routes_of(all_graphs[2], np.array([0, 1]), boundary[2])
    assert all(not len(some) for peer in third.returned for some in peer)


def test_every_ghost_is_sent_by_one_interval_and_returned_by_one() -> None:
    starts = [0, 9, 9, 24, 40]
    parts = cases.case().parts(starts, 3)
    for part in parts:
        for peer in parts:
            sent, local = part.routes.boundary[peer.graph.rank], peer.graph.ghost_ids(part.graph.rank)
            assert (sent + part.graph.starts[part.graph.rank] == local).all()
            returned = np.concatenate(part.routes.returned[peer.graph.rank])
            assert sorted(returned.tolist()) == list(range(len(part.graph.ghost_ids(peer.graph.rank))))
    num_sent = sum(len(nodes) for part in parts for nodes in part.routes.boundary)
    assert num_sent == sum(part.graph.num_ghosts for part in parts) > 0


def test_lists_of_another_partition_are_refused() -> None:
    first = graphs()[0]
    assert first.own_positions(np.array([0, 1]), 1).dtype == np.int32
    for wrong in ([2], [-1, 0], [1, 0], [0, 0]):
        with pytest.raises(ConfigError, match=r"graph server 1 asked 0 .* nodes 0 to 1"):
            first.own_positions(np.array(wrong), 1)
    with pytest.raises(ConfigError, match="same partition"):
        first.own_positions(np.array([0], np.int32), 1)
