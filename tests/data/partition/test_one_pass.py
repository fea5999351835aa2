"""Partitioners of at most one pass: contiguous, hash, random, by feature, from a file, Fennel and LDG."""

from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.graph_views import symmetrise
from dglx_dist.data.partition.one_pass import (
    Contiguous,
    Feature,
    Fennel,
    File,
    Hash,
    Ldg,
    cut_ranges,
    hash_parts,
    stream_order,
)
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.keyed_random import splitmix64
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, TWO_TRIANGLES, flat, homogeneous


def test_sizes_differ_by_one_at_most() -> None:
    for num_nodes in range(1, 60):
        for num_parts in range(1, 20):
            parts = cut_ranges(np.ones(num_nodes, dtype=np.int64), np.full(num_parts, 1 / num_parts))
            sizes = np.bincount(parts, minlength=num_parts)
            assert sizes.max() - sizes.min() <= 1
            assert (np.diff(parts) >= 0).all()


def test_ranges_have_equal_in_degree() -> None:
    # Node 0 has four in-edges, the others one each: half of all in-edges are its own.
    graph = homogeneous(5, [(1, 0), (2, 0), (3, 0), (4, 0), (0, 1), (0, 2), (0, 3), (0, 4)])
    parts = Contiguous(PartitionOptions(balance=("degree",))).assign(graph, 2, 0).part_of
    assert flat(parts) == [0, 1, 1, 1, 1]


def test_feature_partitioner_hashes_nodes_and_splits_columns() -> None:
    assignment = Feature(PartitionOptions()).assign(AUTHORS_AND_PAPERS, 3, 0)
    hashed = Hash(PartitionOptions()).assign(AUTHORS_AND_PAPERS, 3, 0)
    assert flat(assignment.part_of) == flat(hashed.part_of)
    assert assignment.parameters["features"] == "columns"
    assert "features" not in hashed.parameters


def test_parts_come_as_they_were_written(tmp_path: Path) -> None:
    np.save(tmp_path / "parts.npy", np.array([1, 0, 1, 0, 2, 2], dtype=np.uint8))
    assignment = File(PartitionOptions(file=tmp_path / "parts.npy")).assign(AUTHORS_AND_PAPERS, 3, 0)
    assert {t: p.tolist() for t, p in assignment.part_of.items()} == {
        "author": [1, 0],
        "paper": [1, 0, 2],
        "venue": [2],
    }
    assert assignment.parameters["file"] == "parts.npy"


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("parts.npy", np.zeros(6), r"parts.npy.* float64 of shape \(6,\)"),
        ("parts.npy", np.zeros((6, 1), dtype=int), r"parts.npy.* int64 of shape \(6, 1\)"),
        ("parts.npy", np.array([0, 0, 0, 0, 0, 5]), "row 5: part 5 is outside 0..1; use 6 parts"),
        ("parts.npy", np.array([0, -1, 1, 0, 0, 0]), "parts.npy, row 1: part -1"),
        ("parts.npy", np.array([0, 1]), "parts.npy has 2 part ids for 6 nodes"),
        ("parts.npy", np.array(["a"] * 6, dtype=object), "parts.npy is not a plain .npy array"),
        ("parts.npy", b"", "not a plain .npy array"),
        ("parts.npy", b"\xff\xfe", "not a plain .npy array"),
        ("parts.npy", b"PK\x03\x04\xff" * 9, "not a plain .npy array"),
        ("nowhere.npy", None, "no file .*nowhere.npy"),
        ("parts.txt", None, "ends in '.txt'"),
        (None, None, "needs a .npy file"),
    ],
)
def test_wrong_parts_are_refused(tmp_path: Path, file: str | None, content: object, named: str) -> None:
    path = file and tmp_path / file
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)  # type: ignore[call-overload]
    with pytest.raises(ConfigError if content is None else DatasetError, match=named):
        File(PartitionOptions(file=path)).assign(TWO_TRIANGLES, 2, 0)


def test_the_part_follows_from_the_id_alone() -> None:
    parts = flat(Hash(PartitionOptions()).assign(homogeneous(6, [(0, 1)]), 3, 0).part_of)
    assert parts == flat(Hash(PartitionOptions()).assign(AUTHORS_AND_PAPERS, 3, 9).part_of)
    assert parts == [int(h) % 3 for h in splitmix64(np.arange(6, dtype=np.uint64))]


def test_a_stride_in_the_ids_does_not_show() -> None:
    # id mod 4 would put all of them into part 0.
    counts = np.bincount(hash_parts(40_000, 4)[::4], minlength=4)
    assert (abs(counts - 2500) < 5 * 43).all()  # five standard deviations of a fair draw


def test_fennel_agrees_with_a_calculation_by_hand() -> None:
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
