"""Partition books made by hand: their homogeneous ids must run through the partitions, then the types."""

from typing import Any

import dgl.distributed
import pytest
import torch

from dglx_dist.compat.partition_book import RangePartitionBook
from dglx_dist.errors import ConfigError

LIKES = ("user", "likes", "item")
NODES = {"user": [[0, 2], [5, 6]], "item": [[2, 5], [6, 6]]}


@pytest.mark.parametrize(
    ("nodes", "part", "reason"),
    [
        (NODES, 2, "part_id is 2, but there are 2 parts"),
        ({"user": [[0, 2], [5, 6]]}, 0, "the map of 'item' has shape"),
    ],
)
def test_maps_that_do_not_fit_are_refused(nodes: Any, part: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RangePartitionBook(part, 2, nodes, {LIKES: [[0, 4], [4, 5]]}, {"user": 0, "item": 1}, {LIKES: 0})


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [
        # The same numbers for both types, as in DGL's own test.
        ({"user": [[0, 2], [2, 3]], "item": [[0, 3], [3, 3]]}, [[0, 4], [4, 5]]),
        (NODES, [[1, 4], [4, 6]]),
    ],
)
def test_with_other_numberings_ids_of_a_type_are_as_with_dgl(nodes: Any, edges: Any) -> None:
    books = [
        kind(
            0,
            2,
            {ntype: torch.tensor(of) for ntype, of in nodes.items()},
            {LIKES: torch.tensor(edges)},
            {"user": 0, "item": 1},
            {LIKES: 0},
        )
        for kind in (RangePartitionBook, dgl.distributed.graph_partition_book.RangePartitionBook)
    ]
    message = [
        [
            *(book.partid2nids(part, ntype).tolist() for ntype in nodes for part in range(2)),
            *(book.nid2partid(torch.arange(3), ntype).tolist() for ntype in nodes),
            book.nid2localnid(torch.arange(2), 0, "user").tolist(),
            book.eid2partid(torch.arange(5), LIKES).tolist(),
            book.partid2eids(1, LIKES).tolist(),
            (book.local_ntype_offset, book.ntypes, book.canonical_etypes),
        ]
        for book in books
    ]
    assert message[0] == message[1]
    for homogeneous in (
        lambda book: book.map_to_per_ntype([0]),
        lambda book: book.map_to_homo_eid([0], LIKES),
        lambda book: book.partid2nids(0),
    ):
        with pytest.raises(ConfigError, match="homogeneous, but the map of"):
            homogeneous(books[0])
