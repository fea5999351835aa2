"""Exchanges between ranks: buffers, messages on a connection, and which ranks have an accelerator each."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dglx_dist.comm import exchange
from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.exchange import (
    CallExchange,
    Incoming,
    Outgoing,
    message_header,
    open_devices,
    receive_message,
    send_message,
)
from dglx_dist.comm.session import start_session
from dglx_dist.errors import PeerError
from tests.helpers import refusal
from tests.helpers.ranks import run_ranks, start_ranks


@pytest.mark.parametrize(
    ("device", "backend", "sharing", "others", "direct"),
    [
        ("cpu", "cpu:gloo", 1, False, False),
        ("cuda", "cpu:gloo,cuda:nccl", 1, True, True),
        # NCCL refuses two ranks on one.
        ("cuda", "cpu:gloo,cuda:nccl", 2, True, False),
        ("cuda", "cpu:gloo,cuda:nccl", 1, False, False),
        ("cuda", "gloo", 1, False, False),
    ],
)
def test_needs_one_accelerator_a_rank(
    device: str, backend: str, sharing: int, others: bool, direct: bool
) -> None:
    session: Any = SimpleNamespace(device=torch.device(device), ranks_of_device=sharing)
    with (
        mock.patch.object(exchange, "gather_json", lambda alone, _session: [alone, others]),
        mock.patch.object(exchange.dist, "is_initialized", return_value=True),
        mock.patch.object(exchange.dist, "get_backend_config", return_value=backend),
        mock.patch.object(exchange, "DeviceExchange") as opened,
    ):
        made = open_devices(session)
    assert (made is not None) == direct
    assert opened.called == direct


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        first.setblocking(False)
        second.setblocking(False)
        yield first, second


def fill(byte: int, size: int) -> Tensor:
    return torch.full((size,), byte, dtype=torch.uint8)


def sending(connection: socket.socket, number: int, rows: Tensor) -> Iterator[None]:
    message = Outgoing(rank=0, rows=rows, pieces=iter(rows.split(100_000)))
    return send_message(connection, message_header(number, rows, "x"), message)


def receiving(
    connection: socket.socket, number: int, rows: Tensor, name: str = "x", rank: int = 0
) -> Iterator[None]:
    message = Incoming(rank=rank, rows=rows)
    return receive_message(connection, message_header(number, rows, name), message)


def test_more_than_fits_goes_both_ways() -> None:
    """Neither end waits for the other: each sends what there is buffer for, and takes what is there."""
    size = 3_000_000
    received = [fill(0, size), fill(0, size)]
    with pair() as sockets:
        left = [sending(item, 1, fill(number, size)) for number, item in enumerate(sockets)]
        assert all(next(item, "done") is None for item in left)
        left += [receiving(item, 1, rows) for item, rows in zip(sockets, received, strict=True)]
        while left:
            left = [item for item in left if next(item, "done") is None]
    assert torch.equal(received[0], fill(1, size))
    assert torch.equal(received[1], fill(0, size))


def test_a_message_ends_where_it_ends() -> None:
    """A peer that is ahead may send more, which stays in the connection."""
    with pair() as (first, second):
        for number in (1, 2):
            assert list(sending(first, number, fill(number, 4))) == []
        for number in (1, 2):
            rows = fill(0, 4)
            list(receiving(second, number, rows))
            assert rows.tolist() == [number] * 4


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (message_header(1, fill(0, 8), "halo of layer 2"), "rank 5 sends 8 bytes of 'halo of layer 2'"),
        (message_header(1, fill(0, 16), "halo of layer 1"), "rank 5 sends 16 bytes"),
        (message_header(3, fill(0, 8), "halo of layer 1"), "its message 3 to this rank"),
        (b"GET " + bytes(80), "b'GET ' instead of a header"),
    ],
)
def test_anything_else_is_refused(sent: bytes, message: str) -> None:
    with pair() as (first, second):
        first.send(sent)
        with pytest.raises(PeerError, match=message):
            list(receiving(second, 1, fill(0, 8), "halo of layer 1", rank=5))


def send_ahead_and_another_size() -> list[Any]:
    with start_session(timeout_s=20) as session:
        calls, rows, rank = CallExchange(session, "pull"), torch.tensor([1.5, 2.5]), session.topology.rank
        session.timeline.start()
        if rank == 1:
            calls.post([Outgoing(rank=0, rows=rows)], [], "rows", phase="forward")()
        barrier(session, "rows have arrived")
        if rank == 0:
            received = calls.post([], [Incoming(rank=1, rows=torch.zeros(2))], "rows", phase="forward")()
            assert torch.equal(received[0], rows)
        (span,) = session.timeline.spans
        results = [span.end_s >= span.begin_s, session.ledger.total(phase="forward"), len(calls._inbox)]
        barrier(session, "counted")
        outgoing = [Outgoing(rank=1 - rank, rows=torch.zeros(2 + rank))]
        incoming = [Incoming(rank=1 - rank, rows=torch.zeros(2))]
        message = refusal(calls.post(outgoing, incoming, "rows", phase=None), PeerError)
        barrier(session, "both have seen it")
        return [*results, message]


def test_rows_of_a_rank_that_is_ahead_are_kept_and_those_of_another_size_refused() -> None:
    zero, item = run_ranks(send_ahead_and_another_size, 2)
    assert (zero[:3], item) == ([True, 0, 0], [True, 8, 0, ""])
    assert "rank 1 sends 12 bytes of 'rows', but this rank expects 8 bytes of 'rows'" in zero[3]


def lose_the_other_rank() -> list[str]:
    session = start_session(timeout_s=60)
    calls = CallExchange(session, "pull")
    if session.topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rows = torch.zeros(2)
    messages: list[tuple[list[Outgoing], list[Incoming]]] = [
        ([], [Incoming(rank=1, rows=rows)]),
        # Posted only after the failure of the first one: a rank that still lives may take the rows.
        ([Outgoing(rank=1, rows=rows)], []),
    ]
    message = [
        refusal(lambda message=message: calls.post(*message, "rows", phase=None)(), PeerError)
        for message in messages
    ]
    session.close(failed=True)
    return message


def test_a_dead_rank_is_named_to_who_expects_its_rows_and_to_who_only_sends() -> None:
    survivor, _ = start_ranks(lose_the_other_rank, 2)
    assert ["rank 1" in message for message in survivor.result] == [True, True]
