"""``a * b + c`` rounded once, as the processors' fused instruction gives it and NumPy does not.

torch's vector kernels use that instruction, so updates that must equal torch's to the last bit need it.
Float32 goes through float64; float64 through exact sums and products of two halves (Dekker; Knuth;
Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
"""

from __future__ import annotations

import numpy as np

from dglx_dist.records import Array

_BLOCK = 1 << 13
"""Elements at a time: some forty intermediate vectors of this length stay in the cache."""
_SPLITTER = float((1 << 27) + 1)


def fused_multiply_add(a: Array | float, b: Array, c: Array) -> Array:
    """Return ``a * b + c`` with one rounding; a new array.

    Args:
        a: A number, which takes the dtype of ``c`` first, or an array like ``c``.
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
    # A product of two float32 is exact in float64.
    product = a.astype(np.float64) * b.astype(np.float64)
    return _odd_sum(product, c.astype(np.float64)).astype(np.float32)


def _wide(a: Array, b: Array, c: Array) -> Array:
    product, rest = _two_product(a, b)
    low, lower = _two_sum(c, rest)
    high, middle = _two_sum(product, low)
    fused = high + _odd_sum(lower, middle)
    # Halves overflow where the number itself does not yet, and they lose the sign of a zero.
    return np.where(np.isfinite(fused) & (fused != 0), fused, product + c)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded sum and what rounding took away."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded product and what rounding took away."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    rest = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, rest


def _halves(a: Array) -> tuple[Array, Array]:
    spread = _SPLITTER * a
    high = spread - (spread - a)
    return high, a - high


def _odd_sum(a: Array, b: Array) -> Array:
    """Return ``a + b``, where inexact rounded to the neighbour whose last bit is 1.

    Such a sum may be rounded once more to fewer bits as if it were exact.
    """
    total, rest = _two_sum(a, b)
    is_even = (total.view(np.int64) & 1) == 0
    toward = np.nextafter(total, np.copysign(np.inf, rest))
    return np.where((rest != 0) & is_even & np.isfinite(total), toward, total)
