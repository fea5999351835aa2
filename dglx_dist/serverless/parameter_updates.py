"""Optimizers of parameter servers: torch's SGD, Adam and AdamW in NumPy, bit for bit.

Order and rounding of every operation are those of torch's CPU kernels for single tensors, the default there,
in float32 and float64. NumPy cannot reproduce one operation: torch's square root comes from its maths library
and may be wrong in the last bit, so Adam is bit-identical only if it is given torch's square root.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import numpy as np

from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.records import Array
from dglx_dist.registry import did_you_mean

_BLOCK = 1 << 13
"""Elements per block: about forty intermediate vectors of this length fit the cache."""
_SPLITTER = float((1 << 27) + 1)
S = TypeVar("S", "SgdSettings", "AdamSettings")
_IGNORED_SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Choices of torch's kernels, and what learning-rate schedulers add to a group; they change no formula."""


def fused_multiply_add(a: Array | float, b: Array, c: Array) -> Array:
    """Return ``a * b + c`` with one rounding; a new array.

    Args:
        a: A number, converted to the dtype of ``c`` first, or an array like ``c``.
        b: Like ``c``.
        c: Any shape, float32 or float64.
    """
    result = np.empty(c.size, dtype=c.dtype)
    scale = np.broadcast_to(np.asarray(a, dtype=c.dtype), c.shape).reshape(-1)
    flat_b, flat_c = b.reshape(-1), c.reshape(-1)
    once = _narrow if c.dtype == np.float32 else _wide
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start in range(0, c.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            result[part] = once(scale[part], flat_b[part], flat_c[part])
    return result.reshape(c.shape)


def _narrow(a: Array, b: Array, c: Array) -> Array:
    # The product of two float32 is exact in float64.
    product = a.astype(np.float64) * b.astype(np.float64)
    return _odd_sum(product, c.astype(np.float64)).astype(np.float32)


def _wide(a: Array, b: Array, c: Array) -> Array:
    product, rest = _two_product(a, b)
    low, lower = _two_sum(c, rest)
    high, middle = _two_sum(product, low)
    fused = high + _odd_sum(lower, middle)
    # Splitting overflows earlier than the number itself, and loses the sign of a zero.
    return np.where(np.isfinite(fused) & (fused != 0), fused, product + c)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    # The rounded sum and its rounding error.
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    # The rounded product and its rounding error.
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    rest = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, rest


def _halves(a: Array) -> tuple[Array, Array]:
    spread = _SPLITTER * a
    high = spread - (spread - a)
    return high, a - high


def _odd_sum(a: Array, b: Array) -> Array:
    # a + b rounded to odd: an inexact sum becomes the neighbour whose last bit is 1. A second rounding to
    # fewer bits then gives the same result as a single rounding of the exact sum.
    total, rest = _two_sum(a, b)
    is_even = (total.view(np.int64) & 1) == 0
    toward = np.nextafter(total, np.copysign(np.inf, rest))
    return np.where((rest != 0) & is_even & np.isfinite(total), toward, total)


@dataclass(frozen=True, kw_only=True)
class SgdSettings:
    """Settings of ``torch.optim.SGD``."""

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
    """Settings of ``torch.optim.Adam``, or with ``decoupled_weight_decay`` of ``torch.optim.AdamW``."""

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
    """Read one of torch's parameter groups without its parameters; ConfigError if a setting is invalid."""
    known = {field.name for field in fields(kind)}
    given = {name: value for name, value in group.items() if name not in _IGNORED_SETTINGS}
    for name in given:
        if name not in known:
            raise ConfigError(
                f"the parameter servers do not support the setting {name!r}{did_you_mean(name, known)} "
                f"(there are: {', '.join(sorted(known))})"
            )
    if group.get("differentiable"):
        raise ConfigError("differentiable=True is not supported; leave it out")
    return kind(**given)


def _check_numbers(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
            raise ConfigError(f"{name}={value!r} must be a plain number, at least 0")


State: TypeAlias = dict[str, Array]
"""State of one weight: torch's keys to arrays of its shape; "step" is () float32."""
Root: TypeAlias = Callable[[Array], Array]


class Update(ABC):
    """Update rule of all weights of a model.

    Args:
        names: Names of the weights, in the order of the arguments of :meth:`apply`.
        state: :attr:`state` of an earlier instance; None: a fresh state.
    """

    state_keys: ClassVar[tuple[str, ...]]

    def __init__(self, names: Sequence[str], state: Mapping[str, Array] | None = None) -> None:
        self.names = tuple(names)
        self._states = self._split(state or {})

    @property
    def state(self) -> dict[str, Array]:
        """State of all weights, by "<weight>/<torch's key>"."""
        return {
            f"{name}/{key}": value
            for name, one in zip(self.names, self._states, strict=True)
            for key, value in one.items()
        }

    def apply(self, weights: Sequence[Array], gradients: Sequence[Array]) -> tuple[Array, ...]:
        """Return the weights after one step, as new read-only arrays.

        Args:
            weights: One per name; float32 or float64.
            gradients: Like ``weights``.
        """
        results = []
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            after, self._states[index] = self._apply_one(index, weight, gradient, self._states[index])
            frozen = np.asarray(after)
            frozen.flags.writeable = False
            results.append(frozen)
        return tuple(results)

    @abstractmethod
    def _apply_one(self, index: int, weight: Array, gradient: Array, state: State) -> tuple[Array, State]:
        """Return weight number ``index`` and its state after one step, without changing the arguments."""

    def _split(self, state: Mapping[str, Array]) -> list[State]:
        states: dict[str, State] = {name: {} for name in self.names}
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            if name not in states or key not in self.state_keys:
                raise CheckpointError(
                    f"the optimizer's state has {path!r}; weights are {', '.join(self.names)}, keys "
                    f"{', '.join(self.state_keys)}; give the state of this model and optimizer"
                )
            states[name][key] = np.array(value)
        return [states[name] for name in self.names]


@final
class SgdUpdate(Update):
    """``torch.optim.SGD``; ``settings`` has one entry per name, None for weights that stay unchanged."""

    state_keys = ("momentum_buffer",)

    def __init__(
        self,
        names: Sequence[str],
        settings: Sequence[SgdSettings | None],
        state: Mapping[str, Array] | None = None,
    ) -> None:
        super().__init__(names, state)
        self._settings = tuple(settings)

    def _apply_one(self, index: int, weight: Array, gradient: Array, state: State) -> tuple[Array, State]:
        settings = self._settings[index]
        if settings is None:
            return weight.copy(), state
        gradient = -gradient if settings.maximize else gradient
        if settings.weight_decay != 0:
            gradient = fused_multiply_add(settings.weight_decay, weight, gradient)
        if settings.momentum != 0:
            buffer = gradient.copy()
            if "momentum_buffer" in state:
                slowed = state["momentum_buffer"] * settings.momentum
                buffer = fused_multiply_add(1 - settings.dampening, gradient, slowed)
            state = {"momentum_buffer": buffer}
            gradient = (
                fused_multiply_add(settings.momentum, buffer, gradient) if settings.nesterov else buffer
            )
        return fused_multiply_add(-settings.lr, gradient, weight), state


@final
class AdamUpdate(Update):
    """``torch.optim.Adam`` and ``AdamW``; ``settings`` as in SgdUpdate, ``root`` is the square root."""

    state_keys = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        names: Sequence[str],
        settings: Sequence[AdamSettings | None],
        state: Mapping[str, Array] | None = None,
        root: Root = np.sqrt,
    ) -> None:
        super().__init__(names, state)
        self._settings, self._root = tuple(settings), root

    def _apply_one(self, index: int, weight: Array, gradient: Array, state: State) -> tuple[Array, State]:
        settings = self._settings[index]
        if settings is None:
            return weight.copy(), state
        beta1, beta2 = settings.betas
        gradient = -gradient if settings.maximize else gradient
        if settings.weight_decay != 0 and settings.decoupled_weight_decay:
            weight = weight * (1 - settings.lr * settings.weight_decay)
        elif settings.weight_decay != 0:
            gradient = fused_multiply_add(settings.weight_decay, weight, gradient)
        step = float(state.get("step", 0.0)) + 1.0
        mean = _interpolate(_or_zeros(state, "exp_avg", weight), gradient, 1 - beta1)
        slowed = _or_zeros(state, "exp_avg_sq", weight) * beta2
        square = fused_multiply_add(gradient * (1 - beta2), gradient, slowed)
        after = {"step": np.array(step, dtype=np.float32), "exp_avg": mean, "exp_avg_sq": square}
        under = square
        if settings.amsgrad:
            under = np.maximum(_or_zeros(state, "max_exp_avg_sq", weight), square)
            after["max_exp_avg_sq"] = under
        size = settings.lr / (1 - beta1**step)
        below = self._root(under) / (1 - beta2**step) ** 0.5 + settings.eps
        return np.asarray(weight + mean * -size / below), after


def make_update(
    kind: str,
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    state: Mapping[str, Array] | None = None,
    *,
    root: Root = np.sqrt,
) -> Update:
    """Return the update that is equivalent to one of torch's optimizers.

    Args:
        kind: Name of the class: "SGD", "Adam" or "AdamW".
        groups: Parameter groups with names of weights as "params"; weights in none stay unchanged.
        names: Names of all weights.
        state: See :class:`Update`.
        root: Adam's square root.

    Raises:
        ConfigError: the kind or a setting is unknown, or a weight is in two groups or not in ``names``.
        CheckpointError: ``state`` belongs to another model or optimizer.
    """
    if kind == "SGD":
        return SgdUpdate(names, _by_name(SgdSettings, groups, names), state)
    if kind in ("Adam", "AdamW"):
        groups = [{"decoupled_weight_decay": kind == "AdamW", **group} for group in groups]
        return AdamUpdate(names, _by_name(AdamSettings, groups, names), state, root)
    raise ConfigError(
        f"the parameter servers have no optimizer {kind!r}; use torch.optim.SGD, Adam or AdamW, "
        "or another strategy"
    )


def _by_name(kind: Any, groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Any]:
    found: dict[str, Any] = dict.fromkeys(names)
    for group in groups:
        settings = settings_of(kind, {key: value for key, value in group.items() if key != "params"})
        for name in group["params"]:
            if name not in found:
                raise ConfigError(f"the optimizer has {name!r}, the model only {', '.join(names)}")
            if found[name] is not None:
                raise ConfigError(f"{name!r} is in two parameter groups of the optimizer; leave it in one")
            found[name] = settings
    return [found[name] for name in names]


def _or_zeros(state: State, key: str, like: Array) -> Array:
    return state[key] if key in state else np.zeros_like(like)


def _interpolate(start: Array, end: Array, fraction: float) -> Array:
    # torch.lerp, which counts from the nearer end.
    difference = end - start
    if abs(fraction) < 0.5:
        return fused_multiply_add(fraction, difference, start)
    rest = float(difference.dtype.type(1) - difference.dtype.type(fraction))
    return fused_multiply_add(-rest, difference, end)
