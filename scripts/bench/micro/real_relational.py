"""Relational real data on one process and on two ranks: what the same model reaches on both.

    torchrun --nproc-per-node 2 scripts/bench real_relational aifb --choose --data ../shared/data
    torchrun --nproc-per-node 2 scripts/bench real_relational aifb --data ../shared/data
    torchrun --nproc-per-node 2 scripts/bench real_relational physics --data ../shared/data
    torchrun --nproc-per-node 2 scripts/bench real_relational wn18rr --data ../shared/data

`python` in place of `torchrun --nproc-per-node 2` gives the figure of one process; the batch of a step is the
same, cut over the ranks. The first run partitions into `--out`.

aifb: R-GCN with trainable rows for all nodes (it has no features), 45 relations and their reverses. physics:
coauthor_physics without features, GraphSAGE on trainable rows. Both: test accuracy, mean of seeds.
wn18rr: DistMult with trainable rows for all entities, negatives shared by the batch; filtered MRR and Hits@k
over both directions.

`--choose` never looks at a test node: it prints the validation accuracy of every setting of `GRIDS`, mean of
seeds 0, 1, 2, and the best. aifb has no validation nodes, so each seed holds out a fifth of the training
nodes of each class. What was chosen stands in `CHOSEN`; without `--choose` it is trained on all training
nodes with seeds that chose nothing (5 to 9), and tested once, after the last epoch.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor

import dglx_dist as dx
from dglx_dist.comm.collectives import barrier
from dglx_dist.data.sources import load_dataset
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.prepare import PartitionPlan, partition_to_disk
from dglx_dist.records import RawGraph
from dglx_dist.strategies.base import count_targets
from dglx_dist.training.metrics import KnownEdges, hits_at, mrr, rank_of_answer
from dglx_dist.training.models import DistMult, build_model
from dglx_dist.training.relational import RGCN, EntityInputs

NODE = "_N"


@dataclass(frozen=True)
class Setting:
    """What is chosen on validation nodes."""

    first: float
    """Bound of the first rows."""
    fanout: int
    """Of both layers; -1: all."""
    epochs: int


GRIDS = {
    "aifb": [Setting(first, -1, epochs) for first in (0.1, 0.3, 1.0) for epochs in (20, 30, 50)],
    "physics": [Setting(first, k, e) for first in (0.01, 0.1, 1.0) for k in (10, 25) for e in (10, 20)],
}
CHOSEN = {"aifb": Setting(0.3, -1, 30), "physics": Setting(0.01, 25, 20)}
CHOOSING, REPORTED = (0, 1, 2), (5, 6, 7, 8, 9)


def opened(chosen: argparse.Namespace, name: str, graph_of: Any, session: Any) -> DistGraph:
    """Return the partitioned graph, written by the first rank if it is not there."""
    folder = chosen.out / f"{name}-{chosen.parts}"
    if session.topology.rank == 0 and not folder.exists():
        plan = PartitionPlan(num_parts=chosen.parts, method="metis")
        partition_to_disk(graph_of(chosen.data / f"{name}.npz"), folder, plan)
    barrier(session, "the partition")
    return DistGraph(folder)


def with_reverse_relations(path: Path) -> RawGraph:
    """Return the graph with a relation ``rev_r`` for each relation r, as R-GCN wants it."""
    raw = load_dataset(path)
    reverse = {(v, f"rev_{r}", u): (ends[1], ends[0]) for (u, r, v), ends in raw.edges.items()}
    return RawGraph(
        name=raw.name,
        num_nodes=raw.num_nodes,
        edges={**raw.edges, **reverse},
        node_data=raw.node_data,
        num_classes=raw.num_classes,
    )


def aifb(chosen: argparse.Namespace, session: Any) -> None:
    """R-GCN; a step is one batch of all training nodes with every neighbour."""
    g = opened(chosen, "aifb", with_reverse_relations, session)
    choose_or_report(Runs(g, "aifb", rgcn_of_16, None, weight_decay=5e-4), chosen, session)


def physics(chosen: argparse.Namespace, session: Any) -> None:
    """GraphSAGE; a step is 64 nodes of all ranks."""
    g = opened(chosen, "coauthor_physics", without_features, session)
    labels = g.ndata["label"][:]
    majority = torch.bincount(labels[labels >= 0]).max().item() / int((labels >= 0).sum())
    say(session, f"largest class {majority:.4f}")
    choose_or_report(Runs(g, "physics", sage_of_64, 64), chosen, session)


def rgcn_of_16(g: DistGraph) -> tuple[torch.nn.Module, int]:
    """Return the model of aifb and the width of its rows."""
    return RGCN(g, {}, 16, g.num_classes(NODE)), 16


def sage_of_64(g: DistGraph) -> tuple[torch.nn.Module, int]:
    """Return the model of physics and the width of its rows."""
    return build_model("sage", 64, 64, g.num_classes(NODE), dropout=0.5), 64


@dataclass(frozen=True)
class Runs:
    """One model on one graph."""

    g: DistGraph
    name: str
    make: Any
    """(g) to the model and the width of its rows."""
    batch: int | None
    """Nodes of all ranks in a step; None: all."""
    weight_decay: float = 0.0


def choose_or_report(runs: Runs, chosen: argparse.Namespace, session: Any) -> None:
    """Print the validation accuracy of every setting, or the test accuracy of the one that was chosen."""
    data = runs.g.ndata
    if not chosen.choose:
        test, setting = ids_of(data["test_mask"]), CHOSEN[runs.name]
        found = [
            trained(runs, setting, seed, ids_of(data["train_mask"]), test, [setting.epochs])[setting.epochs]
            for seed in chosen.seeds or REPORTED
        ]
        each = ", ".join(f"{accuracy:.4f}" for accuracy in found)
        say(session, f"{runs.name}, {setting}: test accuracy mean {statistics.mean(found):.4f} ({each})")
        return
    found = {}
    for first, fanout in dict.fromkeys((setting.first, setting.fanout) for setting in GRIDS[runs.name]):
        tried = [s for s in GRIDS[runs.name] if (s.first, s.fanout) == (first, fanout)]
        marks = [setting.epochs for setting in tried]
        curves = [trained(runs, tried[0], seed, *held_out(data, seed), marks) for seed in CHOOSING]
        for setting in tried:
            found[setting] = statistics.mean(curve[setting.epochs] for curve in curves)
            say(session, f"  {setting}: validation accuracy {found[setting]:.4f}")
    # Of equals the first: the grid lists smaller rows and fewer epochs first.
    say(session, f"chosen for {runs.name}: {max(found, key=lambda setting: found[setting])}")


def held_out(data: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Return ids to train on and to validate with; without a mask for these, a fifth of each class."""
    train = ids_of(data["train_mask"])
    if "val_mask" in data:
        return train, ids_of(data["val_mask"])
    random, label = torch.Generator().manual_seed(seed), data["label"][train]
    validation = torch.zeros(len(train), dtype=torch.bool)
    for kind in label.unique():
        members = (label == kind).nonzero()[:, 0]
        picked = torch.randperm(len(members), generator=random)[: round(0.2 * len(members))]
        validation[members[picked]] = True
    return train[~validation], train[validation]


