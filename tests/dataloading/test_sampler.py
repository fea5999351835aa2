"""Blocks of several types are DGL's own; ranks that were given the same seeds."""

import warnings

import dgl
import numpy as np
import pytest
import torch
from dgl import nn as dgl_nn
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.kernels import ThreadTable
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.dataloading.minibatch import BatchBlockBuilder
from dglx_dist.dataloading.sampler import LocalSource
from dglx_dist.graph.dist_graph import DistGraph
from tests.dataloading.graphs import plan_draws
from tests.dataloading.shop import typed_shop
from tests.helpers.ranks import run_ranks

TYPED_SEEDS = {"user": np.array([29, 3, 8]), "item": np.array([40, 4])}


def typed_blocks(seeds):
    schema, cscs = typed_shop()
    request = plan_draws(schema, [4, 3]).request(seeds, 0, {})
    batch = LocalSource(schema, cscs).sample(request, {}, ThreadTable(80))
    return schema, *BatchBlockBuilder(schema).blocks(batch)


@pytest.mark.parametrize("seeds", [TYPED_SEEDS, {"item": np.array([7])}, {}])
def test_blocks_of_several_types_have_all_types_and_agree_with_dgls_own(seeds) -> None:
    schema, nodes, blocks = typed_blocks(seeds)
    assert list(nodes) == list(schema.ntypes) == blocks[0].srctypes == blocks[-1].dsttypes
    assert blocks[0].canonical_etypes == list(schema.etypes)
    assert [len(ids) for ids in nodes.values()] == [blocks[0].num_src_nodes(t) for t in schema.ntypes]
    for block in blocks:
        reference = dgl.create_block(
            {etype: block.edges(etype=etype) for etype in schema.etypes},
            {ntype: block.num_src_nodes(ntype) for ntype in schema.ntypes},
            {ntype: block.num_dst_nodes(ntype) for ntype in schema.ntypes},
        )
        assert block.is_block
        assert block.idtype == torch.int64
        for kind in ("sage", "gcn", "gat"):
            output, expected = (hetero_outcome(kind, graph, block) for graph in (block, reference))
            torch.testing.assert_close(output, expected)
    assert blocks[-1].dstnodes["user"].data[dgl.NID].tolist() == seeds.get("user", np.empty(0)).tolist()


def hetero_outcome(kind, graph, sizes):
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


def same_seeds_on_all(folder: str) -> list[str]:
    with start_session(timeout_s=60) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # In another order on each.
        DataLoader(DistGraph(folder), np.roll([1, 2, 3], session.topology.rank), NeighborSampler([2]))
        return [str(warning.message) for warning in caught]


def test_warns_once_when_ranks_have_the_same_seeds(rings) -> None:
    first, second = run_ranks(same_seeds_on_all, 2, args=(str(rings[1]),))
    assert any("the same 3 indices" in message and "node_split" in message for message in first)
    assert not any("the same 3 indices" in message for message in second)
