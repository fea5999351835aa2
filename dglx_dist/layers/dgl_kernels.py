"""Corrections of DGL's operators on CPUs.

- DGL casts the operands of its kernels under the autocast of CUDA, but not of CPUs. There a kernel gets rows
  in bfloat16 from a linear layer, edge weights or attention in float32, and refuses them.
- On a graph without edges, maxima and minima are zeros, whose gradient DGL gives to node 0 (an error if there
  is none); it is zero. A rank's block, or one relation of it, may have no edges where the whole graph has.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from dgl.backend.pytorch import sparse
from torch import Tensor
from torch.amp.autocast_mode import _cast

_DGL_CAST = sparse._cast_if_autocast_enabled


@functools.cache
def correct() -> None:
    """Correct DGL's operators in this process; what is right stays as it is."""
    sparse._cast_if_autocast_enabled = _cast_operands
    sparse.GSpMM = SimpleNamespace(apply=functools.partial(_reduce, sparse.GSpMM.apply))


def _cast_operands(*operands: Any) -> Any:
    if not torch.is_autocast_enabled("cpu"):
        return _DGL_CAST(*operands)
    floats = [one for one in operands if isinstance(one, Tensor) and one.is_floating_point()]
    if len({one.dtype for one in floats}) > 1:
        operands = _cast(operands, "cpu", torch.get_autocast_dtype("cpu"))
    return _DGL_CAST(*operands)


def _reduce(stock: Any, index: Any, op: str, how: str, lhs: Any, rhs: Any) -> Any:
    # The sum of nothing has the right gradient.
    return stock(index, op, how if index.num_edges(0) else "sum", lhs, rhs)
