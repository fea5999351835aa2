"""Who may connect: a secret per job, or one key pair per rank.

Plain (default): rank 0 draws a random secret, all ranks learn it through the rendezvous store, and every
connection must present it. It keeps out strangers who can reach the port; like the store itself, it does
not protect against somebody who can read the network. Curve: each rank makes a key pair, only the public
halves pass through the store, connections are encrypted and only keys of this job are accepted; a secret
half never leaves its process. Who is no rank has a secret, or pair, of its own, which opens less (see
visitors).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import final

import zmq
from zmq.utils import z85

from dglx_dist.comm.wire import read_event

_DOMAIN = b"dglx"
_USER = b"rank"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What one rank shows and accepts."""

    secret: bytes = field(repr=False)
    """The job's secret, ASCII."""
    public_key: bytes | None = None
    """Curve key pair of this rank, Z85; None: plain."""
    secret_key: bytes | None = field(default=None, repr=False)
    accepted_keys: frozenset[bytes] = frozenset()
    """Public keys of all ranks."""

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket``, not yet bound, refuse everybody who does not show the right thing."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        if self.secret_key is None:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)

    def present(self, socket: zmq.Socket[bytes], server_key: bytes | None) -> None:
        """Make ``socket``, not yet connected, show what a guarded one wants."""
        if self.secret_key is None or self.public_key is None or server_key is None:
            socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
            socket.setsockopt(zmq.PLAIN_PASSWORD, self.secret)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)

    def accepts(self, mechanism: bytes, shown: list[bytes]) -> bool:
        """Whether a connection that showed ``shown`` is of this job."""
        if self.secret_key is None:
            return (
                mechanism == b"PLAIN"
                and len(shown) == 2
                and hmac.compare_digest(shown[0], _USER)
                and hmac.compare_digest(shown[1], self.secret)
            )
        return mechanism == b"CURVE" and len(shown) == 1 and z85.encode(shown[0]) in self.accepted_keys


def make_credentials_keys() -> tuple[bytes, bytes]:
    """Make a Curve key pair, (public, secret), both Z85."""
    public, secret = zmq.curve_keypair()
    return public, secret


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Bind the socket on which ZeroMQ asks whether a connection is welcome (ZAP, RFC 27)."""
    authenticator = context.socket(zmq.REP)
    authenticator.setsockopt(zmq.LINGER, 0)
    authenticator.bind(_ZAP_ENDPOINT)
    return authenticator


def serve_authenticator(authenticator: zmq.Socket[bytes], credentials: Credentials) -> None:
    """Answer one question of ZeroMQ; a refusal is logged with the address it came from."""
    frames = authenticator.recv_multipart()
    if len(frames) < 6:
        authenticator.send_multipart([b"1.0", b"", b"500", b"malformed", b"", b""])
        return
    version, request, _domain, address, _identity, mechanism, *shown = frames
    if credentials.accepts(mechanism, shown):
        authenticator.send_multipart([version, request, b"200", b"OK", _USER, b""])
        return
    log.warning(
        "refused a connection from %s: it does not know this job's secret", address.decode(errors="replace")
    )
    authenticator.send_multipart([version, request, b"400", b"not of this job", b"", b""])


_END, _EVENTS = "inproc://door-end", "inproc://door-events"


@final
class ZapAuthenticator:
    """Answers ZeroMQ's question whether a connection is welcome, for all sockets of ``context``.

    Args:
        context: The context of the guarded socket; has one door.
        credentials: What a connection must show.
        guarded: The socket whose connections are watched, not yet bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        credentials: Credentials,
        guarded: zmq.Socket[bytes],
    ) -> None:
        self._credentials = credentials
        self._questions = start_authenticator(context)
        self._events = guarded.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, _EVENTS)
        self._end = context.socket(zmq.PAIR)
        self._end.bind(_END)
        self._ender = context.socket(zmq.PAIR)
        self._ender.connect(_END)
        self._names: dict[int, str] = {}
        self._welcome: set[int] = set()
        self._thread = threading.Thread(target=self._watch, name="dglx-door", daemon=True)
        self._thread.start()

    def passed(self, handle: int) -> None:
        """Note that a message came through the connection of file descriptor ``handle``; any thread."""
        self._welcome.add(handle)

    def close(self) -> None:
        """Close; the guarded socket must be closed already."""
        self._ender.send(b"")
        self._thread.join()
        self._ender.close(0)

    def _watch(self) -> None:
        poller = zmq.Poller()
        for source in (self._questions, self._events, self._end):
            poller.register(source, zmq.POLLIN)
        ready: dict[object, int] = {}
        while self._end not in ready:
            ready = dict(poller.poll())
            if self._questions in ready:
                serve_authenticator(self._questions, self._credentials)
            if self._events in ready:
                self._note()
        for source in (self._questions, self._events, self._end):
            source.close(0)

    def _note(self) -> None:
        event = read_event(self._events)
        handle = int(event.value)
        if event.number == zmq.EVENT_ACCEPTED:
            self._names[handle] = _peer_name(handle)
        elif event.number == zmq.EVENT_DISCONNECTED:
            name = self._names.pop(handle, "")
            # Only who passed the handshake can get a message through, and no rank connects without one.
            if handle in self._welcome:
                self._welcome.discard(handle)
            else:
                log.warning("refused a connection from %s: it does not speak this job's protocol", name)


def _peer_name(handle: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as copy:
        host, port, *_ = copy.getpeername()
        return f"{host}:{port}"
    return "an address that is gone"
