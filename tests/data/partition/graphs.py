"""Small graphs that one can draw, and one with communities."""

from collections.abc import Mapping

import numpy as np

from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph


def homogeneous(num_nodes: int, pairs: list[tuple[int, int]], **columns: Array) -> RawGraph:
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return RawGraph(
        name="drawn",
        num_nodes={NODE_TYPE: num_nodes},
        edges={EDGE_TYPE: (ends[:, 0].copy(), ends[:, 1].copy())},
        node_data={NODE_TYPE: columns},
    )


# 0-1-2 | 3-4-5, joined by the one edge 2 -> 3.
TWO_TRIANGLES = homogeneous(6, [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (2, 3)])

# Two authors write three papers; paper 2 cites paper 0; venue 0 prints nothing.
AUTHORS_AND_PAPERS = RawGraph(
    name="authors",
    num_nodes={"author": 2, "paper": 3, "venue": 1},
    edges={
        ("author", "writes", "paper"): (np.array([0, 0, 1]), np.array([0, 1, 2])),
        ("paper", "cites", "paper"): (np.array([2], dtype=np.int32), np.array([0], dtype=np.int32)),
    },
)


def communities(
    *, num_nodes: int = 2000, num_blocks: int = 16, degree: int = 10, inside: float = 0.9, seed: int = 0
) -> RawGraph:
    """Blocks of equal size with mixed ids; the training nodes lie in a quarter of the blocks."""
    rng = np.random.default_rng(seed)
    block = rng.permutation(np.arange(num_nodes) % num_blocks)
    members = np.argsort(block, kind="stable").reshape(num_blocks, -1)
    src = rng.integers(0, num_nodes, num_nodes * degree)
    near = members[block[src], rng.integers(0, num_nodes // num_blocks, len(src))]
    dst = np.where(rng.random(len(src)) < inside, near, rng.integers(0, num_nodes, len(src)))
    train = (block < num_blocks // 4) & (rng.random(num_nodes) < 0.5)
    rank = rng.random(num_nodes)
    return RawGraph(
        name="communities",
        num_nodes={NODE_TYPE: num_nodes},
        edges={EDGE_TYPE: (src, dst)},
        node_data={
            NODE_TYPE: {
                "train_mask": train,
                "val_mask": ~train & (rank < 0.2),
                "test_mask": ~train & (rank > 0.6),
            }
        },
    )


def flat(part_of: Mapping[str, Array]) -> list[int]:
    return np.concatenate(list(part_of.values())).tolist()
