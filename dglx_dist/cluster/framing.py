"""Messages of arrays over a ZeroMQ socket: cut when sent, put together when received."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, final

import zmq

from dglx_dist.cluster.wire import (
    INLINE_BYTES,
    ArraySpec,
    Head,
    Kind,
    WireError,
    array_from,
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

COPY_BYTES = 1 << 20
"""Up to this size a whole buffer is copied into the message: pyzmq gives zero-copy buffers back through a
thread of its own, which costs more than one such copy. Chunks come in numbers and are never copied."""
SMALL_BYTES = 16 * 1024
"""Up to this size a received buffer is copied: it may lie anywhere in the buffer of the connection."""

Frames: TypeAlias = list[bytes | memoryview]


class NotAdmittedError(WireError):
    """A message that is not wanted here, of which no more than the head was looked at.

    Args:
        head: Its head.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(f"{head.kind.name} {head.op!r} is not wanted here")
        self.head = head


class Message(NamedTuple):
    """One complete message."""

    head: Head
    arrays: list[Array]


def frames_of(head: Head, arrays: Sequence[Array], chunk_bytes: int) -> list[Frames]:
    """Return the ZeroMQ messages that carry ``head`` and ``arrays``; large arrays follow in chunks.

    The frames are views of ``arrays``, which must not change until they are sent.

    Raises:
        WireError: an array has a dtype or shape that cannot be sent.
    """
    specs: list[ArraySpec] = []
    first: Frames = []
    chunks: list[Frames] = []
    inline: list[memoryview] = []
    for index, array in enumerate(arrays):
        spec, raw = spec_of(array, chunk_bytes), raw_bytes(array)
        specs.append(spec)
        if spec.chunk_bytes:
            chunks += _chunks_of(head.request, index, raw, chunk_bytes)
        else:
            (inline if len(raw) <= INLINE_BYTES else first).append(raw)
    messages: list[Frames] = [[encode(head, specs, inline), *first]]
    return messages + chunks


def _chunks_of(request: int, array: int, buffer: memoryview, chunk_bytes: int) -> Iterator[Frames]:
    for start in range(0, len(buffer), chunk_bytes):
        head = Head(Kind.CHUNK, request, array=array, offset=start)
        yield [encode(head), buffer[start : start + chunk_bytes]]


def send_frames(socket: zmq.Socket[bytes], frames: Frames, *, copy_bytes: int = COPY_BYTES) -> None:
    """Send one ZeroMQ message; buffers above ``copy_bytes`` are referred to until they are gone."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        more = zmq.SNDMORE if index < last else 0
        if len(frame) <= copy_bytes:
            socket.send(frame, more)
        else:
            socket.send(frame, more, copy=False)


@final
class Assembler:
    """Puts the messages of one peer together. Used by one thread.

    Chunks are read straight into arrays made for them, whose sizes were checked first.

    Args:
        on_first: Called with the file descriptor of the connection when its first message comes.
        admits: Whether a message that begins with such a head is wanted; None: all are.
    """

    def __init__(
        self,
        on_first: Callable[[int], None] | None = None,
        admits: Callable[[Head], bool] | None = None,
    ) -> None:
        self._partial: dict[int, tuple[Message, int]] = {}
        self._on_first, self._admits = on_first, admits

    @property
    def is_idle(self) -> bool:
        """Whether no message is incomplete."""
        return not self._partial

    def read(self, socket: zmq.Socket[bytes]) -> Message | None:
        """Read one ZeroMQ message (after any routing frame); return a message once it is complete.

        Raises:
            NotAdmittedError: it is not wanted; nothing but its head was read, and no room was made for it.
            WireError: the message is malformed; all its frames have been consumed.
            zmq.Again: nothing came within the socket's own time-out.
        """
        raw = socket.recv() if self._on_first is None else self._first_head(socket, self._on_first)
        try:
            head = decode(raw)
            if head.kind is Kind.CHUNK:
                return self._read_chunk(socket, head)
            if self._admits is not None and not self._admits(head):
                raise NotAdmittedError(head)
            return self._read_first(socket, head, raw)
        finally:
            while socket.getsockopt(zmq.RCVMORE):
                socket.recv()

    def _first_head(self, socket: zmq.Socket[bytes], on_first: Callable[[int], None]) -> bytes:
        frame = socket.recv(copy=False)
        on_first(int(frame.get(zmq.SRCFD)))
        self._on_first = None
        return frame.bytes

    def _read_first(self, socket: zmq.Socket[bytes], head: Head, raw: bytes) -> Message | None:
        arrays, missing, at = [], 0, head.body
        for spec in head.arrays:
            size = spec.num_bytes
            if size <= INLINE_BYTES:
                arrays.append(array_from(spec, bytearray(raw[at : at + size])))
                at += size
            elif spec.chunk_bytes:
                arrays.append(empty_array(spec))
                missing += size
            else:
                arrays.append(_read_array(socket, spec, size))
        if not missing:
            return Message(head, arrays)
        if head.request in self._partial or len(self._partial) >= MAX_PARTIAL_MESSAGES:
            raise WireError(f"message {head.request} starts twice, or too many are incomplete")
        self._partial[head.request] = (Message(head, arrays), missing)
        return None

    def _read_chunk(self, socket: zmq.Socket[bytes], head: Head) -> Message | None:
        if head.request not in self._partial:
            raise WireError(f"a chunk of message {head.request}, which never started")
        message, missing = self._partial[head.request]
        target = _chunk_target(message, head)
        _require_frame(socket)
        size = socket.recv_into(target)
        missing -= size
        if size != target.nbytes or missing < 0:
            del self._partial[head.request]
            raise WireError(f"a chunk of {size} bytes where {target.nbytes} were due")
        if missing:
            self._partial[head.request] = (message, missing)
            return None
        del self._partial[head.request]
        return message


def _chunk_target(message: Message, chunk: Head) -> memoryview:
    specs = message.head.arrays
    spec = specs[chunk.array] if chunk.array < len(specs) else None
    if (
        spec is None
        or not spec.chunk_bytes
        or chunk.offset % spec.chunk_bytes
        or chunk.offset >= spec.num_bytes
    ):
        raise WireError(f"a chunk at byte {chunk.offset} of array {chunk.array}, which has no such chunk")
    whole = byte_view(message.arrays[chunk.array])
    return whole[chunk.offset : chunk.offset + spec.chunk_bytes]


def _read_array(socket: zmq.Socket[bytes], spec: ArraySpec, size: int) -> Array:
    _require_frame(socket)
    if size <= SMALL_BYTES:
        raw = bytearray(socket.recv())  # aligned, and holds no larger receive buffer alive
        if len(raw) != size:
            raise WireError(f"a buffer of {len(raw)} bytes where {size} were announced")
        return array_from(spec, raw)
    frame = socket.recv(copy=False)
    if len(frame.buffer) != size:
        raise WireError(f"a buffer of {len(frame.buffer)} bytes where {size} were announced")
    array = array_from(spec, frame.buffer)
    return array if array.flags.aligned and array.flags.writeable else array.copy()


def _require_frame(socket: zmq.Socket[bytes]) -> None:
    if not socket.getsockopt(zmq.RCVMORE):
        raise WireError("a buffer is missing")
