"""Expansion-aware sampling in one process: closures, layers of own rows, split batches, kernels."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError, StorageError, UnknownNameError
from dglx_dist.graph.structure import InEdges, ReplicatedStructure
from dglx_dist.keyed_random import stream_key
from dglx_dist.records import EDGE_TYPE, Array
from dglx_dist.strategies.full_graph import expansion
from dglx_dist.strategies.full_graph.expansion import (
    TOLERANCE,
    HeldNeighborhood,
    KHopNeighborhood,
    NeighborhoodExpander,
    check_composition,
    check_split,
    choose_external,
    cluster_seeds,
    compose,
    count_external,
    draw_of,
    in_edges_of,
    only_from,
    read_held,
    remove_held,
    split_rows,
    work_of_groups,
    write_held,
)
from dglx_dist.strategies.full_graph.plan_builder import (
    PlanExchange,
    ServerLeaders,
    grow_levels,
    own_rows,
    read_layers,
)

SEEDS = np.array([3, 4, 8, 11, 12, 20, 31])


@pytest.mark.parametrize("composition", ["random", "ordered", "shuffled"])
@pytest.mark.parametrize("num_batches", [1, 2, 3, 7, 9])
def test_every_seed_is_in_one_batch(composition: str, num_batches: int) -> None:
    pieces = compose(SEEDS, num_batches, check_composition(composition), seed=1)
    assert len(pieces) == num_batches
    assert sorted(np.concatenate(pieces).tolist()) == SEEDS.tolist()
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert all((np.diff(piece) > 0).all() for piece in pieces)


def test_shuffled_epochs_differ_and_random_ones_do_not() -> None:
    seeds = np.arange(100)
    first, second = (compose(seeds, 4, "shuffled", seed=1, draw=draw_of("shuffled", e)) for e in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    again = compose(seeds, 4, "shuffled", seed=1, draw=draw_of("shuffled", 1))
    assert all(np.array_equal(a, b) for a, b in zip(second, again, strict=True))
    assert draw_of("random", 5) == draw_of("ordered", 5) == 0
    other = compose(seeds, 4, "random", seed=2)
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_ordered_seeds_stand_by_cluster_then_id() -> None:
    clusters = np.array([1, 0, 1, 0, 1, 0, 1])
    pieces = compose(SEEDS, 2, "ordered", seed=1, clusters=clusters)
    assert [piece.tolist() for piece in pieces] == [[3, 4, 11, 20], [8, 12, 31]]
    plain = compose(SEEDS, 2, "ordered", seed=1)
    assert [piece.tolist() for piece in plain] == [[3, 4, 8, 11], [12, 20, 31]]


def test_two_rings_with_one_bridge_are_two_clusters() -> None:
    """Even nodes 0..38 are one ring, odd ones the other; nodes 40..49 are another server's."""
    even, odd = np.arange(0, 40, 2), np.arange(1, 40, 2)
    pairs = [(ring[i], ring[(i + step) % 20]) for ring in (even, odd) for i in range(20) for step in (1, 2)]
    pairs += [(1, 0), (45, 3), (46, 2)]
    source, destination = np.array(pairs).T
    order = np.lexsort((source, destination))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(destination, minlength=50))])
    structure = ReplicatedStructure(EDGE_TYPE, 50, indptr, source[order])
    seeds = np.arange(0, 40, 3)
    clusters = cluster_seeds(structure, np.arange(40), seeds, 2, seed=0)
    assert set(clusters.tolist()) == {0, 1}
    assert len(set(clusters[seeds % 2 == 0].tolist())) == len(set(clusters[seeds % 2 == 1].tolist())) == 1
    assert cluster_seeds(structure, np.arange(40), seeds, 1, seed=0).tolist() == [0] * len(seeds)


def test_an_unknown_composition_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"composition='metis'.*'ordered'"):
        check_composition("metis")


# 0 -> 1 -> 2 -> 3 -> 4, and 5 -> 3.
PATH = ReplicatedStructure(
    EDGE_TYPE, 6, np.array([0, 0, 1, 2, 4, 5, 5]), np.array([0, 1, 2, 5, 3], dtype=np.int32)
)


