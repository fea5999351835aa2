import dgl
import numpy as np
import pytest
import torch

from dglx_dist.dataloading.kernels import Workspace, copy_rows, sample_and_slice, sample_batch
from tests.dataloading.graphs import csc_from, edges_of_hop, random_csc, request_for

# 0 <- 1, 2    1 <- 3    2 <- 3, 4    3 <-    4 <- 0
DIAMOND = csc_from([[1, 2], [3], [3, 4], [], [0]])


def sample(csc, request, **workspace_options):
    return sample_batch(csc, request, Workspace(len(csc.indptr) - 1, **workspace_options).table)[0]


def test_two_full_hops_by_hand() -> None:
    batch = sample(DIAMOND, request_for([0], [-1, -1]))
    assert batch.nodes.tolist() == [0, 1, 2, 3, 4]
    assert batch.node_ends.tolist() == [1, 3, 5]
    assert edges_of_hop(batch, 0) == [(1, 0, 0), (2, 0, 1)]
    assert edges_of_hop(batch, 1) == [(1, 0, 0), (2, 0, 1), (3, 1, 2), (3, 2, 3), (4, 2, 4)]


@pytest.mark.parametrize("structure_dtype", ["int32", "int64"])
@pytest.mark.parametrize("block_dtype", ["int32", "int64"])
def test_full_fanout_is_the_exact_neighbourhood(structure_dtype: str, block_dtype: str) -> None:
    csc = random_csc(300, 4, dtype=structure_dtype)
    seeds = np.arange(0, 300, 29)
    batch = sample(csc, request_for(seeds, [-1, -1], dtype=block_dtype))
    assert batch.sources.dtype == batch.edge_ids.dtype == batch.indptr.dtype == block_dtype
    numbers = torch.from_numpy(csc.indices.astype(np.int64))
    g = dgl.graph(("csc", (torch.from_numpy(csc.indptr), numbers, torch.empty(0, dtype=torch.int64))))
    frontier = torch.from_numpy(seeds)
    for hop in range(2):
        expected = dgl.in_subgraph(g, frontier).edata[dgl.EID]
        assert sorted(edge for _, _, edge in edges_of_hop(batch, hop)) == sorted(expected.tolist())
        block = dgl.to_block(dgl.in_subgraph(g, frontier), frontier)
        frontier = block.srcdata[dgl.NID]
        assert set(frontier.tolist()) == set(batch.nodes[: batch.node_ends[hop + 1]].tolist())


def test_every_edge_is_the_edge_it_says_it_is() -> None:
    csc = random_csc(200, 6)
    batch = sample(csc, request_for([3, 0, 7], [3, 4]))
    for hop in range(2):
        for source, destination, edge in edges_of_hop(batch, hop):
            assert csc.indptr[destination] <= edge < csc.indptr[destination + 1]
            assert csc.indices[edge] == source


def test_degree_of_every_destination_is_min_of_fanout_and_in_degree() -> None:
    csc = random_csc(200, 6)
    batch = sample(csc, request_for(np.arange(50), [3, 5]))
    for hop, fanout in enumerate([5, 3]):
        edges = edges_of_hop(batch, hop)
        assert len({edge for _, _, edge in edges}) == len(edges)
        for node in batch.nodes[: batch.node_ends[hop]]:
            degree = csc.indptr[node + 1] - csc.indptr[node]
            assert sum(destination == node for _, destination, _ in edges) == min(fanout, degree)


def test_destinations_are_a_prefix_of_sources_and_nodes_are_distinct() -> None:
    batch = sample(random_csc(200, 6), request_for([9, 4, 100], [5, 5, 5]))
    assert batch.nodes[:3].tolist() == [9, 4, 100]
    assert len(set(batch.nodes.tolist())) == len(batch.nodes) == batch.node_ends[-1]
    assert (np.diff(batch.node_ends) >= 0).all()


def test_what_a_node_draws_does_not_depend_on_the_company() -> None:
    csc = random_csc(200, 6)
    offline = edges_of_hop(sample(csc, request_for([0], [5])), 0)
    together = edges_of_hop(sample(csc, request_for([8, 0, 4], [5])), 0)
    assert offline == [edge for edge in together if edge[1] == 0]


def test_epochs_and_hops_draw_differently() -> None:
    csc = csc_from([list(range(1000)), *[[]] * 999])
    first = sample(csc, request_for([0], [10, 10]))
    assert edges_of_hop(first, 0) != edges_of_hop(first, 1)[:10]
    later = sample(csc, request_for([0], [10, 10], epoch=1))
    assert edges_of_hop(first, 0) != edges_of_hop(later, 0)


@pytest.mark.parametrize("fanouts", [[-1, -1], [4, 3, 5]])
def test_hashed_numbering_is_the_direct_one(fanouts: list[int]) -> None:
    csc = random_csc(500, 8)
    request = request_for(np.arange(0, 500, 11), fanouts)
    direct, hashed = sample(csc, request), sample(csc, request, direct_limit=0)
    for one, other in zip(direct, hashed, strict=True):
        assert one.tolist() == other.tolist()


def test_no_seeds_no_edges() -> None:
    batch = sample(DIAMOND, request_for([], [3, 3]))
    assert batch.node_ends.tolist() == batch.edge_ends.tolist() == [0, 0, 0]
    assert batch.indptr.tolist() == [0, 0]


def test_a_repeated_seed_shows() -> None:
    assert sample(DIAMOND, request_for([1, 2, 1], [2])).node_ends[0] == 2


def test_sampling_and_slicing_in_one_call() -> None:
    csc = random_csc(200, 6)
    rows = np.arange(400, dtype=np.uint64).reshape(200, 2)
    table = Workspace(200).table
    batch, _, out = sample_and_slice(
        csc, request_for([3, 8], [4, 4]), table, rows, np.empty((0, 2), np.uint64)
    )
    assert (out[: len(batch.nodes)] == rows[batch.nodes]).all()
    long_enough = np.empty((200, 2), np.uint64)
    table = Workspace(200).table
    again, _, out = sample_and_slice(csc, request_for([3, 8], [4, 4]), table, rows, long_enough)
    assert np.shares_memory(out, long_enough)
    assert (long_enough[: len(again.nodes)] == rows[again.nodes]).all()


def test_copy_rows() -> None:
    rows, out = np.arange(12, dtype=np.uint32).reshape(4, 3), np.zeros((2, 3), np.uint32)
    copy_rows(rows, np.array([3, 0]), out)
    assert out.tolist() == [[9, 10, 11], [0, 1, 2]]
