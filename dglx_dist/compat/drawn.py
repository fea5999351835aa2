"""Drawn graphs as ``dgl.distributed`` returns them: without the edge types of which nothing was drawn."""

from __future__ import annotations

import dgl


def without_empty_types(graph: dgl.DGLGraph) -> dgl.DGLGraph:
    """Return the graph or block without edge types that have no edges; where none has any, as it is.

    Scripts rely on it: a model over several types then returns rows for the types of the seeds alone. All
    node types stay, and so does the data of nodes and edges.
    """
    kept = [etype for etype in graph.canonical_etypes if graph.num_edges(etype)]
    if len(kept) in (0, len(graph.canonical_etypes)):
        return graph
    edges = {etype: graph.edges(etype=etype, order="eid") for etype in kept}
    if graph.is_block:
        made = dgl.create_block(
            edges,
            {ntype: graph.num_src_nodes(ntype) for ntype in graph.srctypes},
            {ntype: graph.num_dst_nodes(ntype) for ntype in graph.dsttypes},
            idtype=graph.idtype,
            device=graph.device,
        )
        for ntype in graph.srctypes:
            made.srcnodes[ntype].data.update(graph.srcnodes[ntype].data)
        for ntype in graph.dsttypes:
            made.dstnodes[ntype].data.update(graph.dstnodes[ntype].data)
        made.step_share = getattr(graph, "step_share", None)
    else:
        counts = {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes}
        made = dgl.heterograph(edges, counts, idtype=graph.idtype, device=graph.device)
        for ntype in graph.ntypes:
            made.nodes[ntype].data.update(graph.nodes[ntype].data)
    for etype in kept:
        made.edges[etype].data.update(graph.edges[etype].data)
    return made
