"""Parts for servers, then for the ranks of each."""

from dataclasses import replace

import numpy as np
import pytest

from dglx_dist.data.partition.balance import measure
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.partition.hierarchical import (
    TRAINER_ID,
    Hierarchical,
    assign_two_levels,
    with_trainer_ids,
)
from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, RawGraph
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, TWO_TRIANGLES, communities, flat, homogeneous


def test_workers_of_one_server_have_neighbouring_numbers() -> None:
    # Two pairs of cliques: the clusters of a pair are joined by many edges, the pairs by one.
    cliques = [(a + s, b + s) for s in (0, 10, 20, 30) for a in range(10) for b in range(a)]
    joins = [(a + s, a + s + 10) for s in (0, 20) for a in range(10)]
    graph = homogeneous(40, [*cliques, *joins, (9, 20)])
    split = assign_two_levels(graph, "kaminpar", PartitionOptions(), (2, 2), 0)
    workers = flat(split.trainers.part_of)
    assert [len(set(workers[s : s + 10])) for s in (0, 10, 20, 30)] == [1, 1, 1, 1]
    assert measure(graph, split.parts).cut_edges == 1
    # The workers follow from the parts and the servers.
    assignment = Hierarchical(PartitionOptions(servers=2)).assign(graph, 4, 0)
    assert (flat(assignment.part_of), assignment.parameters["workers"]) == (workers, 2)


AT_ONE_LEVEL_ONLY = {"hierarchical", "file"}


def make_skewed_graph() -> RawGraph:
    """All training nodes in a quarter of the communities; in-degrees that differ by a factor of 30."""
    graph = communities(num_nodes=4000, num_blocks=32)
    rng = np.random.default_rng(5)
    src, dst = graph.edges[EDGE_TYPE]
    heavy = rng.integers(0, 4000, 8000), rng.integers(0, 200, 8000)
    edges = np.concatenate([src, heavy[0]]), np.concatenate([dst, heavy[1]])
    return replace(graph, edges={EDGE_TYPE: edges})


