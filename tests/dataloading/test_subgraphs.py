"""Batches that are induced subgraphs: ShaDow and Cluster-GCN."""

from pathlib import Path
from typing import Any
from unittest import mock

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import ShaDowKHopSampler
from torch import Tensor
from torch.nn.functional import cross_entropy

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.dataloading import subgraphs
from dglx_dist.dataloading.clusters import ClusterGCNSampler
from dglx_dist.dataloading.minibatch import NodeMaker
from dglx_dist.dataloading.subgraphs import SubgraphLoader
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.graph.dist_graph import DistGraph
from tests.dataloading import rings, shop
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

SHADOW = ShaDowKHopSampler([2, 3], prefetch_node_feats=["feat", "label"], prefetch_edge_feats=["source"])
NODES = torch.arange(rings.NUM_NODES)


def graph_of_rings() -> dgl.DGLGraph:
    raw = rings.raw_graph()
    ((sources, destinations),) = raw.edges.values()
    return dgl.graph((sources, destinations), num_nodes=rings.NUM_NODES)


def list_edges(graph: dgl.DGLGraph, ids: Any = lambda nodes: nodes) -> list[tuple[int, int]]:
    """Ends of the edges of a subgraph, as ``ids`` of its nodes."""
    nodes = ids(graph.ndata[dgl.NID])
    ends = zip(*(nodes[end].tolist() for end in graph.edges()), strict=True)
    return sorted(ends)


def check_induced(g: DistGraph, graph: dgl.DGLGraph, nodes: Tensor) -> None:
    """Compare a batch of rings with plain DGL, also its columns."""
    expected = graph_of_rings().subgraph(g.orig_ids(nodes))
    assert list_edges(graph, g.orig_ids) == list_edges(expected)
    assert torch.equal(graph.ndata[dgl.NID], nodes)
    assert torch.equal(graph.ndata["feat"], g.ndata["feat"][nodes])
    sources = g.orig_ids(nodes[graph.edges()[0]])
    assert torch.equal(graph.edata["source"], sources.float())


def test_shadow_yields_the_graph_that_the_sampled_nodes_induce(graph: DistGraph) -> None:
    seen = []
    for inputs, outputs, batch in SubgraphLoader(graph, NODES, SHADOW, batch_size=7, shuffle=True):
        check_induced(graph, batch, inputs)
        assert torch.equal(inputs[: len(outputs)], outputs)
        assert torch.equal(batch.ndata["label"], graph.ndata["label"][inputs])
        seen += outputs.tolist()
    assert sorted(seen) == NODES.tolist()


def test_shadow_draws_at_most_the_fan_outs_and_only_neighbours(graph: DistGraph) -> None:
    plain = graph_of_rings()
    for inputs, outputs, _ in SubgraphLoader(graph, NODES, ShaDowKHopSampler([-1, 2]), batch_size=1):
        seed = int(graph.orig_ids(outputs))
        hop = plain.in_edges(seed)[0].tolist()
        # The last hop takes all in-neighbours of the seed and of two of its neighbours.
        drawn = [(a, b) for a in hop for b in hop if a < b] or [tuple(hop)]
        possible = [{seed, *hop, *plain.in_edges(list(pair))[0].tolist()} for pair in drawn]
        assert set(graph.orig_ids(inputs).tolist()) in possible


def test_shadow_excludes_edges(graph: DistGraph) -> None:
    excluded = torch.arange(0, graph.num_edges(), 2)
    loader = SubgraphLoader(graph, NODES, ShaDowKHopSampler([3]), batch_size=20, exclude=excluded)
    kept = torch.cat([batch.edata[dgl.EID] for _, _, batch in loader])
    assert len(kept)
    assert not torch.isin(kept, excluded).any()


