from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.loader import open_maker
from dglx_dist.dataloading.minibatch import KernelMaker, SamplerMaker
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import LoaderOptions
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.structure import PartitionedStructure
from tests.helpers.ranks import run_ranks


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
        ConfigError, match=r"exclude= is not supported by .*Own's own code; use NeighborSampler"
    ):
        opened(graph, Own([2]), exclude=torch.tensor([1]))


def test_every_prefetched_column_arrives_once(graph: DistGraph) -> None:
    sampler = NeighborSampler([2], prefetch_node_feats=["label", "feat"], prefetch_labels=["feat"])
    batch = opened(graph, sampler).make({"_N": np.array([5, 40])}, 0)
    assert torch.equal(batch.blocks[0].srcdata["feat"], graph.ndata["feat"][batch.input_nodes])
    assert torch.equal(batch.blocks[0].srcdata["label"], graph.ndata["label"][batch.input_nodes])
    assert torch.equal(batch.blocks[0].dstdata["feat"], graph.ndata["feat"][batch.output_nodes])


def test_a_batch_without_seeds_has_columns_without_rows(graph: DistGraph) -> None:
    sampler = NeighborSampler([2, 2], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    batch = opened(graph, sampler).make({}, 0)
    assert batch.blocks[0].srcdata["feat"].shape == (0, 3)
    assert batch.blocks[-1].dstdata["label"].shape == (0,)
    assert len(batch.input_nodes) == len(batch.output_nodes) == 0


@pytest.mark.parametrize("sampler", [NeighborSampler([3, 4]), NeighborSampler([-1, -1])])
def test_a_batch_leaves_out_its_own_edges_and_the_next_one_does_not(
    graph: DistGraph, sampler: NeighborSampler
) -> None:
    maker = opened(graph, sampler, exclude=torch.tensor([300]))
    seeds, etype = {"_N": np.arange(60)}, ("_N", "_E", "_N")

    def drawn(exclude: dict[tuple[str, str, str], np.ndarray]) -> set[int]:
        batch = maker.make(seeds, 0, exclude)
        return {int(edge) for block in batch.blocks for edge in block.edata[dgl.EID]}

    usual = drawn({})
    targets = np.array(sorted(usual)[::2])
    assert not drawn({etype: targets}) & {*targets.tolist(), 300}
    assert drawn({}) == usual
    assert 300 not in usual


class Excluding(NeighborSampler):
    """Its own code, as stock DGL runs it."""

    def sample_blocks(self, g, seed_nodes, exclude_eids=None):
        frontier = g.sample_neighbors(seed_nodes, -1, exclude_edges=exclude_eids)
        block = dgl.to_block(frontier, seed_nodes)
        block.edata[dgl.EID] = frontier.edata[dgl.EID][block.edata[dgl.EID]]
        return block.srcdata[dgl.NID], seed_nodes, [block]


def test_a_samplers_own_code_is_given_the_edges_to_leave_out(graph: DistGraph) -> None:
    maker = opened(graph, Excluding([1]))
    seeds, etype = {"_N": np.array([5, 40])}, ("_N", "_E", "_N")
    all_edges = maker.make(seeds, 0).blocks[0].edata[dgl.EID]
    fewer = maker.make(seeds, 0, {etype: np.sort(all_edges.numpy()[:3])}).blocks[0].edata[dgl.EID]
    assert set(fewer.tolist()) == set(all_edges.tolist()) - set(all_edges[:3].tolist())


def open_again_and_again(folder: Path) -> tuple[list[int], list[bool]]:
    """How many rules were served so far after each loader, and whether weighed draws are of the weights."""
    with start_session(timeout_s=30), pytest.MonkeyPatch.context() as patch:
        g = DistGraph(folder, structure="partitioned")
        rank, all_nodes = g.rank(), {"_N": np.arange(g.num_nodes())}
        served, counts, right = [], [], []
        serve = PartitionedStructure.serve

        def noted(self, op, draw):
            served.append(op)
            serve(self, op, draw)

        patch.setattr(PartitionedStructure, "serve", noted)
        likely = g.new_tensor(
            (g.num_edges(),), torch.float32, "likely", part_policy=g.get_edge_partition_policy("_E")
        )
        edges = torch.arange(g.num_edges())
        plain = [
            (NeighborSampler([2]), {}),
            (NeighborSampler([3, 1]), {}),
            (NeighborSampler([2], replace=True), {}),
            (NeighborSampler([2]), {"exclude": [5, 9]}),
            (NeighborSampler([2]), {"exclude": [9, 5]}),
            # On one rank alone: its server draws by another rule.
            (NeighborSampler([2]), {"exclude": [5, 9 + rank]}),
            (NeighborSampler([2]), {}),
        ]
        for sampler, options in plain:
            opened(g, sampler, **options)
            counts.append(len(served))
        for kept in (0, 0, 1):
            likely[edges[edges % 2 == rank]] = 0.0
            g.barrier()
            if rank == 0:
                likely[edges[edges % 2 == kept]] = 1.0
            g.barrier()
            batch = opened(g, NeighborSampler([2], prob="likely")).make(all_nodes, 0)
            right.append(bool((batch.blocks[0].edata[dgl.EID] % 2 == kept).all()))
            counts.append(len(served))
            g.barrier()
        return counts, right


def test_loaders_of_one_rule_are_served_once(rings) -> None:
    expected = [1, 1, 2, 3, 3, 4, 4, 5, 5, 6], [True] * 3
    assert run_ranks(open_again_and_again, 2, args=(rings[2],), ranks_per_server=1) == [expected] * 2
