"""Putting chunked messages together, and refusing what does not fit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dglx_dist.comm.wire import Assembler, Head, Kind, Message, WireError, encode, frames_of, send_frames

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
