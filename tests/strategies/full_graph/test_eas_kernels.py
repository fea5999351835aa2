"""The draws of expansion-aware sampling on in-edges that one can count."""

from __future__ import annotations

import numpy as np

from dglx_dist.keyed_random import stream_key
from dglx_dist.strategies.full_graph.expansion import choose_external, count_external

NONE = np.empty(0, np.int64)
STREAM = stream_key(7, 0, 3)

# Node 4 reads 0 (twice), 1, 2, 3; node 5 reads 1; node 6 reads nobody.
INDPTR = np.array([0, 5, 6, 6])
SOURCES = np.array([0, 0, 1, 2, 3, 1])
NODES = np.array([4, 5, 6])


def chosen(fanout: int, taken: list[int] | None = None, scores: list[int] | None = None) -> list[int]:
    return choose_external(
        INDPTR,
        SOURCES,
        NODES,
        np.array(taken or [], np.int64),
        np.array(scores or [], np.int64),
        fanout,
        STREAM,
    ).tolist()


def test_all_of_them_each_once_for_a_node() -> None:
    assert chosen(-1) == [0, 1, 2, 3, 1]


def test_taken_nodes_are_no_candidates() -> None:
    assert chosen(-1, taken=[0, 1]) == [2, 3]
    assert sorted(chosen(9, taken=[0, 1])) == [2, 3]


def test_as_many_as_the_fan_out_and_a_larger_one_takes_more_of_the_same() -> None:
    for fanout in (1, 2, 3):
        few, more = chosen(fanout), chosen(fanout + 1)
        assert len(few) == fanout + 1
        assert set(few[:fanout]) < set(more[: fanout + 1])
        assert few[-1] == more[-1] == 1


def test_higher_scores_go_first() -> None:
    assert chosen(2, scores=[5, 5, 1, 9, 2, 1])[:2] == [2, 0]
    # A tie is broken by a random number.
    assert chosen(1, scores=[5, 5, 1, 9, 9, 1])[0] in (2, 3)


def test_any_neighbour_is_as_likely() -> None:
    nodes = np.arange(1000, 5000)
    indptr, sources = np.arange(4001) * 4, np.tile([10, 20, 30, 40], 4000)
    picked = choose_external(indptr, sources, nodes, NONE, NONE, 1, STREAM)
    counts = np.unique(picked, return_counts=True)[1]
    # Chi-square with 3 degrees of freedom; 16.3 is exceeded once in a thousand seeds.
    assert ((counts - 1000) ** 2 / 1000).sum() < 16.3


def test_in_edges_from_outside_of_a_range_are_counted() -> None:
    out = np.empty(3, np.int64)
    count_external(INDPTR, SOURCES.astype(np.int32), 4, NODES, 1, 3, out)
    assert out.tolist() == [3, 0, 0]
    count_external(INDPTR, SOURCES, 4, NODES, 5, 9, out)
    assert out.tolist() == [5, 1, 0]
