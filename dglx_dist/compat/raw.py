"""A DGLGraph with its data under the names that the script gave it."""

from __future__ import annotations

from typing import Any

import dgl
import numpy as np
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, EdgeType, RawGraph

_OF_DGL = (dgl.NID, dgl.EID, "inner_node", "inner_edge")
"""Columns that DGL's partitions have of their own."""


def raw_graph(graph: dgl.DGLGraph, name: str) -> tuple[RawGraph, frozenset[tuple[str | EdgeType, str]]]:
    """Return the graph, and which of its uint16 columns hold bfloat16 bits.

    Nothing is renamed or converted, as ``load_dataset`` would: scripts ask for the names that they gave.

    Raises:
        ConfigError: ``graph`` is no DGLGraph.
    """
    if not isinstance(graph, dgl.DGLGraph):
        raise ConfigError(f"partition_graph takes a DGLGraph, not a {type(graph).__name__}")
    halves: list[tuple[str | EdgeType, str]] = []

    def columns(owner: str | EdgeType, data: Any) -> dict[str, Array]:
        halves.extend((owner, key) for key, rows in data.items() if rows.dtype == torch.bfloat16)
        return {key: _as_array(rows) for key, rows in data.items() if key not in _OF_DGL}

    edges = {}
    for etype in graph.canonical_etypes:
        source, destination = graph.edges(etype=etype, order="eid")
        edges[etype] = _as_array(source.long()), _as_array(destination.long())
    raw = RawGraph(
        name=name,
        num_nodes={ntype: graph.num_nodes(ntype) for ntype in graph.ntypes},
        edges=edges,
        node_data={ntype: columns(ntype, graph.nodes[ntype].data) for ntype in graph.ntypes},
        edge_data={etype: columns(etype, graph.edges[etype].data) for etype in graph.canonical_etypes},
    )
    return raw, frozenset(halves)


def _as_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return np.asarray(tensor.numpy())
