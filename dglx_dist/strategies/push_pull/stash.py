"""The weights that a batch in flight began with, so that all its phases see the same (weight stashing)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, final

from torch import Tensor, nn

Leaves: TypeAlias = dict[str, Tensor]
"""Parameter name to a leaf with its values as they were."""


@final
class PartSide:
    """The parameters that a part uses before the sum: the cut ones and those shared by all parts.

    They are stepped when a batch has gone all the way back, while later batches are on their way, so each
    batch computes with leaves of its own.

    Args:
        model: The module that has them.
        names: Of the parameters.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._places = {name: _place(model, name) for name in names}
        self.parameters: dict[str, nn.Parameter] = {name: model.get_parameter(name) for name in names}

    def leaves(self, *, copied: bool) -> Leaves:
        """Return a leaf for each parameter; of its own memory if ``copied``, else as long as nobody steps."""
        return {
            name: (p.detach().clone() if copied else p.detach()).requires_grad_(p.requires_grad)
            for name, p in self.parameters.items()
        }

    @contextmanager
    def placed(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the modules compute with ``leaves`` inside the block."""
        try:
            for name, (module, attribute) in self._places.items():
                module._parameters[attribute] = leaves[name]  # type: ignore[assignment]  # any tensor computes
            yield
        finally:
            for name, (module, attribute) in self._places.items():
                module._parameters[attribute] = self.parameters[name]


@final
class OwnerSide:
    """The replicated parameters of an owner: everything after the sum.

    Args:
        parameters: Those that are trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._live: list[Tensor] | None = None

    def copies(self) -> list[Tensor]:
        """Return copies of the values as they are now; of the live ones while others are placed."""
        values = self._live or [parameter.data for parameter in self.parameters]
        return [value.clone() for value in values]

    def place(self, values: Sequence[Tensor]) -> None:
        """Let the model compute with ``values`` until :meth:`restore`."""
        self.restore()
        self._live = [parameter.data for parameter in self.parameters]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def restore(self) -> None:
        """Put the live values back, if others are placed."""
        if self._live is None:
            return
        for parameter, value in zip(self.parameters, self._live, strict=True):
            parameter.data = value
        self._live = None


def add_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Add to ``.grad`` as a backward would."""
    if gradient is None:
        return
    parameter.grad = gradient.detach() if parameter.grad is None else parameter.grad + gradient.detach()


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, attribute = name.rpartition(".")
    return model.get_submodule(owner), attribute
