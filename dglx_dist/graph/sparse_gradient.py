"""Gradients for some rows: records, weighted sums, and the kernels that apply them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numba import njit

from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import number_distinct, read_ahead
from dglx_dist.records import Array, StepShare

AHEAD = 4
"""Number of rows between the prefetched row and the updated row."""


class RowSum(NamedTuple):
    """Gradient for k rows in an embedding: ``weight * rows[indices]``."""

    ids: Array
    """(k,) int64 distinct ids. In kernels that update rows they are counted from the owner's first row."""
    rows: Array
    """(n, d) float32 or float64 rows."""
    indices: Array
    """(k,) int64 indices in [0, n): each id's row."""
    weight: float = 1.0

    def compact(self) -> RowSum:
        """Return an equal gradient with one row per id, in order, and weight 1."""
        rows = np.empty((len(self.ids), self.rows.shape[1]), dtype=self.rows.dtype)
        _add(self, np.arange(len(self.ids)), rows, 0)
        return make_row_sum(self.ids, rows)


def make_row_sum(ids: Array, rows: Array, weight: float = 1.0) -> RowSum:
    """Return a gradient for (k,) distinct ``ids`` with the (k, d) ``rows`` in the same order."""
    return RowSum(ids, rows, np.arange(len(ids)), weight)


def sum_rows(gradients: Sequence[RowSum]) -> RowSum:
    """Add up one or more gradients for one embedding. The result has one row per distinct id.

    Rows with the same id are added in the order in which they come, so that every run rounds equally.
    """
    if len(gradients) == 1:
        return gradients[0]

    ids, slots = number_distinct(np.concatenate([gradient.ids for gradient in gradients]))
    rows = np.empty((len(ids), gradients[0].rows.shape[1]), gradients[0].rows.dtype)
    start = num_filled = 0
    for gradient in gradients:
        end = start + len(gradient.ids)
        num_filled = _add(gradient, slots[start:end], rows, num_filled)
        start = end
    return make_row_sum(ids, rows)


@njit(cache=True, nogil=True)
def _add(gradient: RowSum, slots: Array, out: Array, num_filled: int) -> int:
    """Add ``gradient`` to rows in ``out``. Return how many rows are filled now.

    Args:
        slots: Row in ``out`` for each id. Slots are numbered by appearance, so a slot without values is
            always the next row.
        out: Sums. Only the first ``num_filled`` rows have values before the call.
    """
    factor = out.dtype.type(gradient.weight)
    for k in range(len(slots)):
        slot, source = np.uint64(slots[k]), np.uint64(gradient.indices[k])
        if slots[k] == num_filled:
            # This is the first gradient for the id, so the uninitialised row is overwritten.
            num_filled += 1
            for column in range(out.shape[1]):
                out[slot, np.uint64(column)] = factor * gradient.rows[source, np.uint64(column)]
        else:
            for column in range(out.shape[1]):
                out[slot, np.uint64(column)] += factor * gradient.rows[source, np.uint64(column)]
    return num_filled


# Kernels for updates. (k,) int64 ``targets`` are distinct rows in (n, d) ``weight``, one per gradient.
# ``gradient.ids`` are the states' rows. The error model "numpy" does not check divisions for 0, so that loops
# are vectorised. Each divisor includes eps.
@njit(cache=True, nogil=True, error_model="numpy")
def update_sgd(
    weight: Array, targets: Array, _states: tuple[()], gradient: RowSum, constants: tuple[float]
) -> None:
    """Apply ``w -= rate * g``. ``constants`` are (rate,)."""
    dtype = weight.dtype.type
    step, factor = dtype(constants[0]), dtype(gradient.weight)
    for k in range(len(targets)):
        row, source = np.uint64(targets[k]), np.uint64(gradient.indices[k])
        for number in range(weight.shape[1]):
            column = np.uint64(number)
            weight[row, column] -= step * (factor * gradient.rows[source, column])


