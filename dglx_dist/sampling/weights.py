"""Edge columns that say how likely each edge is, checked when a loader opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dtypes import numpy_view
from dglx_dist.graph.structure import Structure
from dglx_dist.records import Array, ColumnInfo, EdgeType
from dglx_dist.sampling.columns import edge_keys

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


def all_weights(g: DistGraph, etype: EdgeType, name: str) -> Array:
    """Return the (E,) float32 weights of all edges of a type, in this rank's memory.

    Raises:
        ConfigError: there is no such column, or it is not one finite number of at least 0 per edge.
    """
    key = edge_keys(g, etype, [name], "prob")[name]
    pieces, info = g.kvstore.shards(key), g.kvstore.column(key).info
    if len(pieces) == 1 and len(pieces[0][1]) == g.num_edges(etype):
        return _checked(pieces[0][1], info, name, 0)
    rows = g.kvstore.pull(key, np.arange(g.num_edges(etype)), phase="structure")
    return _checked(numpy_view(rows), info, name, 0)


def shard_weights(g: DistGraph, structure: Structure, name: str) -> dict[int, Array]:
    """Return first node of each of this server's shards -> (E,) float32 weights of its edges.

    Raises:
        ConfigError: as :func:`all_weights`.
    """
    key = edge_keys(g, structure.etype, [name], "prob")[name]
    shards, info = g.kvstore.shards(key), g.kvstore.column(key).info
    by_edge = {first: _checked(rows, info, name, first) for first, rows in shards}
    return {shard.first_node: by_edge[shard.first_edge] for shard in structure.shards if len(shard.indices)}


def check_every_type_has(g: DistGraph, name: str) -> None:
    """Raise ConfigError unless every edge type has the column ``name``, naming those that lack it."""
    lacking = [etype for etype in g.canonical_etypes if name not in g.edges[etype].data]
    if lacking:
        raise ConfigError(
            f"prob names {name!r}, and {len(lacking)} of {len(g.canonical_etypes)} edge types have no such "
            f"column: {', '.join(map(str, lacking))} (the first has {sorted(g.edges[lacking[0]].data)}); "
            "give them one, of ones where all edges are alike"
        )


def _checked(rows: Array, info: ColumnInfo, name: str, first_edge: int) -> Array:
    """Return weights as float32; ``rows`` are as a column holds them: bfloat16 as its bits.

    Raises:
        ConfigError: they are not one number per edge, or one is negative or NaN.
    """
    if rows.ndim != 1 or rows.dtype.kind not in "bfiu":
        raise ConfigError(
            f"edata[{name!r}] has rows of shape {rows.shape[1:]} and dtype {rows.dtype}; a probability or "
            "mask is one number per edge"
        )
    if info.dtype == "bfloat16":
        # Its bits are the upper half of those of the float32 with the same value.
        weights = (rows.astype(np.uint32) << 16).view(np.float32)
    else:
        weights = rows.astype(np.float32)
    bad = _first_bad(weights)
    if bad >= 0:
        raise ConfigError(
            f"edata[{name!r}] is {weights[bad]} at edge {first_edge + bad}; give finite weights of at least 0"
        )
    return weights


@njit(cache=True, nogil=True)
def _first_bad(weights: Array) -> int:
    for i in range(len(weights)):
        if not (weights[i] >= 0 and weights[i] < np.inf):
            return i
    return -1