def exclude_on_ranks(folder: str, structure: Any) -> None:
    """Excluded edges of own and of remote nodes stay out, for both samplers."""
    with start_session(timeout_s=60):
        g = DistGraph(folder, structure=structure)
        excluded = torch.arange(0, g.num_edges(), 2)
        clusters = ClusterGCNSampler(g, 4, train_mask=None)
        for sampler, ids in ((ShaDowKHopSampler([3, 3]), NODES[g.rank() :: 7]), (clusters, torch.arange(4))):
            kept = []
            for batch in SubgraphLoader(g, ids, sampler, batch_size=3, exclude=excluded):
                graph = batch[-1] if isinstance(batch, tuple) else batch
                kept.append(graph.edata[dgl.EID])
            assert len(torch.cat(kept))
            assert not torch.isin(torch.cat(kept), excluded).any()
        g.barrier()


@pytest.mark.parametrize("structure", ["replicated", "partitioned"])
def test_excluded_edges_stay_out_on_servers(structure: str, rings: dict[int, Path]) -> None:
    run_ranks(exclude_on_ranks, 2, args=(str(rings[2]), structure), ranks_per_server=1)


def drop_on_ranks(folder: str) -> dict[int, Tensor]:
    """Rows of a dropout by node, for batches of the same step."""
    dx.init(timeout=60, seed=1)
    g = dx.DistGraph(folder)
    torch.manual_seed(g.rank())
    model = dx.wrap(Drop(), g)
    loader = dx.DataLoader(g, NODES[g.rank() :: 2], SHADOW, batch_size=30)
    kept = {}
    for inputs, _, graph in loader:
        model(graph, torch.ones(len(inputs), 3))
        rows = model.module.rows
        kept = dict(zip(g.orig_ids(inputs).tolist(), rows, strict=True))
    dx.shutdown()
    return kept


