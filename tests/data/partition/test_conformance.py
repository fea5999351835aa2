"""Promises of every partitioner, tried on every name in the registry."""

import tempfile
from typing import Any

import numpy as np
import pytest

from dglx_dist.data.partition.balance import measure
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.partition.graph_views import balance_weights
from dglx_dist.records import Assignment, RawGraph
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, TWO_TRIANGLES, communities, flat, homogeneous
from tests.helpers import wide

every_partitioner = pytest.mark.parametrize("name", PARTITIONERS.names())
GRAPHS = {
    "two_triangles": TWO_TRIANGLES,
    "heterogeneous": AUTHORS_AND_PAPERS,
    "no_edges": homogeneous(7, []),
    "isolated": homogeneous(9, [(0, 1), (1, 0)]),
    "loops_and_parallel": homogeneous(8, [(0, 0), (1, 1), (3, 4), (3, 4), (4, 3)]),
    "empty": homogeneous(0, []),
    "communities": communities(num_nodes=400),
}


def assign(name: str, graph: RawGraph, num_parts: int, seed: int = 0, **options: Any) -> Assignment:
    """Give each method the least that it needs to be told, and ``options``."""
    if name == "file":
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            np.save(file, np.arange(graph.total_nodes) % num_parts)
            file.flush()
            options["file"] = file.name
            return PARTITIONERS.get(name)(PartitionOptions(**options)).assign(graph, num_parts, seed)
    if name == "hierarchical":
        options["servers"] = 2 if num_parts % 2 == 0 else 1
    return PARTITIONERS.get(name)(PartitionOptions(**options)).assign(graph, num_parts, seed)


def those_that_honour(*fields: str) -> list[str]:
    return [name for name in PARTITIONERS.names() if PARTITIONERS.get(name).honours >= {*fields}]


@every_partitioner
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("num_parts", [1, 3, 70, *wide(2, 4)])
def test_every_node_has_one_owner_and_parts_are_even(name: str, graph: RawGraph, num_parts: int) -> None:
    assignment = assign(name, graph, num_parts)
    assert assignment.num_parts == num_parts
    assert assignment.method == name
    assert {t: len(p) for t, p in assignment.part_of.items()} == dict(graph.num_nodes)
    assert all(p.dtype == np.int32 for p in assignment.part_of.values())
    assert set(flat(assignment.part_of)) <= set(range(num_parts))
    check_balance(assignment, graph)


def check_balance(assignment: Assignment, graph: RawGraph) -> None:
    num_parts, stated = assignment.num_parts, assignment.parameters["tolerance"]
    assert isinstance(stated, dict)
    assert "missed" not in assignment.parameters
    if stated:
        weights = balance_weights(graph, PartitionOptions(), num_parts, None)
        assert list(stated) == list(weights.names) == ["nodes"]
        sizes = np.bincount(np.array(flat(assignment.part_of), dtype=int), minlength=num_parts)
        # A share of 2.33 nodes cannot be met better than by 2 and 3.
        share = graph.total_nodes / num_parts
        assert sizes.max() <= max(share * (1 + stated["nodes"]), share + 1)


@pytest.mark.parametrize("name", those_that_honour("balance", "tolerance"))
@pytest.mark.parametrize("balance", ["nodes", "degree"])
@pytest.mark.parametrize("tolerance", [0.01, 0.2])
def test_the_tolerance_holds(name: str, balance: str, tolerance: float) -> None:
    graph = communities()
    quality = measure(graph, assign(name, graph, 4, balance=(balance,), tolerance=tolerance))
    assert quality.balance[balance] <= 1 + tolerance + 0.01  # a part may end one node of 20 in-edges above
    assert quality.missed == {}


@pytest.mark.parametrize("name", those_that_honour("target_weights"))
def test_unequal_machines_get_unequal_parts(name: str) -> None:
    graph = communities()
    options = {"tolerance": 0.02} if name in those_that_honour("tolerance") else {}
    sizes = np.array(measure(graph, assign(name, graph, 2, target_weights=(3, 1), **options)).num_nodes)
    assert (sizes <= np.array([1530, 510])).all()


@every_partitioner
def test_same_seed_same_answer_and_the_graph_is_left_alone(name: str) -> None:
    graph, untouched = communities(), communities()
    first, second = (flat(assign(name, graph, 4, seed=7).part_of) for _ in range(2))
    assert first == second
    for edge_type, ends in untouched.edges.items():
        assert all((a == b).all() for a, b in zip(ends, graph.edges[edge_type], strict=True))


@pytest.mark.parametrize("name", sorted({*PARTITIONERS.names()} - {"contiguous", "feature", "file", "hash"}))
def test_another_seed_gives_another_answer(name: str) -> None:
    graph = communities()
    assert flat(assign(name, graph, 4, seed=7).part_of) != flat(assign(name, graph, 4, seed=8).part_of)


@pytest.mark.parametrize("name", ["metis", "kaminpar", "hierarchical"])
def test_only_the_bridge_is_cut(name: str) -> None:
    # 20 in each clique and one edge between them: any other even split cuts more.
    cliques = [(a + s, b + s) for s in (0, 20) for a in range(20) for b in range(20) if a != b]
    graph = homogeneous(40, [*cliques, (3, 27)])
    assert measure(graph, assign(name, graph, 2)).cut_edges == 1


SCATTERING = ("random", "hash", "feature")
"""Methods that place neighbours independently of each other."""


@pytest.mark.parametrize("name", sorted({*PARTITIONERS.names()} - {"contiguous", "file"}))
def test_remote_neighbours_are_fewer_than_at_random_unless_it_scatters(name: str) -> None:
    """Section 1.6, invariant 8: rho of random is (P - 1) / P, and every real method is far below it."""
    graph = communities()
    edge_cut = measure(graph, assign(name, graph, 4)).edge_cut
    if name in SCATTERING:
        assert edge_cut == pytest.approx(3 / 4, abs=0.01)
    else:
        bar = 0.6 if name in ("metis", "kaminpar", "hierarchical", "ldg", "fennel") else 0.8
        assert edge_cut < bar * 3 / 4
