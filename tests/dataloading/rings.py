"""A graph on disk whose columns tell what row they are."""

from pathlib import Path

import numpy as np

from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph

NUM_NODES = 60


def raw_graph() -> RawGraph:
    """Node n has the in-neighbours n + 1 ... n + n % 17 around a ring; node 0 has none."""
    edges = [((n + step) % NUM_NODES, n) for n in range(NUM_NODES) for step in range(1, n % 17 + 1)]
    sources, destinations = np.array(edges).T
    ids = np.arange(NUM_NODES)
    return RawGraph(
        name="rings",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (sources, destinations)},
        node_data={
            NODE_TYPE: {
                "feat": np.stack([ids, ids * 2, ids * 3], axis=1).astype(np.float32),
                "label": ids % 7,
                "train_mask": ids % 4 != 3,
            }
        },
        edge_data={
            EDGE_TYPE: {
                "odd": sources % 2 == 1,
                "source": sources.astype(np.float32),
                "negative": -sources.astype(np.float32),
                "pair": np.stack([sources, destinations], axis=1),
            }
        },
        num_classes={NODE_TYPE: 7},
    )


def write_rings(folder: Path, num_parts: int) -> Path:
    """Part of node n is n // 7 % num_parts, so parts are uneven and every node has foreign neighbours."""
    part_of = (np.arange(NUM_NODES) // 7 % num_parts).astype(np.int32)
    assignment = Assignment(num_parts=num_parts, part_of={NODE_TYPE: part_of}, method="file", seed=0)
    write_dataset(raw_graph(), assignment, folder)
    return folder