def ids_of(mask: Any) -> Tensor:
    """Return the ids that a mask marks, ascending."""
    return mask[:].bool().nonzero()[:, 0]


def trained(
    runs: Runs, setting: Setting, seed: int, train: Tensor, scored: Tensor, marks: Sequence[int]
) -> dict[int, float]:
    """Train up to the last of ``marks``; return the accuracy on ``scored`` after each of these epochs."""
    g, session = runs.g, runs.g.session
    torch.manual_seed(seed)
    mine = train.tensor_split(session.topology.world_size)[session.topology.rank]
    batch = len(train) if runs.batch is None else runs.batch
    sampler = dgl.dataloading.NeighborSampler([setting.fanout] * 2, prefetch_labels=["label"])
    loader = dx.DataLoader(
        g,
        mine,
        sampler,
        batch_size=math.ceil(batch / session.topology.world_size),
        shuffle=runs.batch is not None,
        seed=seed,
    )
    module, width = runs.make(g)
    init_func = uniform(seed, setting.first, session)
    rows = dx.DistEmbedding(g.num_nodes(), width, f"rows-{seed}-{setting}", init_func=init_func, graph=g)
    inputs = EntityInputs(g, embeddings={NODE: rows})
    model = dx.wrap(module, g)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=runs.weight_decay)
    sparse = dx.optim.SparseAdam([rows], lr=0.01)
    found = {}
    for epoch in range(1, max(marks) + 1):
        for _, _, blocks in loader:
            scores = model(blocks, inputs(blocks[0])[NODE])
            step(F.cross_entropy(scores, blocks[-1].dstdata["label"]), optimizer, sparse)
        if epoch in marks:
            found[epoch] = accuracy_on(scored, model, rows.weight, g)
    sparse.close()
    rows.weight.delete()
    return found


