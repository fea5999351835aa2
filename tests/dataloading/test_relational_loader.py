"""The loader over several types, from a graph on disk to blocks with columns."""

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.dataloading.loader import DataLoader, open_maker
from dglx_dist.dataloading.minibatch import KernelMaker, SamplerMaker
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import LoaderOptions
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from tests.dataloading.shop import BUYS, KNOWS, LIKE, edges_in

SEEDS = {"user": torch.tensor([8, 29, 3, 11]), "item": torch.tensor([4, 40, 13])}
PREFETCH = {
    "prefetch_node_feats": {"user": ["feat"], "item": ["feat"]},
    "prefetch_labels": {"item": ["label"]},
    "prefetch_edge_feats": {"knows": ["weight"], LIKE: ["weight"]},
}


def loader_of(g: DistGraph, sampler: NeighborSampler, **options) -> DataLoader:
    return DataLoader(g, SEEDS, sampler, **({"batch_size": 4, "seed": 1} | options))


def test_columns_of_every_type_arrive_with_their_rows(shop_graph: DistGraph) -> None:
    g = shop_graph
    seen = []
    for input_nodes, output_nodes, blocks in loader_of(g, NeighborSampler([3, 2], **PREFETCH)):
        assert set(input_nodes) == set(output_nodes) == {"ghost", "item", "user"}
        for ntype in ("user", "item"):
            ids = blocks[0].srcnodes[ntype].data[dgl.NID]
            assert torch.equal(ids, input_nodes[ntype])
            assert torch.equal(blocks[0].srcnodes[ntype].data["feat"], g.nodes[ntype].data["feat"][ids])
            assert torch.equal(blocks[-1].dstnodes[ntype].data[dgl.NID], output_nodes[ntype])
        labels = blocks[-1].dstnodes["item"].data["label"]
        assert torch.equal(labels, g.nodes["item"].data["label"][output_nodes["item"]])
        assert "label" not in list(blocks[-1].dstnodes["user"].data)
        for block in blocks:
            for etype in (KNOWS, LIKE):
                data = block.edges[etype].data
                assert torch.equal(data["weight"], g.edges[etype].data["weight"][data[dgl.EID]])
            assert "weight" not in list(block.edges[BUYS].data)
        assert blocks[-1].step_share.num_local == sum(map(len, output_nodes.values()))
        seen.append({ntype: ids.tolist() for ntype, ids in output_nodes.items()})
    # Types in the graph's order, ids in the order given.
    assert seen == [
        {"ghost": [], "item": [4, 40, 13], "user": [8]},
        {"ghost": [], "item": [], "user": [29, 3, 11]},
    ]


def test_fanouts_by_relation_or_triple_and_all_types_named(shop_graph: DistGraph) -> None:
    some = {BUYS: 1, "knows": 0, "sold_to": -1, "wants": 2, "haunts": 3, "like": 2}
    for _, _, blocks in loader_of(shop_graph, NeighborSampler([some, 2])):
        for block, fanouts in zip(blocks, (some, dict.fromkeys(some, 2)), strict=True):
            for etype in shop_graph.canonical_etypes:
                most = fanouts.get(etype, fanouts.get(etype[1], -1))
                degrees = shop_graph.in_degrees(block.dstnodes[etype[2]].data[dgl.NID], etype=etype)
                expected = degrees if most < 0 else degrees.clamp(max=most)
                assert torch.equal(block.in_degrees(etype=etype), expected)
    with pytest.raises(
        ConfigError, match=r"fanouts\[0\] names 1 of 6 edge types\. Missing: .*sold_to.*Use 0"
    ):
        loader_of(shop_graph, NeighborSampler([{"knows": 1}]))
    with pytest.raises(ConfigError, match="'sells'"):
        loader_of(shop_graph, NeighborSampler([some | {"sells": 1}]))


def test_edges_left_out_of_all_batches(shop_graph: DistGraph) -> None:
    every_other = {"knows": torch.arange(0, shop_graph.num_edges(KNOWS), 2)}
    loader = loader_of(shop_graph, NeighborSampler([-1, -1]), exclude=every_other)
    drawn = {edge for _, _, blocks in loader for block in blocks for *_, edge in edges_in(block, KNOWS)}
    assert drawn
    assert all(edge % 2 == 1 for edge in drawn)
    with pytest.raises(ConfigError, match="several edge types"):
        loader_of(shop_graph, NeighborSampler([1]), exclude=torch.tensor([1]))


class Own(NeighborSampler):
    """A sampler with code of its own, as users write it for DGL."""

    def sample_blocks(self, g, seed_nodes, exclude_eids=None):
        output_nodes, blocks = seed_nodes, []
        for fanout in reversed(self.fanouts):
            frontier = g.sample_neighbors(seed_nodes, fanout, exclude_edges=exclude_eids)
            block = dgl.to_block(frontier, seed_nodes)
            for etype in g.canonical_etypes:
                ids = frontier.edges[etype].data[dgl.EID]
                block.edges[etype].data[dgl.EID] = ids[block.edges[etype].data[dgl.EID]]
            seed_nodes = {ntype: block.srcnodes[ntype].data[dgl.NID] for ntype in g.ntypes}
            blocks.insert(0, block)
        return seed_nodes, output_nodes, blocks


def test_a_samplers_own_code_draws_the_same_full_neighbourhood(shop_graph: DistGraph) -> None:
    kernel_maker, sampler_maker = (
        open_maker(shop_graph, sampler, read_sampler(sampler), LoaderOptions(), seed=0)
        for sampler in (NeighborSampler([-1, -1], **PREFETCH), Own([-1, -1], **PREFETCH))
    )
    assert type(kernel_maker) is KernelMaker
    assert type(sampler_maker) is SamplerMaker
    seeds = {ntype: ids.numpy() for ntype, ids in SEEDS.items()}
    for items in (seeds, {}):
        for exclude in ({}, {LIKE: np.arange(0, shop_graph.num_edges(LIKE), 2)}):
            ours, own = (
                maker.complete(maker.sample_items(items, 0, exclude, step=0))
                for maker in (kernel_maker, sampler_maker)
            )
            for block, reference in zip(ours.blocks, own.blocks, strict=True):
                for etype in shop_graph.canonical_etypes:
                    assert edges_in(block, etype) == edges_in(reference, etype)
            rows = own.blocks[0].srcnodes["item"].data
            assert torch.equal(rows["feat"], shop_graph.nodes["item"].data["feat"][rows[dgl.NID]])


def test_half_precision_of_every_type_becomes_the_requested_dtype(shop_graph: DistGraph) -> None:
    loader = loader_of(shop_graph, NeighborSampler([2], **PREFETCH), feature_dtype=torch.float64)
    _, _, blocks = next(iter(loader))
    assert {rows.dtype for rows in blocks[0].srcdata["feat"].values()} == {torch.float64}
