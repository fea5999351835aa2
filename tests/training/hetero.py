"""Graphs of papers with features and labels, venues with features, and authors with none.

:data:`GRAPH` has five relations. Other tests make graphs with more types and relations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.records import Array, Assignment, EdgeType, RawGraph

CLASSES = 4


@dataclass(frozen=True)
class TypedGraph:
    """The same random graph at every call. Some nodes of each type have no in-edges of a relation."""

    num_nodes: Mapping[str, int]
    widths: Mapping[str, int]
    """Columns of the features, by node type."""
    num_edges: Mapping[EdgeType, int]
    num_parts: int
    weighted: tuple[EdgeType, ...] = field(default=())
    """Edge types with a column of weights."""

    def raw(self) -> RawGraph:
        random = np.random.default_rng(5)
        edges = {
            etype: (
                random.integers(self.num_nodes[etype[0]], size=count),
                random.integers(self.num_nodes[etype[2]], size=count),
            )
            for etype, count in self.num_edges.items()
        }
        papers = np.arange(self.num_nodes["paper"])
        node_data: dict[str, dict[str, Any]] = {}
        for ntype, width in self.widths.items():
            node_data[ntype] = {"feat": random.standard_normal((self.num_nodes[ntype], width))}
            if ntype == "paper":
                node_data[ntype] |= {
                    "label": random.integers(CLASSES, size=len(papers)),
                    "train_mask": papers % 3 == 0,
                    "val_mask": papers % 3 == 1,
                    "test_mask": papers % 3 == 2,
                }
        weights = {etype: {"weight": random.random((self.num_edges[etype], 1))} for etype in self.weighted}
        return RawGraph(
            name="hetero",
            num_nodes=self.num_nodes,
            edges=edges,
            node_data=node_data,
            edge_data=weights,
            num_classes={"paper": CLASSES},
        )

    def assign(self) -> Assignment:
        """Return parts of which the first one has all venues and no authors."""
        random = np.random.default_rng(6)
        part_of = {
            ntype: random.integers(ntype == "author", self.num_parts, count).astype(np.int32)
            for ntype, count in self.num_nodes.items()
        }
        part_of["venue"][:] = 0
        return Assignment(num_parts=self.num_parts, part_of=part_of, method="test", seed=6)

    def write_parts(self, folder: Path) -> Path:
        write_dataset(self.raw(), self.assign(), folder / "parts")
        return folder / "parts"

    def plain(self) -> Any:
        raw = self.raw()
        graph = dgl.heterograph(raw.edges, num_nodes_dict=dict(raw.num_nodes))
        for ntype, columns in raw.node_data.items():
            for name, column in columns.items():
                graph.nodes[ntype].data[name] = torch.from_numpy(np.asarray(column))
        for etype, columns in raw.edge_data.items():
            for name, column in columns.items():
                graph.edges[etype].data[name] = torch.from_numpy(column)
        return graph


NUM_NODES = {"author": 40, "paper": 60, "venue": 5}
WIDTHS = {"paper": 6, "venue": 3}
NUM_PARTS = 3
NUM_EDGES: dict[EdgeType, int] = {
    ("author", "writes", "paper"): 120,
    ("paper", "written_by", "author"): 110,
    ("paper", "cites", "paper"): 150,
    ("paper", "appears_in", "venue"): 60,
    ("venue", "prints", "paper"): 50,
}
ETYPES = sorted(NUM_EDGES)
GRAPH = TypedGraph(NUM_NODES, WIDTHS, NUM_EDGES, NUM_PARTS)
raw_graph = GRAPH.raw
write_parts = GRAPH.write_parts
plain_graph = GRAPH.plain


def whole_block() -> Any:
    graph = plain_graph()
    return dgl.to_block(graph, {ntype: graph.nodes(ntype) for ntype in graph.ntypes})


def weights_of(model: nn.Module) -> dict[str, Array]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def fill_authors(rows: DistTensor, g: DistGraph, values: Tensor) -> None:
    """Set the rows of the authors to ``values``, which are by original id. Every rank must call it."""
    first, last = rows.local_range
    if g.session.topology.local_rank == 0 and last > first:
        own_rows = torch.arange(first, last)
        rows[own_rows] = values[g.orig_ids(own_rows, "author")]
    g.barrier()


def take_step(model: Callable[..., Any], inputs: Any, blocks: Any, *optimizers: Any) -> None:
    """Train on the papers of a batch, as a user's loop does."""
    scores = model(blocks, inputs(blocks[0]))["paper"]
    loss = F.cross_entropy(scores, blocks[-1].dstnodes["paper"].data["label"])
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
