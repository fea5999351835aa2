import json

import numpy as np
import pytest

from dglx_dist.data.partition.balance import measure
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.errors import ConfigError
from dglx_dist.records import NODE_TYPE, Assignment, RawGraph
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, TWO_TRIANGLES, communities, homogeneous


def owners(graph: RawGraph, *parts: list[int], num_parts: int = 2, **parameters: object) -> Assignment:
    arrays = [np.array(p, dtype=np.int32) for p in parts]
    part_of = dict(zip(graph.num_nodes, arrays, strict=True))
    return Assignment(num_parts=num_parts, part_of=part_of, method="mine", seed=0, parameters=parameters)


def test_the_bridge_between_two_triangles() -> None:
    quality = measure(TWO_TRIANGLES, owners(TWO_TRIANGLES, [0, 0, 0, 1, 1, 1]))
    assert quality.num_nodes == (3, 3)
    assert quality.num_edges == (3, 4)  # 2 -> 3 belongs to the owner of 3
    assert (quality.cut_edges, quality.edge_cut) == (1, 1 / 7)
    assert quality.remote_fraction == (0.0, 0.25)
    assert quality.halo_nodes == (0, 1)
    assert quality.halo_factor == (0.0, 1 / 3)
    assert quality.replication_factor == 1 + 1 / 6
    assert quality.balance == {"nodes": 1.0, "degree": 4 / 3.5}


def test_a_source_read_twice_is_one_halo_node() -> None:
    graph = homogeneous(4, [(0, 1), (0, 2), (0, 2), (0, 3), (3, 3)])
    quality = measure(graph, owners(graph, [0, 1, 1, 2], num_parts=4))
    assert quality.halo_nodes == (0, 1, 1, 0)
    assert quality.cut_edges == 4
    assert quality.halo_factor == (0.0, 0.5, 1.0, 0.0)


def test_node_types_do_not_mix() -> None:
    # authors 0 | 1, papers 0 1 | 2, venue with part 0: only paper 2 -> paper 0 crosses.
    quality = measure(AUTHORS_AND_PAPERS, owners(AUTHORS_AND_PAPERS, [0, 1], [0, 0, 1], [0]))
    assert (quality.cut_edges, quality.halo_nodes) == (1, (1, 0))
    assert quality.balance["ntype:author"] == 1.0
    assert quality.balance["ntype:paper"] == pytest.approx(4 / 3)
    assert quality.balance["ntype:venue"] == 2.0


def test_shares_are_what_was_asked_for() -> None:
    quality = measure(TWO_TRIANGLES, owners(TWO_TRIANGLES, [0, 0, 0, 0, 1, 1], target_weights=[2.0, 1.0]))
    assert quality.balance["nodes"] == pytest.approx(1.0)


@pytest.mark.parametrize("num_parts", [3, 64, 65, 150])
def test_many_parts_agree_with_the_plain_way(num_parts: int) -> None:
    graph = communities(num_nodes=320)
    assignment = PARTITIONERS.get("random")(PartitionOptions()).assign(graph, num_parts, 0)
    part = assignment.part_of[NODE_TYPE]
    ((src, dst),) = graph.edges.values()
    crossing = part[src] != part[dst]
    pairs = set(zip(part[dst][crossing].tolist(), src[crossing].tolist(), strict=True))
    quality = measure(graph, assignment)
    assert quality.cut_edges == crossing.sum()
    assert list(quality.halo_nodes) == [sum(p == q for p, _ in pairs) for q in range(num_parts)]


def test_json_has_everything() -> None:
    quality = measure(TWO_TRIANGLES, owners(TWO_TRIANGLES, [0, 0, 0, 1, 1, 1], tolerance={"nodes": 0.05}))
    loaded = json.loads(json.dumps(quality.to_json()))
    assert loaded["halo_factor"] == [0.0, 1 / 3]
    assert loaded["tolerance"] == {"nodes": 0.05}
    assert loaded["cut_edges"] == 1


def test_a_graph_without_edges_cuts_nothing() -> None:
    quality = measure(homogeneous(3, []), owners(homogeneous(3, []), [0, 1, 1]))
    assert (quality.edge_cut, quality.replication_factor, quality.remote_fraction) == (0.0, 1.0, (0.0, 0.0))


@pytest.mark.parametrize(
    ("parts", "named"),
    [([0, 1], "2 owners for the 6 nodes"), ([0, 0, 0, 1, 1, 2], r"outside 0..1: they span 0..2")],
)
def test_owners_of_another_graph_are_refused(parts: list[int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        measure(TWO_TRIANGLES, owners(TWO_TRIANGLES, parts))
