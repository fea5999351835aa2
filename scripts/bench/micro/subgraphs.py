"""Accuracy of ShaDow and Cluster-GCN on two ranks beside DGL's samplers in one process.

    OMP_NUM_THREADS=1 python scripts/bench subgraphs --data ../shared/data --json subgraphs.json

Both train the same GraphSAGE for the same epochs, on batches of the same number of seeds or clusters of all
ranks together. Then plain DGL evaluates the weights on the test nodes of the whole graph. Figures are means
and standard deviations over seeds. The exit code is 1 if a difference is above one point and above two
standard errors.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import ClusterGCNSampler, ShaDowKHopSampler
from torch.nn import functional as F

import dglx_dist as dx
from dglx_dist.data.partition.prepare import load_graph
from dglx_dist.records import SparseRows
from scripts.bench.micro.timing import dglx, parser, table, write_json

RANKS, HIDDEN, LR = 2, 64, 0.01
COLUMNS = ["feat", "label", "train_mask"]
SETTINGS: dict[str, dict[str, Any]] = {
    "cora": {"epochs": 25, "batch": 16, "clusters": 40},
    "coauthor_physics": {"epochs": 12, "batch": 16, "clusters": 100},
}
FANOUTS, CLUSTERS_PER_BATCH = [10, 5], 10


class Sage(torch.nn.Module):
    """Two convolutions on one graph."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(width, HIDDEN, "mean")
        self.second = dgl.nn.SAGEConv(HIDDEN, classes, "mean")

    def forward(self, graph: dgl.DGLGraph, rows: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.second(
            graph, F.dropout(self.first(graph, rows).relu(), 0.5, self.training)
        )
        return scores


def train(model: torch.nn.Module, loader: Iterable[Any], epochs: int) -> None:
    """Train on the seeds of ShaDow's batches, or on the training nodes of batches of clusters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for _ in range(epochs):
        for batch in loader:
            is_shadow = not isinstance(batch, dgl.DGLGraph)
            graph = batch[2] if is_shadow else batch
            targets = graph.ndata["train_mask"].bool()
            if is_shadow:
                targets = torch.arange(len(batch[1]))
            scores = model(graph, graph.ndata["feat"])
            loss = F.cross_entropy(scores[targets], graph.ndata["label"][targets].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train_as_rank(
    folder: str, kind: str, seed: str, epochs: str, batch: str, clusters: str, out: str
) -> None:
    """Train in a rank of torchrun, and save the weights."""
    dx.init(seed=int(seed))
    g = dx.DistGraph(folder)
    classes = g.num_classes()
    model = dx.wrap(Sage(g.ndata["feat"].shape[1], classes), g)
    sampler: Any
    if kind == "shadow":
        sampler = ShaDowKHopSampler(FANOUTS, prefetch_node_feats=COLUMNS)
        seeds, size = dx.node_split(g.ndata["train_mask"]), int(batch) // RANKS
    else:
        sampler = dx.ClusterGCNSampler(g, int(clusters), seed=int(seed), prefetch_ndata=COLUMNS)
        seeds, size = sampler.split(), CLUSTERS_PER_BATCH // RANKS
    train(model, dx.DataLoader(g, seeds, sampler, batch_size=size, shuffle=True), int(epochs))
    if g.rank() == 0:
        torch.save(model.module.state_dict(), out)
    dx.shutdown()


def train_plain(graph: dgl.DGLGraph, model: Sage, kind: str, setting: dict[str, Any], folder: Path) -> None:
    """Train with DGL's own sampler and loader."""
    sampler: Any
    if kind == "shadow":
        sampler = ShaDowKHopSampler(FANOUTS, prefetch_node_feats=COLUMNS)
        seeds, size = graph.ndata["train_mask"].nonzero()[:, 0], setting["batch"]
    else:
        cache = str(folder / f"{len(list(folder.iterdir()))}.pkl")
        sampler = ClusterGCNSampler(graph, setting["clusters"], cache, prefetch_ndata=COLUMNS)
        seeds, size = torch.arange(setting["clusters"]), CLUSTERS_PER_BATCH
    loader = dgl.dataloading.DataLoader(graph, seeds, sampler, batch_size=size, shuffle=True)
    train(model, loader, setting["epochs"])


def evaluate(graph: dgl.DGLGraph, model: Sage) -> float:
    """Return the accuracy in percent on the test nodes."""
    model.eval()
    with torch.no_grad():
        classes = model(graph, graph.ndata["feat"]).argmax(1)
    is_test = graph.ndata["test_mask"].bool()
    return 100 * float((classes == graph.ndata["label"])[is_test].double().mean())


def main(argv: list[str]) -> None:
    if argv[:1] == ["rank"]:
        train_as_rank(*argv[1:])
        return
    made = parser("subgraphs", __doc__)
    made.add_argument("--data", type=Path, required=True, help="folder of NAME.npz")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--json", type=Path, help="write the figures to this file too")
    options = made.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for graph_name, setting in SETTINGS.items():
            raw = load_graph(str(options.data / f"{graph_name}.npz"))
            ((ends, columns),) = zip(raw.edges.values(), raw.node_data.values(), strict=True)
            graph = dgl.graph(tuple(map(torch.as_tensor, ends)), num_nodes=raw.total_nodes).long()
            for column, values in columns.items():
                is_sparse = isinstance(values, SparseRows)
                rows_of_column = values.dense(np.arange(raw.total_nodes)) if is_sparse else values
                graph.ndata[column] = torch.as_tensor(rows_of_column)
            folder, weights = Path(name) / graph_name, Path(name) / "weights.pt"
            dglx(
                "partition",
                str(options.data / f"{graph_name}.npz"),
                "--parts",
                str(RANKS),
                "--out",
                str(folder),
            )
            for kind in ("shadow", "clusters"):
                accuracies: dict[str, list[float]] = {"ours": [], "plain": []}
                for seed in range(options.seeds):
                    torch.manual_seed(seed)
                    model = Sage(graph.ndata["feat"].shape[1], int(graph.ndata["label"].max()) + 1)
                    train_plain(graph, model, kind, setting, Path(name))
                    accuracies["plain"].append(evaluate(graph, model))
                    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
                    arguments = [str(folder), kind, seed, *setting.values(), weights]
                    command = [*launch, "scripts/bench", "subgraphs", "rank", *map(str, arguments)]
                    subprocess.run(command, check=True)
                    model.load_state_dict(torch.load(weights, weights_only=True))
                    accuracies["ours"].append(evaluate(graph, model))
                rows.append(compare(graph_name, kind, accuracies))
                print(table(rows), flush=True)
    write_json(options.json, {"accuracy": rows})
    if any(row["differs"] for row in rows):
        raise SystemExit(1)


def compare(graph: str, kind: str, accuracies: dict[str, list[float]]) -> dict[str, Any]:
    means = {name: statistics.mean(values) for name, values in accuracies.items()}
    deviations = {name: statistics.stdev(values) for name, values in accuracies.items()}
    difference = means["ours"] - means["plain"]
    error = (sum(d * d for d in deviations.values()) / len(accuracies["ours"])) ** 0.5
    figures = {f"{name} %": f"{means[name]:.2f} +- {deviations[name]:.2f}" for name in means}
    differs = abs(difference) > max(1.0, 2 * error)
    return {
        "graph": graph,
        "sampler": kind,
        **figures,
        "difference": round(difference, 2),
        "differs": differs,
    }
