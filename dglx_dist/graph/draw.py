"""Drawing some of the in-edges of nodes, as ``DistGraph.sample_neighbors`` does for any sampler of DGL.

Draws depend on a seed and the node alone, so that they are the same wherever the node lives.
"""

from __future__ import annotations

import numpy as np

from dglx_dist.draws.pick import Csc, Rule, draw_among, draw_edges
from dglx_dist.graph.in_edges import NO_EDGES, CSCShard, InEdges
from dglx_dist.records import Array


def draw_parameters(fanout: int, replace: bool, seed: int) -> str:
    """Return what :func:`draw_uniform` needs to know, as text."""
    return f"{fanout} {int(replace)} {seed}"


def draw_uniform(shard: CSCShard, nodes: Array, parameters: str, exclude: Array = NO_EDGES) -> InEdges:
    """Draw in-edges of ``nodes`` ((k,) int64 global ids in the shard), all of a node alike.

    Args:
        shard: Piece of the structure.
        nodes: Whose in-edges.
        parameters: Of :func:`draw_parameters`. A fan-out of -1 takes all; without replacement at most as
            many as there are, with it none where there are none.
        exclude: (X,) int64 ascending ids of edges that are not drawn.
    """
    fanout, replace, seed = (int(text) for text in parameters.split())
    csc = Csc(shard.indptr, shard.indices, np.empty(0, np.float32), shard.first_node, shard.first_edge)
    rule = Rule(bool(replace), exclude)
    indptr, sources, edge_ids = draw_edges(csc, nodes, fanout, np.uint64(seed), rule)
    return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)


def draw_weighted(
    nodes: Array, edges: InEdges, weights: Array, fanout: int, replace: bool, seed: int
) -> InEdges:
    """Draw among given in-edges, each as likely as its weight says; edges of weight 0 are never drawn.

    Args:
        nodes: (K,) int64, of which ``edges`` are the in-edges.
        edges: The candidates.
        weights: (e,) float64, not negative.
        fanout: Edges of a node; -1: all with a weight above 0.
        replace: Whether an edge may be drawn again.
        seed: Of the draw.
    """
    csc = Csc(edges.indptr, edges.sources, weights, 0, 0)
    indptr, chosen = draw_among(csc, nodes, fanout, np.uint64(seed), replace)
    return InEdges(indptr=indptr, sources=edges.sources[chosen], edge_ids=edges.edge_ids[chosen])
