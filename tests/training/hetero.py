"""Papers with features and labels, venues with features, authors with none; joined by five relations."""

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch

from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.records import Assignment, EdgeType, RawGraph

NUM_NODES = {"author": 40, "paper": 60, "venue": 5}
WIDTHS = {"paper": 6, "venue": 3}
CLASSES = 4
NUM_PARTS = 3
NUM_EDGES: dict[EdgeType, int] = {
    ("author", "writes", "paper"): 120,
    ("paper", "written_by", "author"): 110,
    ("paper", "cites", "paper"): 150,
    ("paper", "appears_in", "venue"): 60,
    ("venue", "prints", "paper"): 50,
}
ETYPES = sorted(NUM_EDGES)


def raw_graph() -> RawGraph:
    """The same at every call; float64, some nodes of each type without in-edges of each relation."""
    random = np.random.default_rng(5)
    edges = {
        (source, relation, destination): (
            random.integers(NUM_NODES[source], size=count),
            random.integers(NUM_NODES[destination], size=count),
        )
        for (source, relation, destination), count in NUM_EDGES.items()
    }
    papers = np.arange(NUM_NODES["paper"])
    return RawGraph(
        name="hetero",
        num_nodes=NUM_NODES,
        edges=edges,
        node_data={
            "paper": {
                "feat": random.standard_normal((len(papers), WIDTHS["paper"])),
                "label": random.integers(CLASSES, size=len(papers)),
                "train_mask": papers % 3 == 0,
                "val_mask": papers % 3 == 1,
                "test_mask": papers % 3 == 2,
            },
            "venue": {"feat": random.standard_normal((NUM_NODES["venue"], WIDTHS["venue"]))},
        },
        num_classes={"paper": CLASSES},
    )


def write_parts(folder: Path) -> Path:
    random = np.random.default_rng(6)
    part_of = {
        "author": random.integers(1, NUM_PARTS, NUM_NODES["author"]).astype(np.int32),
        "paper": random.integers(0, NUM_PARTS, NUM_NODES["paper"]).astype(np.int32),
        "venue": np.zeros(NUM_NODES["venue"], np.int32),
    }
    assignment = Assignment(num_parts=NUM_PARTS, part_of=part_of, method="test", seed=6)
    write_dataset(raw_graph(), assignment, folder / "parts")
    return folder / "parts"


def plain_graph() -> Any:
    raw = raw_graph()
    graph = dgl.heterograph(raw.edges, num_nodes_dict=dict(raw.num_nodes))
    for ntype, columns in raw.node_data.items():
        for name, column in columns.items():
            graph.nodes[ntype].data[name] = torch.from_numpy(np.asarray(column))
    return graph


def whole_block() -> Any:
    graph = plain_graph()
    return dgl.to_block(graph, {ntype: graph.nodes(ntype) for ntype in graph.ntypes})
