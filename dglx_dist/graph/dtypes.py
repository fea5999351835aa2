"""Torch's dtypes by name, and NumPy views of tensors whose dtype NumPy does not have."""

from __future__ import annotations

import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, ColumnInfo
from dglx_dist.storage.columns import DTYPES, numpy_dtype

_TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a column's ``name``.

    Raises:
        ConfigError: no column has such a dtype.
    """
    if name not in _TORCH:
        raise ConfigError(f"a column cannot have dtype {name!r}; use one of {', '.join(_TORCH)}")
    return _TORCH[name]


def column_info(dtype: torch.dtype | str, row_shape: tuple[int, ...]) -> ColumnInfo:
    """Describe a column of ``dtype``, given as torch's or by name.

    Raises:
        ConfigError: no column can have that dtype.
    """
    name = str(dtype).removeprefix("torch.")
    torch_dtype(name)
    return ColumnInfo(dtype=name, row_shape=row_shape)


def empty_rows(count: int, info: ColumnInfo) -> Tensor:
    """Return an uninitialised (``count``, *row) tensor."""
    return torch.empty((count, *info.row_shape), dtype=torch_dtype(info.dtype))


def numpy_view(rows: Tensor) -> Array:
    """See a contiguous CPU tensor as an array, bfloat16 as uint16, without a copy."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return rows.numpy()


def tensor_view(rows: Array, info: ColumnInfo) -> Tensor:
    """See an array, as a column holds it, as a tensor of the column's dtype, without a copy."""
    if info.dtype == "bfloat16":
        return torch.from_numpy(rows.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(rows)
