"""Edge tasks on a graph of four node types in ranks, and plain DGL in one process on the same pairs.

Papers cite and extend each other, authors write papers and have no features, venues are on one server only,
topics have no in-edges, and no edge is of the type "retracts". The pairs of a step are those that
data_parallel draws, so a strategy that draws others, or mixes up their relations, leaves other weights.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading import negative
from dglx_dist.dataloading.edge_loader import gather_pair_rows
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.optim import SparseSGD
from dglx_dist.records import Array, EdgeType, RawGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training.relational import HGT, RGCN, EntityInputs
from tests.strategies import equality
from tests.strategies.full_graph import typed_cases
from tests.strategies.full_graph.typed_cases import HIDDEN, NUM_NODES, NUM_PARTS, WIDTHS, Projected
from tests.strategies.test_hetero_equality import first_rows
from tests.training.hetero import TypedGraph, fill_authors, weights_of

CLASSES, NEGATIVES, BATCH, EPOCHS, RATE = 3, 2, 40, 2, 0.03
NUM_EDGES: dict[EdgeType, int] = {**typed_cases.NUM_EDGES, ("paper", "extends", "paper"): 90}
ETYPES = sorted(NUM_EDGES)
CITES, EXTENDS = ("paper", "cites", "paper"), ("paper", "extends", "paper")
APPEARS: EdgeType = ("paper", "appears_in", "venue")
ANY_SHARES = (2.0, 5.0, 1.0, 3.0)
SHARES: Mapping[EdgeType, Sequence[float]] = {CITES: (3.0, 0.0, 2.0, 0.0), APPEARS: (0.0, 1.0, 0.0, 0.0)}
"""Shares of the ranks in the edges of some types. Two types have ranks without edges."""
GRAPH = TypedGraph(NUM_NODES, WIDTHS, NUM_EDGES, NUM_PARTS)


@dataclass(frozen=True)
class Case:
    strategy: str = "full_graph"
    kind: str = "rgcn"
    task: str = "dot"
    """dot and distmult predict links, classes classifies edges."""
    options: Mapping[str, Any] = field(default_factory=dict)
    mask: str | None = None
    outside: bool = False
    """Whether the wrapped model is the encoder only, and the pairs are scored outside."""
    etypes: Sequence[EdgeType] = ()
    """Edge types to train on. None: all that the encoder has rows for."""


def raw_graph() -> RawGraph:
    """Two of three edges carry messages. Labels are for edge classification."""
    random = np.random.default_rng(7)
    columns = {
        etype: {"label": random.integers(CLASSES, size=count), "train_mask": random.random(count) < 2 / 3}
        for etype, count in NUM_EDGES.items()
    }
    return replace(GRAPH.raw(), edge_data=columns)


def write_parts(folder: Path) -> Path:
    write_dataset(raw_graph(), GRAPH.assign(), folder / "parts")
    return folder / "parts"


def sage(width: int) -> nn.Module:
    return dgl.nn.HeteroGraphConv({name: dgl.nn.SAGEConv(HIDDEN, width, "mean") for _, name, _ in ETYPES})


ENCODERS: dict[str, Any] = {
    "rgcn": lambda graph: RGCN(graph, WIDTHS, HIDDEN, HIDDEN),
    "basis": lambda graph: RGCN(graph, WIDTHS, HIDDEN, HIDDEN, num_bases=2),
    "hgt": lambda graph: HGT(graph, WIDTHS, HIDDEN, HIDDEN, heads=2),
    "sage": lambda _: Projected(sage),
}


class Net(nn.Module):
    """Scores that a user's loop over relations computes. It leaves out those without pairs."""

    def __init__(self, graph: Any, kind: str, task: str) -> None:
        super().__init__()
        self.encoder, self.task = ENCODERS[kind](graph), task
        width = typed_cases.CLASSES if kind == "sage" else HIDDEN
        self.relations = nn.Parameter(torch.rand(len(ETYPES), width))
        self.classes = nn.Linear(2 * width, CLASSES)

    def forward(self, graphs: Sequence[Any], blocks: Any, x: Any) -> list[Tensor]:
        h = gather_pair_rows(graphs[0], self.encoder(blocks, x))
        return [self.score(graph, h) for graph in graphs]

    def score(self, graph: Any, h: Mapping[str, Tensor]) -> Tensor:
        return self.score_pairs({etype: graph.edges(etype=etype) for etype in graph.canonical_etypes}, h)

    def score_pairs(self, pairs: Mapping[EdgeType, Any], h: Mapping[str, Tensor]) -> Tensor:
        no_pairs = h["paper"][:0]
        scores = [self.score_ends(no_pairs, no_pairs, 0)]
        for number, etype in enumerate(ETYPES):
            u, v = (ends.long() for ends in pairs[etype])
            if len(u):
                scores.append(self.score_ends(h[etype[0]][u], h[etype[2]][v], number))
        return torch.cat(scores)

    def score_ends(self, source: Tensor, destination: Tensor, number: int) -> Tensor:
        if self.task == "classes":
            return self.classes(torch.cat([source, destination], 1))
        return (source * (self.relations[number] if self.task == "distmult" else 1) * destination).sum(1)


