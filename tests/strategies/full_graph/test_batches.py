"""Which seeds go into which cooperative batch."""

from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.graph.structure import ReplicatedStructure
from dglx_dist.records import EDGE_TYPE
from dglx_dist.strategies.full_graph.expansion import check_composition, cluster_seeds, compose, draw_of

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
