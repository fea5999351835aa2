"""``DistGraph.sample_neighbors``: drawn in-edges as a DGLGraph, for any of DGL's samplers."""

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
    """Return a shard as the kernels read it; ``weights`` are (E,) float32 of its edges."""
    weights = np.empty(0, np.float32) if weights is None else weights
    return Csc(shard.indptr, shard.indices, weights, shard.first_node, shard.first_edge)


def pack_hop_parameters(fanout: int, stream: int) -> str:
    """Return the JSON parameters of :func:`make_keyed_draw`. A fan-out of -1 draws all in-edges."""
    return json.dumps({"fanout": fanout, "stream": stream})


def make_keyed_draw(rule: Rule, weights: Mapping[int, Array]) -> Draw:
    """Return the function by which a server draws in-edges; its parameters are :func:`pack_hop_parameters`.

    A request adds the edges that its batch excludes to ``rule``. ``weights`` are the (E,) float32 edge
    weights by first node of a shard, empty for uniform draws.
    """

    def draw(shard: CSCShard, nodes: Array, parameters: str, exclude: Array) -> InEdges:
        hop = json.loads(parameters)
        csc = make_csc(shard, weights.get(shard.first_node))
        fanout, stream = int(hop["fanout"]), np.uint64(hop["stream"])
        batch_rule = rule._replace(exclude=merge_ids(rule.exclude, exclude))
        indptr, sources, edge_ids = draw_edges(csc, nodes, fanout, stream, batch_rule)
        return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)

    return draw


K = TypeVar("K")

NO_IDS: Array = np.empty(0, dtype=np.int64)

_UNIFORM = {False: "draw_uniform", True: "draw_uniform_with_replacement"}


def serve_uniform(structure: Structure) -> None:
    """Let :func:`draw_in_edges` ask ``structure`` for uniform draws; on all ranks."""
    for is_replaced, op in _UNIFORM.items():
        structure.serve(op, make_keyed_draw(Rule(is_replaced, NO_EDGES), {}))


@dataclass(frozen=True, kw_only=True)
class DrawRule:
    """Parameters of a draw."""

    replace: bool
    prob: str | None
    """Name of an edge tensor of weights, or of a mask."""
    seed: int


def draw_in_edges(
    g: OpenedGraph, structure: Structure, nodes: Array, fanout: int, rule: DrawRule, exclude: Array
) -> InEdges:
    """Return drawn in-edges, at most ``fanout`` (-1: all) of each of the (K,) int64 ``nodes``.

    The owner of a node makes uniform draws; with weights or excluded edges this rank fetches all in-edges and
    draws itself, in proportion to the weights; 0 is never drawn.
    """
    if rule.prob is None and not len(exclude):
        return structure.ask(_UNIFORM[rule.replace], nodes, pack_hop_parameters(fanout, rule.seed))
    edges = structure.ask("in_edges", nodes)
    weights = np.ones(len(edges.edge_ids))
    if rule.prob is not None:
        weights = _weights(g, structure.etype, rule.prob, edges.edge_ids)
    if len(exclude):
        weights[np.isin(edges.edge_ids, exclude)] = 0
    csc = Csc(edges.indptr, edges.sources, weights, 0, 0)
    indptr, chosen = draw_among(csc, nodes, fanout, np.uint64(rule.seed), rule.replace)
    return InEdges(indptr=indptr, sources=edges.sources[chosen], edge_ids=edges.edge_ids[chosen])


def build_sampled_graph(
    g: OpenedGraph,
    seed_nodes: Ids | Mapping[str, Ids],
    fanout: int | Mapping[Any, int],
    exclude_edges: Ids | Mapping[Any, Ids] | None,
    rule: DrawRule,
) -> dgl.DGLGraph:
    """Return all nodes with in-edges drawn by ``rule``, which have ``dgl.EID``; see :class:`DistGraph`."""
    import dgl  # only here: the rest of the room works without it

    counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    edge_counts = {etype: g.num_edges(etype) for etype in g.canonical_etypes}
    seeds = group_by_type(seed_nodes, counts, "node")
    fanouts = read_fanouts(fanout, g.canonical_etypes)
    excluded = {} if exclude_edges is None else group_by_type(exclude_edges, edge_counts, "edge")
    ends, edge_ids = {}, {}
    for etype in g.canonical_etypes:
        nodes, exclude = seeds.get(etype[2], NO_IDS), excluded.get(etype, NO_IDS)
        drawn = draw_in_edges(g, g.structure(etype), nodes, fanouts[etype], rule, exclude)
        destinations = np.repeat(nodes, np.diff(drawn.indptr))
        ends[etype] = torch.from_numpy(drawn.sources), torch.from_numpy(destinations)
        edge_ids[etype] = torch.from_numpy(drawn.edge_ids)
    graph = dgl.heterograph(ends, num_nodes_dict=counts, idtype=torch.int64)
    for etype, ids in edge_ids.items():
        graph.edges[etype].data[dgl.EID] = ids
    return graph


def group_by_type(given: Ids | Mapping[Any, Ids], counts: Mapping[K, int], what: str) -> dict[K, Array]:
    """Return the (K,) int64 ids per type of ``given``, plain ids of the only type, or a dict of them by type.

    ``counts`` has the number of ids of every type; ``what`` is "node" or "edge". An edge type may be named by
    its relation.

    Raises:
        ConfigError: plain ids although there are several types, or an unknown or ambiguous type.
        IndexError: an id is out of range.
    """
    if not isinstance(given, Mapping):
        if len(counts) != 1:
            types = ", ".join(map(str, counts))
            raise ConfigError(f"the graph has several {what} types; give a dict of ids by type: {types}")
        given = {next(iter(counts)): given}
    keys = {key: _known(key, counts, what) for key in given}
    return {keys[key]: as_ids(ids, counts[keys[key]], f"the {what}s {key!r}") for key, ids in given.items()}


def read_fanouts(fanout: int | Mapping[Any, int], etypes: Collection[EdgeType]) -> dict[EdgeType, int]:
    """Return the fan-out of every edge type; one number stands for all, a dict must name every one."""
    if not isinstance(fanout, Mapping):
        return dict.fromkeys(etypes, int(fanout))
    fanouts = {_known(key, etypes, "edge"): int(size) for key, size in fanout.items()}
    missing = [etype for etype in etypes if etype not in fanouts]
    if missing:
        raise ConfigError(f"fanout has no entry for the edge type {missing[0]}; name every edge type")
    return fanouts


def _known(key: object, types: Collection[K], what: str) -> K:
    found = [one for one in types if key == one or (what == "edge" and key == cast("EdgeType", one)[1])]
    if len(found) != 1:
        problem = "several types are" if found else "there is no type"
        raise ConfigError(f"{problem} {key!r} among the {what} types {', '.join(map(str, types))}")
    return found[0]


def _weights(g: OpenedGraph, etype: EdgeType, name: str, edge_ids: Array) -> Array:
    data = g.edges[etype].data
    key = data[name].kvstore_key if name in data else g.get_edge_partition_policy(etype).key(name)
    values: Tensor = g.kvstore.pull(key, edge_ids, phase="sampling").double()
    if values.dim() != 1:
        raise ConfigError(
            f"{key!r} has rows of shape {tuple(values.shape[1:])}; weights are one number per edge"
        )
    weights = values.numpy()
    if len(weights) and not weights.min() >= 0:
        raise ConfigError(f"{key!r} has a weight of {weights.min()}; weights must be 0 or more")
    return weights
