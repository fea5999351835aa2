"""Every task on real graphs beside a plain loop of DGL and torch in one process.

    python scripts/bench tasks --data ../shared/data graphs --out runs/tasks
    python scripts/bench tasks --graphs aifb cora --seeds 0,1,2,3,4,5,6,7

`dglx train` runs on 2 ranks. The plain loop has the same model, sizes, splits, epochs and joint batches, and
samplers, losses and metrics of its own: the package is not imported there. A graph is NAME.npz or NAME.bin
(`dgl.save_graphs`) in one of the folders; a row whose graph is in none is left out, and one that OUT has
results of is measured again only if --graphs names it. Differences are points, of errors percent of the plain
figure. The exit code is 1 where one is above 1 and above two standard errors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import dgl
import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.bench.micro.timing import dglx, parser, table, write_json

ROWS = """
cora --metric accuracy --batch-size 16 --fanout 10,10
citeseer --metric accuracy --model gat --strategy push_pull --batch-size 30 --fanout 10,10
dblp_full --metric accuracy --strategy full_graph --epochs 50
amazon_photo --metric accuracy --model gcn --strategy shared_preload --epochs 100 --dropout 0.2
amazon_cs --metric f1_macro --model gcn --strategy full_graph --epochs 100
coauthor_physics --metric accuracy --strategy push_pull --batch-size 50 --fanout 10,10 --epochs 10
acm --metric accuracy --model gcn --strategy lambda --epochs 50 --dropout 0
aifb --metric accuracy --model rgcn --hidden 16 --batch-size 70 --fanout -1,-1
deezer_ro --task multilabel --metric f1_micro,f1_macro --batch-size 512 --fanout 10,10 --epochs 10 --dropout 0.2
twitch_es --task multilabel --metric f1_micro,f1_macro --strategy push_pull --batch-size 128 --fanout 10,10 --epochs 10
blogcatalog --task multilabel --metric f1_micro,f1_macro --embeddings 64 --batch-size 128 --fanout 10,10 --epochs 10 --dropout 0.2
chameleon --task regression --metric mae,rmse --strategy full_graph --epochs 150 --dropout 0.2
squirrel --task regression --metric mae,rmse --strategy push_pull --batch-size 256 --fanout 10,10 --epochs 20 --lr 0.003
twitch_links --task link --metric mrr,hits@10,auc --strategy push_pull --batch-size 2048 --fanout 10,10 --epochs 4 --dropout 0 --loss softmax
twitch_es_games --task link --metric mrr,hits@10 --model none --embeddings 64 --target plays --loss bpr --batch-size 1024 --epochs 8
wn18rr --task link --metric mrr,hits@10 --model none --embeddings 100 --decoder distmult --loss softmax --negatives 8 --batch-size 1024 --epochs 12
kinship --task link --metric mrr,hits@10 --model none --embeddings 100 --decoder complex --loss softmax --negatives 8 --batch-size 256
umls --task link --metric mrr,hits@10 --model none --embeddings 100 --decoder transe --loss bce --batch-size 256 --epochs 60
"""  # noqa: E501
"""Graph and options of ``dglx train``, which the plain loop obeys, too; batches are those of a rank."""
TEXT = {
    "task": "classification",
    "metric": None,
    "model": "sage",
    "strategy": "data_parallel",
    "fanout": None,
}
TEXT |= {"decoder": None, "loss": None, "target": None}
NUMBERS = {"epochs": 30, "hidden": 64, "batch-size": None, "embeddings": None, "negatives": None}
FRACTIONS = {"dropout": 0.5, "lr": 0.01}
SPLITS = ("train_mask", "val_mask", "test_mask")
ERRORS = ("mae", "rmse")
LINK = "link"


def setting(line: str) -> argparse.Namespace:
    """Return graph and options of a row."""
    options = argparse.ArgumentParser()
    options.add_argument("graph")
    for kind, defaults in ((str, TEXT), (int, NUMBERS), (float, FRACTIONS)):
        for name, default in defaults.items():
            options.add_argument(f"--{name}", type=kind, default=default)  # type: ignore[arg-type]
    return options.parse_args(line.replace("--fanout ", "--fanout=").split())


def read_graph(path: Path) -> Any:
    """Return the DGLGraph of a file; edge types of an npz are numbers."""
    if path.suffix == ".bin":
        return dgl.load_graphs(str(path))[0][0]
    with np.load(path) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file}
    kinds = arrays.get("etype", arrays.get("rel", np.zeros(len(arrays.get("src", ())))))
    ends = [
        torch.from_numpy(arrays.get(a, arrays.get(b))).long() for a, b in (("src", "head"), ("dst", "tail"))
    ]
    masks = [torch.from_numpy(kinds == kind) for kind in range(int(kinds.max()) + 1)]
    names = [("_N", f"r{kind}", "_N") for kind in range(len(masks))]
    edges = {name: tuple(end[mask] for end in ends) for name, mask in zip(names, masks, strict=True)}
    g = dgl.heterograph(edges, {"_N": int(arrays["num_nodes"])})
    if "triple_split" in arrays:
        for name, mask in zip(names, masks, strict=True):
            g.edges[name].data.update(
                {
                    key: torch.from_numpy(arrays["triple_split"] == side)[mask]
                    for side, key in enumerate(SPLITS)
                }
            )
        return g
    g.ndata.update({key: torch.from_numpy(arrays[key]) for key in SPLITS})
    g.ndata["label"] = torch.from_numpy(arrays["labels"]).long()
    if "feat_indptr" in arrays:
        parts = tuple(arrays[f"feat_{name}"] for name in ("data", "indices", "indptr"))
        rows = csr_matrix(parts, shape=(g.num_nodes(), int(arrays["feat_dim"]))).toarray()
        g.ndata["feat"] = torch.from_numpy(rows).float()
    return g


class Net(nn.Module):
    """Two convolutions; ``rgcn``: a mean for each relation, and a weight of own rows."""

    def __init__(self, o: argparse.Namespace, etypes: list[Any], columns: int, out: int) -> None:
        super().__init__()
        self.kind, self.dropout = o.model, nn.Dropout(o.dropout)
        free: Any = {"allow_zero_in_degree": True}
        convs: list[nn.Module] = []
        for a, b in pairwise([columns, o.hidden, out]):
            if self.kind == "rgcn":
                each = {e: dgl.nn.GraphConv(a, b, norm="right", bias=False, **free) for e in etypes}
                convs.append(dgl.nn.HeteroGraphConv(each, "sum"))
            elif self.kind == "gat":
                convs.append(dgl.nn.GATConv(a, b if convs else b // 4, 4, **free))
            else:
                gcn = self.kind == "gcn"
                convs.append(dgl.nn.GraphConv(a, b, **free) if gcn else dgl.nn.SAGEConv(a, b, "mean"))
        self.convs = nn.ModuleList(convs)
        self.own = nn.ModuleList([nn.Linear(columns, o.hidden), nn.Linear(o.hidden, out)])

    def forward(self, blocks: Any, h: Tensor) -> Tensor:
        """Map (num_src, F) rows to (num_dst, C)."""
        for block, conv, own in zip(blocks, self.convs, self.own, strict=True):
            if self.kind == "rgcn":
                h = conv(block, {"_N": h})["_N"] + own(h[: block.num_dst_nodes()])
            else:
                h = conv(block, h)
            last = conv is self.convs[-1]
            if self.kind == "gat":
                h = h.mean(1) if last else h.flatten(1)
            h = h if last else self.dropout(F.elu(h) if self.kind == "gat" else torch.relu(h))
        return h


class Trainer:
    """Adam of the modules, and its lazy form for (N, d) trainable rows, at first in [-scale, scale)."""

    def __init__(
        self, o: argparse.Namespace, count: int, width: int | None, *modules: nn.Module, scale: float = 1.0
    ) -> None:
        of_modules = [weight for module in modules for weight in module.parameters()]
        self.steps: list[Any] = [torch.optim.Adam(of_modules, lr=o.lr)]
        if width:
            first = (torch.rand(count, width) * 2 - 1) * scale
            self.rows = nn.Embedding(count, width, sparse=True, _weight=first)
            self.steps.append(torch.optim.SparseAdam(self.rows.parameters(), lr=o.lr))

    def step(self, loss: Tensor) -> None:
        """Take a step of all optimizers."""
        for optimizer in self.steps:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.steps:
            optimizer.step()


def sampler_of(o: argparse.Namespace) -> Any:
    """Return DGL's sampler."""
    return dgl.dataloading.NeighborSampler([int(k) for k in o.fanout.split(",")])


