"""Connections between ranks: authentication, order, and messages of any size."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from dglx_dist.comm.endpoints import authenticate, prove_rank
from dglx_dist.comm.exchange import CallExchange, Incoming, Outgoing, StreamExchange, row_exchanges
from dglx_dist.comm.session import start_session
from dglx_dist.errors import PeerError
from tests.helpers.ranks import run_ranks

SECRET = bytes(range(32))


@contextlib.contextmanager
def pair(timeout_s: float = 10.0) -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        first.settimeout(timeout_s)
        second.settimeout(timeout_s)
        yield first, second


def both(connects: Callable[[], object], listens: Callable[[], object]) -> tuple[object, object]:
    results: list[object] = [None, None]

    def run(place: int, action: Callable[[], object]) -> None:
        try:
            results[place] = action()
        except OSError as error:
            results[place] = error

    thread = threading.Thread(target=run, args=(0, connects))
    thread.start()
    run(1, listens)
    thread.join()
    return results[0], results[1]


def test_an_end_that_does_not_know_it_is_refused_by_the_other() -> None:
    with pair(0.5) as (first, second):
        shown, admitted = both(
            lambda: prove_rank(first, 3, SECRET), lambda: authenticate(second, {3: b"x" * 32})
        )
        assert isinstance(shown, ConnectionRefusedError)
        assert isinstance(admitted, OSError)  # nobody proves anything to it


def test_a_proof_cannot_be_sent_back() -> None:
    """Whoever connects without the secret and returns the words of the other end is not admitted."""
    with pair() as (first, second):

        def mirror() -> None:
            first.sendall(b"dglxstr1" + (3).to_bytes(4, "big") + bytes(32))
            answer = b""
            while len(answer) < 64:
                answer += first.recv(64)
            first.sendall(answer[32:])

        _, admitted = both(mirror, lambda: authenticate(second, {3: SECRET}))
        assert isinstance(admitted, ConnectionRefusedError)
        assert "secret" in str(admitted)


@pytest.mark.parametrize(
    "greeting", [b"GET / HTTP/1.1\r\n" + bytes(60), b"dglxstr1" + (9).to_bytes(4, "big") + bytes(32)]
)
def test_strangers_are_refused(greeting: bytes) -> None:
    with pair() as (first, second):
        first.sendall(greeting)
        with pytest.raises(ConnectionRefusedError, match="protocol"):
            authenticate(second, {3: SECRET})


def test_sending_byte_by_byte_does_not_extend_the_time_limit() -> None:
    def dribble() -> None:
        with contextlib.suppress(OSError):
            for byte in b"GET / HTTP/1.1\r\n" + bytes(60):
                first.send(bytes([byte]))
                time.sleep(0.05)

    with pair(0.5) as (first, second):
        threading.Thread(target=dribble, daemon=True).start()
        with pytest.raises(TimeoutError):
            authenticate(second, {3: SECRET})


def swap_with_all(curve: bool) -> None:
    with start_session() as session:
        rank, world_size = session.topology.rank, session.topology.world_size
        streams = row_exchanges(session).streams
        # With Curve, rows go by calls, which it encrypts.
        assert isinstance(streams, CallExchange if curve and world_size > 1 else StreamExchange)
        remaining = [peer for peer in range(world_size) if peer != rank]

        def work(incoming: list[Incoming]) -> Iterator[bool]:
            yield True
            while any(item.num_arrived < item.rows.nbytes for item in incoming):
                yield False

        for number in range(3):
            incoming = [
                Incoming(rank=peer, rows=torch.zeros(300_000, dtype=torch.int64)) for peer in remaining
            ]
            outgoing = [Outgoing(rank=peer, rows=torch.full((300_000,), rank + number)) for peer in remaining]
            streams.post(outgoing, incoming, "swap", phase=None)(work(incoming))
            assert all((item.rows == item.rank + number).all() for item in incoming)
        assert session.ledger.total() == session.ledger.total(phase="control")
    late = [Outgoing(rank=(rank + 1) % max(world_size, 2), rows=torch.zeros(1))]
    with pytest.raises(PeerError, match=r"the session (has ended|is closed)|there is no connection"):
        streams.post(late, [], "swap", phase=None)()


@pytest.mark.parametrize(("ranks", "curve"), [(1, "0"), (3, "0"), (3, "1")])
def test_every_rank_reaches_every_other_one(ranks: int, curve: str) -> None:
    run_ranks(swap_with_all, ranks, args=[curve == "1"], environment={"DGLX_CURVE": curve})


def fail_on_rank_one() -> int:
    """Rank 1 fails and lives on; rank 0 waits for bytes of it."""
    session = start_session(timeout_s=60)
    connection = row_exchanges(session).streams._get_connection(1 - session.topology.rank)
    if session.topology.rank == 1:
        session.fail(ValueError("a bug"))
        session.close(failed=True)
        return connection.fileno()
    connection.settimeout(20)
    received = connection.recv(1)
    session.close(failed=True)
    return len(received)


def test_peers_notice_a_failed_rank_by_the_end_of_its_connection() -> None:
    assert run_ranks(fail_on_rank_one, 2) == [0, -1]
