"""The wire format: messages survive the round trip; malformed ones are refused whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dglx_dist.comm.wire import (
    INLINE_BYTES,
    MAX_ARRAY_BYTES,
    MAX_ARRAYS,
    MAX_HEAD_BYTES,
    ArraySpec,
    Assembler,
    Head,
    Kind,
    Message,
    WireError,
    array_from,
    decode,
    encode,
    frames_of,
    raw_bytes,
    send_frames,
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


CHUNK = 1500
ARRAYS = [
    np.arange(500, dtype=np.int64),  # 4000 bytes: in chunks
    np.zeros(0),
    np.arange(7, dtype=np.uint8),  # in the head
    np.ones(150),  # 1200 bytes: in a frame of its own
]


@pytest.fixture
def wire() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://test")
        other.connect("inproc://test")
        other.setsockopt(zmq.RCVTIMEO, 10_000)
        yield one, other


def deliver(wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], messages: list[list[bytes]]) -> list[Message]:
    sender, receiver = wire
    assembler = Assembler()
    done = []
    for frames in messages:
        send_frames(sender, frames)
        message = assembler.read(receiver)
        if message is not None:
            done.append(message)
    return done


def test_chunks_of_two_messages_may_mix(wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    first, second = (list(frames_of(Head(Kind.REPLY, n), ARRAYS, CHUNK)) for n in (1, 2))
    assert len(first) == 1 + 3
    mixed = [frames for both in zip(second, first, strict=True) for frames in both]
    found = deliver(wire, mixed)
    assert [message.head.request for message in found] == [2, 1]
    for message in found:
        assert all(np.array_equal(a, b) for a, b in zip(message.arrays, ARRAYS, strict=True))


def _spoil(kind: str) -> list[list[bytes]]:
    first, *chunks = (list(frames) for frames in frames_of(Head(Kind.REPLY, 1), ARRAYS, CHUNK))
    return {
        "buffer missing": [first[:1]],
        "buffer too large": [[first[0], b"x" * 1201]],
        "buffer too small": [[first[0], b"x"]],
        "inline bytes missing": [[first[0][:-1], first[1]]],
        "starts twice": [first, first],
        "chunk without start": [chunks[0]],
        "chunk too small": [first, [chunks[0][0], b"x"]],
        "chunk too large": [first, [chunks[0][0], b"x" * (CHUNK + 1)]],
        "chunk without buffer": [first, chunks[0][:1]],
        "chunk twice": [first, *chunks[:-1], chunks[0]],
        "chunk between chunks": [first, [encode(Head(Kind.CHUNK, 1, offset=1)), b"x" * CHUNK]],
        "chunk of no array": [first, [encode(Head(Kind.CHUNK, 1, array=9)), b"x" * CHUNK]],
        "chunk of a whole array": [first, [encode(Head(Kind.CHUNK, 1, array=3)), b"x" * 1200]],
        "chunk of an inline array": [first, [encode(Head(Kind.CHUNK, 1, array=2)), b"x" * 7]],
        "chunk past the end": [first, [encode(Head(Kind.CHUNK, 1, offset=3 * CHUNK)), b"x" * CHUNK]],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("inline bytes missing", "chunk of an inline array"),
        *("buffer missing", "buffer too large", "buffer too small", "starts twice", "chunk without start"),
        *("chunk too small", "chunk too large", "chunk without buffer", "chunk twice"),
        *("chunk between chunks", "chunk of no array", "chunk of a whole array", "chunk past the end"),
    ],
)
def test_what_does_not_fit_is_refused(wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], kind: str) -> None:
    with pytest.raises(WireError):
        deliver(wire, _spoil(kind))
    # Nothing of the bad message is left behind for the next one.
    (found,) = deliver(wire, list(frames_of(Head(Kind.REPLY, 5), ARRAYS, CHUNK)))
    assert np.array_equal(found.arrays[0], ARRAYS[0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(st.binary(max_size=80), min_size=1, max_size=4), min_size=1, max_size=4))
def test_random_messages_are_refused_whole(
    wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], messages: list[list[bytes]]
) -> None:
    for frames in messages:
        with pytest.raises(WireError):
            deliver(wire, [frames])
