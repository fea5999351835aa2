"""Who may connect: a secret per job, or one key pair per rank.

Plain (default): rank 0 draws a random secret, all ranks learn it through the rendezvous store, and every
connection must present it. It keeps out strangers who can reach the port; like the store itself, it does
not protect against somebody who can read the network. Curve: each rank makes a key pair, only the public
halves pass through the store, connections are encrypted and only keys of this job are accepted; a secret
half never leaves its process. Who is no rank has a secret, or pair, of its own, which opens less (see
visitors).
"""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

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


def open_door(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Bind the socket on which ZeroMQ asks whether a connection is welcome (ZAP, RFC 27)."""
    door = context.socket(zmq.REP)
    door.setsockopt(zmq.LINGER, 0)
    door.bind(_ZAP_ENDPOINT)
    return door


def answer_door(door: zmq.Socket[bytes], credentials: Credentials) -> None:
    """Answer one question of ZeroMQ; a refusal is logged with the address it came from."""
    frames = door.recv_multipart()
    if len(frames) < 6:
        door.send_multipart([b"1.0", b"", b"500", b"malformed", b"", b""])
        return
    version, request, _domain, address, _identity, mechanism, *shown = frames
    if credentials.accepts(mechanism, shown):
        door.send_multipart([version, request, b"200", b"OK", _USER, b""])
        return
    log.warning(
        "refused a connection from %s: it does not know this job's secret", address.decode(errors="replace")
    )
    door.send_multipart([version, request, b"400", b"not of this job", b"", b""])
