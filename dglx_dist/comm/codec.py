"""Narrower rows on the wire: floats in 16, 8 or 4 bits, rounded at random without bias.

A row is rounded up or down by draws that are keyed, so a repeated or resumed run sends the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dglx_dist.keyed_random import half_word, item_key, stream_key
from dglx_dist.records import Array

WireDtype: TypeAlias = Literal["same", "bfloat16", "int8", "int4"]

_BITS = {"bfloat16": 16, "int8": 8, "int4": 4}
_SCALE_BYTES = 4
_STREAMS = 1 << 34
"""First stream of draws, above those of samplers and dropouts."""


def wire_bytes(wire: WireDtype, width: int, itemsize: int) -> int:
    """Return the bytes of a row of ``width`` floats of ``itemsize`` bytes.

    2 ``width`` as bfloat16; as int8 or int4 the scale of 4 bytes, and ``width`` or half of it, rounded up.
    Rows that this would not shorten travel as they are.
    """
    bits = _BITS.get(wire, 8 * itemsize)
    codes = -(-bits * width // 8) + (_SCALE_BYTES if bits < 16 else 0)
    return min(codes, width * itemsize)


@final
@dataclass(frozen=True, kw_only=True)
class RowCodec:
    """Encodes rows of ``row_shape`` floats, as bytes that do not depend on this machine.

    As int8 or int4 a row is its largest absolute number as a float32, and codes of equal steps: from minus
    that number to it, or from 0 in a row without negative numbers, whose scale has a minus sign. Zeros are
    exact, and errors are below a step: 1/127 or 1/7 of that number, without negative ones 1/255 or 1/15. A
    row with an infinite number or a NaN becomes NaN; as bfloat16 such numbers stay what they are.
    """

    bits: int
    row_shape: tuple[int, ...]
    row_bytes: int
    stream: np.uint64
    """Key of the draws."""

    def encode(self, rows: Tensor, out: Tensor, first: int) -> None:
        """Write the (n, *row_shape) ``rows`` of any float type to the (n, row_bytes) uint8 ``out``.

        ``first`` is the number of the first one among all rows with this key. Both are in host memory.
        """
        floats = rows.to(torch.float32).reshape(len(rows), math.prod(self.row_shape)).numpy()
        (_encode_halves if self.bits == 16 else _encode)(floats, self.bits, self.stream, first, out.numpy())

    def decode(self, codes: Tensor) -> Tensor:
        """Return (n, *row_shape) float32 of any (n, row_bytes) uint8 ``codes`` in host memory."""
        rows = torch.empty((len(codes), *self.row_shape))
        floats = rows.view(len(codes), math.prod(self.row_shape)).numpy()
        (_decode_halves if self.bits == 16 else _decode)(codes.numpy(), self.bits, floats)
        return rows


def row_codec(wire: WireDtype, rows: Tensor, keys: Sequence[int]) -> RowCodec | None:
    """Return the codec of ``rows``, equal for ranks that give the same type and row shape.

    ``keys`` are the seed, the step, and a number for everything else. None: the rows travel as they are.
    """
    width, itemsize = math.prod(rows.shape[1:]), rows.element_size()
    row_bytes = wire_bytes(wire, width, itemsize)
    if not rows.is_floating_point() or row_bytes == width * itemsize:
        return None
    seed, step, number = keys
    stream = stream_key(seed, step, _STREAMS + number)
    shape = tuple(rows.shape[1:])
    return RowCodec(bits=_BITS[wire], row_shape=shape, row_bytes=row_bytes, stream=stream)


@njit(cache=True, nogil=True)
def _encode(rows: Array, bits: int, stream: np.uint64, first: int, out: Array) -> None:
    scale = np.empty(1, np.float32)
    scale_bytes = scale.view(np.uint32)
    for i in range(len(rows)):
        largest, has_negative, is_finite = 0.0, False, True
        for number in rows[i]:
            largest = max(largest, abs(number))
            has_negative |= number < 0
            is_finite &= math.isfinite(number)
        has_sign = has_negative or largest == 0
        scale[0] = (largest if has_sign else -largest) if is_finite else math.nan
        for j in range(4):
            out[i, j] = (scale_bytes[0] >> np.uint32(8 * j)) & np.uint32(255)
        out[i, 4:] = 0
        zero = (1 << (bits - 1)) - 1 if has_sign else 0
        steps = zero if has_sign else (1 << bits) - 1
        key = item_key(stream, first + i)
        for j in range(rows.shape[1] if is_finite and largest > 0 else 0):
            # At most ``steps``: a quotient of floats that is at most 1 is not rounded above it.
            draw = np.float64(half_word(key, j)) * 2.0**-32
            code = zero + math.floor(np.float64(rows[i, j]) / largest * steps + draw)
            out[i, 4 + (j * bits >> 3)] |= np.uint8(code << (j * bits & 7))


@njit(cache=True, nogil=True)
def _decode(codes: Array, bits: int, rows: Array) -> None:
    scale = np.empty(1, np.float32)
    scale_bytes = scale.view(np.uint32)
    for i in range(len(codes)):
        scale_bytes[0] = 0
        for j in range(4):
            scale_bytes[0] |= np.uint32(codes[i, j]) << np.uint32(8 * j)
        has_sign = not scale[0] < 0
        zero = (1 << (bits - 1)) - 1 if has_sign else 0
        steps = zero if has_sign else (1 << bits) - 1
        largest = abs(np.float64(scale[0]))
        for j in range(rows.shape[1]):
            code = codes[i, 4 + (j * bits >> 3)] >> np.uint8(j * bits & 7) & ((1 << bits) - 1)
            rows[i, j] = largest * (np.int64(code) - zero) / steps


@njit(cache=True, nogil=True)
def _encode_halves(rows: Array, bits: int, stream: np.uint64, first: int, out: Array) -> None:
    for i in range(len(rows)):
        key, words = item_key(stream, first + i), rows[i].view(np.uint32)
        for j in range(len(words)):
            word = np.uint64(words[j])
            if math.isfinite(rows[i, j]):
                word += half_word(key, j) & np.uint64(0xFFFF)
            elif math.isnan(rows[i, j]):
                word = np.uint64(0x7FC00000)
            out[i, 2 * j] = (word >> np.uint64(16)) & np.uint64(255)
            out[i, 2 * j + 1] = word >> np.uint64(24)


@njit(cache=True, nogil=True)
def _decode_halves(codes: Array, bits: int, rows: Array) -> None:
    for i in range(len(codes)):
        words = rows[i].view(np.uint32)
        for j in range(len(words)):
            low, high = np.uint32(codes[i, 2 * j]), np.uint32(codes[i, 2 * j + 1])
            words[j] = low << np.uint32(16) | high << np.uint32(24)
