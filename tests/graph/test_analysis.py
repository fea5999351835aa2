"""Graph-wide passes over real ranks: k-hop closures and reverse edges."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.reader import StoredDataset, open_dataset, open_structure
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import match_reverse, measure_expansion, reverse_edge_ids
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.partition_book import Placement
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, Assignment, RawGraph
from tests.dataloading import bonds
from tests.dataloading.bonds import BOUGHT, BUYING, BUYS, HALF, KNOWS
from tests.helpers import refusal, wide
from tests.helpers.ranks import run_ranks
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
    """0 -> 1 -> ... -> 8, on three servers."""
    ids = np.arange(9)
    return write(tmp_path / "line", (ids[:-1], ids[1:]), ids // 3, 3)


def test_factors_of_a_line_match_hand_computed_ones(line: StoredDataset) -> None:
    result = measure_expansion(line, 3, 4)
    # Server 0 has the start of the line; the others take one node more with every hop.
    assert result.nodes.T.tolist() == [[3, 3, 3, 3, 3], [3, 4, 5, 6, 6], [3, 4, 5, 6, 7]]
    # Node 0 has no in-edge, every other one has one.
    assert result.edges.T.tolist() == [[2, 2, 2, 2, 2], [3, 4, 5, 5, 5], [3, 4, 5, 6, 7]]
    assert result.factors[2].tolist() == pytest.approx([1, 5 / 3, 5 / 3])
    assert result.foreign[3].tolist() == [0, 3, 3]
    # Three layers compute 3, 4 and 5 rows where 3 each would do.
    assert result.work[3].tolist() == pytest.approx([1, 12 / 9, 12 / 9])
    assert result.work[0].tolist() == [1, 1, 1]
    assert result.hops == 4


def test_parts_of_one_server_are_counted_together(line: StoredDataset) -> None:
    result = measure_expansion(line, 2, 1)
    # Parts 0 and 1 are one server's.
    assert result.nodes.tolist() == [[6, 3], [6, 4]]
    assert measure_expansion(line, 1, 5).nodes.tolist() == [[9]] * 6


def count_reached(indptr: Array, indices: Array, own: range, hops: int) -> list[tuple[int, int]]:
    """Nodes and in-edges within 0 to ``hops`` hops, the plain way."""
    nodes, result = set(own), []
    for _ in range(hops + 1):
        result.append((len(nodes), sum(int(indptr[node + 1] - indptr[node]) for node in nodes)))
        nodes |= {int(u) for node in nodes for u in indices[indptr[node] : indptr[node + 1]]}
    return result


@pytest.mark.parametrize("parts", [1, 4, 20, *wide(70)])
def test_counts_equal_breadth_first_search(tmp_path: Path, parts: int) -> None:
    """Words of 8, 32 and 64 bits, and more servers than a word has."""
    random = np.random.default_rng(5)
    edges = tuple(random.integers(300, size=(2, 400)))
    dataset = write(tmp_path / "random", (edges[0], edges[1]), random.integers(parts, size=300), parts)
    result = measure_expansion(dataset, parts, 3)
    structure = open_structure(dataset, EDGE_TYPE)
    bounds = Placement(parts, Topology(0, parts, tuple(range(parts)))).server_offsets(
        dataset.manifest.node_offsets[NODE_TYPE]
    )
    for server in range(parts):
        own = range(int(bounds[server]), int(bounds[server + 1]))
        got = list(zip(result.nodes[:, server].tolist(), result.edges[:, server].tolist(), strict=True))
        assert got == count_reached(structure.indptr, structure.indices, own, 3)


def test_a_server_without_nodes_or_edges_has_figures(tmp_path: Path) -> None:
    none = np.zeros(0, dtype=np.int64)
    result = measure_expansion(write(tmp_path / "none", (none, none), np.zeros(4), 2), 2, 2)
    assert result.nodes.tolist() == [[4, 0]] * 3
    assert result.factors.tolist() == [[1, 0]] * 3
    assert result.work.tolist() == [[1, 1]] * 3


def test_invalid_arguments_are_refused(line: StoredDataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hops=-1"):
        measure_expansion(line, 3, -1)
    with pytest.raises(ConfigError, match=r"3 part\(s\) but the run has 4 servers"):
        measure_expansion(line, 4, 1)
    with pytest.raises(ConfigError, match=r"3 node and 5 edge types.*one relation"):
        measure_expansion(open_dataset(hetero.write_parts(tmp_path)), 1, 1)


NONE = np.empty(0, np.int64)
FORWARD = np.array([0, 0, 0]), np.array([1, 1, 1]), np.array([2, 3, 1])
BACKWARD = np.array([1, 1]), np.array([0, 0]), np.array([9, 8])
LOOP = np.array([0, 1, 1, 2]), np.array([1, 0, 2, 2]), np.arange(4)


@pytest.mark.parametrize(
    ("edges", "others", "expected"),
    [
        # 0 -> 1, 1 -> 0, 1 -> 2, 2 -> 2: the third has none, a loop is its own reverse.
        (LOOP, LOOP, [1, 0, -1, 3]),
        # Three times 0 -> 1, twice 1 -> 0; the source had the edges in the order 2, 0, 1 and 4, 3.
        (FORWARD, BACKWARD, [0, -1, 1]),
        (BACKWARD, FORWARD, [0, 2]),
        ((NONE, NONE, NONE), LOOP, []),
        (BACKWARD, (NONE, NONE, NONE), [-1, -1]),
    ],
)
def test_each_edge_finds_the_edge_back_in_source_order(edges: Any, others: Any, expected: list[int]) -> None:
    assert match_reverse(edges, others).tolist() == expected


def find(ring: str, shop: str, structure: Any) -> None:
    with start_session(timeout_s=60):
        g = DistGraph(ring, structure=structure)
        ids = torch.arange(g.num_edges())
        result = reverse_edge_ids(g)
        assert torch.equal(result[:], reverse_edge_ids(g, by="half")[:])
        assert torch.equal(g.orig_edge_ids(result[:]), (g.orig_edge_ids(ids) + HALF) % (2 * HALF))
        assert not torch.equal(result[:], (ids + HALF) % (2 * HALF))
        assert "reverse" not in str(sorted(g.edata))
        assert reverse_edge_ids(g).kvstore_key == result.kvstore_key
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
        etype = BUYS if g.rank() else KNOWS
        message = refusal(lambda: reverse_edge_ids(g, etype, reverse_etype=BOUGHT if g.rank() else KNOWS))
        assert g.session.topology.world_size == 1 or "pass the same arguments on all ranks" in message
        g.barrier()


@pytest.mark.parametrize(("ranks", "structure"), [(1, "replicated"), (2, "partitioned"), (3, "replicated")])
def test_reverse_edges_of_a_partitioned_graph(tmp_path: Path, ranks: int, structure: str) -> None:
    ring = bonds.write(bonds.ring(), tmp_path / "ring", 3)
    shop = bonds.write(bonds.shop(), tmp_path / "shop", 3)
    run_ranks(find, ranks, args=(str(ring), str(shop), structure), ranks_per_server=1)


@pytest.mark.parametrize(
    ("etype", "options", "message"),
    [
        (None, {}, "Choose one with etype="),
        ("sells", {}, "sells"),
        ("buys", {}, "cannot be the reverse"),
        ("buys", {"reverse_etype": "knows"}, "must lead from 'item' to 'user'"),
        ("knows", {"by": "position"}, "edges of two types"),
        ("buys", {"reverse_etype": "bought_by", "by": "half"}, "Use by='endpoints'"),
        ("knows", {"by": "name"}, "by='name'"),
    ],
)
def test_types_without_reverse_are_refused(tmp_path: Path, etype: Any, options: Any, message: str) -> None:
    with start_session():
        g = DistGraph(bonds.write(bonds.shop(), tmp_path / "shop", 1))
        with pytest.raises(ConfigError, match=message):
            reverse_edge_ids(g, etype, **options)
