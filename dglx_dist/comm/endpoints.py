"""Endpoints beside one-sided calls: a TCP connection per pair of ranks, and access for external clients.

The connections carry large messages that both ends expect. Ranks exchange addresses by one-sided calls. They
prove to each other that they know a key of the pair, which is never sent. Data is not encrypted. With
``DGLX_CURVE``, rows are sent by one-sided calls instead (see exchange.py).

External clients, such as stateless workers, have their own secret, port and handlers. Their secret gives no
access to the port of the ranks, so it may be stored in places that must not know the job's secret, such as
the events of a functions service. Their port serves only operations that are registered for clients (see
:meth:`Rpc.register`).
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
from dataclasses import dataclass
from typing import final

import numpy as np

from dglx_dist.comm.auth import Credentials, derive_key
from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.ledger import CONTROL
from dglx_dist.comm.rendezvous import find_interface_address
from dglx_dist.comm.rpc import PeerAddress, open_endpoints
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.comm.topology import read_settings
from dglx_dist.errors import PeerError
from dglx_dist.records import Array

log = logging.getLogger(__name__)

_OFFER = "streams.offer"
_OPENING = "opening of connections between ranks"
_CLIENT_ACCESS: SessionField[ClientAccess | None] = SessionField(lambda _: None)
_HELLO = struct.Struct("!8sI32s")
_MAGIC = b"dglxstr1"
_NONCE_BYTES = _PROOF_BYTES = 32
_HANDSHAKE_S = 5.0
"""Time limit of each of the two messages of a handshake. The next connection waits meanwhile."""
_CHECK_EVERY_S = 1.0


def open_streams(session: Session) -> dict[int, socket.socket]:
    """Return a new non-blocking connection to every other rank, by rank. Every rank must call this.

    Raises PeerError if a rank is dead or did not connect within the time limit. The message names it.
    """
    rank, world_size = session.topology.rank, session.topology.world_size
    if world_size == 1:
        return {}
    address = session.rpc.address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as undo:
        listener = undo.enter_context(socket.create_server((address, 0), family=family, backlog=world_size))
        offers = {peer: _derive_pair_key(session, rank, peer) for peer in range(rank + 1, world_size)}
        port = np.array([listener.getsockname()[1]])
        own_address: list[Array] = [np.frombuffer(address.encode(), np.uint8), port]
        session.rpc.register(_OFFER, lambda _name, _arrays: own_address)
        undo.callback(session.rpc.unregister, _OFFER)
        barrier(session, _OPENING)
        connections: dict[int, socket.socket] = {}
        closing = undo.enter_context(ExitStack())
        for peer in range(rank):
            connections[peer] = closing.enter_context(_connect(session, peer))
        while missing := [peer for peer in offers if peer not in connections]:
            peer, accepted = _accept(session, listener, offers, missing)
            connections[peer] = closing.enter_context(accepted)
        # No rank may withdraw its offer before all have read it, or fail alone.
        barrier(session, _OPENING)
        closing.pop_all()
    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
    return connections


def _derive_pair_key(session: Session, listens: int, connects: int) -> bytes:
    assert session.store is not None
    return derive_key(session.store.key, "stream", listens, connects)


def _connect(session: Session, peer: int) -> socket.socket:
    """Connect to ``peer``, and prove this rank to it. Raise PeerError if it cannot be reached."""
    rank = session.topology.rank
    encoded, port = session.rpc.call(peer, _OFFER, "", [], phase=CONTROL)
    address = encoded.tobytes().decode()
    with ExitStack() as undo:
        try:
            connection = socket.create_connection((address, int(port[0])), timeout=session.timeout_s)
            prove_rank(undo.enter_context(connection), rank, _derive_pair_key(session, peer, rank))
        except OSError as error:
            raise PeerError(
                f"rank {rank} cannot connect to rank {peer} on {session.hosts[peer]} at {address}:{port[0]} "
                f"({error}). Every rank must reach every other rank. Check whether a firewall is between "
                "them, or whether that rank is dead."
            ) from error
        undo.pop_all()
    return connection


def _accept(
    session: Session, listener: socket.socket, offers: Mapping[int, bytes], missing: Sequence[int]
) -> tuple[int, socket.socket]:
    """Wait for a connection of one of the ``missing`` ranks. Return the rank that it has proved to be.

    Other connections are refused. Raises PeerError if a rank is dead or none connects in time.
    """
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
            peer = authenticate(connection, {rank: offers[rank] for rank in missing})
        except OSError as error:
            log.warning("refused a connection from %s: %s", address[0], error)
            connection.close()
        else:
            return peer, connection
    names = ", ".join(f"rank {peer} on {session.hosts[peer]}" for peer in missing)
    raise PeerError(
        f"{names} did not connect within {session.timeout_s:g} s. Look at their output, or raise timeout_s "
        "(DGLX_TIMEOUT)."
    )


def prove_rank(connection: socket.socket, rank: int, secret: bytes) -> None:
    """Prove to the listening end that this is ``rank``. Raise OSError if it does not know ``secret``."""
    our_nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_HELLO.pack(_MAGIC, rank, our_nonce))
    answer = _read(connection, _NONCE_BYTES + _PROOF_BYTES)
    nonce = answer[:_NONCE_BYTES]
    proof = answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _make_proof(secret, b"listens", our_nonce, nonce)):
        raise ConnectionRefusedError("it does not know this job's secret")
    connection.sendall(_make_proof(secret, b"connects", our_nonce, nonce))


def authenticate(connection: socket.socket, offers: Mapping[int, bytes]) -> int:
    """Return the rank of the other end, which must be one of the ranks in ``offers``.

    Otherwise raise OSError.
    """
    magic, rank, nonce = _HELLO.unpack(_read(connection, _HELLO.size))
    if magic != _MAGIC or rank not in offers:
        raise ConnectionRefusedError("it does not speak this job's protocol")
    our_nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(our_nonce + _make_proof(offers[rank], b"listens", nonce, our_nonce))
    proof = _read(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _make_proof(offers[rank], b"connects", nonce, our_nonce)):
        raise ConnectionRefusedError("it does not know this job's secret")
    return int(rank)


def _make_proof(secret: bytes, role: bytes, connecting: bytes, listening: bytes) -> bytes:
    return hmac.digest(secret, role + connecting + listening, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    # The time limit holds for the whole message, because a stranger may send it byte by byte.
    limit_s = connection.gettimeout() or 0.0
    deadline = time.monotonic() + limit_s
    data = b""
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        data += piece
    connection.settimeout(limit_s)
    return data


@final
@dataclass(frozen=True, kw_only=True)
class ClientAccess:
    """Addresses and credentials for external clients."""

    addresses: Mapping[int, PeerAddress]
    """Client endpoints by rank."""
    credentials: Credentials
    """Credentials for clients of this rank: a secret of the job for clients only, and with ``DGLX_CURVE`` a
    key pair that only the client endpoints accept."""


def open_client_access(session: Session, interface: str = "") -> ClientAccess:
    """Return the access for external clients. The first call is collective, and later calls return the same.

    A session of one rank listens on ``interface``, or for clients on this machine by default. Several ranks
    listen where they listen to each other. Raises ConfigError if there is no such interface.
    """
    access = _CLIENT_ACCESS.get(session)
    if access is not None:
        return access
    default = find_interface_address(interface, "option interface") if interface else "127.0.0.1"
    address = session.rpc.address or default
    credentials, addresses = open_endpoints(
        (lambda _, value: [value]) if session.store is None else session.store.exchange,
        session.hosts,
        lambda credentials: session.rpc.listen_to_clients(address, credentials),
        secret=secrets.token_bytes(32) if session.store is None else session.store.key,
        encrypted=read_settings().curve,
        for_clients=True,
    )
    access = ClientAccess(addresses=addresses, credentials=credentials)
    _CLIENT_ACCESS.set(session, access)
    return access
