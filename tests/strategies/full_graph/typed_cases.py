"""Training on a graph of four node types in ranks and in one process: float64, plain SGD, several models.

Papers have labels; papers, venues and topics have features of different widths, authors have none. Venues are
on one server only, topics have no in-edges, and no edge is of the type "retracts".
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from dgl import function as fn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dglx_dist.comm.session import start_session
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.internals.cpu_kernels import correct_kernels
from dglx_dist.records import Array, EdgeType
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training.relational import HGT, RGCN, EntityInputs, _merge_types, _split_by_type
from tests.strategies import equality
from tests.strategies.test_hetero_equality import first_rows
from tests.training.hetero import CLASSES, TypedGraph, fill_authors, take_step, weights_of

NUM_NODES = {"author": 40, "paper": 60, "venue": 5, "topic": 7}
WIDTHS = {"paper": 6, "venue": 3, "topic": 2}
HIDDEN, NUM_PARTS, STEPS, RATE = 8, 3, 4, 0.3
NUM_EDGES: dict[EdgeType, int] = {
    ("author", "writes", "paper"): 120,
    ("paper", "written_by", "author"): 110,
    ("paper", "cites", "paper"): 150,
    ("paper", "appears_in", "venue"): 60,
    ("venue", "prints", "paper"): 50,
    ("topic", "describes", "paper"): 30,
    ("paper", "retracts", "paper"): 0,
}
ETYPES = sorted(NUM_EDGES)


GRAPH = TypedGraph(NUM_NODES, WIDTHS, NUM_EDGES, NUM_PARTS, weighted=(("paper", "cites", "paper"),))
raw_graph = GRAPH.raw
write_parts = GRAPH.write_parts
plain_graph = GRAPH.plain


class Projected(nn.Module):
    """Linear maps to HIDDEN columns, then layers of one module for each block."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({ntype: nn.Linear(width, HIDDEN) for ntype, width in WIDTHS.items()})
        self.layers = nn.ModuleList(make(width) for width in (HIDDEN, CLASSES))

    def forward(self, blocks: list[Any], x: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        h = {ntype: self.maps[ntype](rows) if ntype in WIDTHS else rows for ntype, rows in x.items()}
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = {ntype: rows.flatten(1) for ntype, rows in layer(block, h).items()}
            if depth == 0:
                # Topics and types without in-edges of a model keep no rows behind a layer of DGL.
                h = {ntype: torch.tanh(rows) for ntype, rows in h.items()}
        return h


def hetero_conv(make: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda width: dgl.nn.HeteroGraphConv({name: make(width) for _, name, _ in ETYPES}, "sum")


class SkipsEmpty(nn.Module):
    """A loop over edge types, as users write it, that leaves out edge types without edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({name: nn.Linear(HIDDEN, width) for _, name, _ in ETYPES})

    def forward(self, block: Any, h: dict[str, Tensor]) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        for source, name, destination in ETYPES:
            relation = source, name, destination
            if block.num_edges(relation) == 0 or source not in h:
                continue
            with block.local_scope():
                block.srcnodes[source].data["h"] = h[source]
                block.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"), etype=relation)
                rows = self.maps[name](block.dstnodes[destination].data["h"])
            results[destination] = results[destination] + rows if destination in results else rows
        return results


class UpdatesAll(nn.Module):
    """``multi_update_all`` with weights, maxima and a function in Python, set with one dictionary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({ntype: nn.Linear(HIDDEN, width) for ntype in NUM_NODES})

    def forward(self, block: Any, h: dict[str, Tensor]) -> dict[str, Tensor]:
        with block.local_scope():
            block.srcdata["h"] = {ntype: self.maps[ntype](rows) for ntype, rows in h.items()}
            functions: dict[Any, Any] = {
                "cites": (fn.u_mul_e("h", "weight", "m"), fn.sum("m", "out")),
                "retracts": (fn.copy_u("h", "m"), fn.max("m", "out")),
                "written_by": (fn.copy_u("h", "m"), lambda nodes: {"out": nodes.mailbox["m"].sum(1)}),
                "appears_in": (fn.copy_u("h", "m"), fn.max("m", "out")),
                "writes": (fn.copy_u("h", "m"), lambda nodes: {"out": nodes.mailbox["m"].mean(1)}),
            }
            block.multi_update_all(functions, "sum")
            return dict(block.dstdata["out"])


class Recomputed(nn.Module):
    """A layer that keeps its inputs only, and runs again in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = hetero_conv(lambda width: dgl.nn.SAGEConv(HIDDEN, width, "mean"))(width)

    def forward(self, block: Any, h: dict[str, Tensor]) -> Any:
        return checkpoint(self.inner, block, h, use_reentrant=False)


class HomogeneousView(nn.Module):
    """``RelGraphConv`` on a block that the module merges from all types."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = dgl.nn.RelGraphConv(HIDDEN, width, len(ETYPES), "basis", 2)

    def forward(self, block: Any, h: dict[str, Tensor]) -> dict[str, Tensor]:
        num_dst = {ntype: block.num_dst_nodes(ntype) for ntype in sorted(h)}
        merged, _, edge_types = _merge_types(block, num_dst, ETYPES)
        pieces = [rows[:count] for rows, count in zip(map(h.get, num_dst), num_dst.values(), strict=True)]
        pieces += [rows[count:] for rows, count in zip(map(h.get, num_dst), num_dst.values(), strict=True)]
        return _split_by_type(self.conv(merged, torch.cat(pieces), edge_types), num_dst)


def gat(width: int) -> nn.Module:
    return dgl.nn.GATConv(HIDDEN, width // 2, 2, allow_zero_in_degree=True)


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "rgcn": lambda graph: RGCN(graph, WIDTHS, HIDDEN, CLASSES, out_types=["paper"]),
    "rgcn bases": lambda graph: RGCN(
        graph, WIDTHS, HIDDEN, CLASSES, layers=2, num_bases=2, norm="layer", out_types=["paper"]
    ),
    "hgt": lambda graph: HGT(graph, WIDTHS, HIDDEN, CLASSES, heads=2, out_types=["paper"]),
    "sage": lambda graph: Projected(hetero_conv(lambda width: dgl.nn.SAGEConv(HIDDEN, width, "mean"))),
    "gat": lambda graph: Projected(hetero_conv(gat)),
    "graphconv": lambda graph: Projected(
        hetero_conv(lambda width: dgl.nn.GraphConv(HIDDEN, width, "right", allow_zero_in_degree=True))
    ),
    "recomputed": lambda graph: Projected(Recomputed),
    "relgraphconv": lambda graph: Projected(HomogeneousView),
    "loop": lambda graph: Projected(SkipsEmpty),
    "multi": lambda graph: Projected(UpdatesAll),
}


WITH_ADAM = ("rgcn bases", "gat")
"""Models beside rows of authors that Adam updates. SGD updates the others."""


def make_model(graph: Any, kind: str) -> nn.Module:
    torch.manual_seed(11)
    return MODELS[kind](graph).double()


def one_process(kind: str, batches: Sequence[Tensor] | None = None) -> dict[str, Array]:
    """Train on the uncut graph, and return the weights and the rows of authors.

    ``batches`` are the papers of each step. By default, all training papers are used in each step.

    The sources of DGL's blocks do not begin with the destinations if a type has no in-edges, as topics. And
    DGL's maximum without edges has a gradient, unless it is corrected.
    """
    correct_kernels()
    graph = plain_graph()
    papers = graph.nodes["paper"].data
    everything = papers["train_mask"].nonzero()[:, 0]
    x = {ntype: graph.nodes[ntype].data["feat"] for ntype in WIDTHS}
    uses_adam = kind in WITH_ADAM
    table = nn.Embedding.from_pretrained(first_rows(), freeze=False, sparse=uses_adam)
    model = make_model(graph, kind)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sparse: Any = (torch.optim.SparseAdam if uses_adam else torch.optim.SGD)(table.parameters(), lr=RATE)
    for targets in batches or [everything] * STEPS:
        rows = table(torch.arange(NUM_NODES["author"]))
        scores = model([graph, graph], x | {"author": rows})["paper"][targets]
        optimizer.zero_grad()
        sparse.zero_grad()
        F.cross_entropy(scores, papers["label"][targets]).backward()
        optimizer.step()
        sparse.step()
    return weights_of(model) | {"rows": table.weight.detach().numpy().copy()}


def sampler(num_layers: int = 2) -> Any:
    return dgl.dataloading.MultiLayerFullNeighborSampler(
        num_layers,
        prefetch_node_feats={ntype: ["feat"] for ntype in WIDTHS},
        prefetch_labels={"paper": ["label"]},
        prefetch_edge_feats={("paper", "cites", "paper"): ["weight"]},
    )


def own_seeds(g: DistGraph, share: str = "uneven") -> dict[str, Tensor]:
    topology = g.session.topology
    ids = g.nodes["paper"].data["train_mask"][:].nonzero()[:, 0]
    return {"paper": equality.cut(ids, equality.SHARES[share], topology.rank, topology.world_size)}


@dataclass
class Trained:
    weights: dict[str, Array]
    """Weights, and the rows of authors in their original order."""
    batches: list[Array]
    """Papers of this rank in each step."""
    moved: Counter[tuple[str, int]]
    """Bytes that this rank counted, by phase and layer."""


def train(g: DistGraph, name: str, options: Mapping[str, Any], kind: str, epochs: int = STEPS) -> Trained:
    before = g.session.ledger.snapshot()
    strategy: Any = STRATEGIES.get(name)(g.session, options).open(g)
    loader = strategy.loader(own_seeds(g), sampler())
    authors = DistEmbedding(
        NUM_NODES["author"],
        HIDDEN,
        part_policy=g.get_node_partition_policy("author"),
        dtype=torch.float64,
    )
    fill_authors(authors.weight, g, first_rows())
    inputs = EntityInputs(g, embeddings={"author": authors})
    model = strategy.wrap(make_model(g, kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sparse = (optim.SparseAdam if kind in WITH_ADAM else optim.SparseSGD)([authors], lr=RATE)
    batches = []
    for _ in range(epochs):
        for _, output_nodes, blocks in loader:
            batches.append(g.orig_ids(output_nodes["paper"], "paper").numpy())
            take_step(model, inputs, blocks, optimizer, sparse)
    g.barrier()
    rows = equality.in_original_order(authors.weight, g, "author").numpy()
    strategy.close()
    moved = Counter[tuple[str, int]]()
    for row in g.session.ledger.since(before):
        moved[row.phase, row.layer] += row.num_bytes
    return Trained(weights_of(model.module) | {"rows": rows}, batches, moved)


def on_rank(folder: str, runs: list[tuple[str, dict[str, Any], str]]) -> list[Trained]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        return [train(g, *run) for run in runs]


def difference(found: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: float(np.abs(rows - expected[name]).max()) for name, rows in found.items() if rows.size}
