"""Layers of two ranks on the path 0 -> 1 -> 2 -> 3 -> 4, 5 -> 3, computed for the seed 4."""

from __future__ import annotations

import numpy as np

from dglx_dist.records import Array
from dglx_dist.strategies.full_graph.expansion import HeldNeighborhood
from dglx_dist.strategies.full_graph.plan_builder import own_rows, read_layers
from tests.strategies.full_graph.test_closure import grown


def nobody(ids: Array) -> Array:
    assert not len(ids)
    return ids


def test_a_server_that_has_all_is_cut_between_two_ranks() -> None:
    held = HeldNeighborhood(closure=grown([4], 2), holders=np.array([1, 0, 1, 0], dtype=np.int32))
    own = own_rows(held, 0)
    assert own.nodes.tolist() == [3, 5]
    assert own.counts.tolist() == [2, 1, 0]
    first, second = read_layers(own, held, 2, (0, 6), 0, nobody)
    # 3 reads 2, which rank 1 holds, and 5.
    assert (first.own_rows, first.targets) == (2, 1)
    assert first.halo_nodes.tolist() == [2]
    assert first.receive == ((1, 1),)
    assert first.indices.tolist() == [2, 1]
    assert first.edge_ids.tolist() == [2, 3]
    assert (second.own_rows, second.targets, second.receive) == (1, 0, ())
    assert first.halo_of(1).tolist() == [2]
    assert first.halo_of(0).tolist() == []
    other = own_rows(held, 1)
    first, second = read_layers(other, held, 2, (0, 6), 1, nobody)
    assert other.nodes.tolist() == [4, 2]
    assert (first.indices.tolist(), first.halo_nodes.tolist()) == ([2], [3])
    assert (second.indices.tolist(), second.halo_nodes.tolist()) == ([1], [3])


def test_above_the_hops_rows_come_from_the_servers_that_own_them() -> None:
    """The server owns 4 and 5; with one hop it takes in 3, but the row of level 1 is the owner's."""
    grown_by_hand = grown([4], 1)
    closure = type(grown_by_hand)(
        nodes=np.array([4, 3]),
        counts=np.array([2, 1, 1]),
        indptr=grown_by_hand.indptr,
        sources=grown_by_hand.sources,
        edge_ids=grown_by_hand.edge_ids,
    )
    held = HeldNeighborhood(closure=closure, holders=np.zeros(2, np.int32))
    asked: list[list[int]] = []

    def holders_of(ids: Array) -> Array:
        asked.append(ids.tolist())
        return np.full(len(ids), 7)

    first, second = read_layers(own_rows(held, 0), held, 1, (4, 6), 0, holders_of)
    assert asked == [[3]]
    assert (first.indices.tolist(), first.receive) == ([1], ())
    assert (second.indices.tolist(), second.receive, second.halo_nodes.tolist()) == ([1], ((7, 1),), [3])


def test_layers_that_are_alike_are_one_object() -> None:
    held = HeldNeighborhood(closure=grown([1, 2, 3, 4, 5, 0], 4), holders=np.zeros(6, np.int32))
    layers = read_layers(own_rows(held, 0), held, 2, (0, 6), 0, nobody)
    assert layers[1] is layers[0]
    assert layers[3] is layers[2]
    assert layers[2] is not layers[1]
