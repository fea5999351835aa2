"""The sampling kernels alone: fan-outs, numbering of nodes, typed relations, reused workspaces."""

from __future__ import annotations

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.dataloading.kernels import (
    Schema,
    Table,
    Workspace,
    check_seeds,
    copy_rows,
    csc_at,
    enlarged,
    grown_table,
    insert,
    number,
    read_sources,
    relations_of,
    sample_and_slice,
    sample_batch,
)
from dglx_dist.dataloading.sampler import WholeSource
from dglx_dist.errors import ConfigError
from dglx_dist.keyed_random import Csc
from tests.dataloading.graphs import csc_from, edges_of_hop, random_csc, request_for
from tests.dataloading.shop import BUYS, KNOWS, LIKE, typed_shop

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


DIRECT = Table(np.zeros(100, np.uint32), np.empty(0, np.int64), 1)


def hashed(capacity: int) -> Table:
    return Table(np.zeros(capacity, np.uint32), np.empty(capacity, np.int64), 1)


@pytest.mark.parametrize("table", [DIRECT, hashed(16)], ids=["direct", "hashed"])
def test_numbers_in_order_of_first_sight(table: Table) -> None:
    nodes, local = np.empty(8, np.int64), np.empty(6, np.int64)
    count = number(table, np.array([7, 3, 7, 99, 3, 0]), nodes, 0, local)
    assert count == 4
    assert local.tolist() == [0, 1, 0, 2, 1, 3]
    assert nodes[:4].tolist() == [7, 3, 99, 0]


def test_growing_keeps_the_numbers() -> None:
    small = hashed(8)
    nodes, local = np.empty(40, np.int64), np.empty(3, np.int64)
    count = number(small, np.array([10**12, 5, 77]), nodes, 0, local)
    large = grown_table(small, nodes, count, 30)
    assert len(large.keys) >= 2 * 33
    more = np.empty(32, np.int64)
    count = number(large, np.arange(70, 102), nodes, count, more)
    assert count == 3 + 32 - 1
    assert more[7] == 2
    assert number(large, np.array([5, 10**12]), nodes, count, local) == count
    assert local[:2].tolist() == [1, 0]


def test_enough_room_is_left_as_it_is() -> None:
    table = hashed(16)
    assert len(grown_table(table, np.empty(0, np.int64), 0, 8).keys) == 16


def test_an_enlarged_table_is_empty_until_nodes_are_inserted() -> None:
    table = enlarged(hashed(8), 50)
    assert len(table.keys) == 64
    insert(table, np.array([10**12, 5, 77]), 2)
    nodes, local = np.array([10**12, 5, 0, 0, 0]), np.empty(3, np.int64)
    assert number(table, np.array([5, 77, 10**12]), nodes, 2, local) == 3
    assert local.tolist() == [1, 2, 0]


def test_types_are_numbers_and_nodes_have_keys_of_their_own() -> None:
    schema = Schema(ntypes=("a", "b"), num_nodes=(3, 4), etypes=(("a", "x", "b"), ("b", "y", "b")))
    assert schema.offsets.tolist() == [0, 3, 7]
    assert schema.source_types.tolist() == [0, 1]
    assert schema.destination_types.tolist() == [1, 1]


def test_what_is_read_by_address_is_what_is_there() -> None:
    schema, cscs = typed_shop(wide=[BUYS])
    relations = relations_of(schema, cscs)
    assert relations.wide.tolist() == [etype == BUYS for etype in schema.etypes]
    for relation, (etype, csc) in enumerate(zip(schema.etypes, cscs, strict=True)):
        assert csc_at(relations, relation).indptr.tolist() == csc.indptr.tolist()
        out = np.empty(len(csc.indices), np.int64)
        read_sources(relations, relation, np.arange(len(csc.indices)), out)
        first = schema.offsets[schema.ntypes.index(etype[0])]
        assert out.tolist() == (csc.indices + first).tolist()


def test_weights_are_there_for_those_that_have_them() -> None:
    schema, cscs = typed_shop()
    half = np.full(len(cscs[-1].indices), 0.5, np.float32)
    cscs[-1] = cscs[-1]._replace(weights=half)
    relations = relations_of(schema, cscs)
    assert csc_at(relations, schema.etypes.index(LIKE)).weights.tolist() == half.tolist()
    assert len(csc_at(relations, schema.etypes.index(KNOWS)).weights) == 0


def test_memory_of_another_layout_is_our_own_mistake() -> None:
    schema = Schema(ntypes=("a",), num_nodes=(2,), etypes=(("a", "x", "a"),))
    nothing = np.empty(0, np.float32)
    with pytest.raises(AssertionError):
        relations_of(schema, [Csc(np.array([0, 1, 2]), np.array([0, 9, 1, 9])[::2], nothing, 0, 0)])


CSC = random_csc(300, 5)


@pytest.mark.parametrize("direct_limit", [0, 300])
def test_a_used_workspace_samples_what_a_new_one_samples(direct_limit: int) -> None:
    used = Workspace(300, direct_limit=direct_limit)
    for epoch in range(20):
        request = request_for(np.arange(epoch, 300, 17), [4, 4], epoch=epoch)
        again = WholeSource(CSC).sample(request, used)
        fresh = WholeSource(CSC).sample(request, Workspace(300))
        assert again.nodes.tolist() == fresh.nodes.tolist()
        assert again.sources.tolist() == fresh.sources.tolist()


@pytest.mark.parametrize("direct_limit", [0, 300])
def test_numbers_that_would_overflow_start_again(direct_limit: int) -> None:
    workspace = Workspace(300, direct_limit=direct_limit)
    request = request_for([1, 2, 3], [4])
    expected = WholeSource(CSC).sample(request, workspace)
    workspace.keep(workspace.table._replace(base=(1 << 31) - 2))
    for _ in range(3):
        assert WholeSource(CSC).sample(request, workspace).sources.tolist() == expected.sources.tolist()
    assert workspace.table.base < 1000


def test_a_refused_batch_leaves_no_trace() -> None:
    workspace = Workspace(300)
    with pytest.raises(ConfigError, match="node 7 more than once"):
        WholeSource(CSC).sample(request_for([7, 5, 7], [4]), workspace)
    request = request_for([5, 6, 7], [4])
    fresh = WholeSource(CSC).sample(request, Workspace(300))
    assert WholeSource(CSC).sample(request, workspace).nodes.tolist() == fresh.nodes.tolist()


def test_memory_is_bounded_on_huge_graphs() -> None:
    assert Workspace(10**12).table.slots.nbytes < 1 << 20


def test_distinct_seeds_pass() -> None:
    check_seeds(np.array([4, 2]), 2)


def test_tables_start_with_nothing_known() -> None:
    table: Table = Workspace(10).table
    assert table.base > table.slots.max()