@njit(cache=True, nogil=True, error_model="numpy")
def update_adagrad(
    weight: Array, targets: Array, states: tuple[Array], gradient: RowSum, constants: tuple[float, float]
) -> None:
    """Apply ``s += g^2; w -= rate * g / (sqrt(s) + eps)``. ``constants`` are (rate, eps)."""
    dtype, state_rows, total = weight.dtype.type, gradient.ids, states[0]
    step, eps, factor = dtype(constants[0]), dtype(constants[1]), dtype(gradient.weight)
    last = len(targets) - 1

    for k in range(len(targets)):
        read_ahead(weight, targets[min(k + AHEAD, last)])
        read_ahead(total, state_rows[min(k + AHEAD, last)])
        row, state = np.uint64(targets[k]), np.uint64(state_rows[k])
        source = np.uint64(gradient.indices[k])
        for number in range(weight.shape[1]):
            column = np.uint64(number)
            g = factor * gradient.rows[source, column]
            s = total[state, column] + g * g
            total[state, column] = s
            weight[row, column] -= step * g / (np.sqrt(s) + eps)


@njit(cache=True, nogil=True, error_model="numpy")
def update_adam(
    weight: Array, targets: Array, states: tuple[Array, Array], gradient: RowSum, constants: tuple[float, ...]
) -> None:
    """Apply ``m += a (g - m); v += b (g^2 - v); w -= rate * m / (sqrt(v) + eps)``.

    ``constants`` are (rate, a, b, eps). The rate corrects both moments for their start at 0.
    """
    dtype, state_rows, mean, square = weight.dtype.type, gradient.ids, states[0], states[1]
    step, gain_mean = dtype(constants[0]), dtype(constants[1])
    gain_square, eps = dtype(constants[2]), dtype(constants[3])
    factor, last = dtype(gradient.weight), len(targets) - 1

    for k in range(len(targets)):
        read_ahead(weight, targets[min(k + AHEAD, last)])
        read_ahead(mean, state_rows[min(k + AHEAD, last)])
        read_ahead(square, state_rows[min(k + AHEAD, last)])
        row, state = np.uint64(targets[k]), np.uint64(state_rows[k])
        source = np.uint64(gradient.indices[k])
        for number in range(weight.shape[1]):
            column = np.uint64(number)
            g = factor * gradient.rows[source, column]
            m = mean[state, column] + gain_mean * (g - mean[state, column])
            v = square[state, column] + gain_square * (g * g - square[state, column])
            mean[state, column] = m
            square[state, column] = v
            weight[row, column] -= step * m / (np.sqrt(v) + eps)


Reduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGradient:
    """Gradient for the rows that one call returned, from one backward pass."""

    ids: Array
    """(k,) int64 distinct ids."""
    rows: Array
    """(k, d) float32 or float64 rows. They are read-only, because autograd may share their memory."""
    share: StepShare | None
    """The step share when the call was made."""
    wait: Callable[[], None] | None = None
    """Function that waits until ``rows`` have arrived from a device, or None if they are on the host."""


def compute_weight(share: StepShare | None, reduction: Reduction, world_size: int) -> float:
    """Return the factor for a rank's gradient in the sum over ranks.

    The factor is n_local / n_global for a mean and 1 for a sum. On a rank without targets, the factor is 0
    (the gradient rule, docs/development/contracts.md). ``share`` has the step's target counts on this rank
    and on all ranks. Raises ConfigError if a mean needs them and ``share`` is None.
    """
    if share is not None and share.num_local == 0:
        return 0.0
    if reduction == "sum":
        return 1.0
    if share is not None:
        return share.num_local / share.num_global
    if world_size == 1:
        return 1.0
    raise ConfigError(
        "an embedding was called outside of a step with a known number of targets, so this rank's mean loss "
        "cannot be weighted. Take the ids from dglx_dist.DataLoader, set session.step_share = dglx_dist."
        "strategies.base.count_targets(len(targets), session) before the call, or use reduction='sum'."
    )


def weighted_sum(gradients: Sequence[RowGradient], reduction: Reduction, world_size: int) -> RowSum | None:
    """Return this rank's contribution to a step's gradient, or None if no weight is above 0.

    ``gradients`` are ordered by backward pass. Raises ConfigError if a weight is unknown.
    """
    weighted = []
    for gradient in gradients:
        weight = compute_weight(gradient.share, reduction, world_size)
        # Gradients with weight 0 are left out instead of multiplied, because a mean over no targets is NaN.
        if weight > 0.0:
            weighted.append((gradient, weight))
    return sum_weighted(weighted)


def sum_weighted(weighted: Sequence[tuple[RowGradient, float]]) -> RowSum | None:
    """Sum gradient times weight, in this order. Return None if there are no gradients.

    The result has one row for each distinct id. A single gradient shares its rows with the result.
    """
    sums = [make_row_sum(gradient.ids, gradient.rows, weight) for gradient, weight in weighted]
    return sum_rows(sums) if sums else None