def first_net(graph: Any, case: Case) -> Net:
    torch.manual_seed(12)
    return Net(graph, case.kind, case.task).double()


def compute_loss(outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
    if len(outputs) == 1:
        return F.cross_entropy(outputs[0], labels)
    expected = torch.cat([torch.ones_like(outputs[0]), torch.zeros_like(outputs[1])])
    return F.binary_cross_entropy_with_logits(torch.cat([*outputs]), expected)


Pairs: TypeAlias = dict[EdgeType, Array]
"""Edge type to (2, P) ends in original ids."""


@dataclass(frozen=True)
class Step:
    edges: Mapping[EdgeType, Array]
    """(B,) original ids of edges by type."""
    pairs: Sequence[Pairs]
    """Positive pairs, and negative pairs if there are any."""

    @property
    def size(self) -> int:
        return sum(map(len, self.edges.values()))


def own_edges(g: DistGraph, case: Case) -> dict[EdgeType, Tensor]:
    topology = g.session.topology
    trained = case.etypes or [etype for etype in ETYPES if case.kind != "sage" or etype[0] != "topic"]
    ids = {etype: torch.arange(g.num_edges(etype)) for etype in trained}
    ids = {etype: own[g.orig_edge_ids(own, etype).argsort()] for etype, own in ids.items()}
    return {
        etype: equality.cut(own, tuple(SHARES.get(etype, ANY_SHARES)), topology.rank, topology.world_size)
        for etype, own in ids.items()
    }


def open_loader(g: DistGraph, strategy: Any, case: Case, sampler: Any, batch_size: int = BATCH) -> Any:
    negatives = None if case.task == "classes" else negative.Uniform(NEGATIVES)
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        sampler, negative_sampler=negatives, prefetch_labels={etype: ["label"] for etype in ETYPES}
    )
    return strategy.edge_loader(own_edges(g, case), sampler, batch_size=batch_size, shuffle=True, seed=9)


def draw_steps(g: DistGraph, case: Case) -> list[Step]:
    """Return the pairs that data_parallel trains on, in original ids."""
    strategy = STRATEGIES.get("data_parallel")(g.session, {}).open(g)
    batch_size = BATCH * int(case.options.get("edge_batches_per_step", 1))
    loader = open_loader(g, strategy, case, dgl.dataloading.NeighborSampler([0]), batch_size)
    return [note_step(g, graphs) for _ in range(EPOCHS) for _, *graphs, _ in loader]


def note_step(g: DistGraph, graphs: Sequence[Any]) -> Step:
    edges = {etype: graphs[0].edges[etype].data[dgl.EID] for etype in ETYPES}
    pairs: list[Pairs] = []
    for graph in graphs:
        nodes = {ntype: g.orig_ids(graph.nodes[ntype].data[dgl.NID], ntype) for ntype in NUM_NODES}
        ends = {etype: graph.edges(etype=etype) for etype in ETYPES}
        pairs.append(
            {
                etype: np.stack([nodes[etype[0]][u.long()].numpy(), nodes[etype[2]][v.long()].numpy()])
                for etype, (u, v) in ends.items()
            }
        )
    return Step({etype: g.orig_edge_ids(ids, etype).numpy() for etype, ids in edges.items()}, pairs)


def on_ranks(folder: str, cases: Sequence[Case]) -> list[Any]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        return [train(g, case) for case in cases]


