"""Conversion of row indices of any kind to checked int64 ids."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from torch import Tensor

from dglx_dist.graph.row_kernels import check_ids
from dglx_dist.internals.pytorch import ids_on_host
from dglx_dist.records import Array

Ids: TypeAlias = Tensor | Array | Sequence[int] | int | slice
"""Integers, a list of them, one integer, a slice, or a mask over all rows: bool, or uint8 in a tensor."""


def as_array(values: Tensor | Array | Sequence[int] | int) -> Array:
    """Return ``values`` as a NumPy array, without a copy where possible."""
    if isinstance(values, Tensor):
        return ids_on_host(values).numpy()
    return np.asarray(values)


def as_ids(index: Ids, count: int, what: str) -> Array:
    """Return the ids that ``index`` names, each in [0, ``count``); raises as :func:`integer_ids`.

    Raises:
        IndexError: an id is out of range; the message has the first one and its position.
    """
    ids = integer_ids(index, count, what)
    check_ids(ids, count, what)
    return ids


def integer_ids(index: Ids, count: int, what: str) -> Array:
    """Return the (K,) int64 ids, in any range, that ``index`` names among the ``count`` rows of ``what``.

    Raises:
        IndexError: a mask has another length, or ``index`` is not one-dimensional or not of integers, or
            its dtype is uint8 and it could be a mask or ids.
    """
    if isinstance(index, slice):
        return np.arange(*index.indices(count), dtype=np.int64)
    ids = np.atleast_1d(as_array(index))
    if ids.dtype == np.uint8 and ids.ndim == 1:
        ids = _read_bytes(ids, count, what, is_tensor=isinstance(index, Tensor))
    if ids.ndim != 1:
        raise IndexError(f"{what} is indexed with an array of shape {ids.shape}; give one of one dimension")
    if ids.dtype == np.bool_:
        if len(ids) != count:
            raise IndexError(f"{what} has {count} rows but the mask has {len(ids)} elements")
        return np.flatnonzero(ids)
    if len(ids) == 0:
        return np.empty(0, dtype=np.int64)
    if ids.dtype.kind not in "iu":
        raise IndexError(f"{what} is indexed with {ids.dtype} values; give integers or a bool mask")
    return np.ascontiguousarray(ids, dtype=np.int64)


def _read_bytes(values: Array, count: int, what: str, *, is_tensor: bool) -> Array:
    """Return a uint8 index as a bool mask (torch's reading, for tensors) or as ids (NumPy's, for arrays)."""
    is_mask_like = len(values) == count and (is_tensor or values.max(initial=0) <= 1)
    if is_tensor != is_mask_like:
        raise IndexError(
            f"{what} has {count} rows and is indexed with {len(values)} uint8 values, which torch reads as a "
            "mask and NumPy as ids; convert a mask to bool, or ids to int64"
        )
    return values.astype(np.bool_) if is_tensor else values


def as_ids_or_all(index: Ids | None, count: int, what: str) -> Array:
    """Return the ids that ``index`` names, as :func:`as_ids`; all for None or DGL's ``"__ALL__"``."""
    if index is None or isinstance(index, str):
        return np.arange(count, dtype=np.int64)
    return as_ids(index, count, what)
