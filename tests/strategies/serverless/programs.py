"""Small models and their programs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dgl
import dgl.function as fn
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, elu, relu

from dglx_dist.records import Array
from dglx_dist.strategies.serverless.cut import CLASS_LABEL, capture
from dglx_dist.strategies.serverless.parameter_server import ParameterServer, Update
from dglx_dist.strategies.serverless.program import EDGE_DATA, Program, Slot

FEATURES, CLASSES, NUM_TRAIN = 5, 3, 6
WEIGHT = {"w": Slot(name=f"{EDGE_DATA}w", shape=(1,), per="edge")}
"""Data of edges that the models read."""


def weighted_sum(block: Any, h: Tensor) -> Tensor:
    with block.local_scope():
        block.srcdata["h"] = h
        block.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "s"))
        result: Tensor = block.dstdata["s"]
        return result


class Gcn(nn.Module):
    """Weighted sums, each followed by a linear layer, as in the paper."""

    def __init__(self, widths: Sequence[int] = (FEATURES, 4, CLASSES)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = layer(weighted_sum(block, relu(h) if number else h))
        return h


class Sage(nn.Module):
    """Sums beside the own row."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (FEATURES, 4), (4, CLASSES)
        self.neighbours = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in pairs)
        self.own = nn.ModuleList(nn.Linear(*pair) for pair in pairs)

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            h = relu(h) if number else h
            h = self.neighbours[number](weighted_sum(block, h)) + self.own[number](h)
        return h


class Gat(nn.Module):
    """Two layers of attention, the heads flattened and averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dgl.nn.GATConv(FEATURES, 2, 3, allow_zero_in_degree=True)
        self.second = dgl.nn.GATConv(6, CLASSES, 4, residual=True, allow_zero_in_degree=True)

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        h = elu(self.first(blocks[0], h)).flatten(1)
        result: Tensor = self.second(blocks[1], h).mean(1)
        return result


class Dropping(nn.Module):
    """Dropout of features, rows and attention, LayerNorm, and a maximum over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        free = {"allow_zero_in_degree": True}
        self.features, self.rows = nn.Dropout(0.3), nn.Dropout(0.5)
        self.first = dgl.nn.GraphConv(FEATURES, 4, norm="right", **free)
        self.norm = nn.LayerNorm(4)
        self.second = dgl.nn.GATConv(4, 3, 2, feat_drop=0.2, attn_drop=0.4, **free)
        self.third = dgl.nn.SAGEConv(6, CLASSES, "pool")

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        h = relu(self.norm(self.first(blocks[0], self.features(h))))
        h = elu(self.second(blocks[1], self.rows(h))).flatten(1)
        result: Tensor = self.third(blocks[2], self.rows(h))
        return result


class Stack(nn.Module):
    """Two convolutions with an activation and dropout between them; heads are flattened, then averaged."""

    def __init__(self, first: nn.Module, second: nn.Module, *edge_data: str) -> None:
        super().__init__()
        self.layers, self.dropout = nn.ModuleList([first, second]), nn.Dropout(0.3)
        self.edge_data = edge_data

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        h = self.layers[0](blocks[0], h, *self.read_edges(blocks[0])).flatten(1)
        h = self.layers[1](blocks[1], self.dropout(elu(h)), *self.read_edges(blocks[1]))
        return h.mean(1) if h.dim() == 3 else h

    def read_edges(self, block: Any) -> list[Tensor]:
        weights = block.edata["w"]
        values = {"w": weights, "type": (weights[:, 0] > 0.5).long()}
        return [values[name] for name in self.edge_data]


class Jumping(nn.Module):
    """A model of a user's own: an MLP between layers, a gate, and jumping knowledge."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(FEATURES, 6, "mean")
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 6))
        self.second = dgl.nn.SAGEConv(6, 6, "gcn")
        self.norm, self.gate, self.head = nn.LayerNorm(6), nn.GRUCell(6, 6), nn.Linear(12, CLASSES)

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        first = self.mlp(self.first(blocks[0], h))
        second = self.gate(self.norm(self.second(blocks[1], first)), first)
        result: Tensor = self.head(torch.cat([first, second], 1))
        return result


class Hops(nn.Module):
    """Layers of DGL that make several hops in one call, on whole graphs only."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(FEATURES, width), layer, nn.Linear(width, CLASSES)

    def forward(self, graphs: Sequence[Any], h: Tensor) -> Tensor:
        result: Tensor = self.after(torch.tanh(self.layer(graphs[0], self.before(h))))
        return result