def learn_nodes(o: argparse.Namespace, g: Any) -> dict[str, float]:
    """Train on nodes, with samples or on the whole graph; return the metrics of the test nodes."""
    label, train, test = g.ndata["label"], *(g.ndata[mask].bool() for mask in (SPLITS[0], SPLITS[2]))
    numbers, ids = label.dtype.is_floating_point, train.nonzero()[:, 0]
    width = o.hidden if o.model == "rgcn" else o.embeddings
    out = label.shape[1] if label.dim() == 2 else 1 if numbers else int(label.max()) + 1
    model = Net(o, g.canonical_etypes, width or g.ndata["feat"].shape[1], out)
    trainer = Trainer(o, g.num_nodes(), width, model)
    rows = trainer.rows if width else lambda at: g.ndata["feat"][at]
    everything = torch.arange(g.num_nodes())
    middle, spread = (label[train].mean(), label[train].std(correction=0)) if numbers else (0.0, 1.0)
    loader: Any = [(everything, ids, [g] * 2)]
    if o.fanout:
        loader = dgl.dataloading.DataLoader(g, ids, sampler_of(o), batch_size=2 * o.batch_size, shuffle=True)
    for _ in range(o.epochs):
        for inputs, seeds, blocks in loader:
            scores, truth = model(blocks, rows(inputs)), label[seeds]
            scores = scores if o.fanout else scores[seeds]
            if numbers:
                trainer.step(F.mse_loss(scores[:, 0], (truth - middle) / spread))
            elif truth.dim() == 2:
                trainer.step(F.binary_cross_entropy_with_logits(scores, truth.float()))
            else:
                trainer.step(F.cross_entropy(scores, truth))
    model.eval()
    with torch.no_grad():
        return compute_metrics(model([g] * 2, rows(everything))[test] * spread + middle, label[test])


