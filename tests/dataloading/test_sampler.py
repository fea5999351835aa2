"""Samplers over one type, in one process and over servers: equal draws, exact bytes, DGL's blocks."""

from __future__ import annotations

import dgl
import numpy as np
import pytest
import torch
from dgl import nn as dgl_nn

from dglx_dist.dataloading.kernels import Workspace
from dglx_dist.dataloading.minibatch import BatchBlockBuilder, ids_by_type
from dglx_dist.dataloading.sampler import WholeSource
from tests.dataloading.graphs import csc_from, draws_of, random_csc, sampled
from tests.dataloading.rings import NUM_NODES, draws_in_rank
from tests.dataloading.shop import edges_in, shop_draws, typed_shop
from tests.helpers import wide
from tests.helpers.ranks import run_ranks


def blocks_of(seeds, fanouts, dtype="int64", csc=None):
    csc = random_csc(200, 5) if csc is None else csc
    schema = draws_of(len(csc.indptr) - 1, fanouts).schema
    nodes, blocks = BatchBlockBuilder(schema).blocks(sampled(csc, seeds, fanouts, dtype=dtype))
    return ids_by_type(nodes), blocks


def test_ids_by_hand() -> None:
    # 0 <- 1, 2    1 <- 3
    nodes, (outer, inner) = blocks_of([0], [-1, -1], csc=csc_from([[1, 2], [3], [], []]))
    assert nodes.tolist() == outer.srcdata[dgl.NID].tolist() == [0, 1, 2, 3]
    assert outer.dstdata[dgl.NID].tolist() == inner.srcdata[dgl.NID].tolist() == [0, 1, 2]
    assert inner.dstdata[dgl.NID].tolist() == [0]
    assert [column.tolist() for column in outer.edges()] == [[1, 2, 3], [0, 0, 1]]
    assert outer.edata[dgl.EID].tolist() == [0, 1, 2]
    assert inner.edata[dgl.EID].tolist() == [0, 1]
    assert outer.is_block
    assert outer.in_degrees().tolist() == [2, 1, 0]


TYPED_SEEDS = {"user": np.array([29, 3, 8]), "item": np.array([40, 4])}


def typed_blocks(seeds, dtype="int64"):
    schema, cscs = typed_shop()
    request = shop_draws(schema, [4, 3], idtype=np.dtype(dtype)).request(seeds, 0, {})
    batch = WholeSource(schema, cscs).sample(request, {}, Workspace(80))
    return schema, *BatchBlockBuilder(schema).blocks(batch)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("seeds", [TYPED_SEEDS, {"item": np.array([7])}, {}])
def test_blocks_of_several_types_have_all_types_and_agree_with_dgls_own(seeds, dtype: str) -> None:
    schema, nodes, blocks = typed_blocks(seeds, dtype)
    assert list(nodes) == list(schema.ntypes) == blocks[0].srctypes == blocks[-1].dsttypes
    assert blocks[0].canonical_etypes == list(schema.etypes)
    assert [len(ids) for ids in nodes.values()] == [blocks[0].num_src_nodes(t) for t in schema.ntypes]
    for block in blocks:
        theirs = dgl.create_block(
            {etype: block.edges(etype=etype) for etype in schema.etypes},
            {ntype: block.num_src_nodes(ntype) for ntype in schema.ntypes},
            {ntype: block.num_dst_nodes(ntype) for ntype in schema.ntypes},
        )
        assert block.is_block
        assert block.idtype == getattr(torch, dtype)
        for kind in ("sage", "gcn", "gat"):
            mine, other = (hetero_outcome(kind, graph, block) for graph in (block, theirs))
            torch.testing.assert_close(mine, other)
    assert blocks[-1].dstnodes["user"].data[dgl.NID].tolist() == seeds.get("user", np.empty(0)).tolist()


def hetero_outcome(kind, graph, sizes):
    """Outputs and input gradients of a HeteroGraphConv over all edge types."""
    torch.manual_seed(0)
    convs = {
        "sage": lambda: dgl_nn.SAGEConv(4, 3, "mean"),
        "gcn": lambda: dgl_nn.GraphConv(4, 3, norm="right", allow_zero_in_degree=True),
        "gat": lambda: dgl_nn.GATConv(4, 3, 2, allow_zero_in_degree=True),
    }
    conv = dgl_nn.HeteroGraphConv(
        {etype: convs[kind]() for _, etype, _ in sizes.canonical_etypes}, aggregate="sum"
    )
    x = {ntype: torch.rand(sizes.num_src_nodes(ntype), 4, requires_grad=True) for ntype in sizes.srctypes}
    out = conv(graph, x)
    sum(rows.square().sum() for rows in out.values()).backward()
    grads = {ntype: rows.grad for ntype, rows in x.items() if rows.grad is not None}
    return {ntype: rows.detach() for ntype, rows in out.items()}, grads


def test_moved_blocks_of_several_types_keep_their_ids() -> None:
    schema, _, (outer, _) = typed_blocks(TYPED_SEEDS)
    moved = outer.to("cpu").int()
    for etype in schema.etypes:
        assert edges_in(moved, etype) == edges_in(outer, etype)


SEEDS = list(range(1, NUM_NODES, 2))


def run(rings, *, ranks, parts, structure="replicated", ranks_per_server=None, shares=None, **options):
    shares = shares or {str(rank): SEEDS[rank::ranks] for rank in range(ranks)}
    args = (str(rings[parts]), structure, shares, options)
    return run_ranks(draws_in_rank, ranks, args=args, ranks_per_server=ranks_per_server)


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(4, 2), *wide((2, 1))])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fanouts": [-1, -1]},
        {"sampler": {"replace": True}, "exclude": [5, 9, 200]},
        {"sampler": {"prob": "source"}},
    ],
    ids=["uniform", "full", "replace_exclude", "weighted"],
)
def test_a_cut_structure_draws_what_a_replicated_one_draws(rings, ranks, ranks_per_server, options) -> None:
    setting = {"ranks": ranks, "parts": ranks // ranks_per_server, "ranks_per_server": ranks_per_server}
    whole = run(rings, structure="replicated", **setting, **options)
    cut = run(rings, structure="partitioned", **setting, **options)
    for one, other in zip(whole, cut, strict=True):
        assert other["drawn"] == one["drawn"]
        assert other["targets"] == one["targets"]
        assert one["bytes"][0] == 0
        assert other["bytes"][0] == other["bytes"][1] > 0


def same_seeds_on_all(folder: str) -> list[str]:
    import warnings

    from dgl.dataloading import NeighborSampler

    from dglx_dist.comm.session import start_session
    from dglx_dist.dataloading.loader import DataLoader
    from dglx_dist.graph.dist_graph import DistGraph

    with start_session(timeout_s=60), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader(DistGraph(folder), [1, 2, 3], NeighborSampler([2]))
        return [str(warning.message) for warning in caught]


def test_ranks_with_the_same_seeds_are_told(rings) -> None:
    for messages in run_ranks(same_seeds_on_all, 2, args=(str(rings[1]),)):
        assert any("the same 3 indices" in message and "node_split" in message for message in messages)
