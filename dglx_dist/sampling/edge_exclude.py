"""Which edges a batch of edges must not see around itself (DGL's ``exclude``), as a function of the batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.ids import as_array, as_ids
from dglx_dist.graph.neighbors import by_type
from dglx_dist.graph.reverse import NO_REVERSE, reverse_edge_ids
from dglx_dist.records import Array, EdgeType
from dglx_dist.sampling.maker import NOTHING_EXCLUDED, Excluded

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

Edges: TypeAlias = Mapping[EdgeType, Array]
"""Edge type to the (B,) int64 edge ids of a batch."""

Exclude: TypeAlias = Callable[[Edges], Excluded]
"""The edges of a batch to those that its blocks must not have."""

ReverseOf: TypeAlias = Callable[[Array], Array]
"""(K,) edge ids to their reverse edges' ids, -1 for none."""

MODES = ("self", "reverse_id", "reverse_types")

_CHECKED = 1024
"""How many of a rank's edges are looked up to see whether the given reverse edges are reverse edges."""


@dataclass(frozen=True, kw_only=True)
class ExcludeRule:
    """What the user said, as DGL names it."""

    exclude: Any = None
    """None, one of :data:`MODES`, or a function of the batch's edge ids to edge ids."""
    reverse_eids: Any = None
    """For ``reverse_id``: (E,) ids by edge id, or a dict of them by edge type."""
    reverse_etypes: Any = None
    """For ``reverse_types``: edge type to the type of its reverse edges."""


def check_rule(g: DistGraph, rule: ExcludeRule, etypes: Collection[EdgeType]) -> None:
    """Check what can be checked without the other ranks, for edges of ``etypes``.

    Raises:
        ConfigError: an unknown mode; what the mode needs is missing or of the wrong length or dtype, or
            something is given that the mode does not need.
    """
    exclude = rule.exclude
    if exclude is not None and not callable(exclude) and exclude not in MODES:
        raise ConfigError(f"exclude={exclude!r}; choose None, {', '.join(map(repr, MODES))}, or a function")
    for name, mode, given in (
        ("reverse_eids", "reverse_id", rule.reverse_eids),
        ("reverse_etypes", "reverse_types", rule.reverse_etypes),
    ):
        if exclude == mode and given is None:
            raise ConfigError(
                f"exclude={mode!r} needs {name}=; "
                + (
                    "dx.reverse_edge_ids(g) finds them in the ids of the partitioned graph"
                    if name == "reverse_eids"
                    else "give {edge type: type of its reverse edges}"
                )
            )
        if exclude != mode and given is not None:
            raise ConfigError(
                f"{name} is given but exclude={exclude!r} does not use it; pass exclude={mode!r}"
            )
    known: Collection[EdgeType] = etypes
    if exclude == "reverse_id":
        known = _reverse_tables(g, rule.reverse_eids)
    if exclude == "reverse_types":
        known = _reverse_types(g, rule.reverse_etypes)
    missing = [etype for etype in etypes if etype not in known]
    if missing:
        raise ConfigError(
            f"exclude={exclude!r}: nothing is said about the reverse of {missing[0]}, of which there are "
            "edges to train on; add it, or leave the type out of the edges"
        )


def open_exclude(g: DistGraph, rule: ExcludeRule) -> Exclude:
    """Return the rule as a function, callable on any thread. Collective for ``reverse_types``.

    What a batch excludes is what DGL excludes: its own edges, and their reverse edges, at every hop.

    Raises:
        ConfigError: see :func:`check_rule`.
    """
    if rule.exclude is None:
        return lambda _: NOTHING_EXCLUDED
    if rule.exclude == "self":
        return lambda edges: _distinct((etype, ids) for etype, ids in edges.items())
    if rule.exclude == "reverse_id":
        tables = _reverse_tables(g, rule.reverse_eids)
        return lambda edges: _with_reverse(edges, {etype: (etype, table) for etype, table in tables.items()})
    if rule.exclude == "reverse_types":
        types = _reverse_types(g, rule.reverse_etypes)
        found = {etype: (back, _looked_up(_mirrored(g, etype, back))) for etype, back in types.items()}
        return lambda edges: _with_reverse(edges, found)
    return lambda edges: _asked(g, rule.exclude, edges)


def _mirrored(g: DistGraph, etype: EdgeType, back: EdgeType) -> DistTensor:
    """Return the reverse edges: those at the same places of the source's list, where these lead back.

    Where they do not, as in parts that DGL has cut, whose list is of the cut graph: those with the same ends.
    Collective.
    """
    placed = reverse_edge_ids(g, etype, reverse_etype=back, by="position")
    first, last = placed.local_range
    ids = np.arange(first, min(last, first + _CHECKED))
    ends, there = g.find_edges(ids, etype), g.find_edges(placed[ids], back)
    wrong = int((ends[0] != there[1]).sum() + (ends[1] != there[0]).sum())
    if gather_int64([wrong], g.session).any():
        return reverse_edge_ids(g, etype, reverse_etype=back)
    return placed


