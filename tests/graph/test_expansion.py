"""Closures on a line 0 -> 1 -> ... -> 8 of three servers, and beside plain breadth-first search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.reader import StoredDataset, open_dataset, open_structure
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import Expansion, measure_expansion
from dglx_dist.graph.partition_book import Placement
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, Assignment, RawGraph
from tests.helpers import wide
from tests.training import hetero


def write(folder: Path, edges: tuple[Array, Array], part_of: Array, parts: int) -> StoredDataset:
    graph = RawGraph(name="drawn", num_nodes={NODE_TYPE: len(part_of)}, edges={EDGE_TYPE: edges})
    assignment = Assignment(
        num_parts=parts, part_of={NODE_TYPE: part_of.astype(np.int32)}, method="test", seed=0
    )
    write_dataset(graph, assignment, folder)
    return open_dataset(folder)


@pytest.fixture
def line(tmp_path: Path) -> StoredDataset:
    ids = np.arange(9)
    return write(tmp_path / "line", (ids[:-1], ids[1:]), ids // 3, 3)


def test_a_line_by_hand(line: StoredDataset) -> None:
    found = measure_expansion(line, 3, 4)
    # Server 0 has the start of the line; the others take one node more with every hop.
    assert found.nodes.T.tolist() == [[3, 3, 3, 3, 3], [3, 4, 5, 6, 6], [3, 4, 5, 6, 7]]
    # Node 0 has no in-edge, every other one has one.
    assert found.edges.T.tolist() == [[2, 2, 2, 2, 2], [3, 4, 5, 5, 5], [3, 4, 5, 6, 7]]
    assert found.factors[2].tolist() == pytest.approx([1, 5 / 3, 5 / 3])
    assert found.foreign[3].tolist() == [0, 3, 3]
    # Three layers compute 3, 4 and 5 rows where 3 each would do.
    assert found.work[3].tolist() == pytest.approx([1, 12 / 9, 12 / 9])
    assert found.work[0].tolist() == [1, 1, 1]
    assert found.hops == 4


def test_servers_of_several_parts(line: StoredDataset) -> None:
    found = measure_expansion(line, 2, 1)
    # Parts 0 and 1 are one server's.
    assert found.nodes.tolist() == [[6, 3], [6, 4]]
    assert measure_expansion(line, 1, 5).nodes.tolist() == [[9]] * 6


def reached(indptr: Array, indices: Array, own: range, hops: int) -> list[tuple[int, int]]:
    """Nodes and in-edges within 0 to ``hops`` hops, the plain way."""
    nodes, found = set(own), []
    for _ in range(hops + 1):
        found.append((len(nodes), sum(int(indptr[node + 1] - indptr[node]) for node in nodes)))
        nodes |= {int(u) for node in nodes for u in indices[indptr[node] : indptr[node + 1]]}
    return found


@pytest.mark.parametrize("parts", [1, 4, 20, *wide(70)])
def test_it_is_breadth_first_search(tmp_path: Path, parts: int) -> None:
    """Words of 8, 32 and 64 bits, and more servers than a word has."""
    random = np.random.default_rng(5)
    edges = tuple(random.integers(300, size=(2, 400)))
    dataset = write(tmp_path / "random", (edges[0], edges[1]), random.integers(parts, size=300), parts)
    found = measure_expansion(dataset, parts, 3)
    whole = open_structure(dataset, EDGE_TYPE)
    bounds = Placement(parts, Topology(0, parts, tuple(range(parts)))).server_offsets(
        dataset.manifest.node_offsets[NODE_TYPE]
    )
    for server in range(parts):
        own = range(int(bounds[server]), int(bounds[server + 1]))
        got = list(zip(found.nodes[:, server].tolist(), found.edges[:, server].tolist(), strict=True))
        assert got == reached(whole.indptr, whole.indices, own, 3)


def test_a_server_without_nodes_or_edges_has_figures(tmp_path: Path) -> None:
    none = np.zeros(0, dtype=np.int64)
    found = measure_expansion(write(tmp_path / "none", (none, none), np.zeros(4), 2), 2, 2)
    assert found.nodes.tolist() == [[4, 0]] * 3
    assert found.factors.tolist() == [[1, 0]] * 3
    assert found.work.tolist() == [[1, 1]] * 3


def test_refusals(line: StoredDataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hops=-1"):
        measure_expansion(line, 3, -1)
    with pytest.raises(ConfigError, match=r"3 part\(s\) but the run has 4 servers"):
        measure_expansion(line, 4, 1)
    with pytest.raises(ConfigError, match=r"3 node and 5 edge types.*one relation"):
        measure_expansion(open_dataset(hetero.write_parts(tmp_path)), 1, 1)


def test_figures_are_those_of_the_record() -> None:
    found = Expansion(nodes=np.array([[2, 4], [6, 4]]), edges=np.array([[1, 0], [3, 0]]))
    assert found.factors.tolist() == [[1, 1], [3, 1]]
    assert found.foreign.tolist() == [[0, 0], [4, 0]]
    assert found.work.tolist() == [[1, 1], [1, 1]]
