"""Authentication: keys derived from the job's secret, connections of one-sided calls.

Each use has a key of its own (:func:`derive_key`), so the secret itself is sent nowhere. Without Curve a
connection presents a nonce and its HMAC, which the server accepts once: who records a handshake cannot repeat
it. ZeroMQ carries both in its PLAIN mechanism, since it reads no message of a connection before that is
accepted. The server proves that it knows the key in its first answer, and until then no answer counts. This
does not protect against an attacker on the path. Curve does: each rank makes a key pair, only public keys
leave its process, connections are encrypted and only keys of this job are accepted. External clients have
another key and other key pairs, which give access to less (see endpoints.py).
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
_LOOK_EVERY_MS = 1000
_FEW = 0.25
"""Share of free file descriptors below which a rank warns."""

log = logging.getLogger(__name__)


def derive_key(secret: bytes, *purpose: object) -> bytes:
    """Return the key, ASCII, for one ``purpose`` (JSON values); it reveals nothing of ``secret``."""
    return hmac.digest(secret, json.dumps(purpose).encode(), "sha256").hex().encode()


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials that one rank presents and accepts."""

    secret: bytes = field(repr=False)
    """Key of the connections, equal at both ends, ASCII."""
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

    def present(self, socket: zmq.Socket[bytes], server: int, server_key: bytes | None) -> None:
        """Make ``socket``, not yet connected, present these credentials to rank ``server``, once."""
        if self.secret_key is None or self.public_key is None or server_key is None:
            nonce = secrets.token_hex(_NONCE_BYTES).encode()
            socket.setsockopt(zmq.PLAIN_USERNAME, nonce)
            socket.setsockopt(zmq.PLAIN_PASSWORD, self.proof("calls", server, nonce))
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)

    def proof(self, role: str, server: int, nonce: bytes) -> bytes:
        """Return what only who knows the key can answer to ``nonce``; ``role``: "calls" or "serves"."""
        return derive_key(self.secret, role, server, nonce.hex())


@final
class ZapAuthenticator:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27) for all sockets of ``context``.

    A context may have one. The ``guarded`` socket, whose connections are monitored, must not be bound yet.
    Its thread also keeps ``watch``.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: int,
        credentials: Credentials,
        guarded: zmq.Socket[bytes],
        watch: DescriptorWatch,
    ) -> None:
        self._rank, self._credentials, self._watch = rank, credentials, watch
        self._spent: set[bytes] = set()
        """Nonces of accepted connections."""
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
            ready = dict(poller.poll(_LOOK_EVERY_MS))
            self._watch.look()
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
        if self._accepts(mechanism, presented):
            self._requests.send_multipart([version, request, b"200", b"OK", b"rank", b""])
            return
        name = address.decode(errors="replace")
        log.warning("refused a connection from %s: it does not know this job's secret", name)
        self._requests.send_multipart([version, request, b"400", b"not of this job", b"", b""])

    def _accepts(self, mechanism: bytes, presented: list[bytes]) -> bool:
        mine = self._credentials
        if mine.secret_key is not None:
            is_curve = mechanism == b"CURVE" and len(presented) == 1
            return is_curve and z85.encode(presented[0]) in mine.accepted_keys
        if mechanism != b"PLAIN" or len(presented) != 2:
            return False
        nonce, proof = presented
        if not hmac.compare_digest(proof, mine.proof("calls", self._rank, nonce)) or nonce in self._spent:
            return False
        self._spent.add(nonce)
        return True

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
        if copy.family in (socket.AF_INET, socket.AF_INET6):  # others have names of other forms
            host, port, *_ = copy.getpeername()
            return f"{host}:{port}"
    return "an address that is gone"


@final
class DescriptorWatch:
    """Names the cause when the process runs out of file descriptors, before it does.

    gloo keeps the descriptor of every connection to its ports, also of strangers and after their end, and a
    process that cannot open another one ends. Construction raises the limit to what the system allows.
    """

    def __init__(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self._look_at_s, self._is_few = 0.0, False

    def look(self) -> None:
        """Log an error when few descriptors are left; looks at most once a second, and raises nothing."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_EVERY_MS / 1000
        try:
            limit, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.listdir("/proc/self/fd")
        except OSError:
            return  # there is no /proc, or no descriptor to read it with
        was_few, self._is_few = self._is_few, limit - len(used) < _FEW * limit
        if self._is_few and not was_few:
            kinds = Counter(_kind(int(one)) for one in used)
            log.error(
                "%d of %d file descriptors are in use (%s), and this process ends when none is left; if they "
                "are sockets, something connects to this job's ports again and again: close them to other "
                "machines, and raise the limit (ulimit -Hn)",
                len(used),
                limit,
                ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4)),
            )


def _kind(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return f"sockets of {_peer_name(descriptor).rpartition(':')[0] or 'this machine'}"
    return "others"
