"""Layers to compare, each from width 4 to width 4, as modules of (graph, h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import torch
from dgl import nn as dglnn
from torch import Tensor, nn

WIDTH, WIDE, NUM_RELATIONS = 4, 6, 3


class Flat(nn.Module):
    """A convolution with heads, whose output is one row per node again."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        return self.conv(graph, h).flatten(1)


class Residual(nn.Module):
    """A module around a convolution: norm, activation, and the destinations' own rows added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(WIDTH), dglnn.SAGEConv(WIDTH, WIDTH, "mean")

    def forward(self, block: Any, h: Tensor) -> Tensor:
        return h[: block.num_dst_nodes()] + self.conv(block, torch.relu(self.norm(h)))


class ByHand(nn.Module):
    """Message passing with DGL's functions; the rows are first and not where a hook looks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, g: Any, h: Tensor) -> Tensor:
        with g.local_scope():
            g.srcdata["h"] = h
            g.update_all(fn.copy_u("h", "m"), fn.mean("m", "o"))
            return self.linear(torch.cat([h[: g.num_dst_nodes()], g.dstdata["o"]], 1))


class Attention(nn.Module):
    """Edges first, softmax, then messages, all by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, g: Any, h: Tensor) -> Tensor:
        with g.local_scope():
            g.srcdata.update({"h": h, "k": self.key(h)})
            g.dstdata["q"] = self.query(h[: g.num_dst_nodes()])
            g.apply_edges(fn.u_dot_v("k", "q", "s"))
            g.edata["a"] = dgl.ops.edge_softmax(g, g.edata["s"])
            g.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "o"))
            return g.dstdata["o"]


class Functions(nn.Module):
    """Messages and reductions that are functions of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, g: Any, h: Tensor) -> Tensor:
        with g.local_scope():
            g.srcdata["h"] = h
            g.update_all(self._message, self._reduce)
            return g.dstdata["o"]

    def _message(self, edges: Any) -> dict[str, Tensor]:
        return {"m": self.linear(edges.src["h"])}

    def _reduce(self, nodes: Any) -> dict[str, Tensor]:
        return {"o": torch.logsumexp(nodes.mailbox["m"], 1)}


class EdgeValues(nn.Module):
    """A convolution that takes a value per edge."""

    def __init__(self, conv: nn.Module, **taken: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.conv, self._taken = conv, taken

    def forward(self, g: Any, h: Tensor) -> Tensor:
        return self.conv(g, h, **{name: take(g) for name, take in self._taken.items()})


def weights(g: Any) -> Tensor:
    """(E,) positive weights, each of its edge."""
    ids = g.edata[dgl.EID] if dgl.EID in g.edata else torch.arange(g.num_edges())
    return 1.0 + (ids % 5).double() / 7


def relations(g: Any) -> Tensor:
    """(E,) edge types."""
    ids = g.edata[dgl.EID] if dgl.EID in g.edata else torch.arange(g.num_edges())
    return ids % NUM_RELATIONS


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sage mean": lambda: dglnn.SAGEConv(WIDTH, WIDTH, "mean"),
    "sage pool": lambda: dglnn.SAGEConv(WIDTH, WIDTH, "pool"),
    "sage gcn": lambda: dglnn.SAGEConv(WIDTH, WIDTH, "gcn"),
    "sage lstm": lambda: dglnn.SAGEConv(WIDTH, WIDTH, "lstm"),
    "sage weighted": lambda: EdgeValues(dglnn.SAGEConv(WIDTH, WIDTH, "mean"), edge_weight=weights),
    "gcn both": lambda: dglnn.GraphConv(WIDTH, WIDTH, norm="both"),
    "gcn left": lambda: dglnn.GraphConv(WIDTH, WIDTH, norm="left"),
    "gcn right": lambda: dglnn.GraphConv(WIDTH, WIDTH, norm="right"),
    "gcn none": lambda: dglnn.GraphConv(WIDTH, WIDTH, norm="none"),
    "gcn weighted": lambda: EdgeValues(dglnn.GraphConv(WIDTH, WIDTH), edge_weight=weights),
    "gat": lambda: Flat(dglnn.GATConv(WIDTH, 2, 2)),
    "gatv2": lambda: Flat(dglnn.GATv2Conv(WIDTH, 2, 2)),
    "gin": lambda: dglnn.GINConv(_mlp(), "sum", learn_eps=True),
    "gin max": lambda: dglnn.GINConv(_mlp(), "max"),
    "edge": lambda: dglnn.EdgeConv(WIDTH, WIDTH),
    "dot gat": lambda: Flat(dglnn.DotGatConv(WIDTH, 2, 2)),
    "agnn": lambda: dglnn.AGNNConv(),
    "relations": lambda: EdgeValues(
        dglnn.RelGraphConv(WIDTH, WIDTH, NUM_RELATIONS, num_bases=2), etypes=relations
    ),
    "residual": Residual,
    "by hand": ByHand,
    "attention": Attention,
    "functions": Functions,
}

ON_GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "sgc": lambda: dglnn.SGConv(WIDTH, WIDTH, k=2),
    "tag": lambda: dglnn.TAGConv(WIDTH, WIDTH, k=2),
    "cheb": lambda: dglnn.ChebConv(WIDTH, WIDTH, 3),
    "gated": lambda: dglnn.GatedGraphConv(WIDTH, WIDTH, 2, 1),
}
"""Those that DGL runs on whole graphs alone."""


class Stack(nn.Module):
    """Two layers, on two blocks or on one graph."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = make(), make()
        self.double()

    def forward(self, graphs: Any, h: Tensor) -> Tensor:
        one, two = graphs if isinstance(graphs, list) else (graphs, graphs)
        return self.second(two, torch.tanh(self.first(one, h)))
