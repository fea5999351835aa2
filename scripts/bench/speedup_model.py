"""Closed form of strategies that change only communication: phi, kappa, beta.

See docs/strategies/shared_preload.md, "What it costs".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numba import njit

from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.reader import open_dataset, open_structure
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import Placement
from dglx_dist.planner.model_shape import count_pairs, gradient_bytes, outside_bytes, topology_of
from dglx_dist.records import EDGE_TYPE, FEATURE, NODE_TYPE, Array
from dglx_dist.strategies.cost import Widths
from dglx_dist.strategies.full_graph.expansion import compose
from dglx_dist.strategies.full_graph.plan_counts import HaloPairs


def predicted_time(phi: float, kappa: float, beta: float) -> float:
    """Return (1 - phi) kappa + phi beta: the time of a variant relative to the baseline.

    Nothing overlaps, because a layer waits for its rows; traffic within a server is free.

    Args:
        phi: Share of the baseline's time on the network.
        kappa: Work relative to the baseline.
        beta: Bytes relative to the baseline.
    """
    return (1.0 - phi) * kappa + phi * beta


def speedup_added(phi: float, bytes_ratio: float) -> float:
    """Return 1 / ((1 - phi) + phi beta): nothing overlaps, and only the time on the network changes.

    Args:
        phi: Share of the baseline's time that its network adds, in [0, 1).
        bytes_ratio: beta, bytes of the variant relative to the baseline.

    Raises:
        ConfigError: an argument is out of range.
    """
    _check(phi, bytes_ratio)
    return 1.0 / predicted_time(phi, 1.0, bytes_ratio)


def speedup_hidden(phi: float, bytes_ratio: float) -> float:
    """Return 1 / max(1 - phi, beta): the network is always busy, and computing overlaps with it.

    With full overlap the baseline's time is that of its bytes, so the variant's bytes take beta of it,
    unless computing, 1 - phi of it, takes longer.

    Raises:
        ConfigError: an argument is out of range.
    """
    _check(phi, bytes_ratio)
    return 1.0 / max(1.0 - phi, bytes_ratio)


def _check(phi: float, bytes_ratio: float) -> None:
    if not 0 <= phi < 1 or bytes_ratio < 0:
        raise ConfigError(f"phi={phi} must be in [0, 1) and bytes_ratio={bytes_ratio} at least 0")


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


@njit(cache=True, nogil=True)
def _with_sources(indptr: Array, indices: Array, nodes: Array) -> Array:
    found = nodes.copy()
    for node in range(len(nodes)):
        if nodes[node]:
            for edge in range(indptr[node], indptr[node + 1]):
                found[indices[edge]] = True
    return found


@njit(cache=True, nogil=True)
def _degrees(indptr: Array, indices: Array, sources: Array) -> Array:
    found = np.zeros(len(indptr) - 1, np.int64)
    for node in range(len(found)):
        for edge in range(indptr[node], indptr[node + 1]):
            found[node] += sources[indices[edge]]
    return found


_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Work and bytes of a graph and its partition, one model, one cluster."""

    folder: Path
    topology: Topology
    widths: Widths
    num_batches: int
    """R of cooperative batching."""
    features: int
    pairs: HaloPairs
    exchanging: ServerWork
    preloading: ServerWork
    sampled: ServerWork
    """With all foreign in-neighbours within 1 hop: an upper bound of expansion-aware sampling."""
    batches: ServerWork
    """Of all co-batches."""
    expansion: list[float]
    """(S,) feature rows that a server holds after preloading, relative to its own nodes: D_i."""

    @property
    def kappa(self) -> float:
        """Edges of a preloaded model, relative to one without replicas, of the busiest server."""
        return self.preloading.kappa(self.exchanging)

    @property
    def kappa_of_sample(self) -> float:
        """The same of expansion-aware sampling; an upper bound."""
        return self.sampled.kappa(self.exchanging)

    @property
    def kappa_of_batches(self) -> float:
        return self.batches.kappa(self.exchanging)

    @property
    def preloaded_features(self) -> int:
        """Bytes sent once when closures are preloaded: requested ids and returned rows."""
        return sum(self.preloading.foreign) * self._row

    @property
    def halo_features(self) -> int:
        """Bytes sent once when the features of layer 1's halo are cached."""
        return self.pairs.outside[0] * self.features * self.widths.itemsize

    def epoch_bytes(self, *, preloaded: bool, use_pp: bool) -> Mapping[str, int]:
        """Return the bytes of an epoch of one step, by ledger phase; see ``outside_bytes``."""
        return outside_bytes(self.pairs, self.widths, self.topology, preloaded=preloaded, use_pp=use_pp)

    @property
    def co_batch_features(self) -> int:
        """Bytes sent once for all co-batches, which are then kept on disk."""
        return sum(self.batches.foreign) * self._row

    def co_batch_bytes(self) -> Mapping[str, int]:
        """Return the bytes of an epoch of R co-batches that are on disk."""
        found = self.num_batches * gradient_bytes(self.widths, self.topology)
        return {"gradients": found} if found else {}

    @property
    def _row(self) -> int:
        return _ID_BYTES + self.features * self.widths.itemsize


def count(
    folder: Path,
    *,
    servers: int,
    ranks_per_server: int,
    layers: int,
    num_batches: int,
    seed: int,
    widths: Widths,
) -> Counted:
    """Count a dataset of one node and edge type with a ``train_mask``; seconds per million edges.

    Args:
        folder: The dataset.
        servers: S.
        ranks_per_server: G.
        layers: L.
        num_batches: R of cooperative batching, composed at random.
        seed: Of the run.
        widths: Of the model.

    Raises:
        ConfigError: there are more than 64 ranks.
        StorageError: the dataset is damaged.
    """
    dataset, topology = open_dataset(folder), topology_of(servers, ranks_per_server)
    manifest = dataset.manifest
    bounds = Placement(manifest.num_parts, topology).server_offsets(manifest.node_offsets[NODE_TYPE])
    parts = [dataset.part(part) for part in range(manifest.num_parts)]
    seeds = np.flatnonzero(np.concatenate([part.node_data(NODE_TYPE, "train_mask") for part in parts]))
    own = np.split(seeds, np.searchsorted(seeds, bounds[1:-1]))
    csc = open_structure(dataset, EDGE_TYPE)
    graph = (csc.indptr, csc.indices, bounds)
    preloading = preloading_work(*graph, [[own_seeds] for own_seeds in own], layers)
    pieces = [compose(own_seeds, num_batches, "random", seed=seed) for own_seeds in own]
    held = np.diff(bounds) + preloading.foreign
    return Counted(
        folder=folder,
        topology=topology,
        widths=widths,
        num_batches=num_batches,
        features=parts[0].node_data(NODE_TYPE, FEATURE).shape[1],
        pairs=count_pairs(dataset, topology, layers),
        exchanging=exchanging_work(*graph, seeds, layers),
        preloading=preloading,
        sampled=preloading_work(*graph, [[own_seeds] for own_seeds in own], layers, hops=1),
        batches=preloading_work(*graph, pieces, layers),
        expansion=np.round(held / np.maximum(np.diff(bounds), 1), 3).tolist(),
    )