@pytest.mark.parametrize("method", sorted(set(PARTITIONERS.names()) - AT_ONE_LEVEL_ONLY))
def test_every_method_cuts_parts_into_their_trainers(method: str) -> None:
    graph = communities()
    split = assign_two_levels(graph, method, PartitionOptions(), (3, 2), 1)
    parts, trainers = split.parts.part_of[NODE_TYPE], split.trainers.part_of[NODE_TYPE]
    assert set(trainers.tolist()) == set(range(6))
    assert np.array_equal(parts, trainers // 2)
    assert split.parts.num_parts == 3
    assert split.parts.method == method
    assert split.parts.parameters["trainers_per_part"] == 2
    assert split.parts.parameters["tolerance"] == ({} if method in ("hash", "feature") else {"nodes": 0.05})
    assert measure(graph, split.parts).missed == {}


@pytest.mark.parametrize("tolerance", [0.05, 0.1])
def test_every_constraint_holds_at_both_levels_of_a_skewed_graph(tolerance: float) -> None:
    graph = make_skewed_graph()
    balance = ("nodes", "train", "val", "test", "degree")
    options = PartitionOptions(balance=balance, tolerance=tolerance)
    plain = measure(graph, PARTITIONERS.get("metis")(PartitionOptions()).assign(graph, 4, 0))
    assert plain.balance["train"] > 1.5
    split = assign_two_levels(graph, "metis", options, (4, 2), 0)
    for level in (split.parts, split.trainers):
        quality = measure(graph, level)
        assert quality.missed == {}
        assert {name: quality.balance[name] <= 1 + tolerance + 1e-9 for name in balance} == dict.fromkeys(
            balance, True
        )
    assert measure(graph, split.parts).edge_cut < 0.6


def test_in_edges_of_every_type_are_balanced_at_both_levels() -> None:
    # Users 0..99 rate, users 100..199 buy: parts even in nodes alone may get all of one relation.
    rng = np.random.default_rng(0)
    near = rng.integers(-5, 6, 4000)
    user = np.repeat(np.arange(200), 20)
    item = (user + near) % 200
    rates = user < 100
    graph = RawGraph(
        name="shop",
        num_nodes={"user": 200, "item": 200},
        edges={
            ("user", "rates", "item"): (user[rates], item[rates]),
            ("user", "buys", "item"): (user[~rates], item[~rates]),
        },
    )
    options = PartitionOptions(balance=("ntype", "etype"), tolerance=0.1)
    split = assign_two_levels(graph, "metis", options, (2, 2), 0)
    constraints = ("ntype:user", "ntype:item", "etype:user.rates.item", "etype:user.buys.item")
    for level in (split.parts, split.trainers):
        parts = flat(level.part_of)
        assert set(parts) == set(range(level.num_parts))
        quality = measure(graph, replace(level, parameters={"balance": ["ntype", "etype"]}))
        for name in constraints:
            # A node is not divided: one item has up to 31 in-edges of a type.
            share = 2000 / level.num_parts if name.startswith("etype") else 200 / level.num_parts
            heaviest = 31 if name.startswith("etype") else 1
            assert quality.balance[name] <= max(1.1, 1 + heaviest / share) + 1e-9, (name, quality.balance)


def test_shares_of_unequal_machines_are_divided_evenly_inside() -> None:
    graph = communities()
    split = assign_two_levels(graph, "metis", PartitionOptions(target_weights=(3, 1)), (2, 2), 0)
    assert measure(graph, split.parts).num_nodes == pytest.approx((1500, 500), rel=0.12)
    assert measure(graph, split.trainers).num_nodes == pytest.approx((750, 750, 250, 250), rel=0.15)


def test_edges_have_the_trainer_of_their_destination() -> None:
    graph = AUTHORS_AND_PAPERS
    split = assign_two_levels(graph, "random", PartitionOptions(), (2, 2), 0)
    marked = with_trainer_ids(graph, split.trainers)
    papers = split.trainers.part_of["paper"]
    assert np.array_equal(marked.node_data["paper"][TRAINER_ID], papers)
    assert marked.node_data["venue"][TRAINER_ID].shape == (1,)
    # Paper 2 cites paper 0.
    assert marked.edge_data["paper", "cites", "paper"][TRAINER_ID].tolist() == [papers[0]]
    assert marked.edge_data["author", "writes", "paper"][TRAINER_ID].tolist() == papers.tolist()
    assert TRAINER_ID not in graph.node_data.get("paper", {})


def test_a_column_of_that_name_is_not_overwritten() -> None:
    graph = homogeneous(4, [(0, 1)], trainer_id=np.zeros(4))
    with pytest.raises(ConfigError, match="already has 'trainer_id' as data of '_N'"):
        assign_two_levels(graph, "random", PartitionOptions(), (2, 1), 0)


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        # Of six parts:
        ("", PartitionOptions(), "needs the number of servers"),
        ("", PartitionOptions(servers=4), "4 servers with 1 workers each need 4 parts, not 6"),
        ("", PartitionOptions(servers=2, workers=2), "2 servers with 2 workers each need 4 parts, not 6"),
        ("", PartitionOptions(servers=2, inner="hierarchical"), "cannot use 'hierarchical'"),
        ("", PartitionOptions(servers=2, inner="ldg", fast=True), "Ldg does not support fast"),
        # Of two parts of two trainers:
        ("hierarchical", PartitionOptions(), "cannot use 'hierarchical'"),
        ("file", PartitionOptions(), "cannot use 'file'"),
        ("metis", PartitionOptions(servers=2), "already need two levels"),
        ("metis", PartitionOptions(target_weights=(1, 2, 3)), "target_weights has 3 values for 2 parts"),
        ("random", PartitionOptions(balance=("train",)), "Random does not support balance"),
    ],
)
def test_what_does_not_fit_is_refused(method: str, options: PartitionOptions, named: str) -> None:
    def assign() -> object:
        if method:
            return assign_two_levels(communities(), method, options, (2, 2), 0)
        return Hierarchical(options).assign(TWO_TRIANGLES, 6, 0)

    with pytest.raises(ConfigError, match=named):
        assign()
