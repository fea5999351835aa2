"""A graph of four node types and eight relations, and models that train on it in one process and on ranks.

Authors have no features, a relation has no edges, and no relation reaches fields. Venues lie on one part.
Venues and fields may have fewer columns than there are ranks.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from dgl.nn.pytorch import GATConv, GINConv, GraphConv, HeteroGraphConv, SAGEConv
from torch import Tensor, nn

from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.records import EdgeType
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull.pipeline import Version
from dglx_dist.training import fit
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.relational import RGCN, EntityInputs
from tests.strategies import equality
from tests.training.hetero import CLASSES, TypedGraph, fill_authors, take_step, weights_of

NUM_NODES = {"author": 30, "field": 8, "paper": 50, "venue": 6}
WIDTHS = {"field": 2, "paper": 6, "venue": 3}
AUTHOR_WIDTH, HIDDEN, STEPS, RATE = 5, 8, 4, 0.2
NUM_PARTS = 4
NUM_EDGES: dict[EdgeType, int] = {
    ("author", "knows", "author"): 60,
    ("author", "writes", "paper"): 90,
    ("field", "covers", "paper"): 60,
    ("paper", "appears_in", "venue"): 50,
    ("paper", "cites", "paper"): 120,
    ("paper", "retracts", "paper"): 0,
    ("paper", "written_by", "author"): 80,
    ("venue", "prints", "paper"): 40,
}


GRAPH = TypedGraph(NUM_NODES, WIDTHS, NUM_EDGES, NUM_PARTS)
raw_graph = GRAPH.raw
write_parts = GRAPH.write_parts
plain_graph = GRAPH.plain


Make = Callable[[EdgeType], nn.Module | None]
"""Returns the layer of an edge type, or None if the model leaves it out."""
ALL_WIDTHS = {**WIDTHS, "author": AUTHOR_WIDTH}


def sage(etype: EdgeType) -> nn.Module:
    return SAGEConv((ALL_WIDTHS[etype[0]], ALL_WIDTHS[etype[2]]), HIDDEN, "mean")


def gcn(etype: EdgeType) -> nn.Module:
    norm = {"cites": "both", "prints": "none", "written_by": "left"}.get(etype[1], "right")
    return GraphConv(ALL_WIDTHS[etype[0]], HIDDEN, norm=norm)


def gat(etype: EdgeType) -> nn.Module | None:
    if "author" in etype:
        return None
    source, target = ALL_WIDTHS[etype[0]], ALL_WIDTHS[etype[2]]
    width = source if etype[0] == etype[2] else (source, target)
    return GATConv(width, HIDDEN // 2, 2, residual=etype[1] == "prints")


def mixed(etype: EdgeType) -> nn.Module:
    """Layers that are added, layers that are sent apart, and one that only its owner calls."""
    source, target = ALL_WIDTHS[etype[0]], ALL_WIDTHS[etype[2]]
    if etype[1] == "knows":
        return SAGEConv(source, HIDDEN, "pool")
    if etype[1] == "cites":
        return GINConv(nn.Linear(source, HIDDEN), "sum", learn_eps=True)
    if etype[1] == "covers":
        return GraphConv(source, HIDDEN, norm="right", activation=torch.tanh)
    if etype[1] == "prints":
        return SAGEConv((source, target), HIDDEN, "mean", norm=nn.LayerNorm(HIDDEN))
    return sage(etype)


@dataclass(frozen=True)
class Case:
    make: Make = sage
    aggregate: Any = "sum"
    takes_authors: bool = True
    """Whether the model reads rows of authors. Otherwise plain DGL skips their relations."""


def add_half(rows: list[Tensor], ntype: str) -> Tensor:
    """A user's own aggregate."""
    return torch.stack(rows).amax(0) + rows[0] / 2


CASES = {
    "sage": Case(),
    "sage mean": Case(aggregate="mean"),
    "gcn": Case(gcn),
    "gcn mean": Case(gcn, "mean"),
    "gat": Case(gat, takes_authors=False),
    "gat mean": Case(gat, "mean", takes_authors=False),
    "mixed": Case(mixed),
    "mixed mean": Case(mixed, "mean"),
    "max": Case(sage, "max"),
    "stack": Case(gcn, "stack"),
    "own aggregate": Case(sage, add_half),
}


