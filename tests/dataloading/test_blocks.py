import dgl
import numpy as np
import pytest
import torch
from dgl import nn as dgl_nn

from dglx_dist.dataloading.kernels import Workspace
from dglx_dist.dataloading.minibatch import BlockBuilder, TypedBlockBuilder
from dglx_dist.dataloading.sampler import WholeSource, WholeTypedSource
from tests.dataloading.graphs import csc_from, random_csc, request_for
from tests.dataloading.shop import edges_in, shop_draws, typed_shop

CONVOLUTIONS = {
    "sage_mean": lambda: dgl_nn.SAGEConv(4, 3, "mean"),
    "sage_pool": lambda: dgl_nn.SAGEConv(4, 3, "pool"),
    "gcn": lambda: dgl_nn.GraphConv(4, 3, allow_zero_in_degree=True),
    "gat": lambda: dgl_nn.GATConv(4, 3, 2, allow_zero_in_degree=True),
}


def sampled(seeds, fanouts, dtype="int64", csc=None):
    csc = random_csc(200, 5) if csc is None else csc
    return WholeSource(csc).sample(request_for(seeds, fanouts, dtype=dtype), Workspace(len(csc.indptr) - 1))


def test_ids_by_hand() -> None:
    # 0 <- 1, 2    1 <- 3
    batch = sampled([0], [-1, -1], csc=csc_from([[1, 2], [3], [], []]))
    nodes, (outer, inner) = BlockBuilder().blocks(batch)
    assert nodes.tolist() == outer.srcdata[dgl.NID].tolist() == [0, 1, 2, 3]
    assert outer.dstdata[dgl.NID].tolist() == inner.srcdata[dgl.NID].tolist() == [0, 1, 2]
    assert inner.dstdata[dgl.NID].tolist() == [0]
    assert [column.tolist() for column in outer.edges()] == [[1, 2, 3], [0, 0, 1]]
    assert outer.edata[dgl.EID].tolist() == [0, 1, 2]
    assert inner.edata[dgl.EID].tolist() == [0, 1]
    assert outer.is_block
    assert outer.in_degrees().tolist() == [2, 1, 0]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_agree_with_dgls_own_block(kind: str, dtype: str) -> None:
    _, (block,) = BlockBuilder().blocks(sampled([3, 0, 9], [6], dtype))
    src, dst = block.edges()
    theirs = dgl.create_block((src, dst), block.num_src_nodes(), block.num_dst_nodes())
    torch.manual_seed(0)
    conv = CONVOLUTIONS[kind]()
    features = torch.rand(block.num_src_nodes(), 4)
    results = []
    for graph in (block, theirs):
        x = features.clone().requires_grad_()
        out = conv(graph, x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
    assert block.idtype == getattr(torch, dtype)
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_block_without_destinations_runs_forward_and_backward(kind: str, dtype: str) -> None:
    _, (outer, inner) = BlockBuilder().blocks(sampled([], [5, 5], dtype))
    assert outer.num_src_nodes() == outer.num_dst_nodes() == outer.num_edges() == inner.num_dst_nodes() == 0
    conv = CONVOLUTIONS[kind]()
    out = conv(outer, torch.rand(0, 4))
    assert out.shape[0] == 0
    out.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in conv.parameters())


def test_two_layers_by_hand() -> None:
    _, blocks = BlockBuilder().blocks(sampled([0], [-1, -1], csc=csc_from([[1, 2], [3], [], []])))
    x = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    for block in blocks:
        block.srcdata["x"] = x
        block.update_all(dgl.function.copy_u("x", "m"), dgl.function.sum("m", "x"))
        x = block.dstdata["x"]
    # Sums over in-neighbours twice: node 1 collects 3, node 2 nothing, node 0 both.
    assert x.tolist() == [[1000.0]]


def test_edge_positions_grow_with_the_blocks() -> None:
    builder = BlockBuilder()
    for size in (0, 1, 5, 2, 40):
        indptr = torch.tensor([0, size])
        block = builder.block(
            indptr, torch.zeros(size, dtype=torch.int64), torch.tensor([7]), torch.arange(size)
        )
        assert block.edges(form="eid").tolist() == list(range(size))


def test_blocks_move_and_copy_like_dgls() -> None:
    _, (block,) = BlockBuilder().blocks(sampled([3, 0], [4]))
    moved = block.to("cpu").int()
    assert moved.idtype == torch.int32
    assert moved.edata[dgl.EID].tolist() == block.edata[dgl.EID].tolist()
    assert np.array_equal(moved.srcdata[dgl.NID].numpy(), block.srcdata[dgl.NID].numpy())


TYPED_SEEDS = {"user": np.array([29, 3, 8]), "item": np.array([40, 4])}


def typed_blocks(seeds, dtype="int64"):
    schema, cscs = typed_shop()
    request = shop_draws(schema, [4, 3], idtype=np.dtype(dtype)).request(seeds, 0, {})
    batch = WholeTypedSource(schema, cscs).sample(request, {}, Workspace(80))
    return schema, *TypedBlockBuilder(schema).blocks(batch)


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
