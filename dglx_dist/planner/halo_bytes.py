"""The bytes of full-graph training by phase, from the partitioned graph: GraNNDis (algorithms 3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from dglx_dist.cluster.ledger import ring_bytes
from dglx_dist.cluster.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.owners import RowOwners
from dglx_dist.graph.placement import Placement
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array
from dglx_dist.storage.reader import StoredDataset
from dglx_dist.storage.replica import open_structure

_RANKS = 64
"""That fit a word."""


@dataclass(frozen=True, kw_only=True)
class HaloPairs:
    """Pairs of a node and a rank that needs its row without computing it, for each layer's input."""

    outside: tuple[int, ...]
    """(L,) input-most layer first: the node is computed in another server than the rank's (B_ext)."""
    inside: tuple[int, ...]
    """(L,) it is computed by another rank of the same server."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """What a model sends for a pair, and how large its gradients are."""

    first: int
    """Columns of what layer 1 takes from its neighbours."""
    hidden: int
    """Columns of what every other layer takes."""
    first_learns: bool
    """Whether what layer 1 takes has a gradient, as behind an encoder that is trained."""
    gradient_bytes: int
    """Of all parameters, with a flag of one element for each tensor."""
    itemsize: int = 4
    """s: bytes of an element."""


def topology_of(servers: int, ranks_per_server: int) -> Topology:
    """Return the one of rank 0."""
    return Topology(
        0, servers * ranks_per_server, tuple(np.repeat(range(servers), ranks_per_server).tolist())
    )


def count_pairs(dataset: StoredDataset, topology: Topology, layers: int) -> HaloPairs:
    """Count what ``full_graph`` exchanges: only rows that the training nodes depend on are computed.

    Args:
        dataset: With all its parts, of one node and edge type, and a ``train_mask``.
        topology: Of the run.
        layers: L, at least 1.

    Raises:
        ConfigError: there are more than 64 ranks, or no training mask.
    """
    if topology.world_size > _RANKS:
        raise ConfigError(f"halos of {topology.world_size} ranks cannot be counted; take at most {_RANKS}")
    manifest = dataset.manifest
    offsets = manifest.node_offsets[NODE_TYPE]
    bounds = Placement(manifest.num_parts, topology).server_offsets(offsets)
    rank_of = RowOwners(bounds, topology).rank_of(np.arange(int(offsets[-1])))
    needed = np.concatenate(
        [dataset.part(part).node_data(NODE_TYPE, "train_mask") for part in range(manifest.num_parts)]
    ).astype(np.bool_)
    csc = open_structure(dataset, EDGE_TYPE)
    server_of_rank = np.array(topology.server_of_rank)
    found = []
    for _ in range(layers):
        readers = np.zeros(len(needed), np.uint64)
        _mark(csc.indptr, csc.indices, needed, rank_of, readers)
        found.append(_count(readers, rank_of, server_of_rank))
        needed = needed | (readers != 0)
    outside, inside = zip(*reversed(found), strict=True)
    return HaloPairs(outside=outside, inside=inside)


def exchanged_bytes(pairs: Sequence[int], widths: Widths, *, use_pp: bool) -> dict[str, int]:
    """Return the bytes of an epoch by the ledger's phases; phases without any left out.

    ``halo`` is s (d_0 B_1 + d_1 B_2 + ...), without its first term where layer-1 rows are cached
    (``use_pp``); ``halo_gradients`` the same without the terms of rows that have no gradient.

    Args:
        pairs: (L,) of each layer, inside or outside of servers.
        widths: Of the model.
        use_pp: Whether the features of layer 1's halo are kept; no row of layer 1 travels then.
    """
    above = widths.hidden * sum(pairs[1:])
    first = 0 if use_pp else widths.first * pairs[0]
    counts = {"halo": above + first, "halo_gradients": above + (first if widths.first_learns else 0)}
    return {phase: count * widths.itemsize for phase, count in counts.items() if count}


def gradient_bytes(widths: Widths, topology: Topology) -> int:
    """Return what crosses between servers in the ring all-reduce of a step's gradients."""
    servers, ranks = topology.server_of_rank, topology.world_size
    return sum(
        ring_bytes(widths.gradient_bytes, ranks, rank)
        for rank in range(ranks)
        if servers[rank] != servers[(rank + 1) % ranks]
    )


def outside_bytes(
    pairs: HaloPairs, widths: Widths, topology: Topology, *, preloaded: bool, use_pp: bool
) -> Mapping[str, int]:
    """Return what crosses between servers in an epoch of one step, by the ledger's phases.

    Args:
        pairs: Of the graph.
        widths: Of the model.
        topology: Of the run.
        preloaded: Whether servers hold their whole neighbourhood, so that gradients alone cross.
        use_pp: See :func:`exchanged_bytes`.
    """
    halo = {} if preloaded else exchanged_bytes(pairs.outside, widths, use_pp=use_pp)
    gradients = gradient_bytes(widths, topology)
    return {**halo, **({"gradients": gradients} if gradients else {})}


@njit(cache=True, nogil=True)
def _mark(indptr: Array, indices: Array, needed: Array, rank_of: Array, readers: Array) -> None:
    """Set the bit of the rank of each needed node at all its in-neighbours, and at itself."""
    for node in range(len(needed)):
        if needed[node]:
            bit = np.uint64(1) << np.uint64(rank_of[node])
            readers[node] |= bit
            for edge in range(indptr[node], indptr[node + 1]):
                readers[indices[edge]] |= bit


@njit(cache=True, nogil=True)
def _count(readers: Array, rank_of: Array, server_of_rank: Array) -> tuple[int, int]:
    outside, inside = 0, 0
    for node in range(len(readers)):
        bits = readers[node]
        rank = 0
        while bits != np.uint64(0):
            if bits & np.uint64(1) and rank != rank_of[node]:
                if server_of_rank[rank] == server_of_rank[rank_of[node]]:
                    inside += 1
                else:
                    outside += 1
            bits >>= np.uint64(1)
            rank += 1
    return outside, inside
