"""Bringing the columns of any source into the names and dtypes of a raw graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dglx_dist.errors import DatasetError
from dglx_dist.records import FEATURE, LABEL, SPLITS, Array, NodeColumn, SparseRows

_OTHER_NAMES = {"features": FEATURE, "feats": FEATURE, "labels": LABEL}


def standard_columns(
    columns: Mapping[str, NodeColumn], where: str, *, rename: bool = True
) -> dict[str, NodeColumn]:
    """Rename and cast columns: features float, labels int64, splits boolean; others stay as they are.

    ``features`` and ``feats`` become ``feat``, ``labels`` becomes ``label``, unless that name is taken.
    Whole-number features become float32, since that is what a model multiplies.

    Args:
        columns: name -> (N, ...).
        where: What messages start with.
        rename: False for a script that goes on with its own columns: names and dtypes stay, but for splits
            and for labels that number classes, or that would be refused for their gaps.

    Raises:
        DatasetError: a split holds something else than 0 and 1, or a label is not a whole number.
    """
    standard: dict[str, NodeColumn] = {}
    for given, column in columns.items():
        name = _OTHER_NAMES.get(given, given)
        if not rename or (name != given and name in columns):
            name = given
        if isinstance(column, SparseRows):
            standard[name] = column
        elif name in SPLITS:
            standard[name] = _as_mask(column, name, where)
        elif name == LABEL and (rename or column.dtype.kind != "f" or np.isnan(column).any()):
            standard[name] = _as_label(column, where)
        elif rename and name == FEATURE and column.dtype.kind in "iub":
            standard[name] = column.astype(np.float32)
        else:
            standard[name] = column
    return standard


def count_classes(columns: Mapping[str, NodeColumn]) -> int | None:
    """Return classes of the column ``label``: largest + 1, or its width; None without any label."""
    label = columns.get(LABEL)
    if label is None or isinstance(label, SparseRows) or label.size == 0:
        return None
    if label.ndim > 1:
        return int(label.shape[1])
    if label.dtype.kind not in "iu":
        return None
    largest = int(label.max())
    return largest + 1 if largest >= 0 else None


def masks_of_split(split_of: Array) -> dict[str, Array]:
    """Return the three masks of ``split_of`` ((N,) 0 = train, 1 = validation, 2 = test, else none)."""
    return {name: split_of == code for code, name in enumerate(SPLITS)}


def _as_mask(column: Array, name: str, where: str) -> Array:
    if column.dtype == np.bool_:
        return column
    odd = (column != 0) & (column != 1)
    if odd.any():
        row = int(np.argmax(odd.reshape(len(odd), -1).any(axis=1)))
        raise DatasetError(
            f"{where}: column {name!r}, row {row}: {column[row]} is neither 0 nor 1 (false nor true)"
        )
    return column.astype(np.bool_)


def _as_label(column: Array, where: str) -> Array:
    if column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    if column.dtype.kind in "iub":
        return column.astype(np.int64) if column.ndim == 1 else column
    if column.dtype.kind != "f":
        raise DatasetError(f"{where}: column {LABEL!r} must hold numbers; it is {column.dtype}")
    if column.ndim > 1:
        return column
    # A source with gaps stores labels as floating point, with NaN where there is none.
    known = np.nan_to_num(column, nan=-1.0)
    odd = known != np.floor(known)
    if odd.any():
        row = int(np.argmax(odd))
        raise DatasetError(f"{where}: column {LABEL!r}, row {row}: {column[row]} is not a whole number")
    return known.astype(np.int64)