class Drop(torch.nn.Module):
    """A dropout of the rows of a graph's nodes, which keeps what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.linear = torch.nn.Dropout(0.5), torch.nn.Linear(3, 1)

    def forward(self, graph: dgl.DGLGraph, rows: Tensor) -> Tensor:
        self.rows = self.dropout(rows)
        scores: Tensor = self.linear(self.rows)
        return self.dropout(scores[: graph.num_nodes() // 2])


def test_dropout_is_keyed_by_nodes(rings: dict[int, Path]) -> None:
    first, second = run_ranks(drop_on_ranks, 2, args=(str(rings[2]),), ranks_per_server=1)
    shared = first.keys() & second.keys()
    assert len(shared) > 20
    assert all(torch.equal(first[node], second[node]) for node in shared)
    assert len({tuple(first[node].tolist()) for node in shared}) > 1


def test_shadow_of_several_types(shop_graph: DistGraph) -> None:
    sampler = ShaDowKHopSampler([2, 2], prefetch_node_feats={"user": ["feat"], "item": ["feat"]})
    plain = dgl.heterograph(shop.edges(), num_nodes_dict=shop.NUM_NODES)
    loader = SubgraphLoader(shop_graph, {"user": torch.arange(30)}, sampler, batch_size=8)
    for inputs, outputs, batch in loader:
        original = {ntype: shop_graph.orig_ids(ids, ntype) for ntype, ids in inputs.items()}
        expected = plain.subgraph(original)
        assert batch.ntypes == plain.ntypes
        assert batch.canonical_etypes == plain.canonical_etypes
        for etype in plain.canonical_etypes:
            assert batch.num_edges(etype) == expected.num_edges(etype)
            assert sorted(zip(*batch[etype].edges(), strict=True)) == sorted(
                zip(*expected[etype].edges(), strict=True)
            )
        assert torch.equal(inputs["user"][: len(outputs["user"])], outputs["user"])
        assert torch.equal(
            batch.nodes["item"].data["feat"], shop_graph.nodes["item"].data["feat"][inputs["item"]]
        )


def draw_on_ranks(folder: str, structure: Any) -> tuple[dict[int, list[int]], list[list[int]], list[int]]:
    """(Nodes around each seed, nodes of each cluster, clusters of this rank), as ids of before the cut."""
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure=structure)
        own = NODES[session.topology.rank :: session.topology.world_size]
        around = {}
        for inputs, outputs, batch in SubgraphLoader(g, own, SHADOW, batch_size=1, seed=5):
            # A rank that has run out of seeds gets a graph without nodes.
            check_induced(g, batch, inputs)
            if len(outputs):
                around[int(g.orig_ids(outputs))] = sorted(g.orig_ids(inputs).tolist())

        sampler = ClusterGCNSampler(g, 11, prefetch_ndata=["feat"], prefetch_edata=["source"])
        for batch in SubgraphLoader(g, sampler.split(), sampler, batch_size=2):
            check_induced(g, batch, batch.ndata[dgl.NID])
        clusters = [g.orig_ids(torch.from_numpy(sampler.nodes(np.array([c])))).tolist() for c in range(11)]
        g.barrier()
        return around, clusters, sampler.split().tolist()


@pytest.mark.parametrize("structure", [*wide("replicated"), "partitioned"])
def test_draws_and_clusters_do_not_depend_on_ranks(structure: str, rings: dict[int, Path]) -> None:
    (alone,) = run_ranks(draw_on_ranks, 1, args=(str(rings[4]), "replicated"))
    assert sorted(node for cluster in alone[1] for node in cluster) == NODES.tolist()
    for ranks, servers in ((2, 2), (4, 2)):
        results = run_ranks(
            draw_on_ranks, ranks, args=(str(rings[4]), structure), ranks_per_server=ranks // servers
        )
        assert {seed: nodes for around, _, _ in results for seed, nodes in around.items()} == alone[0]
        assert all(clusters == alone[1] for _, clusters, _ in results)
        assert sorted(cluster for _, _, own in results for cluster in own) == list(range(11))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([dgl.nn.GraphConv(3, 8, norm="right"), dgl.nn.GraphConv(8, 7)])

    def forward(self, graph: dgl.DGLGraph, rows: Tensor) -> Tensor:
        graph = dgl.add_self_loop(graph) if graph.num_nodes() else graph
        for layer in self.layers:
            rows = layer(graph, rows) if graph.num_nodes() else rows @ layer.weight
        return rows


Batch = tuple[dgl.DGLGraph, Tensor, Tensor]
"""A subgraph, its features and the positions of its targets."""


def iterate(loader: Any, g: DistGraph) -> Any:
    for batch in loader:
        graph = batch[-1] if isinstance(batch, tuple) else batch
        if isinstance(batch, tuple):
            targets = torch.arange(len(batch[1]))
        else:
            targets = graph.ndata["train_mask"].bool().nonzero().squeeze(1)
        yield graph, graph.ndata["feat"].double() / 100, targets


def train_on_ranks(folder: str, kind: str) -> tuple[list[list[Any]], list[Tensor]]:
    """Batches of this rank, and the weights after an epoch."""
    dx.init(timeout=60, seed=1)
    g = dx.DistGraph(folder)
    model = dx.wrap(Net().double(), g)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if kind == "shadow":
        seeds = dx.node_split(g.ndata["train_mask"])[: 9 + 4 * g.rank()]
        loader = dx.DataLoader(g, seeds, SHADOW, batch_size=4, shuffle=True)
    else:
        sampler = dx.ClusterGCNSampler(g, 9, prefetch_ndata=["feat", "label", "train_mask"])
        loader = dx.DataLoader(g, sampler.split(), sampler, batch_size=2, shuffle=True)
    batches = []
    for graph, rows, targets in iterate(loader, g):
        optimizer.zero_grad()
        loss = cross_entropy(model(graph, rows)[targets], graph.ndata["label"][targets])
        loss.backward()
        optimizer.step()
        batches.append([graph.edges(), graph.num_nodes(), rows, targets, graph.ndata["label"]])
    weights = [parameter.detach() for parameter in model.parameters()]
    dx.shutdown()
    return batches, weights


def train_alone(batches_by_rank: list[list[list[Any]]]) -> list[Tensor]:
    """Train plain DGL on the mean over the targets of all ranks in each step."""
    torch.manual_seed(1)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in zip(*batches_by_rank, strict=True):
        losses = []
        for edges, num_nodes, rows, targets, labels in step:
            graph = dgl.graph(edges, num_nodes=num_nodes)
            losses.append(cross_entropy(model(graph, rows)[targets], labels[targets], reduction="none"))
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def measure_difference(weights: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("kind", ["shadow", "clusters"])
@pytest.mark.parametrize("ranks", [1, 2, *wide(3)])
def test_weights_are_those_of_one_process(kind: str, ranks: int, rings: dict[int, Path]) -> None:
    results = run_ranks(train_on_ranks, ranks, args=(str(rings[4]), kind), ranks_per_server=1)
    expected = train_alone([batches for batches, _ in results])
    for _, weights in results:
        assert measure_difference(weights, expected) < 1e-10


def train_by_clusters(folder: str) -> Any:
    """Weigh the ranks by their numbers of clusters, which have uneven numbers of targets."""
    with mock.patch.object(subgraphs._ClusterMaker, "deliver", lambda self, batch, share: (
        NodeMaker.finish(self, batch, share), batch.blocks[0])[1]):  # fmt: skip
        return train_on_ranks(folder, "clusters")


def test_a_mean_of_means_leaves_other_weights(rings: dict[int, Path]) -> None:
    results = run_ranks(train_by_clusters, 3, args=(str(rings[4]),), ranks_per_server=1)
    expected = train_alone([batches for batches, _ in results])
    assert measure_difference(results[0][1], expected) > 1e-4


def test_clusters_keep_most_edges(graph: DistGraph) -> None:
    """Clusters of a ring of near neighbours keep more edges than random ones."""

    def count_inside(method: str) -> int:
        sampler = ClusterGCNSampler(graph, 6, method=method)
        return sum(batch.num_edges() for batch in SubgraphLoader(graph, sampler.split(), sampler))

    assert count_inside("kaminpar") > 1.5 * count_inside("random")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: ClusterGCNSampler(g, 0), "k=0"),
        (lambda g: ClusterGCNSampler(g, 5, train_mask="mask"), "train_mask='mask' is no column"),
        (lambda g: ClusterGCNSampler(g, 5, method="mets"), "did you mean 'metis'"),
        (
            lambda g: SubgraphLoader(g, [0], ClusterGCNSampler(g, 5, prefetch_ndata=["fest"])),
            "prefetch_node_feats names 'fest'",
        ),
        (lambda g: SubgraphLoader(g, [0, 0], ClusterGCNSampler(g, 5)), "cluster 0 more than once"),
        (lambda g: SubgraphLoader(g, [0], SHADOW, disjoint=True), "Leave them out with ShaDowKHopSampler"),
        (lambda g: SubgraphLoader(g, [0], ShaDowKHopSampler([])), "fanouts"),
        (lambda g: ClusterGCNSampler(g, 5).sample(g, [0]), "Pass it to dx.DataLoader"),
        (lambda g: ClusterGCNSampler(g, 5, train_mask="feat"), r"rows of shape \(3,\)"),
        (lambda g: ClusterGCNSampler(g, 5, train_mask="label"), "a mask has one value per node"),
        (lambda g: ClusterGCNSampler(g, 5, seed=-1), "seed=-1"),
        (
            lambda g: SubgraphLoader(g, [0], type("Own", (ShaDowKHopSampler,), {"sample": None})([2])),
            "Own overrides sample",
        ),
    ],
)
def test_mistakes_are_refused(graph: DistGraph, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(graph)


def make_mistakes(folder: str) -> None:
    """Rank 1 is wrong, and rank 0 does not wait for it."""
    dx.init(timeout=60)
    g = dx.DistGraph(folder)
    is_wrong = g.rank() == 1
    with pytest.raises(ConfigError, match="the kind of sampler"):
        dx.DataLoader(g, [g.rank()], dgl.dataloading.NeighborSampler([2]) if is_wrong else SHADOW)
    with pytest.raises(ConfigError, match="prefetch_ndata"):
        ClusterGCNSampler(g, 5, prefetch_ndata="feat" if is_wrong else ["feat"])  # type: ignore[arg-type]
    with pytest.raises(DglxError, match="mets"):
        ClusterGCNSampler(g, 5, method="mets" if is_wrong else "metis")
    with pytest.raises(ConfigError, match="the clusters"):
        ClusterGCNSampler(g, 6 if is_wrong else 5)
    dx.shutdown()


def test_mistakes_of_one_rank_are_shown_on_all(rings: dict[int, Path]) -> None:
    run_ranks(make_mistakes, 2, args=(str(rings[2]),))


def normalize_without_targets(folder: str) -> None:
    """Rank 1 has clusters without targets. Its nodes change the statistics, but its gradients are dropped."""
    dx.init(timeout=60)
    g = dx.DistGraph(folder)
    g.ndata["train_mask"][:] = torch.zeros(g.num_nodes(), dtype=torch.bool)
    g.barrier()
    g.ndata["train_mask"][torch.arange(5)] = torch.ones(5, dtype=torch.bool)
    g.barrier()
    sampler = dx.ClusterGCNSampler(g, 2, prefetch_ndata=["feat"])
    model = dx.wrap(Normalized(), g)
    for graph in dx.DataLoader(g, sampler.split(), sampler):
        if g.rank() == 1:
            with pytest.raises(ConfigError, match="no node of train_mask"):
                model(graph, graph.ndata["feat"])
    dx.shutdown()


class Normalized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = dx.nn.BatchNorm(3), torch.nn.Linear(3, 7)

    def forward(self, graph: dgl.DGLGraph, rows: Tensor) -> Tensor:
        scores: Tensor = self.linear(self.norm(rows))
        return scores


def test_refuses_a_cluster_that_does_not_exist(graph: DistGraph) -> None:
    with pytest.raises(IndexError, match="5"):
        SubgraphLoader(graph, [5], ClusterGCNSampler(graph, 5))


def test_clusters_of_another_graph_are_refused(graph: DistGraph, rings: dict[int, Path]) -> None:
    sampler = ClusterGCNSampler(graph, 5)
    other = DistGraph(rings[2], session=graph.session)
    with pytest.raises(ConfigError, match="the clusters belong to the graph"):
        SubgraphLoader(other, [0], sampler)


def test_fit_refuses_graphs(rings: dict[int, Path]) -> None:
    dx.init()
    g = dx.DistGraph(str(rings[1]))
    loader = dx.DataLoader(g, [0], SHADOW)
    with pytest.raises(ConfigError, match="trains on blocks"):
        dx.fit(Net(), g, loader=loader)
    dx.shutdown()


def test_clusters_of_several_types_are_refused(shop_graph: DistGraph) -> None:
    with pytest.raises(ConfigError, match="one node type and one edge type"):
        ClusterGCNSampler(shop_graph, 5)


def test_refuses_fewer_clusters_than_parts(rings: dict[int, Path]) -> None:
    with start_session(), pytest.raises(ConfigError, match="k=3, but the dataset has 4 parts"):
        ClusterGCNSampler(DistGraph(rings[4]), 3)


@pytest.mark.parametrize("strategy", ["push_pull", "full_graph", "cooperative"])
def test_other_strategies_name_data_parallel(strategy: str, rings: dict[int, Path]) -> None:
    dx.init(strategy)
    g = dx.DistGraph(str(rings[1]))
    for sampler in (SHADOW, ClusterGCNSampler(g, 5)):
        with pytest.raises(ConfigError, match="strategy='data_parallel'"):
            dx.DataLoader(g, [0], sampler)
    dx.shutdown()
