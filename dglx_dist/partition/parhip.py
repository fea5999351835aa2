"""The binary graph format of ParHIP, in which KaMinPar reads graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dglx_dist.partition.symmetric import SymmetricGraph
from dglx_dist.records import Array

HEADER_BYTES = 24
# Bits of the version word; a set bit says that something is absent, or that its numbers have 32 bits.
NO_EDGE_WEIGHTS, NO_NODE_WEIGHTS, SHORT_NODE_IDS, SHORT_EDGE_WEIGHTS = 1, 2, 8, 32


def write_parhip(path: Path, graph: SymmetricGraph, node_weights: Array | None) -> None:
    """Write ``graph`` to ``path``: header, byte offset of each row, neighbours, node and edge weights.

    Args:
        path: Overwritten.
        graph: Indices int32 or int64.
        node_weights: (N,) int64 or None.
    """
    version = 0
    version |= NO_EDGE_WEIGHTS if graph.edge_weights is None else SHORT_EDGE_WEIGHTS
    version |= NO_NODE_WEIGHTS if node_weights is None else 0
    version |= SHORT_NODE_IDS if graph.indices.itemsize == 4 else 0
    first_neighbour = HEADER_BYTES + len(graph.indptr) * 8
    with path.open("wb") as file:
        np.array([version, graph.num_nodes, len(graph.indices)], dtype=np.uint64).tofile(file)
        (graph.indptr * graph.indices.itemsize + first_neighbour).tofile(file)
        graph.indices.tofile(file)
        if node_weights is not None:
            node_weights.tofile(file)
        if graph.edge_weights is not None:
            graph.edge_weights.tofile(file)
