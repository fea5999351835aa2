"""Pair graphs: the edges of a batch, and its negative pairs, over the nodes that they touch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dgl
import numpy as np
import torch

from dglx_dist.records import Array, EdgeType
from dglx_dist.sampling.negative import Pairs

EdgePairs = Mapping[EdgeType, Pairs]
"""Edge type to (sources, destinations), (P,) int64 global node ids each; every type of the graph."""


@dataclass(frozen=True, kw_only=True)
class PairGraphs:
    """Positive and negative pairs over one set of nodes."""

    nodes: Mapping[str, Array]
    """Node type to the (n,) int64 ascending distinct ids that occur: the seeds of the blocks."""
    positive: dgl.DGLGraph
    """``ndata[dgl.NID]`` on every type, ``edata[dgl.EID]`` on every type; edges in the order of the batch."""
    negative: dgl.DGLGraph | None
    """Over the same nodes; None without a negative sampler."""


def build_pairs(
    ntypes: Sequence[str],
    ids: Mapping[EdgeType, Array],
    positive: EdgePairs,
    negative: EdgePairs | None,
    idtype: torch.dtype = torch.int64,
) -> PairGraphs:
    """Return graphs with all types of the whole graph over the nodes that occur in the pairs.

    Args:
        ntypes: Every node type.
        ids: Every edge type to the (B,) int64 ids of its positive edges.
        positive: Their ends.
        negative: Negative pairs, or None.
        idtype: Of the graphs: int32 or int64.
    """
    both = [positive] if negative is None else [positive, negative]
    nodes = _nodes(ntypes, both)
    order = {ntype: torch.from_numpy(found) for ntype, found in nodes.items()}
    graphs = [_graph(pairs, nodes, idtype) for pairs in both]
    for graph in graphs:
        for ntype, found in order.items():
            graph.nodes[ntype].data[dgl.NID] = found
    for etype, edges in ids.items():
        graphs[0].edges[etype].data[dgl.EID] = torch.from_numpy(edges)
    return PairGraphs(nodes=nodes, positive=graphs[0], negative=graphs[1] if negative is not None else None)


def _nodes(ntypes: Sequence[str], both: Sequence[EdgePairs]) -> dict[str, Array]:
    found: dict[str, list[Array]] = {ntype: [np.empty(0, np.int64)] for ntype in ntypes}
    for pairs in both:
        for (source_type, _, destination_type), (sources, destinations) in pairs.items():
            found[source_type].append(sources)
            found[destination_type].append(destinations)
    return {ntype: np.unique(np.concatenate(ids)) for ntype, ids in found.items()}


def _graph(pairs: EdgePairs, nodes: Mapping[str, Array], idtype: torch.dtype) -> dgl.DGLGraph:
    local = {
        etype: (
            torch.from_numpy(np.searchsorted(nodes[etype[0]], sources)),
            torch.from_numpy(np.searchsorted(nodes[etype[2]], destinations)),
        )
        for etype, (sources, destinations) in pairs.items()
    }
    counts = {ntype: len(ids) for ntype, ids in nodes.items()}
    return dgl.heterograph(local, num_nodes_dict=counts, idtype=idtype)
