"""Layers to compare, each from width 4 to width 4, as modules of (graph, h): all of dgl.nn, and by hand.

What runs where is the table at the end: LAYERS on blocks and on local graphs; ON_GRAPHS on local graphs
alone, as DGL runs them on no block; REFUSED nowhere, with the words of the refusal.
"""

from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import torch
from dgl import nn as dglnn
from torch import Tensor, nn

WIDTH, WIDE, NUM_RELATIONS = 4, 6, 3


class Called(nn.Module):
    """A module with the call that it needs: its inner one, the graph and the rows."""

    def __init__(self, inner: nn.Module, call: Callable[[Any, Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self._call = inner, call

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        return self._call(self.inner, graph, h)


def flat(conv: nn.Module) -> nn.Module:
    return Called(conv, lambda conv, g, h: conv(g, h).flatten(1))


def with_edges(conv: nn.Module, **taken: Callable[[Any], Tensor]) -> nn.Module:
    def call(conv: Any, g: Any, h: Tensor) -> Tensor:
        out = conv(g, h, **{name: take(g) for name, take in taken.items()})
        return out[0] if isinstance(out, tuple) else out

    return Called(conv, call)


class Residual(nn.Module):
    """A module around a convolution: norm, activation, and the destinations' own rows added."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), dglnn.SAGEConv(width, width, "mean")

    def forward(self, block: Any, h: Tensor) -> Tensor:
        return h[: block.num_dst_nodes()] + self.conv(block, torch.relu(self.norm(h)))


def functions(linear: Any, g: Any, h: Tensor) -> Tensor:
    with g.local_scope():
        g.srcdata["h"] = h
        g.update_all(
            lambda edges: {"m": linear(edges.src["h"])},
            lambda nodes: {"o": torch.logsumexp(nodes.mailbox["m"], 1)},
        )
        return g.dstdata["o"]


class WeightedMean(nn.Module):
    """A layer by hand that says that it sums."""

    sums_sources = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, g: Any, h: Tensor) -> Tensor:
        with g.local_scope():
            g.srcdata["h"], g.edata["w"] = h, weights(g)
            g.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "o"))
            return self.linear(torch.cat([h[: g.num_dst_nodes()], g.dstdata["o"]], 1))


def between(linear: Any, g: Any, h: Tensor) -> Tensor:
    with g.local_scope():
        g.srcdata["h"], g.dstdata["t"] = h, h[: g.num_dst_nodes()]
        g.apply_edges(lambda edges: {"e": torch.cat([edges.src["h"], edges.dst["t"]], 1)})
        g.edata["e"] = torch.relu(linear(g.edata["e"]))
        g.update_all(fn.copy_e("e", "m"), fn.sum("m", "o"), lambda nodes: {"o": nodes.data["o"] * 2})
        return g.dstdata["o"]


def initial(**taken: Callable[[Any], Tensor]) -> nn.Module:
    def call(conv: Any, g: Any, h: Tensor) -> Tensor:
        return conv(g, h, torch.sin(h), **{name: take(g) for name, take in taken.items()})

    return Called(dglnn.GCN2Conv(WIDTH, 1, alpha=0.3), call)


def _ids(g: Any) -> Tensor:
    return g.edata[dgl.EID] if dgl.EID in g.edata else torch.arange(g.num_edges())


def weights(g: Any) -> Tensor:
    return 1.0 + (_ids(g) % 5).double() / 7


def relations(g: Any) -> Tensor:
    return _ids(g) % NUM_RELATIONS


def features(width: int) -> Callable[[Any], Tensor]:
    return lambda g: torch.cos(_ids(g).double().unsqueeze(1) * torch.arange(1.0, width + 1))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sage mean": lambda: dglnn.SAGEConv(WIDTH, WIDTH, "mean"),
    "sage pool": lambda: dglnn.SAGEConv(WIDTH, WIDTH, "pool"),
    "sage gcn": lambda: dglnn.SAGEConv(WIDTH, WIDTH, "gcn"),
    "sage lstm": lambda: dglnn.SAGEConv(WIDTH, WIDTH, "lstm"),
    "sage weighted": lambda: with_edges(dglnn.SAGEConv(WIDTH, WIDTH, "mean"), edge_weight=weights),
    "gcn both": lambda: dglnn.GraphConv(WIDTH, WIDTH, norm="both"),
    "gcn left": lambda: dglnn.GraphConv(WIDTH, WIDTH, norm="left"),
    "gcn right": lambda: dglnn.GraphConv(WIDTH, WIDTH, norm="right"),
    "gcn none": lambda: dglnn.GraphConv(WIDTH, WIDTH, norm="none"),
    "gcn weighted": lambda: with_edges(dglnn.GraphConv(WIDTH, WIDTH), edge_weight=weights),
    "gat": lambda: flat(dglnn.GATConv(WIDTH, 2, 2)),
    "gatv2": lambda: flat(dglnn.GATv2Conv(WIDTH, 2, 2)),
    "gin": lambda: dglnn.GINConv(_mlp(), "sum", learn_eps=True),
    "gin max": lambda: dglnn.GINConv(_mlp(), "max"),
    "edge": lambda: dglnn.EdgeConv(WIDTH, WIDTH),
    "dot gat": lambda: flat(dglnn.DotGatConv(WIDTH, 2, 2)),
    "agnn": lambda: dglnn.AGNNConv(),
    "relations": lambda: with_edges(
        dglnn.RelGraphConv(WIDTH, WIDTH, NUM_RELATIONS, num_bases=2), etypes=relations
    ),
    "gat residual": lambda: flat(dglnn.GATConv(WIDTH, 2, 2, residual=True)),
    "gatv2 residual": lambda: flat(dglnn.GATv2Conv(WIDTH, 2, 2, residual=True)),
    "gat weighted": lambda: flat(with_edges(dglnn.GATConv(WIDTH, 2, 2), edge_weight=weights)),
    "edge gat": lambda: flat(with_edges(dglnn.EdgeGATConv(WIDTH, 3, 2, 2), edge_feat=features(3))),
    "egat": lambda: Called(
        dglnn.EGATConv((WIDTH, WIDTH), 3, 2, 3, 2),
        lambda conv, g, h: conv(g, (h, h[: g.num_dst_nodes()]), features(3)(g))[0].flatten(1),
    ),
    "gine": lambda: with_edges(dglnn.GINEConv(_mlp(), learn_eps=True), edge_feat=features(WIDTH)),
    "nn": lambda: with_edges(
        dglnn.NNConv(WIDTH, WIDTH, nn.Linear(3, WIDTH * WIDTH), "mean", residual=True), efeat=features(3)
    ),
    "cf": lambda: with_edges(dglnn.CFConv(WIDTH, 3, 5, WIDTH), edge_feats=features(3)),
    "gmm": lambda: with_edges(dglnn.GMMConv(WIDTH, WIDTH, 3, 2, "mean", residual=True), pseudo=features(3)),
    "hgt": lambda: Called(
        dglnn.HGTConv(WIDTH, 2, 2, 2, NUM_RELATIONS, 0.0),
        lambda conv, g, h: conv(g, h, (h[:, 0] > 0).long(), relations(g)),
    ),
    "weighted mean": WeightedMean,
    "residual": Residual,
    "functions": lambda: Called(nn.Linear(WIDTH, WIDTH), functions),
    "between": lambda: Called(nn.Linear(2 * WIDTH, WIDTH), between),
}
"""On blocks and on local graphs."""

ON_GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "sgc": lambda: dglnn.SGConv(WIDTH, WIDTH, k=2),
    "tag": lambda: dglnn.TAGConv(WIDTH, WIDTH, k=2),
    "cheb": lambda: dglnn.ChebConv(WIDTH, WIDTH, 3),
    "gated": lambda: dglnn.GatedGraphConv(WIDTH, WIDTH, 2, 1),
    "gcn2": initial,
    "egnn": lambda: Called(
        dglnn.EGNNConv(WIDTH, 5, WIDTH, 3), lambda conv, g, h: conv(g, h, h[:, :3], features(3)(g))[0]
    ),
    "atomic": lambda: Called(
        dglnn.AtomicConv(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), torch.ones(1, 2)),
        lambda conv, g, h: conv(g, h[:, :1], features(1)(g).abs()).repeat(1, 2),
    ),
    "egat alone": lambda: flat(with_edges(dglnn.EGATConv(WIDTH, 3, 2, 3, 2), efeats=features(3))),
}
"""Those that DGL runs on whole graphs alone."""

RECOMPUTED: dict[str, Callable[[], nn.Module]] = {
    # It takes the memory of what it is given.
    "reversible": lambda: Called(dglnn.GroupRevRes(Residual(2), 2), lambda conv, g, h: conv(g, h.clone()))
}
"""Like ON_GRAPHS, for ranks that all go backward at the same time, as processes do."""

_REVERSED, _OF_ALL = "out-edges of each source", "only those of this rank"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "over sources": (
        lambda: Called(
            nn.Identity(), lambda _, g, __: dgl.ops.edge_softmax(g, features(1)(g), norm_by="src")
        ),
        _REVERSED,
    ),
    "gcn2 weighted": (lambda: initial(edge_weight=weights), _REVERSED),
    "tag weighted": (lambda: with_edges(dglnn.TAGConv(WIDTH, WIDTH, 2), edge_weight=weights), _REVERSED),
    "sgc weighted": (lambda: with_edges(dglnn.SGConv(WIDTH, WIDTH, 2), edge_weight=weights), _REVERSED),
    "appnp weighted": (lambda: with_edges(dglnn.APPNPConv(2, 0.2), edge_weight=weights), _REVERSED),
    "gated types": (
        lambda: with_edges(dglnn.GatedGraphConv(WIDTH, WIDTH, 2, NUM_RELATIONS), etypes=relations),
        "all edges at once",
    ),
    # These two have a batch norm, besides: HaloModel refuses them earlier.
    "pna": (lambda: dglnn.PNAConv(WIDTH, WIDTH, ["mean"], ["identity"], 2.5), _OF_ALL),
    "dgn": (lambda: dglnn.DGNConv(WIDTH, WIDTH, ["sum"], ["identity"], 2.5), _OF_ALL),
    "twirls": (
        lambda: dglnn.TWIRLSConv(WIDTH, WIDTH, 8, 2, num_mlp_before=1, num_mlp_after=1, norm="none"),
        "change the graph before it is partitioned",
    ),
}
"""On local graphs; on blocks they are refused, too."""


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = make(), make()
        self.double()

    def forward(self, graphs: Any, h: Tensor) -> Tensor:
        first_graph, second_graph = graphs if isinstance(graphs, list) else (graphs, graphs)
        return self.second(second_graph, torch.tanh(self.first(first_graph, h)))


class Jumping(nn.Module):
    """A trained row per node beside its features, and rows of every layer carried to the last one.

    Called with blocks or with one graph; both have ``dgl.NID`` on their nodes.
    """

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(num_nodes, WIDTH)
        self.convs = nn.ModuleList(dglnn.SAGEConv(WIDTH, WIDTH, "mean") for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.jump, self.out = dglnn.JumpingKnowledge("cat"), nn.Linear(3 * WIDTH, WIDTH)
        self.double()

    def forward(self, graphs: Any, h: Tensor) -> Tensor:
        both = graphs if isinstance(graphs, list) else [graphs, graphs]
        h = h + self.embedding(both[0].srcdata[dgl.NID][: len(h)])
        rows = [h]
        for graph, conv, norm in zip(both, self.convs, self.norms, strict=True):
            h = h[: graph.num_dst_nodes()] + torch.relu(conv(graph, norm(h)))
            rows.append(h)
        last = both[-1].num_dst_nodes()
        # As users write it, whatever the number of rows.
        jumped = self.jump([layer_rows[:last] for layer_rows in rows]).view(last, -1)
        return self.out(jumped)
