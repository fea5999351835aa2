"""The piece of a graph that some of its nodes span."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dglx_dist.partition.symmetric import first_ids
from dglx_dist.partition.weights import MASKS
from dglx_dist.records import Array, EdgeType, NodeColumn, RawGraph


def induced_graph(graph: RawGraph, nodes: Array, constraints: Sequence[str]) -> RawGraph:
    """Return the graph of ``nodes`` and the edges among them, renumbered in the given order per type.

    Only the node columns that ``constraints`` weigh are kept.

    Args:
        graph: The whole.
        nodes: (K,) int64 ascending ids over all node types.
        constraints: Names as in ``PartitionOptions.balance``.
    """
    new_id = np.full(graph.total_nodes, -1, dtype=np.int64)
    num_nodes: dict[str, int] = {}
    node_data: dict[str, dict[str, NodeColumn]] = {}
    wanted = {MASKS.get(c, c) for c in constraints}
    first_id = first_ids(graph)
    for node_type, first in first_id.items():
        low, high = np.searchsorted(nodes, (first, first + graph.num_nodes[node_type]))
        mine = nodes[low:high] - first
        new_id[nodes[low:high]] = np.arange(len(mine))
        num_nodes[node_type] = len(mine)
        columns = graph.node_data.get(node_type, {})
        node_data[node_type] = {
            n: v[mine] for n, v in columns.items() if n in wanted and isinstance(v, np.ndarray)
        }
    edges: dict[EdgeType, tuple[Array, Array]] = {}
    for edge_type, (src, dst) in graph.edges.items():
        # Views, since adding the first id to int32 ids overflows where all types together exceed 2**31.
        new_src = new_id[first_id[edge_type[0]] :][src]
        new_dst = new_id[first_id[edge_type[2]] :][dst]
        inside = (new_src >= 0) & (new_dst >= 0)
        edges[edge_type] = (new_src[inside], new_dst[inside])
    return RawGraph(name=f"a piece of {graph.name}", num_nodes=num_nodes, edges=edges, node_data=node_data)
