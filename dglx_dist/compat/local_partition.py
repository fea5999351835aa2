"""The own partition as DGL shows it: a homogeneous graph of the own nodes and the sources around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dgl
import numpy as np
import torch

from dglx_dist.records import Array

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


def local_partition(g: DistGraph) -> dgl.DGLGraph:
    """Return the own server's nodes, first, their in-edges, and the other sources of these; made anew.

    Ids are homogeneous. ``ndata`` has ``dgl.NID`` and ``inner_node``; ``edata`` has ``dgl.EID`` and
    ``inner_edge``, which is 1 for all; where there are several types, ``dgl.NTYPE`` and ``dgl.ETYPE`` too.
    """
    book = g.get_partition_book()
    own = np.concatenate(
        [book.map_to_homo_nid(book.partid2nids(book.partid, ntype), ntype).numpy() for ntype in book.ntypes]
    )
    sources, destinations, edges = _in_edges(g)
    halo = np.setdiff1d(sources, own)
    nodes = np.concatenate([own, halo])
    order = np.argsort(nodes, kind="stable")
    local = [order[np.searchsorted(nodes, ends, sorter=order)] for ends in (sources, destinations)]
    graph = dgl.graph((torch.from_numpy(local[0]), torch.from_numpy(local[1])), num_nodes=len(nodes))
    graph.ndata[dgl.NID] = torch.from_numpy(nodes)
    graph.ndata["inner_node"] = (torch.arange(len(nodes)) < len(own)).to(torch.uint8)
    graph.edata[dgl.EID] = torch.from_numpy(edges)
    graph.edata["inner_edge"] = torch.ones(len(edges), dtype=torch.uint8)
    if len(book.ntypes) > 1 or len(book.etypes) > 1:
        graph.ndata[dgl.NTYPE] = book.map_to_per_ntype(nodes)[0].to(torch.int32)
        graph.edata[dgl.ETYPE] = book.map_to_per_etype(edges)[0].to(torch.int32)
    return graph


def _in_edges(g: DistGraph) -> tuple[Array, Array, Array]:
    """Return sources, destinations and ids, (E,) homogeneous each, of the in-edges of the own nodes."""
    book = g.get_partition_book()
    pieces = []
    for etype in book.canonical_etypes:
        nodes = book.partid2nids(book.partid, etype[2]).numpy()
        found = g.structure(etype).ask("in_edges", nodes)
        destinations = np.repeat(nodes, np.diff(found.indptr))
        pieces.append(
            (
                book.map_to_homo_nid(found.sources, etype[0]).numpy(),
                book.map_to_homo_nid(destinations, etype[2]).numpy(),
                book.map_to_homo_eid(found.edge_ids, etype).numpy(),
            )
        )
    sources, destinations, edges = (np.concatenate(one) for one in zip(*pieces, strict=True))
    return sources, destinations, edges
