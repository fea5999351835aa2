"""Negative samplers for link prediction, public as ``dglx_dist.negative``.

Draws are keyed by (seed, epoch, edge or node id, number of the draw), so they do not depend on the number of
ranks, on threads or on the batch, except those of :class:`InBatch`. As in DGL, a negative pair may be an
edge, which is rare in a large sparse graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import numpy as np
import torch
from dgl.dataloading import negative_sampler as dgl_negative
from numba import njit

from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import as_ids
from dglx_dist.keyed_random import draw_below, draw_unit, hash_ids, item_key, stream_key
from dglx_dist.options import check_integer
from dglx_dist.records import Array, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


Corrupt: TypeAlias = Literal["tail", "head", "both"]
"""The end of an edge to replace: the destination, the source, or each in turn."""

Pairs: TypeAlias = tuple[Array, Array]
"""(sources, destinations), (P,) int64 each."""

_HOP = 1 << 40
"""The hop number of the first negative draws, above those of real hops."""
_SOURCE, _DESTINATION = 0, 1
_REPLACED: Mapping[str, tuple[int, ...]] = {
    "tail": (_DESTINATION,),
    "head": (_SOURCE,),
    "both": (_DESTINATION, _SOURCE),
}


@dataclass(frozen=True, kw_only=True)
class Positives:
    """The edges of one type in one batch."""

    etype: EdgeType
    number: int
    """Place of the type among those of the graph."""
    ids: Array
    """(B,) int64 edge ids."""
    ends: Sequence[Array]
    """(sources, destinations), (B,) int64 each."""
    num_nodes: tuple[int, int]
    """Nodes of the types of the sources and of the destinations."""
    seed: int
    epoch: int

    def stream(self, end: int) -> np.uint64:
        """Return the key of all draws that replace one end."""
        return stream_key(self.seed, self.epoch, _HOP + 2 * self.number + (end == _SOURCE))


Replacements: TypeAlias = Callable[[Positives, int], Array]
"""Edges and the end to replace to (B, k) nodes, row by row those of an edge. Thread-safe."""


@dataclass(frozen=True)
class NegativeSampler(ABC):
    """Configuration of negative draws, which keep one end of each edge; :meth:`open` binds it to a graph.

    Each positive edge has k consecutive pairs, so the scores of pairs can be viewed as (B, k). With
    ``corrupt="both"`` there are 2 k: k with another destination, then k with another source.
    """

    k: int
    corrupt: Corrupt = "tail"

    def __post_init__(self) -> None:
        check_integer("k", self.k, least=1)
        if self.corrupt not in _REPLACED:
            raise ConfigError(f"corrupt={self.corrupt!r}; choose 'tail', 'head' or 'both'")

    @abstractmethod
    def open(self, g: DistGraph, etypes: Sequence[EdgeType]) -> Replacements:
        """Return what draws for edges of ``etypes``. Not collective, but may read from other servers.

        Raises:
            PeerError: another server is silent.
        """


@final
@dataclass(frozen=True)
class Uniform(NegativeSampler):
    """Each edge keeps one end; the other is drawn uniformly among the nodes of its type.

    With ``corrupt="tail"`` this is what DGL's ``Uniform`` and ``PerSourceUniform`` do.

    Raises:
        ConfigError: ``k`` is no whole number of at least 1, or ``corrupt`` none of its three values.
    """

    def open(self, g: DistGraph, etypes: Sequence[EdgeType]) -> Replacements:
        return lambda edges, end: _uniform(edges.ids, edges.stream(end), self.k, edges.num_nodes[end])


@final
@dataclass(frozen=True)
class PerSourceUniform(NegativeSampler):
    """As :class:`Uniform`, but edges with the same kept end share its k negatives.

    Fewer nodes are sampled. A node has the same negatives in all batches of an epoch.
    """

    def open(self, g: DistGraph, etypes: Sequence[EdgeType]) -> Replacements:
        return lambda edges, end: _uniform(
            edges.ends[1 - end], edges.stream(end), self.k, edges.num_nodes[end]
        )


@final
@dataclass(frozen=True)
class DegreeWeighted(NegativeSampler):
    """As :class:`Uniform`, but a node is drawn in proportion to its degree to the power ``power``.

    Destinations are drawn by in-degree, sources by out-degree, both of the edge type. Opening it gathers the
    degrees of all nodes of a type (8 bytes each) into a table; a draw is a binary search in it.

    Raises:
        ConfigError: as for :class:`Uniform`; ``power`` is not finite, or negative.
    """

    k: int
    power: float = 0.75
    corrupt: Corrupt = "tail"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.power, (int, float)) or not 0 <= self.power < float("inf"):
            raise ConfigError(f"power={self.power!r}; give a finite number of at least 0, e.g. 0.75")

    def open(self, g: DistGraph, etypes: Sequence[EdgeType]) -> Replacements:
        ends = _REPLACED[self.corrupt]
        tables = {(etype, end): _cumulative(g, etype, end, self.power) for etype in etypes for end in ends}
        return lambda edges, end: _weighted(edges.ids, edges.stream(end), self.k, tables[edges.etype, end])


@final
@dataclass(frozen=True)
class InBatch(NegativeSampler):
    """The ends of other edges of the batch, of the same type: no nodes beyond those of the positive edges.

    The draws depend on the batch, so they differ between numbers of ranks and batch sizes. The edges of a
    batch are arranged in a circle by keyed hash of their ids, whatever their order, and each takes the ends
    of the next k; None: of all others. Each of B edges has min(k, B - 1) pairs, so keep k below the smallest
    batch (``drop_last=True``) if the loss is a mean over pairs. A drawn end may equal the edge's own if
    another edge shares it.
    """

    k: int | None = None  # type: ignore[assignment]  # wider than that of the others
    corrupt: Corrupt = "tail"

    def __post_init__(self) -> None:
        Uniform(1 if self.k is None else self.k, self.corrupt)

    def open(self, g: DistGraph, etypes: Sequence[EdgeType]) -> Replacements:
        def others_of(edges: Positives, end: int) -> Array:
            others = max(len(edges.ids) - 1, 0)
            count = others if self.k is None else min(self.k, others)
            circle = np.argsort(hash_ids(edges.ids, edges.stream(end)), kind="stable")
            place = np.empty_like(circle)
            place[circle] = np.arange(len(circle))
            steps = place[:, None] + np.arange(1, count + 1)
            return edges.ends[end][circle[steps % max(len(circle), 1)]]

        return others_of


def _cumulative(g: DistGraph, etype: EdgeType, end: int, power: float) -> Array:
    """Return the (N,) float64 cumulative sums of degree ** power."""
    degrees = (g.out_degrees if end == _SOURCE else g.in_degrees)(None, etype).numpy()
    # Nodes without an edge weigh 0 even at power 0, where 0 ** 0 would be 1.
    with np.errstate(over="ignore"):
        sums = np.cumsum(np.where(degrees > 0, degrees.astype(np.float64) ** power, 0.0))
    if len(sums) and not np.isfinite(sums[-1]):
        raise ConfigError(f"power={power} is too large for degrees up to {degrees.max()}; give e.g. 0.75")
    return sums


@njit(cache=True, nogil=True)
def _uniform(ids: Array, stream: np.uint64, k: int, bound: int) -> Array:
    """Return (len(ids), k) draws in [0, bound), row i keyed by ``ids[i]``."""
    out = np.empty((len(ids), k), np.int64)
    for i in range(len(ids)):
        key = item_key(stream, ids[i])
        number = 0
        for j in range(k):
            out[i, j], number = draw_below(key, number, bound)
    return out


@njit(cache=True, nogil=True)
def _weighted(ids: Array, stream: np.uint64, k: int, sums: Array) -> Array:
    """Return (len(ids), k) draws in proportion to the increments of the cumulative ``sums``."""
    out = np.empty((len(ids), k), np.int64)
    for i in range(len(ids)):
        key = item_key(stream, ids[i])
        for j in range(k):
            slot = np.searchsorted(sums, draw_unit(key, j) * sums[-1], side="right")
            # A product that rounds up to the total lies behind the last node that has an edge.
            out[i, j] = slot if slot < len(sums) else np.searchsorted(sums, sums[-1], side="left")
    return out


DrawAll: TypeAlias = Callable[[Sequence[Positives]], dict[EdgeType, Pairs]]
"""The edges of a batch by type to negative pairs by type."""


def read_negative(given: Any) -> Any:
    """Return a :class:`NegativeSampler`, the user's own function, or None; raise ConfigError for others."""
    if given is None or isinstance(given, NegativeSampler):
        return given
    if isinstance(given, type) or not callable(given):
        raise ConfigError(
            f"negative_sampler={given!r}; give one of dx.negative, e.g. dx.negative.Uniform(5), one of "
            "dgl.dataloading.negative_sampler, or a function of (g, edge ids)"
        )
    # Exact types: the code of a user's subclass must run.
    if type(given) is dgl_negative.PerSourceUniform:
        return Uniform(given.k)
    if type(given) is dgl_negative.GlobalUniform:
        raise ConfigError(
            "GlobalUniform rejects pairs that are edges anywhere in the graph, which no single server can "
            "check; use dx.negative.Uniform(k, corrupt='both'): few pairs of a large graph are edges"
        )
    return given


