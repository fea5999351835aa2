"""Negative samplers for link prediction, public as ``dglx_dist.negative``.

Draws are keyed by (seed, epoch, edge or node id, draw number). Therefore they do not depend on the number of
ranks, on threads or on the batch, except for :class:`InBatch`. As in DGL, a negative pair may be an edge,
which is rare in a large sparse graph.
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
from dglx_dist.keyed_random import draw_below, hash_ids, item_key, stream_key
from dglx_dist.options import check_integer
from dglx_dist.records import Array, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


Corrupt: TypeAlias = Literal["tail", "head", "both"]
"""Replaced end of an edge: the destination, the source, or each in turn."""

Pairs: TypeAlias = tuple[Array, Array]
"""(sources, destinations), (P,) int64 each."""

_HOP = 1 << 40
"""Hop number for the first negative draws. It is above the numbers of real hops."""
_SOURCE, _DESTINATION = 0, 1
_REPLACED_ENDS: Mapping[str, tuple[int, ...]] = {
    "tail": (_DESTINATION,),
    "head": (_SOURCE,),
    "both": (_DESTINATION, _SOURCE),
}


@dataclass(frozen=True, kw_only=True)
class Positives:
    """The edges of one type in one batch."""

    etype: EdgeType
    number: int
    """The type's position among the graph's edge types."""
    ids: Array
    """(B,) int64 edge ids."""
    ends: Sequence[Array]
    """(sources, destinations), (B,) int64 each."""
    num_nodes: tuple[int, int]
    """Node counts for the source type and for the destination type."""
    seed: int
    epoch: int

    def stream(self, end: int) -> np.uint64:
        """Return the key for all draws that replace ``end``."""
        # Each edge type has two hop numbers, the second one for source draws.
        hop = _HOP + 2 * self.number
        if end == _SOURCE:
            hop += 1
        return stream_key(self.seed, self.epoch, hop)


DrawEnds: TypeAlias = Callable[[Positives, int], Array]
"""Thread-safe function from (edges, end to replace) to (B, k) drawn nodes, one row per edge."""


@dataclass(frozen=True)
class NegativeSampler(ABC):
    """Configuration for negative draws that keep one end of each edge. :meth:`open` binds it to a graph.

    Each positive edge has k consecutive pairs, so the pairs' scores can be viewed as (B, k). With
    ``corrupt="both"`` there are 2 k pairs: k with another destination, then k with another source.
    """

    k: int
    corrupt: Corrupt = "tail"

    def __post_init__(self) -> None:
        check_integer("k", self.k, least=1)
        if self.corrupt not in _REPLACED_ENDS:
            raise ConfigError(f"corrupt={self.corrupt!r}. Choose 'tail', 'head' or 'both'.")

    @abstractmethod
    def open(self, g: DistGraph, etypes: Sequence[EdgeType]) -> DrawEnds:
        """Return the draw function for edges in ``etypes``. Not collective, but may read from other servers.

        Raises PeerError if another server is silent.
        """


@final
@dataclass(frozen=True)
class Uniform(NegativeSampler):
    """Keeps one end of each edge and draws the other one uniformly among all nodes of its type.

    With ``corrupt="tail"`` this does the same as DGL's ``Uniform`` and ``PerSourceUniform``. Raises
    ConfigError if ``k`` is not an integer that is at least 1, or ``corrupt`` is invalid.
    """

    def open(self, g: DistGraph, etypes: Sequence[EdgeType]) -> DrawEnds:
        return lambda edges, end: _draw_uniform(edges.ids, edges.stream(end), self.k, edges.num_nodes[end])


@final
@dataclass(frozen=True)
class PerSourceUniform(NegativeSampler):
    """Works like :class:`Uniform`, but edges with the same kept end share its k negatives.

    Fewer nodes are sampled. A node has the same negatives in all batches in an epoch.
    """

    def open(self, g: DistGraph, etypes: Sequence[EdgeType]) -> DrawEnds:
        def draw_ends(edges: Positives, end: int) -> Array:
            kept_ends = edges.ends[1 - end]
            return _draw_uniform(kept_ends, edges.stream(end), self.k, edges.num_nodes[end])

        return draw_ends


@final
@dataclass(frozen=True)
class InBatch(NegativeSampler):
    """Takes the ends of other edges in the batch, so that no further nodes are needed.

    In each batch, a type's edges are arranged in a circle by a keyed hash of their ids. Each edge takes the
    ends of the next k edges, or of all other edges if k is None. Each of B edges has min(k, B - 1) pairs. If
    the loss is a mean over pairs, keep k below the smallest batch (``drop_last=True``). A drawn end may equal
    the end that it replaces, if a different edge has that end. The draws depend on the batch, so they differ
    between numbers of ranks and batch sizes.
    """

    k: int | None = None  # type: ignore[assignment]  # wider than in the base class
    corrupt: Corrupt = "tail"

    def __post_init__(self) -> None:
        # The base class checks the values, but does not accept None.
        Uniform(1 if self.k is None else self.k, self.corrupt)

    def open(self, g: DistGraph, etypes: Sequence[EdgeType]) -> DrawEnds:
        def draw_ends(edges: Positives, end: int) -> Array:
            num_negatives = max(len(edges.ids) - 1, 0)
            if self.k is not None:
                num_negatives = min(self.k, num_negatives)
            circle = np.argsort(hash_ids(edges.ids, edges.stream(end)), kind="stable")
            positions = np.empty_like(circle)
            positions[circle] = np.arange(len(circle))

            # Each edge takes the following positions. The circle continues at its start.
            next_positions = positions[:, None] + np.arange(1, num_negatives + 1)
            next_edges = circle[next_positions % max(len(circle), 1)]
            return edges.ends[end][next_edges]

        return draw_ends


@njit(cache=True, nogil=True)
def _draw_uniform(ids: Array, stream: np.uint64, k: int, bound: int) -> Array:
    """Return (len(ids), k) draws in [0, bound). Row i depends on ``ids[i]``, not on its position."""
    out = np.empty((len(ids), k), np.int64)
    for i in range(len(ids)):
        key = item_key(stream, ids[i])
        draw_number = 0
        for j in range(k):
            out[i, j], draw_number = draw_below(key, draw_number, bound)
    return out


DrawAll: TypeAlias = Callable[[Sequence[Positives]], dict[EdgeType, Pairs]]
"""Function from a batch's edges to its negative pairs by type."""


