"""The experiments of edge tasks: what ranks train on batches of edges, and plain DGL on the same pairs.

300 nodes, 900 edges and their 900 reverse edges, float64, plain SGD, every in-neighbour, ten steps or more.
The ranks write down what they trained on in original ids, and one process repeats it over the whole graph.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading import negative
from dglx_dist.graph.analysis import reverse_edge_ids
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.strategies.base import STRATEGIES, WrappedModel
from tests.strategies.equality import cut

NUM_NODES, HALF, WIDTH, HIDDEN, CLASSES, NEGATIVES, BATCH, EPOCHS, RATE = 300, 900, 5, 6, 3, 4, 32, 4, 0.2
SHARES = (2.0, 5.0, 1.0)
TASKS = {
    "links": None,
    "links self": "self",
    "links reverse_id": "reverse_id",
    "classes": None,
    "classes reverse_id": "reverse_id",
}
"""Task to what is excluded."""


def raw_graph() -> RawGraph:
    """Edge i + HALF is the reverse of edge i; every twelfth edge is for training."""
    random = np.random.default_rng(5)
    pairs = random.integers(NUM_NODES, size=(4 * HALF, 2))
    pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1), axis=0)
    pairs = random.permutation(pairs)[:HALF]
    edges = np.concatenate([pairs[:, 0], pairs[:, 1]]), np.concatenate([pairs[:, 1], pairs[:, 0]])
    return RawGraph(
        name="bonds",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: edges},
        node_data={NODE_TYPE: {"feat": random.standard_normal((NUM_NODES, WIDTH))}},
        edge_data={EDGE_TYPE: {
            "label": random.integers(CLASSES, size=2 * HALF),
            "train_mask": np.arange(2 * HALF) % 12 == 0,
        }},
    )  # fmt: skip


def write_parts(folder: Path) -> Path:
    part_of = np.random.default_rng(6).choice(3, size=NUM_NODES, p=[0.5, 0.3, 0.2]).astype(np.int32)
    assignment = Assignment(num_parts=3, part_of={NODE_TYPE: part_of}, method="test", seed=6)
    write_dataset(raw_graph(), assignment, folder / "bonds")
    return folder / "bonds"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [dgl.nn.SAGEConv(WIDTH, HIDDEN, "mean"), dgl.nn.SAGEConv(HIDDEN, HIDDEN, "mean")]
        )
        self.classes = nn.Linear(2 * HIDDEN, CLASSES)

    def nodes(self, blocks: list[Any], h: Tensor) -> Tensor:
        return self.convs[1](blocks[1], torch.relu(self.convs[0](blocks[0], h)))

    def forward(self, graphs: list[Any], blocks: list[Any], h: Tensor) -> list[Tensor]:
        h = self.nodes(blocks, h)
        out = []
        for graph in graphs:
            source, destination = (h[ends.long()] for ends in graph.edges())
            both = torch.cat([source, destination], dim=1)
            out += [(source * destination).sum(1), self.classes(both)]
        return out


def first_net() -> Net:
    torch.manual_seed(12)
    return Net().double()


def choose_loss(task: str, outputs: list[Tensor], labels: Tensor) -> Tensor:
    """The mean that a user writes: over positive and negative pairs, or over edges."""
    if task.startswith("classes"):
        return F.cross_entropy(outputs[1], labels)
    positive, negative_ = outputs[0], outputs[2]
    expected = torch.cat([torch.ones_like(positive), torch.zeros_like(negative_)])
    return F.binary_cross_entropy_with_logits(torch.cat([positive, negative_]), expected)


@dataclass(frozen=True)
class Step:
    edges: Any
    positive: Any
    """(2, B) ends."""
    negative: Any
    """(2, B * NEGATIVES) ends; (2, 0) where there are none."""


def on_ranks(folder: str, structure: str, only: list[str]) -> dict[str, Any]:
    start_session(timeout_s=60)
    return train_tasks(DistGraph(folder, structure=structure), only)


def train_tasks(
    g: DistGraph, only: list[str], strategy_name: str = "data_parallel", **options: Any
) -> dict[str, Any]:
    session = g.session
    ids = g.edata["train_mask"][:].nonzero()[:, 0]
    ids = ids[g.orig_edge_ids(ids).argsort()]
    own_ids = cut(ids, SHARES, session.topology.rank, session.topology.world_size)
    strategy = STRATEGIES.get(strategy_name)(session, options).open(g)
    results = {}
    for task in only:
        exclude = TASKS[task]
        sampler = dgl.dataloading.as_edge_prediction_sampler(
            dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_node_feats=["feat"]),
            exclude=exclude,
            reverse_eids=reverse_edge_ids(g) if exclude == "reverse_id" else None,
            negative_sampler=negative.Uniform(NEGATIVES) if task.startswith("links") else None,
            prefetch_labels=["label"],
        )
        loader = strategy.edge_loader(own_ids, sampler, batch_size=BATCH, shuffle=True, seed=9)
        results[task] = train(task, strategy.wrap(first_net()), loader, g)
    return results


def train(task: str, model: WrappedModel, loader: Any, g: DistGraph) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps, losses = [], []
    for _ in range(EPOCHS):
        for _, *graphs, blocks in loader:
            labels = graphs[0].edata["label"]
            outputs = model(graphs, blocks, blocks[0].srcdata["feat"])
            loss = choose_loss(task, outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(note_edges(g, graphs))
            losses.append(float(loss))
    weights = [p.detach().numpy().copy() for p in model.whole().parameters()]
    return {"steps": steps, "weights": weights, "losses": losses}


def note_edges(g: DistGraph, graphs: list[Any]) -> Step:
    ends = []
    for graph in graphs:
        nodes = g.orig_ids(graph.ndata[dgl.NID])
        ends.append(np.stack([nodes[at.long()].numpy() for at in graph.edges()]))
    none = np.empty((2, 0), np.int64)
    edges = g.orig_edge_ids(graphs[0].edata[dgl.EID]).numpy()
    return Step(edges=edges, positive=ends[0], negative=ends[1] if len(ends) > 1 else none)


def one_process(
    task: str, steps_of_rank: list[list[Step]], *, exclude: str | None, mean_of_means: bool = False
) -> tuple[list[Any], list[Any]]:
    """Repeat the steps of all ranks with plain DGL over the whole graph; return weights and losses by step.

    Each rank's batch leaves out its own edges. ``mean_of_means`` weighs ranks alike, which is wrong.
    """
    raw = raw_graph()
    whole_graph = dgl.graph(raw.edges[EDGE_TYPE], num_nodes=NUM_NODES)
    features = torch.from_numpy(np.asarray(raw.node_data[NODE_TYPE]["feat"]))
    all_labels = torch.from_numpy(np.asarray(raw.edge_data[EDGE_TYPE]["label"]))
    model = first_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in zip(*steps_of_rank, strict=True):
        optimizer.zero_grad()
        total = sum(len(part.edges) for part in step)
        working = sum(len(part.edges) > 0 for part in step)
        losses.append([])
        for part in step:
            if not len(part.edges):
                continue
            graph = without(whole_graph, part.edges, exclude)
            pairs = [dgl.graph(tuple(map(torch.from_numpy, ends)), num_nodes=NUM_NODES)
                     for ends in (part.positive, part.negative)]  # fmt: skip
            outputs = model(pairs, [graph, graph], features)
            loss = choose_loss(task, outputs, all_labels[part.edges])
            (loss * (1 / working if mean_of_means else len(part.edges) / total)).backward()
            losses[-1].append(float(loss))
        optimizer.step()
    return [p.detach().numpy().copy() for p in model.parameters()], losses


def without(graph: Any, edges: Any, exclude: str | None) -> Any:
    if exclude is None:
        return graph
    gone = [edges] if exclude == "self" else [edges, (edges + HALF) % (2 * HALF)]
    return dgl.remove_edges(graph, torch.from_numpy(np.unique(np.concatenate(gone))))
