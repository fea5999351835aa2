"""Messages of arrays over a ZeroMQ socket: cut when sent, put together when received."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import zmq

from dglx_dist.cluster.wire import (
    Head,
    Kind,
    WireError,
    byte_view,
    decode,
    empty_array,
    encode,
    raw_bytes,
    spec_of,
)
from dglx_dist.records import Array

MAX_PARTIAL_MESSAGES = 1024
"""Messages of one peer that may be incomplete at a time."""

Frames = list[bytes | memoryview]


@dataclass(frozen=True)
class Message:
    """One complete message."""

    head: Head
    arrays: list[Array]


def frames_of(head: Head, arrays: Sequence[Array], chunk_bytes: int) -> Iterator[Frames]:
    """Yield the ZeroMQ messages that carry ``head`` and ``arrays``; large arrays follow in chunks.

    The frames are views of ``arrays``, which must not change until they are sent.

    Raises:
        WireError: an array has a dtype or shape that cannot be sent.
    """
    specs = tuple(spec_of(array, chunk_bytes) for array in arrays)
    buffers = [raw_bytes(array) for array in arrays]
    first: Frames = [encode(Head(head.kind, head.request, head.op, head.name, specs))]
    first += [buffer for spec, buffer in zip(specs, buffers, strict=True) if not spec.chunk_bytes]
    yield first
    for index, (spec, buffer) in enumerate(zip(specs, buffers, strict=True)):
        if spec.chunk_bytes:
            for start in range(0, spec.num_bytes, spec.chunk_bytes):
                chunk = Head(Kind.CHUNK, head.request, index=index, offset=start)
                yield [encode(chunk), buffer[start : start + spec.chunk_bytes]]


@final
class Assembler:
    """Puts the messages of one peer together. Used by one thread.

    Buffers are read straight into arrays made for them, whose sizes were checked first.
    """

    def __init__(self) -> None:
        self._partial: dict[int, tuple[Message, int]] = {}

    def read(self, socket: zmq.Socket[bytes]) -> Message | None:
        """Read one ZeroMQ message (after any routing frame); return a message once it is complete.

        Raises:
            WireError: the message is malformed; all its frames have been consumed.
        """
        try:
            head = decode(socket.recv())
            if head.kind is Kind.CHUNK:
                return self._read_chunk(socket, head)
            return self._read_first(socket, head)
        finally:
            while socket.getsockopt(zmq.RCVMORE):
                socket.recv()

    def _read_first(self, socket: zmq.Socket[bytes], head: Head) -> Message | None:
        message = Message(head, [empty_array(spec) for spec in head.arrays])
        for spec, array in zip(head.arrays, message.arrays, strict=True):
            if not spec.chunk_bytes:
                _read_into(socket, byte_view(array))
        missing = sum(spec.num_bytes for spec in head.arrays if spec.chunk_bytes)
        if not missing:
            return message
        if head.request in self._partial or len(self._partial) >= MAX_PARTIAL_MESSAGES:
            raise WireError(f"message {head.request} starts twice, or too many are incomplete")
        self._partial[head.request] = (message, missing)
        return None

    def _read_chunk(self, socket: zmq.Socket[bytes], head: Head) -> Message | None:
        if head.request not in self._partial:
            raise WireError(f"a chunk of message {head.request}, which never started")
        message, missing = self._partial[head.request]
        target = _chunk_target(message, head)
        _read_into(socket, target)
        missing -= target.nbytes
        if missing < 0:
            del self._partial[head.request]
            raise WireError(f"more chunks than message {head.request} has bytes")
        if missing:
            self._partial[head.request] = (message, missing)
            return None
        del self._partial[head.request]
        return message


def _chunk_target(message: Message, chunk: Head) -> memoryview:
    specs = message.head.arrays
    spec = specs[chunk.index] if chunk.index < len(specs) else None
    if (
        spec is None
        or not spec.chunk_bytes
        or chunk.offset % spec.chunk_bytes
        or chunk.offset >= spec.num_bytes
    ):
        raise WireError(f"a chunk at byte {chunk.offset} of array {chunk.index}, which has no such chunk")
    whole = byte_view(message.arrays[chunk.index])
    return whole[chunk.offset : chunk.offset + spec.chunk_bytes]


def _read_into(socket: zmq.Socket[bytes], target: memoryview) -> None:
    if not socket.getsockopt(zmq.RCVMORE):
        raise WireError("a buffer is missing")
    size = socket.recv_into(target) if target.nbytes else len(socket.recv())
    if size != target.nbytes:
        raise WireError(f"a buffer of {size} bytes where {target.nbytes} were announced")
