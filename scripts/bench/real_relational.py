"""Relational real data on one process and on two ranks: what the same model reaches on both.

    torchrun --nproc-per-node 2 scripts/bench/real_relational.py aifb --data ../shared/data
    torchrun --nproc-per-node 2 scripts/bench/real_relational.py wn18rr --data ../shared/data
    torchrun --nproc-per-node 2 scripts/bench/real_relational.py physics --data ../shared/data

`python` in place of `torchrun --nproc-per-node 2` gives the figure of one process; the batch of a step is the
same, cut over the ranks. The first run partitions into `--out`.

aifb: R-GCN with trainable rows for all nodes (it has no features), 45 relations and their reverses; test
accuracy, mean of the seeds. wn18rr: DistMult with trainable rows for all entities, negatives shared by the
batch; filtered MRR and Hits@k over both directions. physics: coauthor_physics without features, GraphSAGE on
trainable rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor

import dglx_dist as dx
from dglx_dist.cluster.collectives import barrier
from dglx_dist.datasets.load import load_dataset
from dglx_dist.graph import DistGraph
from dglx_dist.records import RawGraph
from dglx_dist.run.prepare import PartitionPlan, partition_to_disk
from dglx_dist.strategies.share import count_targets
from dglx_dist.training.decoders import DistMult
from dglx_dist.training.entity_inputs import EntityInputs
from dglx_dist.training.models import build_model
from dglx_dist.training.ranking import KnownEdges, hits_at, mrr, rank_of_answer
from dglx_dist.training.relational import RGCN

NODE = "_N"


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
    """Print the test accuracy of each seed and their mean."""
    g = opened(chosen, "aifb", with_reverse_relations, session)
    found = [aifb_once(g, seed, session) for seed in range(chosen.seeds)]
    say(session, f"aifb R-GCN: mean {statistics.mean(found):.4f} ({', '.join(f'{a:.4f}' for a in found)})")


def aifb_once(g: DistGraph, seed: int, session: Any, epochs: int = 30, hidden: int = 16) -> float:
    """Train 140 nodes in one batch a step, every neighbour; return the test accuracy after the last epoch."""
    torch.manual_seed(seed)
    train = dx.node_split(g.ndata["train_mask"])
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_labels=["label"])
    loader = dx.DataLoader(g, train, sampler, batch_size=max(1, len(train)), seed=seed)
    rows = dx.DistEmbedding(
        g.num_nodes(), hidden, f"rows-{seed}", init_func=uniform(seed, 0.3, session), graph=g
    )
    inputs = EntityInputs(g, embeddings={NODE: rows})
    model = dx.wrap(RGCN(g, {}, hidden, g.num_classes(NODE), num_bases=None), g)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    sparse = dx.optim.SparseAdam([rows], lr=0.01)
    for _ in range(epochs):
        for _, _, blocks in loader:
            scores = model(blocks, inputs(blocks[0]))[NODE]
            loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
            step(loss, optimizer, sparse)
    accuracy = dx.evaluate(model, g, ["test_mask"], inputs=inputs.tensors)["test_mask"]
    say(session, f"  seed {seed}: {accuracy:.4f}")
    return accuracy


def physics(chosen: argparse.Namespace, session: Any) -> None:
    """Print the test accuracy of GraphSAGE on trainable rows, and the share of the largest class."""
    g = opened(chosen, "coauthor_physics", without_features, session)
    torch.manual_seed(0)
    width, batch = 64, 64 // session.topology.world_size
    sampler = dgl.dataloading.NeighborSampler([25, 25], prefetch_labels=["label"])
    loader = dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, batch_size=batch, shuffle=True)
    rows = dx.DistEmbedding(g.num_nodes(), width, "rows", init_func=uniform(0, 0.01, session), graph=g)
    inputs = EntityInputs(g, embeddings={NODE: rows})
    model = dx.wrap(build_model("sage", width, width, g.num_classes(NODE), dropout=0.5), g)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sparse = dx.optim.SparseAdam([rows], lr=0.01)
    for _ in range(20):
        for _, _, blocks in loader:
            loss = F.cross_entropy(model(blocks, inputs(blocks[0])[NODE]), blocks[-1].dstdata["label"])
            step(loss, optimizer, sparse)
    accuracy = dx.evaluate(model, g, ["test_mask"], inputs=rows.weight)["test_mask"]
    labels = g.ndata["label"][:]
    majority = torch.bincount(labels[labels >= 0]).max().item() / int((labels >= 0).sum())
    say(session, f"coauthor_physics without features: {accuracy:.4f} (largest class {majority:.4f})")


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


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("graph", choices=("aifb", "wn18rr", "physics"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the .npz graphs")
    parser.add_argument("--out", type=Path, default=Path("runs/real_relational"), help="partitions")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5, help="of aifb")
    parser.add_argument("--epochs", type=int, default=30, help="of wn18rr")
    parser.add_argument("--batch", type=int, default=1024, help="triples of all ranks in a step of wn18rr")
    parser.add_argument("--negatives", type=int, default=512, help="shared by a batch of wn18rr")
    parser.add_argument("--lr", type=float, default=0.003, help="of wn18rr's relations")
    parser.add_argument("--first", type=float, default=0.1, help="bound of wn18rr's first rows")
    parser.add_argument("--sparse-lr", type=float, default=0.1, help="of wn18rr's entities")
    chosen = parser.parse_args()
    with dx.init(seed=0) as session:
        {"aifb": aifb, "wn18rr": wn18rr, "physics": physics}[chosen.graph](chosen, session)


if __name__ == "__main__":
    main()
