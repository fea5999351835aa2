"""A device that no machine has: its tensors have data, but do not mix with those of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

try:
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
except ImportError:
    # Skips the file of tests that imports this one.
    pytest.skip(f"torch {torch.__version__} has no devices written in Python", allow_module_level=True)


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("elsewhere", _Backend())
DEVICE = torch.device("elsewhere", 0)
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_READS = (_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default)


class There(Tensor):
    """Runs each operation on the CPU tensor that it holds. It has no NumPy form, and no value for Python."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> There:
        strides = host.stride() if host.layout is torch.strided else None  # a sparse one looks dense
        made = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=strides, dtype=host.dtype, device=DEVICE
        )
        made.host = host
        return made

    def __repr__(self) -> str:
        return f"There({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """Mode in which tensors can be made on :data:`DEVICE` and moved there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    request = kwargs.get("device")
    ends_there = bool(there) if request is None else torch.device(request).type == DEVICE.type
    if func not in _COPIES and there and any(item.dim() for item in tensors if not isinstance(item, There)):
        raise RuntimeError(f"{func} got tensors of the host and of {DEVICE}")
    if func in _READS and there:
        raise RuntimeError(f"{func} waits for {DEVICE}")
    if request is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}

    def host_of(leaf: Any) -> Any:
        return leaf.host if isinstance(leaf, There) else leaf

    def wrap(leaf: Any) -> Any:
        return There(leaf) if isinstance(leaf, Tensor) else leaf

    out = func(*tree_map(host_of, args), **tree_map(host_of, kwargs))
    if func is _aten.copy_.default:
        return args[0]
    if not ends_there:
        return out
    return return_and_correct_aliasing(func, args, kwargs, tree_map(wrap, out))
