"""The one experiment of the equality matrix: what is trained, by plain DGL in one process and by us on ranks.

500 nodes, float64, plain SGD, no dropout, every in-neighbour, one batch of all training nodes, ten steps.
"""

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.internals import message_passing
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.strategies.base import STRATEGIES, Objective, WrappedModel
from dglx_dist.training.models import build_model

NUM_NODES, NUM_EDGES, WIDTH, HIDDEN, CLASSES, STEPS, RATE = 500, 3000, 7, 8, 4, 10, 0.3
NUM_PARTS = 4
MODELS = ("sage", "gcn", "gcn_symmetric", "gat")
DEEP_MODELS = (*MODELS, "resgcn")
"""With residuals, LayerNorm, and an encoder in front of the first convolution."""
SUMS = (*DEEP_MODELS, "gin")
"""With layers of ``dgl.nn`` that no ready-made model has."""
STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gatv2": ("gatv2", {}),
    "gin sums": ("gin", {}),
    "sage norm": ("sage", {"norm": "layer"}),
    "sage cat": ("sage", {"norm": "layer", "residual": True, "jk": "cat"}),
    "gat max": ("gat", {"residual": True, "jk": "max"}),
    "gatv2 cat": ("gatv2", {"jk": "cat"}),
    "gin residual": ("gin", {"norm": "layer", "residual": True}),
}
"""Ready-made models, and what is between their layers."""
FEW = ("appnp", "sage cat", "gat max", "gatv2 cat", "gin residual")

SHARES = {"even": (1.0, 1.0, 1.0, 1.0), "uneven": (1.0, 5.0, 2.0, 9.0), "empty": (3.0, 0.0, 4.0, 0.0)}
"""How the training nodes are cut over the ranks, as proportions; one rank always has all of them."""


@dataclass(frozen=True)
class Column:
    """One column of the matrix: a strategy, its options, and what its loader is told beyond the seeds."""

    strategy: str
    options: tuple[tuple[str, Any], ...] = ()
    models: tuple[str, ...] = MODELS
    shares: tuple[str, ...] = tuple(SHARES)
    steps: int = STEPS
    keeps_loader: bool = False
    """Whether all models are trained from one loader."""
    name: str = ""
    is_on_torch_path: bool = False
    """Whether torch runs DGL's operators: DGLX_MESSAGE_PASSING=torch."""

    def __str__(self) -> str:
        named = [self.strategy, *(f"{key}={value}" for key, value in self.options)]
        return (self.name or "-".join(named)) + " in torch" * self.is_on_torch_path


def raw_graph() -> RawGraph:
    """A directed random graph; node 0 and some others have no in-edge, every third node is for training."""
    random = np.random.default_rng(3)
    pairs = np.unique(random.integers(NUM_NODES, size=(NUM_EDGES, 2)), axis=0)
    pairs = pairs[(pairs[:, 1] != 0) & (pairs[:, 0] != pairs[:, 1])]
    return RawGraph(
        name="equality",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (pairs[:, 0].copy(), pairs[:, 1].copy())},
        node_data={
            NODE_TYPE: {
                "feat": random.standard_normal((NUM_NODES, WIDTH)),
                "label": random.integers(CLASSES, size=NUM_NODES),
                "train_mask": np.arange(NUM_NODES) % 3 == 0,
                "val_mask": np.arange(NUM_NODES) % 3 == 1,
                "test_mask": np.arange(NUM_NODES) % 3 == 2,
            }
        },
        num_classes={NODE_TYPE: CLASSES},
    )


def write_parts(folder: Path) -> Path:
    part_of = np.random.default_rng(4).choice(NUM_PARTS, size=NUM_NODES, p=[0.4, 0.3, 0.2, 0.1])
    assignment = Assignment(
        num_parts=NUM_PARTS, part_of={NODE_TYPE: part_of.astype(np.int32)}, method="test", seed=4
    )
    write_dataset(raw_graph(), assignment, folder / "parts")
    return folder / "parts"


class PlainResidual(nn.Module):
    """ResGCN+ of two convolutions of dgl.nn, as its paper has it."""

    def __init__(self) -> None:
        super().__init__()
        layers = [dgl.nn.SAGEConv(HIDDEN, HIDDEN, "mean") for _ in range(2)]
        self.encoder = nn.Linear(WIDTH, HIDDEN)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(3))
        self.layers = nn.ModuleList(layers)
        self.decoder = nn.Linear(HIDDEN, CLASSES)

    def forward(self, graphs: list[Any], h: Tensor) -> Tensor:
        h = self.encoder(h)
        for layer, norm, graph in zip(self.layers, self.norms, graphs, strict=False):
            h = h + layer(graph, torch.relu(norm(h)))
        scores: Tensor = self.decoder(torch.relu(self.norms[2](h)))
        return scores


