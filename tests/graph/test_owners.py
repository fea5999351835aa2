from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import RowOwners


def test_rows_of_a_server_are_cut_evenly_over_its_ranks() -> None:
    # Server 0: rows 0-6 on ranks 0, 1, 2; server 1: rows 7-9 on ranks 3, 4.
    owners = RowOwners(np.array([0, 7, 10]), Topology(0, 5, (0, 0, 0, 1, 1)))
    assert [owners.range_of(rank) for rank in range(5)] == [(0, 2), (2, 4), (4, 7), (7, 8), (8, 10)]
    assert owners.rank_of(np.arange(10)).tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("bounds", [[0, 0, 1], [0, 1, 1], [0, 0, 0], [0, 3, 3], [0, 2, 9]])
def test_every_row_is_in_the_range_of_its_owner_also_with_fewer_rows_than_ranks(bounds: list[int]) -> None:
    owners = RowOwners(np.array(bounds), Topology(1, 4, (0, 0, 0, 1)))
    ranges = [owners.range_of(rank) for rank in range(4)]
    assert [first for first, _ in ranges] + [bounds[-1]] == [0, *(last for _, last in ranges)]
    owner = owners.rank_of(np.arange(bounds[-1]))
    assert all(ranges[rank][0] <= row < ranges[rank][1] for row, rank in enumerate(owner))
    assert (owner[: bounds[1]] < 3).all()
    assert (owner[bounds[1] :] == 3).all()


def test_bounds_of_another_number_of_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(2,\) for 2 servers"):
        RowOwners(np.array([0, 7]), Topology(0, 2, (0, 1)))
