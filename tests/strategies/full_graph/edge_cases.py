"""Edge tasks under the full-graph strategies, and plain DGL in one process on the same pairs.

The graph and the records of steps are those of ``tests.strategies.edge_equality``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading import negative
from dglx_dist.dataloading.edge_loader import gather_pair_rows
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers import nn as dx_nn
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from dglx_dist.strategies.base import STRATEGIES
from tests.strategies.edge_equality import (
    BATCH,
    CLASSES,
    EPOCHS,
    HIDDEN,
    NEGATIVES,
    NUM_NODES,
    RATE,
    WIDTH,
    Step,
    note_edges,
    raw_graph,
)
from tests.strategies.equality import cut

UNEVEN, EMPTY = (2.0, 5.0, 1.0), (3.0, 0.0, 2.0)


@dataclass(frozen=True)
class Case:
    strategy: str = "full_graph"
    kind: str = "sage"
    task: str = "dot"
    """dot and distmult predict links, classes classifies edges."""
    options: Mapping[str, Any] = field(default_factory=dict)
    mask: str | None = None
    outside: bool = False
    """Whether the wrapped model is the encoder only, and the pairs are scored outside."""
    shares: Sequence[float] = UNEVEN
    batch: int = BATCH
    regular: bool = False
    """Whether the model has dropout and batch norms, before and behind the rows of pairs."""


class Encoder(nn.Module):
    def __init__(self, kind: str, regular: bool) -> None:
        super().__init__()
        make: Any = {
            "sage": lambda width: dgl.nn.SAGEConv(width, HIDDEN, "mean"),
            "gcn": lambda width: dgl.nn.GraphConv(width, HIDDEN, allow_zero_in_degree=True),
            "gat": lambda width: dgl.nn.GATConv(width, HIDDEN, 1, allow_zero_in_degree=True),
        }[kind]
        self.convs = nn.ModuleList([make(WIDTH), make(HIDDEN)])
        self.regular = nn.Sequential(dx_nn.BatchNorm(HIDDEN), nn.Dropout(0.4)) if regular else nn.Identity()

    def forward(self, blocks: Any, h: Tensor) -> Tensor:
        h = self.regular(torch.tanh(self.convs[0](blocks[0], h).flatten(1)))
        return self.convs[1](blocks[1], h).flatten(1)


class Net(nn.Module):
    def __init__(self, kind: str, task: str, regular: bool) -> None:
        super().__init__()
        self.encoder, self.task = Encoder(kind, regular), task
        self.relation = nn.Parameter(torch.rand(HIDDEN))
        self.classes = nn.Linear(2 * HIDDEN, CLASSES)
        self.regular = nn.Sequential(dx_nn.BatchNorm(HIDDEN), nn.Dropout(0.4)) if regular else nn.Identity()

    def forward(self, graphs: Sequence[Any], blocks: Any, h: Tensor) -> list[Tensor]:
        h = self.regular(gather_pair_rows(graphs[0], self.encoder(blocks, h)))
        return [self.score(graph, h) for graph in graphs]

    def score(self, graph: Any, h: Tensor) -> Tensor:
        source, destination = (h[ends.long()] for ends in graph.edges())
        if self.task == "classes":
            return self.classes(torch.cat([source, destination], 1))
        return (source * (self.relation if self.task == "distmult" else 1) * destination).sum(1)


def first_net(case: Case) -> Net:
    torch.manual_seed(12)
    return Net(case.kind, case.task, case.regular).double()


def compute_loss(outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
    if len(outputs) == 1:
        return F.cross_entropy(outputs[0], labels)
    expected = torch.cat([torch.ones_like(outputs[0]), torch.zeros_like(outputs[1])])
    return F.binary_cross_entropy_with_logits(torch.cat([*outputs]), expected)


def on_ranks(folder: str, structure: str, cases: Sequence[Case]) -> list[Any]:
    start_session(timeout_s=60)
    g = DistGraph(folder, structure=structure)
    return [train(g, case) for case in cases]


def make_sampler(case: Case) -> Any:
    neighbors = dgl.dataloading.NeighborSampler([-1, -1], mask=case.mask, prefetch_node_feats=["feat"])
    return dgl.dataloading.as_edge_prediction_sampler(
        neighbors,
        negative_sampler=None if case.task == "classes" else negative.Uniform(NEGATIVES),
        prefetch_labels=["label"],
    )


def train(g: DistGraph, case: Case) -> dict[str, Any]:
    ids = g.edata["train_mask"][:].nonzero()[:, 0]
    ids = ids[g.orig_edge_ids(ids).argsort()]
    topology = g.session.topology
    own_ids = cut(ids, tuple(case.shares), topology.rank, topology.world_size)
    strategy = STRATEGIES.get(case.strategy)(g.session, case.options).open(g)
    loader = strategy.edge_loader(own_ids, make_sampler(case), batch_size=case.batch, shuffle=True, seed=9)
    net = first_net(case)
    model: Any = strategy.wrap(net.encoder if case.outside else net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps, foreign, before = [], [], g.session.ledger.snapshot()
    for _ in range(EPOCHS):
        for _, *graphs, blocks in loader:
            x = blocks[0].srcdata["feat"]
            if case.outside:
                h = gather_pair_rows(graphs[0], model(blocks, x))
                outputs = [net.score(graph, h) for graph in graphs]
            else:
                outputs = model(graphs, blocks, x)
            optimizer.zero_grad()
            compute_loss(outputs, graphs[0].edata["label"]).backward()
            optimizer.step()
            steps.append(note_edges(g, graphs))
            own_nodes = blocks[-1].dstdata[dgl.NID]
            foreign.append(int((~torch.isin(graphs[0].ndata[dgl.NID], own_nodes)).sum()))
    sent = Counter[tuple[str, int]]()
    for row in g.session.ledger.since(before):
        if topology.rank == row.source != row.destination:
            sent[row.phase, row.layer] += row.num_bytes
    weights = [p.detach().numpy().copy() for p in net.parameters()]
    return {"steps": steps, "weights": weights, "sent": dict(sent), "foreign": foreign}


def one_process(case: Case, steps_of_rank: list[list[Step]]) -> list[Any]:
    """Return the weights after the steps of all ranks with plain DGL on the graph, batch by batch."""
    raw = raw_graph()
    columns, labels = (
        raw.edge_data[EDGE_TYPE],
        torch.from_numpy(np.asarray(raw.edge_data[EDGE_TYPE]["label"])),
    )
    graph = dgl.graph(raw.edges[EDGE_TYPE], num_nodes=NUM_NODES)
    if case.mask is not None:
        marked = torch.from_numpy(np.flatnonzero(columns[case.mask]))
        graph = dgl.edge_subgraph(graph, marked, relabel_nodes=False)
    features = torch.from_numpy(np.asarray(raw.node_data[NODE_TYPE]["feat"]))
    net = first_net(case)
    trained = net.encoder if case.outside else net
    optimizer = torch.optim.SGD(trained.parameters(), lr=RATE)
    for step in zip(*steps_of_rank, strict=True):
        optimizer.zero_grad()
        h = net.encoder([graph, graph], features)
        total, losses = sum(len(part.edges) for part in step), []
        for batch in chain.from_iterable(map(split, step)):
            pairs = [batch.positive] if case.task == "classes" else [batch.positive, batch.negative]
            graphs = [dgl.graph(tuple(map(torch.from_numpy, ends)), num_nodes=NUM_NODES) for ends in pairs]
            loss = compute_loss([net.score(pair_graph, h) for pair_graph in graphs], labels[batch.edges])
            losses.append(loss * len(batch.edges) / total)
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [p.detach().numpy().copy() for p in net.parameters()]


def split(part: Step) -> list[Step]:
    """Return the batches of a step, which ``edge_batches_per_step`` joins."""
    pieces, per_edge = [], NEGATIVES if part.negative.shape[1] else 0
    for first in range(0, len(part.edges), BATCH):
        last = first + BATCH
        negatives = part.negative[:, first * per_edge : last * per_edge]
        pieces.append(Step(part.edges[first:last], part.positive[:, first:last], negatives))
    return pieces
