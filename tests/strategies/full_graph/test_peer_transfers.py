"""Both ends of a message, on a pair of sockets in one process."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterator

import pytest

from dglx_dist.errors import PeerError
from dglx_dist.strategies.full_graph.halo_exchange import (
    Incoming,
    PeerTransfer,
    Receiver,
    Sender,
    message_header,
)

BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        one.setblocking(False)
        two.setblocking(False)
        yield one, two


def pieces(data: bytes, step: int) -> Iterator[memoryview]:
    yield from (memoryview(data)[at : at + step] for at in range(0, len(data), step))


def to(buffer: bytearray) -> Incoming:
    return Incoming(rank=0, buffer=memoryview(buffer))


def test_more_than_fits_goes_both_ways() -> None:
    """Neither end waits for the other: each sends what there is buffer for, and takes what is there."""
    size = 3_000_000
    data = [bytes([number]) * size for number in (1, 2)]
    buffers = [bytearray(size), bytearray(size)]
    head = message_header(1, size, "halo of layer 1")
    with pair() as sockets:
        ends = [
            PeerTransfer(
                rank=1 - number,
                connection=sockets[number],
                sender=Sender(head, pieces(data[number], 100_000)),
                receiver=Receiver(head, to(buffers[number])),
            )
            for number in (0, 1)
        ]
        for end in ends:
            end.serve(selectors.EVENT_WRITE)
            assert end.events == BOTH
        while any(end.events for end in ends):
            for end in ends:
                end.serve(end.events)
    assert buffers == [bytearray(data[1]), bytearray(data[0])]


def test_a_message_ends_where_it_ends() -> None:
    """What a peer that is ahead sends next stays in the connection."""
    with pair() as (one, two):
        for number, byte in ((1, b"a"), (2, b"b")):
            assert Sender(message_header(number, 4, "x"), iter([memoryview(byte * 4)])).send(one)
        for number, byte in ((1, b"a"), (2, b"b")):
            buffer = bytearray(4)
            receiver = Receiver(message_header(number, 4, "x"), to(buffer))
            while not receiver.receive(two, 0):
                pass
            assert buffer == byte * 4


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (message_header(1, 8, "halo of layer 2"), "rank 5 sends 8 bytes of 'halo of layer 2'"),
        (message_header(1, 16, "halo of layer 1"), "rank 5 sends 16 bytes"),
        (message_header(3, 8, "halo of layer 1"), "its message 3 to this rank"),
        (b"GET " + bytes(48), "b'GET ' instead of a message header"),
    ],
)
def test_anything_else_is_refused(sent: bytes, message: str) -> None:
    with pair() as (one, two):
        one.send(sent)
        receiver = Receiver(message_header(1, 8, "halo of layer 1"), to(bytearray(8)))
        with pytest.raises(PeerError, match=message):
            receiver.receive(two, 5)


def test_closed_end_is_an_error() -> None:
    with pair() as (one, two):
        one.close()
        with pytest.raises(ConnectionResetError, match="the peer closed it"):
            Receiver(message_header(1, 8, "x"), to(bytearray(8))).receive(two, 0)