def grown(seeds: list[int], levels: int, allowed: Array | None = None) -> KHopNeighborhood:
    expander = NeighborhoodExpander(PATH, np.array(seeds), allowed)
    for _ in range(levels):
        expander.add(expander.sources())
    return expander.finish()


def test_two_hops_from_the_end() -> None:
    found = grown([4], 2)
    assert found.nodes.tolist() == [4, 3, 2, 5]
    assert found.counts.tolist() == [4, 2, 1]
    assert found.levels.tolist() == [2, 1, 0, 0]
    assert found.indptr.tolist() == [0, 1, 3]
    assert found.sources.tolist() == [3, 2, 5]
    assert found.edge_ids.tolist() == [4, 2, 3]
    assert found.in_degrees.tolist() == [1, 2, 0, 0]
    assert found.work.tolist() == [2 * 2, 1 * 3, 0, 0]


def test_edges_from_nodes_that_are_not_allowed_are_left_out() -> None:
    found = grown([4], 3, np.array([3, 4, 5]))
    assert found.nodes.tolist() == [4, 3, 5]
    assert found.counts.tolist() == [3, 3, 2, 1]
    assert found.sources.tolist() == [3, 5]
    assert found.edge_ids.tolist() == [4, 3]
    assert grown([4], 1, np.array([4])).sources.tolist() == []


def test_nothing_grows_from_nothing_and_nodes_without_in_edges_are_rows() -> None:
    assert grown([], 2).counts.tolist() == [0, 0, 0]
    assert grown([], 2).indptr.tolist() == [0]
    found = grown([0, 5], 2)
    assert found.counts.tolist() == [2, 2, 2]
    assert found.indptr.tolist() == [0, 0, 0]


def test_rows_that_are_known_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def noted(structure: ReplicatedStructure, nodes: Array) -> list[InEdges]:
        asked.append(nodes.tolist())
        return list(in_edges_of(structure, nodes))

    monkeypatch.setattr(expansion, "in_edges_of", noted)
    grown([3, 4], 3)
    assert asked == [[3, 4], [2, 5], [1]]


def test_many_nodes_are_asked_for_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "CHUNK", 1)
    pieces = list(in_edges_of(PATH, np.array([4, 0, 3, 1, 2])))
    assert [piece.sources.tolist() for piece in pieces] == [[3], [], [2, 5], [0], [1]]


def test_only_from_no_node_leaves_no_edge() -> None:
    edges = PATH.ask("in_edges", np.array([3, 4]))
    left = only_from(edges, np.empty(0, np.int64))
    assert (left.indptr.tolist(), left.sources.tolist(), left.edge_ids.tolist()) == ([0, 0, 0], [], [])


def test_ids_are_cut_by_owner() -> None:
    leaders = ServerLeaders(ranks=(0, 2, 4), server=1, bounds=np.array([0, 3, 3, 9]))
    assert leaders.own == (3, 3)
    pieces = leaders.split(np.array([0, 2, 3, 8]))
    assert {rank: ids.tolist() for rank, ids in pieces.items()} == {0: [0, 2], 2: [], 4: [3, 8]}


def test_one_server_computes_the_same_for_any_hops() -> None:
    """4 <- 3 <- 2, 5: with one server all nodes are its own."""
    done: list[int] = []
    with start_session() as session:
        exchange = PlanExchange(session, "test")
        for hops in (0, 1, 2):
            leaders = ServerLeaders(ranks=(0,), server=0, bounds=np.array([0, 6]))
            with exchange.job():
                found = grow_levels(PATH, np.array([4]), (2, hops), leaders, exchange, advance=done.append)
            assert found.nodes.tolist() == [4, 3, 2, 5]
            assert found.counts.tolist() == [4, 2, 1]
    assert done == [1] * 6


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


