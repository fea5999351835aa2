"""Partition books made by hand: ids run through the partitions, and in each through the types."""

from __future__ import annotations

from typing import Any

import pytest

from dglx_dist.compat.partition_book import RangePartitionBook
from dglx_dist.errors import ConfigError

LIKES = ("user", "likes", "item")
NODES = {"user": [[0, 2], [5, 6]], "item": [[2, 5], [6, 6]]}


def book(nodes: dict[str, Any], part: int = 0, **changes: Any) -> RangePartitionBook:
    edges = changes.get("edges", {LIKES: [[0, 4], [4, 5]]})
    return RangePartitionBook(part, 2, nodes, edges, {"user": 0, "item": 1}, {LIKES: 0})


def test_homogeneous_ids_are_those_of_the_maps() -> None:
    made = book(NODES, part=1)
    assert made.map_to_homo_nid([0, 1, 2], "user").tolist() == [0, 1, 5]
    assert made.map_to_homo_nid([0, 1, 2], "item").tolist() == [2, 3, 4]
    assert [one.tolist() for one in made.map_to_per_ntype([5, 2])] == [[0, 1], [2, 0]]
    assert (made.local_ntype_offset, made.local_etype_offset) == ([0, 1, 1], [0, 1])


@pytest.mark.parametrize(
    ("nodes", "part", "changes", "reason"),
    [
        (NODES, 2, {}, "part_id is 2; there are 2 parts"),
        ({"user": [[0, 2], [5, 6]]}, 0, {}, "the map of 'item' has shape"),
        # The users of both partitions before the items.
        ({"user": [[0, 2], [2, 3]], "item": [[3, 6], [6, 6]]}, 0, {}, "must be numbered partition by"),
        (NODES, 0, {"edges": {LIKES: [[1, 4], [4, 5]]}}, "must be numbered partition by"),
    ],
)
def test_other_numberings_are_refused(nodes: Any, part: int, changes: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        book(nodes, part, **changes)