def check_reverse(g: DistGraph, rule: ExcludeRule, edges: Edges) -> None:
    """Look up the ends of some of a rank's ``edges`` and of what is given as their reverse.

    Raises:
        ConfigError: an edge's reverse does not lead from its destination to its source. That is what ids of
            the unpartitioned graph look like here.
    """
    if rule.exclude != "reverse_id":
        return
    for etype, table in _reverse_tables(g, rule.reverse_eids).items():
        ids = edges.get(etype, np.empty(0, np.int64))[:_CHECKED]
        reverse = table(ids)
        ids, reverse = ids[reverse != NO_REVERSE], reverse[reverse != NO_REVERSE]
        sources, destinations = g.find_edges(ids, etype)
        back_sources, back_destinations = g.find_edges(reverse, etype)
        wrong = ((sources != back_destinations) | (destinations != back_sources)).nonzero()[:, 0]
        if len(wrong):
            at = int(wrong[0])
            edge, back = (
                f"{sources[at]} -> {destinations[at]}",
                f"{back_sources[at]} -> {back_destinations[at]}",
            )
            raise ConfigError(
                f"reverse_eids[{ids[at]}] of {etype} is {reverse[at]}, but edge {ids[at]} is {edge} and edge "
                f"{reverse[at]} is {back}; ids change when a graph is partitioned: pass "
                "reverse_eids=dx.reverse_edge_ids(g), or a function as exclude= if this is meant"
            )


def _with_reverse(edges: Edges, reverse: Mapping[EdgeType, tuple[EdgeType, ReverseOf]]) -> Excluded:
    found = list(edges.items())
    for etype, (back, table) in reverse.items():
        if etype in edges and len(edges[etype]):
            ids = table(edges[etype])
            found.append((back, ids[ids != NO_REVERSE]))
    return _distinct(found)


def _distinct(found: Any) -> dict[EdgeType, Array]:
    together: dict[EdgeType, list[Array]] = {}
    for etype, ids in found:
        together.setdefault(etype, []).append(ids)
    return {etype: np.unique(np.concatenate(pieces)) for etype, pieces in together.items()}


def _asked(g: DistGraph, exclude: Callable[[Any], Any], edges: Edges) -> Excluded:
    """Return what the user's function says, called as DGL calls it: ids alone where there is one type."""
    given = {etype: torch.from_numpy(ids) for etype, ids in edges.items() if len(ids)}
    if not given:
        return NOTHING_EXCLUDED
    answer = exclude(given if len(g.canonical_etypes) > 1 else next(iter(given.values())))
    if answer is None:
        return NOTHING_EXCLUDED
    counts = {etype: g.num_edges(etype) for etype in g.canonical_etypes}
    return _distinct(by_type(answer, counts, "edge").items())


def _reverse_types(g: DistGraph, given: Any) -> dict[EdgeType, EdgeType]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"reverse_etypes is {given!r}; give {{edge type: type of its reverse edges}}")
    types = {g.to_canonical_etype(key): g.to_canonical_etype(value) for key, value in given.items()}
    for etype, back in types.items():
        if (back[0], back[2]) != (etype[2], etype[0]) or etype == back:
            raise ConfigError(
                f"reverse_etypes says {back} is the reverse of {etype}; it must be another type, from "
                f"{etype[2]!r} to {etype[0]!r}"
            )
        if g.num_edges(etype) != g.num_edges(back):
            raise ConfigError(
                f"reverse_etypes: {etype} has {g.num_edges(etype)} edges and {back} {g.num_edges(back)}, but "
                "edge i of one must be the reverse of edge i of the other; pass as exclude= a function that "
                "uses dx.reverse_edge_ids(g, etype, reverse_etype=...)"
            )
    return types


def _reverse_tables(g: DistGraph, given: Any) -> dict[EdgeType, ReverseOf]:
    if not isinstance(given, Mapping):
        if len(g.canonical_etypes) != 1:
            raise ConfigError(
                f"reverse_eids is one list, and the graph has the edge types {', '.join(g.etypes)}; give a "
                "dict of lists by edge type"
            )
        given = {g.canonical_etypes[0]: given}
    return {(etype := g.to_canonical_etype(key)): _table(g, etype, reverse) for key, reverse in given.items()}


def _table(g: DistGraph, etype: EdgeType, reverse: Any) -> ReverseOf:
    count = g.num_edges(etype)
    shape, kind = (
        (reverse.shape, str(reverse.dtype).removeprefix("torch."))
        if isinstance(reverse, DistTensor | Tensor)
        else (np.shape(reverse), str(np.asarray(reverse).dtype))
    )
    if tuple(shape) != (count,) or kind not in ("int32", "int64"):
        raise ConfigError(
            f"reverse_eids of {etype} are {kind} of shape {tuple(shape)}; give int64 of shape ({count},), "
            "one per edge: dx.reverse_edge_ids(g) makes them"
        )
    if isinstance(reverse, DistTensor):
        return _looked_up(reverse)
    ids = as_array(reverse).astype(np.int64)
    real = ids[ids != NO_REVERSE]
    try:
        as_ids(real, count, f"the edges {etype} (reverse_eids)")
    except IndexError as error:
        raise ConfigError(f"reverse_eids: {error}; -1 stands for none") from None
    return lambda edges: ids[edges]


def _looked_up(reverse: DistTensor) -> ReverseOf:
    store, key = reverse.kvstore, reverse.kvstore_key
    return lambda edges: store.pull(key, edges, phase="sampling").numpy().astype(np.int64, copy=False)
