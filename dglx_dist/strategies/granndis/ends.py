"""The two ends of a message between this rank and a peer: what is still to be sent, what is still to come."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from dglx_dist.errors import PeerError

_MAGIC = b"halo"
_HEAD = struct.Struct("!4sQQ32s")
"""Magic, number of the message to this peer, bytes that follow, and what they are."""
_MAX_NAME = 32
_RECEIVE_BYTES = 1 << 20
"""Read at a time, so that no connection keeps the others waiting."""


@final
class Sender:
    """What is still to be sent to one peer."""

    def __init__(self, head: bytes, pieces: Iterator[memoryview]) -> None:
        self._now, self._pieces = memoryview(head), pieces
        self._more = int(socket.MSG_MORE)

    def send(self, connection: socket.socket) -> bool:
        """Send as much as there is room for; return whether that was all."""
        while True:
            while self._now:
                try:
                    sent = connection.send(self._now, self._more)
                except BlockingIOError:
                    return False
                self._now = self._now[sent:]
            # The head waits for the first rows, to leave in one packet with them.
            self._more = 0
            following = next(self._pieces, None)
            if following is None:
                return True
            self._now = following


@final
@dataclass(kw_only=True)
class Incoming:
    """What comes from one peer."""

    rank: int
    room: memoryview
    """Writable; as many bytes as will come."""
    num_arrived: int = 0
    """Bytes at the beginning of ``room`` that are there; grows."""


@final
class Receiver:
    """Fills the room of what comes from one peer."""

    def __init__(self, expected: bytes, incoming: Incoming) -> None:
        self._expected, self._incoming = expected, incoming
        self._head = memoryview(bytearray(len(expected)))
        self._read = 0

    def receive(self, connection: socket.socket, rank: int) -> bool:
        """Take what is there; return whether that was all.

        Raises:
            PeerError: the peer sends something else.
            OSError: the connection broke.
        """
        left = _HEAD.size - self._read
        if left > 0:
            self._read += _receive_into(connection, self._head[self._read :])
            if self._read < _HEAD.size:
                return False
            _check_same(bytes(self._head), self._expected, rank)
            return False
        incoming = self._incoming
        at = incoming.num_arrived
        incoming.num_arrived += _receive_into(connection, incoming.room[at : at + _RECEIVE_BYTES])
        return incoming.num_arrived == len(incoming.room)


@dataclass(kw_only=True)
class End:
    """One connection during one exchange."""

    rank: int
    connection: socket.socket
    sender: Sender | None = None
    receiver: Receiver | None = None

    @property
    def events(self) -> int:
        """What to wait for."""
        write = selectors.EVENT_WRITE if self.sender is not None else 0
        return write | (selectors.EVENT_READ if self.receiver is not None else 0)

    def serve(self, events: int) -> None:
        """Send and receive what can be without waiting."""
        if (
            events & selectors.EVENT_READ
            and self.receiver is not None
            and self.receiver.receive(self.connection, self.rank)
        ):
            self.receiver = None
        if events & selectors.EVENT_WRITE and self.sender is not None and self.sender.send(self.connection):
            self.sender = None


def _receive_into(connection: socket.socket, room: memoryview) -> int:
    try:
        received = connection.recv_into(room)
    except BlockingIOError:
        return 0
    if not received:
        raise ConnectionResetError("it was closed at the other end")
    return received


def head_of(number: int, num_bytes: int, name: str) -> bytes:
    """Return what stands before a message.

    Args:
        number: Of the message to this peer.
        num_bytes: That follow.
        name: What it is, at most 32 bytes.
    """
    encoded = name.encode()
    assert len(encoded) <= _MAX_NAME, name
    return _HEAD.pack(_MAGIC, number, num_bytes, encoded)


def _check_same(head: bytes, expected: bytes, rank: int) -> None:
    if head == expected:
        return
    magic, number, num_bytes, name = _HEAD.unpack(head)
    _, own_number, own_bytes, own_name = _HEAD.unpack(expected)
    if magic != _MAGIC:
        raise PeerError(
            f"rank {rank} sent {magic!r} where a message begins; do all ranks run the same version?"
        )
    raise PeerError(
        f"rank {rank} sends {num_bytes} bytes of {_text(name)!r} (its message {number} to this rank) where "
        f"this rank expects {own_bytes} bytes of {_text(own_name)!r} (message {own_number}): the ranks did "
        "not run the same layers in the same order, on rows of the same width and dtype; let no branch of "
        "the model depend on the rank's data"
    )


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")
