"""Endpoints beside one-sided calls: a TCP connection per pair of ranks, and access for external clients.

The connections carry large messages that both ends expect. Ranks exchange addresses by one-sided calls. They
prove to each other that they know the pair's key, which is never sent. Data is not encrypted. With
``DGLX_CURVE``, rows are sent by one-sided calls instead (see exchange.py).

External clients, such as stateless workers, have their own secret, port and handlers. Their secret gives no
access to the ranks' port, so it may be stored in places that must not know the job's secret, such as events
for a functions service. Their port serves only operations that are registered for clients (see
:meth:`Rpc.register`).
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import time
from collections.abc import Mapping
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
_HANDSHAKE_TIMEOUT_S = 5.0
"""Time limit for each of the two messages in a handshake. The next connection waits meanwhile."""
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
    connections: dict[int, socket.socket] = {}
    with ExitStack() as cleanup:
        # Publish the address of a new port to the other ranks.
        listener = socket.create_server((address, 0), family=family, backlog=world_size)
        cleanup.enter_context(listener)
        port = np.array([listener.getsockname()[1]])
        own_address: list[Array] = [np.frombuffer(address.encode(), np.uint8), port]
        session.rpc.register(_OFFER, lambda _name, _arrays: own_address)
        cleanup.callback(session.rpc.unregister, _OFFER)
        barrier(session, _OPENING)

        # Connect to the lower ranks, and accept a connection from each higher rank.
        close_on_error = cleanup.enter_context(ExitStack())
        for peer in range(rank):
            connections[peer] = close_on_error.enter_context(_connect(session, peer))
        pair_keys = {peer: _derive_pair_key(session, rank, peer) for peer in range(rank + 1, world_size)}
        while pair_keys:
            peer, connection = _accept(session, listener, pair_keys)
            connections[peer] = close_on_error.enter_context(connection)
            del pair_keys[peer]

        # No rank may withdraw its address before all ranks have read it, or fail alone.
        barrier(session, _OPENING)
        close_on_error.pop_all()

    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
    return connections


def _derive_pair_key(session: Session, listening_rank: int, connecting_rank: int) -> bytes:
    assert session.store is not None
    return derive_key(session.store.key, "stream", listening_rank, connecting_rank)


def _connect(session: Session, peer: int) -> socket.socket:
    """Connect to ``peer``, and prove this rank to it. Raise PeerError if it cannot be reached."""
    rank = session.topology.rank
    encoded_address, port_array = session.rpc.call(peer, _OFFER, "", [], phase=CONTROL)
    address = encoded_address.tobytes().decode()
    port = int(port_array[0])
    with ExitStack() as close_on_error:
        try:
            connection = socket.create_connection((address, port), timeout=session.timeout_s)
            close_on_error.enter_context(connection)
            prove_rank(connection, rank, _derive_pair_key(session, peer, rank))
        except OSError as error:
            raise PeerError(
                f"rank {rank} cannot connect to rank {peer} on {session.hosts[peer]} at {address}:{port} "
                f"({error}). Every rank must reach every other rank. Check whether a firewall is between "
                "them, or whether that rank is dead."
            ) from error
        close_on_error.pop_all()
    return connection


def _accept(
    session: Session, listener: socket.socket, pair_keys: Mapping[int, bytes]
) -> tuple[int, socket.socket]:
    """Wait for a connection from a rank in ``pair_keys``. Return that rank and the connection.

    Connections that cannot prove to be such a rank are refused. Raises PeerError if a rank is dead or none
    connects in time.
    """
    deadline = time.monotonic() + session.timeout_s
    listener.settimeout(_CHECK_EVERY_S)
    while time.monotonic() < deadline:
        try:
            connection, address = listener.accept()
        except TimeoutError:
            session.raise_for_dead(list(pair_keys), _OPENING)
            continue

        connection.settimeout(_HANDSHAKE_TIMEOUT_S)
        try:
            return authenticate(connection, pair_keys), connection
        except OSError as error:
            log.warning("refused a connection from %s: %s", address[0], error)
            connection.close()

    names = ", ".join(f"rank {peer} on {session.hosts[peer]}" for peer in pair_keys)
    raise PeerError(
        f"{names} did not connect within {session.timeout_s:g} s. Look at their output, or raise timeout_s "
        "(DGLX_TIMEOUT)."
    )


def prove_rank(connection: socket.socket, rank: int, secret: bytes) -> None:
    """Prove to the listening end that this process is ``rank``, and let the listening end prove itself.

    Raises OSError if the listening end does not know ``secret``.
    """
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_HELLO.pack(_MAGIC, rank, own_nonce))
    answer = _read(connection, _NONCE_BYTES + _PROOF_BYTES)
    peer_nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _make_proof(secret, b"listens", own_nonce, peer_nonce)):
        raise ConnectionRefusedError("it does not know this job's secret")
    connection.sendall(_make_proof(secret, b"connects", own_nonce, peer_nonce))


def authenticate(connection: socket.socket, pair_keys: Mapping[int, bytes]) -> int:
    """Return which rank is at the other end. Raise OSError unless it proves to be in ``pair_keys``."""
    magic, rank, nonce = _HELLO.unpack(_read(connection, _HELLO.size))
    if magic != _MAGIC or rank not in pair_keys:
        raise ConnectionRefusedError("it does not speak this job's protocol")

    key = pair_keys[rank]
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own_nonce + _make_proof(key, b"listens", nonce, own_nonce))
    proof = _read(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _make_proof(key, b"connects", nonce, own_nonce)):
        raise ConnectionRefusedError("it does not know this job's secret")
    return int(rank)


def _make_proof(secret: bytes, role: bytes, connecting: bytes, listening: bytes) -> bytes:
    return hmac.digest(secret, role + connecting + listening, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    # The time limit holds for the entire message, because a stranger may send it byte by byte.
    limit_s = connection.gettimeout() or 0.0
    deadline = time.monotonic() + limit_s
    data = b""
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionResetError("it closed the connection")
        data += received

    connection.settimeout(limit_s)
    return data


@final
@dataclass(frozen=True, kw_only=True)
class ClientAccess:
    """Addresses and credentials for external clients."""

    addresses: Mapping[int, PeerAddress]
    """Client endpoints by rank."""
    credentials: Credentials
    """Credentials for clients that call this rank. They hold a secret for clients only. With ``DGLX_CURVE``
    they also hold a key pair that only the client endpoints accept.
    """


def open_client_access(session: Session, interface: str = "") -> ClientAccess:
    """Return the addresses and credentials for external clients.

    A session's first call is collective. Later calls return its result. A session with one rank listens on
    the network interface ``interface``. By default it accepts only clients on this machine. A session with
    several ranks listens on the addresses that its ranks already use. Raises ConfigError if ``interface``
    does not exist.
    """
    access = _CLIENT_ACCESS.get(session)
    if access is not None:
        return access

    address = session.rpc.address or "127.0.0.1"
    if interface and not session.rpc.address:
        address = find_interface_address(interface, "option interface")

    def exchange_alone(_what: str, value: object) -> list[object]:
        return [value]

    store = session.store
    credentials, addresses = open_endpoints(
        exchange_alone if store is None else store.exchange,
        session.hosts,
        lambda credentials: session.rpc.listen_to_clients(address, credentials),
        secret=secrets.token_bytes(32) if store is None else store.key,
        encrypted=read_settings().curve,
        for_clients=True,
    )
    access = ClientAccess(addresses=addresses, credentials=credentials)
    _CLIENT_ACCESS.set(session, access)
    return access
