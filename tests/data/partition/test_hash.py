import numpy as np

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.simple import Hash, hash_parts
from dglx_dist.keyed_random import splitmix64
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, flat, homogeneous


def test_the_part_follows_from_the_id_alone() -> None:
    parts = flat(Hash(PartitionOptions()).assign(homogeneous(6, [(0, 1)]), 3, 0).part_of)
    assert parts == flat(Hash(PartitionOptions()).assign(AUTHORS_AND_PAPERS, 3, 9).part_of)
    assert parts == [int(h) % 3 for h in splitmix64(np.arange(6, dtype=np.uint64))]


def test_a_stride_in_the_ids_does_not_show() -> None:
    # id mod 4 would put all of them into part 0.
    counts = np.bincount(hash_parts(40_000, 4)[::4], minlength=4)
    assert (abs(counts - 2500) < 5 * 43).all()  # five standard deviations of a fair draw
