from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import Placement


def topology(rank: int, *servers: int) -> Topology:
    return Topology(rank=rank, world_size=len(servers), server_of_rank=servers)


@pytest.mark.parametrize("num_parts", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_every_part_has_one_server_and_blocks_are_contiguous(num_parts: int, num_servers: int) -> None:
    placement = Placement(num_parts, topology(0, *range(num_servers)))
    parts = [part for server in range(num_servers) for part in placement.parts_of_server(server)]
    assert parts == list(range(num_parts))
    assert all(
        placement.server_of_part[part] == part * num_servers // num_parts == server
        for server in range(num_servers)
        for part in placement.parts_of_server(server)
    )


def test_five_parts_on_two_servers() -> None:
    placement = Placement(5, topology(1, 0, 1))
    assert list(placement.parts_of_server(0)) == [0, 1, 2]
    assert list(placement.local_parts) == [3, 4]
    offsets = np.array([0, 10, 10, 30, 31, 40])
    assert placement.server_offsets(offsets).tolist() == [0, 30, 40]


def test_fewer_parts_than_servers_is_refused_with_the_command() -> None:
    with pytest.raises(ConfigError, match=r"2 part\(s\).*3 servers.*dglx partition DATA --parts 3"):
        Placement(2, topology(0, 0, 1, 2))


def test_requests_spread_over_the_ranks_of_a_server() -> None:
    servers = (0, 0, 0, 1, 1)
    asked = [Placement(2, topology(rank, *servers)).serving_rank(1) for rank in range(3)]
    assert asked == [3, 4, 3]
    assert Placement(2, topology(4, *servers)).serving_rank(0) == 1


def test_the_own_server_is_served_by_oneself() -> None:
    assert Placement(2, topology(4, 0, 0, 0, 1, 1)).serving_rank(1) == 4
