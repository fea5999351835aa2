"""Authenticate ranks and clients with a job's secret, and guard the connections for one-sided calls.

Each use has its own key (:func:`derive_key`), so the secret itself is never sent. Without Curve, a connection
presents a nonce and its HMAC. The server accepts a nonce once, so a recorded handshake cannot be repeated.
ZeroMQ carries both in its PLAIN mechanism, and reads no message before it accepts the connection. The server
proves in its first answer that it knows the key. The client uses no answer without this proof. PLAIN does not
protect against an attacker on the path.

Curve protects against such an attacker. Each rank makes a key pair and publishes only the public key.
Connections are encrypted, and only keys from this job are accepted. External clients have another key and
other key pairs, which give access to fewer operations (see endpoints.py).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import resource
import secrets
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import final

import zmq
from zmq.utils import z85

from dglx_dist.comm.wire import read_event

_DOMAIN = b"dglx"
_NONCE_BYTES = 16
_STOP, _EVENTS = "inproc://zap-stop", "inproc://zap-events"
_WATCH_INTERVAL_MS = 1000
_FEW_SHARE = 0.25
"""Share of free file descriptors below which a rank logs an error."""

log = logging.getLogger(__name__)


def derive_key(secret: bytes, *purpose: object) -> bytes:
    """Return the ASCII key for one ``purpose`` (JSON values). The key reveals nothing about ``secret``."""
    return hmac.digest(secret, json.dumps(purpose).encode(), "sha256").hex().encode()


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials that one rank presents and accepts."""

    secret: bytes = field(repr=False)
    """ASCII key for the connections, equal at both ends."""
    public_key: bytes | None = None
    """The rank's public Curve key as Z85. None means that connections are plain."""
    secret_key: bytes | None = field(default=None, repr=False)
    accepted_keys: frozenset[bytes] = frozenset()
    """All ranks' public keys."""

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` reject connections without the right credentials. It must not be bound yet."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        if self.secret_key is None:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)

    def present(self, socket: zmq.Socket[bytes], server: int, server_key: bytes | None) -> None:
        """Make ``socket`` present these credentials to rank ``server`` once. It must not be connected yet."""
        if self.secret_key is None or self.public_key is None or server_key is None:
            nonce = secrets.token_hex(_NONCE_BYTES).encode()
            socket.setsockopt(zmq.PLAIN_USERNAME, nonce)
            socket.setsockopt(zmq.PLAIN_PASSWORD, self.proof("calls", server, nonce))
            return
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)

    def proof(self, role: str, server: int, nonce: bytes) -> bytes:
        """Return the proof that this rank knows the key, for ``nonce``. ``role`` is "calls" or "serves"."""
        return derive_key(self.secret, role, server, nonce.hex())


@final
class ZapAuthenticator:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27) for all sockets in ``context``.

    A context may have one authenticator. It monitors the connections to the ``guarded`` socket, which must
    not be bound yet. Its thread also keeps ``watch``.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: int,
        credentials: Credentials,
        guarded: zmq.Socket[bytes],
        watch: DescriptorWatch,
    ) -> None:
        self._rank = rank
        self._credentials = credentials
        self._watch = watch
        self._used_nonces: set[bytes] = set()
        """Nonces from accepted connections. They are not accepted again."""

        self._requests = context.socket(zmq.REP)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind("inproc://zeromq.zap.01")
        watched = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._events = guarded.get_monitor_socket(watched, _EVENTS)

        self._stop = context.socket(zmq.PAIR)
        self._stop.bind(_STOP)
        self._stopper = context.socket(zmq.PAIR)
        self._stopper.connect(_STOP)

        # Open connections by file descriptor.
        self._names: dict[int, str] = {}
        self._accepted: set[int] = set()

        self._thread = threading.Thread(target=self._serve, name="dglx-zap", daemon=True)
        self._thread.start()

    def confirm(self, handle: int) -> None:
        """Note that a message arrived on the connection with file descriptor ``handle``. Thread-safe."""
        self._accepted.add(handle)

    def close(self) -> None:
        """Close the authenticator. The guarded socket must be closed already."""
        self._stopper.send(b"")
        self._thread.join()
        self._stopper.close(0)

    def _serve(self) -> None:
        """Answer requests and note connections on the authenticator's thread until it is closed."""
        sources = (self._requests, self._events, self._stop)
        poller = zmq.Poller()
        for source in sources:
            poller.register(source, zmq.POLLIN)

        ready: dict[object, int] = {}
        while self._stop not in ready:
            ready = dict(poller.poll(_WATCH_INTERVAL_MS))
            self._watch.look()
            if self._requests in ready:
                self._answer()
            if self._events in ready:
                self._note_event()

        for source in sources:
            source.close(0)

    def _answer(self) -> None:
        """Answer a request in ZeroMQ's authentication protocol (ZAP, RFC 27)."""
        frames = self._requests.recv_multipart()
        if len(frames) < 6:
            self._requests.send_multipart([b"1.0", b"", b"500", b"malformed", b"", b""])
            return

        version, request_id, _domain, address, _identity, mechanism, *proofs = frames
        if self._accepts(mechanism, proofs):
            self._requests.send_multipart([version, request_id, b"200", b"OK", b"rank", b""])
            return

        name = address.decode(errors="replace")
        log.warning("refused a connection from %s: it does not know this job's secret", name)
        self._requests.send_multipart([version, request_id, b"400", b"not of this job", b"", b""])

    def _accepts(self, mechanism: bytes, proofs: list[bytes]) -> bool:
        """Return whether a handshake proves that the peer belongs to this job. A nonce is accepted once."""
        credentials = self._credentials
        if credentials.secret_key is not None:
            is_curve = mechanism == b"CURVE" and len(proofs) == 1
            return is_curve and z85.encode(proofs[0]) in credentials.accepted_keys

        if mechanism != b"PLAIN" or len(proofs) != 2:
            return False

        nonce, proof = proofs
        expected = credentials.proof("calls", self._rank, nonce)

        if not hmac.compare_digest(proof, expected) or nonce in self._used_nonces:
            return False
        self._used_nonces.add(nonce)
        return True

    def _note_event(self) -> None:
        """Note a new or closed connection. Warn if it closed without a handshake."""
        event, handle = read_event(self._events)
        if event == zmq.EVENT_ACCEPTED:
            self._names[handle] = _find_peer_name(handle)
            return
        if event != zmq.EVENT_DISCONNECTED:
            return

        # A message proves the handshake, and every rank that connects sends a message.
        name = self._names.pop(handle, "")
        if handle in self._accepted:
            self._accepted.discard(handle)
        else:
            log.warning("refused a connection from %s: it does not speak this job's protocol", name)


def _find_peer_name(handle: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as peer_socket:
        # Names in other families are not pairs of a host and a port.
        if peer_socket.family in (socket.AF_INET, socket.AF_INET6):
            host, port, *_ = peer_socket.getpeername()
            return f"{host}:{port}"
    return "an unknown address"


@final
class DescriptorWatch:
    """Logs the cause before the process runs out of file descriptors.

    gloo keeps a descriptor for every connection to its ports, even if a stranger opened it and after it has
    ended. A process that cannot open another descriptor ends. The constructor raises the limit to the
    maximum.
    """

    def __init__(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self._look_at_s = 0.0
        self._is_few = False

    def look(self) -> None:
        """Log an error if few descriptors are left. Looks at most once a second and raises nothing."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _WATCH_INTERVAL_MS / 1000

        try:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            descriptors = os.listdir("/proc/self/fd")
        except OSError:
            return  # There is no /proc, or no free descriptor to read it.

        was_few = self._is_few
        self._is_few = limit - len(descriptors) < _FEW_SHARE * limit
        if self._is_few and not was_few:
            _log_use(descriptors, limit)


def _log_use(descriptors: list[str], limit: int) -> None:
    """Log how many descriptors are open, by the connection's owner."""
    owners = Counter(_describe_descriptor(int(descriptor)) for descriptor in descriptors)
    log.error(
        "%d of %d file descriptors are in use (%s), and this process ends when none is left. If they "
        "are sockets, something connects to this job's ports again and again. Close the ports to other "
        "machines, and raise the limit (ulimit -Hn).",
        len(descriptors),
        limit,
        ", ".join(f"{count} {owner}" for owner, count in owners.most_common(4)),
    )


def _describe_descriptor(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return f"sockets of {_find_peer_name(descriptor).rpartition(':')[0] or 'this machine'}"
    return "others"
