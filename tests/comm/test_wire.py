"""The wire format: what goes in comes out, and nothing else is ever believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglx_dist.comm.wire import (
    INLINE_BYTES,
    MAX_ARRAY_BYTES,
    MAX_ARRAYS,
    MAX_HEAD_BYTES,
    ArraySpec,
    Head,
    Kind,
    WireError,
    array_from,
    decode,
    encode,
    raw_bytes,
    spec_of,
)

DTYPES = ["bool", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64"]
SPECS = st.builds(
    ArraySpec,
    st.sampled_from([np.dtype(name) for name in DTYPES]),
    st.lists(st.integers(0, 50), max_size=4).map(tuple),
    st.integers(0, 2**32 - 1),
)
HEADS = st.builds(
    Head,
    st.sampled_from([Kind.REQUEST, Kind.REPLY, Kind.ERROR]),
    st.integers(0, 2**64 - 1),
    st.text(max_size=30),
    st.text(max_size=30),
    st.lists(SPECS, max_size=5).map(tuple),
    st.just(0),
    st.just(0),
    st.just(0),
)


def raw_of(head: Head) -> bytes:
    inline = [bytes(spec.num_bytes) for spec in head.arrays if spec.num_bytes <= INLINE_BYTES]
    return encode(head, inline=[memoryview(one) for one in inline])


@given(HEADS)
def test_heads_come_back(head: Head) -> None:
    assert decode(raw_of(head))._replace(body=0) == head


@given(st.integers(0, 2**32), st.integers(0, 2**16 - 1), st.integers(0, 2**63))
def test_chunk_heads_come_back(request: int, index: int, offset: int) -> None:
    head = Head(Kind.CHUNK, request, array=index, offset=offset)
    assert decode(encode(head)) == head


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@given(HEADS, st.data())
def test_damaged_heads_are_refused_or_read_within_the_limits(head: Head, data: st.DataObject) -> None:
    raw = bytearray(raw_of(head))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for message in (bytes(raw), bytes(raw[:cut])):
        try:
            found = decode(message)
        except WireError:
            continue
        assert len(found.arrays) <= MAX_ARRAYS
        for spec in found.arrays:
            assert 0 <= spec.num_bytes <= MAX_ARRAY_BYTES
            assert min(spec.shape, default=0) >= 0


@given(HEADS)
def test_every_cut_is_refused(head: Head) -> None:
    raw = raw_of(head)
    for end in range(len(raw)):
        with pytest.raises(WireError):
            decode(raw[:end])
    with pytest.raises(WireError):
        decode(raw + b"\0")


def test_limits() -> None:
    with pytest.raises(WireError, match="too long"):
        encode(Head(Kind.REQUEST, 1, "x" * 5000))
    with pytest.raises(WireError, match="too many"):
        encode(Head(Kind.REQUEST, 1, arrays=(ArraySpec(np.dtype("bool"), ()),) * (MAX_ARRAYS + 1)))
    with pytest.raises(WireError, match="head of"):
        decode(b"DGLX" * MAX_HEAD_BYTES)
    huge = Head(Kind.REQUEST, 1, arrays=(ArraySpec(np.dtype("int64"), (2**40, 2**40)),))
    with pytest.raises(WireError, match="more than"):
        decode(encode(huge))
    negative = Head(Kind.REQUEST, 1, arrays=(ArraySpec(np.dtype("int64"), (-1,)),))
    with pytest.raises(WireError, match="negative"):
        decode(encode(negative))
    with pytest.raises(WireError, match="dtype object cannot be sent"):
        spec_of(np.array([{}]), 10)
    with pytest.raises(WireError, match="9 dimensions"):
        spec_of(np.zeros((1,) * 9), 10)


def test_no_array_where_numpy_has_no_such_shape() -> None:
    with pytest.raises(WireError, match="shape"):
        array_from(ArraySpec(np.dtype("int64"), (3,)), b"\0" * 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_bytes_are_little_endian_and_in_c_order(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    expected = array.T.copy().tobytes()
    assert raw_bytes(array.T).tobytes() == expected
    if dtype not in ("bool", "uint8"):
        assert raw_bytes(array.T.astype(np.dtype(dtype).newbyteorder(">"))).tobytes() == expected
