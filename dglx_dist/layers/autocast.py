"""DGL's operators under ``torch.autocast`` on CPUs.

DGL casts the operands of its kernels under the autocast of CUDA, but not of CPUs. There a kernel gets rows in
bfloat16 from a linear layer, edge weights or attention in float32, and refuses them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from dgl.backend.pytorch import sparse
from torch import Tensor
from torch.amp.autocast_mode import _cast

_DGL_CAST = sparse._cast_if_autocast_enabled


@functools.cache
def install() -> None:
    """Make DGL cast operands of different dtypes under autocast on CPUs; equal ones stay as they are."""
    sparse._cast_if_autocast_enabled = _cast_operands


def _cast_operands(*operands: Any) -> Any:
    if not torch.is_autocast_enabled("cpu"):
        return _DGL_CAST(*operands)
    floats = [one for one in operands if isinstance(one, Tensor) and one.is_floating_point()]
    if len({one.dtype for one in floats}) > 1:
        operands = _cast(operands, "cpu", torch.get_autocast_dtype("cpu"))
    return _DGL_CAST(*operands)
