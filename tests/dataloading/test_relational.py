import dgl
import numpy as np
import pytest
import torch

from dglx_dist.dataloading.kernels import Schema, Workspace, relations_of, sample_batch, sample_relations
from dglx_dist.dataloading.minibatch import TypedBlockBuilder
from dglx_dist.dataloading.sampler import WholeTypedSource
from tests.dataloading.graphs import random_csc, request_for
from tests.dataloading.shop import (
    BUYS,
    KNOWS,
    LIKE,
    SOLD,
    dgl_shop,
    edges_in,
    shop_draws,
    typed_shop,
)

ONE = ("_N", "_E", "_N")
SEEDS = {"user": np.array([29, 3, 8]), "item": np.array([40, 4])}


def blocks_of(schema, cscs, fanouts, seeds=SEEDS, exclude=None, direct_limit=1000, **draws):
    request = shop_draws(schema, fanouts, **draws).request(seeds, 0, exclude or {})
    workspace = Workspace(sum(schema.num_nodes), direct_limit=direct_limit)
    batch = WholeTypedSource(schema, cscs).sample(request, exclude or {}, workspace)
    return TypedBlockBuilder(schema).blocks(batch)


@pytest.mark.parametrize("direct_limit", [0, 1000])
@pytest.mark.parametrize(
    ("weighted", "options"),
    [
        (False, {}),
        (False, {"exclude": range(0, 900, 3)}),
        (False, {"replace": True}),
        (True, {}),
        (True, {"replace": True, "exclude": range(0, 900, 3)}),
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_one_type_draws_what_its_own_kernel_draws(direct_limit, weighted, options, dtype) -> None:
    csc = random_csc(300, 6, dtype=dtype)
    if weighted:
        csc = csc._replace(weights=(np.arange(len(csc.indices)) % 5).astype(np.float32))
    schema = Schema(ntypes=("_N",), num_nodes=(300,), etypes=(ONE,))
    seeds = np.array([4, 0, 150, 299])
    exclude = {ONE: np.array(options.get("exclude", []), np.int64)}
    replace = options.get("replace", False)
    draws = shop_draws(schema, [3, 5, -1], replace=replace, exclude=exclude, seed=7)
    workspace = Workspace(300, direct_limit=direct_limit)
    batch, _ = sample_relations(
        relations_of(schema, [csc]), draws.request({"_N": seeds}, 2, {}), workspace.table
    )
    request = request_for(seeds, [3, 5, -1], seed=7, epoch=2, **options)
    expected, _ = sample_batch(csc, request, Workspace(300).table)
    assert batch.node_starts.tolist() == [0, len(expected.nodes)]
    assert batch.node_ends[:, 0].tolist() == expected.node_ends.tolist()
    for name in ("nodes", "indptr", "sources", "edge_ids", "edge_ends"):
        assert getattr(batch, name).tolist() == getattr(expected, name).tolist()


@pytest.mark.parametrize("direct_limit", [0, 1000])
@pytest.mark.parametrize("wide", [[], [SOLD, LIKE]])
def test_full_fanout_is_what_dgl_samples(direct_limit: int, wide: list) -> None:
    schema, cscs = typed_shop(wide)
    whole = dgl_shop(schema, cscs)
    _, blocks = blocks_of(schema, cscs, [-1, -1], direct_limit=direct_limit)
    frontier = {ntype: torch.from_numpy(ids) for ntype, ids in SEEDS.items()}
    for block in reversed(blocks):
        sampled = dgl.sampling.sample_neighbors(whole, frontier, -1)
        theirs = dgl.to_block(sampled, frontier)
        for etype in schema.etypes:
            ids = sampled.edges[etype].data[dgl.EID]
            theirs.edges[etype].data[dgl.EID] = ids[theirs.edges[etype].data[dgl.EID]]
            assert edges_in(block, etype) == edges_in(theirs, etype)
        for ntype in schema.ntypes:
            mine, other = block.srcnodes[ntype].data[dgl.NID], theirs.srcnodes[ntype].data[dgl.NID]
            targets = block.dstnodes[ntype].data[dgl.NID].tolist()
            assert sorted(mine.tolist()) == sorted(other.tolist())
            assert targets == theirs.dstnodes[ntype].data[dgl.NID].tolist()
            assert mine[: len(targets)].tolist() == targets
        frontier = {ntype: block.srcnodes[ntype].data[dgl.NID] for ntype in schema.ntypes}


def test_fanouts_are_of_a_layer_and_an_edge_type() -> None:
    schema, cscs = typed_shop()
    outer = dict.fromkeys(schema.etypes, 0) | {KNOWS: 2, SOLD: -1}
    inner = dict.fromkeys(schema.etypes, 1) | {BUYS: 0}
    _, blocks = blocks_of(schema, cscs, [outer, inner])
    for fanouts, block in zip((outer, inner), blocks, strict=True):
        for etype, csc in zip(schema.etypes, cscs, strict=True):
            nodes = block.dstnodes[etype[2]].data[dgl.NID]
            degrees = torch.from_numpy(np.diff(csc.indptr))[nodes]
            most = fanouts[etype] if fanouts[etype] >= 0 else 99
            assert block.in_degrees(etype=etype).tolist() == degrees.clamp(max=most).tolist()


def test_a_node_found_by_one_edge_type_is_not_drawn_for_in_the_same_hop() -> None:
    # User 8 knows users; only in the second hop do those buy-edges of the items they reach count.
    schema, cscs = typed_shop()
    _, (outer, inner) = blocks_of(schema, cscs, [-1, -1], seeds={"user": np.array([8])})
    assert inner.num_dst_nodes("item") == inner.num_edges(LIKE) == 0
    assert outer.num_dst_nodes("item") == inner.num_src_nodes("item") > 0
    assert outer.num_edges(LIKE) > 0


def test_edge_types_draw_independently() -> None:
    # Two edge types with the same edges: equal draws would show in all 100 nodes.
    csc = random_csc(100, 20)
    etypes = (("n", "one", "n"), ("n", "two", "n"))
    schema = Schema(ntypes=("n",), num_nodes=(100,), etypes=etypes)
    _, (block,) = blocks_of(schema, [csc, csc], [3], seeds={"n": np.arange(100)})
    one, two = ({edge for _, _, edge in edges_in(block, etype)} for etype in etypes)
    assert len(one & two) < len(one) // 2


def test_excluded_edges_of_a_type_are_those_of_no_other() -> None:
    schema, cscs = typed_shop()
    exclude = {KNOWS: np.arange(len(cscs[0].indices))}
    _, blocks = blocks_of(schema, cscs, [-1, -1], exclude=exclude)
    _, usual = blocks_of(schema, cscs, [-1, -1])
    assert blocks[-1].num_edges(KNOWS) == 0 < usual[-1].num_edges(KNOWS)
    assert edges_in(blocks[-1], SOLD) == edges_in(usual[-1], SOLD)


def test_no_seeds_give_empty_hops() -> None:
    schema, cscs = typed_shop()
    nodes, blocks = blocks_of(schema, cscs, [2, 2], seeds={})
    assert all(len(ids) == 0 for ids in nodes.values())
    assert all(block.num_edges() == 0 for block in blocks)