def random_closure(num_rows: int = 400, counts: tuple[int, ...] = (400, 300, 200, 100)) -> KHopNeighborhood:
    """Rows that read six others each, mostly near ones."""
    random = np.random.default_rng(2)
    near = np.arange(counts[1])[:, None] + random.integers(-9, 10, size=(counts[1], 6))
    return KHopNeighborhood(
        nodes=np.arange(num_rows) * 3,
        counts=np.array(counts),
        indptr=np.arange(counts[1] + 1) * 6,
        sources=(np.clip(near, 0, num_rows - 1) * 3).reshape(-1),
        edge_ids=np.arange(counts[1] * 6),
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_work_of_each_layer_is_balanced(num_ranks: int) -> None:
    closure = random_closure()
    rank_of = split_rows(closure, num_ranks, "auto", seed=1)
    assert rank_of.dtype == np.int32
    for weights in work_of_groups(closure).values():
        loads = np.bincount(rank_of, weights=weights, minlength=num_ranks)
        assert loads.max() <= loads.mean() * (1 + TOLERANCE) + weights.max()
    assert np.array_equal(rank_of, split_rows(closure, num_ranks, "auto", seed=1))


def test_a_partitioner_of_one_weight_balances_the_sum_of_the_layers() -> None:
    closure = random_closure()
    for method in ("contiguous", "kaminpar"):
        loads = np.bincount(split_rows(closure, 2, method, seed=1), weights=closure.work)
        assert loads.max() <= loads.mean() * (1 + TOLERANCE) + closure.work.max()
    assert set(split_rows(closure, 3, "random", seed=1).tolist()) == {0, 1, 2}


def test_groups_of_layers_add_up_to_the_work() -> None:
    for counts in ((9, 9, 9), (9, 5, 5, 2), (9, 8, 7, 6, 5, 4, 3, 2), (9, 6, 0)):
        closure = random_closure(9, counts)
        groups = work_of_groups(closure)
        assert len(groups) == min(len(set(counts[1:])), 4)
        assert np.array_equal(sum(groups.values()), closure.work)


def test_few_rows_no_rows_and_no_edges() -> None:
    assert split_rows(random_closure(0, (0, 0)), 2, "auto", seed=0).tolist() == []
    assert split_rows(random_closure(), 1, "auto", seed=0).max() == 0
    assert sorted(split_rows(random_closure(2, (2, 1)), 3, "auto", seed=0).tolist()) == [0, 1]
    alone = KHopNeighborhood(
        nodes=np.arange(4),
        counts=np.array([4, 4]),
        indptr=np.zeros(5, np.int64),
        sources=np.empty(0, np.int64),
        edge_ids=np.empty(0, np.int64),
    )
    assert np.bincount(split_rows(alone, 2, "auto", seed=0)).tolist() == [2, 2]


def test_unknown_partitioners_are_refused() -> None:
    assert check_split("auto") == "metis"
    with pytest.raises(UnknownNameError, match="kaminpar"):
        check_split("kaminpa")


def test_what_is_mapped_is_what_was_written_even_after_its_files_are_gone(tmp_path: Path) -> None:
    for closure in (random_closure(), random_closure(0, (0, 0))):
        held = HeldNeighborhood(closure=closure, holders=np.arange(len(closure.nodes), dtype=np.int32))
        write_held(tmp_path / "held", held)
        again = read_held(tmp_path / "held")
        remove_held(tmp_path / "held")
        assert not (tmp_path / "held").exists()
        for name in ("nodes", "counts", "indptr", "sources", "edge_ids"):
            assert np.array_equal(getattr(again.closure, name), getattr(closure, name))
        assert again.holders.tolist() == held.holders.tolist()


def test_shared_memory_without_room_is_told_and_left_clean(tmp_path: Path) -> None:
    closure = replace(random_closure(), sources=np.arange(1 << 17))
    held = HeldNeighborhood(closure=closure, holders=np.zeros(len(closure.nodes), np.int32))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    try:
        with pytest.raises(StorageError, match=r"which take 1\.. MB; free space in .*--shm-size.*one rank"):
            write_held(tmp_path / "held", held)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "held").exists()


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
