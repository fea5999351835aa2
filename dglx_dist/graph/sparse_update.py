"""Update rules of torch's optimisers, applied to the rows that a rank owns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
    Gradient,
    Parcel,
    RowSum,
    count_rows,
    forget_rows,
    split_rows,
    update_adagrad,
    update_adam,
    update_sgd,
)
from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Touched:
    """Rows to be updated, their states and gradients."""

    weight: Array
    """(n, d) of the compute dtype; changed."""
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
        ConfigError: a setting is invalid.
    """

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
    def update(self, rows: Touched, step: int) -> None:
        """Update ``rows`` in place.

        Args:
            rows: The rows, with their gradient.
            step: 1, 2, ...: steps of the whole parameter so far, this one included.
        """


@final
class SgdRule(UpdateRule):
    """``w -= lr g``."""

    state_names = ()

    def settings(self) -> dict[str, float]:
        return {}

    def update(self, rows: Touched, step: int) -> None:
        update_sgd(rows.weight, rows.at, rows.gradient, self.lr)


@final
class AdagradRule(UpdateRule):
    """``s += g^2; w -= lr g / (sqrt(s) + eps)``."""

    state_names = ("sum",)

    def __init__(self, lr: float, eps: float) -> None:
        super().__init__(lr)
        self._eps = _positive(eps)

    def settings(self) -> dict[str, float]:
        return {"eps": self._eps}

    def update(self, rows: Touched, step: int) -> None:
        (total,) = rows.states
        update_adagrad(rows.weight, rows.at, total, rows.touched, rows.gradient, self.lr, self._eps)


@final
class AdamRule(UpdateRule):
    """Adam with moments that change only in touched rows, and one step count for all rows.

    Args:
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        corrected: Whether ``eps`` is added to the root after bias correction, as ``torch.optim.Adam`` and DGL
            do, or before it, as ``torch.optim.SparseAdam`` does. The two differ where gradients are not much
            larger than ``eps / sqrt(1 - beta2)``.

    Raises:
        ConfigError: a setting is invalid.
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

    def update(self, rows: Touched, step: int) -> None:
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


@final
class OwnedRows:
    """The rows of one embedding that this rank owns.

    Args:
        embedding: With all rows.
        states: The tensors of ``rule``, distributed like the rows.
        rule: Updates the rows.
    """

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
        self._accumulator = _RowAccumulator(self.first, self.last, embedding)
        self.no_rows = RowSum(
            ids=np.empty(0, np.int64),
            rows=np.empty((0, embedding.embedding_dim), dtype=self._accumulator.dtype),
        )
        """The gradient of a rank that touched no row."""

    def check(self, parcel: Parcel) -> None:
        """Raise ConfigError unless ``parcel``, from another rank, is for rows of this one."""
        ids, rows = parcel.ids, parcel.rows
        dtype = self._accumulator.dtype
        if ids.dtype != np.int64 or ids.ndim != 1 or rows.dtype != dtype:
            raise ConfigError(f"gradients must be int64 ids and {dtype} rows, not {ids.dtype}, {rows.dtype}")
        if rows.shape != (len(ids), self.embedding.embedding_dim):
            raise ConfigError(f"gradients of {len(ids)} ids cannot have shape {rows.shape}")
        if len(ids) and (ids.min() < self.first or ids.max() >= self.last):
            raise ConfigError(
                f"this rank owns the rows {self.first} to {self.last - 1} of {self.embedding.name!r}, not "
                f"{ids.min()} to {ids.max()}; build the optimisers alike on all ranks"
            )

    def apply(self, parcels: Sequence[Parcel]) -> None:
        """Sum ``parcels`` in their order and update each row they touch once; any thread."""
        with self.lock:
            self.steps += 1
            for rows, gradient in self._accumulator.sum([parcel for parcel in parcels if len(parcel.ids)]):
                self._update(rows, gradient)

    def _update(self, touched: Array, gradient: Gradient) -> None:
        rows, wide = self._rows, self.embedding.compute_dtype
        if rows.dtype == wide:
            at, weight = touched, numpy_view(rows)
        else:
            index = torch.from_numpy(touched)
            at, weight = np.arange(len(touched)), rows[index].to(wide).numpy()
        self.rule.update(
            Touched(weight=weight, at=at, states=self._state_rows, touched=touched, gradient=gradient),
            self.steps,
        )
        if rows.dtype != wide:
            rows[index] = torch.from_numpy(weight).to(rows.dtype)


@final
class _RowAccumulator:
    """Sums of rows by id; rows that are in only one parcel are not copied."""

    def __init__(self, first: int, last: int, embedding: DistEmbedding) -> None:
        self._first, self._count = first, last - first
        self._slot_of = np.full(0, NEVER, dtype=np.int32)
        self._dim = embedding.embedding_dim
        self.dtype = np.dtype(str(embedding.compute_dtype).removeprefix("torch."))

    def sum(self, parcels: Sequence[Parcel]) -> list[tuple[Array, Gradient]]:
        """Return ((k,) int64 rows relative to the first, their gradient), each row once."""
        first = self._first
        gradients = [Gradient(parcel.rows, parcel.places, parcel.weight) for parcel in parcels]
        if len(parcels) < 2:
            return [(parcel.ids - first, own) for parcel, own in zip(parcels, gradients, strict=True)]
        if len(self._slot_of) < self._count:
            self._slot_of = np.full(self._count, NEVER, dtype=np.int32)
        slot_of, ids = self._slot_of, [parcel.ids for parcel in parcels]
        repeated = sum(count_rows(some, first, slot_of) for some in ids)
        touched = np.empty(repeated, dtype=np.int64)
        sums = np.empty((repeated, self._dim), dtype=self.dtype)
        found, count = [], 0
        for some, own in zip(ids, gradients, strict=True):
            single, places, count = split_rows(some, first, own, slot_of, touched, sums, count)
            found.append((single, Gradient(own.rows, places, own.weight)))
        for some in ids:
            forget_rows(some, first, slot_of)
        return [*found, (touched, Gradient(sums, np.arange(count), 1.0))]
