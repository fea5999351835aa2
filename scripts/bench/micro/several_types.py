"""Graphs of several relations under every strategy that trains them, beside plain loops of DGL and torch.

    python scripts/bench several_types --data ../shared/data --out runs/several_types

R-GCN classifies the nodes of aifb (accuracy) and predicts the links of wn18rr (filtered MRR). `dglx train`
runs on 2 servers of one rank. The plain loops run in one process with the same model, sizes and steps.
Batches of data_parallel leave out their own edges, and the strategies of whole graphs do not, so links have a
plain loop for each. Cells are mean ± standard error over the seeds, in percent. RESULTS gets all figures, and
what it has is not measured again. The exit code is 1 where a difference exceeds two standard errors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import dgl
import numpy as np
import torch
from torch import Tensor, nn

from scripts.bench.micro import tasks
from scripts.bench.micro.timing import dglx, parser, table, write_json

PLAIN, EXCLUDING = "plain DGL", "plain DGL, own edges left out"
WAYS: dict[str, dict[str, str]] = {
    "aifb": dict.fromkeys(("data_parallel", "full_graph", "cooperative"), PLAIN),
    "wn18rr": {"data_parallel": EXCLUDING, "full_graph": PLAIN, "cooperative": PLAIN},
}
"""Graph to the strategies that train it, each with its plain loop."""
ROWS = {
    "aifb": "aifb --metric accuracy --model rgcn --hidden 16 --batch-size 70 --fanout -1,-1",
    "wn18rr": "wn18rr --task link --metric mrr --model rgcn --hidden 64 --decoder distmult --loss softmax "
    "--negatives 8 --batch-size 7237 --fanout -1 --epochs 10 --lr 0.03 --dropout 0",
}
"""Options of `dglx train`, as in the program `tasks`."""


class OneLayer(nn.Module):
    """R-GCN of one layer: a mean for each relation, and a weight of own rows."""

    def __init__(self, etypes: list[Any], width: int) -> None:
        super().__init__()
        convs = {
            etype: dgl.nn.GraphConv(width, width, norm="right", bias=False, allow_zero_in_degree=True)
            for etype in etypes
        }
        self.conv, self.own = dgl.nn.HeteroGraphConv(convs, "sum"), nn.Linear(width, width)

    def forward(self, g: Any, h: Tensor) -> Tensor:
        """Return the (N, d) rows of the nodes of ``g``."""
        rows: Tensor = self.conv(g, {"_N": h})["_N"] + self.own(h)
        return rows


def learn_links(o: argparse.Namespace, g: Any, *, leaves_out: bool) -> float:
    """Return the filtered MRR of the test edges in percent, after training with messages along train edges.

    With ``leaves_out``, each half of a batch leaves out its own edges and their opposites, like a rank.
    """
    edges, candidates = tasks.triples(g, None)
    train, test = (edges[:3, edges[3] == side] for side in (0, 2))
    score, model = tasks.Score(o, len(g.canonical_etypes), o.hidden), OneLayer(g.canonical_etypes, o.hidden)
    trainer = tasks.Trainer(o, g.num_nodes(), o.hidden, score, model)
    everything = torch.arange(g.num_nodes())
    for _ in range(o.epochs):
        for batch in torch.randperm(train.shape[1]).split(2 * o.batch_size):
            loss = torch.zeros(())
            for half in batch.chunk(2) if leaves_out else [batch]:
                h = model(keep_messages(g, train, half if leaves_out else half[:0]), trainer.rows(everything))
                positive, negative = (
                    train[:, half],
                    tasks.with_negatives(train[:, half], candidates, o.negatives),
                )
                scores = [score(h[s], relation, h[t]) for s, relation, t in (positive, negative)]
                loss = loss + tasks.link_loss(o.loss, *scores) * len(half) / len(batch)
            trainer.step(loss)
    with torch.no_grad():
        h = model(keep_messages(g, train, train[0, :0]), trainer.rows(everything))
        return 100 * compute_mrr(h, score.relations, edges[:3], test)


def compute_mrr(h: Tensor, relations: Tensor, edges: Tensor, test: Tensor) -> float:
    """Return the filtered MRR of the (3, Q) test edges under DistMult, by brute force. Ties count half."""
    places = []
    for known, answer in ((0, 2), (2, 0)):
        true = dict[tuple[int, int], list[int]]()
        for triple in edges.T.tolist():
            true.setdefault((triple[known], triple[1]), []).append(triple[answer])
        for batch in test.T.split(512):
            scores = (h[batch[:, known]] * relations[batch[:, 1]]) @ h.T
            own = scores.gather(1, batch[:, answer, None])
            for row, triple in zip(scores, batch.tolist(), strict=True):
                row[true[triple[known], triple[1]]] = -torch.inf
            places.append(1 + (scores > own).sum(1) + (scores == own).sum(1) / 2)
    return float((1 / torch.cat(places).double()).mean())


def keep_messages(g: Any, train: Tensor, left_out: Tensor) -> Any:
    """Return the graph of the (3, T) training edges without those of the positions ``left_out``."""
    u, relation, v = train
    count = g.num_nodes()
    keys = ((relation * count + u) * count + v).numpy()
    opposite = ((relation * count + v) * count + u)[left_out].numpy()
    kept = torch.from_numpy(~np.isin(keys, np.concatenate([keys[left_out.numpy()], opposite])))
    ends = {
        etype: (u[kept & (relation == number)], v[kept & (relation == number)])
        for number, etype in enumerate(g.canonical_etypes)
    }
    return dgl.heterograph(ends, {"_N": count})


def measure_plain(o: argparse.Namespace, path: Path, way: str, seed: int) -> float:
    """Return the figure of a plain loop, in percent."""
    if o.task != tasks.LINK:
        return 100 * tasks.plain(o, path, seed)[o.metric]
    torch.manual_seed(seed)
    return learn_links(o, tasks.read_graph(path), leaves_out=way == EXCLUDING)


def measure_strategy(o: argparse.Namespace, path: Path, out: Path, strategy: str, seeds: str) -> list[float]:
    """Partition the graph once, train on two servers, and return the figure of each seed, in percent."""
    data, run = out / f"{path.stem}-2", out / f"{path.stem}-{strategy}"
    if not data.exists():
        dglx("partition", path, "--parts", 2, "--out", data)
    options = {name.replace("_", "-"): value for name, value in vars(o).items() if value is not None}
    options |= {"strategy": strategy, "layers": 1 + o.fanout.count(","), "eval-every": o.epochs}
    del options["graph"]
    if strategy != "data_parallel":
        # These strategies take all neighbours. Without edges to batch, a step takes all nodes.
        del options["fanout"]
        if o.task != tasks.LINK:
            del options["batch-size"]
    arguments = (part for name, value in options.items() for part in (f"--{name}={value}",))
    dglx("train", data, "--ranks", 2, "--servers", 2, "--seeds", seeds, "--out", run, *arguments)
    runs = json.loads((run / "summary.json").read_text())["runs"].values()
    return [100 * float(values[f"test_{o.metric}"]) for values in runs]


def compare(graph: str, metric: str, figures: dict[str, list[float]]) -> list[dict[str, str]]:
    """Return the lines of the table for a graph."""
    lines = []
    for way, plain in [
        *WAYS[graph].items(),
        *((plain, plain) for plain in dict.fromkeys(WAYS[graph].values())),
    ]:
        values, expected = figures[way], figures[plain]
        difference = fmean(values) - fmean(expected)
        error = ((stdev(values) ** 2 + stdev(expected) ** 2) / len(values)) ** 0.5
        is_plain = way == plain
        lines.append(
            {
                "graph": graph,
                "metric": metric,
                "way": way,
                "mean ± error": f"{fmean(values):.2f} ± {stdev(values) / len(values) ** 0.5:.2f}",
                "compared with": "" if is_plain else plain,
                "difference": "" if is_plain else f"{difference:+.2f}",
                "two errors": "" if is_plain else f"{2 * error:.2f}",
                "within": "" if is_plain else "yes" if abs(difference) <= 2 * error else "no",
            }
        )
    return lines


def main(argv: list[str]) -> int:
    """Measure and print the table. Return 1 if a difference exceeds two standard errors."""
    options = parser("several_types", __doc__)
    options.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of the .npz graphs"
    )
    options.add_argument("--out", type=Path, default=Path("runs/several_types"), help="partitions and runs")
    options.add_argument("--results", type=Path, default=Path("docs/results/raw/several_types.json"))
    options.add_argument("--seeds", default="0,1,2")
    chosen = options.parse_args(argv)
    chosen.out.mkdir(parents=True, exist_ok=True)
    results = json.loads(chosen.results.read_text()) if chosen.results.exists() else {}
    lines = []
    for graph, row in ROWS.items():
        o, path = tasks.setting(row), chosen.data / f"{graph}.npz"
        figures = results.setdefault(graph, {})
        for way in [*WAYS[graph], *dict.fromkeys(WAYS[graph].values())]:
            if way in figures:
                continue
            if way in WAYS[graph]:
                figures[way] = measure_strategy(o, path, chosen.out, way, chosen.seeds)
            else:
                figures[way] = [measure_plain(o, path, way, int(seed)) for seed in chosen.seeds.split(",")]
            write_json(chosen.results, results)
        lines += compare(graph, o.metric, figures)
    print(table(lines))
    return int(any(line["within"] == "no" for line in lines))
