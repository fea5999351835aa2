"""Whatever a user gives as negative sampler, as one function of a batch's edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from dgl.dataloading import negative_sampler as dgl_negative

from dglx_dist.errors import ConfigError
from dglx_dist.graph.ids import as_ids
from dglx_dist.records import Array, EdgeType
from dglx_dist.sampling.negative import NegativeSampler, Pairs, Positives, Uniform

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

DrawAll: TypeAlias = Callable[[Sequence[Positives]], dict[EdgeType, Pairs]]
"""The edges of a batch, type by type, to negative pairs by type."""


def read_negative(given: Any) -> Any:
    """Return a :class:`NegativeSampler`, the user's own function, or None.

    Raises:
        ConfigError: it is none of these, or one of DGL's that cannot be honoured.
    """
    if given is None or isinstance(given, NegativeSampler):
        return given
    if isinstance(given, type) or not callable(given):
        raise ConfigError(
            f"negative_sampler={given!r}; give one of dx.negative, e.g. dx.negative.Uniform(5), one of "
            "dgl.dataloading.negative_sampler, or a function of (g, edge ids)"
        )
    # Only DGL's own class, not a user's subclass of it: that one's code is to be run.
    if type(given) is dgl_negative.PerSourceUniform:
        return Uniform(given.k)
    if type(given) is dgl_negative.GlobalUniform:
        raise ConfigError(
            "GlobalUniform looks for pairs that are no edges anywhere in the graph, which no server can tell "
            "alone; use dx.negative.Uniform(k, corrupt='both'), where few pairs of a large graph are edges"
        )
    return given


def open_negative(g: DistGraph, sampler: Any, etypes: Sequence[EdgeType]) -> DrawAll | None:
    """Return what draws negative pairs for edges of ``etypes``; ``sampler`` is from :func:`read_negative`.

    Raises:
        PeerError: a server that was asked for degrees is silent.
    """
    if sampler is None:
        return None
    if isinstance(sampler, NegativeSampler):
        draw = sampler.open(g, etypes)
        return lambda batch: {edges.etype: draw(edges) for edges in batch}
    return lambda batch: _asked(g, sampler, batch)


def _asked(
    g: DistGraph, sampler: Callable[[Any, Any], Any], batch: Sequence[Positives]
) -> dict[EdgeType, Pairs]:
    """Return what the user's function says, called as DGL calls it: ids alone where there is one type."""
    ids = {edges.etype: torch.from_numpy(edges.ids) for edges in batch}
    answer = sampler(g, ids if len(g.canonical_etypes) > 1 else next(iter(ids.values())))
    if not isinstance(answer, Mapping):
        if len(g.canonical_etypes) != 1:
            raise ConfigError(
                "the negative sampler returned one pair of lists, and the graph has the edge types "
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
            f"{etype}; return as many of each"
        )
    return sources, destinations
