"""The closed form of all strategies that change communication: phi, kappa, beta (algorithms 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.reader import open_dataset, open_structure
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import Placement
from dglx_dist.planner.closures import ServerWork, exchanging_work, preloading_work
from dglx_dist.planner.model_shape import (
    HaloPairs,
    Widths,
    count_pairs,
    gradient_bytes,
    outside_bytes,
    topology_of,
)
from dglx_dist.records import EDGE_TYPE, FEATURE, NODE_TYPE
from dglx_dist.strategies.full_graph.expansion import compose


def predicted_time(phi: float, kappa: float, beta: float) -> float:
    """Return (1 - phi) kappa + phi beta: the time of a variant, by that of the baseline.

    Nothing is overlapped, for a layer waits for its rows; what crosses inside a server is taken as free.

    Args:
        phi: Share of the baseline's time on the network.
        kappa: Work by the baseline's.
        beta: Bytes by the baseline's.
    """
    return (1.0 - phi) * kappa + phi * beta


def speedup_added(phi: float, bytes_ratio: float) -> float:
    """Return 1 / ((1 - phi) + phi beta): nothing is hidden, and only the time on the network changes.

    Args:
        phi: Share of the baseline's time that its network adds, in [0, 1).
        bytes_ratio: beta, bytes of the variant by those of the baseline.

    Raises:
        ConfigError: one of them is out of range.
    """
    _check(phi, bytes_ratio)
    return 1.0 / predicted_time(phi, 1.0, bytes_ratio)


def speedup_hidden(phi: float, bytes_ratio: float) -> float:
    """Return 1 / max(1 - phi, beta): the network works all the time, and compute hides behind it.

    With everything overlapped the baseline's time *is* that of its bytes, so the variant's bytes take beta of
    it, unless compute, 1 - phi of it, takes longer.

    Raises:
        ConfigError: one of them is out of range.
    """
    _check(phi, bytes_ratio)
    return 1.0 / max(1.0 - phi, bytes_ratio)


def _check(phi: float, bytes_ratio: float) -> None:
    if not 0 <= phi < 1 or bytes_ratio < 0:
        raise ConfigError(f"phi={phi} must be in [0, 1) and bytes_ratio={bytes_ratio} at least 0")


_ID_BYTES = 8
_SAMPLED_HOPS = 1


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A graph and its cut, one model, one shape."""

    folder: Path
    topology: Topology
    widths: Widths
    num_batches: int
    """R, of cooperative batching."""
    features: int
    """Columns as they are stored."""
    pairs: HaloPairs
    exchanging: ServerWork
    preloading: ServerWork
    sampled: ServerWork
    """With 1 hop of all foreign in-neighbours: no less than expansion-aware sampling does."""
    batches: ServerWork
    """Of all co-batches together."""
    expansion: list[float]
    """(S,) rows of the features that a server holds after preloading, by its own nodes: D_i."""

    @property
    def kappa(self) -> float:
        """Edges of a preloaded model by those without replicas, of the server with most."""
        return self.preloading.kappa(self.exchanging)

    @property
    def kappa_of_sample(self) -> float:
        """The same of expansion-aware sampling, at most."""
        return self.sampled.kappa(self.exchanging)

    @property
    def kappa_of_batches(self) -> float:
        """The same of an epoch of co-batches."""
        return self.batches.kappa(self.exchanging)

    @property
    def preloaded_features(self) -> int:
        """Bytes that cross once when closures are preloaded (algorithms 3.1): ids there, rows back."""
        return sum(self.preloading.foreign) * self._row

    @property
    def halo_features(self) -> int:
        """Bytes that cross once when the features of layer 1's halo are kept."""
        return self.pairs.outside[0] * self.features * self.widths.itemsize

    def epoch_bytes(self, *, preloaded: bool, use_pp: bool) -> Mapping[str, int]:
        """Return what crosses in an epoch of one step, by the ledger's phases; see ``outside_bytes``."""
        return outside_bytes(self.pairs, self.widths, self.topology, preloaded=preloaded, use_pp=use_pp)

    @property
    def co_batch_features(self) -> int:
        """Bytes that cross once for all co-batches, which are kept on disk then (algorithms 3.4)."""
        return sum(self.batches.foreign) * self._row

    def co_batch_bytes(self) -> Mapping[str, int]:
        """Return what crosses in an epoch of co-batches that are on disk (algorithms 3.4): R steps."""
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
    """Count a dataset of one node and edge type with a ``train_mask``; seconds for a million edges.

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
        sampled=preloading_work(*graph, [[own_seeds] for own_seeds in own], layers, hops=_SAMPLED_HOPS),
        batches=preloading_work(*graph, pieces, layers),
        expansion=np.round(held / np.maximum(np.diff(bounds), 1), 3).tolist(),
    )
