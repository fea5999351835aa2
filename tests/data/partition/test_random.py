import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.simple import Random
from tests.data.partition.graphs import flat, homogeneous


@pytest.mark.parametrize(("num_nodes", "num_parts"), [(100, 4), (101, 4), (3, 5), (7, 7)])
def test_sizes_differ_by_one_at_most(num_nodes: int, num_parts: int) -> None:
    parts = flat(Random(PartitionOptions()).assign(homogeneous(num_nodes, []), num_parts, 3).part_of)
    sizes = np.bincount(parts, minlength=num_parts)
    assert sizes.max() - sizes.min() <= 1


def test_neighbouring_ids_are_together_one_time_in_p() -> None:
    parts = np.array(flat(Random(PartitionOptions()).assign(homogeneous(40_000, []), 4, 0).part_of))
    assert (parts[1:] == parts[:-1]).mean() == pytest.approx(1 / 4, abs=0.01)


def test_target_weights() -> None:
    parts = flat(Random(PartitionOptions(target_weights=(1, 3))).assign(homogeneous(100, []), 2, 0).part_of)
    assert np.bincount(parts).tolist() == [25, 75]
