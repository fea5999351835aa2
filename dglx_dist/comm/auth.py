"""Authentication of connections: one secret per job, or one key pair per rank.

Plain (default): rank 0 draws a random secret, all ranks get it through the rendezvous store, and every
connection must present it. It rejects unauthenticated connections; like the store itself, it does not protect
against eavesdropping. Curve: each rank makes a key pair, only public keys pass through the store, connections
are encrypted and only keys of this job are accepted; a secret key never leaves its process. External clients
have other secrets, or keys, which give access to less (see endpoints.py).
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
_STOP, _EVENTS = "inproc://zap-stop", "inproc://zap-events"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials that one rank presents and accepts."""

    secret: bytes = field(repr=False)
    """The job's secret, ASCII."""
    public_key: bytes | None = None
    """Of the rank's Curve key pair, Z85; None: plain."""
    secret_key: bytes | None = field(default=None, repr=False)
    accepted_keys: frozenset[bytes] = frozenset()
    """Public keys of all ranks."""

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket``, not yet bound, reject connections without the right credentials."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        if self.secret_key is None:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)

    def present(self, socket: zmq.Socket[bytes], server_key: bytes | None) -> None:
        """Make ``socket``, not yet connected, present these credentials."""
        if self.secret_key is None or self.public_key is None or server_key is None:
            socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
            socket.setsockopt(zmq.PLAIN_PASSWORD, self.secret)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)

    def accepts(self, mechanism: bytes, presented: list[bytes]) -> bool:
        """Whether a connection that presented ``presented`` is of this job."""
        if self.secret_key is None:
            return (
                mechanism == b"PLAIN"
                and len(presented) == 2
                and hmac.compare_digest(presented[0], _USER)
                and hmac.compare_digest(presented[1], self.secret)
            )
        return (
            mechanism == b"CURVE" and len(presented) == 1 and z85.encode(presented[0]) in self.accepted_keys
        )


@final
class ZapAuthenticator:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27) for all sockets of ``context``.

    A context may have one. The ``guarded`` socket, whose connections are monitored, must not be bound yet.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], credentials: Credentials, guarded: zmq.Socket[bytes]
    ) -> None:
        self._credentials = credentials
        self._requests = context.socket(zmq.REP)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind("inproc://zeromq.zap.01")
        self._events = guarded.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, _EVENTS)
        self._stop = context.socket(zmq.PAIR)
        self._stop.bind(_STOP)
        self._stopper = context.socket(zmq.PAIR)
        self._stopper.connect(_STOP)
        self._names: dict[int, str] = {}
        self._accepted: set[int] = set()
        self._thread = threading.Thread(target=self._serve, name="dglx-zap", daemon=True)
        self._thread.start()

    def passed(self, handle: int) -> None:
        """Note a message through the connection of file descriptor ``handle``; any thread."""
        self._accepted.add(handle)

    def close(self) -> None:
        """Close; the guarded socket must be closed already."""
        self._stopper.send(b"")
        self._thread.join()
        self._stopper.close(0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._requests, self._events, self._stop):
            poller.register(source, zmq.POLLIN)
        ready: dict[object, int] = {}
        while self._stop not in ready:
            ready = dict(poller.poll())
            if self._requests in ready:
                self._answer()
            if self._events in ready:
                self._note_event()
        for source in (self._requests, self._events, self._stop):
            source.close(0)

    def _answer(self) -> None:
        frames = self._requests.recv_multipart()
        if len(frames) < 6:
            self._requests.send_multipart([b"1.0", b"", b"500", b"malformed", b"", b""])
            return
        version, request, _domain, address, _identity, mechanism, *presented = frames
        if self._credentials.accepts(mechanism, presented):
            self._requests.send_multipart([version, request, b"200", b"OK", _USER, b""])
            return
        name = address.decode(errors="replace")
        log.warning("refused a connection from %s: it does not know this job's secret", name)
        self._requests.send_multipart([version, request, b"400", b"not of this job", b"", b""])

    def _note_event(self) -> None:
        event, handle = read_event(self._events)
        if event == zmq.EVENT_ACCEPTED:
            self._names[handle] = _peer_name(handle)
        elif event == zmq.EVENT_DISCONNECTED:
            name = self._names.pop(handle, "")
            # A message proves the handshake, and no rank connects without sending one.
            if handle in self._accepted:
                self._accepted.discard(handle)
            else:
                log.warning("refused a connection from %s: it does not speak this job's protocol", name)


def _peer_name(handle: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as copy:
        host, port, *_ = copy.getpeername()
        return f"{host}:{port}"
    return "an address that is gone"
