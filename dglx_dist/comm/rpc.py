"""Zero-copy RPC over ZeroMQ: any thread may call another rank, which answers on its own threads."""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import secrets
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import zmq

from dglx_dist.comm.auth import Credentials, DescriptorWatch, ZapAuthenticator, derive_key
from dglx_dist.comm.ledger import CONTROL, Ledger
from dglx_dist.comm.topology import format_endpoint
from dglx_dist.comm.wire import (
    FRAME_BYTES,
    Buffers,
    Head,
    Kind,
    WireError,
    decode,
    encode,
    payload_bytes,
    read_arrays,
    read_event,
    send_message,
    skip,
)
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.records import Array

Handler: TypeAlias = Callable[[str, Sequence[Array]], Sequence[Array]]
"""Function from (name, arrays) to arrays. Several threads may call it. The result is not copied."""

log = logging.getLogger(__name__)

_SLOW_OPERATION_S = 2e-3
"""Seconds beyond which an operation counts as slow. Slow operations, and operations without a measurement,
run on a worker thread. Other operations run on the serving thread, which saves two thread switches."""

_NUM_WORKERS = 2
"""Worker threads for slow handlers. With two, one slow handler does not block the next."""

_PROVE = "cluster.prove"
"""First call on a connection, with number 0. The server proves that it knows the key."""

_WAKE = b"wake"
_WAKE_ENDPOINT = "inproc://serve-wake"


@final
class Server:
    """Answers calls until it is closed. Its threads start in the constructor."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: int,
        address: str,
        credentials: Credentials,
        handlers: Mapping[str, Handler],
        watch: DescriptorWatch,
    ) -> None:
        self._rank = rank
        self._credentials = credentials
        self._handlers = handlers

        self._router = context.socket(zmq.ROUTER)
        credentials.guard(self._router)
        _configure(self._router)
        self._authenticator = ZapAuthenticator(context, rank, credentials, self._router, watch)
        self._router.setsockopt(zmq.IPV6, int(":" in address))
        self._router.bind(_WAKE_ENDPOINT)

        self._waker = context.socket(zmq.DEALER)
        self._waker.setsockopt(zmq.ROUTING_ID, _WAKE)
        self._waker.setsockopt(zmq.SNDTIMEO, 0)
        self._waker.connect(_WAKE_ENDPOINT)
        self._waker_lock = threading.Lock()

        # Bind to a random port at the address.
        host_endpoint = format_endpoint(address, 0).rsplit(":", 1)[0]
        port = self._router.bind_to_random_port(host_endpoint)
        self.endpoint = format_endpoint(address, port)
        self._replies: deque[tuple[bytes, Buffers]] = deque()
        """Replies from worker threads, which the serving thread sends."""
        self._close_event = threading.Event()
        self._op_seconds: dict[str, float] = {}
        """Seconds that each operation takes, which tells slow operations from fast ones."""
        self._slow_requests: queue.SimpleQueue[tuple[bytes, Head, list[Array]] | None]
        self._slow_requests = queue.SimpleQueue()

        # Threads from concurrent.futures would end before a script's exit handlers run. A session that such a
        # handler closes must still serve the other ranks.
        self._thread = threading.Thread(target=self._serve, name="dglx-serve", daemon=True)
        self._workers = []
        for index in range(_NUM_WORKERS):
            name = f"dglx-handler-{index}"
            worker = threading.Thread(target=self._run_slow_handlers, name=name, daemon=True)
            self._workers.append(worker)
        for thread in (self._thread, *self._workers):
            thread.start()

    def close(self) -> None:
        """Stop serving. Waits for running handlers and drops unsent replies."""
        if self._close_event.is_set():
            return

        self._close_event.set()
        self._wake_server()
        for _ in self._workers:
            self._slow_requests.put(None)
        for thread in (self._thread, *self._workers):
            thread.join()

        self._authenticator.close()
        self._waker.close(0)

    def _serve(self) -> None:
        """Receive requests, and send the worker threads' replies, until the server is closed."""
        # A blocking receive is the fastest way to wait. A message on `_waker` interrupts it.
        while not self._close_event.is_set():
            peer = self._router.recv()
            if peer != _WAKE:
                self._receive(peer)
                continue
            self._router.recv()
            while self._replies:
                self._send(*self._replies.popleft())

        self._router.disable_monitor()
        self._router.close(0)

    def _receive(self, peer: bytes) -> None:
        """Read one request. Answer it here if its operation is fast, or else hand it to a worker thread.

        Malformed messages are dropped with a warning, so that one peer cannot stop the server.
        """
        first_frame = self._router.recv(copy=False)
        # The message shows that the connection with this file descriptor passed the handshake.
        self._authenticator.confirm(int(first_frame.get(zmq.SRCFD)))

        try:
            head = decode(first_frame.bytes)
            if head.kind is not Kind.REQUEST:
                raise WireError(f"the message is of kind {head.kind.name}, which is not a request")
            if head.op == _PROVE:
                proof = self._credentials.proof("serves", self._rank, head.name.encode())
                self._send(peer, encode(Head(Kind.REPLY, head.request, name=proof.decode())))
                return
            if head.op not in self._handlers:
                # Arrays for unregistered operations are not read, which matters for external clients.
                error_text = f"LookupError: {_unknown_operation(head.op, self._handlers)}"
                self._send(peer, _encode_error(head, error_text))
                return
            arrays = read_arrays(self._router, head)
        except WireError as error:
            log.warning("dropped a malformed message: %s", error)
            return
        finally:
            skip(self._router)

        if self._op_seconds.get(head.op, _SLOW_OPERATION_S) < _SLOW_OPERATION_S:
            self._send(peer, self._answer(head, arrays))
        else:
            self._slow_requests.put((peer, head, arrays))

    def _run_slow_handlers(self) -> None:
        while (request := self._slow_requests.get()) is not None:
            if self._close_event.is_set():
                continue
            peer, head, arrays = request
            self._replies.append((peer, self._answer(head, arrays)))
            self._wake_server()

    def _answer(self, head: Head, arrays: Sequence[Array]) -> Buffers:
        """Call the handler, and return its encoded answer or error. Record how long the operation took."""
        start_s = time.perf_counter()
        try:
            answer = run_handler(self._handlers, head.op, head.name, arrays)
            buffers = encode(Head(Kind.REPLY, head.request), answer)
        except BaseException as error:  # noqa: BLE001 - reported to the caller, and this thread must continue
            buffers = _encode_error(head, f"{type(error).__name__}: {error}")

        # The estimate falls slowly, because one fast call does not mean that the next one is fast.
        elapsed_s = time.perf_counter() - start_s
        last_s = self._op_seconds.get(head.op, 0.0)
        self._op_seconds[head.op] = max(elapsed_s, 0.5 * last_s)
        return buffers

    def _send(self, peer: bytes, buffers: Buffers) -> None:
        # A peer that has left has no route, and ROUTER drops its messages.
        self._router.send(peer, zmq.SNDMORE)
        send_message(self._router, buffers)

    def _wake_server(self) -> None:
        # Again means that the serving thread has ended.
        with self._waker_lock, contextlib.suppress(zmq.Again):
            self._waker.send(b"")


