from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import match_reverse, reverse_edge_ids
from dglx_dist.graph.dist_graph import DistGraph
from tests.dataloading import bonds
from tests.dataloading.bonds import BOUGHT, BUYING, BUYS, HALF, KNOWS
from tests.helpers.ranks import run_ranks

ORDER = np.arange


def test_each_edge_finds_the_edge_back() -> None:
    """0 -> 1, 1 -> 0, 1 -> 2, 2 -> 2: the third has none, a loop is its own reverse."""
    edges = np.array([0, 1, 1, 2]), np.array([1, 0, 2, 2]), ORDER(4)
    assert match_reverse(edges, edges).tolist() == [1, 0, -1, 3]


def test_parallel_edges_are_matched_in_the_order_of_the_source() -> None:
    """Three times 0 -> 1, twice 1 -> 0; the source had the edges in the order 2, 0, 1 and 4, 3."""
    forward = np.array([0, 0, 0]), np.array([1, 1, 1]), np.array([2, 3, 1])
    backward = np.array([1, 1]), np.array([0, 0]), np.array([9, 8])
    assert match_reverse(forward, backward).tolist() == [0, -1, 1]
    assert match_reverse(backward, forward).tolist() == [0, 2]


def test_no_edges() -> None:
    none = np.empty(0, np.int64)
    some = np.array([0]), np.array([1]), ORDER(1)
    assert match_reverse((none, none, none), some).tolist() == []
    assert match_reverse(some, (none, none, none)).tolist() == [-1]


def find(ring: str, shop: str, structure: Any) -> None:
    with start_session(timeout_s=60):
        g = DistGraph(ring, structure=structure)
        ids = torch.arange(g.num_edges())
        found = reverse_edge_ids(g)
        assert torch.equal(found[:], reverse_edge_ids(g, by="half")[:])
        assert torch.equal(g.orig_edge_ids(found[:]), (g.orig_edge_ids(ids) + HALF) % (2 * HALF))
        assert not torch.equal(found[:], (ids + HALF) % (2 * HALF))
        assert "reverse" not in str(sorted(g.edata))
        assert reverse_edge_ids(g).kvstore_key == found.kvstore_key
        g = DistGraph(shop, structure=structure)
        there = reverse_edge_ids(g, "buys", reverse_etype="bought_by", by="position")[:]
        assert torch.equal(there, reverse_edge_ids(g, BUYS, reverse_etype=BOUGHT)[:])
        assert torch.equal(g.orig_edge_ids(there, BOUGHT), g.orig_edge_ids(torch.arange(BUYING), BUYS))
        friends = reverse_edge_ids(g, KNOWS)[:]
        has = friends >= 0
        source, destination = g.find_edges(torch.arange(g.num_edges(KNOWS)), KNOWS)
        pairs = set(zip(source.tolist(), destination.tolist(), strict=True))
        assert has.tolist() == [
            (v, u) in pairs for u, v in zip(source.tolist(), destination.tolist(), strict=True)
        ]
        assert 0 < has.sum() < len(has)


@pytest.mark.parametrize(("ranks", "structure"), [(1, "replicated"), (2, "partitioned"), (3, "replicated")])
def test_reverse_edges_of_a_partitioned_graph(tmp_path: Path, ranks: int, structure: str) -> None:
    ring = bonds.write(bonds.ring(), tmp_path / "ring", 3)
    shop = bonds.write(bonds.shop(), tmp_path / "shop", 3)
    run_ranks(find, ranks, args=(str(ring), str(shop), structure), ranks_per_server=1)


@pytest.mark.parametrize(
    ("etype", "options", "message"),
    [
        (None, {}, "say which with etype="),
        ("sells", {}, "sells"),
        ("buys", {}, "cannot be the reverse"),
        ("buys", {"reverse_etype": "knows"}, "must lead from 'item' to 'user'"),
        ("knows", {"by": "position"}, "edges of two types"),
        ("buys", {"reverse_etype": "bought_by", "by": "half"}, "use by='endpoints'"),
        ("knows", {"by": "name"}, "by='name'"),
    ],
)
def test_what_cannot_be_reversed_is_told(tmp_path: Path, etype: Any, options: Any, message: str) -> None:
    with start_session():
        g = DistGraph(bonds.write(bonds.shop(), tmp_path / "shop", 1))
        with pytest.raises(ConfigError, match=message):
            reverse_edge_ids(g, etype, **options)


def ask_differently(shop: str) -> list[str]:
    with start_session(timeout_s=15):
        g = DistGraph(shop)
        reverse_edge_ids(g, KNOWS)
        one = g.rank() == 1
        said = []
        calls: list[Any] = [
            lambda: reverse_edge_ids(g, "sells" if one else KNOWS),
            lambda: reverse_edge_ids(g, KNOWS, by="name" if one else "endpoints"),
            lambda: reverse_edge_ids(g, BUYS if one else KNOWS, reverse_etype=BOUGHT if one else KNOWS),
        ]
        for call in calls:
            try:
                call()
            except ConfigError as error:
                said.append(str(error))
        g.barrier()
        return said


def test_what_one_rank_asks_wrongly_or_differently_is_an_error_on_all(tmp_path: Path) -> None:
    shop = bonds.write(bonds.shop(), tmp_path / "shop", 2)
    zero, one = run_ranks(ask_differently, 2, args=(str(shop),), ranks_per_server=1)
    assert [text.startswith("rank 1 on ") for text in zero] == [True, True, False]
    assert "sells" in one[0]
    assert "by='name'" in one[1]
    assert all("ask alike on all ranks" in said[2] for said in (zero, one))
