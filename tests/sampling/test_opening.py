import numpy as np
import pytest
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph
from dglx_dist.sampling.maker import KernelMaker, SamplerMaker
from dglx_dist.sampling.neighbor import read_sampler
from dglx_dist.sampling.opening import open_maker
from dglx_dist.sampling.options import LoaderOptions


class Own(NeighborSampler):
    def sample_blocks(self, g, seed_nodes, exclude_eids=None):
        raise NotImplementedError


def opened(g: DistGraph, sampler: NeighborSampler, **options):
    return open_maker(g, sampler, read_sampler(sampler), LoaderOptions(**options), seed=0)


def test_kernels_where_the_sampler_is_dgls_and_its_own_code_where_not(graph: DistGraph) -> None:
    assert type(opened(graph, NeighborSampler([2]))) is KernelMaker
    assert type(opened(graph, Own([2]))) is SamplerMaker


def test_exclusion_needs_our_kernels(graph: DistGraph) -> None:
    with pytest.raises(
        ConfigError, match=r"exclude= cannot be passed into .*Own's own code; use NeighborSampler"
    ):
        opened(graph, Own([2]), exclude=torch.tensor([1]))


def test_every_prefetched_column_arrives_once(graph: DistGraph) -> None:
    sampler = NeighborSampler([2], prefetch_node_feats=["label", "feat"], prefetch_labels=["feat"])
    batch = opened(graph, sampler).make(np.array([5, 40]), 0)
    assert torch.equal(batch.blocks[0].srcdata["feat"], graph.ndata["feat"][batch.input_nodes])
    assert torch.equal(batch.blocks[0].srcdata["label"], graph.ndata["label"][batch.input_nodes])
    assert torch.equal(batch.blocks[0].dstdata["feat"], graph.ndata["feat"][batch.output_nodes])


def test_a_batch_without_seeds_has_columns_without_rows(graph: DistGraph) -> None:
    sampler = NeighborSampler([2, 2], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    batch = opened(graph, sampler).make(np.empty(0, np.int64), 0)
    assert batch.blocks[0].srcdata["feat"].shape == (0, 3)
    assert batch.blocks[-1].dstdata["label"].shape == (0,)
    assert len(batch.input_nodes) == len(batch.output_nodes) == 0
