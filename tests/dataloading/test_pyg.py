"""PyG: same seeds, same loss as the DGL path. Layers of both libraries have the same weights."""

import sys
from collections.abc import Callable
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.dataloading.pyg import merge_hops
from dglx_dist.errors import ConfigError
from tests.helpers import refusal
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.training import hetero

pytest.importorskip("torch_geometric", reason="needs PyTorch Geometric")

EPOCHS, RATE, HIDDEN, TOLERANCE = 2, 0.3, 8, 1e-10
ALL, SOME = [-1, -1], [3, 2]
AUTHOR_WIDTH = 3


class Sage(nn.Module):
    """Two layers of SAGEConv of DGL, or of PyG with the same weights."""

    def __init__(self, library: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        widths = ((equality.WIDTH, HIDDEN), (HIDDEN, equality.CLASSES))
        layers = [dgl.nn.SAGEConv(*width, "mean").double() for width in widths]
        self.layers = nn.ModuleList(layers if library == "dgl" else map(copy_sage, layers))

    def forward(self, graphs: Any, x: Tensor) -> Tensor:
        h = self.layers[0](*order(graphs[0], x)).relu()
        scores: Tensor = self.layers[1](*order(graphs[1], h))
        return scores

    def gradients(self) -> list[Any]:
        """Return the gradients in the order of PyG's parameters."""
        layers: Any = self.layers
        if hasattr(layers[0], "lin_l"):
            return [parameter.grad for parameter in self.parameters()]
        return [
            parameter.grad
            for layer in layers
            for parameter in (layer.fc_neigh.weight, layer.fc_self.bias, layer.fc_self.weight)
        ]


def order(graph: Any, x: Tensor) -> tuple[Any, Any]:
    """Return the arguments of a layer: DGL has the graph first, PyG has the edges last."""
    return (x, graph) if torch.is_tensor(graph) else (graph, x)


def copy_sage(layer: Any) -> nn.Module:
    from torch_geometric.nn import SAGEConv

    copied = SAGEConv(layer.fc_neigh.in_features, layer.fc_neigh.out_features).double()
    state = {"lin_l.weight": layer.fc_neigh.weight, "lin_l.bias": layer.fc_self.bias}
    copied.load_state_dict({**state, "lin_r.weight": layer.fc_self.weight})
    return copied


class Typed(nn.Module):
    """Two layers of a mean for each relation and a map of own rows, by DGL or by PyG."""

    def __init__(self, library: str, etypes: list[Any]) -> None:
        super().__init__()
        self.library = library
        widths = {**hetero.WIDTHS, "author": AUTHOR_WIDTH}
        self.layers = nn.ModuleList(
            self.make_layer(etypes, sizes, width)
            for sizes, width in ((widths, HIDDEN), (dict.fromkeys(widths, HIDDEN), hetero.CLASSES))
        )

    def make_layer(self, etypes: list[Any], sizes: dict[str, int], width: int) -> nn.Module:
        from torch_geometric.nn import HeteroConv, SAGEConv

        torch.manual_seed(width)
        own = nn.ModuleDict({ntype: nn.Linear(size, width).double() for ntype, size in sizes.items()})
        convs = {
            etype: dgl.nn.GraphConv(
                sizes[etype[0]], width, norm="right", bias=False, allow_zero_in_degree=True
            ).double()
            for etype in etypes
        }
        if self.library == "dgl":
            return nn.ModuleList([own, dgl.nn.HeteroGraphConv({etype[1]: convs[etype] for etype in etypes})])
        copied = {}
        for etype, conv in convs.items():
            copied[etype] = SAGEConv(sizes[etype[0]], width, root_weight=False, bias=False).double()
            copied[etype].lin_l.weight.data = conv.weight.data.T.clone()
        return nn.ModuleList([own, HeteroConv(copied)])

    def forward(self, graphs: Any, x: Any) -> Tensor:
        for depth, (own, convolution) in enumerate(self.layers):
            graph = graphs[depth]
            sums = convolution(x, graph) if self.library == "pyg" else convolution(graph, x)
            counts = {ntype: len(rows) for ntype, rows in x.items()}
            if self.library == "dgl":
                counts = {ntype: graph.num_dst_nodes(ntype) for ntype in x}
            x = {ntype: own[ntype](rows[: counts[ntype]]) + sums.get(ntype, 0) for ntype, rows in x.items()}
            x = {ntype: rows.tanh() for ntype, rows in x.items()} if depth == 0 else x
        scores: Tensor = x["paper"]
        return scores

    def gradients(self) -> list[Any]:
        """Return the gradients of own maps and of relations, as PyG has them. Types may be unused."""
        gradients: list[Any] = []
        for own, convolution in self.layers:  # type: ignore[misc]  # pairs of modules
            gradients += [parameter.grad for parameter in own.parameters()]
            weights = [parameter.grad for parameter in convolution.parameters()]
            gradients += weights if self.library == "pyg" else [None if w is None else w.T for w in weights]
        return gradients


def fill(rows: dict[str, Tensor], authors: Tensor) -> dict[str, Tensor]:
    """Add rows of authors, which depend on their ids."""
    return {
        **rows,
        "author": torch.stack([(authors * (k + 1)).double().sin() for k in range(AUTHOR_WIDTH)], 1),
    }


def compute_scores(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return scores and labels of the seeds of a batch of either library."""
    if isinstance(batch, tuple):
        *_, blocks = batch
        if len(blocks[0].srctypes) == 1:
            return model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]
        first = blocks[0].srcnodes
        x = fill({ntype: first[ntype].data["feat"] for ntype in hetero.WIDTHS}, first["author"].data[dgl.NID])
        return model(blocks, x), blocks[-1].dstnodes["paper"].data["label"]
    from torch_geometric.data import Data

    if isinstance(batch, Data):
        return model([batch.edge_index] * 2, batch.x)[: batch.batch_size], batch.y
    x = fill(dict(batch.x_dict), batch["author"].n_id)
    papers = batch["paper"]
    return model([batch.edge_index_dict] * 2, x)[: papers.batch_size], papers.y


def train(g: Any, seeds: Any, make: Callable[[str], nn.Module], library: str, fanouts: list[int]) -> Any:
    """Return the losses and the weights of this rank, and the last batch that has seeds."""
    columns: Any = ["feat"], ["label"]
    if isinstance(seeds, dict):
        columns = {ntype: ["feat"] for ntype in hetero.WIDTHS}, {"paper": ["label"]}
    sampler = dgl.dataloading.NeighborSampler(
        fanouts, prefetch_node_feats=columns[0], prefetch_labels=columns[1]
    )
    loader = dx.DataLoader(g, seeds, sampler, batch_size=5, shuffle=True, output=library)
    model = dx.wrap(make(library), g)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, last = [], None
    for _ in range(EPOCHS):
        for batch in loader:
            scores, labels = compute_scores(model, batch)
            loss = F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            last = batch if len(labels) else last
    gradients = [None if rows is None else rows.numpy() for rows in model.module.gradients()]
    return losses, gradients, last


def train_both(folder: str, typed: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with dx.init("data_parallel", seed=2):
        g = dx.DistGraph(folder)
        for library in ("dgl", "pyg"):
            results[library] = train(g, dx.node_split(g.ndata["train_mask"]), Sage, library, ALL)[:2]
        *_, batch = train(g, dx.node_split(g.ndata["train_mask"]), Sage, "pyg", SOME)
        results["sampled"] = describe(g, batch)
        g.close()
        g = dx.DistGraph(typed)
        papers = {"paper": dx.node_split(g.nodes["paper"].data["train_mask"], ntype="paper")}
        for library in ("dgl", "pyg"):
            make = lambda library, etypes=g.canonical_etypes: Typed(library, etypes)  # noqa: E731
            results[f"typed {library}"] = train(g, papers, make, library, ALL)[:2]
        g.close()
    return results


def describe(g: Any, batch: Any) -> dict[str, Any]:
    """Compare a sampled batch with the graph, and DGL's layers on its edges with PyG's."""
    ends = batch.n_id[batch.edge_index]
    expected = torch.stack(g.find_edges(batch.e_id))
    graph = dgl.graph(tuple(batch.edge_index), num_nodes=batch.num_nodes)
    with torch.no_grad():
        by_dgl, by_pyg = Sage("dgl")([graph] * 2, batch.x), Sage("pyg")([batch.edge_index] * 2, batch.x)
    return {
        "edges": torch.equal(ends, expected),
        "rows": torch.equal(batch.x, g.ndata["feat"][batch.n_id]),
        "distinct": len(batch.n_id.unique()) == len(batch.n_id) == sum(batch.num_sampled_nodes),
        "degrees": int(graph.in_degrees().max()),
        "sampled edges": sum(batch.num_sampled_edges) == batch.edge_index.shape[1],
        "difference": float((by_dgl - by_pyg).abs().max()),
    }


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(hetero.write_parts(tmp_path_factory.mktemp("typed")))


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (2, 1)])
def test_same_seeds_same_loss_as_the_dgl_path(
    dataset: str, typed: str, ranks: int, ranks_per_server: int
) -> None:
    for result in run_ranks(train_both, ranks, args=(dataset, typed), ranks_per_server=ranks_per_server):
        for name in ("", "typed "):
            (losses, gradients), (dgl_losses, dgl_gradients) = result[f"{name}pyg"], result[f"{name}dgl"]
            assert len(losses) > EPOCHS
            assert np.allclose(losses, dgl_losses, rtol=0, atol=TOLERANCE, equal_nan=True)
            for rows, dgl_rows in zip(gradients, dgl_gradients, strict=True):
                assert (rows is None) == (dgl_rows is None)
                assert rows is None or np.abs(rows - dgl_rows).max() <= TOLERANCE
            assert max(np.abs(rows).max() for rows in gradients if rows is not None) > 1e-3
        sampled = result["sampled"]
        assert sampled.pop("difference") <= TOLERANCE
        # Edges that blocks draw again would give a node more in-edges than its fan-out.
        assert sampled.pop("degrees") == max(SOME)
        assert all(sampled.values()), sampled


def test_every_node_is_expanded_once() -> None:
    """The path 3, 2, 1, 0 and the edge from 0 to 1: the second hop of 0 would draw the edge from 1 again."""
    graph = dgl.graph(([3, 2, 1, 0], [2, 1, 0, 1]))
    blocks = dgl.dataloading.MultiLayerFullNeighborSampler(2).sample_blocks(graph, torch.tensor([0]))[2]
    rows, edges = merge_hops(blocks)
    nodes = [blocks[0].srcdata[dgl.NID][hop].tolist() for hop in rows["_N"]]
    assert nodes == [[0], [1], [2]]
    # DGL may return a node's in-edges in any order.
    hops = [sorted(zip(ids.tolist(), *ends.tolist(), strict=True)) for ends, ids in edges["_N", "_E", "_N"]]
    assert hops == [[(2, 1, 0)], [(1, 2, 1), (3, 0, 1)]]


def step_unwrapped(folder: str) -> str:
    with dx.init("data_parallel"):
        g = dx.DistGraph(folder)
        sampler = dgl.dataloading.NeighborSampler(
            ALL, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        seeds = dx.node_split(g.ndata["train_mask"])
        model = Sage("pyg")
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for batch in dx.DataLoader(g, seeds, sampler, batch_size=20, output="pyg"):
            F.cross_entropy(*compute_scores(model, batch)).backward()
            return refusal(optimizer.step, ConfigError)
    return ""


def test_a_model_without_wrap_is_refused(dataset: str) -> None:
    for message in run_ranks(step_unwrapped, 2, args=(dataset,)):
        assert "dx.wrap" in message


def open_loader(g: Any, sampler: Any = None, **options: Any) -> str:
    sampler = sampler or dgl.dataloading.NeighborSampler(ALL)
    return refusal(lambda: dx.DataLoader(g, torch.arange(3), sampler, **options), ConfigError)


def test_what_has_no_such_batches_is_refused(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = dgl.dataloading
    for strategy in ("push_pull", "full_graph", "shared_preload", "cooperative"):
        with dx.init(strategy):
            assert "use strategy='data_parallel'" in open_loader(dx.DistGraph(dataset), output="pyg")
    with dx.init("data_parallel"):
        g = dx.DistGraph(dataset)
        assert "output='tf' must be 'dgl' or 'pyg'" in open_loader(g, output="tf")
        assert "Leave out disjoint=True" in open_loader(g, output="pyg", disjoint=True)
        for other in (
            sampling.ShaDowKHopSampler([2]),
            sampling.as_edge_prediction_sampler(sampling.NeighborSampler(ALL)),
        ):
            assert "Use NeighborSampler" in open_loader(g, other, output="pyg")
        columns = sampling.NeighborSampler(ALL, prefetch_edge_feats=["weight"])
        assert "g.edata[name][batch.e_id]" in open_loader(g, columns, output="pyg")
        monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
        assert "pip install torch_geometric" in open_loader(g, output="pyg")
