"""The sampling kernels alone: fan-outs, numbering of nodes, typed relations, reused workspaces."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from dglx_dist.dataloading.kernels import NodeTable, Schema, ThreadTable, make_relations
from dglx_dist.errors import ConfigError
from dglx_dist.keyed_random import Csc
from tests.dataloading.graphs import HASHED, csc_from, edges_of_hop, random_csc, sample

# 0 <- 1, 2    1 <- 3    2 <- 3, 4    3 <-    4 <- 0
DIAMOND = csc_from([[1, 2], [3], [3, 4], [], [0]])


def test_two_full_hops_match_hand_computed_edges() -> None:
    batch = sample(DIAMOND, [0], [-1, -1])
    assert batch.nodes.tolist() == [0, 1, 2, 3, 4]
    assert batch.node_ends[:, 0].tolist() == [1, 3, 5]
    assert edges_of_hop(batch, 0) == [(1, 0, 0), (2, 0, 1)]
    assert edges_of_hop(batch, 1) == [(1, 0, 0), (2, 0, 1), (3, 1, 2), (3, 2, 3), (4, 2, 4)]


@pytest.mark.parametrize(
    ("seeds", "fanouts"), [([3, 0, 7], [3, 4]), (range(50), [3, 5]), ([9, 4, 100], [5] * 3)]
)
def test_edges_are_in_edges_as_many_as_the_fanout_lets(seeds: Sequence[int], fanouts: list[int]) -> None:
    """And destinations are a prefix of sources, which are distinct."""
    csc = random_csc(200, 6)
    batch = sample(csc, np.asarray(seeds), fanouts)
    for hop, fanout in enumerate(reversed(fanouts)):
        edges = edges_of_hop(batch, hop)
        assert len({edge for _, _, edge in edges}) == len(edges)
        for source, destination, edge in edges:
            assert csc.indptr[destination] <= edge < csc.indptr[destination + 1]
            assert csc.indices[edge] == source
        drawn = Counter(destination for _, destination, _ in edges)
        for node in batch.nodes[: batch.node_ends[hop, 0]].tolist():
            assert drawn[node] == min(fanout, csc.indptr[node + 1] - csc.indptr[node])
    assert batch.nodes[: len(seeds)].tolist() == list(seeds)
    assert len(set(batch.nodes.tolist())) == len(batch.nodes) == batch.node_ends[-1, 0]
    assert (np.diff(batch.node_ends[:, 0]) >= 0).all()


def test_epochs_and_hops_draw_differently() -> None:
    csc = csc_from([list(range(1000)), *[[]] * 999])
    first = sample(csc, [0], [10, 10])
    assert edges_of_hop(first, 0) != edges_of_hop(first, 1)[:10]
    later = sample(csc, [0], [10, 10], epoch=1)
    assert edges_of_hop(first, 0) != edges_of_hop(later, 0)


@pytest.mark.parametrize("fanouts", [[-1, -1], [4, 3, 5]])
def test_hashed_numbering_is_the_direct_one(fanouts: list[int]) -> None:
    csc = random_csc(500, 8)
    seeds = np.arange(0, 500, 11)
    small = ThreadTable(HASHED)
    # So small that it grows within the batch.
    small.keep(NodeTable(np.zeros(64, np.uint32), np.empty(64, np.int64), 1))
    direct = sample(csc, seeds, fanouts, workspace=ThreadTable(500))
    hashed = sample(csc, seeds, fanouts, workspace=small)
    assert ThreadTable(HASHED).table.slots.nbytes < 1 << 20
    assert len(small.table.keys) >= 2 * len(hashed.nodes)
    for array, reference in zip(direct, hashed, strict=True):
        assert array.tolist() == reference.tolist()


CSC = random_csc(300, 5)


@pytest.mark.parametrize("size", [300, HASHED])
def test_used_workspace_samples_the_same_as_a_new_one(size: int) -> None:
    used = ThreadTable(size)
    for epoch in range(20):
        seeds = np.arange(epoch, 300, 17)
        again = sample(CSC, seeds, [4, 4], epoch=epoch, workspace=used)
        fresh = sample(CSC, seeds, [4, 4], epoch=epoch)
        assert again.nodes.tolist() == fresh.nodes.tolist()
        assert again.sources.tolist() == fresh.sources.tolist()


@pytest.mark.parametrize("size", [300, HASHED])
def test_numbers_that_would_overflow_start_again(size: int) -> None:
    workspace = ThreadTable(size)
    expected = sample(CSC, [1, 2, 3], [4], workspace=workspace)
    workspace.keep(workspace.table._replace(base=(1 << 31) - 2))
    for _ in range(3):
        again = sample(CSC, [1, 2, 3], [4], workspace=workspace)
        assert again.sources.tolist() == expected.sources.tolist()
    assert workspace.table.base < 1000


def test_a_refused_batch_leaves_no_trace() -> None:
    workspace = ThreadTable(300)
    with pytest.raises(ConfigError, match=r"node 7 more than once \(3 seeds, 2 distinct\)"):
        sample(CSC, [7, 5, 7], [4], workspace=workspace)
    again = sample(CSC, [5, 6, 7], [4], workspace=workspace)
    assert again.nodes.tolist() == sample(CSC, [5, 6, 7], [4]).nodes.tolist()


def test_memory_of_another_layout_is_not_read_by_address() -> None:
    schema = Schema(ntypes=("a",), num_nodes=(2,), etypes=(("a", "x", "a"),))
    every_other = np.array([0, 9, 1, 9])[::2]
    with pytest.raises(AssertionError):
        make_relations(schema, [Csc(np.array([0, 1, 2]), every_other, np.empty(0, np.float32), 0, 0)])
