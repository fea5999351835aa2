"""Owners of ids, and the placement of parts on ranks and servers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import PartitionBook, Placement, RowOwners

# Two partitions. Users 0,1 | 2,3,4; items 0,1,2 | 3. Homogeneous: u0 u1 i0 i1 i2 | u2 u3 u4 i3.
RATES, SEES = ("user", "rates", "item"), ("user", "sees", "item")
BOOK = PartitionBook(
    {"user": np.array([0, 2, 5]), "item": np.array([0, 3, 4])},
    {RATES: np.array([0, 4, 4]), SEES: np.array([0, 0, 2])},
    partid=1,
)


def test_counts_and_metadata_match_the_dataset() -> None:
    assert (BOOK.num_partitions(), BOOK.partid) == (2, 1)
    assert BOOK.metadata() == [
        {"machine_id": 0, "num_nodes": 5, "num_edges": 4},
        {"machine_id": 1, "num_nodes": 4, "num_edges": 2},
    ]
    assert (BOOK.num_nodes("user"), BOOK.num_nodes(), BOOK.num_edges("sees")) == (5, 9, 2)


def test_owners_and_local_ids_match_the_bounds() -> None:
    assert BOOK.nid2partid([0, 1, 2, 4], "user").tolist() == [0, 0, 1, 1]
    assert BOOK.eid2partid(torch.tensor([3]), "rates").tolist() == [0]
    assert BOOK.partid2nids(1, "user").tolist() == [2, 3, 4]
    assert BOOK.partid2eids(0, SEES).tolist() == []
    assert BOOK.nid2localnid([4, 2], 1, "user").tolist() == [2, 0]


def test_homogeneous_ids_go_there_and_back() -> None:
    types, ids = BOOK.map_to_per_ntype(torch.arange(9))
    assert types.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1]
    assert ids.tolist() == [0, 1, 0, 1, 2, 2, 3, 4, 3]
    assert BOOK.map_to_homo_nid(torch.arange(5), "user").tolist() == [0, 1, 5, 6, 7]
    assert BOOK.map_to_homo_nid(torch.arange(4), "item").tolist() == [2, 3, 4, 8]
    types, ids = BOOK.map_to_per_etype([3, 4, 5])
    assert (types.tolist(), ids.tolist()) == ([0, 1, 1], [3, 0, 1])
    assert BOOK.map_to_homo_eid([0, 1], SEES).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: BOOK.nid2partid([0, 5], "user"), "id 5 at position 1"),
        (lambda: BOOK.nid2localnid([2], 0, "user"), "partition 0"),
        (lambda: BOOK.partid2nids(2, "user"), "no partition 2"),
        (lambda: BOOK.num_nodes("book"), "'book'.*'user', 'item'"),
        (lambda: BOOK.num_edges("hates"), "no edge type 'hates'"),
        (lambda: RowOwners(np.array([0, 7]), topology(0, 0, 1)), r"shape \(2,\) for 2 servers"),
        (
            lambda: Placement(2, topology(0, 0, 1, 2)),
            r"2 part\(s\).*3 servers.*dglx partition DATA --parts 3",
        ),
    ],
)
def test_unknown_types_and_parts_are_refused(ask: Callable[[], object], message: str) -> None:
    with pytest.raises((IndexError, ConfigError), match=message):
        ask()


def test_rows_of_a_server_are_cut_evenly_over_its_ranks() -> None:
    # Server 0: rows 0-6 on ranks 0, 1, 2; server 1: rows 7-9 on ranks 3, 4.
    owners = RowOwners(np.array([0, 7, 10]), Topology(0, 5, (0, 0, 0, 1, 1)))
    assert [owners.get_range(rank) for rank in range(5)] == [(0, 2), (2, 4), (4, 7), (7, 8), (8, 10)]
    assert owners.find_rank(np.arange(10)).tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("bounds", [[0, 0, 1], [0, 1, 1], [0, 0, 0], [0, 3, 3], [0, 2, 9]])
def test_every_row_is_in_the_range_of_its_owner_also_with_fewer_rows_than_ranks(bounds: list[int]) -> None:
    owners = RowOwners(np.array(bounds), Topology(1, 4, (0, 0, 0, 1)))
    ranges = [owners.get_range(rank) for rank in range(4)]
    assert [first for first, _ in ranges] + [bounds[-1]] == [0, *(last for _, last in ranges)]
    owner = owners.find_rank(np.arange(bounds[-1]))
    assert all(ranges[rank][0] <= row < ranges[rank][1] for row, rank in enumerate(owner))
    assert (owner[: bounds[1]] < 3).all()
    assert (owner[bounds[1] :] == 3).all()


def topology(rank: int, *servers: int) -> Topology:
    return Topology(rank=rank, world_size=len(servers), server_of_rank=servers)


def test_five_parts_on_two_servers() -> None:
    placement = Placement(5, topology(1, 0, 1))
    assert list(placement.parts_of_server(0)) == [0, 1, 2]
    assert list(placement.local_parts) == [3, 4]
    offsets = np.array([0, 10, 10, 30, 31, 40])
    assert placement.server_offsets(offsets).tolist() == [0, 30, 40]


def test_requests_spread_over_the_ranks_of_a_server() -> None:
    servers = (0, 0, 0, 1, 1)
    request = [Placement(2, topology(rank, *servers)).serving_ranks[1] for rank in range(3)]
    assert request == [3, 4, 3]
    assert Placement(2, topology(4, *servers)).serving_ranks == (1, 4)
