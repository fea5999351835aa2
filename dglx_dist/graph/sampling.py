"""Implements ``DistGraph.sample_neighbors``: drawn in-edges as a DGLGraph, for any DGL sampler."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import OpenedGraph
from dglx_dist.graph.partition_book import Ids, as_ids
from dglx_dist.graph.structure import NO_EDGES, CSCShard, Draw, InEdges, Structure
from dglx_dist.keyed_random import Csc, Rule, draw_among, draw_edges, merge_ids
from dglx_dist.records import Array, EdgeType

if TYPE_CHECKING:
    import dgl


def make_csc(shard: CSCShard, weights: Array | None = None) -> Csc:
    """Return a shard in the form that kernels take. ``weights`` are (E,) float32 edge weights."""
    weights = np.empty(0, np.float32) if weights is None else weights
    return Csc(shard.indptr, shard.indices, weights, shard.first_node, shard.first_edge)


def pack_hop_parameters(fanout: int, stream: int) -> str:
    """Return the JSON parameters for :func:`make_keyed_draw`. A fan-out of -1 draws all in-edges."""
    return json.dumps({"fanout": fanout, "stream": stream})


def make_keyed_draw(rule: Rule, weights: Mapping[int, Array]) -> Draw:
    """Return the function by which a server draws in-edges, for parameters from :func:`pack_hop_parameters`.

    Args:
        rule: Sampling rule. The edges that a request excludes are added.
        weights: A shard's first node to (E,) float32 edge weights. Empty for uniform draws.
    """

    def draw(shard: CSCShard, nodes: Array, parameters: str, exclude: Array) -> InEdges:
        hop = json.loads(parameters)
        csc = make_csc(shard, weights.get(shard.first_node))
        fanout = int(hop["fanout"])
        stream = np.uint64(hop["stream"])
        batch_rule = rule._replace(exclude=merge_ids(rule.exclude, exclude))
        indptr, sources, edge_ids = draw_edges(csc, nodes, fanout, stream, batch_rule)
        return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)

    return draw


K = TypeVar("K")

NO_IDS: Array = np.empty(0, dtype=np.int64)

_UNIFORM = {False: "draw_uniform", True: "draw_uniform_with_replacement"}


def serve_uniform(structure: Structure) -> None:
    """Let :func:`draw_in_edges` request uniform draws from ``structure``. All ranks must call this."""
    for is_replaced, op in _UNIFORM.items():
        structure.serve(op, make_keyed_draw(Rule(is_replaced, NO_EDGES), {}))


@dataclass(frozen=True, kw_only=True)
class DrawRule:
    """How :func:`draw_in_edges` draws."""

    replace: bool
    """Whether an edge may be drawn more than once."""
    prob: str | None
    """Name of an edge tensor: weights or a mask. None: all edges are equally likely."""
    seed: int
    """Random seed. At a node, the same seed draws the same edges."""


def draw_in_edges(
    g: OpenedGraph, structure: Structure, nodes: Array, fanout: int, rule: DrawRule, exclude: Array
) -> InEdges:
    """Draw in-edges for each of the given nodes.

    The server that owns a node makes uniform draws. With weights or excluded edges this rank fetches all
    in-edges, and draws in proportion to the weights. Edges with weight 0 are never drawn.

    Args:
        structure: In-edges with the edge type to draw.
        nodes: (K,) int64 ids.
        fanout: Maximum number of edges per node, or -1 for all.
        rule: Replacement, weights and seed for the draw.
        exclude: (M,) int64 edge ids that are never drawn.
    """
    if rule.prob is None and not len(exclude):
        parameters = pack_hop_parameters(fanout, rule.seed)
        return structure.ask(_UNIFORM[rule.replace], nodes, parameters)

    edges = structure.ask("in_edges", nodes)
    sources, edge_ids = edges.sources, edges.edge_ids
    weights = np.ones(len(edge_ids))
    if rule.prob is not None:
        weights = _pull_weights(g, structure.etype, rule.prob, edge_ids)
    if len(exclude):
        weights[np.isin(edge_ids, exclude)] = 0
    csc = Csc(edges.indptr, sources, weights, 0, 0)
    indptr, positions = draw_among(csc, nodes, fanout, np.uint64(rule.seed), rule.replace)
    return InEdges(indptr=indptr, sources=sources[positions], edge_ids=edge_ids[positions])


def build_sampled_graph(
    g: OpenedGraph,
    seed_nodes: Ids | Mapping[str, Ids],
    fanout: int | Mapping[Any, int],
    exclude_edges: Ids | Mapping[Any, Ids] | None,
    rule: DrawRule,
) -> dgl.DGLGraph:
    """Draw in-edges of some nodes. Return a graph with all nodes in ``g`` and the drawn edges.

    Args:
        g: The opened graph.
        seed_nodes: Nodes whose in-edges are drawn: ids, or a dict from node type to ids.
        fanout: Maximum number of edges per node and edge type, -1 for all, or a dict from edge type to
            number.
        exclude_edges: Edge ids that are never drawn, a dict from edge type to ids, or None.
        rule: Replacement, weights and seed for the draw.

    Returns:
        The graph. Its edge data ``dgl.EID`` holds the edge ids in ``g``.
    """
    # The import is late, because the rest of the package works without DGL.
    import dgl

    num_nodes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    seeds = group_by_type(seed_nodes, num_nodes, "node")
    fanouts = read_fanouts(fanout, g.canonical_etypes)
    excluded: Mapping[EdgeType, Array] = {}
    if exclude_edges is not None:
        num_edges = {etype: g.num_edges(etype) for etype in g.canonical_etypes}
        excluded = group_by_type(exclude_edges, num_edges, "edge")

    endpoints = {}
    edge_ids = {}
    for etype in g.canonical_etypes:
        _, _, destination_type = etype
        nodes = seeds.get(destination_type, NO_IDS)
        exclude = excluded.get(etype, NO_IDS)
        edges = draw_in_edges(g, g.structure(etype), nodes, fanouts[etype], rule, exclude)
        # The drawn edges are grouped by destination, in the order of `nodes`.
        destinations = np.repeat(nodes, np.diff(edges.indptr))
        endpoints[etype] = torch.from_numpy(edges.sources), torch.from_numpy(destinations)
        edge_ids[etype] = torch.from_numpy(edges.edge_ids)
    graph = dgl.heterograph(endpoints, num_nodes_dict=num_nodes, idtype=torch.int64)
    for etype, ids in edge_ids.items():
        graph.edges[etype].data[dgl.EID] = ids
    return graph


def group_by_type(ids: Ids | Mapping[Any, Ids], counts: Mapping[K, int], what: str) -> dict[K, Array]:
    """Return the (K,) int64 ids by type.

    Args:
        ids: Ids for the only type, or a dict from type to ids. An edge type may be named by its relation.
        counts: How many ids every type has.
        what: "node" or "edge", for messages.

    Raises:
        ConfigError: there is no dict although there are several types, or a type is unknown or ambiguous.
        IndexError: an id is out of range.
    """
    if not isinstance(ids, Mapping):
        if len(counts) != 1:
            types = ", ".join(map(str, counts))
            raise ConfigError(f"the graph has several {what} types. Pass a dict of ids by type: {types}.")
        ids = {next(iter(counts)): ids}

    ids_by_type = {}
    for name, values in ids.items():
        key = _resolve_type(name, counts, what)
        ids_by_type[key] = as_ids(values, counts[key], f"the {what}s {name!r}")
    return ids_by_type


def read_fanouts(fanout: int | Mapping[Any, int], etypes: Collection[EdgeType]) -> dict[EdgeType, int]:
    """Return the fan-out by edge type. One number stands for all types. A dict must name every type."""
    if not isinstance(fanout, Mapping):
        return dict.fromkeys(etypes, int(fanout))
    fanouts = {_resolve_type(key, etypes, "edge"): int(size) for key, size in fanout.items()}
    missing = [etype for etype in etypes if etype not in fanouts]
    if missing:
        raise ConfigError(f"fanout has no entry for the edge type {missing[0]}. Name every edge type.")
    return fanouts


def _resolve_type(key: object, types: Collection[K], what: str) -> K:
    """Return the type that ``key`` names. For an edge type, a relation may be enough."""
    matches = [candidate for candidate in types if candidate == key]
    if what == "edge":
        matches += [candidate for candidate in types if cast("EdgeType", candidate)[1] == key]
    if len(matches) != 1:
        problem = "several types are" if matches else "there is no type"
        raise ConfigError(f"{problem} {key!r} among the {what} types {', '.join(map(str, types))}")
    return matches[0]


def _pull_weights(g: OpenedGraph, etype: EdgeType, name: str, edge_ids: Array) -> Array:
    """Return the (e,) float64 edge weights. Raise ConfigError if they are not numbers that are at least 0."""
    data = g.edges[etype].data
    key = g.get_edge_partition_policy(etype).key(name)
    # A tensor that was set under `name` on this rank has another key. An unknown name fails in the pull.
    if name in data:
        key = data[name].kvstore_key
    values: Tensor = g.kvstore.pull(key, edge_ids, phase="sampling").double()
    if values.dim() != 1:
        raise ConfigError(f"{key!r} has rows of shape {tuple(values.shape[1:])}, but weights are numbers")
    weights = values.numpy()
    if len(weights) and not weights.min() >= 0:
        raise ConfigError(f"{key!r} has a weight of {weights.min()}. Use weights of 0 or more.")
    return weights
