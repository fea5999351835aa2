"""What each edge weighs in a sum over in-edges: by the degrees of its ends and by a column of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

Power: TypeAlias = Literal["one", "root", "whole"]
"""Divided by nothing, by the square root of a degree, or by the degree."""

_EXPONENT = {"one": 0.0, "root": -0.5, "whole": -1.0}


@dataclass(frozen=True, kw_only=True)
class EdgeFactor:
    """The weight of the edge from u to v; a degree of 0 counts as 1."""

    target: Power = "one"
    """By the in-degree of v."""
    source: Power = "one"
    """By the out-degree of u."""
    column: str | None = None
    """Edge data by which it is multiplied."""

    @property
    def is_one(self) -> bool:
        """Whether every edge weighs 1."""
        return self == EdgeFactor()


FACTOR_OF_NORM = {
    "sum": EdgeFactor(),
    "none": EdgeFactor(),
    "mean": EdgeFactor(target="whole"),
    "right": EdgeFactor(target="whole"),
    "left": EdgeFactor(source="whole"),
    "both": EdgeFactor(target="root", source="root"),
}
"""By the names that ``DeclaredStage.around`` and ``dgl.nn.GraphConv`` use."""


def values_of(factor: EdgeFactor, g: DistGraph, nodes: Array, dtype: np.dtype[np.floating]) -> Array:
    """Return what the in-edges of ``nodes`` weigh, in the order in which the graph has them.

    Asks other servers for degrees of their nodes and for edge data; not collective.

    Args:
        factor: By what.
        g: Of one edge type.
        nodes: (K,) int64 ids, this server's.
        dtype: Of the result.

    Returns:
        (E,): the in-edges of the first node, then of the second, and so on.

    Raises:
        ConfigError: the edge data is not one number per edge.
    """
    (etype,) = g.canonical_etypes
    edges = g.structure(etype).ask("in_edges", nodes)
    degrees = np.diff(edges.indptr)
    values = np.repeat(power_of(degrees, factor.target), degrees)
    if factor.source != "one":
        sources, place = np.unique(edges.sources, return_inverse=True)
        out_degrees = g.out_degrees(torch.from_numpy(sources)).numpy()
        values *= power_of(out_degrees, factor.source)[place]
    if factor.column is not None:
        values *= _column(g, factor.column, edges.edge_ids)
    return values.astype(dtype)


def power_of(degrees: Array, power: Power) -> Array:
    """Return (n,) float64: what ``power`` of (n,) degrees multiplies by."""
    found: Array = np.power(np.maximum(degrees, 1).astype(np.float64), _EXPONENT[power])
    return found


def _column(g: DistGraph, name: str, edge_ids: Array) -> Array:
    rows = g.edata[name][torch.from_numpy(edge_ids)].to(torch.float64).numpy()
    if rows.size != len(edge_ids):
        raise ConfigError(
            f"the edge data {name!r} has {rows.shape[1:]} numbers per edge; a layer takes one, so name a "
            "column of one number per edge"
        )
    return rows.reshape(-1)
