"""Compiled sums of rows: of repeated ids before they are sent, and onto the rows that are there."""

from __future__ import annotations

import numpy as np
from numba import njit

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dtypes import numpy_view, tensor_view, torch_dtype
from dglx_dist.graph.gather import gather_rows, scatter_rows, take_rows
from dglx_dist.graph.remote_plan import RemotePlan
from dglx_dist.records import Array, ColumnInfo

HALF = ("float16", "bfloat16")
"""Dtypes whose rows are added in float32 and rounded once, to the nearest even."""


def check_summable(name: str, info: ColumnInfo) -> None:
    """Raise ConfigError when rows of that dtype have no sum."""
    if info.dtype == "bool":
        raise ConfigError(f"{name!r} holds bool, which cannot be added; push it without accumulate=True")


def sum_repeated(rows: Array, plan: RemotePlan, info: ColumnInfo) -> Array:
    """Return one row per slot of ``plan``: the sum of the rows at its positions, in the order given.

    Args:
        rows: (K, *row) in ``info``'s dtype, C-contiguous; bfloat16 as uint16.
        plan: Over the K ids that the rows are for.
        info: Dtype and row shape.

    Returns:
        (slots, *row) in the same dtype; integers wrap around.
    """
    shape = (len(plan.ids), *rows.shape[1:])
    if len(plan.positions) == len(plan.ids):
        return take_rows(rows, plan.positions)  # nothing repeats
    given = _widened(rows, info)
    sums = np.empty(shape, given.dtype)
    if sums.size:
        _sum(given.reshape(len(given), -1), plan.starts, plan.positions, sums.reshape(len(sums), -1))
    return _rounded(sums, info)


def add_rows(target: Array, first: int, ids: Array, rows: Array, info: ColumnInfo) -> None:
    """Add ``rows[k]`` to ``target[ids[k] - first]``. One thread of one process at a time per row.

    Args:
        target: (n, *row), C-contiguous and writable: the rows with ids ``first`` to ``first + n - 1``.
        first: Id of the first row of ``target``.
        ids: (K,) int64, distinct; those of other shards are passed over.
        rows: (K, *row) in the same dtype.
        info: Dtype and row shape.
    """
    here = (ids >= first) & (ids < first + len(target))
    if not here.all():
        ids, rows = ids[here], rows[here]
    if rows.size == 0:
        return
    if info.dtype not in HALF:
        _add(target.reshape(len(target), -1), first, ids, rows.reshape(len(rows), -1))
        return
    before = np.empty_like(rows)
    gather_rows(target, first, ids, before)
    scatter_rows(_rounded(_widened(before, info) + _widened(rows, info), info), target, first, ids)


def _widened(rows: Array, info: ColumnInfo) -> Array:
    """See rows as numbers that can be added: half precision as float32."""
    return tensor_view(rows, info).float().numpy() if info.dtype in HALF else rows


def _rounded(sums: Array, info: ColumnInfo) -> Array:
    if info.dtype not in HALF:
        return sums
    wide = ColumnInfo(dtype="float32", row_shape=info.row_shape)
    return numpy_view(tensor_view(sums, wide).to(torch_dtype(info.dtype)))


@njit(cache=True, nogil=True)
def _sum(rows: Array, starts: Array, positions: Array, out: Array) -> None:
    columns = rows.shape[1]
    for slot in range(out.shape[0]):
        at = np.uint64(positions[starts[slot]])
        to = np.uint64(slot)
        for column in range(columns):
            out[to, np.uint64(column)] = rows[at, np.uint64(column)]
        for place in range(starts[slot] + 1, starts[slot + 1]):
            at = np.uint64(positions[place])
            for column in range(columns):
                out[to, np.uint64(column)] += rows[at, np.uint64(column)]


@njit(cache=True, nogil=True)
def _add(target: Array, first: int, ids: Array, rows: Array) -> None:
    columns = rows.shape[1]
    for k in range(ids.shape[0]):
        row = np.uint64(ids[k] - first)
        for column in range(columns):
            target[row, np.uint64(column)] += rows[np.uint64(k), np.uint64(column)]
