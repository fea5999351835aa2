"""The calling side of one-sided calls: one connection per thread and peer, so that any thread may call."""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import zmq

from dglx_dist.cluster.auth import Credentials
from dglx_dist.cluster.framing import Assembler, Message, frames_of, send_frames
from dglx_dist.cluster.monitor import read_event
from dglx_dist.cluster.serve import ServeConfig, tune
from dglx_dist.cluster.wire import Head, Kind, WireError
from dglx_dist.errors import PeerError, RemoteError
from dglx_dist.records import Array

log = logging.getLogger(__name__)

_POLL_MS = 100
_RETRIES_OF_A_DEAD_PEER = 3
_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """Where a rank serves."""

    rank: int
    host: str
    """Name of its machine, for messages."""
    endpoint: str
    public_key: bytes | None = None


@final
class Call:
    """One request on its way. Its reply must be taken on the thread that sent it."""

    def __init__(self, link: Link, request: int, op: str, name: str) -> None:
        self._link, self._request, self._op, self._name = link, request, op, name
        self._started = time.monotonic()

    def arrived(self) -> bool:
        """Whether the reply is there, or never will be; takes in what has come and does not wait.

        Raises:
            PeerError: this rank closed its session.
        """
        link = self._link
        while self._request not in link.replies and link.pump(0):
            pass
        return self._request in link.replies or bool(link.broken)

    def wait(self, timeout_s: float) -> list[Array]:
        """Wait for the reply.

        Raises:
            PeerError: the peer is dead, or silent for ``timeout_s`` since the call; the session was closed.
            RemoteError: the handler raised.
        """
        link = self._link
        while self._request not in link.replies:
            left_s = self._started + timeout_s - time.monotonic()
            if link.broken:
                raise PeerError(f"{link.name} {link.broken} while asked for {self._what()}{self._after()}")
            # Looked at even when the time is up: the reply may have come long before it is asked for.
            came = link.pump(min(_POLL_MS, max(int(left_s * 1000) + 1, 0)))
            if left_s <= 0 and not came:
                raise PeerError(
                    f"{link.name} did not answer {self._what()} within {timeout_s:g} s; it may hang or be "
                    "overloaded: look at its output, or raise timeout_s (DGLX_TIMEOUT)"
                )
        reply = link.replies.pop(self._request)
        if reply.head.kind is Kind.ERROR:
            raise RemoteError(f"{link.name} failed at {self._what()}: {reply.head.name}")
        return reply.arrays

    def __del__(self) -> None:
        # Nobody will ask any more, so the reply can be dropped when it comes.
        self._link.forget(self._request)

    def _what(self) -> str:
        return f"{self._op} {self._name!r}" if self._name else self._op

    def _after(self) -> str:
        return f" ({time.monotonic() - self._started:.1f} s after the call)"