class Net(nn.Module):
    def __init__(self, case: Case, dropout: float = 0.0) -> None:
        super().__init__()
        self.takes_authors = case.takes_authors
        layers = {etype: case.make(etype) for etype in NUM_EDGES}
        self.first = HeteroGraphConv({e: layer for e, layer in layers.items() if layer}, case.aggregate)
        self.second = HeteroGraphConv({etype[1]: SAGEConv(HIDDEN, CLASSES, "mean") for etype in NUM_EDGES})
        for name, parameter in self.named_parameters():
            if "bias" in name:  # DGL begins with zeros, which nobody would miss
                nn.init.uniform_(parameter, -0.5, 0.5)

        for module in self.first.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout

    def forward(self, blocks: Any, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inputs = {ntype: rows for ntype, rows in x.items() if ntype != "author" or self.takes_authors}
        h: dict[str, Tensor] = self.first(blocks[0], inputs)
        # Heads are (D1, 2, HIDDEN / 2), and the aggregate "stack" returns (D1, relations, HIDDEN).
        h = {t: rows.sum(1) if rows.dim() == 3 and rows.shape[2] == HIDDEN else rows for t, rows in h.items()}
        scores: dict[str, Tensor] = self.second(
            blocks[1], {ntype: torch.relu(rows.flatten(1)) for ntype, rows in h.items()}
        )
        return scores


RELATIONAL: dict[str, dict[str, Any]] = {
    "rgcn": {},
    "rgcn bases": {"num_bases": 2},
    "rgcn deep": {"layers": 3, "norm": "layer", "residual": True},
    "rgcn shallow": {"layers": 1},
}


@dataclass(frozen=True)
class Run:
    name: str
    share: str = "uneven"
    options: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    strategy: str = "push_pull"
    batch_size: int = 0
    """0 means all seeds."""
    fanout: int = -1
    by_fit: bool = False
    """Whether dx.fit trains and evaluates, and not a loop of the user."""
    dtype: torch.dtype = torch.float64
    autocast: bool = False
    """Whether the loop computes scores in bfloat16."""

    @property
    def is_relational(self) -> bool:
        return self.name in RELATIONAL

    @property
    def num_layers(self) -> int:
        return int(RELATIONAL.get(self.name, {}).get("layers", 2))

    @property
    def row_width(self) -> int:
        return HIDDEN if self.is_relational else AUTHOR_WIDTH


@dataclass
class Notes:
    weights: dict[str, Any] = field(default_factory=dict)
    moved: Counter[str] = field(default_factory=Counter)
    counts: Counter[Any] = field(default_factory=Counter)
    """Number of batches, L0 and D1 by node type, and E1 by edge type."""
    targets: list[list[int]] = field(default_factory=list)
    """Original ids of the papers of each batch."""
    log: Sequence[Version] = ()


def make_model(run: Run) -> Any:
    torch.manual_seed(11)
    if not run.is_relational:
        return Net(CASES[run.name], run.dropout).to(run.dtype)
    graph: Any = SimpleNamespace(ntypes=list(NUM_NODES), canonical_etypes=list(NUM_EDGES))
    options = {"out_types": ["paper"], "dropout": run.dropout, **RELATIONAL[run.name]}
    return RGCN(graph, WIDTHS, HIDDEN, CLASSES, **options).to(run.dtype)


def first_rows(run: Run) -> Tensor:
    """Rows of the authors by original id."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_NODES["author"], run.row_width, dtype=torch.float64, generator=generator)


def make_sampler(run: Run) -> Any:
    return dgl.dataloading.NeighborSampler(
        [run.fanout] * run.num_layers,
        prefetch_node_feats={ntype: ["feat"] for ntype in WIDTHS},
        prefetch_labels={"paper": ["label"]},
    )


def train_in_one_process(run: Run, ranks: int) -> dict[str, Any]:
    """Train with plain DGL on the batches of all ranks. Return the weights, and the authors' rows.

    RGCN reads own rows of fields. DGL 1.1.3 does not put the destinations of a type first that no edge of a
    batch reaches, so RGCN trains on the whole graph. Its result for a target does not depend on the others.
    """
    graph, model = plain_graph(), make_model(run)
    table = nn.Embedding.from_pretrained(first_rows(run), freeze=False)
    optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=RATE)
    papers = graph.nodes["paper"].data["train_mask"].nonzero()[:, 0]
    seeds = [equality.cut(papers, equality.SHARES[run.share], rank, ranks) for rank in range(ranks)]
    plain_sampler = dgl.dataloading.MultiLayerFullNeighborSampler(run.num_layers)
    batches = [(own, *plain_sampler.sample_blocks(graph, {"paper": own})) for own in seeds if len(own)]
    if run.is_relational:
        nodes = {ntype: graph.nodes(ntype) for ntype in graph.ntypes}
        batches = [(papers, nodes, nodes, [dgl.to_block(graph, nodes)] * run.num_layers)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for targets, nodes, outputs, blocks in batches:
            x = {ntype: graph.nodes[ntype].data["feat"][nodes[ntype]] for ntype in WIDTHS}
            scores = model(blocks, x | {"author": table(nodes["author"])})["paper"]
            scores = scores[torch.searchsorted(outputs["paper"], targets)]
            labels = graph.nodes["paper"].data["label"][targets]
            (F.cross_entropy(scores, labels, reduction="sum") / len(papers)).backward()
        optimizer.step()
    return weights_of(model) | {"rows": table.weight.detach().numpy().copy()}


def own_papers(g: DistGraph, share: str) -> tuple[dict[str, Tensor], int]:
    """Return the seeds of this rank, and the number of all seeds."""
    ids = g.nodes["paper"].data["train_mask"][:].nonzero()[:, 0]
    ids = ids[g.orig_ids(ids, "paper").argsort()]
    topology = g.session.topology
    own_ids = equality.cut(ids, equality.SHARES[share], topology.rank, topology.world_size)
    return {"paper": own_ids}, len(ids)


def make_embedding(g: DistGraph, run: Run) -> DistEmbedding:
    policy, label = g.get_node_partition_policy("author"), f"rows {g.session.next_number('rows')}"
    size = NUM_NODES["author"], run.row_width
    authors = DistEmbedding(*size, label, part_policy=policy, dtype=torch.float64)
    fill_authors(authors.weight, g, first_rows(run))
    return authors


def train(g: DistGraph, run: Run) -> Notes:
    """Train on this rank, as a user's loop does."""
    notes, seeds = Notes(), own_papers(g, run.share)
    strategy = STRATEGIES.get(run.strategy)(g.session, run.options).open(g)
    loader = strategy.loader(seeds[0], make_sampler(run), batch_size=run.batch_size or seeds[1])
    inputs = EntityInputs(g, embeddings={"author": make_embedding(g, run)})
    model: Any = strategy.wrap(make_model(run))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sparse = optim.SparseSGD([inputs._embeddings["author"]], lr=RATE)

    def compute_scores(blocks: Any, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
            scores = model(blocks, {ntype: rows.to(run.dtype) for ntype, rows in x.items()})
        return {ntype: rows.to(run.dtype) for ntype, rows in scores.items()}

    before = g.session.ledger.snapshot()
    if run.by_fit:
        config = FitConfig(epochs=STEPS, eval_every=0, ntype="paper", inputs=inputs, show_progress=False)
        fitted = fit.train(model, loader, optimizer, g, config, sparse=sparse)
        assert set(fitted.accuracy) == {"train_mask", "val_mask", "test_mask"}
    for _ in range(0 if run.by_fit else STEPS):
        for _, targets, blocks in loader:
            take_step(compute_scores, inputs, blocks, optimizer, sparse)
            notes.counts.update(dict(count_block(blocks[0])))
            notes.targets.append(g.orig_ids(targets["paper"], "paper").tolist())
    notes.moved = equality.moved_since(g.session, before)
    notes.log = getattr(model, "versions", ())
    g.barrier()
    loader.close()
    rows = equality.in_original_order(inputs._embeddings["author"].weight, g, "author").numpy()
    notes.weights = weights_of(model.whole()) | {"rows": rows}
    return notes


def count_block(block: Any) -> Iterator[tuple[Any, int]]:
    yield "batches", 1
    for ntype in block.srctypes:
        yield ("L0", ntype), block.num_src_nodes(ntype)
        yield ("D1", ntype), block.num_dst_nodes(ntype)
    for etype in block.canonical_etypes:
        yield ("E1", etype), block.num_edges(etype)