def _encode_error(request: Head, text: str) -> Buffers:
    return encode(Head(Kind.ERROR, request.request, name=text[:1000]))


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    # The number of calls in flight limits the queues. A full queue would drop replies silently.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    # A connection counts as broken after this silence.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    # This also limits the memory that an unknown peer can use before the handshake ends. Curve adds a few
    # bytes to each frame.
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + 64)
    # Never reconnect, because another process may have got a dead rank's port.
    socket.setsockopt(zmq.RECONNECT_IVL, -1)


def run_handler(handlers: Mapping[str, Handler], op: str, name: str, arrays: Sequence[Array]) -> list[Array]:
    """Run the handler for ``op``. Raise LookupError if there is none."""
    handler = handlers.get(op)
    if handler is None:
        raise LookupError(_unknown_operation(op, handlers))
    return list(handler(name, arrays))


def _unknown_operation(op: str, handlers: Mapping[str, Handler]) -> str:
    return f"no operation {op!r} is registered here (there are: {', '.join(sorted(handlers))})"


_POLL_MS = 100
_WATCHED_OPERATIONS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """A rank's endpoint."""

    rank: int
    host: str
    """The machine's name, for messages."""
    endpoint: str
    public_key: bytes | None = None


def open_endpoints(
    gather: Callable[[str, object], list[Any]],
    hosts: Sequence[str],
    listen: Callable[[Credentials], str],
    *,
    secret: bytes,
    encrypted: bool,
    for_clients: bool = False,
) -> tuple[Credentials, dict[int, PeerAddress]]:
    """Exchange public keys, and listen with the credentials. Every rank must call this.

    Args:
        gather: Function from (what, JSON value) to every rank's value.
        hosts: (W,) machine by rank.
        listen: Function that serves with the given credentials and returns the endpoint.
        secret: Secret that all ranks know. It gives access unless ``encrypted``.
        encrypted: Whether connections are encrypted. Then each rank makes a key pair, which gives access.
        for_clients: Whether external clients connect instead of ranks. They get a key pair that differs from
            the endpoints' key pairs.

    Returns:
        Credentials that this rank, or its clients, present, and all ranks' addresses.
    """
    server_keys = zmq.curve_keypair() if encrypted else (None, None)
    client_keys = server_keys
    if encrypted and for_clients:
        client_keys = zmq.curve_keypair()

    # Tell all ranks the public keys.
    purpose = "clients" if for_clients else "ranks"
    own_keys = [key and key.decode() for key in (server_keys[0], client_keys[0])]
    public_keys = gather(f"keys of {purpose}", own_keys)
    job_key = derive_key(secret, purpose)
    accepted_keys = frozenset(client_key.encode() for _, client_key in public_keys if client_key)

    def make_credentials(keys: tuple[bytes | None, bytes | None]) -> Credentials:
        public_key, secret_key = keys
        return Credentials(
            secret=job_key, public_key=public_key, secret_key=secret_key, accepted_keys=accepted_keys
        )

    # Listen, and tell all ranks the endpoints.
    endpoint = listen(make_credentials(server_keys))
    endpoints = gather(f"endpoints of {purpose}", endpoint)
    addresses = {}
    for rank, host in enumerate(hosts):
        server_key, _ = public_keys[rank]
        addresses[rank] = PeerAddress(
            rank=rank, host=host, endpoint=str(endpoints[rank]), public_key=server_key and server_key.encode()
        )
    return make_credentials(client_keys), addresses


