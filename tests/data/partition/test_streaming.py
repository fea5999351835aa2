"""Fennel and LDG, one pass over the nodes."""

from __future__ import annotations

import numpy as np

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.graph_views import symmetrise
from dglx_dist.data.partition.streaming import Fennel, Ldg, stream_order
from tests.data.partition.graphs import flat, homogeneous


def test_the_price_of_size_worked_out_by_hand() -> None:
    """4 nodes, 6 pairs, 2 parts: alpha = sqrt(2) x 6 / 8 = 1.06, price 1.59 sqrt(size).

    The second node gains 1 and would pay 1.59, so it goes apart; the third ties; the fourth scores
    2 - 2.25 beside two and 1 - 1.59 beside one, so it joins the two.
    """
    clique = homogeneous(4, [(a, b) for a in range(4) for b in range(a)])
    parts = flat(Fennel(PartitionOptions()).assign(clique, 2, 0).part_of)
    assert sorted(np.bincount(parts).tolist()) == [1, 3]


def test_a_pair_stays_together_where_one_link_is_worth_more_than_the_price() -> None:
    # alpha = sqrt(2) x 1 / 8 = 0.18: the price of size 1 is 0.27, the link gains 1.
    for seed in range(5):
        parts = flat(Fennel(PartitionOptions()).assign(homogeneous(4, [(0, 1)]), 2, seed).part_of)
        assert parts[0] == parts[1]


def test_two_cliques_stay_whole() -> None:
    cliques = [(a + s, b + s) for s in (0, 10) for a in range(10) for b in range(a)]
    for seed in range(5):
        parts = flat(Ldg(PartitionOptions()).assign(homogeneous(20, cliques), 2, seed).part_of)
        assert (len(set(parts[:10])), len(set(parts[10:]))) == (1, 1)
        assert parts[0] != parts[10]


def test_nearer_nodes_come_first() -> None:
    # A path 0-1-...-9 and one apart: along the path the distance from the start never shrinks.
    graph = symmetrise(homogeneous(11, [(i, i + 1) for i in range(9)]))
    for seed in range(5):
        path = [u for u in stream_order(graph, seed).tolist() if u != 10]
        assert (np.diff([abs(u - path[0]) for u in path]) >= 0).all()
