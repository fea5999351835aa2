"""Work of servers counted the plain way, over masks of all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True)
class ServerWork:
    """Work of every server in an epoch, S servers."""

    edges: tuple[int, ...]
    """(S,) aggregated edges, in all layers."""
    foreign: tuple[int, ...]
    """(S,) feature rows that another server owns, counted for each step."""

    def kappa(self, base: ServerWork) -> float:
        """Return the edges of the busiest server, relative to ``base``."""
        return max(self.edges) / max(*base.edges, 1)


def exchanging_work(indptr: Array, indices: Array, bounds: Array, seeds: Array, layers: int) -> ServerWork:
    """Return the work of servers that compute only their own nodes, and exchange rows in each layer.

    Args:
        indptr: (N + 1,) of the in-edges.
        indices: (E,) their sources.
        bounds: (S + 1,) first node of each server.
        seeds: (n,) ids of all training nodes.
        layers: L.
    """
    needed = _mask(len(indptr) - 1, seeds)
    degrees, edges = np.diff(indptr), np.zeros(len(bounds) - 1, np.int64)
    for _ in range(layers):
        work = np.where(needed, degrees, 0)
        edges += [work[first:last].sum() for first, last in _ranges(bounds)]
        needed = _with_sources(indptr, indices, needed)
    return ServerWork(edges=tuple(edges.tolist()), foreign=(0,) * len(edges))


def preloading_work(
    indptr: Array,
    indices: Array,
    bounds: Array,
    batches: Sequence[Sequence[Array]],
    layers: int,
    *,
    hops: int | None = None,
) -> ServerWork:
    """Return the work of servers that hold the neighbourhood of their training nodes.

    Args:
        indptr: (N + 1,) of the in-edges.
        indices: (E,) their sources.
        bounds: (S + 1,) first node of each server.
        batches: By server, the (n,) ids of its training nodes of each step.
        layers: L.
        hops: Distance from its own nodes up to which a server takes others; None: ``layers``. A fan-out is
            not applied.
    """
    edges, foreign = np.zeros(len(batches), np.int64), np.zeros(len(batches), np.int64)
    for server, (first, last) in enumerate(_ranges(bounds)):
        allowed = _mask(len(indptr) - 1, np.arange(first, last))
        for _ in range(layers if hops is None else hops):
            allowed = _with_sources(indptr, indices, allowed)
        degrees = _degrees(indptr, indices, allowed)
        for seeds in batches[server]:
            needed = _mask(len(degrees), seeds)
            for _ in range(layers):
                edges[server] += degrees[needed].sum()
                needed = _with_sources(indptr, indices, needed) & allowed
            foreign[server] += needed.sum() - needed[first:last].sum()
    return ServerWork(edges=tuple(edges.tolist()), foreign=tuple(foreign.tolist()))


def _ranges(bounds: Array) -> list[tuple[int, int]]:
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


def _mask(num_nodes: int, ids: Array) -> Array:
    found = np.zeros(num_nodes, np.bool_)
    found[ids] = True
    return found


def _with_sources(indptr: Array, indices: Array, nodes: Array) -> Array:
    found = nodes.copy()
    found[indices[np.repeat(nodes, np.diff(indptr))]] = True
    return found


def _degrees(indptr: Array, indices: Array, sources: Array) -> Array:
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return np.bincount(targets[sources[indices]], minlength=len(indptr) - 1)
