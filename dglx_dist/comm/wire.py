"""Wire format for messages: a validated binary head, then raw buffers.

The head is little-endian. It consists of the fixed part (:data:`_FIXED`), the operation name and the argument
name. Then it has each array's dtype code, number of dimensions and shape, and the bytes of those arrays that
have at most :data:`INLINE_BYTES`. Each larger array follows in frames with :data:`FRAME_BYTES` bytes, and its
last frame may be smaller. Nothing is evaluated or unpickled. Sizes are checked against the limits below and
against the arrived buffers before they are used.
"""

import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import zmq

from dglx_dist.errors import DglxError
from dglx_dist.records import Array

MAGIC = b"DGLX"
VERSION = 2
MAX_NAME_BYTES = 4096
MAX_ARRAYS = 256
MAX_DIMENSIONS = 8
MAX_ARRAY_BYTES = 1 << 36
INLINE_BYTES = 1024
"""Arrays up to this size are sent in the head, which saves a frame each way."""
MAX_HEAD_BYTES = 64 * 1024 + MAX_ARRAYS * INLINE_BYTES
FRAME_BYTES = 4 << 20
"""Maximum size of a frame. Each arriving frame shows that the connection lives."""
_COPY_BYTES = 1 << 20
"""Arrays up to this size are copied into the message. pyzmq returns zero-copy buffers through another thread,
which costs more than one such copy.
"""
_SMALL_BYTES = 16 * 1024
"""Received arrays up to this size are copied. They may be unaligned in the connection's buffer."""

_FIXED = struct.Struct("<4sBBHQHH")
"""Magic, version, kind, number of arrays, request id, operation bytes, name bytes."""
_ARRAY = struct.Struct("<BB")
"""Dtype code, number of dimensions."""
_SHAPES = [struct.Struct(f"<{dimensions}q") for dimensions in range(MAX_DIMENSIONS + 1)]

# A code is never reused. uint16 also carries bfloat16, and the receiver knows which of the two it is.
_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(name) for code, name in enumerate(_DTYPE_NAMES, start=1)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class WireError(DglxError):
    """A message violates the format. It is dropped and never interpreted."""


class Kind(IntEnum):
    """Purpose of a message."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3


_KINDS = {int(kind): kind for kind in Kind}


class ArraySpec(NamedTuple):
    """One array's dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    num_bytes: int


class Head(NamedTuple):
    """A message's first frame."""

    kind: Kind
    request: int
    """The call's number, unique per connection."""
    op: str = ""
    name: str = ""
    arrays: tuple[ArraySpec, ...] = ()
    inline: bytes = b""
    """Bytes for the arrays in the head, which :func:`decode` sets."""


Buffers: TypeAlias = list[bytes | memoryview]


def encode(head: Head, arrays: Sequence[Array] = ()) -> Buffers:
    """Return a message's buffers: the head, and views of the arrays that are not in it.

    Raises WireError if the format does not support a dtype or a number of dimensions, or a limit is exceeded.
    """
    # An error text may be invalid UTF-8 and must arrive nevertheless.
    op = head.op.encode(errors="replace")
    name = head.name.encode(errors="replace")
    longest = max(len(op), len(name))
    if longest > MAX_NAME_BYTES:
        raise WireError(f"a name has {longest} bytes, but the maximum is {MAX_NAME_BYTES}")
    if len(arrays) > MAX_ARRAYS:
        raise WireError(f"a message has {len(arrays)} arrays, but the maximum is {MAX_ARRAYS}")

    sizes = (len(arrays), head.request, len(op), len(name))
    fields = [_FIXED.pack(MAGIC, VERSION, head.kind, *sizes), op, name]
    inline: Buffers = []
    large: Buffers = []
    for array in arrays:
        content = raw_bytes(array)
        if array.ndim > MAX_DIMENSIONS:
            raise WireError(f"an array of {array.ndim} dimensions, which are more than {MAX_DIMENSIONS}")

        code = _CODES[_get_wire_dtype(array)]
        fields.append(_ARRAY.pack(code, array.ndim) + _SHAPES[array.ndim].pack(*array.shape))
        if len(content) <= INLINE_BYTES:
            inline.append(content)
        else:
            large.append(content)
    return [b"".join([*fields, *inline]), *large]


def send_message(socket: zmq.Socket[bytes], buffers: Buffers) -> None:
    """Send one message. Large buffers are referenced until they are sent, and must not change."""
    last_index = len(buffers) - 1
    for index, buffer in enumerate(buffers):
        flags = zmq.SNDMORE if index < last_index else 0
        if len(buffer) <= _COPY_BYTES:
            socket.send(buffer, flags)
            continue

        for start in range(0, len(buffer), FRAME_BYTES):
            end = start + FRAME_BYTES
            frame_flags = zmq.SNDMORE if end < len(buffer) else flags
            socket.send(buffer[start:end], frame_flags, copy=False)