def train(g: DistGraph, case: Case, mistake: AbstractContextManager[Any] | None = None) -> dict[str, Any]:
    drawn = draw_steps(g, case)
    strategy: Any = STRATEGIES.get(case.strategy)(g.session, case.options).open(g)
    neighbors = dgl.dataloading.NeighborSampler(
        [-1, -1], mask=case.mask, prefetch_node_feats={ntype: ["feat"] for ntype in WIDTHS}
    )
    authors = DistEmbedding(
        NUM_NODES["author"], HIDDEN, part_policy=g.get_node_partition_policy("author"), dtype=torch.float64
    )
    fill_authors(authors.weight, g, first_rows())
    inputs = EntityInputs(g, embeddings={"author": authors})
    net = first_net(g, case)
    model = strategy.wrap(net.encoder if case.outside else net)
    optimizer, sparse = torch.optim.SGD(model.parameters(), lr=RATE), SparseSGD([authors], lr=RATE)
    loader = open_loader(g, strategy, case, neighbors)
    before, foreign = g.session.ledger.snapshot(), Counter[str]()
    with mistake or nullcontext():
        for graphs, blocks in batches_of(loader):
            x = inputs(blocks[0])
            if case.outside:
                h = gather_pair_rows(graphs[0], model(blocks, x))
                outputs = [net.score(graph, h) for graph in graphs]
            else:
                outputs = model(graphs, blocks, x)
            labels = torch.cat([graphs[0].edges[etype].data["label"] for etype in ETYPES])
            optimizer.zero_grad()
            sparse.zero_grad()
            compute_loss(outputs, labels).backward()
            optimizer.step()
            sparse.step()
            for ntype in NUM_NODES:
                nodes, own = (
                    graphs[0].nodes[ntype].data[dgl.NID],
                    blocks[-1].dstnodes[ntype].data[dgl.NID],
                )
                foreign[ntype] += int((~torch.isin(nodes, own)).sum())
    g.barrier()
    rows = equality.in_original_order(authors.weight, g, "author").numpy()
    sent = Counter[tuple[str, int]]()
    for row in g.session.ledger.since(before):
        if g.rank() == row.source != row.destination:
            sent[row.phase, row.layer] += row.num_bytes
    return {
        "steps": drawn,
        "weights": weights_of(net) | {"rows": rows},
        "sent": dict(sent),
        "foreign": foreign,
    }


def batches_of(loader: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    for _ in range(EPOCHS):
        for _, *graphs, blocks in loader:
            yield graphs, blocks


def plain_graph(mask: str | None) -> Any:
    """Return the graph with the edges that carry messages."""
    raw = raw_graph()
    kept = {
        etype: np.asarray(raw.edge_data[etype][mask]) if mask else np.ones(count, bool)
        for etype, count in NUM_EDGES.items()
    }
    edges = {etype: (u[kept[etype]], v[kept[etype]]) for etype, (u, v) in raw.edges.items()}
    return dgl.heterograph(edges, num_nodes_dict=NUM_NODES)


def one_process(case: Case, steps_of_rank: Sequence[Sequence[Step]]) -> dict[str, Array]:
    """Return weights and rows of authors after the steps of all ranks with plain DGL on the uncut graph."""
    raw, graph = raw_graph(), plain_graph(case.mask)
    x = {ntype: torch.from_numpy(np.asarray(raw.node_data[ntype]["feat"])) for ntype in WIDTHS}
    labels = {
        etype: torch.from_numpy(np.asarray(columns["label"])) for etype, columns in raw.edge_data.items()
    }
    table = nn.Embedding.from_pretrained(first_rows(), freeze=False)
    net = first_net(graph, case)
    trained = net.encoder if case.outside else net
    optimizer = torch.optim.SGD([*trained.parameters(), *table.parameters()], lr=RATE)
    for step in zip(*steps_of_rank, strict=True):
        optimizer.zero_grad()
        h = net.encoder([graph, graph], x | {"author": table.weight})
        total, loss = sum(part.size for part in step), torch.zeros((), dtype=torch.float64)
        for part in step:
            if part.size:
                ends = [{etype: torch.from_numpy(uv) for etype, uv in pairs.items()} for pairs in part.pairs]
                outputs = [net.score_pairs(pairs, h) for pairs in ends]
                targets = torch.cat([labels[etype][part.edges[etype]] for etype in ETYPES])
                loss = loss + compute_loss(outputs, targets) * part.size / total
        loss.backward()
        optimizer.step()
    return weights_of(net) | {"rows": table.weight.detach().numpy().copy()}
