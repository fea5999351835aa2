from __future__ import annotations

import numpy as np
import pytest
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import PartitionBook

# Two partitions. Users 0,1 | 2,3,4; items 0,1,2 | 3. Homogeneous: u0 u1 i0 i1 i2 | u2 u3 u4 i3.
RATES, SEES = ("user", "rates", "item"), ("user", "sees", "item")
BOOK = PartitionBook(
    {"user": np.array([0, 2, 5]), "item": np.array([0, 3, 4])},
    {RATES: np.array([0, 4, 4]), SEES: np.array([0, 0, 2])},
    partid=1,
)


def test_counts_and_metadata() -> None:
    assert (BOOK.num_partitions(), BOOK.partid) == (2, 1)
    assert BOOK.metadata() == [
        {"machine_id": 0, "num_nodes": 5, "num_edges": 4},
        {"machine_id": 1, "num_nodes": 4, "num_edges": 2},
    ]
    assert (BOOK.num_nodes("user"), BOOK.num_nodes(), BOOK.num_edges("sees")) == (5, 9, 2)


def test_owners_and_local_ids() -> None:
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


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(IndexError, match="id 5 at position 1"):
        BOOK.nid2partid([0, 5], "user")
    with pytest.raises(IndexError, match="partition 0"):
        BOOK.nid2localnid([2], 0, "user")
    with pytest.raises(ConfigError, match="no partition 2"):
        BOOK.partid2nids(2, "user")
    with pytest.raises(ConfigError, match=r"'book'.*'user', 'item'"):
        BOOK.num_nodes("book")
    with pytest.raises(ConfigError, match="no edge type 'hates'"):
        BOOK.num_edges("hates")
