"""Which seeds of a server go into which co-batch (GraNNDis, algorithms 3.4)."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np

from dglx_dist.draws.rng import hash_ids, stream_key
from dglx_dist.errors import ConfigError
from dglx_dist.graph.structure import Structure
from dglx_dist.partition.options import PartitionOptions
from dglx_dist.partition.registry import PARTITIONERS
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph
from dglx_dist.strategies.granndis.closure import only_from

Composition: TypeAlias = Literal["random", "ordered", "shuffled"]
"""``random``: any seeds, the same in all epochs; ``ordered``: seeds near each other, the same in all epochs;
``shuffled``: any seeds, others in each epoch."""

_STREAM = (1 << 20) + (1 << 10)
"""Hop number of the draws here, far from those of samplers and of the external nodes."""

_NODES_AT_ONCE = 1 << 18


def check_composition(name: str) -> Composition:
    """Return ``name``.

    Raises:
        ConfigError: it is no composition.
    """
    if name not in get_args(Composition):
        known = ", ".join(map(repr, get_args(Composition)))
        raise ConfigError(f"option composition={name!r} must be one of {known}")
    return name  # type: ignore[return-value]  # checked one line up


def draw_of(composition: Composition, epoch: int) -> int:
    """Return a number that is equal for epochs of equal co-batches."""
    return epoch if composition == "shuffled" else 0


def compose(
    seeds: Array,
    num_batches: int,
    composition: Composition,
    *,
    seed: int,
    draw: int = 0,
    clusters: Array | None = None,
) -> tuple[Array, ...]:
    """Return the seeds of each co-batch: every seed in exactly one, sizes that differ by 1 at most.

    The same on every rank of the server: draws are keyed by (seed, draw, node).

    Args:
        seeds: (n,) int64 ascending distinct ids, this server's.
        num_batches: R, at least 1; with more than n, some have none.
        composition: How.
        seed: Of the run.
        draw: :func:`draw_of` of the epoch.
        clusters: (n,) int64, for ``ordered``: seeds of one cluster stand together; None: by id alone, and ids
            of one part of the dataset stand together.

    Returns:
        R arrays (n_r,) int64, each ascending.
    """
    if composition == "ordered":
        order = np.arange(len(seeds)) if clusters is None else np.argsort(clusters, kind="stable")
    else:
        order = np.argsort(hash_ids(seeds, stream_key(seed, draw, _STREAM)), kind="stable")
    return tuple(np.sort(piece) for piece in np.array_split(seeds[order], num_batches))


def cluster_seeds(
    structure: Structure, nodes: Array, seeds: Array, num_clusters: int, *, seed: int, method: str = "metis"
) -> Array:
    """Return a cluster for each seed, of nodes that share many neighbours, with about as many seeds in each.

    The graph that the server's nodes span is partitioned; edges to other servers do not count. Sends nothing.

    Args:
        structure: Holds the in-edges of ``nodes`` in this server's memory.
        nodes: (n,) int64 ascending, the server's own.
        seeds: (s,) int64 ascending, some of ``nodes``.
        num_clusters: At least 1.
        seed: Of the partitioner.
        method: Name of a partitioner that balances several weights.

    Returns:
        (s,) int64 in [0, ``num_clusters``).
    """
    if num_clusters == 1 or not len(seeds):
        return np.zeros(len(seeds), np.int64)
    graph = _spanned(structure, nodes, seeds)
    options = PartitionOptions(balance=("train",), tolerance={"train": 0.1, "nodes": 1.0})
    assignment = PARTITIONERS.get(method)(options).assign(graph, num_clusters, seed)
    return assignment.part_of[NODE_TYPE][np.searchsorted(nodes, seeds)].astype(np.int64)


def _spanned(structure: Structure, nodes: Array, seeds: Array) -> RawGraph:
    """Return the graph that ``nodes`` span, renumbered in their order, with the seeds as training nodes."""
    sources, destinations = [], []
    for first in range(0, len(nodes), _NODES_AT_ONCE):
        some = nodes[first : first + _NODES_AT_ONCE]
        edges = only_from(structure.ask("in_edges", some), nodes)
        sources.append(np.searchsorted(nodes, edges.sources))
        destinations.append(first + np.repeat(np.arange(len(some)), np.diff(edges.indptr)))
    return RawGraph(
        name="the nodes of a server",
        num_nodes={NODE_TYPE: len(nodes)},
        edges={EDGE_TYPE: (np.concatenate(sources), np.concatenate(destinations))},
        node_data={NODE_TYPE: {"train_mask": np.isin(nodes, seeds, assume_unique=True)}},
    )
