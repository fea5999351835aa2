import numpy as np
import pytest

from dglx_dist.data.partition.balance import measure
from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.hierarchical import Hierarchical
from dglx_dist.errors import ConfigError
from dglx_dist.records import NODE_TYPE, Assignment
from tests.data.partition.graphs import TWO_TRIANGLES, communities, flat, homogeneous


def over_servers(assignment: Assignment, workers: int) -> Assignment:
    parts = {t: (p // workers).astype(np.int32) for t, p in assignment.part_of.items()}
    return Assignment(num_parts=assignment.num_parts // workers, part_of=parts, method="m", seed=0)


def test_workers_of_one_server_have_neighbouring_numbers() -> None:
    # Two pairs of cliques: the clusters of a pair are joined by many edges, the pairs by one.
    cliques = [(a + s, b + s) for s in (0, 10, 20, 30) for a in range(10) for b in range(a)]
    joins = [(a + s, a + s + 10) for s in (0, 20) for a in range(10)]
    graph = homogeneous(40, [*cliques, *joins, (9, 20)])
    assignment = Hierarchical(PartitionOptions(servers=2)).assign(graph, 4, 0)
    parts = flat(assignment.part_of)
    assert [len(set(parts[s : s + 10])) for s in (0, 10, 20, 30)] == [1, 1, 1, 1]
    assert measure(graph, over_servers(assignment, 2)).cut_edges == 1
    assert assignment.parameters["workers"] == 2


@pytest.mark.parametrize("inner", ["metis", "kaminpar", "ldg", "random", "hash"])
def test_any_inner_method(inner: str) -> None:
    graph = communities()
    options = PartitionOptions(servers=2, workers=3, inner=inner)
    assignment = Hierarchical(options).assign(graph, 6, 0)
    assert set(flat(assignment.part_of)) == set(range(6))
    promised = {} if inner == "hash" else {"nodes": 0.05}
    assert assignment.parameters["tolerance"] == promised
    assert "missed" not in assignment.parameters


def test_the_border_between_servers_is_cut_less_than_with_the_parts_dealt_out_otherwise() -> None:
    graph = communities()
    found = Hierarchical(PartitionOptions(servers=2)).assign(graph, 8, 0)
    mixed = {NODE_TYPE: np.array([0, 4, 1, 5, 2, 6, 3, 7], dtype=np.int32)[found.part_of[NODE_TYPE]]}
    other = Assignment(num_parts=8, part_of=mixed, method="m", seed=0)
    border, border_otherwise = (measure(graph, over_servers(each, 4)).edge_cut for each in (found, other))
    assert border < border_otherwise


def test_degree_counts_edges_from_other_servers_too() -> None:
    graph = communities(inside=0.5)
    options = PartitionOptions(servers=2, balance=("nodes", "degree", "train"))
    quality = measure(graph, Hierarchical(options).assign(graph, 4, 0))
    assert all(quality.balance[c] <= 1.05 + 1e-9 for c in options.balance)


def test_unequal_machines() -> None:
    graph = communities()
    options = PartitionOptions(servers=2, target_weights=(3, 3, 1, 1))
    sizes = measure(graph, Hierarchical(options).assign(graph, 4, 0)).num_nodes
    assert sizes == pytest.approx((750, 750, 250, 250), rel=0.12)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (PartitionOptions(), "needs the number of servers"),
        (PartitionOptions(servers=4), "6 parts are not 4 servers x 1 workers"),
        (PartitionOptions(servers=2, workers=2), "6 parts are not 2 servers x 2 workers = 4"),
        (PartitionOptions(servers=2, inner="hierarchical"), "cannot use 'hierarchical'"),
        (PartitionOptions(servers=2, inner="ldg", fast=True), "Ldg does not support fast"),
    ],
)
def test_what_does_not_fit_is_refused(options: PartitionOptions, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Hierarchical(options).assign(TWO_TRIANGLES, 6, 0)
