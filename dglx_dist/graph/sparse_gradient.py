"""Gradients of some rows: records, weighted sums, and the kernels that apply them."""

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
"""Rows between the prefetched one and the updated one."""


class RowSum(NamedTuple):
    """The gradient of k rows of an embedding: ``weight * rows[places]``."""

    ids: Array
    """(k,) int64, distinct; in the kernels that update rows: counted from the first row of the owner."""
    rows: Array
    """(n, d) float32 or float64."""
    places: Array
    """(k,) int64 in [0, n): the row of each id."""
    weight: float = 1.0

    def for_sending(self) -> RowSum:
        """Return the same with one row for each id, in order, and weight 1."""
        rows = np.empty((len(self.ids), self.rows.shape[1]), dtype=self.rows.dtype)
        _add(self, np.arange(len(self.ids)), rows, 0)
        return merge_repeated(self.ids, rows)


def merge_repeated(ids: Array, rows: Array, weight: float = 1.0) -> RowSum:
    return RowSum(ids, rows, np.arange(len(ids)), weight)


def sum_rows(gradients: Sequence[RowSum]) -> RowSum:
    """Return the sum in the order of ``gradients``, at least one, with each row once."""
    if len(gradients) == 1:
        return gradients[0]
    ids, slots = number_distinct(np.concatenate([one.ids for one in gradients]))
    rows = np.empty((len(ids), gradients[0].rows.shape[1]), gradients[0].rows.dtype)
    first = used = 0
    for one in gradients:
        used = _add(one, slots[first : first + len(one.ids)], rows, used)
        first += len(one.ids)
    return merge_repeated(ids, rows)


@njit(cache=True, nogil=True)
def _add(gradient: RowSum, slots: Array, out: Array, used: int) -> int:
    """Add to the rows ``slots`` of ``out``, numbered by appearance; return how many have been used so far."""
    factor = out.dtype.type(gradient.weight)
    for k in range(len(slots)):
        slot, place = np.uint64(slots[k]), np.uint64(gradient.places[k])
        if slots[k] == used:
            used += 1
            for column in range(out.shape[1]):
                out[slot, np.uint64(column)] = factor * gradient.rows[place, np.uint64(column)]
        else:
            for column in range(out.shape[1]):
                out[slot, np.uint64(column)] += factor * gradient.rows[place, np.uint64(column)]
    return used


# The kernels of updates: (k,) int64 ``at`` are distinct rows of (n, d) ``weight``, one for each gradient, and
# ``gradient.ids`` those of the states. Without this error model every division is checked for 0 and none is
# vectorised; each divisor includes eps.
@njit(cache=True, nogil=True, error_model="numpy")
def update_sgd(
    weight: Array, at: Array, _states: tuple[()], gradient: RowSum, constants: tuple[float]
) -> None:
    """``w -= rate * g``; ``constants``: rate."""
    kind = weight.dtype.type
    step, factor = kind(constants[0]), kind(gradient.weight)
    for k in range(len(at)):
        row, place = np.uint64(at[k]), np.uint64(gradient.places[k])
        for at_column in range(weight.shape[1]):
            column = np.uint64(at_column)
            weight[row, column] -= step * (factor * gradient.rows[place, column])


@njit(cache=True, nogil=True, error_model="numpy")
def update_adagrad(
    weight: Array, at: Array, states: tuple[Array], gradient: RowSum, constants: tuple[float, float]
) -> None:
    """``s += g^2; w -= rate * g / (sqrt(s) + eps)``; ``constants``: rate, eps."""
    kind, touched, total = weight.dtype.type, gradient.ids, states[0]
    step, small, factor = kind(constants[0]), kind(constants[1]), kind(gradient.weight)
    last = len(at) - 1
    for k in range(len(at)):
        read_ahead(weight, at[min(k + AHEAD, last)])
        read_ahead(total, touched[min(k + AHEAD, last)])
        row, state = np.uint64(at[k]), np.uint64(touched[k])
        place = np.uint64(gradient.places[k])
        for at_column in range(weight.shape[1]):
            column = np.uint64(at_column)
            g = factor * gradient.rows[place, column]
            s = total[state, column] + g * g
            total[state, column] = s
            weight[row, column] -= step * g / (np.sqrt(s) + small)


@njit(cache=True, nogil=True, error_model="numpy")
def update_adam(
    weight: Array,
    at: Array,
    states: tuple[Array, Array],
    gradient: RowSum,
    constants: tuple[float, float, float, float],
) -> None:
    """``m += a (g - m); v += b (g^2 - v); w -= rate * m / (sqrt(v) + eps)``.

    ``constants``: rate, a, b, eps; the rate holds the correction of both moments for their start at 0.
    """
    kind, touched, mean, square = weight.dtype.type, gradient.ids, states[0], states[1]
    step, gain_mean = kind(constants[0]), kind(constants[1])
    gain_square, small = kind(constants[2]), kind(constants[3])
    factor, last = kind(gradient.weight), len(at) - 1
    for k in range(len(at)):
        read_ahead(weight, at[min(k + AHEAD, last)])
        read_ahead(mean, touched[min(k + AHEAD, last)])
        read_ahead(square, touched[min(k + AHEAD, last)])
        row, state = np.uint64(at[k]), np.uint64(touched[k])
        place = np.uint64(gradient.places[k])
        for at_column in range(weight.shape[1]):
            column = np.uint64(at_column)
            g = factor * gradient.rows[place, column]
            m = mean[state, column] + gain_mean * (g - mean[state, column])
            v = square[state, column] + gain_square * (g * g - square[state, column])
            mean[state, column] = m
            square[state, column] = v
            weight[row, column] -= step * m / (np.sqrt(v) + small)


Reduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGradient:
    """The gradient of the rows of one call, from one backward pass."""

    ids: Array
    """(k,) int64, distinct."""
    rows: Array
    """(k, d) float32 or float64. Read-only: autograd may share the memory with another tensor."""
    share: StepShare | None
    """Of the step, at the time of the call."""
    wait: Callable[[], None] | None = None
    """Waits until ``rows`` have arrived from a device; None: they have."""


def compute_weight(share: StepShare | None, reduction: Reduction, world_size: int) -> float:
    """Return the factor of a rank's gradient in the sum over ranks.

    n_local / n_global for a mean, 1 for a sum; 0 on a rank without targets, whatever its loss is (the
    gradient rule, docs/design/contracts.md).
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
        "an embedding was called outside of a step whose number of targets is known, so this rank's mean "
        "loss cannot be weighted; take its ids from dglx_dist.DataLoader, set session.step_share = dglx_dist."
        "strategies.base.count_targets(len(targets), session) before the call, or use reduction='sum'"
    )


def weighted_sum(gradients: Sequence[RowGradient], reduction: Reduction, world_size: int) -> RowSum | None:
    """Return this rank's contribution to the gradient of a step; None where no weight is above 0.

    ``gradients`` are in the order of the backward passes; raises as :func:`compute_weight`.
    """
    weighted = [(gradient, compute_weight(gradient.share, reduction, world_size)) for gradient in gradients]
    # Left out, not multiplied: the mean over no targets is not a number.
    return sum_weighted([(gradient, weight) for gradient, weight in weighted if weight > 0.0])


def sum_weighted(weighted: Sequence[tuple[RowGradient, float]]) -> RowSum | None:
    """Return the sum of gradient times weight in this order, each row once; None for none.

    A single gradient shares its rows with the result.
    """
    given = [merge_repeated(gradient.ids, gradient.rows, weight) for gradient, weight in weighted]
    return sum_rows(given) if given else None
