import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.simple import Contiguous, cut_ranges
from tests.data.partition.graphs import flat, homogeneous


@pytest.mark.parametrize(
    ("num_nodes", "num_parts", "expected"),
    [(6, 2, [0, 0, 0, 1, 1, 1]), (2, 1, [0, 0]), (0, 3, [])],
)
def test_equal_ranges(num_nodes: int, num_parts: int, expected: list[int]) -> None:
    graph = homogeneous(num_nodes, [])
    assert flat(Contiguous(PartitionOptions()).assign(graph, num_parts, 0).part_of) == expected


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


def test_unequal_machines() -> None:
    options = PartitionOptions(target_weights=(1, 3, 2))
    parts = flat(Contiguous(options).assign(homogeneous(12, []), 3, 0).part_of)
    assert np.bincount(parts).tolist() == [2, 6, 4]