@final
class Pending:
    """A call in flight, or the ``answer`` if a rank called itself. One thread at a time may wait."""

    def __init__(self, link: Link | None, request: int, what: str, answer: list[Array] | None = None) -> None:
        self._link = link
        self._request = request
        self._what = what
        self._answer = answer
        self._start_s = time.monotonic()
        self.timeout_s = 0.0
        """Default time limit for :meth:`result`."""
        self.count: Callable[[int], None] | None = None
        """Function that is called with the answer's bytes when it has arrived."""

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._start_s

    def is_ready(self) -> bool:
        """Return whether :meth:`result` would return or raise without waiting."""
        link = self._link
        if self._answer is not None or link is None:
            return True
        while self._request not in link.replies and link.pump(0):
            pass
        return self._request in link.replies or bool(link.broken)

    def result(self, timeout_s: float | None = None) -> list[Array]:
        """Wait for the answer, at most ``timeout_s`` since the call. The default is the session's time limit.

        Raises:
            PeerError: If the rank is dead or silent. The message names it.
            RemoteError: If the rank's handler raised.
        """
        if self._answer is not None:
            return self._answer
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._answer = self._wait(limit_s)
        if self.count is not None:
            self.count(payload_bytes(self._answer))
        return self._answer

    def _wait(self, timeout_s: float) -> list[Array]:
        """Wait for the reply and return its arrays. Another thread may receive the reply for this one.

        ``timeout_s`` counts from the request's time. Raises PeerError if the peer is dead or silent, and
        RemoteError if the peer could not answer.
        """
        link = self._link
        assert link is not None
        while self._request not in link.replies:
            remaining_s = 0.0 if link.broken else timeout_s - self.age_s
            remaining_ms = max(int(remaining_s * 1000), 0)
            # One more message is received after the deadline, because the reply may already be here.
            has_message = link.pump(min(_POLL_MS, remaining_ms + 1))
            if has_message or self._request in link.replies:
                continue

            if link.broken:
                elapsed = f" ({self.age_s:.1f} s after the call)"
                raise PeerError(f"{link.name} {link.broken} during {self._what}{elapsed}")
            if remaining_s <= 0:
                raise PeerError(
                    f"{link.name} did not answer {self._what} within {round(timeout_s, 3):g} s. It may hang "
                    "or be overloaded. Look at its output, or raise timeout_s (DGLX_TIMEOUT)."
                )

        head, arrays = link.replies.pop(self._request)
        if head.kind is Kind.ERROR:
            raise RemoteError(f"{link.name} failed at {self._what}: {head.name}")
        return arrays

    def __del__(self) -> None:
        # Nobody can read the reply any more, so let the link drop the reply when it arrives.
        if self._link is not None:
            self._link.forget(self._request)


