"""A graph of 40 nodes: a path with chords to node 0, and features that tell the node."""

from pathlib import Path

import numpy as np
import torch

from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph

NUM_NODES = 40
NUM_COLUMNS = 5


def edges() -> tuple[np.ndarray, np.ndarray]:
    """Node n to n + 1 up to 38, and each multiple of 5 to node 0; nodes 38 and 39 send none."""
    source = np.concatenate([np.arange(38), np.arange(5, 40, 5)])
    destination = np.concatenate([np.arange(1, 39), np.zeros(7, dtype=np.int64)])
    return source, destination


def features() -> np.ndarray:
    """Row n is n + 0.0, n + 0.1, ..."""
    return (np.arange(NUM_NODES)[:, None] + np.arange(NUM_COLUMNS) / 10).astype(np.float32)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def build() -> RawGraph:
    """The graph with features, labels, a mask on every third node and an edge weight."""
    source, destination = edges()
    return RawGraph(
        name="small",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (source, destination)},
        node_data={
            NODE_TYPE: {
                "feat": features(),
                "label": np.arange(NUM_NODES) % 4,
                "train_mask": np.arange(NUM_NODES) % 3 == 0,
            }
        },
        edge_data={EDGE_TYPE: {"weight": (source % 2).astype(np.float32)}},
        num_classes={NODE_TYPE: 4},
        user_ids={NODE_TYPE: 1000 + np.arange(NUM_NODES)},
    )


def part_of() -> np.ndarray:
    """Part 0 has 14 nodes, part 1 none, part 2 the other 26."""
    return np.where(np.arange(NUM_NODES) * 7 % 40 < 14, 0, 2).astype(np.int32)


def write(graph: RawGraph, folder: Path) -> None:
    assignment = Assignment(num_parts=3, part_of={NODE_TYPE: part_of()}, method="hand", seed=0)
    write_dataset(graph, assignment, folder)