def accuracy_on(nodes: Tensor, model: Any, rows: Any, g: DistGraph) -> float:
    """Return the exact accuracy on some nodes."""
    scores = dx.layerwise_inference(model, g, inputs=rows)
    right = scores[nodes].argmax(1) == g.ndata["label"][nodes]
    scores.delete()
    return right.double().mean().item()


def without_features(path: Path) -> RawGraph:
    """Return the graph with labels and masks only."""
    raw = load_dataset(path)
    columns = {name: column for name, column in raw.node_data[NODE].items() if name != "feat"}
    return RawGraph(
        name=raw.name,
        num_nodes=raw.num_nodes,
        edges=raw.edges,
        node_data={NODE: columns},
        num_classes=raw.num_classes,
    )


def wn18rr(chosen: argparse.Namespace, session: Any) -> None:
    """Print filtered MRR and Hits@k of DistMult."""
    g = opened(chosen, "wn18rr", load_dataset, session)
    triples, split = all_triples(g)
    rank, world_size = session.topology.rank, session.topology.world_size
    torch.manual_seed(0)
    width = 200
    rows = dx.DistEmbedding(
        g.num_nodes(), width, "rows", init_func=uniform(0, chosen.first, session), graph=g
    )
    model = dx.wrap(AmongNegatives(2 * len(g.canonical_etypes), width), g)
    optimizer = torch.optim.Adam(model.parameters(), lr=chosen.lr)
    sparse = dx.optim.SparseAdagrad([rows], lr=chosen.sparse_lr)
    train = both_directions(triples[:, split == 0], len(g.canonical_etypes))
    random = torch.Generator().manual_seed(0)
    for epoch in range(chosen.epochs):
        begin = time.perf_counter()
        order = torch.randperm(train.shape[1], generator=random)
        total = 0.0
        for batch in order.split(chosen.batch):
            negatives = torch.randint(g.num_nodes(), (chosen.negatives,), generator=random)
            mine = train[:, batch.tensor_split(world_size)[rank]]
            session.step_share = count_targets(mine.shape[1], session)
            loss = triple_loss(model, rows, mine, negatives)
            step(loss, optimizer, sparse)
            total += float(loss.detach())
        say(session, f"  epoch {epoch}: loss {total:.3f}, {time.perf_counter() - begin:.1f} s")
    report_ranks(g, model.module, rows, (triples, split), session)


class AmongNegatives(torch.nn.Module):
    """(B, 1 + K) scores: of the true object first, then of the negatives."""

    def __init__(self, num_relations: int, width: int) -> None:
        super().__init__()
        self.decoder = DistMult(num_relations, width)

    def forward(self, subject: Tensor, relation: Tensor, answer: Tensor, others: Tensor) -> Tensor:
        """Score (B, d) subjects and answers, and (K, d) others."""
        true = self.decoder(subject, relation, answer)
        return torch.cat([true[:, None], self.decoder.all_objects(subject, relation, others)], 1)