def open_negative(g: DistGraph, sampler: Any, etypes: Sequence[EdgeType]) -> DrawAll | None:
    """Return the draw function for edges of ``etypes``; ``sampler`` is from :func:`read_negative`."""
    if sampler is None:
        return None
    if isinstance(sampler, NegativeSampler):
        drawn = sampler.open(g, etypes)
        return lambda batch: {edges.etype: _pairs(edges, drawn, sampler.corrupt) for edges in batch}
    return lambda batch: _call_user_sampler(g, sampler, batch)


def _pairs(edges: Positives, drawn: Replacements, corrupt: Corrupt) -> Pairs:
    pieces = []
    for end in _REPLACED[corrupt]:
        other = drawn(edges, end)
        kept = np.broadcast_to(edges.ends[1 - end][:, None], other.shape)
        pieces.append((other, kept) if end == _SOURCE else (kept, other))
    sources, destinations = (np.concatenate(ends, axis=1).reshape(-1) for ends in zip(*pieces, strict=True))
    return sources, destinations


def _call_user_sampler(
    g: DistGraph, sampler: Callable[[Any, Any], Any], batch: Sequence[Positives]
) -> dict[EdgeType, Pairs]:
    # As in DGL, the function gets plain ids where the graph has one edge type.
    ids = {edges.etype: torch.from_numpy(edges.ids) for edges in batch}
    answer = sampler(g, ids if len(g.canonical_etypes) > 1 else next(iter(ids.values())))
    if not isinstance(answer, Mapping):
        if len(g.canonical_etypes) != 1:
            raise ConfigError(
                "the negative sampler returned one pair of lists, but the graph has the edge types "
                f"{', '.join(g.etypes)}; return a dict of (sources, destinations) by edge type"
            )
        answer = {g.canonical_etypes[0]: answer}
    return {(etype := g.to_canonical_etype(key)): _checked(g, etype, pairs) for key, pairs in answer.items()}


def _checked(g: DistGraph, etype: EdgeType, pairs: Any) -> Pairs:
    ends: list[Array] = [
        as_ids(given, g.num_nodes(ntype), f"the nodes of type {ntype!r} (negative sampler)").astype(np.int64)
        for given, ntype in zip(pairs, (etype[0], etype[2]), strict=True)
    ]
    sources, destinations = ends
    if len(sources) != len(destinations):
        raise ConfigError(
            f"the negative sampler returned {len(sources)} sources and {len(destinations)} destinations of "
            f"{etype}; return the same number of each"
        )
    return sources, destinations
