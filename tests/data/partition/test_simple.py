"""Partitioners without a search: contiguous, hash, random, by feature, from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.simple import (
    Contiguous,
    Feature,
    File,
    Hash,
    cut_ranges,
    hash_parts,
    read_parts,
)
from dglx_dist.errors import ConfigError, DatasetError, DglxError
from dglx_dist.keyed_random import splitmix64
from dglx_dist.records import Array
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, TWO_TRIANGLES, flat, homogeneous


def test_sizes_differ_by_one_at_most() -> None:
    for num_nodes in range(1, 60):
        for num_parts in range(1, 20):
            parts = cut_ranges(np.ones(num_nodes, dtype=np.int64), np.full(num_parts, 1 / num_parts))
            sizes = np.bincount(parts, minlength=num_parts)
            assert sizes.max() - sizes.min() <= 1
            assert (np.diff(parts) >= 0).all()


def test_ranges_of_equal_in_degree() -> None:
    # Node 0 has four in-edges, the others one each: half of all in-edges are its own.
    graph = homogeneous(5, [(1, 0), (2, 0), (3, 0), (4, 0), (0, 1), (0, 2), (0, 3), (0, 4)])
    parts = Contiguous(PartitionOptions(balance=("degree",))).assign(graph, 2, 0).part_of
    assert flat(parts) == [0, 1, 1, 1, 1]


def test_structure_by_hash_and_features_by_column() -> None:
    assignment = Feature(PartitionOptions()).assign(AUTHORS_AND_PAPERS, 3, 0)
    hashed = Hash(PartitionOptions()).assign(AUTHORS_AND_PAPERS, 3, 0)
    assert flat(assignment.part_of) == flat(hashed.part_of)
    assert assignment.parameters["features"] == "columns"
    assert "features" not in hashed.parameters


@pytest.mark.parametrize("suffix", [".npy", ".txt", ".csv"])
def test_parts_come_as_they_were_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"parts{suffix}"
    if suffix == ".npy":
        np.save(path, np.array([1, 0, 1, 0, 2, 2], dtype=np.uint8))
    else:
        path.write_text("1\n0\n 1\n0\n2\n2\n")
    assignment = File(PartitionOptions(file=path)).assign(AUTHORS_AND_PAPERS, 3, 0)
    assert {t: p.tolist() for t, p in assignment.part_of.items()} == {
        "author": [1, 0],
        "paper": [1, 0, 2],
        "venue": [2],
    }
    assert assignment.parameters["file"] == f"parts{suffix}"


def test_a_vector_per_node_type() -> None:
    vector = {"venue": np.array([1]), "paper": np.array([0, 0, 1]), "author": np.array([1, 1])}
    parts = File(PartitionOptions(vector=vector)).assign(AUTHORS_AND_PAPERS, 2, 0).part_of
    assert flat(parts) == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0\n1\nx\n0\n0\n0\n", "line 3: 'x' is not a part id"),
        ("0\n1\n\n0\n0\n0\n", "line 3: ''"),
        ("0\n1\n1.5\n0\n0\n0\n", "line 3: '1.5'"),
        ("0\n1\n99999999999999999999\n0\n0\n0\n", "line 3"),
        ("0\n1\n1\n2\n0\n0\n", r"line 4: part 2 is outside 0\.\.1"),
        ("0\n-1\n1\n0\n0\n0\n", "line 2: part -1"),
        ("0\n1\n", "2 part ids for 6 nodes"),
        ("", "0 part ids for 6 nodes"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "parts.txt"
    path.write_text(text)
    with pytest.raises(DatasetError, match=f"parts.txt.*{named}"):
        File(PartitionOptions(file=path)).assign(TWO_TRIANGLES, 2, 0)


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros(6), r"\(6,\) float64"),
        (np.zeros((6, 1), dtype=int), r"\(6, 1\) int64"),
        (np.array([0, 0, 0, 0, 0, 5]), "row 5: part 5"),
        (np.array(["a"] * 6, dtype=object), "not a plain .npy array"),
    ],
)
def test_a_wrong_array_is_refused(tmp_path: Path, array: Array, named: str) -> None:
    np.save(tmp_path / "parts.npy", array, allow_pickle=True)
    with pytest.raises(DatasetError, match=named):
        File(PartitionOptions(file=tmp_path / "parts.npy")).assign(TWO_TRIANGLES, 2, 0)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        (PartitionOptions(), ConfigError, "either a file or a vector"),
        (PartitionOptions(file="a.txt", vector=np.zeros(6, int)), ConfigError, "either a file or a vector"),
        (PartitionOptions(file="nowhere.txt"), ConfigError, "no file nowhere.txt"),
        (PartitionOptions(file="parts.parquet"), ConfigError, "ends in '.parquet'"),
        (PartitionOptions(vector={"_N": np.zeros(5, int)}), DatasetError, "5 part ids for 6 nodes"),
        (PartitionOptions(vector={"node": np.zeros(6, int)}), DatasetError, "no part ids for node type '_N'"),
    ],
)
def test_a_wrong_source_is_refused(options: PartitionOptions, error: type[DglxError], named: str) -> None:
    with pytest.raises(error, match=named):
        File(options).assign(TWO_TRIANGLES, 2, 0)


@pytest.mark.parametrize(
    ("name", "named"), [("parts.npy", "not a plain .npy array"), ("parts.txt", "not text")]
)
@pytest.mark.parametrize("content", [b"\xff\xfe", b"PK\x03\x04\xff" * 9])
def test_what_is_neither_text_nor_array_is_refused(
    tmp_path: Path, name: str, named: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=f"{name} is {named}"):
        read_parts(tmp_path / name)


def test_the_part_follows_from_the_id_alone() -> None:
    parts = flat(Hash(PartitionOptions()).assign(homogeneous(6, [(0, 1)]), 3, 0).part_of)
    assert parts == flat(Hash(PartitionOptions()).assign(AUTHORS_AND_PAPERS, 3, 9).part_of)
    assert parts == [int(h) % 3 for h in splitmix64(np.arange(6, dtype=np.uint64))]


def test_a_stride_in_the_ids_does_not_show() -> None:
    # id mod 4 would put all of them into part 0.
    counts = np.bincount(hash_parts(40_000, 4)[::4], minlength=4)
    assert (abs(counts - 2500) < 5 * 43).all()  # five standard deviations of a fair draw
