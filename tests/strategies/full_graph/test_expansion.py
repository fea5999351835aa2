"""Neighbourhoods of servers in one process: composed seeds, split rows, external nodes."""

import resource
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np
import pytest

from dglx_dist.errors import StorageError
from dglx_dist.keyed_random import stream_key
from dglx_dist.strategies.full_graph import expansion
from dglx_dist.strategies.full_graph.expansion import (
    TOLERANCE,
    EasOptions,
    EasPolicy,
    KHopNeighborhood,
    choose_external,
    cluster_seeds,
    compose_batches,
    group_work,
    make_selection,
    select_external,
    split_rows,
    write_neighborhood,
)
from tests.strategies.full_graph.plan_cases import NUM_NODES, plain_context, structure_of, whole_of


def test_ordered_batches_of_two_rings_with_one_bridge_are_the_rings() -> None:
    """Even nodes 0..38 are one ring, odd ones the other; nodes 40..49 are another server's."""
    even, odd = np.arange(0, 40, 2), np.arange(1, 40, 2)
    pairs = [(ring[i], ring[(i + step) % 20]) for ring in (even, odd) for i in range(20) for step in (1, 2)]
    pairs += [(1, 0), (45, 3), (46, 2)]
    structure, seeds = structure_of(50, *np.array(pairs).T), np.arange(0, 40, 3)
    clusters = cluster_seeds(structure, np.arange(40), seeds, 2, seed=0)
    pieces = {
        tuple(piece.tolist()) for piece in compose_batches(seeds, 2, "ordered", seed=1, clusters=clusters)
    }
    assert pieces == {tuple(range(0, 40, 6)), tuple(range(3, 40, 6))}
    assert cluster_seeds(structure, np.arange(40), seeds, 1, seed=0).tolist() == [0] * len(seeds)
    first, again, third = ([*map(list, compose_batches(seeds, 2, "random", seed=seed))] for seed in (1, 1, 2))
    assert first == again != third


NONE = np.empty(0, np.int64)


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
    rank_of = split_rows(closure, num_ranks, seed=1)
    assert rank_of.dtype == np.int32
    assert np.array_equal(rank_of, split_rows(closure, num_ranks, seed=1))
    for weights in group_work(closure).values():
        loads = np.bincount(rank_of, weights=weights, minlength=num_ranks)
        assert loads.max() <= loads.mean() * (1 + TOLERANCE) + weights.max()


def test_groups_of_layers_add_up_to_the_work() -> None:
    for counts in ((9, 9, 9), (9, 5, 5, 2), (9, 8, 7, 6, 5, 4, 3, 2), (9, 6, 0)):
        closure = random_closure(9, counts)
        groups = group_work(closure)
        assert len(groups) == min(len(set(counts[1:])), 4)
        layers = np.sum([np.arange(9) < count for count in counts[1:]], axis=0)
        assert np.array_equal(sum(groups.values()), layers * (closure.in_degrees + 1))


def test_few_rows_and_rows_without_edges_are_split() -> None:
    assert split_rows(random_closure(0, (0, 0)), 2, seed=0).tolist() == []
    assert split_rows(random_closure(), 1, seed=0).max() == 0
    assert sorted(split_rows(random_closure(2, (2, 1)), 3, seed=0).tolist()) == [0, 1]
    alone = replace(random_closure(4, (4, 4)), indptr=np.zeros(5, np.int64), sources=NONE, edge_ids=NONE)
    assert np.bincount(split_rows(alone, 2, seed=0)).tolist() == [2, 2]


def test_shared_memory_without_room_is_told_and_left_clean(tmp_path: Path) -> None:
    held = replace(random_closure(), sources=np.arange(1 << 17))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    try:
        with pytest.raises(
            StorageError, match=r"need 1\.. MB there to share rows: free space in .*--shm-size.*one rank"
        ):
            write_neighborhood(tmp_path / "held", held)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "held").exists()


STREAM = stream_key(7, 0, 3)

# Node 4 reads 0 (twice), 1, 2, 3; node 5 reads 1; node 6 reads nobody.
INDPTR = np.array([0, 5, 6, 6])
SOURCES = np.array([0, 0, 1, 2, 3, 1])
NODES = np.array([4, 5, 6])


def test_parallel_edges_are_one_neighbour() -> None:
    assert choose_external(INDPTR, SOURCES, NODES, NONE, NONE, -1, STREAM).tolist() == [0, 1, 2, 3, 1]
    few = choose_external(INDPTR, SOURCES, NODES, NONE, NONE, 4, STREAM)
    assert sorted(few[:4].tolist()) == [0, 1, 2, 3]


