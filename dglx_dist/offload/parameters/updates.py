"""How weights change by their gradients: torch's optimizers in NumPy, operation by operation.

Order and rounding of every operation are those of torch's CPU kernels (one tensor at a time, the default
there), in float32 and float64. One operation is beyond NumPy: torch's square root is its maths library's
and may be wrong in the last bit, so Adam equals torch to the last bit only when it is given torch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, final

import numpy as np

from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.offload.parameters.rounding import fused_multiply_add
from dglx_dist.offload.parameters.settings import AdamSettings, SgdSettings, settings_of
from dglx_dist.records import Array

State: TypeAlias = dict[str, Array]
"""What is kept of one weight beside it: torch's keys to arrays of its shape; "step" is () float32."""
Root: TypeAlias = Callable[[Array], Array]


class Update(ABC):
    """One rule for all weights of a model.

    Args:
        names: Of the weights, in the order in which they are given to :meth:`apply`.
        state: What :attr:`state` of an earlier one was; None: nothing yet.
    """

    state_keys: ClassVar[tuple[str, ...]]

    def __init__(self, names: Sequence[str], state: Mapping[str, Array] | None = None) -> None:
        self.names = tuple(names)
        self._states = self._split(state or {})

    @property
    def state(self) -> dict[str, Array]:
        """What is kept beside the weights, by "<weight>/<torch's key>"."""
        return {
            f"{name}/{key}": value
            for name, one in zip(self.names, self._states, strict=True)
            for key, value in one.items()
        }

    def apply(self, weights: Sequence[Array], gradients: Sequence[Array]) -> tuple[Array, ...]:
        """Return the weights after one more step; new arrays, read-only.

        Args:
            weights: One per name; float32 or float64.
            gradients: Of the same shapes and dtypes.
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
        """Return the weight of position ``index`` and its state after one step; both new."""

    def _split(self, state: Mapping[str, Array]) -> list[State]:
        states: dict[str, State] = {name: {} for name in self.names}
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            if name not in states or key not in self.state_keys:
                raise CheckpointError(
                    f"the optimizer's state has {path!r}; weights are {', '.join(self.names)}, keys "
                    f"{', '.join(self.state_keys)}: is it of another model or optimizer?"
                )
            states[name][key] = np.array(value)
        return [states[name] for name in self.names]


@final
class SgdUpdate(Update):
    """``torch.optim.SGD``.

    Args:
        names: See :class:`Update`.
        settings: One per name; None: that weight stays as it is.
        state: See :class:`Update`.
    """

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
    """``torch.optim.Adam`` and ``AdamW``.

    Args:
        names: See :class:`Update`.
        settings: One per name; None: that weight stays as it is.
        state: See :class:`Update`.
        root: The square root; torch's makes the last bits torch's.
    """

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
    """Return the update that does what one of torch's optimizers does.

    Args:
        kind: Name of its class: "SGD", "Adam" or "AdamW".
        groups: Its parameter groups, "params" being names of weights; others than these stay as they are.
        names: All weights, in the order in which they will be given.
        state: What it kept, by "<weight>/<torch's key>"; None: nothing yet.
        root: For Adam: the square root.

    Raises:
        ConfigError: the kind or a setting is unknown, a weight is in two groups or not in ``names``.
        CheckpointError: ``state`` is of another model or optimizer.
    """
    if kind == "SGD":
        return SgdUpdate(names, _by_name(SgdSettings, groups, names), state)
    if kind in ("Adam", "AdamW"):
        groups = [{"decoupled_weight_decay": kind == "AdamW", **group} for group in groups]
        return AdamUpdate(names, _by_name(AdamSettings, groups, names), state, root)
    raise ConfigError(
        f"the parameter servers know no optimizer {kind!r}; take torch.optim.SGD, Adam or AdamW, or another "
        "strategy"
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
    """torch.lerp, which counts from the nearer end."""
    way = end - start
    if abs(fraction) < 0.5:
        return fused_multiply_add(fraction, way, start)
    rest = float(way.dtype.type(1) - way.dtype.type(fraction))
    return fused_multiply_add(-rest, way, end)