def compute_metrics(scores: Tensor, label: Tensor) -> dict[str, float]:
    """Return the metrics by their textbook formulas."""
    if label.dtype.is_floating_point:
        error = scores[:, 0] - label
        return {"mae": float(error.abs().mean()), "rmse": float(error.square().mean().sqrt())}
    predicted, truth = scores > 0, label.bool()
    if label.dim() == 1:
        predicted, truth = (
            F.one_hot(classes, scores.shape[1]).bool() for classes in (scores.argmax(1), label)
        )
    right, marked = (predicted & truth).sum(0).double(), (predicted.long() + truth.long()).sum(0)
    metrics = {
        "accuracy": (predicted == truth).all(1).double().mean(),
        "f1_micro": 2 * right.sum() / marked.sum(),
    }
    metrics["f1_macro"] = (2 * right / marked.clamp(min=1)).mean()
    return {name: float(value) for name, value in metrics.items()}


class Score(nn.Module):
    """Scores of (subject, relation, object) rows that can be broadcast."""

    def __init__(self, o: argparse.Namespace, relations: int, width: int) -> None:
        super().__init__()
        self.kind, self.bias = o.decoder, nn.Parameter(torch.zeros(()))
        self.scale = 14 / width if self.kind == "transe" else 0.02
        weight = torch.empty(relations, width)
        weight.uniform_(-self.scale, self.scale) if self.kind == "transe" else nn.init.xavier_uniform_(weight)
        self.relations = nn.Parameter(weight)

    def forward(self, s: Tensor, relation: Tensor, o: Tensor) -> Tensor:
        """Return (...) scores of (..., d) rows and (...) relations."""
        r = self.relations[relation]
        if self.kind == "transe":
            return 12 - (s + r - o).abs().sum(-1) + self.bias
        if self.kind == "complex":
            a, b, c = (torch.view_as_complex(torch.stack(vector.chunk(2, -1), -1)) for vector in (s, r, o))
            return (a * b * c.conj()).real.sum(-1) + self.bias
        return (s * r * o if self.kind == "distmult" else s * o).sum(-1) + self.bias


def link_loss(name: str | None, positive: Tensor, negative: Tensor) -> Tensor:
    """Return the loss of (P,) edges and (P, K) negatives."""
    if name == "bpr":
        return -F.logsigmoid(positive[:, None] - negative).mean()
    if name == "softmax":
        return (torch.logsumexp(torch.cat([positive[:, None], negative], 1), 1) - positive).mean()
    return -torch.cat([F.logsigmoid(positive), F.logsigmoid(-negative).flatten()]).mean()


