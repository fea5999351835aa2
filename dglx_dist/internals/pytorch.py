"""Private parts of PyTorch: the running backward pass, tensor versions, optimizer hooks and the compiler.

Tested on torch 2.4.0, 2.13.0 and 2.15.0.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.nn.modules import batchnorm
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import _get_current_function_mode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

Copy: TypeAlias = Callable[[Tensor], Tensor]
"""Function from a tensor in host memory to its copy on a device."""

Kind = TypeVar("Kind", bound=Tensor)

AnyBatchNorm: TypeAlias = batchnorm._BatchNorm
NormWithStatistics: TypeAlias = batchnorm._NormBase

NO_BACKWARD = -1


def current_backward() -> int:
    """Return the number of this thread's running backward pass, or ``NO_BACKWARD``."""
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass ends. If the pass fails, the callback is dropped."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether ``register_hook`` was called on ``parameter``."""
    return bool(parameter._backward_hooks)


def watch_steps(
    before: Callable[[Any, Optimizer], None],
    owner: object,
    after: Callable[[Any, Optimizer], None] | None = None,
) -> Callable[[], object]:
    """Call functions before and after each step that any optimizer makes.

    Args:
        before: Function of (owner, optimizer) to call before a step.
        owner: Object that the hooks belong to. They do not keep it alive, and do nothing without it.
        after: Function of (owner, optimizer) to call after a step.

    Returns:
        Function that removes the hooks.
    """
    remove_hooks_without_owner()
    owner_reference = weakref.ref(owner)

    def call(function: Callable[[Any, Optimizer], None], optimizer: Optimizer) -> None:
        live_owner = owner_reference()
        if live_owner is not None:
            function(live_owner, optimizer)

    handles = [register_optimizer_step_pre_hook(lambda optimizer, *_: call(before, optimizer))]
    if after is not None:
        handles.append(register_optimizer_step_post_hook(lambda optimizer, *_: call(after, optimizer)))
    at_end = weakref.finalize(owner, _OWNERLESS_HOOKS.extend, handles)

    def end() -> None:
        at_end.detach()
        for handle in handles:
            handle.remove()

    return end


def remove_hooks_without_owner() -> None:
    """Remove the :func:`watch_steps` hooks that have no owner. Not to be called within an optimizer step."""
    while _OWNERLESS_HOOKS:
        _OWNERLESS_HOOKS.pop().remove()


_OWNERLESS_HOOKS: list[RemovableHandle] = []
"""Hooks without an owner. They are removed later, because torch may iterate over its hooks when an owner is
freed."""


def get_version(tensor: Tensor) -> int | None:
    """Return a number that changes whenever the tensor's content changes, or None if torch has none."""
    # Torch tracks no versions for tensors that were created in inference mode.
    return None if tensor.is_inference() else tensor._version


def plain_tensors() -> AbstractContextManager[Any]:
    """Return a context in which torch functions treat Tensor subclasses as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def retype(tensor: Tensor, kind: type[Kind]) -> Kind:
    """Return a ``kind`` tensor that shares memory with ``tensor``, without its gradient."""
    return Tensor._make_subclass(kind, tensor)


def current_function_mode() -> object:
    return _get_current_function_mode()  # type: ignore[no-untyped-call]  # torch does not annotate this


def replace_floats(output: Any, function: Callable[..., Sequence[Tensor]]) -> Any:
    """Replace the floating-point tensors in (nested) ``output``. ``function`` maps them all at once."""
    leaves, layout = tree_flatten(output)
    places = [n for n, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    replaced = function(*[leaves[place] for place in places]) if places else ()
    for place, tensor in zip(places, replaced, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, layout)


@cache
def leave_to_python() -> None:
    """Keep torch.compile out of exchanges and DGL's layers. It compiles the user's module around them."""
    # The user's first optimizer imports this as well, which takes a second.
    from torch._dynamo import trace_rules

    for package in ("dgl", "dglx_dist"):
        trace_rules.add(package)


_SOURCES = WeakTensorKeyDictionary()
"""Ids on a device to (their source tensor on the host, both tensors' versions when they were copied)."""


def ids_to_device(ids: Tensor, device: torch.device, copy: Copy | None = None) -> Tensor:
    """Copy ``ids`` from the host to ``device``. :func:`ids_on_host` later returns them without waiting."""
    copied = to_device(ids, device) if copy is None else copy(ids)
    if ids.is_cpu and not (copied.is_cpu or copied.is_inference() or ids.is_inference()):
        _SOURCES[copied] = ids, copied._version, ids._version
    return copied


def ids_on_host(ids: Tensor) -> Tensor:
    """Return ``ids`` on the host. Wait for their device, unless the host has an equal original."""
    source = None if ids.is_cpu else _SOURCES.get(ids)  # type: ignore[no-untyped-call]  # torch does not annotate this
    if source is not None and source[1:] == (ids._version, source[0]._version):
        return source[0].detach()
    return ids.detach().cpu()


def to_device(rows: Tensor, device: torch.device) -> Tensor:
    """Copy ``rows`` from host memory to ``device`` on the current stream, without waiting for a GPU."""
    if device.type == "cuda":
        # Torch keeps the page-locked copy alive until the GPU has read it.
        return rows.pin_memory().to(device, non_blocking=True)
    return rows.to(device)