class Linear(nn.Module):
    """Two linear layers around one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        result: Tensor = self.second(weighted_sum(blocks[0], self.first(h)))
        return result


FREE = {"allow_zero_in_degree": True}
MODELS: dict[str, Callable[[], nn.Module]] = {"gcn": Gcn, "sage": Sage, "gat": Gat, "dropping": Dropping}
"""Models that are tried with every number of servers and intervals."""
CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "GraphConv": lambda: Stack(dgl.nn.GraphConv(FEATURES, 4, **FREE), dgl.nn.GraphConv(4, CLASSES, **FREE)),
    "SAGEConv": lambda: Stack(dgl.nn.SAGEConv(FEATURES, 4, "gcn"), dgl.nn.SAGEConv(4, CLASSES, "pool")),
    "GATv2Conv": lambda: Stack(
        dgl.nn.GATv2Conv(FEATURES, 2, 3, 0.2, 0.3, **FREE),
        dgl.nn.GATv2Conv(6, CLASSES, 2, residual=True, **FREE),
    ),
    "GINConv": lambda: Stack(
        dgl.nn.GINConv(
            nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, 4)), "sum", learn_eps=True
        ),
        dgl.nn.GINConv(nn.Linear(4, CLASSES), "max"),
    ),
    "EdgeConv": lambda: Stack(dgl.nn.EdgeConv(FEATURES, 4, **FREE), dgl.nn.EdgeConv(4, CLASSES, **FREE)),
    "DotGatConv": lambda: Stack(
        dgl.nn.DotGatConv(FEATURES, 2, 2, **FREE), dgl.nn.DotGatConv(4, CLASSES, 2, **FREE)
    ),
    "NNConv": lambda: Stack(
        dgl.nn.NNConv(FEATURES, 4, nn.Linear(1, 4 * FEATURES), "mean"),
        dgl.nn.NNConv(4, CLASSES, nn.Sequential(nn.Linear(1, 4 * CLASSES), nn.Tanh()), "max"),
        "w",
    ),
    "RelGraphConv": lambda: Stack(
        dgl.nn.RelGraphConv(FEATURES, 4, 2, "basis", 2), dgl.nn.RelGraphConv(4, CLASSES, 2), "type"
    ),
    "a model of one's own": Jumping,
    "APPNPConv": lambda: Hops(dgl.nn.APPNPConv(3, 0.2, edge_drop=0.3), 4),
    "GatedGraphConv": lambda: Hops(dgl.nn.GatedGraphConv(4, 4, 2, 1), 4),
    "TAGConv": lambda: Hops(dgl.nn.TAGConv(4, 4, 2), 4),
}
"""Models that are tried once."""
ON_GRAPHS = ("APPNPConv", "GatedGraphConv", "TAGConv")


@contextmanager
def double_by_default() -> Iterator[None]:
    """APPNPConv makes weights of edges of the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def make_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    with double_by_default():
        return {**MODELS, **CONVOLUTIONS}[name]().double()


def program_of(model: nn.Module, features: int = FEATURES, num_train: int = NUM_TRAIN) -> Program:
    return capture(model, features, WEIGHT).with_loss(cross_entropy, CLASS_LABEL, num_train).program


@functools.cache
def make_program(name: str) -> Program:
    model = make_model(name)
    with double_by_default():
        return program_of(model)


@functools.cache
def gcn(widths: tuple[int, ...] = (FEATURES, 4, CLASSES), num_train: int = NUM_TRAIN) -> Program:
    return program_of(Gcn(widths).double(), widths[0], num_train)


sage = functools.partial(make_program, "sage")
gat = functools.partial(make_program, "gat")
dropping = functools.partial(make_program, "dropping")


@functools.cache
def linear() -> Program:
    """The steps AV1, SC1, GA1 and AV2. Weights are a matrix and a bias, then a matrix."""
    return program_of(Linear().double(), 3)


LINEAR_STEPS = {0: ("first.bias", "first.weight"), 3: ("second.weight",)}
"""Steps of :func:`linear` with weights."""


def linear_weights() -> list[Array]:
    draw = np.random.default_rng(99)
    return [draw.standard_normal(shape) for shape in linear().weight_shapes.values()]


@functools.cache
def linear_gradients(interval: int, epoch: int, step: int) -> list[Array]:
    draw, shapes = np.random.default_rng([interval, epoch, step]), linear().weight_shapes
    return [draw.standard_normal(shapes[name]) for name in LINEAR_STEPS[step]]


def exchange(servers: Sequence[ParameterServer]) -> int | None:
    """Exchange sums between the servers of one process and update once. None while gradients are missing."""
    ready = [server.own_sums() for server in servers]
    results = [item for item in ready if item is not None]
    if len(results) < len(servers):
        return None
    for server in servers:
        for second, (epoch, vector) in zip(servers, results, strict=True):
            if second is not server:
                server.receive_sums(second.index, epoch, vector)
    updates = [server.advance() for server in servers]
    return updates[0]


def make_update(kind: str, names: Sequence[str], **settings: Any) -> Update:
    """Make the update of a plain optimizer for weights with these names."""
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in names}
    optimizer = getattr(torch.optim, kind)(parameters.values(), **settings)
    return Update(optimizer, parameters, names)
