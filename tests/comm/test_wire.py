"""The wire format: messages survive the round trip; malformed ones are refused whole."""

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dglx_dist.comm.wire import (
    FRAME_BYTES,
    MAX_ARRAY_BYTES,
    MAX_ARRAYS,
    MAX_HEAD_BYTES,
    Head,
    Kind,
    WireError,
    decode,
    encode,
    read_arrays,
    send_message,
    skip,
)
from dglx_dist.records import Array

DTYPES = ["bool", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64"]
ARRAYS = st.lists(
    st.builds(
        lambda dtype, shape: np.zeros(shape, dtype),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 9), max_size=4),
    ),
    max_size=5,
)
HEADS = st.builds(
    lambda *fields: Head(*fields),
    st.sampled_from(Kind),
    st.integers(0, 2**64 - 1),
    st.text(max_size=30),
    st.text(max_size=30),
)


RELAXED = settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=50)
"""A loaded machine may take long for an example."""


@RELAXED
@given(HEADS, ARRAYS)
def test_decoding_returns_encoded_heads(head: Head, arrays: list[Array]) -> None:
    text = decode(encode(head, arrays)[0])
    assert text[:4] == head[:4]
    assert [(spec.dtype, spec.shape) for spec in text.arrays] == [
        (array.dtype, array.shape) for array in arrays
    ]


@RELAXED
@given(HEADS, ARRAYS, st.data())
def test_damaged_heads_are_refused_or_read_within_the_limits(
    head: Head, arrays: list[Array], data: st.DataObject
) -> None:
    raw = bytearray(encode(head, arrays)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for message in (bytes(raw), bytes(raw[:cut])):
        try:
            text = decode(message)
        except WireError:
            continue
        assert len(text.arrays) <= MAX_ARRAYS
        for spec in text.arrays:
            assert 0 <= spec.num_bytes <= MAX_ARRAY_BYTES
            assert min(spec.shape, default=0) >= 0


@RELAXED
@given(HEADS, ARRAYS)
def test_every_cut_is_refused(head: Head, arrays: list[Array]) -> None:
    raw = bytes(encode(head, arrays)[0])
    for end in [*range(len(raw)), None]:
        with pytest.raises(WireError):
            decode(raw + b"\0" if end is None else raw[:end])


TOO_MUCH = [
    (Head(Kind.REQUEST, 1, "x" * 5000), [], "5000 bytes, but the maximum is 4096"),
    (Head(Kind.REQUEST, 1), [np.zeros(1)] * (MAX_ARRAYS + 1), "257 arrays, but the maximum is 256"),
    (Head(Kind.REQUEST, 1), [np.array([{}])], "dtype object cannot be sent"),
    (Head(Kind.REQUEST, 1), [np.zeros((1,) * 9)], "9 dimensions"),
]


def test_messages_beyond_limits_are_refused() -> None:
    for head, arrays, problem in TOO_MUCH:
        with pytest.raises(WireError, match=problem):
            encode(head, arrays)
    with pytest.raises(WireError, match="head of"):
        decode(b"DGLX" * MAX_HEAD_BYTES)
    (raw,) = encode(Head(Kind.REQUEST, 1), [np.zeros((0, 1), np.int64)])
    for shape in ((2**40, 2**40), (-1, 1), (-1, -1)):
        with pytest.raises(WireError, match="negative or above"):
            decode(bytes(raw[:-16]) + np.array(shape, "<i8").tobytes())
    for start, message in ((b"HTTP\1", "b'HTTP' version 1, not"), (b"DGLX\xff", "version 255, not")):
        with pytest.raises(WireError, match=f"starts with .*{message}"):
            decode(start + bytes(raw[5:]))


SENT = [
    np.arange(1_200_000, dtype=np.int64),  # 9.6 MB: in three frames
    np.zeros(0),
    np.arange(7, dtype=np.uint8),  # in the head
    np.ones(150),  # 1200 bytes: in a frame of its own
]


@pytest.fixture
def wire() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as item, context.socket(zmq.PAIR) as second:
        item.bind("inproc://test")
        second.connect("inproc://test")
        second.setsockopt(zmq.RCVTIMEO, 10_000)
        yield item, second


def receive(socket: zmq.Socket[bytes]) -> list[Array]:
    try:
        return read_arrays(socket, decode(socket.recv()))
    finally:
        skip(socket)


def frames() -> list[bytes]:
    head, large, small = (bytes(buffer) for buffer in encode(Head(Kind.REPLY, 1), SENT))
    return [head, *(large[at : at + FRAME_BYTES] for at in range(0, len(large), FRAME_BYTES)), small]


SPOILT = {
    "no frames": lambda sent: sent[:1],
    "last missing": lambda sent: sent[:-1],
    "one too many": lambda sent: [*sent, b""],
    "first too small": lambda sent: [sent[0], b"x", *sent[2:]],
    "first too large": lambda sent: [sent[0], sent[1] + b"x", *sent[2:]],
    "not cut": lambda sent: [sent[0], b"".join(sent[1:4]), sent[4]],
    "last too large": lambda sent: [*sent[:-1], sent[-1] + b"x"],
    "inline bytes missing": lambda sent: [sent[0][:-1], *sent[1:]],
}


@pytest.mark.parametrize("kind", SPOILT)
def test_malformed_messages_are_refused(wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], kind: str) -> None:
    sender, receiver = wire
    sender.send_multipart(SPOILT[kind](frames()))
    with pytest.raises(WireError):
        receive(receiver)
    # Nothing of the bad message is left behind for the next one.
    send_message(sender, encode(Head(Kind.REPLY, 5), SENT))
    assert all(np.array_equal(a, b) for a, b in zip(receive(receiver), SENT, strict=True))


def test_an_array_that_memory_does_not_hold_is_dropped(
    wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = wire
    sender.send_multipart(frames())
    raw = receiver.recv()
    monkeypatch.setattr("dglx_dist.comm.wire.bytearray", mock.Mock(side_effect=MemoryError), raising=False)
    with pytest.raises(WireError, match="no memory for int64"):
        read_arrays(receiver, decode(raw)._replace(arrays=decode(raw).arrays[:1]))
    assert not receiver.getsockopt(zmq.RCVMORE)


@RELAXED
@given(st.lists(st.lists(st.binary(max_size=80), min_size=1, max_size=4), min_size=1, max_size=4))
def test_random_messages_are_refused_completely(
    wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], messages: list[list[bytes]]
) -> None:
    for message in messages:
        wire[0].send_multipart(message)
        with pytest.raises(WireError):
            receive(wire[1])