@final
class Link:
    """The connection over which one thread calls one peer. Any thread may wait for replies and close it."""

    def __init__(
        self, socket: zmq.Socket[bytes], peer: PeerAddress, credentials: Credentials, closing: threading.Event
    ) -> None:
        self.name = f"rank {peer.rank} on {peer.host}"
        self.broken = ""
        self._socket = socket
        self._closing = closing
        self._waiting: set[int] = set()
        """Request numbers that have no reply yet."""
        self.replies: dict[int, tuple[Head, list[Array]]] = {}
        self._next_request = 0
        self._receive_timeout_ms = -1
        # ZeroMQ's sockets are not thread-safe. Another thread must not close a socket during a call.
        self._in_use = threading.Lock()

        # Choose a unique name. pyzmq's default contains the file descriptor, which a new socket may get
        # before the old socket's monitor has ended.
        monitor_name = f"inproc://link-{uuid.uuid4().hex}"
        self._monitor = socket.get_monitor_socket(_WATCHED_OPERATIONS, monitor_name)
        socket.connect(peer.endpoint)

        nonce = secrets.token_hex(16)
        self._due_proof: bytes | None = credentials.proof("serves", peer.rank, nonce.encode())
        """Proof that the server still has to present, or None."""
        # Ignore Again, because the connection has ended then, and the first call reports that.
        with contextlib.suppress(zmq.Again):
            send_message(socket, encode(Head(Kind.REQUEST, 0, _PROVE, nonce)))

    def send(self, op: str, name: str, arrays: Sequence[Array]) -> Pending:
        """Send a request and return at once. The reply is read when someone waits on this link.

        Raises PeerError if the connection has ended.
        """
        self._next_request += 1
        request = self._next_request
        call = Pending(self, request, f"{op} {name!r}" if name else op)
        buffers = encode(Head(Kind.REQUEST, request, op, name), arrays)
        self._waiting.add(request)

        with self._in_use:
            self._raise_if_closed()
            try:
                send_message(self._socket, buffers)
            except zmq.Again:
                # The queue has no limit, so this means that ZeroMQ closed the connection.
                self._read_events()
                self.broken = self.broken or "cannot be reached"
                raise PeerError(f"{self.name} {self.broken}, so it cannot be asked for {op}") from None
        return call

    def forget(self, request: int) -> None:
        """Drop the reply to ``request``, even if it arrives later. Thread-safe."""
        self._waiting.discard(request)
        self.replies.pop(request, None)

    def pump(self, timeout_ms: int) -> bool:
        """Wait at most ``timeout_ms`` for a message and store it. Return whether a message arrived.

        With a time-out of 0, this returns False if another thread is receiving.
        """
        if not self._in_use.acquire(blocking=timeout_ms > 0):
            return False

        try:
            self._raise_if_closed()
            if timeout_ms != self._receive_timeout_ms:
                self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
                self._receive_timeout_ms = timeout_ms
            self._receive()
        except zmq.Again:
            # Read events after all replies, because replies may arrive before the connection ends.
            self._read_events()
            return False
        finally:
            self._in_use.release()
        return True

    def close(self) -> None:
        """Close the connection after the waiting thread has returned. The session is closing."""
        with self._in_use:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)

    def _raise_if_closed(self) -> None:
        if self._closing.is_set():
            raise PeerError("the session was closed on this rank during a call")

    def _receive(self) -> None:
        """Read one message. Keep it in :attr:`replies` if it answers a call that still waits.

        The first message must prove that the server knows the job's secret. Otherwise the link is broken.
        """
        first_frame = self._socket.recv()
        try:
            head = decode(first_frame)
            if self._due_proof is not None:
                if not hmac.compare_digest(head.name.encode(), self._due_proof):
                    self.broken = "does not know this job's secret"
                    return
                self._due_proof = None

            arrays = read_arrays(self._socket, head)
            if head.request in self._waiting:
                self._waiting.discard(head.request)
                self.replies[head.request] = head, arrays
        except WireError as error:
            log.warning("dropped a malformed reply of %s: %s", self.name, error)
        finally:
            skip(self._socket)

    def _read_events(self) -> None:
        while not self.broken and self._monitor.poll(0):
            event = read_event(self._monitor)[0]
            if event == zmq.EVENT_DISCONNECTED:
                self.broken = "closed its connection or died"
            elif event == zmq.EVENT_CLOSED:
                self.broken = "does not accept connections (it is probably dead)"
            else:
                self.broken = "refused the connection (another job, or another secret)"


