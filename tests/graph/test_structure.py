"""In-edges of a part, and access probabilities worked out by hand and counted on drawn batches."""

import numpy as np
import pytest

from dglx_dist.graph.cache import compute_access_probability, compute_hit_rate, select_top_rows
from dglx_dist.graph.structure import CSCShard, all_in_edges, from_wire, to_wire
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array

# 1 -> 0, 2 -> 0, 3 -> 1, 3 -> 2: node 0 has the in-neighbours 1 and 2, and both have 3.
DIAMOND = CSCShard(
    indptr=np.array([0, 2, 3, 4, 4]), indices=np.array([1, 2, 3, 3]), first_node=0, first_edge=0
)


def vip(shard: CSCShard, seeds: list[int], fanouts: list[int], batch_size: int) -> Array:
    count = len(shard.indptr) - 1
    hops = [{EDGE_TYPE: fanout} for fanout in fanouts]
    seeds_of = {NODE_TYPE: np.array(seeds, np.int64)}
    return compute_access_probability({EDGE_TYPE: shard}, {NODE_TYPE: count}, seeds_of, hops, batch_size)[
        NODE_TYPE
    ]


@pytest.mark.parametrize(
    ("seeds", "fanouts", "batch_size", "expected"),
    [
        # Hop 1 draws one of 1 and 2: 1/2 each. Hop 2 draws for 0 again, and 3 for each of 1 and 2 that is
        # there: 1 is missed by both hops with 1/4; 3 with 1/2 * 1/2, the two being taken as independent.
        ([0], [1, 1], 1, [1, 0.75, 0.75, 0.75]),
        # One of the seeds 0 and 1: each with 1/2. Node 3 comes with seed 1, at the first hop.
        ([0, 1], [-1], 1, [0.5, 1 - 0.5 * 0.5, 0.5, 0.5]),
        # As many seeds as the batch has room for are all in it.
        ([0, 1], [5], 2, [1, 1, 1, 1]),
        ([], [5], 2, [0, 0, 0, 0]),
        # Fan-outs are input-most first: the seed draws both neighbours, and then nothing is drawn for anyone.
        ([0], [0, 2], 1, [1, 1, 1, 0]),
        # The seed draws nothing, then both neighbours: 3 is never reached.
        ([0], [2, 0], 1, [1, 1, 1, 0]),
        ([0], [2, 2], 1, [1, 1, 1, 1]),
    ],
)
def test_vip_scores_match_hand_computed_ones(
    seeds: list[int], fanouts: list[int], batch_size: int, expected: list[float]
) -> None:
    assert vip(DIAMOND, seeds, fanouts, batch_size).tolist() == pytest.approx(expected)


def test_vip_scores_follow_edges_of_several_types() -> None:
    """Paper 0 is written by the authors 0 and 1 and cites paper 1; author 1 works at institute 0."""
    writes, cites, employs = ("a", "writes", "p"), ("p", "cites", "p"), ("i", "employs", "a")
    shards = {
        writes: CSCShard(indptr=np.array([0, 2, 2]), indices=np.array([0, 1]), first_node=0, first_edge=0),
        cites: CSCShard(indptr=np.array([0, 1, 1]), indices=np.array([1]), first_node=0, first_edge=0),
        employs: CSCShard(indptr=np.array([0, 0, 1]), indices=np.array([0]), first_node=0, first_edge=0),
    }
    hops = [{writes: 0, cites: 0, employs: 3}, {writes: 1, cites: 1, employs: 0}]
    access_probability = compute_access_probability(
        shards, {"a": 2, "p": 2, "i": 1}, {"p": np.array([0])}, hops, 1
    )
    assert access_probability["p"].tolist() == pytest.approx([1, 1])
    assert access_probability["a"].tolist() == pytest.approx([0.5, 0.5])
    assert access_probability["i"].tolist() == pytest.approx([0.5])


def random_graph(num_nodes: int, degree: int) -> CSCShard:
    random = np.random.default_rng(3)
    sources = np.sort(random.integers(0, num_nodes, (num_nodes, degree)), axis=1).astype(np.int32)
    indptr = np.arange(num_nodes + 1) * degree
    return CSCShard(indptr=indptr, indices=sources.reshape(-1), first_node=0, first_edge=0)


def drawn_batch(shard: CSCShard, batch: Array, fanouts: list[int], random: np.random.Generator) -> Array:
    """The input nodes of one batch, drawn the plain way."""
    nodes = batch
    for fanout in reversed(fanouts):
        rows = [shard.indices[shard.indptr[node] : shard.indptr[node + 1]] for node in nodes]
        drawn = [random.choice(row, min(fanout, len(row)), replace=False) for row in rows]
        nodes = np.unique(np.concatenate([nodes, *drawn]))
    return nodes


def test_drawn_batches_need_rows_as_often_as_predicted() -> None:
    """400 nodes, 2 hops, 2000 batches: one standard deviation of a frequency is below 0.012."""
    shard, seeds, rounds = random_graph(400, 8), np.arange(100), 2000
    random, seen = np.random.default_rng(1), np.zeros(400)
    for _ in range(rounds):
        seen[drawn_batch(shard, random.choice(seeds, 5, replace=False), [3, 4], random)] += 1
    difference = vip(shard, seeds.tolist(), [3, 4], 5) - seen / rounds
    # Nodes that share a path are not independent, which the formula neglects: hence more than chance.
    assert np.abs(difference).max() < 0.05
    assert abs(difference.mean()) < 0.004


def test_top_rows_are_remote_and_have_the_highest_scores() -> None:
    scores = np.array([5.0, 9.0, 2.0, 2.0, 0.0, 2.0, 7.0])
    for own, budget, ids in (
        ((1, 2), 3, [0, 2, 6]),
        ((1, 2), 4, [0, 2, 3, 6]),
        ((1, 2), 100, [0, 2, 3, 5, 6]),
        ((0, 7), 3, []),
        ((1, 2), 0, []),
    ):
        assert select_top_rows(scores, own, budget).tolist() == ids
    assert compute_hit_rate(scores, (1, 2), np.array([0, 6])) == pytest.approx(12 / 18)
    assert compute_hit_rate(scores, (0, 7), np.array([], np.int64)) is None


# Nodes 10, 11, 12 with in-edges from {1, 2}, {}, {3}; edge ids start at 100.
SHARD = CSCShard(
    indptr=np.array([0, 2, 2, 3]), indices=np.array([1, 2, 3], np.int32), first_node=10, first_edge=100
)


def test_an_answer_for_other_nodes_is_refused() -> None:
    nodes, arrays = np.array([10, 12]), to_wire(np.array([12, 10]), all_in_edges(SHARD, np.array([12, 10])))
    with pytest.raises(ValueError, match="not requested"):
        from_wire(nodes, arrays, 4, (100, 103))
    assert from_wire(nodes[::-1].copy(), arrays, 4, (100, 103)).sources.tolist() == [3, 1, 2]
    for wrong, expected in (
        ([arrays[0][:1], *arrays[1:]], "three .* of one length, not int64 of shape .1,."),
        ([*arrays[:2], arrays[2][:0]], "of one length"),
        ([arrays[0].astype(np.int32), *arrays[1:]], "not int32"),
        ([arrays[0] + 1, *arrays[1:]], "the source 4, but ids are 0 to 3"),
        ([-arrays[0], *arrays[1:]], "the source -3"),
        ([*arrays[:2], arrays[2] + 1], "the edge 103, but ids are 100 to 102"),
    ):
        with pytest.raises(ValueError, match=expected):
            from_wire(nodes[::-1].copy(), wrong, 4, (100, 103))
