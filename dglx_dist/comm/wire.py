"""Wire format of messages: a validated binary head, then raw buffers.

Layout of the head, little-endian: the fixed part (:data:`_FIXED`), the operation name, the argument
name, then per array its dtype code, number of dimensions, chunk size and shape, then the bytes of arrays
up to :data:`INLINE_BYTES`. Larger ones follow in their own frames, or in chunks. Nothing is evaluated,
unpickled or used as a size before it is checked against the limits below and against the buffer it describes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import zmq

from dglx_dist.errors import DglxError
from dglx_dist.records import Array

Buffer: TypeAlias = bytes | bytearray | memoryview
MAGIC = b"DGLX"
VERSION = 1
MAX_NAME_BYTES = 4096
MAX_ARRAYS = 256
MAX_DIMENSIONS = 8
MAX_ARRAY_BYTES = 1 << 36
INLINE_BYTES = 1024
"""Arrays up to this size are sent in the head, which saves a frame each way."""
MAX_HEAD_BYTES = 64 * 1024 + MAX_ARRAYS * INLINE_BYTES

_FIXED = struct.Struct("<4sBBHQQHH")
"""magic, version, kind, number of arrays, request id, offset (chunks only), operation bytes, name bytes."""
_ARRAY = struct.Struct("<BBxxI")
"""dtype code, number of dimensions, chunk size in bytes (0: the buffer is in this message)."""
_SHAPES = [struct.Struct(f"<{dimensions}q") for dimensions in range(MAX_DIMENSIONS + 1)]

# A code is never reused. uint16 also carries bfloat16; the receiver knows which.
_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(name) for code, name in enumerate(_DTYPE_NAMES, start=1)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class WireError(DglxError):
    """A message violates the format: it is dropped, never interpreted."""


class Kind(IntEnum):
    """Kind of a message."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    CHUNK = 4


_KINDS = {int(kind): kind for kind in Kind}


class ArraySpec(NamedTuple):
    """Dtype and shape of one array, and the form in which its bytes are sent."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_bytes: int = 0
    """0: in one buffer of the same message; else in chunk messages of this many bytes, the last smaller."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Head(NamedTuple):
    """The first frame of every message."""

    kind: Kind
    request: int
    """Number of the call, unique per connection."""
    op: str = ""
    name: str = ""
    arrays: tuple[ArraySpec, ...] = ()
    array: int = 0
    """Chunks only: index of the array; sent in place of the number of arrays."""
    offset: int = 0
    """Chunks only: first byte."""
    body: int = 0
    """Set by :func:`decode`: start of the bytes of the inline arrays."""


def spec_of(array: Array, chunk_bytes: int) -> ArraySpec:
    """Describe ``array``; it is cut if it is larger than ``chunk_bytes`` and not inline.

    WireError: the format does not support its dtype or number of dimensions.
    """
    dtype = array.dtype if array.dtype in _CODES else array.dtype.newbyteorder("<")
    if dtype not in _CODES:
        known = ", ".join(str(known) for known in _CODES)
        raise WireError(f"arrays of dtype {array.dtype} cannot be sent; convert to one of {known}")
    if array.ndim > MAX_DIMENSIONS:
        raise WireError(f"an array of {array.ndim} dimensions cannot be sent; reshape to {MAX_DIMENSIONS}")
    cut = array.nbytes > max(chunk_bytes, INLINE_BYTES)
    return ArraySpec(dtype, array.shape, chunk_bytes if cut else 0)


def encode(head: Head, arrays: Sequence[ArraySpec] | None = None, inline: Sequence[memoryview] = ()) -> bytes:
    """Return the bytes of ``head`` with ``arrays`` (None: its own) and the bytes of the inline ones."""
    # An error text may be invalid UTF-8 and must arrive nevertheless.
    op, name = head.op.encode(errors="replace"), head.name.encode(errors="replace")
    if max(len(op), len(name)) > MAX_NAME_BYTES:
        raise WireError(f"a name of {max(len(op), len(name))} bytes is too long; at most {MAX_NAME_BYTES}")
    specs = head.arrays if arrays is None else arrays
    if len(specs) > MAX_ARRAYS:
        raise WireError(f"{len(specs)} arrays in one message are too many; at most {MAX_ARRAYS}")
    count = head.array if head.kind is Kind.CHUNK else len(specs)
    fixed = _FIXED.pack(MAGIC, VERSION, head.kind, count, head.request, head.offset, len(op), len(name))
    parts = [fixed, op, name]
    for spec in specs:
        parts.append(_ARRAY.pack(_CODES[spec.dtype], len(spec.shape), spec.chunk_bytes))
        parts.append(_SHAPES[len(spec.shape)].pack(*spec.shape))
    return b"".join([*parts, *inline])


def decode(frame: Buffer) -> Head:
    """Decode a head, checking every field; WireError when it violates the format."""
    data = frame if isinstance(frame, bytes) else bytes(frame[: MAX_HEAD_BYTES + 1])
    if not _FIXED.size <= len(data) <= MAX_HEAD_BYTES:
        raise WireError(f"a head of {len(data)} bytes is outside [{_FIXED.size}, {MAX_HEAD_BYTES}]")
    magic, version, kind, count, request, offset, op_size, name_size = _FIXED.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"starts with {magic!r} version {version}, not {MAGIC!r} version {VERSION}")
    if kind not in _KINDS:
        raise WireError(f"unknown kind {kind}")
    if max(op_size, name_size) > MAX_NAME_BYTES:
        raise WireError(f"a name of {max(op_size, name_size)} bytes is longer than {MAX_NAME_BYTES}")
    position = _FIXED.size + op_size + name_size
    if position > len(data):
        raise WireError(f"the names end at byte {position} of a head of {len(data)}")
    op = _text(data[_FIXED.size : _FIXED.size + op_size]) if op_size else ""
    name = _text(data[_FIXED.size + op_size : position]) if name_size else ""
    if kind == Kind.CHUNK:
        if position != len(data):
            raise WireError(f"{len(data) - position} bytes follow the head of a chunk")
        return Head(Kind.CHUNK, request, op, name, array=count, offset=offset)
    specs, body = _array_specs(data, position, count)
    return Head(_KINDS[kind], request, op, name, specs, 0, offset, body)


