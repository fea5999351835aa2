"""Partition books made by hand are refused where ids do not run through the partitions, then the types."""

from __future__ import annotations

from typing import Any

import pytest

from dglx_dist.compat.partition_book import RangePartitionBook
from dglx_dist.errors import ConfigError

LIKES = ("user", "likes", "item")
NODES = {"user": [[0, 2], [5, 6]], "item": [[2, 5], [6, 6]]}


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
    edges = changes.get("edges", {LIKES: [[0, 4], [4, 5]]})
    with pytest.raises(ConfigError, match=reason):
        RangePartitionBook(part, 2, nodes, edges, {"user": 0, "item": 1}, {LIKES: 0})
