"""``DistGraph.sample_neighbors``: drawn in-edges as a DGLGraph, for any of DGL's samplers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import OpenedGraph
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.structure import NO_EDGES, CSCShard, InEdges, Structure
from dglx_dist.keyed_random import Csc, Rule, draw_among, draw_edges
from dglx_dist.records import Array, EdgeType

if TYPE_CHECKING:
    import dgl


def draw_parameters(fanout: int, replace: bool, seed: int) -> str:
    """Return the parameters of :func:`draw_uniform`, as text."""
    return f"{fanout} {int(replace)} {seed}"


def draw_uniform(shard: CSCShard, nodes: Array, parameters: str, exclude: Array = NO_EDGES) -> InEdges:
    """Draw in-edges of ``nodes`` ((k,) int64 global ids in the shard), all of a node with equal probability.

    ``parameters`` are those of :func:`draw_parameters`. A fan-out of -1 takes all; a draw without replacement
    takes at most all of a node, one with replacement none of a node without in-edges.
    """
    fanout, replace, seed = (int(text) for text in parameters.split())
    csc = Csc(shard.indptr, shard.indices, np.empty(0, np.float32), shard.first_node, shard.first_edge)
    rule = Rule(bool(replace), exclude)
    indptr, sources, edge_ids = draw_edges(csc, nodes, fanout, np.uint64(seed), rule)
    return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)


def draw_weighted(
    nodes: Array, edges: InEdges, weights: Array, fanout: int, replace: bool, seed: int
) -> InEdges:
    """Draw among the in-edges of (K,) ``nodes``, with probability proportional to (e,) float64 ``weights``.

    Weight 0 is never drawn; a fan-out of -1 takes all others.
    """
    csc = Csc(edges.indptr, edges.sources, weights, 0, 0)
    indptr, chosen = draw_among(csc, nodes, fanout, np.uint64(seed), replace)
    return InEdges(indptr=indptr, sources=edges.sources[chosen], edge_ids=edges.edge_ids[chosen])


K = TypeVar("K")

NO_IDS: Array = np.empty(0, dtype=np.int64)

UNIFORM = "draw_uniform"
"""Operation under which every structure serves :func:`~dglx_dist.graph.sampling.draw_uniform`."""


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
    draws itself.
    """
    if rule.prob is None and not len(exclude):
        return structure.ask(UNIFORM, nodes, draw_parameters(fanout, rule.replace, rule.seed))
    edges = structure.ask("in_edges", nodes)
    weights = np.ones(len(edges.edge_ids))
    if rule.prob is not None:
        weights = _weights(g.kvstore, _weights_key(g, structure.etype, rule.prob), edges.edge_ids)
    if len(exclude):
        weights[np.isin(edges.edge_ids, exclude)] = 0
    return draw_weighted(nodes, edges, weights, fanout, rule.replace, rule.seed)


def as_dgl_graph(
    num_nodes: Mapping[str, int], drawn: Mapping[EdgeType, tuple[Array, InEdges]]
) -> dgl.DGLGraph:
    """Return a DGLGraph over *all* nodes with the drawn edges, their ids in ``edata[dgl.EID]``.

    ``drawn``: every edge type -> ((K,) requested destinations, their drawn in-edges).
    """
    import dgl  # only here: the rest of the room works without it

    edges, edge_ids = {}, {}
    for etype, (nodes, found) in drawn.items():
        destinations = np.repeat(nodes, np.diff(found.indptr))
        edges[etype] = torch.from_numpy(found.sources), torch.from_numpy(destinations)
        edge_ids[etype] = torch.from_numpy(found.edge_ids)
    graph = dgl.heterograph(edges, num_nodes_dict=dict(num_nodes), idtype=torch.int64)
    for etype, ids in edge_ids.items():
        graph.edges[etype].data[dgl.EID] = ids
    return graph


def sampled_graph(
    g: OpenedGraph,
    seed_nodes: Ids | Mapping[str, Ids],
    fanout: int | Mapping[Any, int],
    exclude_edges: Ids | Mapping[Any, Ids] | None,
    rule: DrawRule,
) -> dgl.DGLGraph:
    """Return all nodes with in-edges drawn by ``rule``; see ``DistGraph.sample_neighbors``."""
    counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    edge_counts = {etype: g.num_edges(etype) for etype in g.canonical_etypes}
    seeds = by_type(seed_nodes, counts, "node")
    fanouts = fanout_by_type(fanout, g.canonical_etypes)
    excluded = {} if exclude_edges is None else by_type(exclude_edges, edge_counts, "edge")
    drawn = {}
    for etype in g.canonical_etypes:
        nodes, exclude = seeds.get(etype[2], NO_IDS), excluded.get(etype, NO_IDS)
        drawn[etype] = nodes, draw_in_edges(g, g.structure(etype), nodes, fanouts[etype], rule, exclude)
    return as_dgl_graph(counts, drawn)


def by_type(given: Ids | Mapping[Any, Ids], counts: Mapping[K, int], what: str) -> dict[K, Array]:
    """Return the (K,) int64 ids per type of ``given``, plain ids of the only type, or a dict of them by type.

    ``counts`` has the number of ids of every type; ``what`` is "node" or "edge". An edge type may be named by
    its relation.

    Raises:
        ConfigError: plain ids although there are several types, or an unknown or ambiguous type.
        IndexError: an id is out of range.
    """
    if not isinstance(given, Mapping):
        if len(counts) != 1:
            raise ConfigError(
                f"the graph has several {what} types; give a dict of ids by type: {_list(counts)}"
            )
        given = {next(iter(counts)): given}
    keys = {key: _known(key, counts, what) for key in given}
    return {keys[key]: as_ids(ids, counts[keys[key]], f"the {what}s {key!r}") for key, ids in given.items()}


def fanout_by_type(fanout: int | Mapping[Any, int], etypes: Collection[EdgeType]) -> dict[EdgeType, int]:
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
        raise ConfigError(f"{problem} {key!r} among the {what} types {_list(types)}")
    return found[0]


def _list(types: Iterable[object]) -> str:
    return ", ".join(map(str, types))


def _weights_key(g: OpenedGraph, etype: EdgeType, name: str) -> str:
    data = g.edges[etype].data
    return data[name].kvstore_key if name in data else g.get_edge_partition_policy(etype).key(name)


def _weights(store: KVStore, key: str, edge_ids: Array) -> Array:
    values: Tensor = store.pull(key, edge_ids, phase="sampling").double()
    if values.dim() != 1:
        raise ConfigError(
            f"{key!r} has rows of shape {tuple(values.shape[1:])}; weights are one number per edge"
        )
    weights = values.numpy()
    if len(weights) and not weights.min() >= 0:
        raise ConfigError(f"{key!r} has a weight of {weights.min()}; weights must be 0 or more")
    return weights
