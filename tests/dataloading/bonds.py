"""Graphs whose edges have reverse edges: one of one type, and a shop with reverse types."""

from pathlib import Path

import numpy as np

from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph

NUM_NODES, HALF = 40, 120
BUYS, BOUGHT, KNOWS = ("user", "buys", "item"), ("item", "bought_by", "user"), ("user", "knows", "user")
USERS, ITEMS, BUYING, KNOWING = 30, 20, 90, 60


def ring() -> RawGraph:
    """Node n and n + 1, n + 2, n + 3 around a ring; the source's edge i + HALF is the reverse of edge i."""
    pairs = [(n, (n + step) % NUM_NODES) for step in (1, 2, 3) for n in range(NUM_NODES)]
    sources, destinations = np.random.default_rng(1).permutation(np.array(pairs)).T
    edges = np.concatenate([sources, destinations]), np.concatenate([destinations, sources])
    return RawGraph(
        name="bonds",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: edges},
        node_data={NODE_TYPE: {"feat": np.arange(NUM_NODES, dtype=np.float32)[:, None]}},
        edge_data={EDGE_TYPE: {"label": np.arange(2 * HALF)}},
    )


def shop() -> RawGraph:
    """Edge i of bought_by is the reverse of edge i of buys."""
    random = np.random.default_rng(2)
    places = random.choice(USERS * ITEMS, BUYING, replace=False)
    users, items = places // ITEMS, places % ITEMS
    friends = random.choice(USERS * USERS, KNOWING, replace=False)
    return RawGraph(
        name="shop",
        num_nodes={"user": USERS, "item": ITEMS},
        edges={
            BUYS: (users, items),
            BOUGHT: (items.copy(), users.copy()),
            KNOWS: (friends // USERS, friends % USERS),
        },
        node_data={"user": {"feat": np.arange(USERS, dtype=np.float32)[:, None]}},
        edge_data={BUYS: {"stars": np.arange(BUYING)}},
    )


def write(graph: RawGraph, folder: Path, num_parts: int) -> Path:
    part_of = {
        ntype: np.random.default_rng(3).integers(num_parts, size=count).astype(np.int32)
        for ntype, count in graph.num_nodes.items()
    }
    write_dataset(graph, Assignment(num_parts=num_parts, part_of=part_of, method="test", seed=0), folder)
    return folder