def read_negative(sampler: Any) -> Any:
    """Return a :class:`NegativeSampler`, the user's function, or None. Raise ConfigError otherwise."""
    if sampler is None or isinstance(sampler, NegativeSampler):
        return sampler
    if isinstance(sampler, type) or not callable(sampler):
        raise ConfigError(
            f"negative_sampler={sampler!r}. Pass a sampler of dx.negative, e.g. "
            "dx.negative.Uniform(5), one of dgl.dataloading.negative_sampler, or a function "
            "of (g, edge ids)."
        )

    # Compare exact types, because a user's subclass must run its own code.
    if type(sampler) is dgl_negative.PerSourceUniform:
        return Uniform(sampler.k)
    if type(sampler) is dgl_negative.GlobalUniform:
        raise ConfigError(
            "GlobalUniform rejects pairs that are edges anywhere in the graph, which no "
            "single server can check. Use dx.negative.Uniform(k, corrupt='both'). Few pairs "
            "of a large graph are edges."
        )

    return sampler


def open_negative(g: DistGraph, sampler: Any, etypes: Sequence[EdgeType]) -> DrawAll | None:
    """Return the draw function for edges in ``etypes``. ``sampler`` comes from :func:`read_negative`."""
    if sampler is None:
        return None
    if not isinstance(sampler, NegativeSampler):
        return lambda batch: _call_user_sampler(g, sampler, batch)
    draw_ends = sampler.open(g, etypes)
    return lambda batch: {edges.etype: _draw_pairs(edges, draw_ends, sampler.corrupt) for edges in batch}


def _draw_pairs(edges: Positives, draw_ends: DrawEnds, corrupt: Corrupt) -> Pairs:
    """Draw negative pairs for the edges of one type. An edge's pairs are consecutive."""
    # (B, k) arrays, one for each end that is replaced.
    source_arrays = []
    destination_arrays = []
    for end in _REPLACED_ENDS[corrupt]:
        drawn_ends = draw_ends(edges, end)
        kept_ends = np.broadcast_to(edges.ends[1 - end][:, None], drawn_ends.shape)
        source_arrays.append(drawn_ends if end == _SOURCE else kept_ends)
        destination_arrays.append(kept_ends if end == _SOURCE else drawn_ends)
    sources = np.concatenate(source_arrays, axis=1).reshape(-1)
    destinations = np.concatenate(destination_arrays, axis=1).reshape(-1)
    return sources, destinations


def _call_user_sampler(
    g: DistGraph, sampler: Callable[[Any, Any], Any], batch: Sequence[Positives]
) -> dict[EdgeType, Pairs]:
    """Return the user function's pairs. Raise ConfigError if it does not return pairs by edge type."""
    ids: Any = {edges.etype: torch.from_numpy(edges.ids) for edges in batch}
    # As in DGL, the function gets a plain tensor if the graph has one edge type.
    if len(g.canonical_etypes) == 1:
        ids = ids[g.canonical_etypes[0]]

    result = sampler(g, ids)
    if not isinstance(result, Mapping):
        if len(g.canonical_etypes) != 1:
            raise ConfigError(
                "the negative sampler returned one pair of lists, but the graph has the edge "
                f"types {', '.join(g.etypes)}. Return a dict of (sources, destinations) by "
                "edge type."
            )
        result = {g.canonical_etypes[0]: result}

    pairs_by_type = {}
    for key, pairs in result.items():
        etype = g.to_canonical_etype(key)
        pairs_by_type[etype] = _read_pairs(g, etype, pairs)
    return pairs_by_type


def _read_pairs(g: DistGraph, etype: EdgeType, pairs: Any) -> Pairs:
    """Return the user's pairs as int64 arrays. Raise IndexError or ConfigError if they are not pairs."""
    ends: list[Array] = []
    for ids, ntype in zip(pairs, (etype[0], etype[2]), strict=True):
        nodes = as_ids(ids, g.num_nodes(ntype), f"the nodes of type {ntype!r} (negative sampler)")
        ends.append(nodes.astype(np.int64))
    sources, destinations = ends
    if len(sources) != len(destinations):
        raise ConfigError(
            f"the negative sampler returned {len(sources)} sources and {len(destinations)} "
            f"destinations of {etype}. Return the same number of each."
        )
    return sources, destinations
