from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.edge_loader import ExcludeRule, check_reverse, check_rule, open_exclude
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import reverse_edge_ids
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE
from tests.dataloading import bonds
from tests.dataloading.bonds import BOUGHT, BUYS, HALF, KNOWS

REVERSED = np.r_[HALF : 2 * HALF, 0:HALF]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exclude")
    return {
        "ring": bonds.write(bonds.ring(), folder / "ring", 2),
        "shop": bonds.write(bonds.shop(), folder / "shop", 2),
    }


@pytest.fixture
def ring(folders: dict[str, Path]) -> Iterator[DistGraph]:
    with start_session():
        yield DistGraph(folders["ring"])


@pytest.fixture
def shop(folders: dict[str, Path]) -> Iterator[DistGraph]:
    with start_session():
        yield DistGraph(folders["shop"])


def excluded(g: DistGraph, edges: dict[Any, list[int]], **rule: Any) -> dict[Any, list[int]]:
    given = {etype: np.array(ids, np.int64) for etype, ids in edges.items()}
    found = open_exclude(g, ExcludeRule(**rule))(given)
    return {etype: ids.tolist() for etype, ids in found.items()}


def test_self_and_nothing(ring: DistGraph) -> None:
    assert excluded(ring, {EDGE_TYPE: [9, 3]}) == {}
    assert excluded(ring, {EDGE_TYPE: [9, 3]}, exclude="self") == {EDGE_TYPE: [3, 9]}
    assert excluded(ring, {EDGE_TYPE: []}, exclude="self") == {EDGE_TYPE: []}


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, lambda ids: {"_E": ids}])
def test_reverse_ids_from_lists(ring: DistGraph, make: Any) -> None:
    reverse = REVERSED.copy()
    reverse[5] = -1
    rule = {"exclude": "reverse_id", "reverse_eids": make(reverse)}
    assert excluded(ring, {EDGE_TYPE: [130, 3, 10, 5]}, **rule) == {EDGE_TYPE: [3, 5, 10, 123, 130]}


def test_reverse_ids_from_a_distributed_tensor(ring: DistGraph) -> None:
    table = reverse_edge_ids(ring)
    rule = {"exclude": "reverse_id", "reverse_eids": table}
    assert excluded(ring, {EDGE_TYPE: [4]}, **rule) == {EDGE_TYPE: sorted([4, int(table[4])])}


def test_reverse_types_go_through_the_source_order(shop: DistGraph) -> None:
    rule = {"exclude": "reverse_types", "reverse_etypes": {"buys": "bought_by", BOUGHT: "buys"}}
    found = excluded(shop, {BUYS: [8, 2], BOUGHT: [0], KNOWS: []}, **rule)
    places = {
        BUYS: shop.orig_edge_ids(found[BUYS], BUYS).tolist(),
        BOUGHT: shop.orig_edge_ids(found[BOUGHT], BOUGHT).tolist(),
    }
    assert set(places[BUYS]) == set(places[BOUGHT])
    assert {8, 2} < set(found[BUYS])
    assert 0 in found[BOUGHT]
    assert found[KNOWS] == []


def test_a_function_is_called_as_dgl_calls_it(ring: DistGraph, folders: dict[str, Path]) -> None:
    def one(ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(ids, torch.Tensor)
        return torch.cat([ids, ids + 1, ids + 1])

    assert excluded(ring, {EDGE_TYPE: [9, 3]}, exclude=one) == {EDGE_TYPE: [3, 4, 9, 10]}
    assert excluded(ring, {EDGE_TYPE: []}, exclude=one) == {}
    assert excluded(ring, {EDGE_TYPE: [1]}, exclude=lambda _: None) == {}
    with pytest.raises(IndexError, match="id 240"):
        excluded(ring, {EDGE_TYPE: [239]}, exclude=one)


def test_a_function_of_several_types(shop: DistGraph) -> None:
    def several(ids: Any) -> Any:
        assert set(ids) == {BUYS}
        return {"knows": ids[BUYS]}

    assert excluded(shop, {BUYS: [2], KNOWS: []}, exclude=several) == {KNOWS: [2]}
    with pytest.raises(ConfigError, match="several edge types"):
        excluded(shop, {BUYS: [2]}, exclude=lambda ids: ids[BUYS])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"exclude": "both"}, "exclude='both'; choose None, 'self', 'reverse_id', 'reverse_types'"),
        ({"exclude": "reverse_id"}, r"needs reverse_eids=; dx.reverse_edge_ids\(g\)"),
        ({"exclude": "reverse_types"}, "needs reverse_etypes="),
        ({"exclude": "self", "reverse_eids": REVERSED}, "pass exclude='reverse_id'"),
        ({"reverse_etypes": {}}, "pass exclude='reverse_types'"),
        ({"exclude": "reverse_id", "reverse_eids": REVERSED[:-1]}, r"\(239,\); give int64 of shape \(240,\)"),
        ({"exclude": "reverse_id", "reverse_eids": REVERSED.astype(float)}, "are float64"),
        ({"exclude": "reverse_id", "reverse_eids": REVERSED + 1}, "id 240 at position 119"),
        ({"exclude": "reverse_id", "reverse_eids": {"likes": REVERSED}}, "likes"),
        ({"exclude": "reverse_types", "reverse_etypes": {"_E": "_E"}}, "must be another type"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_told(ring: DistGraph, rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rule(ring, ExcludeRule(**rule), [EDGE_TYPE])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"exclude": "reverse_id", "reverse_eids": REVERSED}, "give a dict"),
        ({"exclude": "reverse_types", "reverse_etypes": {"buys": "knows"}}, "from 'item' to 'user'"),
        ({"exclude": "reverse_types", "reverse_etypes": {"bought_by": "buys"}}, "reverse of .*'buys'"),
        ({"exclude": "reverse_types", "reverse_etypes": ["buys"]}, "give {edge type"),
    ],
)
def test_what_cannot_be_honoured_over_types_is_told(shop: DistGraph, rule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rule(shop, ExcludeRule(**rule), [BUYS])


def test_reverse_ids_of_the_unpartitioned_graph_are_found_out(ring: DistGraph) -> None:
    edges = {EDGE_TYPE: np.arange(20)}
    with pytest.raises(ConfigError, match=r"ids change when a graph is partitioned: pass reverse_eids="):
        check_reverse(ring, ExcludeRule(exclude="reverse_id", reverse_eids=REVERSED), edges)
    good = ExcludeRule(exclude="reverse_id", reverse_eids=reverse_edge_ids(ring)[:])
    check_reverse(ring, good, edges)
    check_reverse(ring, ExcludeRule(exclude="self"), edges)
