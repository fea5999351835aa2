"""Tells a user who gives the input to more than the first layer why not, before torch tells of shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dglx_dist.errors import ConfigError
from dglx_dist.layers.staged import Staged
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.origins import InputModule, Origins


@final
class InputGuard:
    """Looks at what modules with weights are given, while the model computes on a part's columns.

    The hook is there during a call of the model only, so that modules stay as the user made them.

    Args:
        module: The model with its parts in place.
        first: Its first layer.
        origins: Of its inputs.
        group: Who holds which columns; a group of one holds all, and may do anything with them.
    """

    def __init__(self, module: nn.Module, first: Staged, origins: Origins, group: Group) -> None:
        self._origins, self._group, self._first = origins, group, type(first).__name__
        inside = set(first.modules())
        self._names = {
            id(one): name
            for name, one in module.named_modules()
            if one not in inside and any(True for _ in one.parameters()) and not _splits(one, first)
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raise ConfigError inside the block when a module that is not split gets this rank's columns."""
        if self._group.size == 1 or self._origins.own is None:
            yield
            return
        handle = register_module_forward_pre_hook(self._check)
        try:
            yield
        finally:
            handle.remove()

    def _check(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        tensors = list(_tensors(arguments))
        given = next((one for one in tensors if self._origins.holds(one)), None)
        if given is None and isinstance(module, nn.Linear) and tensors:
            # Columns that were put beside something else, as in torch.cat([h, x], 1).
            given = None if tensors[0].shape[-1] == module.in_features else tensors[0]
        if given is not None:
            raise ConfigError(
                f"{name!r} ({type(module).__name__}) was given {given.shape[-1]} columns, but this rank has "
                f"only its share of the input's columns, and the first layer alone ({self._first}) is split. "
                "Let nothing else with weights use the input (no skip connection around the first layer, no "
                "second layer on the same rows), or use strategy='data_parallel'"
            )


def _splits(module: nn.Module, first: Staged) -> bool:
    """Whether something with weights inside is split; dropout has none, and stands everywhere."""
    return any(one is first or (isinstance(one, InputModule) and one.cut) for one in module.modules())


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from _tensors(argument)
