"""One rank's rows out of its server's, and the layers over them but for what others need of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from dglx_dist.graph.remote_plan import number_distinct
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.plan import HaloLayer
from dglx_dist.strategies.granndis.row_index import RowIndex
from dglx_dist.strategies.granndis.shared_closure import HeldClosure


@final
@dataclass(frozen=True, kw_only=True)
class OwnRows:
    """The rows that a rank holds, in the order of its server's."""

    nodes: Array
    """(n,) int64 global ids."""
    counts: Array
    """(L + 1,) int64; the rows of level l are the first ``counts[l]``."""
    indptr: Array
    """(counts[1] + 1,) int64."""
    edge_ids: Array
    """(E,) int64 global ids of the in-edges of the rows of level 1."""
    sources: Array
    """(d,) ascending int64 global ids of all sources of these edges."""
    source_of: Array
    """(E,) int64 place of each edge's source in :attr:`sources`."""


HoldersOf: TypeAlias = Callable[[Array], Array]
"""(k,) ascending int64 ids of other servers' nodes to the (k,) int64 ranks that hold them."""


def own_rows(held: HeldClosure, rank: int) -> OwnRows:
    """Return the rows of ``rank`` and their in-edges."""
    closure = held.closure
    rows = np.flatnonzero(held.holders == rank)
    counts = np.searchsorted(rows, closure.counts)
    with_edges = rows[: counts[1]]
    first, lengths = closure.indptr[with_edges], np.diff(closure.indptr)[with_edges]
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    at = np.arange(indptr[-1]) + np.repeat(first - indptr[:-1], lengths)
    distinct, number = number_distinct(np.asarray(closure.sources[at]))
    order = np.argsort(distinct)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return OwnRows(
        nodes=np.asarray(closure.nodes[rows]),
        counts=counts,
        indptr=indptr,
        edge_ids=np.asarray(closure.edge_ids[at]),
        sources=distinct[order],
        source_of=place[number],
    )


def read_layers(
    own: OwnRows, held: HeldClosure, hops: int, inner: tuple[int, int], rank: int, holders_of: HoldersOf
) -> list[HaloLayer]:
    """Return the L layers of ``rank``, input-most first, but for what others need of them: they send nothing.

    Those that are alike are the same object.

    Args:
        own: Its rows.
        held: The rows of its server.
        hops: Layers up to this one read rows of the own server only.
        inner: First node of the server, and the one after its last.
        rank: Whose.
        holders_of: Called once, for sources of the layers above ``hops``.
    """
    num_layers = len(own.counts) - 1
    inside = (own.sources >= inner[0]) & (own.sources < inner[1])
    in_server = _holders_in_server(own, held)
    anywhere = in_server.copy()
    if hops < num_layers:
        outside = np.flatnonzero(~inside & _read_by(own, hops + 1))
        anywhere[outside] = holders_of(own.sources[outside])
    place = RowIndex(own.nodes, _num_ids(own)).places(own.sources)
    layers: list[HaloLayer] = []
    for layer in range(1, num_layers + 1):
        alike = (
            layer > 1
            and (layer > hops) == (layer - 1 > hops)
            and own.counts[layer] == own.counts[layer - 1]
            and own.counts[layer - 1] == own.counts[layer - 2]
        )
        if alike:
            layers.append(layers[-1])
        else:
            layers.append(_reading(own, layer, anywhere if layer > hops else in_server, place, rank))
    return layers


def _reading(own: OwnRows, layer: int, holders: Array, place: Array, rank: int) -> HaloLayer:
    """Return layer ``layer``, whose (d,) sources ``holders`` hold; (d,) ``place`` among the own rows."""
    num_own, targets = int(own.counts[layer - 1]), int(own.counts[layer])
    indptr = own.indptr[: targets + 1]
    source_of = own.source_of[: indptr[-1]]
    halo = np.flatnonzero(_read_by(own, layer) & (holders != rank))
    # Sources ascend, so a stable sort by rank leaves them ascending within.
    halo = halo[np.argsort(holders[halo], kind="stable")]
    position = place.copy()
    position[halo] = num_own + np.arange(len(halo))
    indices = position[source_of]
    assert not len(indices) or 0 <= indices.min() <= indices.max() < num_own + len(halo)
    ranks, counts = np.unique(holders[halo], return_counts=True)
    return HaloLayer(
        own_rows=num_own,
        targets=targets,
        indptr=indptr,
        indices=indices,
        edge_ids=own.edge_ids[: indptr[-1]],
        halo_nodes=own.sources[halo],
        receive=tuple(zip(ranks.tolist(), counts.tolist(), strict=True)),
        send=(),
    )


def _read_by(own: OwnRows, layer: int) -> Array:
    """Return (d,) bool: which sources the targets of ``layer`` read."""
    read = np.zeros(len(own.sources), dtype=bool)
    read[own.source_of[: own.indptr[own.counts[layer]]]] = True
    return read


def _holders_in_server(own: OwnRows, held: HeldClosure) -> Array:
    """Return (d,) int64: which rank of the server holds each source, -1 where none does."""
    places = RowIndex(held.closure.nodes, _num_ids(own, held)).places(own.sources)
    return np.where(places >= 0, held.holders[places], -1).astype(np.int64)


def _num_ids(own: OwnRows, held: HeldClosure | None = None) -> int:
    """Return one more than the largest id in question."""
    nodes = own.nodes if held is None else held.closure.nodes
    return int(max(nodes.max(initial=-1), own.sources.max(initial=-1))) + 1
