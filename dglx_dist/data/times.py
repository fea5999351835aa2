"""Times on edges and nodes, and in-edges sorted by time.

How graphs with times work:

1. A time is a number in an edge or node column, int64 or float64. ISO dates become seconds since 1970 in UTC.
2. Each time has an int64 key with the same order (:func:`to_keys`), so that one kernel serves both dtypes. 3.
A :class:`TimeOrder` lists each node's in-edges by (time, edge id). Edge ids do not change. Each part
   has one, in the cache beside the dataset. It is memory-mapped, has checksums and can be made again.
4. The last moment before a seed's time is found by binary search, in time log(in-degree). 5. With node times,
an edge exists from the later of its own time and its source's time. The order includes
   that, so a server needs no times for another server's nodes while it samples.
6. Edges without a time (NaN, or the smallest int64) are never sampled. Types without times always exist. 7.
Every seed has its own tree. A row in a block is a pair of tree and node, at its seed's time. 8. Draws are
keyed by (seed, epoch, hop, edge type, seed node, seed time, node), on any number of ranks. 9. Rows on other
servers are requested hop by hop, with their tree's key and time. 10. Kernels are in ``dataloading/trees.py``.
Ordinary sampling with disjoint trees uses them without times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from dglx_dist.data.storage.arrays import ArrayFolder
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array

NEVER = int(np.iinfo(np.int64).max)
"""Key for a missing time. No seed has a key as large."""
MISSING = int(np.iinfo(np.int64).min)
"""Missing time in an integer column. NumPy's NaT has the same bits."""

TimeDtype: TypeAlias = str
"""``int64`` or ``float64``."""


def find_time_dtype(dtype: str, row_shape: tuple[int, ...], description: str) -> TimeDtype:
    """Return the dtype in which a column's times are compared.

    Raises ConfigError unless ``dtype`` and ``row_shape`` are for one number per row.
    """
    kind = "" if dtype == "bfloat16" else np.dtype(dtype).kind
    if row_shape or kind not in ("i", "u", "f") or dtype == "uint64":
        raise ConfigError(
            f"{description} has rows of shape {row_shape} and dtype {dtype}, but a time is one number per "
            "row. Store it as int64 or float64, for example as seconds since 1970."
        )
    return "float64" if kind == "f" else "int64"


def to_keys(times: Array) -> Array:
    """Return (n,) int64 keys that are ordered like the (n,) ``times``, integers or floats.

    Missing times become :data:`NEVER`. Negative zero equals zero.
    """
    if times.dtype.kind != "f":
        keys = times.astype(np.int64)
        keys[keys == MISSING] = NEVER
        return keys

    # Bits of positive floats are ordered like integers. Bits of negative floats are ordered in reverse.
    bits = (times.astype(np.float64) + 0.0).view(np.int64)
    keys = bits ^ ((bits >> 63) & NEVER)
    keys[np.isnan(times)] = NEVER
    return keys


def to_times(keys: Array, dtype: TimeDtype) -> Array:
    """Convert ``keys`` to (n,) times. This inverts :func:`to_keys` for times that exist."""
    return keys if dtype == "int64" else (keys ^ ((keys >> 63) & NEVER)).view(np.float64)


def find_moment_before(times: Array) -> Array:
    """Return the largest time before each of the (n,) ``times``, integers or floats."""
    # Keys are not decremented, because positive and negative zero share a key.
    return np.nextafter(times, -np.inf) if times.dtype.kind == "f" else times - 1


def subtract_window(keys: Array, window: float, dtype: TimeDtype) -> Array:
    """Return the keys for times that are ``window`` before the times that ``keys`` stand for."""
    if dtype == "float64":
        return to_keys(to_times(keys, dtype) - window)
    whole_window = min(int(window), NEVER)
    return np.where(keys <= MISSING + whole_window, MISSING + 1, keys - whole_window)


@dataclass(frozen=True, kw_only=True)
class TimeOrder:
    """In-edges sorted by time within each destination. Both arrays have their structure's length E."""

    positions: Array
    """(E,) int32 or int64 positions in the structure. At equal times, they are ascending."""
    keys: Array
    """(E,) int64 time keys in this order. Missing times come last."""


@njit(cache=True, nogil=True)
def _sort_rows(indptr: Array, keys: Array, positions: Array, sorted_keys: Array) -> None:
    for row in range(len(indptr) - 1):
        first, last = indptr[row], indptr[row + 1]
        is_sorted = True
        for edge in range(first, last):
            positions[edge] = edge
            sorted_keys[edge] = keys[edge]
            is_sorted &= edge == first or keys[edge - 1] <= keys[edge]
        if not is_sorted:
            # A merge sort is stable, so edges with equal times keep their order.
            order = np.argsort(keys[first:last], kind="mergesort")
            for i in range(last - first):
                positions[first + i] = first + order[i]
                sorted_keys[first + i] = keys[first + order[i]]


def sort_by_time(indptr: Array, keys: Array) -> TimeOrder:
    """Sort edges by time. They have (n + 1,) ``indptr`` and (E,) int64 ``keys``."""
    dtype = np.int32 if len(keys) <= np.iinfo(np.int32).max else np.int64
    positions = np.empty(len(keys), dtype)
    sorted_keys = np.empty(len(keys), np.int64)
    _sort_rows(indptr, keys, positions, sorted_keys)
    return TimeOrder(positions=positions, keys=sorted_keys)


def find_or_make_order(
    folder: ArrayFolder, num_edges: int, metadata: Mapping[str, Any], make: Callable[[], TimeOrder]
) -> TimeOrder:
    """Open the time order in ``folder``, or make it and store it there.

    A damaged folder is logged and replaced. If it cannot be written, a warning is logged, and the order stays
    in memory. Raises StorageError for other disk errors.
    """

    def check(arrays: Mapping[str, Array]) -> None:
        # Compiled code reads the arrays without checks, and anyone may have written the files.
        positions, keys = arrays["positions"], arrays["keys"]
        is_valid = keys.dtype == np.int64 and positions.dtype in (np.int32, np.int64)
        if not is_valid or positions.shape != (num_edges,) or keys.shape != (num_edges,):
            raise ValueError(f"it is not the order of {num_edges} edges")
        if num_edges and not 0 <= positions.min() <= positions.max() < num_edges:
            raise ValueError("a position is out of range")

    stored = folder.find(metadata, check=check)
    if stored is not None:
        return TimeOrder(positions=stored[1]["positions"], keys=stored[1]["keys"])
    order = make()
    arrays = {"positions": order.positions, "keys": order.keys}
    if folder.save(arrays, metadata, "the order by time") and (stored := folder.find(metadata, check=check)):
        return TimeOrder(positions=stored[1]["positions"], keys=stored[1]["keys"])
    return order
