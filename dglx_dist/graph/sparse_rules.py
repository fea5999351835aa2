"""How a row changes by its gradient: the formulas of torch's optimisers, applied to some rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

from dglx_dist.errors import ConfigError
from dglx_dist.graph.sparse_kernels import Gradient, update_adagrad, update_adam, update_sgd
from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Touched:
    """Rows to be updated and what they are updated with."""

    weight: Array
    """(n, d) of the dtype that is computed in; changed."""
    at: Array
    """(k,) int64 distinct rows of ``weight``."""
    states: tuple[Array, ...]
    """(m, d) each, same dtype; changed."""
    touched: Array
    """(k,) int64 distinct rows of ``states``."""
    gradient: Gradient
    """Of k rows, same dtype."""


class UpdateRule(ABC):
    """One formula with its settings.

    Args:
        lr: The learning rate; may be changed between steps.

    Raises:
        ConfigError: a setting makes no sense.
    """

    state_names: ClassVar[tuple[str, ...]]
    """Of the tensors that it keeps beside the rows."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        if not 0.0 <= lr < math.inf:
            raise ConfigError(f"lr={lr} must be a number, at least 0")
        self._lr = lr

    @abstractmethod
    def settings(self) -> dict[str, float]:
        """Return all settings but ``lr`` by name."""

    @abstractmethod
    def update(self, rows: Touched, step: int) -> None:
        """Update ``rows`` in place.

        Args:
            rows: Which, and by what.
            step: 1, 2, ...: steps of the whole parameter so far, this one included.
        """


@final
class SgdRule(UpdateRule):
    """``w -= lr g``."""

    state_names = ()

    def settings(self) -> dict[str, float]:
        """See :meth:`UpdateRule.settings`."""
        return {}

    def update(self, rows: Touched, step: int) -> None:
        """See :meth:`UpdateRule.update`."""
        update_sgd(rows.weight, rows.at, rows.gradient, self.lr)


@final
class AdagradRule(UpdateRule):
    """``s += g^2; w -= lr g / (sqrt(s) + eps)``."""

    state_names = ("sum",)

    def __init__(self, lr: float, eps: float) -> None:
        super().__init__(lr)
        self._eps = _positive(eps)

    def settings(self) -> dict[str, float]:
        """See :meth:`UpdateRule.settings`."""
        return {"eps": self._eps}

    def update(self, rows: Touched, step: int) -> None:
        """See :meth:`UpdateRule.update`."""
        (total,) = rows.states
        update_adagrad(rows.weight, rows.at, total, rows.touched, rows.gradient, self.lr, self._eps)


@final
class AdamRule(UpdateRule):
    """Adam with moments that change only where a row is touched, and one step count for all rows.

    Args:
        lr: The learning rate.
        betas: How fast the moments forget.
        eps: Added to the root of the second moment.
        corrected: Whether ``eps`` is added to the root as it is after the correction for the first steps, as
            ``torch.optim.Adam`` and DGL do, or before it, as ``torch.optim.SparseAdam`` does. The two differ
            where gradients are not much larger than ``eps / sqrt(1 - beta2)``.

    Raises:
        ConfigError: a setting makes no sense.
    """

    state_names = ("mean", "square")

    def __init__(self, lr: float, betas: tuple[float, float], eps: float, *, corrected: bool = False) -> None:
        super().__init__(lr)
        self._corrected = corrected
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"betas={betas} must be two numbers in [0, 1)")
        self._betas = betas
        self._eps = _positive(eps)

    def settings(self) -> dict[str, float]:
        """See :meth:`UpdateRule.settings`."""
        return {"beta1": self._betas[0], "beta2": self._betas[1], "eps": self._eps}

    def update(self, rows: Touched, step: int) -> None:
        """See :meth:`UpdateRule.update`."""
        mean, square = rows.states
        beta1, beta2 = self._betas
        correction = math.sqrt(1.0 - beta2**step)
        rate = self.lr * correction / (1.0 - beta1**step)
        eps = self._eps * correction if self._corrected else self._eps
        constants = (rate, 1.0 - beta1, 1.0 - beta2, eps)
        update_adam(rows.weight, rows.at, mean, square, rows.touched, rows.gradient, constants)


def _positive(eps: float) -> float:
    if not 0.0 <= eps < math.inf:
        raise ConfigError(f"eps={eps} must be a number, at least 0")
    return eps