@final
class Client:
    """Opens links at first use, one per thread and peer."""

    def __init__(
        self, context: zmq.Context[Any], peers: Mapping[int, PeerAddress], credentials: Credentials
    ) -> None:
        self._context = context
        self._peers = peers
        self._credentials = credentials
        self.closing = threading.Event()
        self._local = threading.local()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._links_lock = threading.Lock()

    def send(self, rank: int, op: str, name: str, arrays: Sequence[Array]) -> Pending:
        return self._link(rank).send(op, name, arrays)

    def close(self) -> None:
        """End all threads' waiting calls with an error, and close their connections."""
        self.closing.set()
        with self._links_lock:
            for link in list(self._links):
                link.close()
            self._links.clear()

    def _link(self, rank: int) -> Link:
        """Return this thread's link to ``rank``. Open it at first use and after it broke."""
        self._raise_if_closed()
        try:
            links: dict[int, Link] = self._local.links
        except AttributeError:
            links = self._local.links = {}

        link = links.get(rank)
        if link is None or link.broken:
            # Close waits for this lock, so it does not miss the new link.
            with self._links_lock:
                self._raise_if_closed()
                link = self._open_link(self._peers[rank])
                links[rank] = link
                self._links.add(link)
        return link

    def _open_link(self, peer: PeerAddress) -> Link:
        socket = self._context.socket(zmq.DEALER)
        _configure(socket)
        self._credentials.present(socket, peer.rank, peer.public_key)
        socket.setsockopt(zmq.IPV6, int("[" in peer.endpoint))
        return Link(socket, peer, self._credentials, self.closing)

    def _raise_if_closed(self) -> None:
        if self.closing.is_set():
            raise PeerError("the session is closed. Start a new one with dglx_dist.init().")


_PING = "cluster.ping"
_MAX_STATUS_BYTES = 400


