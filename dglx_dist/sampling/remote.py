"""Sampling from a structure that is cut over servers: one request per server and hop.

The draws are keyed by node and edge, so they are those of a replicated structure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from dglx_dist.draws.pick import Csc, Rule, draw_edges, merged
from dglx_dist.graph.in_edges import CSCShard, Draw, InEdges
from dglx_dist.graph.structure import Structure
from dglx_dist.records import Array
from dglx_dist.sampling.kernel import Ask, RawBatch, number_seeds
from dglx_dist.sampling.relabel import number, with_room
from dglx_dist.sampling.source import BatchSource
from dglx_dist.sampling.workspace import Workspace, check_seeds


def csc_of(shard: CSCShard, weights: Array | None = None) -> Csc:
    """Return a piece of the structure as the kernels read it; ``weights`` are (E,) float32 of its edges."""
    likely = np.empty(0, np.float32) if weights is None else weights
    return Csc(shard.indptr, shard.indices, likely, shard.first_node, shard.first_edge)


def keyed_draw(rule: Rule, weights: Mapping[int, Array]) -> Draw:
    """Return how a server draws a hop, for itself and for others; parameters are JSON (fan-out, hop's key).

    What a batch excludes comes with the request.

    Args:
        rule: The same on all ranks; ``exclude`` is left out of every batch.
        weights: First node of a shard to its (E,) float32 edge weights; empty for all alike.
    """

    def draw(shard: CSCShard, nodes: Array, parameters: str, exclude: Array) -> InEdges:
        ask = json.loads(parameters)
        csc = csc_of(shard, weights.get(shard.first_node))
        here = Rule(rule.replace, merged(rule.exclude, exclude))
        indptr, sources, edge_ids = draw_edges(csc, nodes, int(ask["fanout"]), np.uint64(ask["stream"]), here)
        return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)

    return draw


@final
class RemoteSource(BatchSource):
    """Samples when each server has the in-edges of its own nodes only.

    Sends 8 bytes per remote destination and receives 24 per edge drawn there (algorithms 1.3); in every
    hop each server that is asked also gets 8 per edge that the batch excludes there.

    Args:
        structure: Serves ``op`` with :func:`keyed_draw` on all ranks.
        op: Name of the operation.
    """

    is_whole = False

    def __init__(self, structure: Structure, op: str) -> None:
        self._structure, self._op = structure, op

    def sample(self, ask: Ask, workspace: Workspace) -> RawBatch:
        """Sample as :class:`BatchSource` says; one round of requests per hop.

        The draw rule is the one that ``op`` is served with, without ``ask.once``: that of ``ask`` must be
        the same.

        Raises:
            ConfigError: the seeds have an id twice.
            PeerError: a server did not answer in time.
        """
        table, nodes, count = number_seeds(workspace.table, ask.seeds)
        node_ends, hops = [count], []
        try:
            check_seeds(ask.seeds, count)
            for hop, fanout in enumerate(ask.fanouts.tolist()):
                parameters = json.dumps({"fanout": fanout, "stream": int(ask.streams[hop])})
                layer = len(ask.fanouts) - hop
                edges = self._structure.ask(
                    self._op, nodes[:count], parameters, exclude=ask.once, layer=layer
                )
                nodes = np.concatenate([nodes[:count], np.empty(len(edges.sources) + 1, np.int64)])
                table = with_room(table, nodes, count, len(edges.sources))
                local = np.empty(len(edges.sources), ask.like.dtype)
                count = number(table, edges.sources, nodes, count, local)
                hops.append((edges.indptr, local, edges.edge_ids))
                node_ends.append(count)
        finally:
            # Also after an error, or the numbers given out so far would count in the next batch.
            workspace.keep(table._replace(base=table.base + count))
        return _joined(nodes[:count], node_ends, hops, ask.like.dtype)


def _joined(
    nodes: Array,
    node_ends: Sequence[int],
    hops: Sequence[tuple[Array, Array, Array]],
    dtype: np.dtype[np.generic],
) -> RawBatch:
    edge_ends = np.cumsum([0, *(len(edge_ids) for _, _, edge_ids in hops)])
    indptr, sources, edge_ids = (
        np.concatenate(part).astype(dtype, copy=False) for part in zip(*hops, strict=True)
    )
    return RawBatch(nodes, np.array(node_ends), indptr, sources, edge_ids, edge_ends)