def decode(data: bytes) -> Head:
    """Decode a head and check every field. Raise WireError if it violates the format."""

    # Check the fixed part.
    if not _FIXED.size <= len(data) <= MAX_HEAD_BYTES:
        raise WireError(f"a head of {len(data)} bytes is outside [{_FIXED.size}, {MAX_HEAD_BYTES}]")
    magic, version, kind, count, request, op_size, name_size = _FIXED.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"starts with {magic!r} version {version}, not {MAGIC!r} version {VERSION}")
    if kind not in _KINDS or max(op_size, name_size) > MAX_NAME_BYTES or count > MAX_ARRAYS:
        raise WireError(f"kind {kind}, names of {op_size} and {name_size} bytes and {count} arrays")

    # Read the names, and each array's dtype and shape.
    op_end = _FIXED.size + op_size
    position = op_end + name_size
    try:
        op = data[_FIXED.size : op_end].decode()
        name = data[op_end:position].decode()
        specs = []
        for _ in range(count):
            code, dimensions = _ARRAY.unpack_from(data, position)
            shape = _SHAPES[dimensions].unpack_from(data, position + _ARRAY.size)
            position += _ARRAY.size + 8 * dimensions
            # With Python integers, math.prod cannot overflow, so a malicious shape fails below.
            num_bytes = math.prod(shape) * _DTYPES[code].itemsize
            specs.append(ArraySpec(_DTYPES[code], shape, num_bytes))
    except (UnicodeDecodeError, struct.error, LookupError) as error:
        raise WireError(f"the head ends too early, or has a wrong name or dtype ({error})") from None

    # Check the arrays' sizes.
    num_inline = 0
    for spec in specs:
        has_negative = bool(spec.shape) and min(spec.shape) < 0
        if has_negative or spec.num_bytes > MAX_ARRAY_BYTES:
            raise WireError(f"an array of shape {spec.shape}, negative or above {MAX_ARRAY_BYTES} bytes")
        if spec.num_bytes <= INLINE_BYTES:
            num_inline += spec.num_bytes
    if position + num_inline != len(data):
        raise WireError(f"a head has {len(data)} bytes, but its fields end at {position + num_inline}")
    return Head(_KINDS[kind], request, op, name, tuple(specs), data[position:])


def read_arrays(socket: zmq.Socket[bytes], head: Head) -> list[Array]:
    """Read the message's writable and aligned arrays after its ``head``.

    Raises WireError if frames are missing, superfluous or have a wrong size. All frames are consumed then.
    """
    arrays = []
    position = 0
    try:
        for spec in head.arrays:
            if spec.num_bytes > INLINE_BYTES:
                arrays.append(_read_array(socket, spec))
                continue
            end = position + spec.num_bytes
            arrays.append(_array_from(spec, bytearray(head.inline[position:end])))
            position = end

        if socket.getsockopt(zmq.RCVMORE):
            raise WireError("more frames than arrays")
    finally:
        skip(socket)
    return arrays


def skip(socket: zmq.Socket[bytes]) -> None:
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv()


def raw_bytes(array: Array) -> memoryview:
    """Return the array's bytes in C order. Contiguous little-endian arrays are not copied."""
    if not array.flags.c_contiguous or array.dtype not in _CODES:
        array = np.ascontiguousarray(array, dtype=_get_wire_dtype(array))
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def payload_bytes(arrays: Sequence[Array]) -> int:
    return sum(array.nbytes for array in arrays)


def _get_wire_dtype(array: Array) -> np.dtype[Any]:
    """Return the little-endian dtype in which ``array`` is sent. Raise WireError if there is none."""
    dtype = array.dtype if array.dtype in _CODES else array.dtype.newbyteorder("<")
    if dtype not in _CODES:
        names = ", ".join(_DTYPE_NAMES)
        raise WireError(f"arrays of dtype {array.dtype} cannot be sent. Convert them to one of {names}.")
    return dtype


def _array_from(spec: ArraySpec, buffer: bytearray | memoryview) -> Array:
    try:
        return np.frombuffer(buffer, dtype=spec.dtype).reshape(spec.shape)
    except ValueError as error:
        raise WireError(f"no array of {spec.dtype} has shape {spec.shape}: {error}") from None


def _read_array(socket: zmq.Socket[bytes], spec: ArraySpec) -> Array:
    """Read an array that follows the head in its own frames."""
    frames: list[memoryview] = []
    for start in range(0, spec.num_bytes, FRAME_BYTES):
        expected_size = min(FRAME_BYTES, spec.num_bytes - start)
        if not socket.getsockopt(zmq.RCVMORE):
            raise WireError("a buffer is missing")
        frame = socket.recv(copy=False).buffer
        if len(frame) != expected_size:
            raise WireError(f"a frame has {len(frame)} bytes instead of {expected_size}")
        frames.append(frame)

    # A single large frame's memory becomes the array without a copy, if it is suitable.
    if len(frames) == 1 and spec.num_bytes > _SMALL_BYTES:
        array = _array_from(spec, frames[0])
        is_usable = array.flags.aligned and array.flags.writeable
        return array if is_usable else array.copy()
    try:
        return _array_from(spec, bytearray().join(frames))
    except MemoryError:
        raise WireError(f"there is no memory for {spec.dtype} of shape {spec.shape}") from None


_EVENT = struct.Struct("=Hi")


def read_event(monitor: zmq.Socket[Any]) -> tuple[int, int]:
    """Return number and value of the next event on a monitored socket.

    pyzmq's own reader imports asyncio, which workers must not import.
    """
    number, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return number, value
