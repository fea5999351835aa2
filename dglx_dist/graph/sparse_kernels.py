"""Compiled work on the rows of a sparse update: grouping, summing, and the three update formulas.

Formulas are those of torch (``SGD`` and ``Adagrad`` on sparse gradients, ``SparseAdam``) on gradients in
which every row occurs once.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dglx_dist.records import Array


@njit(cache=True, nogil=True)
def copy_scaled(source: Array, weight: float, out: Array) -> None:
    """Write ``weight * source`` to ``out``, (k, d) both; they may be the same."""
    factor = source.dtype.type(weight)
    for row in range(source.shape[0]):
        for column in range(source.shape[1]):
            out[row, column] = factor * source[row, column]


@njit(cache=True, nogil=True)
def add_rows(source: Array, weight: float, places: Array, out: Array) -> None:
    """Add ``weight * source[k]`` to ``out[places[k]]`` for k = 0, 1, ..."""
    factor = source.dtype.type(weight)
    for k in range(source.shape[0]):
        place = places[k]
        for column in range(source.shape[1]):
            out[place, column] += factor * source[k, column]


@njit(cache=True, nogil=True)
def group_by_owner(ids: Array, starts: Array) -> tuple[Array, Array]:
    """Sort positions by the owner of their id, keeping their order within an owner.

    Args:
        ids: (k,) int64.
        starts: (W + 1,) int64; owner r has the ids ``starts[r]:starts[r + 1]``.

    Returns:
        (k,) int64 positions and (W + 1,) int64: those of owner r are ``positions[first[r]:first[r + 1]]``.
    """
    owners = len(starts) - 1
    first = np.zeros(owners + 1, np.int64)
    owner_of = np.empty(len(ids), np.int32)
    for k in range(len(ids)):
        owner = np.searchsorted(starts, ids[k], side="right") - 1
        owner_of[k] = owner
        first[owner + 1] += 1
    for owner in range(owners):
        first[owner + 1] += first[owner]
    following = first.copy()
    positions = np.empty(len(ids), np.int64)
    for k in range(len(ids)):
        positions[following[owner_of[k]]] = k
        following[owner_of[k]] += 1
    return positions, first


@njit(cache=True, nogil=True)
def take_rows(ids: Array, rows: Array, positions: Array, out_ids: Array, out_rows: Array) -> None:
    """Copy ids and rows at ``positions`` (k,) to ``out_ids`` (k,) and ``out_rows`` (k, d)."""
    for k in range(len(positions)):
        position = positions[k]
        out_ids[k] = ids[position]
        for column in range(rows.shape[1]):
            out_rows[k, column] = rows[position, column]


@njit(cache=True, nogil=True)
def gather_sum(
    ids: Array, rows: Array, first: int, slot_of: Array, touched: Array, sums: Array, count: int
) -> int:
    """Add rows to sums kept in slots, in the order given; a row met for the first time gets the next slot.

    Args:
        ids: (k,) int64, each in [``first``, ``first`` + n).
        rows: (k, d).
        first: Id of row 0.
        slot_of: (n,) int32, the slot of a row or -1; changed.
        touched: (capacity,) int64, the row of each slot; changed.
        sums: (capacity, d); changed.
        count: Slots in use.

    Returns:
        Slots in use afterwards.
    """
    for k in range(len(ids)):
        row = ids[k] - first
        slot = slot_of[row]
        if slot < 0:
            slot_of[row] = count
            touched[count] = row
            for column in range(rows.shape[1]):
                sums[count, column] = rows[k, column]
            count += 1
        else:
            for column in range(rows.shape[1]):
                sums[slot, column] += rows[k, column]
    return count


@njit(cache=True, nogil=True)
def free_slots(slot_of: Array, touched: Array) -> None:
    """Give back the slots of the rows ``touched``."""
    for k in range(len(touched)):
        slot_of[touched[k]] = -1


@njit(cache=True, nogil=True)
def update_sgd(weight: Array, at: Array, gradient: Array, rate: float) -> None:
    """``w -= rate * g``.

    Args:
        weight: (n, d); changed.
        at: (k,) int64, the row of ``weight`` that goes with each row of ``gradient``.
        gradient: (k, d).
        rate: The learning rate.
    """
    step = weight.dtype.type(rate)
    for k in range(len(at)):
        row = at[k]
        for column in range(weight.shape[1]):
            weight[row, column] -= step * gradient[k, column]


# Without this error model every division is checked for 0 and none is vectorised; eps is in each of them.
@njit(cache=True, nogil=True, error_model="numpy")
def update_adagrad(
    weight: Array, at: Array, total: Array, touched: Array, gradient: Array, rate: float, eps: float
) -> None:
    """``s += g^2; w -= rate * g / (sqrt(s) + eps)``; as :func:`update_sgd`, ``s`` is row ``touched[k]``."""
    step, small = weight.dtype.type(rate), weight.dtype.type(eps)
    for k in range(len(at)):
        row, state = at[k], touched[k]
        for column in range(weight.shape[1]):
            g = gradient[k, column]
            s = total[state, column] + g * g
            total[state, column] = s
            weight[row, column] -= step * g / (np.sqrt(s) + small)


@njit(cache=True, nogil=True, error_model="numpy")
def update_adam(
    weight: Array,
    at: Array,
    mean: Array,
    square: Array,
    touched: Array,
    gradient: Array,
    constants: tuple[float, float, float, float],
) -> None:
    """``m += a (g - m); v += b (g^2 - v); w -= rate * m / (sqrt(v) + eps)``.

    As :func:`update_sgd`; ``m`` and ``v`` are rows ``touched[k]``. ``constants`` are rate, a, b and eps; the
    rate holds the correction of both moments for their start at 0.
    """
    kind = weight.dtype.type
    step, gain_mean = kind(constants[0]), kind(constants[1])
    gain_square, small = kind(constants[2]), kind(constants[3])
    for k in range(len(at)):
        row, state = at[k], touched[k]
        for column in range(weight.shape[1]):
            g = gradient[k, column]
            m = mean[state, column] + gain_mean * (g - mean[state, column])
            v = square[state, column] + gain_square * (g * g - square[state, column])
            mean[state, column] = m
            square[state, column] = v
            weight[row, column] -= step * m / (np.sqrt(v) + small)