class PlainStack(nn.Module):
    """Layers of dgl.nn, with what the option says between them, written down step by step."""

    def __init__(self, kind: str, norm: str = "none", residual: bool = False, jk: str = "none") -> None:
        super().__init__()
        self.kind, self.jk = kind, jk
        second = CLASSES if jk == "none" else HIDDEN
        is_last = (False, jk == "none")
        self.convs = nn.ModuleList(
            _plain_conv(kind, a, b, is_last[i])
            for i, (a, b) in enumerate([(WIDTH, HIDDEN), (HIDDEN, second)])
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(HIDDEN) for _ in range(1 if jk == "none" else 2) if norm == "layer"
        )
        self.skip = nn.Linear(HIDDEN, CLASSES, bias=False) if residual and jk == "none" else None
        self.residual = residual
        self.head = (
            nn.Linear({"none": 1, "cat": 2 * HIDDEN, "max": HIDDEN}[jk], CLASSES) if jk != "none" else None
        )

    def forward(self, graphs: list[Any], x: Tensor) -> Tensor:
        act = F.elu if "gat" in self.kind else torch.relu
        first = self.convs[0](graphs[0], x).flatten(1)
        first = act(self.norms[0](first) if self.norms else first)
        second = self.convs[1](graphs[1], first)
        if self.head is None:
            second = second.mean(1) if second.dim() == 3 else second
            return second + self.skip(first) if self.skip is not None else second
        second = second.flatten(1) + (first if self.residual else 0)
        second = act(self.norms[1](second) if self.norms else second)
        joined = torch.cat([first, second], 1) if self.jk == "cat" else torch.maximum(first, second)
        scores: Tensor = self.head(joined)
        return scores