def triple_loss(model: Any, rows: Any, triples: Tensor, negatives: Tensor) -> Tensor:
    """Cross-entropy of each true tail among the batch's negatives, mean over the triples."""
    subject, relation, answer = triples
    pulled = rows(torch.cat([subject, answer, negatives]))
    h, t, others = pulled.split([len(subject), len(answer), len(negatives)])
    scores = model(h, relation, t, others)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


def all_triples(g: DistGraph) -> tuple[Tensor, Tensor]:
    """Return (3, E) int64 triples in ids of ``g`` and their (E,) split: 0 train, 1 valid, 2 test."""
    columns, splits = [], []
    for number, etype in enumerate(g.canonical_etypes):
        edges = torch.arange(g.num_edges(etype))
        u, v = g.find_edges(edges, etype)
        data = g.edges[etype].data
        split = torch.full_like(u, -1)
        for code, name in enumerate(("train_mask", "val_mask", "test_mask")):
            if name in data:
                split[data[name][:].bool()] = code
        columns.append(torch.stack([u, torch.full_like(u, number), v]))
        splits.append(split)
    return torch.cat(columns, 1), torch.cat(splits)


def both_directions(triples: Tensor, num_relations: int) -> Tensor:
    """Return the triples and, under relations of their own, their reverses."""
    u, r, v = triples
    return torch.cat([triples, torch.stack([v, r + num_relations, u])], 1)


def report_ranks(g: DistGraph, decoder: Any, rows: Any, known: tuple[Tensor, Tensor], session: Any) -> None:
    """Print filtered figures of the test triples, each rank its share, heads and tails."""
    triples, split = known
    barrier(session, "all updates")
    everyone = rows.weight[:]
    asked = both_directions(triples[:, split == 2], len(g.canonical_etypes))
    mine = asked[:, session.topology.rank :: session.topology.world_size]
    true = KnownEdges(*both_directions(triples, len(g.canonical_etypes)))
    ranks = rank_of_answer(
        lambda s, r: decoder.decoder.all_objects(everyone[s], r, everyone), *mine, known=true
    )
    figures = ", ".join(f"Hits@{k} {hits_at(k, ranks, session):.4f}" for k in (1, 3, 10))
    say(session, f"wn18rr DistMult: filtered MRR {mrr(ranks, session):.4f}, {figures}")


def uniform(seed: int, bound: float, session: Any) -> Any:
    """Return what makes the first rows of a server, in [-bound, bound)."""
    random = torch.Generator().manual_seed(1000 * seed + session.topology.server)
    return lambda shape, dtype: (2 * torch.rand(shape, dtype=dtype, generator=random) - 1) * bound


def step(loss: Tensor, optimizer: Any, sparse: Any) -> None:
    """One step of both optimizers."""
    optimizer.zero_grad()
    sparse.zero_grad()
    loss.backward()
    optimizer.step()
    sparse.step()


def say(session: Any, text: str) -> None:
    """Print on the first rank."""
    if session.topology.rank == 0:
        print(text, flush=True)


def main(argv: list[str]) -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench real_relational",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("graph", choices=("aifb", "wn18rr", "physics"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the .npz graphs")
    parser.add_argument("--out", type=Path, default=Path("runs/real_relational"), help="partitions")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--choose", action="store_true", help="settings of aifb and physics, on validation")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of 5 to 9")
    parser.add_argument("--epochs", type=int, default=30, help="of wn18rr")
    parser.add_argument("--batch", type=int, default=1024, help="triples of all ranks in a step of wn18rr")
    parser.add_argument("--negatives", type=int, default=512, help="shared by a batch of wn18rr")
    parser.add_argument("--lr", type=float, default=0.003, help="of wn18rr's relations")
    parser.add_argument("--first", type=float, default=0.1, help="bound of wn18rr's first rows")
    parser.add_argument("--sparse-lr", type=float, default=0.1, help="of wn18rr's entities")
    chosen = parser.parse_args(argv)
    with dx.init(seed=0) as session:
        {"aifb": aifb, "wn18rr": wn18rr, "physics": physics}[chosen.graph](chosen, session)
