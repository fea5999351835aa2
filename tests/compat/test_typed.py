"""Graphs of several edge types: what is drawn of which, by which weights, and what is kept out."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import dgl
import pytest
import torch

from dglx_dist.compat import dataloading as sampling
from dglx_dist.compat import namespace as session
from dglx_dist.compat.dataloading import DistEdgeDataLoader, DistNodeDataLoader
from dglx_dist.compat.dist_graph import DistGraph
from dglx_dist.compat.dist_tensor import DistTensor

WRITES, WRITTEN_BY = ("author", "writes", "paper"), ("paper", "written_by", "author")


@pytest.fixture(scope="module")
def g(stock_parts: Mapping[str, Path]) -> Iterator[DistGraph]:
    session.initialize()
    yield DistGraph("typed_two", part_config=stock_parts["typed_two"])
    session.exit_client()


def test_types_of_which_nothing_is_drawn_are_left_out(g: DistGraph) -> None:
    papers = {"paper": torch.arange(5)}
    for drawn in (sampling.sample_neighbors(g, papers, 2), sampling.in_subgraph(g, papers)):
        assert (set(drawn.etypes), drawn.ntypes) == ({"cites", "writes"}, ["author", "paper"])
        assert (g.find_edges(drawn.edges["writes"].data[dgl.EID], "writes")[1] < 5).all()
    nothing = g.sample_neighbors(papers, 0)
    assert (nothing.num_edges(), len(nothing.etypes)) == (0, 3)
    sampler = dgl.dataloading.NeighborSampler([2, 2], prefetch_labels={"paper": ["labels"]})
    (batch,) = DistNodeDataLoader(g, papers, sampler, batch_size=5)
    last = batch[-1][-1]
    assert (last.is_block, set(last.etypes), last.num_dst_nodes("author")) == (True, {"cites", "writes"}, 0)
    assert last.step_share.num_global == 5
    assert (last.dstnodes["paper"].data["labels"] == g.nodes["paper"].data["labels"][papers["paper"]]).all()
    assert (last.srcnodes["author"].data[dgl.NID] == batch[-1][0].dstnodes["author"].data[dgl.NID]).all()
    found = g.find_edges(last.edges["writes"].data[dgl.EID], "writes")
    ends = last.edges(etype="writes", order="eid")
    assert (last.srcnodes["author"].data[dgl.NID][ends[0]] == found[0]).all()
    assert (last.dstnodes["paper"].data[dgl.NID][ends[1]] == found[1]).all()


def test_weights_that_the_script_hung_on_the_edges(g: DistGraph) -> None:
    for etype in g.canonical_etypes:
        policy = g.get_edge_partition_policy(etype)
        data, every = g.edges[etype].data, torch.arange(g.num_edges(etype))
        # Nobody else refers to them, and creating the next one frees what nobody refers to.
        data["chance"] = DistTensor((len(every),), torch.float32, part_policy=policy)
        data["chance"][every] = (every % 3 > 0).float()
    papers = {"paper": torch.arange(24)}
    sampler = dgl.dataloading.NeighborSampler([-1], prob="chance")
    ((*_, blocks),) = DistNodeDataLoader(g, papers, sampler, batch_size=24)
    for drawn in (blocks[0], sampling.sample_neighbors(g, papers, -1, prob="chance")):
        assert sorted(drawn.edges["writes"].data[dgl.EID].tolist()) == [one for one in range(72) if one % 3]


def test_reverse_edges_of_another_type_are_kept_out(g: DistGraph) -> None:
    edges = torch.arange(10)
    loader = DistEdgeDataLoader(
        g,
        {"writes": edges},
        dgl.dataloading.MultiLayerFullNeighborSampler(1),
        batch_size=10,
        exclude="reverse_types",
        reverse_etypes={"writes": "written_by", "written_by": "writes"},
    )
    ((_, _, blocks),) = loader
    every = Counter(pairs(g.find_edges(torch.arange(g.num_edges(WRITES)), WRITES)))
    own = Counter(pairs(g.find_edges(edges, WRITES)))
    back = g.find_edges(blocks[0].edges["written_by"].data[dgl.EID], WRITTEN_BY)
    seen = Counter(pairs(back[::-1]))
    # Of parallel edges those stay that are not in the batch; and authors of the batch wrote other papers too.
    assert {pair: seen[pair] for pair in own} == {pair: every[pair] - own[pair] for pair in own}
    assert seen.keys() - own.keys()


def pairs(ends: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return list(zip(*(one.tolist() for one in ends), strict=True))
