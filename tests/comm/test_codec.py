"""Narrower rows: unbiased, bounded errors, bytes of the formula, and numbers that must stay visible."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dglx_dist.comm.codec import RowCodec, WireDtype, row_codec, wire_bytes

INTEGERS: list[WireDtype] = ["int8", "int4"]
WIRES: list[WireDtype] = ["bfloat16", *INTEGERS]
STEPS = {"int8": (127, 255), "int4": (7, 15)}
"""Steps from 0 to the largest number: of a row with negative ones, of one without."""


def codec_of(wire: WireDtype, rows: Tensor, seed: int = 0) -> RowCodec:
    result = row_codec(wire, rows, (seed, 0, 0))
    assert result is not None
    return result


def encode_and_decode(rows: Tensor, of: RowCodec, first: int = 0) -> Tensor:
    codes = torch.full((len(rows), of.row_bytes), 0xAA, dtype=torch.uint8)
    of.encode(rows, codes, first)
    return of.decode(codes)


def some_rows(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of both signs, of one sign, of zeros, of equal values, and of values far from 1."""
    torch.manual_seed(width)
    rows = torch.randn(7, width, dtype=torch.float64)
    rows[1].abs_()
    rows[2], rows[3], rows[4] = 0, 3, -5
    rows[5] *= 1e-30
    rows[6] *= 1e30
    return rows.to(dtype)


def step_of(wire: WireDtype, rows: Tensor) -> Tensor:
    """(n, 1) or (n, k) by how much a number may be off."""
    if wire == "bfloat16":
        return 2.0 ** (torch.floor(torch.log2(rows.abs().clamp(min=1e-300))) - 8)
    signed, unsigned = STEPS[wire]
    steps = torch.where((rows < 0).any(1, keepdim=True), signed, unsigned)
    return rows.abs().amax(1, keepdim=True) / steps


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("width", [2, 3, 7, 64])
def test_errors_are_below_a_step(wire: WireDtype, width: int) -> None:
    rows = some_rows(width)
    result, exact = encode_and_decode(rows, codec_of(wire, rows)).double(), rows.double()
    assert ((result - exact).abs() <= step_of(wire, exact) * (1 + 1e-6)).all()
    assert (result[2] == 0).all()
    assert (result[5] != exact[5]).any()  # small numbers are rounded, too, and not to zero
    assert (result[5].abs().max() / exact[5].abs().max() - 1).abs() < 0.01


NUM_KEYS = 2_000


def deviation(wire: WireDtype, rounded: Callable[[Tensor, int], Tensor]) -> float:
    """The largest one of the mean over keys from the row, in standard errors of rounding up or down."""
    rows = some_rows(5)
    exact = rows.double()
    mean = sum(rounded(rows, seed).double() for seed in range(NUM_KEYS)) / NUM_KEYS
    # Half of a step is the largest standard deviation of a draw between two codes.
    error = step_of(wire, exact) / 2 / math.sqrt(NUM_KEYS)
    return float(((mean - exact).abs() / (error + 1e-7 * exact.abs() + 1e-300)).max())


@pytest.mark.parametrize("wire", INTEGERS)
def test_the_mean_over_keys_is_the_row(wire: WireDtype) -> None:
    assert deviation(wire, lambda rows, seed: encode_and_decode(rows, codec_of(wire, rows, seed))) < 5


@pytest.mark.parametrize("wire", INTEGERS)
def test_zeros_have_no_sign(wire: WireDtype) -> None:
    rows = torch.zeros(2, 3)
    result = encode_and_decode(rows, codec_of(wire, rows))
    assert torch.equal(result, rows)
    assert not result.signbit().any()


@pytest.mark.parametrize("wire", INTEGERS)
def test_rounding_to_nearest_is_biased(wire: WireDtype) -> None:
    def nearest(rows: Tensor, seed: int) -> Tensor:
        step = step_of(wire, rows.double())
        return torch.where(step > 0, (rows / step).round() * step, 0)

    assert deviation(wire, nearest) > 10


def test_draws_depend_on_the_key_the_row_and_the_column() -> None:
    rows = torch.linspace(0, 1, 64).repeat(3, 1)
    base = codec_of("int4", rows)
    first, again = encode_and_decode(rows, base), encode_and_decode(rows, base)
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    # Pieces are those of the whole.
    assert torch.equal(
        torch.cat([encode_and_decode(rows[:1], base, 0), encode_and_decode(rows[1:], base, 1)]), first
    )
    for keys in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        second = row_codec("int4", rows, keys)
        assert second is not None
        assert not torch.equal(encode_and_decode(rows, second), first)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinite_and_nan_values_stay_visible(wire: WireDtype, bad: float) -> None:
    rows = torch.ones(3, 5)
    rows[1, 2] = bad
    result = encode_and_decode(rows, codec_of(wire, rows))
    assert not result[1, 2].isfinite()
    assert torch.equal(result[[0, 2]], rows[[0, 2]])


@pytest.mark.parametrize("wire", WIRES)
def test_decoding_accepts_any_bytes(wire: WireDtype) -> None:
    of = codec_of(wire, torch.zeros(0, 7))
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (5_000, of.row_bytes), dtype=torch.uint8)
    assert of.decode(codes).shape == (5_000, 7)
    codes[:, :4] = 255
    assert of.decode(codes)[:, 0].isnan().all()


def test_row_bytes_match_the_formula() -> None:
    widths = [0, 1, 2, 3, 7, 64]
    assert [wire_bytes("same", width, 4) for width in widths] == [0, 4, 8, 12, 28, 256]
    assert [wire_bytes("bfloat16", width, 4) for width in widths] == [0, 2, 4, 6, 14, 128]
    assert [wire_bytes("int8", width, 4) for width in widths] == [0, 4, 6, 7, 11, 68]
    assert [wire_bytes("int4", width, 4) for width in widths] == [0, 4, 5, 6, 8, 36]
    assert [wire_bytes("int4", width, 2) for width in widths] == [0, 2, 4, 6, 8, 36]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats_and_shapes_round_trip(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 3, 5).to(dtype)
    of = codec_of("int8", rows)
    assert of.row_bytes == wire_bytes("int8", 15, rows.element_size()) == 19
    tensor = encode_and_decode(rows, of)
    assert tensor.shape == rows.shape
    assert ((tensor - rows.float()).abs() <= rows.float().abs().amax((1, 2), keepdim=True) / 127).all()
    assert encode_and_decode(rows[:0], of).shape == (0, 3, 5)
    assert torch.equal(encode_and_decode(rows[:1], of), tensor[:1])


@pytest.mark.parametrize("wire", ["same", *WIRES])
def test_rows_without_gain_are_not_encoded(wire: WireDtype) -> None:
    assert row_codec(wire, torch.zeros(3, 8, dtype=torch.int64), (0, 0, 0)) is None
    assert row_codec(wire, torch.zeros(3, 0), (0, 0, 0)) is None
    assert row_codec(wire, torch.zeros(3, 1, dtype=torch.bfloat16), (0, 0, 0)) is None
    assert (row_codec(wire, torch.zeros(3), (0, 0, 0)) is None) == (wire != "bfloat16")
