"""Update rules of torch's optimisers, applied to the rows that a rank owns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, final

import numpy as np
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.row_kernels import numpy_view
from dglx_dist.graph.sparse_gradient import (
    NEVER,
    RowSum,
    count_rows,
    forget_rows,
    one_row_each,
    split_rows,
    update_adagrad,
    update_adam,
    update_sgd,
)
from dglx_dist.records import Array


class UpdateRule(ABC):
    """One formula with its settings; ``lr`` may be changed between steps. ConfigError for an invalid one."""

    state_names: ClassVar[tuple[str, ...]]
    """Of the tensors that are kept beside the rows."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        if not 0.0 <= lr < math.inf:
            raise ConfigError(f"lr={lr} must be a number, at least 0")
        self._lr = float(lr)

    @abstractmethod
    def settings(self) -> dict[str, float]:
        """Return all settings but ``lr`` by name."""

    @abstractmethod
    def update(self, weight: Array, at: Array, states: Sequence[Array], gradient: RowSum, step: int) -> None:
        """Update the rows ``at`` of (n, d) ``weight`` and the rows ``gradient.ids`` of the states in place.

        All have the compute dtype. ``step``: 1, 2, ...: steps of the whole parameter, this one included.
        """


@final
class SgdRule(UpdateRule):
    """``w -= lr g``."""

    state_names = ()

    def settings(self) -> dict[str, float]:
        return {}

    def update(self, weight: Array, at: Array, states: Sequence[Array], gradient: RowSum, step: int) -> None:
        update_sgd(weight, at, gradient, self.lr)


@final
class AdagradRule(UpdateRule):
    """``s += g^2; w -= lr g / (sqrt(s) + eps)``."""

    state_names = ("sum",)

    def __init__(self, lr: float, eps: float) -> None:
        super().__init__(lr)
        self._eps = _positive(eps)

    def settings(self) -> dict[str, float]:
        return {"eps": self._eps}

    def update(self, weight: Array, at: Array, states: Sequence[Array], gradient: RowSum, step: int) -> None:
        update_adagrad(weight, at, states[0], gradient, self.lr, self._eps)


@final
class AdamRule(UpdateRule):
    """Adam with moments that change only in touched rows, and one step count for all rows.

    ``corrected``: whether ``eps`` is added to the root of the second moment after bias correction, as
    ``torch.optim.Adam`` and DGL do, or before it, as ``torch.optim.SparseAdam`` does. The two differ where
    gradients are not much larger than ``eps / sqrt(1 - beta2)``.
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
        return {"beta1": self._betas[0], "beta2": self._betas[1], "eps": self._eps}

    def update(self, weight: Array, at: Array, states: Sequence[Array], gradient: RowSum, step: int) -> None:
        mean, square = states
        beta1, beta2 = self._betas
        correction = math.sqrt(1.0 - beta2**step)
        rate = self.lr * correction / (1.0 - beta1**step)
        eps = self._eps * correction if self._corrected else self._eps
        constants = (rate, 1.0 - beta1, 1.0 - beta2, eps)
        update_adam(weight, at, mean, square, gradient, constants)


def _positive(eps: float) -> float:
    if not 0.0 <= eps < math.inf:
        raise ConfigError(f"eps={eps} must be a number, at least 0")
    return eps


@final
class OwnedRows:
    """The rows of one embedding that this rank owns; ``states`` are the tensors of ``rule``."""

    def __init__(self, embedding: DistEmbedding, states: Sequence[DistTensor], rule: UpdateRule) -> None:
        policy, topology = embedding.part_policy, embedding.kvstore.session.topology
        self.embedding, self.states, self.rule = embedding, tuple(states), rule
        self.owners = RowOwners(policy.bounds, topology)
        self.first, self.last = self.owners.range_of(topology.rank)
        self.steps = 0
        """Updates of the parameter so far, also those without a row of this rank."""
        self.lock = embedding.kvstore.column(embedding.weight.kvstore_key).lock
        """Held while rows are updated, also by other optimisers of these rows and by pushes that add."""
        start = embedding.weight.local_range[0]
        owned = slice(self.first - start, self.last - start)
        self._rows = embedding.weight.local_rows()[owned]
        self._state_rows = tuple(numpy_view(state.local_rows()[owned]) for state in states)
        self._dtype = np.dtype(str(embedding.compute_dtype).removeprefix("torch."))
        nothing = np.empty((0, embedding.embedding_dim), self._dtype)
        self.no_rows = one_row_each(np.empty(0, np.int64), nothing)
        """The gradient of a rank that touched no row."""
        self._slot_of = np.empty(0, np.int32)

    def check(self, gradient: RowSum) -> None:
        """Raise ConfigError unless ``gradient``, from another rank, is for rows of this one."""
        ids, rows, dtype = gradient.ids, gradient.rows, self._dtype
        if ids.dtype != np.int64 or ids.ndim != 1 or rows.dtype != dtype:
            raise ConfigError(f"gradients must be int64 ids and {dtype} rows, not {ids.dtype}, {rows.dtype}")
        if rows.shape != (len(ids), self.embedding.embedding_dim):
            raise ConfigError(f"gradients of {len(ids)} ids cannot have shape {rows.shape}")
        if len(ids) and (ids.min() < self.first or ids.max() >= self.last):
            raise ConfigError(
                f"this rank owns the rows {self.first} to {self.last - 1} of {self.embedding.name!r}, not "
                f"{ids.min()} to {ids.max()}; build the optimisers alike on all ranks"
            )

    def apply(self, gradients: Sequence[RowSum]) -> None:
        """Sum ``gradients`` in their order and update each row they touch once; any thread."""
        with self.lock:
            self.steps += 1
            for gradient in self._summed([one for one in gradients if len(one.ids)]):
                self._update(gradient)

    def _update(self, gradient: RowSum) -> None:
        rows, wide, touched = self._rows, self.embedding.compute_dtype, gradient.ids
        if rows.dtype == wide:
            self.rule.update(numpy_view(rows), touched, self._state_rows, gradient, self.steps)
            return
        index = torch.from_numpy(touched)
        weight = rows[index].to(wide).numpy()
        self.rule.update(weight, np.arange(len(touched)), self._state_rows, gradient, self.steps)
        rows[index] = torch.from_numpy(weight).to(rows.dtype)

    def _summed(self, gradients: Sequence[RowSum]) -> list[RowSum]:
        """Return gradients with ids counted from the first row and each row once; copy only repeated rows."""
        first = self.first
        if len(gradients) < 2:
            return [one._replace(ids=one.ids - first) for one in gradients]
        if len(self._slot_of) < self.last - first:
            self._slot_of = np.full(self.last - first, NEVER, dtype=np.int32)
        repeated = sum(count_rows(one.ids, first, self._slot_of) for one in gradients)
        touched = np.empty(repeated, dtype=np.int64)
        sums = np.empty((repeated, self.embedding.embedding_dim), dtype=self._dtype)
        found, count = [], 0
        for one in gradients:
            single, places, count = split_rows(one, first, self._slot_of, touched, sums, count)
            found.append(RowSum(single, one.rows, places, one.weight))
        for one in gradients:
            forget_rows(one.ids, first, self._slot_of)
        return [*found, one_row_each(touched, sums)]