class PlainAppnp(nn.Module):
    """Two linear maps, then means over in-neighbours that keep a tenth of the first scores."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, graphs: list[Any], x: Tensor) -> Tensor:
        first = h = self.maps(x)
        for graph in graphs:
            graph.ndata["h"] = h
            graph.update_all(dgl.function.copy_u("h", "m"), dgl.function.mean("m", "around"))
            h = 0.9 * graph.ndata.pop("around") + 0.1 * first
        return h


def plain_model(kind: str) -> nn.Module:
    torch.manual_seed(11)
    if kind == "appnp":
        return PlainAppnp().double()
    if kind in STACKS:
        name, between = STACKS[kind]
        return PlainStack("gin sums" if name == "gin" else name, **between).double()
    return (PlainResidual() if kind == "resgcn" else PlainModel(kind)).double()


class PlainModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        widths = (WIDTH, HIDDEN, CLASSES)
        self.kind = kind
        self.convs = nn.ModuleList(_plain_conv(kind, widths[i], widths[i + 1], i == 1) for i in range(2))

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        for depth, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            h = conv(block, h)
            if self.kind == "gat":
                h = F.elu(h.flatten(1)) if depth == 0 else h.mean(1)
            elif depth == 0:
                h = torch.relu(h)
        return h


def _plain_conv(kind: str, in_dim: int, out_dim: int, last: bool) -> nn.Module:
    if kind == "sage":
        return dgl.nn.SAGEConv(in_dim, out_dim, "mean")
    if kind == "gin":
        return dgl.nn.GINConv(nn.Linear(in_dim, out_dim), "mean" if last else "sum", learn_eps=True)
    if kind == "gin sums":
        maps = nn.Sequential(nn.Linear(in_dim, out_dim), nn.ReLU(), nn.Linear(out_dim, out_dim))
        return dgl.nn.GINConv(maps, "sum")
    if kind in ("gat", "gatv2"):
        conv = dgl.nn.GATConv if kind == "gat" else dgl.nn.GATv2Conv
        return conv(in_dim, out_dim if last else out_dim // 2, 2, allow_zero_in_degree=True)
    norm = "both" if kind == "gcn_symmetric" else "right"
    return dgl.nn.GraphConv(in_dim, out_dim, norm=norm, allow_zero_in_degree=True)


def plain_graph() -> Any:
    raw = raw_graph()
    graph = dgl.graph(raw.edges[EDGE_TYPE], num_nodes=NUM_NODES)
    for name, column in raw.node_data[NODE_TYPE].items():
        graph.ndata[name] = torch.from_numpy(np.asarray(column))
    return graph


def one_process(
    kind: str, batch_of_step: list[Tensor] | None = None, steps: int = STEPS
) -> tuple[list[Any], Any]:
    """Train with plain DGL; return the weights, in the order of parameters(), and the scores of all nodes.

    ``batch_of_step``: original ids of each step's targets; ``steps`` times all training nodes when not given.
    The whole graph stands for every block: what DGL computes for a target does not depend on the others.
    """
    graph = plain_graph()
    model = plain_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    everyone = graph.ndata["train_mask"].nonzero()[:, 0]
    for targets in batch_of_step or [everyone] * steps:
        scores = model([graph, graph], graph.ndata["feat"])[targets]
        optimizer.zero_grad()
        F.cross_entropy(scores, graph.ndata["label"][targets]).backward()
        optimizer.step()
    with torch.no_grad():
        scores = model([graph, graph], graph.ndata["feat"])
    return [p.detach().numpy().copy() for p in model.parameters()], scores.numpy()


def model_of(kind: str, g: DistGraph) -> nn.Module:
    if kind == "gin":
        return plain_model(kind)
    torch.manual_seed(11)
    graph = g if kind == "gcn_symmetric" else None
    name, between = STACKS.get(kind, (kind.split("_")[0], {}))
    return build_model(name, WIDTH, HIDDEN, CLASSES, 2, dropout=0.0, heads=2, graph=graph, **between).double()


def new_ids_of_training(g: DistGraph) -> Tensor:
    ids = g.ndata["train_mask"][:].nonzero()[:, 0]
    return ids[g.orig_ids(ids, NODE_TYPE).argsort()]


def cut(ids: Tensor, proportions: tuple[float, ...], rank: int, world_size: int) -> Tensor:
    ends = np.round(np.cumsum(proportions[:world_size]) / sum(proportions[:world_size]) * len(ids))
    bounds = [0, *ends.astype(int).tolist()]
    return ids[bounds[rank] : bounds[rank + 1]]


def on_ranks(folder: str, columns: list[Column]) -> dict[str, Any]:
    """Train every column, model and share in this rank; return weights by ``column/model/share``."""
    results: dict[str, Any] = {}
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    topology = session.topology
    train_ids = new_ids_of_training(g)
    for column in columns:
        options = dict(column.options)
        if "parameter_servers" in options:
            options["parameter_servers"] = min(options["parameter_servers"], topology.world_size)
        strategy = STRATEGIES.get(column.strategy)(session, options).open(g)
        os.environ["DGLX_MESSAGE_PASSING"] = "torch" if column.is_on_torch_path else ""
        calls = _count_calls("spmm")
        for share in shares_of(column, topology.world_size):
            own_ids = cut(train_ids, SHARES[share], topology.rank, topology.world_size)
            loader = None
            for kind in column.models:
                if loader is None or not column.keeps_loader:
                    loader = _loader(strategy, g, own_ids, len(train_ids))
                device = "cpu" if column.strategy == "lambda" else session.device
                model = strategy.wrap(model_of(kind, g).to(device))
                train(model, loader, column.steps)
                weights = [p.detach().cpu().numpy().copy() for p in model.whole().parameters()]
                results[f"{column}/{kind}/{share}"] = weights
        # The graph servers of lambda sum by kernels of their own.
        is_on_torch_path = column.is_on_torch_path or session.device.type != "cpu"
        assert bool(calls) == (is_on_torch_path and column.strategy != "lambda")
    return results


def _count_calls(name: str) -> list[str]:
    """Return a list to which every call of this function of the torch path is added."""
    calls: list[str] = []
    function = getattr(message_passing, name)

    def count_call(*args: Any) -> Any:
        calls.append(name)
        return function(*args)

    setattr(message_passing, name, count_call)
    return calls


def shares_of(column: Column, ranks: int) -> tuple[str, ...]:
    return column.shares if ranks > 1 else column.shares[:1]


def _loader(strategy: Any, g: DistGraph, mine: Tensor, batch_size: int) -> Any:
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    options = {} if strategy.strategy.traits.unit == "full_graph" else {"batch_size": batch_size}
    return strategy.loader(mine, sampler, **options)


def train(model: WrappedModel, loader: Any, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer = model.trainer(loader, optimizer, Objective(loss=F.cross_entropy))
    if trainer is None:
        loop(model, loader, optimizer, epochs)
    else:
        trainer.run(0, epochs)
        trainer.close()


def loop(model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    for _ in range(epochs):
        for _, _, blocks in loader:
            scores = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def forget_kept_batches(g: DistGraph) -> None:
    """Remove the cooperative batches that earlier runs kept beside the dataset; collective."""
    g.barrier()
    if g.session.topology.rank == 0:
        for kept in filter(Path.is_dir, Path(g.dataset.folder).glob("cache/cobatches-*/*")):
            shutil.rmtree(kept)
    g.barrier()


def moved_since(session: Session, before: Any) -> Counter[str]:
    moved = Counter[str]()
    for row in session.ledger.since(before):
        moved[row.phase] += row.num_bytes
    return moved


def in_original_order(rows: DistTensor, g: DistGraph, ntype: str | None = None) -> Tensor:
    ordered = torch.empty_like(values := rows.to_local())
    ordered[g.orig_ids(torch.arange(len(rows)), ntype)] = values
    return ordered