def test_any_neighbour_is_as_likely() -> None:
    nodes = np.arange(1000, 5000)
    indptr, sources = np.arange(4001) * 4, np.tile([10, 20, 30, 40], 4000)
    picked = choose_external(indptr, sources, nodes, NONE, NONE, 1, STREAM)
    counts = np.unique(picked, return_counts=True)[1]
    # Chi-square with 3 degrees of freedom; 16.3 is exceeded once in a thousand seeds.
    assert ((counts - 1000) ** 2 / 1000).sum() < 16.3


SERVER = 1
POLICIES, HOPS, FANOUTS = get_args(EasPolicy), (0, 1, 2, 3), (1, 2, 3, -1)


@pytest.fixture(scope="module")
def chosen_by() -> dict[tuple[EasPolicy, int, int], set[int]]:
    """Nodes that the second of three servers chooses, by policy, hops and fan-out."""
    context = plain_context(3, 1)
    own = context.own_range(SERVER)
    results = {}
    for policy, hops, fanout in product(POLICIES, HOPS, FANOUTS):
        options = EasOptions(hops=hops, fanout=fanout, policy=policy)
        # Nodes are asked for some at a time.
        with mock.patch.object(expansion, "CHUNK", 7):
            nodes = select_external(context.structure, own, np.arange(*own), options, seed=3)
        assert nodes.tolist() == sorted(set(nodes.tolist()))
        results[policy, hops, fanout] = set(nodes.tolist())
    return results


def test_rounds_by_the_definition(chosen_by: dict[tuple[EasPolicy, int, int], set[int]]) -> None:
    whole_graph = whole_of(plain_context(3, 1))
    for (policy, hops, fanout), nodes in chosen_by.items():
        selected = frontier = whole_graph.own_nodes(SERVER)
        for number in range(1, hops + 1):
            added = chosen_by[policy, number, fanout] - selected
            read = whole_graph.in_neighbours(frontier)
            assert added <= read - selected
            if fanout == -1:
                assert added == read - selected
            else:
                assert len(added) <= fanout * len(frontier)
            for node in frontier if fanout > 0 else ():
                candidates = whole_graph.in_neighbours({node}) - selected
                # Others may have chosen more of them; of its own choice none is missing.
                assert len(candidates & added) >= min(fanout, len(candidates))
            selected, frontier = selected | added, added
        assert nodes == selected
        # Selections contain each other.
        assert nodes <= chosen_by.get((policy, hops + 1, fanout), nodes)
        if fanout > 0 and hops <= 2:
            assert nodes <= chosen_by[policy, hops, fanout + 1 if fanout < 3 else -1]


def test_degree_prefers_readers_of_others(
    chosen_by: dict[tuple[EasPolicy, int, int], set[int]],
) -> None:
    context = plain_context(3, 1)
    whole_graph, own = whole_of(context), context.own_range(SERVER)
    scores = context.structure.in_degrees(np.arange(NUM_NODES), own)
    inner = whole_graph.own_nodes(SERVER)
    for node in range(NUM_NODES):
        sources = whole_graph.source[whole_graph.destination == node].tolist()
        assert scores[node] == sum(source not in inner for source in sources)
    for node in inner:
        candidates = whole_graph.in_neighbours({node}) - inner
        best = max((scores[candidate] for candidate in candidates), default=0)
        chosen = candidates & chosen_by["degree", 1, 1]
        assert not candidates or any(scores[node] == best for node in chosen)


def test_draws_depend_on_seed_and_batch(chosen_by: dict[tuple[EasPolicy, int, int], set[int]]) -> None:
    context = plain_context(3, 1)
    own, whole_graph = context.own_range(SERVER), whole_of(context)

    def rule(options: EasOptions, seed: int = 3) -> set[int]:
        return set(make_selection(options, seed=seed)(context.structure, own, np.arange(*own)[:4]).tolist())

    options, chosen = EasOptions(hops=3, fanout=1), chosen_by["uniform_external", 3, 1]
    assert rule(options) == chosen
    assert any(rule(options, seed) != chosen for seed in range(4, 12))
    seeds = set(range(own[0], own[0] + 4))
    assert rule(EasOptions(inner="batch")) == seeds | whole_graph.in_neighbours(seeds)
