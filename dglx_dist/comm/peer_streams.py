"""One TCP connection between every two ranks, for large messages that both ends expect.

Ranks tell each other over one-sided calls where they listen and a secret for the two of them, so whoever
connects is of this job (see auth.py) and the secret itself never passes the connection. What travels later
is not encrypted, as in collectives.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import final

import numpy as np

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.rpc import Handler
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.errors import PeerError
from dglx_dist.records import Array

log = logging.getLogger(__name__)

_OFFER = "streams.offer"
_OPENING = "opening of connections between ranks"
_STREAMS: SessionField[Streams | None] = SessionField(lambda: None)
_HELLO = struct.Struct("!8sI32s")
_MAGIC = b"dglxstr1"
_NONCE_BYTES = _SECRET_BYTES = _PROOF_BYTES = 32
_HANDSHAKE_S = 5.0
"""How long a stranger who says nothing may keep others waiting."""
_CHECK_EVERY_S = 1.0


@final
class Streams:
    """The connections of one rank.

    Args:
        sockets: By rank; connected, non-blocking.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)

    def to(self, rank: int) -> socket.socket:
        """Return the connection to ``rank``.

        Raises:
            PeerError: there is none: it is the own rank, or the session is closed.
        """
        if rank not in self._sockets:
            raise PeerError(f"there is no connection to rank {rank}: it is this rank, or the session is over")
        return self._sockets[rank]

    def close(self) -> None:
        """Close all; may be called twice. Waits for nobody."""
        while self._sockets:
            self._sockets.popitem()[1].close()


def open_streams(session: Session) -> Streams:
    """Return the connections of this rank; made the first time, when every rank must call it, then kept.

    Raises:
        PeerError: a rank is dead or did not connect within the time-out; it is named.
    """
    kept = _STREAMS.of(session)
    if kept is not None:
        return kept
    streams = Streams(_connect_all(session) if session.topology.world_size > 1 else {})
    _STREAMS.set(session, streams)
    # Also where it failed: peers that wait for this rank's rows are told by the end of the connection.
    session.on_close.append(streams.close)
    return streams


def _connect_all(session: Session) -> dict[int, socket.socket]:
    """Connect to every lower rank and accept every higher one: rank 0 waits for nobody first."""
    rank, world_size = session.topology.rank, session.topology.world_size
    address = session.rpc.address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as undo:
        listener = undo.enter_context(socket.create_server((address, 0), family=family, backlog=world_size))
        offers = {peer: secrets.token_bytes(_SECRET_BYTES) for peer in range(rank + 1, world_size)}
        session.rpc.register(_OFFER, _offerer(address, listener.getsockname()[1], offers))
        undo.callback(session.rpc.unregister, _OFFER)
        barrier(session, _OPENING)
        connected: dict[int, socket.socket] = {}
        closing = undo.enter_context(ExitStack())
        for peer in range(rank):
            connected[peer] = closing.enter_context(_connect(session, peer))
        while missing := [peer for peer in offers if peer not in connected]:
            peer, accepted = _accept(session, listener, offers, missing)
            connected[peer] = closing.enter_context(accepted)
        # Nobody may withdraw the offer before all have it, nor fail alone.
        barrier(session, _OPENING)
        closing.pop_all()
    for one in connected.values():
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setblocking(False)
    return connected


def _offerer(address: str, port: int, offers: Mapping[int, bytes]) -> Handler:
    """Return what answers a rank with where to connect and the secret of the two."""
    where = np.frombuffer(address.encode(), dtype=np.uint8)

    def offer(name: str, _arrays: Sequence[Array]) -> list[Array]:
        secret = np.frombuffer(offers[int(name)], dtype=np.uint8)
        return [where, np.array([port], dtype=np.int64), secret]

    return offer


def _connect(session: Session, peer: int) -> socket.socket:
    rank = session.topology.rank
    where, port, secret = session.rpc.call(peer, _OFFER, str(rank), [], phase="control")
    address = where.tobytes().decode()
    try:
        connection = socket.create_connection((address, int(port[0])), timeout=session.timeout_s)
    except OSError as error:
        raise PeerError(_unreachable(session, peer, f"{address}:{port[0]}", error)) from error
    with ExitStack() as undo:
        undo.enter_context(connection)
        try:
            show(connection, rank, secret.tobytes())
        except OSError as error:
            raise PeerError(_unreachable(session, peer, f"{address}:{port[0]}", error)) from error
        undo.pop_all()
    return connection


def _unreachable(session: Session, peer: int, where: str, error: OSError) -> str:
    return (
        f"rank {session.topology.rank} cannot connect to rank {peer} on {session.hosts[peer]} at {where} "
        f"({error}); every rank must reach every other one: is a firewall between them, or that rank dead?"
    )


def _accept(
    session: Session, listener: socket.socket, offers: Mapping[int, bytes], missing: Sequence[int]
) -> tuple[int, socket.socket]:
    """Return the next connection that one of ``missing`` makes; strangers are refused and logged."""
    started = time.monotonic()
    listener.settimeout(_CHECK_EVERY_S)
    while time.monotonic() - started < session.timeout_s:
        try:
            connection, address = listener.accept()
        except TimeoutError:
            session.raise_for_dead(list(missing), _OPENING)
            continue
        connection.settimeout(_HANDSHAKE_S)
        try:
            peer = admit(connection, {rank: offers[rank] for rank in missing})
        except OSError as error:
            log.warning("refused a connection from %s: %s", address[0], error)
            connection.close()
        else:
            return peer, connection
    names = ", ".join(f"rank {peer} on {session.hosts[peer]}" for peer in missing)
    raise PeerError(
        f"{names} did not connect within {session.timeout_s:g} s; look at their output, or raise timeout_s "
        "(DGLX_TIMEOUT)"
    )


def show(connection: socket.socket, rank: int, secret: bytes) -> None:
    """Prove to the listening end that this is ``rank``, and that the other one knows ``secret`` too.

    Raises:
        OSError: the other end does not know it, or has gone.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_HELLO.pack(_MAGIC, rank, mine))
    answer = _read(connection, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"listens", mine, theirs)):
        raise ConnectionRefusedError("it does not know this job's secret")
    connection.sendall(_proof(secret, b"connects", mine, theirs))


def admit(connection: socket.socket, offers: Mapping[int, bytes]) -> int:
    """Return which of the ranks in ``offers`` is at the other end.

    Raises:
        OSError: none of them, or it said nothing in time.
    """
    magic, rank, theirs = _HELLO.unpack(_read(connection, _HELLO.size))
    if magic != _MAGIC or rank not in offers:
        raise ConnectionRefusedError("it does not speak this job's protocol")
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine + _proof(offers[rank], b"listens", theirs, mine))
    if not hmac.compare_digest(
        _read(connection, _PROOF_BYTES), _proof(offers[rank], b"connects", theirs, mine)
    ):
        raise ConnectionRefusedError("it does not know this job's secret")
    return int(rank)


def _proof(secret: bytes, role: bytes, connecting: bytes, listening: bytes) -> bytes:
    return hmac.digest(secret, role + connecting + listening, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        piece = connection.recv(size - len(read))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        read += piece
    return read
