"""Exchanges between ranks: buffers, messages on a connection, and which ranks have an accelerator each."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from dglx_dist.comm import exchange
from dglx_dist.comm.exchange import (
    GlooExchange,
    Incoming,
    Outgoing,
    PeerTransfer,
    ReusableBuffer,
    bytes_of,
    message_header,
    open_devices,
)
from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError, PeerError


def test_memory_is_kept_and_grows_only() -> None:
    kept = ReusableBuffer()
    first = kept.take((3, 5), torch.float64)
    assert first.shape == (3, 5)
    assert first.is_contiguous()
    again = kept.take((7,), torch.bfloat16)
    assert again.data_ptr() == first.data_ptr()
    kept.take((4, 8), torch.float64)
    assert kept.take((0, 4), torch.int64).shape == (0, 4)
    assert kept.take((2, 0), torch.bool).shape == (2, 0)
    assert kept.take((), torch.float32).shape == ()


def test_bytes_are_a_view() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.zeros(2, 3, dtype=dtype)
        view = bytes_of(tensor)
        assert len(view) == 6 * dtype.itemsize
        view[0] = 1
        assert tensor.view(torch.uint8).reshape(-1)[0] == 1
    assert len(bytes_of(torch.zeros(0, 3))) == 0


@pytest.mark.parametrize(
    ("device", "backend", "cards", "direct"),
    [
        ("cpu", "cpu:gloo", ["", ""], False),
        ("cuda", "cpu:gloo,cuda:nccl", ["a", "b"], True),
        # NCCL refuses two ranks on one.
        ("cuda", "cpu:gloo,cuda:nccl", ["a", "a"], False),
        ("cuda", "cpu:gloo,cuda:nccl", ["a", ""], False),
        ("cuda", "cpu:gloo,cuda:gloo", ["", ""], False),
    ],
)
def test_only_ranks_with_an_accelerator_each(
    device: str, backend: str, cards: list[str], direct: bool
) -> None:
    gathered: list[str] = []

    def gather(uuid: str, _session: object) -> list[str]:
        gathered.append(uuid)
        return cards

    with (
        mock.patch.object(exchange, "gather_json", gather),
        mock.patch.object(exchange.dist, "is_initialized", return_value=True),
        mock.patch.object(exchange.dist, "get_backend_config", return_value=backend),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(uuid="a")),
        mock.patch.object(exchange, "DeviceExchange") as opened,
    ):
        made = open_devices(SimpleNamespace(device=torch.device(device)))  # type: ignore[arg-type]
    assert gathered == [cards[0]]
    assert (made is not None) == direct
    assert opened.called == direct


def test_without_accelerators_there_is_none() -> None:
    with start_session() as session:
        assert open_devices(session) is None


def test_one_rank_with_an_accelerator_has_nobody_to_talk_to() -> None:
    with start_session() as session:
        session.device = torch.device("cuda", 0)
        assert open_devices(session) is None


BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        one.setblocking(False)
        two.setblocking(False)
        yield one, two


def filled(byte: int, size: int) -> Tensor:
    return torch.full((size,), byte, dtype=torch.uint8)


def sending(connection: socket.socket, number: int, rows: Tensor, name: str = "x") -> PeerTransfer:
    transfer = PeerTransfer(0, connection)
    transfer.send(message_header(number, rows, name), Outgoing(rank=0, rows=rows))
    transfer.serve(BOTH)
    return transfer


def receiving(
    connection: socket.socket, number: int, rows: Tensor, name: str = "x", rank: int = 0
) -> PeerTransfer:
    transfer = PeerTransfer(rank, connection)
    transfer.receive(message_header(number, rows, name), Incoming(rank=rank, rows=rows))
    return transfer


def test_more_than_fits_goes_both_ways() -> None:
    """Neither end waits for the other: each sends what there is buffer for, and takes what is there."""
    size = 3_000_000
    received = [filled(0, size), filled(0, size)]
    with pair() as sockets:
        ends = [receiving(sockets[number], 1, received[number]) for number in (0, 1)]
        for number, end in enumerate(ends):
            rows = filled(number + 1, size)
            pieces = iter(rows.split(100_000))
            end.send(message_header(1, rows, "x"), Outgoing(rank=0, rows=rows, pieces=pieces))
            end.serve(selectors.EVENT_WRITE)
            assert end.events == BOTH
        while any(end.events for end in ends):
            for end in ends:
                end.serve(end.events)
    assert torch.equal(received[0], filled(2, size))
    assert torch.equal(received[1], filled(1, size))


def test_a_message_ends_where_it_ends() -> None:
    """What a peer that is ahead sends next stays in the connection."""
    with pair() as (one, two):
        for number in (1, 2):
            assert not sending(one, number, filled(number, 4)).events
        for number in (1, 2):
            rows = filled(0, 4)
            transfer = receiving(two, number, rows)
            while transfer.events:
                transfer.serve(BOTH)
            assert rows.tolist() == [number] * 4


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (message_header(1, filled(0, 8), "halo of layer 2"), "rank 5 sends 8 bytes of 'halo of layer 2'"),
        (message_header(1, filled(0, 16), "halo of layer 1"), "rank 5 sends 16 bytes"),
        (message_header(3, filled(0, 8), "halo of layer 1"), "its message 3 to this rank"),
        (b"GET " + bytes(48), "b'GET ' instead of a message header"),
    ],
)
def test_anything_else_is_refused(sent: bytes, message: str) -> None:
    with pair() as (one, two):
        one.send(sent)
        transfer = receiving(two, 1, filled(0, 8), "halo of layer 1", rank=5)
        with pytest.raises(PeerError, match=message):
            transfer.serve(BOTH)


def test_closed_end_is_an_error() -> None:
    with pair() as (one, two):
        one.close()
        with pytest.raises(ConnectionResetError, match="the peer closed it"):
            receiving(two, 1, filled(0, 8)).serve(BOTH)


def test_nothing_is_posted_after_the_end() -> None:
    with start_session() as session:
        exchange = GlooExchange(session, tag=1, span="pull")
        exchange.post([], [], "rows", phase=None).wait()
        exchange.close()
        with pytest.raises(ConfigError, match="rows cannot be exchanged: the session is closed"):
            exchange.post([], [], "rows", phase=None)
