"""Feature columns in fewer bits: half the disk, memory and wire for three or eight digits less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from dglx_dist.errors import ConfigError
from dglx_dist.records import LABEL, Array, EdgeType, NodeColumn, RawGraph, SparseRows
from dglx_dist.registry import did_you_mean

FeatureDtype: TypeAlias = str | Mapping[str, str]
"""``float16``, ``bfloat16`` or ``float32`` for all feature columns, or column name to one of them."""

ALLOWED = ("float16", "bfloat16", "float32")
CHUNK_VALUES = 1 << 22


def check_feature_dtype(wanted: FeatureDtype | None) -> None:
    """Raise ConfigError when a dtype is not one that features can be stored in on request."""
    named = {} if wanted is None else wanted if isinstance(wanted, Mapping) else {"all features": wanted}
    for column, dtype in named.items():
        if dtype not in ALLOWED:
            raise ConfigError(f"the feature dtype of {column} is {dtype!r}; give one of {', '.join(ALLOWED)}")


def in_precision(
    graph: RawGraph, wanted: FeatureDtype
) -> tuple[RawGraph, frozenset[tuple[str | EdgeType, str]]]:
    """Return ``graph`` with feature columns in another floating-point type, rounded to the nearest.

    One dtype for all goes to every floating-point column of nodes and edges with a row of one or more
    dimensions, ``label`` excepted; single numbers per node or edge (weights, times) keep their type unless
    they are named. Needs the new columns beside the old ones.

    Args:
        graph: What to convert; it is not changed.
        wanted: Dtype, or column name to dtype.

    Returns:
        The graph, and (type, column) of each column that now holds bfloat16 bits as uint16.

    Raises:
        ConfigError: no column has a name, it is not floating point, or a finite value would become infinite:
            the message names its column and row.
    """
    check_feature_dtype(wanted)
    if isinstance(wanted, Mapping):
        _check_names(graph, wanted)
    bits: set[tuple[str | EdgeType, str]] = set()
    node_data: dict[str, dict[str, NodeColumn]] = {}
    for ntype, columns in graph.node_data.items():
        node_data[ntype] = dict(columns)
        for name, dtype in _chosen(columns, wanted).items():
            what = f"node data {name!r}" + (f" of {ntype!r}" if len(graph.num_nodes) > 1 else "")
            node_data[ntype][name] = _converted(columns[name], dtype, what)
            bits |= {(ntype, name)} if dtype == "bfloat16" else set()
    edge_data: dict[EdgeType, dict[str, Array]] = {}
    for etype, values in graph.edge_data.items():
        edge_data[etype] = dict(values)
        for name, dtype in _chosen(values, wanted).items():
            what = f"edge data {name!r}" + (f" of {etype}" if len(graph.edges) > 1 else "")
            edge_data[etype][name] = _narrowed(values[name], dtype, what, None)
            bits |= {(etype, name)} if dtype == "bfloat16" else set()
    return replace(graph, node_data=node_data, edge_data=edge_data), frozenset(bits)


def _chosen(columns: Mapping[str, Any], wanted: FeatureDtype) -> dict[str, str]:
    if isinstance(wanted, Mapping):
        return {name: wanted[name] for name, column in columns.items() if name in wanted}
    return {
        name: wanted
        for name, column in columns.items()
        if column.dtype.kind == "f" and len(column.shape) > 1 and name != LABEL
    }


def _check_names(graph: RawGraph, wanted: Mapping[str, str]) -> None:
    dtypes = {
        name: column.dtype
        for columns in (*graph.node_data.values(), *graph.edge_data.values())
        for name, column in columns.items()
    }
    for name in wanted:
        if name not in dtypes:
            raise ConfigError(
                f"feature_dtype names {name!r}, which {graph.name} does not have"
                f"{did_you_mean(name, dtypes)} (columns: {', '.join(sorted(dtypes)) or 'none'})"
            )
        if dtypes[name].kind != "f":
            raise ConfigError(
                f"feature_dtype names {name!r}, which is {dtypes[name]}; only floating-point columns are "
                "stored in another precision"
            )


def _converted(column: NodeColumn, dtype: str, what: str) -> NodeColumn:
    if isinstance(column, SparseRows):
        # Zero is all zero bits in every type, so what is not stored stays zero.
        return replace(column, values=_narrowed(column.values, dtype, what, column.indptr))
    return _narrowed(column, dtype, what, None)


def _narrowed(values: Array, dtype: str, what: str, indptr: Array | None) -> Array:
    """Convert (n, ...) values a piece at a time; ``indptr`` tells the rows of sparse ones."""
    if values.dtype.name == dtype:
        return values
    out = np.empty(values.shape, dtype=np.uint16 if dtype == "bfloat16" else dtype)
    width = max(int(np.prod(values.shape[1:])), 1)
    step = max(CHUNK_VALUES // width, 1)
    for first in range(0, len(values), step):
        piece = np.asarray(values[first : first + step])
        target = out[first : first + step]
        if dtype == "bfloat16":
            _round_to_bfloat16(_single_bits(piece), target.reshape(-1))
            is_finite = (target & 0x7F80) != 0x7F80
        else:
            target[...] = _quietly(piece, dtype)
            is_finite = np.isfinite(target)
        lost = ~is_finite & np.isfinite(piece)
        if lost.any():
            place = np.argwhere(lost)[0]
            row = first + int(place[0])
            if indptr is not None:
                row = int(np.searchsorted(indptr, row, side="right")) - 1
            raise ConfigError(
                f"{what} has {piece[tuple(place)]} in row {row}, too large for {dtype}; store it as "
                f"{'bfloat16 or float32' if dtype == 'float16' else 'float32'}, or scale the column"
            )
    return out


def _single_bits(values: Array) -> Array:
    """Return the bits of float32, such that rounding them once more rounds ``values`` to the nearest.

    What float32 cannot hold is cut, not rounded, and gets an odd last bit: it is then on the right side of
    any tie of 16 bits.
    """
    single = np.ascontiguousarray(_quietly(values, np.float32))
    bits = single.view(np.uint32)
    if values.dtype.itemsize > single.itemsize:
        rounded = (single != values) & np.isfinite(values)
        bits -= rounded & (np.abs(single) > np.abs(values))
        bits |= rounded
    return bits.reshape(-1)


def _quietly(values: Array, dtype: Any) -> Array:
    """Convert; what becomes infinite is looked for afterwards."""
    with np.errstate(over="ignore"):
        return values.astype(dtype)


@njit(cache=True, nogil=True)
def _round_to_bfloat16(single: Array, out: Array) -> None:
    """Round the bits of float32 to the nearest 16, ties to even; not-a-number stays one."""
    for i in range(len(single)):
        bits = single[i]
        if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            out[i] = np.uint16((bits >> np.uint32(16)) | np.uint32(0x0040))
        else:
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            out[i] = np.uint16((np.uint64(bits) + np.uint64(0x7FFF) + np.uint64(odd)) >> np.uint64(16))
