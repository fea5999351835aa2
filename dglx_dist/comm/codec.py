"""Codes for rows on the wire: bfloat16, int8 and int4 instead of float32, with keyed rounding."""

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

_STREAMS = 1 << 34
"""First stream for draws, above the streams for samplers and dropouts."""
_SCALE_BYTES = 4


def wire_bytes(wire: WireDtype, width: int, itemsize: int) -> int:
    """Return the bytes that a row with ``width`` floats takes on the wire. It never grows."""
    bits = _BITS.get(wire, 8 * itemsize)
    num_bytes = -(-bits * width // 8)
    if bits < 16:
        num_bytes += _SCALE_BYTES
    return min(num_bytes, width * itemsize)


@final
@dataclass(frozen=True, kw_only=True)
class RowCodec:
    """Encodes rows with shape ``row_shape`` in host memory.

    As int8 or int4, a row is a scale and codes with equal steps. The scale is the row's largest absolute
    number as float32. The codes cover the range from minus this number to this number. In a row without
    negative numbers, the codes start from 0, and a negative scale marks such a row. Numbers are rounded up or
    down at random, so that their mean is exact. Zeros are exact. Errors are below a step, which is 1/127 or
    1/7 of the largest number, or 1/255 or 1/15 without negative numbers. A row with a number that is not
    finite becomes NaN. As bfloat16, numbers are rounded to the nearest.
    """

    bits: int
    row_shape: tuple[int, ...]
    row_bytes: int
    stream: np.uint64
    """Key for the draws."""

    def empty(self, rows: Tensor) -> Tensor:
        """Return (n, row_bytes) uint8 memory to encode (n, *row_shape) ``rows`` into."""
        return torch.empty((len(rows), self.row_bytes), dtype=torch.uint8)

    def encode(self, rows: Tensor, out: Tensor, row_offset: int) -> None:
        """Write the (n, *row_shape) ``rows``, with any float type, to the (n, row_bytes) uint8 ``out``.

        ``row_offset`` is the index of the first row among all rows with the same key.
        """
        floats = rows.reshape(len(rows), math.prod(self.row_shape)).to(torch.float32)
        if self.bits == 16:
            out.view(torch.bfloat16).copy_(floats)
            return

        largest = floats.abs().amax(1)
        has_negative = (floats < 0).any(1)
        scales = torch.where(has_negative, largest, -largest)
        scales[~largest.isfinite()] = math.nan

        out[:, :_SCALE_BYTES] = scales.view(-1, 1).view(torch.uint8)
        codes = out[:, _SCALE_BYTES:].numpy()
        _encode(floats.numpy(), scales.numpy(), self.bits, self.stream, row_offset, codes)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode ``codes``, (n, row_bytes) uint8, to (n, *row_shape) rows.

        The rows are bfloat16 if a number has 16 bits, and float32 otherwise.
        """
        if self.bits == 16:
            return codes.view(torch.bfloat16).view(-1, *self.row_shape)
        rows = torch.empty(len(codes), math.prod(self.row_shape))
        scales = codes[:, :_SCALE_BYTES].reshape(-1).clone().view(torch.float32)
        _decode(codes[:, _SCALE_BYTES:].numpy(), scales.numpy(), self.bits, rows.numpy())
        return rows.view(-1, *self.row_shape)


def row_codec(wire: WireDtype, rows: Tensor, keys: Sequence[int]) -> RowCodec | None:
    """Return the codec for ``rows``, or None if they travel unchanged.

    Ranks with the same dtype and row shape get equal codecs. Rows travel unchanged if they are integers or
    would not get smaller. ``keys`` are the seed, the step and a number that is unique within the step.
    """
    shape = tuple(rows.shape[1:])
    width = math.prod(shape)
    row_bytes = wire_bytes(wire, width, rows.element_size())
    if not rows.is_floating_point() or row_bytes == width * rows.element_size():
        return None
    seed, step, stream_number = keys
    stream = stream_key(seed, step, _STREAMS + stream_number)
    return RowCodec(bits=_BITS[wire], row_shape=shape, row_bytes=row_bytes, stream=stream)


@njit(cache=True, nogil=True)
def _range(scale: float, bits: int) -> tuple[int, int]:
    """Return the code for 0, and the number of steps from there to the largest number."""
    if scale <= 0:
        return 0, (1 << bits) - 1
    zero = (1 << (bits - 1)) - 1
    return zero, zero


@njit(cache=True, nogil=True)
def _encode(rows: Array, scales: Array, bits: int, stream: np.uint64, row_offset: int, out: Array) -> None:
    """Write rows as codes with ``bits`` bits each to ``out``, rounded up or down at random.

    ``row_offset`` is the index of the first row. The draws depend on ``stream``, the row's index and the
    column.
    """
    out[:] = 0
    for i in range(len(rows)):
        largest = abs(np.float64(scales[i]))
        if not largest > 0:
            # A row with only zeros has the code 0, and a NaN scale makes the decoded row NaN.
            continue

        key = item_key(stream, row_offset + i)
        zero, steps = _range(scales[i], bits)
        for j in range(rows.shape[1]):
            # Draws keep away from 0 and 1, so that rounding errors in the product stay within the range.
            draw = (np.float64(half_word(key, j)) + 0.5) * 2.0**-32
            code = zero + math.floor(rows[i, j] * (steps / largest) + draw)
            out[i, j * bits >> 3] |= np.uint8(code << (j * bits & 7))


@njit(cache=True, nogil=True)
def _decode(codes: Array, scales: Array, bits: int, rows: Array) -> None:
    code_mask = (1 << bits) - 1
    for i in range(len(codes)):
        largest = abs(np.float64(scales[i]))
        zero, steps = _range(scales[i], bits)
        for j in range(rows.shape[1]):
            code = np.int64(codes[i, j * bits >> 3]) >> (j * bits & 7) & code_mask
            rows[i, j] = largest * (code - zero) / steps