def array_from(spec: ArraySpec, buffer: Buffer) -> Array:
    """View ``buffer``, whose size must have been checked, as the array that ``spec`` describes."""
    try:
        return np.frombuffer(buffer, dtype=spec.dtype).reshape(spec.shape)
    except ValueError as error:
        raise WireError(f"no array of {spec.dtype} has shape {spec.shape}: {error}") from None


def empty_array(spec: ArraySpec) -> Array:
    """Allocate the array that ``spec`` describes; WireError when that fails."""
    try:
        return np.empty(spec.shape, dtype=spec.dtype)
    except (MemoryError, ValueError) as error:
        raise WireError(f"cannot allocate {spec.dtype} of shape {spec.shape}: {error}") from None


def raw_bytes(array: Array) -> memoryview:
    """Return the bytes of ``array`` in C order; no copy when it is contiguous and little-endian."""
    if array.flags.c_contiguous and array.dtype in _CODES:
        return byte_view(array)
    return byte_view(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")))


def byte_view(array: Array) -> memoryview:
    """View a contiguous array as bytes; writable when the array is."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def payload_bytes(arrays: Sequence[Array]) -> int:
    return sum(map(_NBYTES, arrays))


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"a name is not UTF-8: {error}") from None


def _array_specs(data: bytes, position: int, count: int) -> tuple[tuple[ArraySpec, ...], int]:
    if count > MAX_ARRAYS:
        raise WireError(f"{count} arrays are more than {MAX_ARRAYS}")
    specs, inline = [], 0
    for _ in range(count):
        if position + _ARRAY.size > len(data):
            raise WireError("the head ends inside the description of an array")
        code, dimensions, chunk_bytes = _ARRAY.unpack_from(data, position)
        position += _ARRAY.size
        if code not in _DTYPES or dimensions > MAX_DIMENSIONS:
            raise WireError(f"dtype code {code} with {dimensions} dimensions")
        if position + 8 * dimensions > len(data):
            raise WireError("the head ends inside a shape")
        shape = _SHAPES[dimensions].unpack_from(data, position)
        position += 8 * dimensions
        if shape and min(shape) < 0:
            raise WireError(f"negative dimension in {shape}")
        spec = ArraySpec(_DTYPES[code], shape, chunk_bytes)
        size = spec.num_bytes
        # math.prod of Python integers cannot overflow, so a malicious shape fails here.
        if size > MAX_ARRAY_BYTES:
            raise WireError(f"{size} bytes for shape {shape} are more than {MAX_ARRAY_BYTES}")
        if size <= INLINE_BYTES:
            inline += size
        specs.append(spec)
    if position + inline != len(data):
        raise WireError(f"{len(data) - position} bytes follow the last array description, not {inline}")
    return tuple(specs), position


MAX_PARTIAL_MESSAGES = 1024
"""Messages of one peer that may be incomplete at a time."""

COPY_BYTES = 1 << 20
"""Up to this size a whole buffer is copied into the message: pyzmq returns zero-copy buffers through another
thread, which costs more than one such copy. Chunks are many and are never copied."""
SMALL_BYTES = 16 * 1024
"""Up to this size a received buffer is copied: it may be unaligned in the buffer of the connection."""

Frames: TypeAlias = list[bytes | memoryview]


class NotAdmittedError(WireError):
    """A message that the receiver does not admit; only its ``head`` was read."""

    def __init__(self, head: Head) -> None:
        super().__init__(f"{head.kind.name} {head.op!r} is not admitted here")
        self.head = head


class Message(NamedTuple):
    """One complete message."""

    head: Head
    arrays: list[Array]


def frames_of(head: Head, arrays: Sequence[Array], chunk_bytes: int) -> list[Frames]:
    """Return the ZeroMQ messages for ``head`` and ``arrays``; large arrays follow in chunks.

    The frames are views of ``arrays``, which must not change until they are sent.
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
    """Send one ZeroMQ message; buffers above ``copy_bytes`` are referenced until they are sent."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        more = zmq.SNDMORE if index < last else 0
        if len(frame) <= copy_bytes:
            socket.send(frame, more)
        else:
            socket.send(frame, more, copy=False)


@final
class Assembler:
    """Assembles the messages of one peer, on one thread; reads chunks directly into arrays of checked size.

    ``on_first`` is called with the file descriptor of the connection at its first message; ``admits`` tells
    whether to read a message with such a head.
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
        return not self._partial

    def read(self, socket: zmq.Socket[bytes]) -> Message | None:
        """Read one ZeroMQ message (after any routing frame); return a message when it is complete.

        Raises:
            NotAdmittedError: it is not admitted; only its head was read, and no memory allocated.
            WireError: the message is malformed; all its frames have been consumed.
            zmq.Again: nothing arrived within the socket's own time-out.
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
        raw = bytearray(socket.recv())  # aligned, and keeps no larger receive buffer alive
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


_NBYTES = attrgetter("nbytes")

_EVENT = struct.Struct("=Hi")


def read_event(monitor: zmq.Socket[Any]) -> tuple[int, int]:
    """Return number and value of the next event of a monitored socket.

    Workers import this module, and must not import asyncio, as pyzmq's reader of events does.
    """
    number, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return number, value