@final
class Link:
    """The connection of one thread to one peer; only :meth:`close` and :meth:`forget` are for any thread."""

    def __init__(self, socket: zmq.Socket[bytes], peer: PeerAddress, closing: threading.Event) -> None:
        self.name = f"rank {peer.rank} on {peer.host}"
        self.broken = ""
        self._socket, self._closing = socket, closing
        # ZeroMQ's sockets bear one thread at a time: without it, closing would pull them from under a call.
        self._in_use = threading.Lock()
        # A name of its own: pyzmq's is the socket's file descriptor, which a new socket may have again before
        # the last monitor of that number is gone.
        self._monitor = socket.get_monitor_socket(_WATCHED, f"inproc://link-{uuid.uuid4().hex}")
        socket.connect(peer.endpoint)
        self._receive_timeout_ms = -1
        self._assembler = Assembler()
        self._waiting: set[int] = set()
        self.replies: dict[int, Message] = {}
        self._next_request = 0
        self._retries = 0

    def send(self, op: str, name: str, arrays: Sequence[Array], chunk_bytes: int) -> Call:
        """Send a request and return at once."""
        self._next_request += 1
        call = Call(self, self._next_request, op, name)
        head = Head(Kind.REQUEST, self._next_request, op, name)
        messages = frames_of(head, arrays, chunk_bytes)
        self._waiting.add(self._next_request)
        try:
            with self._in_use:
                self._raise_if_closed()
                for frames in messages:
                    send_frames(self._socket, frames)
        except zmq.Again:
            # Without a limit on the queue this means that ZeroMQ gave up the connection.
            self._notice_all()
            raise PeerError(f"{self.name} {self.broken or 'cannot be reached'}; asked for {op}") from None
        return call

    def forget(self, request: int) -> None:
        """Drop the reply of ``request``, also if it is still to come; any thread."""
        self._waiting.discard(request)
        self.replies.pop(request, None)

    def pump(self, timeout_ms: int) -> bool:
        """Take in one message, waiting at most ``timeout_ms`` for it; return whether there was one.

        Raises:
            PeerError: this rank closed its session.
        """
        with self._in_use:
            self._raise_if_closed()
            if timeout_ms != self._receive_timeout_ms:
                self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
                self._receive_timeout_ms = timeout_ms
            try:
                self._receive()
            except zmq.Again:
                # Only now, after the replies that came before the connection ended.
                self._notice_all()
                return False
            return True

    def close(self) -> None:
        """Close the connection, once the thread that waits at it has noticed; the session is closing."""
        with self._in_use:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)

    def _raise_if_closed(self) -> None:
        if self._closing.is_set():
            raise PeerError("the session was closed on this rank while a call was under way")

    def _receive(self) -> None:
        try:
            message = self._assembler.read(self._socket)
        except WireError as error:
            log.warning("dropped a malformed reply of %s: %s", self.name, error)
            return
        if message is not None:
            request = message.head.request
            if request in self._waiting:
                self._waiting.discard(request)
                self.replies[request] = message

    def _notice_all(self) -> None:
        while not self.broken and self._monitor.poll(0):
            self._notice()

    def _notice(self) -> None:
        event = read_event(self._monitor).number
        if event == zmq.EVENT_CONNECTED:
            self._retries = 0
        elif event == zmq.EVENT_DISCONNECTED:
            self.broken = "closed its connection or died"
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._retries += 1
            if self._retries >= _RETRIES_OF_A_DEAD_PEER:
                self.broken = "does not accept connections (it is probably dead)"
        else:
            self.broken = "refused the connection (another job, or another secret)"


@final
class Client:
    """Opens links when they are first needed, one per thread and peer."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peers: Mapping[int, PeerAddress],
        credentials: Credentials,
        config: ServeConfig,
    ) -> None:
        self._context, self._peers = context, peers
        self._credentials, self._config = credentials, config
        self._closing = threading.Event()
        self._local = threading.local()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._links_lock = threading.Lock()

    def send(self, rank: int, op: str, name: str, arrays: Sequence[Array]) -> Call:
        """Send a request to ``rank`` and return at once; any thread."""
        return self._link(rank).send(op, name, arrays, self._config.chunk_bytes)

    def close(self) -> None:
        """Make waiting calls of all threads end with an error, and close their connections."""
        self._closing.set()
        with self._links_lock:
            for link in list(self._links):
                link.close()
            self._links.clear()

    def forget(self) -> None:
        """In a forked process: call nobody through connections that belong to the parent."""
        self._closing.set()

    def _link(self, rank: int) -> Link:
        self._raise_if_closed()
        try:
            links: dict[int, Link] = self._local.links
        except AttributeError:
            links = self._local.links = {}
        link = links.get(rank)
        if link is None or link.broken:
            with self._links_lock:
                self._raise_if_closed()
                links[rank] = link = self._open(self._peers[rank])
        return link

    def _open(self, peer: PeerAddress) -> Link:
        socket = self._context.socket(zmq.DEALER)
        tune(socket, self._config)
        self._credentials.present(socket, peer.public_key)
        socket.setsockopt(zmq.IPV6, int("[" in peer.endpoint))
        link = Link(socket, peer, self._closing)
        self._links.add(link)
        return link

    def _raise_if_closed(self) -> None:
        if self._closing.is_set():
            raise PeerError("the session is closed; start a new one with dglx_dist.init()")