@final
class Rpc:
    """Serves and makes one-sided calls. ``ledger`` counts their bytes. ``timeout_s`` limits each call."""

    def __init__(self, rank: int, ledger: Ledger, timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.ledger = ledger
        self.status = ""
        """Collective in which this rank waits. Other ranks ask for this text. Empty if it does not wait."""
        self._handlers: dict[str, Handler] = {_PING: self._on_ping}
        self._client_handlers: dict[str, Handler] = {}
        self._contexts: list[zmq.Context[zmq.Socket[bytes]]] = []
        """One context for each server, because all sockets in a context share one authenticator."""
        self._servers: list[Server] = []
        self._watch = DescriptorWatch()
        self._client: Client | None = None
        self.credentials: Credentials | None = None
        """Credentials that this rank presents and accepts. None before :meth:`listen`."""
        self.addresses: Mapping[int, PeerAddress] = {}
        """All ranks' addresses, including this one's. Empty in a session with one rank."""
        self.address = ""
        """Numeric address on which this rank listens. Empty before :meth:`listen`."""

    def listen(self, address: str, credentials: Credentials) -> str:
        """Start serving on ``address``. Return the endpoint to publish."""
        self.address = address
        self.credentials = credentials
        return self._serve(address, credentials, self._handlers)

    def connect(self, peers: Mapping[int, PeerAddress]) -> None:
        if self.credentials is None:
            raise ConfigError("call listen() before connect()")
        self.addresses = dict(peers)
        self._client = Client(self._contexts[0], peers, self.credentials)

    def listen_to_clients(self, address: str, credentials: Credentials) -> str:
        """Serve client operations at another port on ``address``. Return the endpoint."""
        return self._serve(address, credentials, self._client_handlers)

    def register(self, op: str, handler: Handler, *, for_clients: bool = False) -> None:
        """Answer calls to ``op`` with ``handler``, which any thread calls, several at a time.

        The returned arrays are sent without a copy and must not be changed afterwards. External clients may
        call the operation only if ``for_clients``. Raises ConfigError if ``op`` is already registered.
        """
        if op in self._handlers:
            raise ConfigError(f"the operation {op!r} is already registered. Choose another name.")
        self._handlers[op] = handler
        if for_clients:
            self._client_handlers[op] = handler

    def unregister(self, op: str) -> None:
        """Answer calls to ``op`` with an error. Unknown names are ignored."""
        self._handlers.pop(op, None)
        self._client_handlers.pop(op, None)

    def submit(
        self, rank: int, op: str, name: str, arrays: Sequence[Array], *, phase: str | None, layer: int = 0
    ) -> Pending:
        """Call ``rank`` and return at once. Thread-safe.

        ``arrays`` must not change until the result arrives. The ledger counts the bytes under ``phase``, or
        nothing if it is None. A call to this rank itself runs the handler at once, without a socket.

        Raises:
            PeerError: If there is no such rank, or the session is closed.
            RemoteError: If this rank called itself, and its handler raised.
        """
        if rank == self.rank:
            try:
                answer = run_handler(self._handlers, op, name, arrays)
            except Exception as error:
                text = f"rank {self.rank} failed at {op} {name!r}: {type(error).__name__}: {error}"
                raise RemoteError(text) from error
            return Pending(None, 0, op, answer)

        if self._client is None:
            raise PeerError(f"there is no rank {rank}: this session runs alone")
        call = self._client.send(rank, op, name, arrays)
        call.timeout_s = self.timeout_s
        if phase is not None:
            call.count = partial(self.ledger.add, phase, layer, rank, self.rank)
            self.ledger.add(phase, layer, self.rank, rank, payload_bytes(arrays))
        return call

    def call(
        self, rank: int, op: str, name: str, arrays: Sequence[Array], *, phase: str, layer: int = 0
    ) -> list[Array]:
        return self.submit(rank, op, name, arrays, phase=phase, layer=layer).result()

    def call_all(
        self, ranks: Iterable[int], op: str, name: str, arrays: Sequence[Array], *, phase: str
    ) -> None:
        """Call all ``ranks`` at once, and wait for their answers."""
        calls = [self.submit(rank, op, name, arrays, phase=phase) for rank in ranks]
        for call in calls:
            call.result()
            call.result()

    def ask(
        self,
        ranks: Iterable[int],
        op: str,
        name: str,
        arrays: Sequence[Array],
        timeout_s: float,
        *,
        phase: str | None,
    ) -> dict[int, list[Array]]:
        """Call all ``ranks`` at once. Return the answers by rank, without ranks that failed to answer.

        ``timeout_s`` counts from each call, so all calls together take no longer than one.
        """
        calls: dict[int, Pending] = {}
        answers: dict[int, list[Array]] = {}
        for rank in ranks:
            with contextlib.suppress(PeerError, RemoteError):
                calls[rank] = self.submit(rank, op, name, arrays, phase=phase)
        for rank, call in calls.items():
            with contextlib.suppress(PeerError, RemoteError):
                answers[rank] = call.result(timeout_s)
        return answers

    def find_silent(self, ranks: Sequence[int], timeout_s: float) -> list[int]:
        """Return the ``ranks`` that do not answer within ``timeout_s``. All ranks are called at once."""
        statuses = self.get_peer_status(ranks, timeout_s)
        return [rank for rank, status in statuses.items() if status is None]

    def get_peer_status(self, ranks: Sequence[int], timeout_s: float) -> dict[int, str | None]:
        """Return the collective that each rank waits in, "" for none, or None if the rank is silent."""
        statuses: dict[int, str | None] = dict.fromkeys(sorted(ranks))
        answers = self.ask(sorted(ranks), _PING, "", [], timeout_s, phase=CONTROL)
        for rank, (status,) in answers.items():
            statuses[rank] = status.tobytes().decode(errors="replace")
        return statuses

    def close(self) -> None:
        """Stop serving and calling. Does not wait for other ranks. May be called twice."""
        if self._client is not None:
            self._client.close()
        while self._servers:
            self._servers.pop().close()
        while self._contexts:
            with contextlib.suppress(zmq.ZMQError):
                self._contexts.pop().destroy(linger=0)

    def forget(self) -> None:
        """Refuse calls in a forked process, and leave sockets and threads to the parent."""
        if self._client is not None:
            self._client.closing.set()

    def _serve(self, address: str, credentials: Credentials, handlers: Mapping[str, Handler]) -> str:
        # Each server needs its own context. See `_contexts`.
        context = zmq.Context()
        self._contexts.append(context)
        server = Server(context, self.rank, address, credentials, handlers, self._watch)
        self._servers.append(server)
        return server.endpoint

    def _on_ping(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        status = self.status.encode()[:_MAX_STATUS_BYTES]
        return [np.frombuffer(status, dtype=np.uint8)]
