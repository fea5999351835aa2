"""DGL's functions that look into the structure: drawing neighbours, in-edges, ends of edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dgl
import torch
from torch import Tensor

from dglx_dist.compat.drawn import without_empty_types
from dglx_dist.compat.graph import inner_graph
from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph
from dglx_dist.graph.ids import Ids, as_array


def sample_neighbors(
    g: object,
    nodes: Any,
    fanout: int | Mapping[Any, int],
    edge_dir: str = "in",
    prob: str | None = None,
    exclude_edges: Any = None,
    replace: bool = False,
    use_graphbolt: bool = False,
) -> dgl.DGLGraph:
    """Draw in-edges of nodes; a graph of all nodes with the drawn edges, ids in ``edata[dgl.EID]``.

    Edge types of which nothing was drawn are left out, as DGL does.

    Args:
        g: The graph.
        nodes: Ids, or a dict of them by node type.
        fanout: Edges per node and edge type; -1: all.
        edge_dir: ``in``.
        prob: Name of an edge tensor of weights or a mask.
        exclude_edges: Edges that are not drawn; a bool is taken for ``replace``, as it stood here in 1.1.3.
        replace: Whether an edge may be drawn more than once.
        use_graphbolt: False.

    Raises:
        ConfigError: an argument that cannot be honoured.
    """
    _no_graphbolt(use_graphbolt)
    if isinstance(exclude_edges, bool):
        exclude_edges, replace = None, exclude_edges
    inner = inner_graph(g)
    seeds = _by_type(inner, nodes)
    return without_empty_types(inner.sample_neighbors(seeds, fanout, edge_dir, prob, exclude_edges, replace))


def sample_etype_neighbors(  # noqa: PLR0913 - DGL's signature
    g: object,
    nodes: Any,
    fanout: int | Mapping[Any, int],
    edge_dir: str = "in",
    prob: str | None = None,
    exclude_edges: Any = None,
    replace: bool = False,
    etype_sorted: bool = True,
    use_graphbolt: bool = False,
) -> dgl.DGLGraph:
    """Draw in-edges of each edge type; ``nodes`` may be homogeneous ids. As :func:`sample_neighbors`."""
    _no_graphbolt(use_graphbolt)
    if isinstance(exclude_edges, bool):
        # Of 1.1.3: (..., prob, replace, etype_sorted).
        exclude_edges, replace = None, exclude_edges
    inner = inner_graph(g)
    seeds = _by_type(inner, nodes)
    return without_empty_types(inner.sample_neighbors(seeds, fanout, edge_dir, prob, exclude_edges, replace))


def in_subgraph(g: object, nodes: Any) -> dgl.DGLGraph:
    """Return the graph of all nodes with all in-edges of ``nodes``, ids in ``edata[dgl.EID]``."""
    inner = inner_graph(g)
    return without_empty_types(inner.sample_neighbors(_by_type(inner, nodes), -1))


def find_edges(g: object, edge_ids: Ids) -> tuple[Tensor, Tensor]:
    """Return (sources, destinations) of edges; of several types all ids are homogeneous ones."""
    inner = inner_graph(g)
    book = inner.get_partition_book()
    if len(book.etypes) == 1 and len(book.ntypes) == 1:
        return inner.find_edges(edge_ids)
    kinds, typed = book.map_to_per_etype(edge_ids)
    sources, destinations = torch.empty_like(typed), torch.empty_like(typed)
    for number, etype in enumerate(book.canonical_etypes):
        chosen = kinds == number
        found = inner.find_edges(typed[chosen], etype)
        sources[chosen] = book.map_to_homo_nid(found[0], etype[0])
        destinations[chosen] = book.map_to_homo_nid(found[1], etype[2])
    return sources, destinations


def _by_type(g: DistGraph, nodes: Any) -> Any:
    """Return ids by node type where there are several and ``nodes`` are homogeneous ids."""
    if isinstance(nodes, Mapping) or len(g.ntypes) == 1:
        return nodes
    kinds, typed = g.get_partition_book().map_to_per_ntype(as_array(nodes))
    return {ntype: typed[kinds == number] for number, ntype in enumerate(g.ntypes)}


def _no_graphbolt(use_graphbolt: bool) -> None:
    if use_graphbolt:
        raise ConfigError("use_graphbolt=True cannot be honoured: there is one format; leave it out")
