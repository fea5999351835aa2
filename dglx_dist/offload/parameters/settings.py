"""Settings of the updates, as torch's optimizers name them, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dglx_dist.errors import ConfigError
from dglx_dist.registry import did_you_mean

S = TypeVar("S", "SgdSettings", "AdamSettings")

_WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Which of its own kernels torch shall take: not a matter of the formula."""
_SCHEDULERS = frozenset({"initial_lr"})
"""What learning-rate schedulers leave in a group."""


@dataclass(frozen=True, kw_only=True)
class SgdSettings:
    """Of ``torch.optim.SGD``."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self, "lr", "momentum", "weight_decay")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ConfigError(
                f"nesterov needs momentum above 0 and dampening 0, not {self.momentum} and {self.dampening}"
            )


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Of ``torch.optim.Adam``; with ``decoupled_weight_decay`` of ``torch.optim.AdamW``."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        _check_numbers(self, "lr", "eps", "weight_decay")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas={self.betas} must be two numbers in [0, 1)")


def settings_of(kind: type[S], group: Mapping[str, Any]) -> S:
    """Read one of torch's parameter groups (without its parameters).

    Raises:
        ConfigError: a setting is unknown or makes no sense.
    """
    known = {field.name for field in fields(kind)}
    given = {name: value for name, value in group.items() if name not in _WAYS | _SCHEDULERS}
    for name in given:
        if name not in known:
            raise ConfigError(
                f"the parameter servers know no setting {name!r}{did_you_mean(name, known)} "
                f"(there are: {', '.join(sorted(known))})"
            )
    if group.get("differentiable"):
        raise ConfigError("differentiable=True asks for steps that autograd can follow; leave it out")
    return kind(**given)


def _check_numbers(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
            raise ConfigError(f"{name}={value!r} must be a plain number, at least 0")
