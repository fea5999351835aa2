"""The graph as partitioners see it: flat ids, symmetric edges, weights, induced subgraphs."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.graph_views import (
    SymmetricGraph,
    balance_weights,
    describe,
    first_ids,
    induced_graph,
    symmetrise,
)
from dglx_dist.errors import ConfigError
from dglx_dist.records import RawGraph, SparseRows
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, TWO_TRIANGLES, communities, homogeneous


def test_what_was_told_survives_json() -> None:
    options = PartitionOptions(
        balance=("degree",), tolerance=0.1, target_weights=(1, 2), fast=True, objective="vol"
    )
    description = describe(options, balance_weights(TWO_TRIANGLES, options, 2, None))
    assert json.loads(json.dumps(description)) == {
        "tolerance": {"degree": 0.1},
        "balance": ["degree"],
        "target_weights": [1.0, 2.0],
        "fast": True,
        "objective": "vol",
    }
    assert describe(PartitionOptions(), None) == {"tolerance": {}}


def test_edges_among_the_chosen_nodes_remain() -> None:
    # Keep author 0, papers 0 and 2: writes 0 -> 0, cites 2 -> 0 (now 1 -> 0).
    piece = induced_graph(AUTHORS_AND_PAPERS, np.array([0, 2, 4]), ("nodes",))
    assert piece.num_nodes == {"author": 1, "paper": 2, "venue": 0}
    ends = {t[1]: (src.tolist(), dst.tolist()) for t, (src, dst) in piece.edges.items()}
    assert ends == {"writes": ([0], [0]), "cites": ([1], [0])}


def test_only_the_columns_that_are_weighed_are_copied() -> None:
    graph = homogeneous(3, [], train_mask=np.array([True, False, True]), feat=SPARSE, cost=np.arange(3))
    piece = induced_graph(graph, np.array([1, 2]), ("train",))
    assert list(piece.node_data["_N"]) == ["train_mask"]
    assert piece.node_data["_N"]["train_mask"].tolist() == [False, True]


def test_ids_narrower_than_the_row_of_all_types_do_not_overflow() -> None:
    # 200 + 3 does not fit into int8, as 2**31 + 3 does not fit into int32.
    ends = np.array([0, 3], dtype=np.int8), np.array([1, 2], dtype=np.int8)
    graph = RawGraph(name="g", num_nodes={"a": 200, "b": 4}, edges={("b", "r", "b"): ends})
    piece = induced_graph(graph, np.array([202, 203]), ())
    assert [ids.tolist() for ids in piece.edges[("b", "r", "b")]] == [[1], [0]]


def rows(graph: SymmetricGraph) -> list[dict[int, int]]:
    weights = np.ones(len(graph.indices), int) if graph.edge_weights is None else graph.edge_weights
    return [
        dict(zip(graph.indices[a:b].tolist(), weights[a:b].tolist(), strict=True))
        for a, b in zip(graph.indptr[:-1], graph.indptr[1:], strict=True)
    ]


def test_weights_that_hardly_differ_are_left_out() -> None:
    ring = [(i, (i + 1) % 400) for i in range(400)]
    assert symmetrise(homogeneous(400, [*ring, *ring[:4]])).edge_weights is None
    kept = symmetrise(homogeneous(400, [*ring, *ring[:5]])).edge_weights
    assert kept is not None
    assert sorted(kept.tolist()) == [1] * 790 + [2] * 10


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "graph",
    [
        communities(num_nodes=320),
        AUTHORS_AND_PAPERS,
        homogeneous(4, [(0, 1), (0, 1), (1, 0), (2, 2), (1, 2)]),
    ],
)
def test_parallel_and_opposite_edges_become_a_weight(graph: RawGraph, weighted: bool) -> None:
    first, plain = first_ids(graph), [Counter() for _ in range(graph.total_nodes)]
    for (source, _, destination), (src, dst) in graph.edges.items():
        for u, v in zip((src + first[source]).tolist(), (dst + first[destination]).tolist(), strict=True):
            plain[u][v] += u != v
            plain[v][u] += u != v
    symmetric = symmetrise(graph, weighted=weighted)
    expected = [{v: n if weighted else 1 for v, n in row.items() if n} for row in plain]
    assert rows(symmetric) == expected


def test_node_types_follow_each_other() -> None:
    assert first_ids(AUTHORS_AND_PAPERS) == {"author": 0, "paper": 2, "venue": 5}


def test_each_node_type_is_a_constraint() -> None:
    options = PartitionOptions(balance=("ntype",), tolerance={"ntype": 0.2})
    weights = balance_weights(AUTHORS_AND_PAPERS, options, 2, None)
    assert weights.names == ("ntype:author", "ntype:paper", "ntype:venue")
    assert [c.tolist() for c in weights.columns] == [
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert weights.tolerance.tolist() == [0.2, 0.2, 0.2]


def test_loads_above_their_capacities_are_unmet() -> None:
    graph = homogeneous(4, [], cost=np.array([10, 20, 30, 40]))
    options = PartitionOptions(balance=("nodes", "cost"), tolerance=0.25, target_weights=(3, 1))
    weights = balance_weights(graph, options, 2, None)
    # nodes: shares 3 and 1, one more allowed; cost: shares 75 and 25, 25 % more, or 40 beside a share of 40.
    assert weights.capacities().tolist() == [[4.0, 2.0], [93.75, 50.0]]
    parts = np.array([0, 0, 1, 1], dtype=np.int32)
    assert weights.loads(parts).tolist() == [[2.0, 2.0], [30.0, 70.0]]
    assert weights.find_unmet(parts) == {"cost": 70 / 25}
    assert weights.find_unmet(np.array([0, 0, 0, 1])) == {}


SPARSE = SparseRows(indptr=np.zeros(4, int), indices=np.zeros(0, int), values=np.zeros(0), num_columns=2)


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("cost", np.array([1, -2, 3]), "node 1 of type '_N' has the weight -2"),
        ("cost", np.ones((3, 2), dtype=int), r"int64 of shape \(3, 2\)"),
        ("cost", np.ones(3), "float64"),
        ("cost", SPARSE, r"float64 of shape \(3, 2\)"),
        ("train", None, "no node column 'train_mask'.*none"),
        ("trian", None, "cannot balance 'trian'.*did you mean 'train'"),
        ("degre", None, "cannot balance 'degre'.*did you mean 'degree'"),
        ("coost", np.ones(3, dtype=int), "cannot balance 'coost'.*did you mean 'cost'"),
    ],
)
def test_what_is_no_weight_is_refused(name: str, values: Any, named: str) -> None:
    graph = homogeneous(3, [], **({} if values is None else {"cost": values}))
    with pytest.raises(ConfigError, match=named):
        balance_weights(graph, PartitionOptions(balance=("nodes", name)), 2, None)