def triples(g: Any, target: str | None) -> tuple[Tensor, list[range]]:
    """Return (4, E) source, relation, destination and split of the edges, and the candidates of both ends."""
    first = dict(zip(g.ntypes, np.cumsum([0, *map(g.num_nodes, g.ntypes)]), strict=False))
    etypes, parts = [e for e in g.canonical_etypes if target in (None, e[1])], []
    for index, etype in enumerate(etypes):
        u, v = g.edges(etype=etype)
        side = torch.stack([g.edges[etype].data[mask].long() for mask in SPLITS]).argmax(0)
        parts.append(torch.stack([u + first[etype[0]], u * 0 + index, v + first[etype[2]], side]))
    ends = (etypes[0][0], etypes[0][2])
    return torch.cat(parts, 1), [range(first[end], first[end] + g.num_nodes(end)) for end in ends]


def with_negatives(positives: Tensor, candidates: list[range], count: int) -> Tensor:
    """Return (3, P, K) triples with a random destination, and source if both ends are of one type."""
    corrupted = []
    for end in (2, 0)[: 1 + (candidates[0] == candidates[1])]:
        corrupted.append(positives[:, :, None].repeat(1, 1, count))
        candidate_range = candidates[end // 2]
        corrupted[-1][end] = torch.randint(
            candidate_range.start, candidate_range.stop, (positives.shape[1], count)
        )
    return torch.cat(corrupted, 2)


def learn_links(o: argparse.Namespace, g: Any) -> dict[str, float]:
    """Train on edges with an encoder or embeddings, and return the metrics of the test edges."""
    edges, candidates = triples(g, o.target)
    train, test = (edges[:3, edges[3] == side] for side in (0, 2))
    score = Score(o, int(edges[1].max()) + 1, o.embeddings or o.hidden)
    columns, negatives = o.embeddings or g.ndata["feat"].shape[1], o.negatives or 4
    model = Net(o, g.canonical_etypes, columns, o.hidden)
    modules = [score] if o.embeddings else [score, model]
    trainer = Trainer(o, g.num_nodes(), o.embeddings, *modules, scale=score.scale)
    known, ids = dgl.graph((train[0], train[2]), num_nodes=g.num_nodes()), torch.arange(train.shape[1])

    def batches() -> Iterator[tuple[Tensor, Tensor, Any]]:
        if o.embeddings:
            for batch in ids[torch.randperm(len(ids))].split(2 * o.batch_size):
                positives = train[:, batch]
                yield positives, with_negatives(positives, candidates, negatives), trainer.rows
            return
        sampler = dgl.dataloading.as_edge_prediction_sampler(
            sampler_of(o),
            exclude="reverse_id",
            reverse_eids=known.edge_ids(train[2], train[0]),
            negative_sampler=lambda _, positive_ids: (
                *with_negatives(train[:, positive_ids], candidates, negatives)[[0, 2]].flatten(1),
            ),
        )
        batch_size = 2 * o.batch_size
        for inputs, *pairs, blocks in dgl.dataloading.DataLoader(
            known, ids, sampler, batch_size=batch_size, shuffle=True
        ):
            h, (positives, negative_edges) = (
                model(blocks, g.ndata["feat"][inputs]),
                (torch.stack(pair.edges()) for pair in pairs),
            )
            positives, negative_edges = (
                ends[[0, 0, 1]] * torch.tensor([[1], [0], [1]]) for ends in (positives, negative_edges)
            )
            yield positives, negative_edges.view(3, positives.shape[1], -1), h.__getitem__

    for _ in range(o.epochs):
        for positives, corrupted, lookup in batches():
            positive, negative = (
                score(lookup(triple[0]), triple[1], lookup(triple[2])) for triple in (positives, corrupted)
            )
            trainer.step(link_loss(o.loss, positive, negative))
    model.eval()
    with torch.no_grad():
        h = trainer.rows.weight if o.embeddings else model([known] * 2, g.ndata["feat"])
        return rank_metrics(score, h, edges[:3], test, candidates)


def rank_metrics(
    score: Score, h: Tensor, edges: Tensor, test: Tensor, candidates: list[range]
) -> dict[str, float]:
    """Return the metrics of edges by brute force. True edges are not candidates, and ties count half."""
    places = []
    for end in (2, 0)[: 1 + (candidates[0] == candidates[1])]:
        among, true = candidates[end // 2], dict[tuple[int, int], list[int]]()
        for triple in edges.T.tolist():
            true.setdefault((triple[2 - end], triple[1]), []).append(triple[end] - among.start)
        for triple in test.T.tolist():
            rows = [h[triple[0]], torch.tensor(triple[1]), h[triple[2]]]
            rows[end] = h[among.start : among.stop]
            scores = score(*rows)
            own = scores[triple[end] - among.start].clone()
            scores[true[triple[2 - end], triple[1]]] = -torch.inf
            places.append(1 + int((scores > own).sum()) + int((scores == own).sum()) / 2)
    random = torch.randint(candidates[1].start, candidates[1].stop, test[2].shape)
    right, wrong = (score(h[test[0]], test[1], h[at]).numpy() for at in (test[2], random))
    rank, wrong = np.array(places), np.sort(wrong)
    below = sum(np.searchsorted(wrong, right, side) for side in ("left", "right")) / 2
    return {"mrr": (1 / rank).mean(), "hits@10": (rank <= 10).mean(), "auc": below.mean() / len(wrong)}


def plain(o: argparse.Namespace, path: Path, seed: int) -> dict[str, float]:
    """Return the test metrics of a plain run."""
    torch.manual_seed(seed)
    dgl.seed(seed)
    return (learn_links if o.task == LINK else learn_nodes)(o, read_graph(path))


def train_distributed(o: argparse.Namespace, path: Path, out: Path, seeds: str) -> list[dict[str, float]]:
    """Partition the graph once, train on 2 ranks, and return the test metrics of each seed."""
    data, run = out / f"{path.stem}-2", out / f"{path.stem}-run"
    if not data.exists():
        dglx("partition", path, "--parts", 2, "--out", data)
    options = {name.replace("_", "-"): value for name, value in vars(o).items() if value is not None}
    options |= {"ranks": 2, "seeds": seeds, "eval-every": o.epochs}
    del options["graph"]
    dglx(
        "train",
        data,
        "--out",
        run,
        *(part for name, value in options.items() for part in (f"--{name}", value)),
    )
    runs = json.loads((run / "summary.json").read_text())["runs"].values()
    return [{name.removeprefix("test_"): value for name, value in each.items()} for each in runs]


def compare(o: argparse.Namespace, dglx_metrics: Any, plain_metrics: Any) -> Iterator[dict[str, Any]]:
    """Yield a line of the table for each metric."""
    for name in o.metric.split(","):
        is_error = name in ERRORS
        a, b = (
            [(1 if is_error else 100) * metrics[name] for metrics in side]
            for side in (dglx_metrics, plain_metrics)
        )
        unit = 100 / fmean(b) if is_error else 1.0
        apart = unit * (fmean(a) - fmean(b))
        error = unit * ((stdev(a) ** 2 + stdev(b) ** 2) / len(a)) ** 0.5
        dglx_cell, plain_cell = (f"{fmean(x):.{1 + is_error}f} ± {stdev(x):.{1 + is_error}f}" for x in (a, b))
        yield {
            "graph": o.graph,
            "task": o.task,
            "model": o.decoder if o.model == "none" and o.decoder else o.model,
            "strategy": o.strategy,
            "metric": name,
            "seeds": len(a),
            "dglx": dglx_cell,
            "plain DGL": plain_cell,
            "difference": f"{apart:+.1f}" + " %" * is_error,
            "within": "1" if abs(apart) <= 1 else "2 errors" if abs(apart) <= 2 * error else "no",
        }


def main(argv: list[str]) -> int:
    """Measure and print the table. Return 1 if a difference exceeds its bound."""
    options = parser("tasks", __doc__)
    options.add_argument("--data", type=Path, nargs="*", default=[Path("../shared/data")], help="folders")
    options.add_argument("--out", type=Path, default=Path("runs/tasks"), help="partitions, runs, results")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument(
        "--graphs", nargs="*", help="rows to measure again; without it, only missing rows are measured"
    )
    chosen = options.parse_args(argv)
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for o in map(setting, ROWS.strip().splitlines()):
        result = chosen.out / f"{o.graph}.json"
        paths = [path for folder in chosen.data for path in folder.glob(f"{o.graph}.*")]
        is_requested = not result.exists() if chosen.graphs is None else o.graph in chosen.graphs
        if paths and is_requested:
            dglx_metrics = train_distributed(o, paths[0], chosen.out, chosen.seeds)
            plain_metrics = [plain(o, paths[0], int(seed)) for seed in chosen.seeds.split(",")]
            write_json(result, [dglx_metrics, plain_metrics])
        if result.exists():
            lines += compare(o, *json.loads(result.read_text()))
    print(table(lines))
    return int(any(line["within"] == "no" for line in lines))
