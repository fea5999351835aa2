"""The serving side of one-sided calls: one thread that owns the socket, a few that run handlers."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

import zmq

from dglx_dist.cluster.auth import Credentials
from dglx_dist.cluster.door import Door
from dglx_dist.cluster.framing import (
    COPY_BYTES,
    SMALL_BYTES,
    Assembler,
    Frames,
    Message,
    NotAdmittedError,
    frames_of,
    send_frames,
)
from dglx_dist.cluster.network import endpoint_of
from dglx_dist.cluster.wire import Head, Kind, WireError
from dglx_dist.records import Array

Handler: TypeAlias = Callable[[str, Sequence[Array]], Sequence[Array]]
"""(name, arrays) -> arrays, called from any thread, several at a time; the answer is sent without a copy."""

log = logging.getLogger(__name__)

_SLOW_S = 2e-3
"""An operation that took longer of late runs on a thread of the pool, any other on the serving thread,
which saves two thread switches; one never seen before counts as slow."""

_WAKE = b"wake"
_WAKE_ENDPOINT = "inproc://serve-wake"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How a rank serves."""

    num_workers: int = 2
    """Handlers that run at the same time, so that a slow one does not hold up the others."""
    chunk_bytes: int = 1 << 20
    """Arrays above this travel in pieces of this size, so that small replies pass between them."""
    heartbeat_s: float = 2.0
    """How often a connection is probed."""
    heartbeat_timeout_s: float = 10.0
    """After which silence a connection counts as broken."""


@final
class Server:
    """Answers calls until closed. Its threads start when it is made."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        credentials: Credentials,
        handlers: Mapping[str, Handler],
        config: ServeConfig,
    ) -> None:
        self._handlers, self._config = handlers, config
        self._router = context.socket(zmq.ROUTER)
        credentials.guard(self._router)
        tune(self._router, config)
        self._door = Door(context, credentials, self._router)
        self._router.setsockopt(zmq.IPV6, int(":" in address))
        self._router.bind(_WAKE_ENDPOINT)
        self._waker = context.socket(zmq.DEALER)
        self._waker.setsockopt(zmq.ROUTING_ID, _WAKE)
        self._waker.setsockopt(zmq.SNDTIMEO, 0)
        self._waker.connect(_WAKE_ENDPOINT)
        self._waker_lock = threading.Lock()
        port = self._router.bind_to_random_port(endpoint_of(address, 0).rsplit(":", 1)[0])
        self.endpoint = endpoint_of(address, port)
        self._assemblers: dict[bytes, Assembler] = {}
        self._peer_on: dict[int, bytes] = {}
        self._replies: deque[tuple[bytes, list[Frames]]] = deque()
        self._closing = threading.Event()
        self._seconds_of: dict[str, float] = {}
        self._slow: queue.SimpleQueue[tuple[bytes, Message] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="dglx-serve", daemon=True)
        # Not those of concurrent.futures: they end before a script's exit handlers run, and a session that
        # is closed by one still serves the other ranks.
        self._workers = [
            threading.Thread(target=self._work, name=f"dglx-handler-{number}", daemon=True)
            for number in range(config.num_workers)
        ]
        for thread in (self._thread, *self._workers):
            thread.start()

    def close(self) -> None:
        """Stop serving; running handlers are waited for, replies not yet sent are dropped."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        for _ in self._workers:
            self._slow.put(None)
        for thread in (self._thread, *self._workers):
            thread.join()
        self._door.close()
        self._waker.close(0)

    def _serve(self) -> None:
        # A plain receive is the quickest way to wait; a socket of our own wakes it for what is not a request.
        while not self._closing.is_set():
            peer = self._router.recv()
            if peer == _WAKE:
                self._router.recv()
                while self._replies:
                    self._send(*self._replies.popleft())
            else:
                self._receive(peer)
        self._router.disable_monitor()
        self._router.close(0)

    def _receive(self, peer: bytes) -> None:
        assembler = self._assemblers.get(peer)
        if assembler is None:
            self._assemblers[peer] = assembler = Assembler(partial(self._greet, peer), self._admits)
        try:
            message = assembler.read(self._router)
        except NotAdmittedError as error:
            self._refuse(peer, error.head)
            return
        except WireError as error:
            log.warning("dropped a malformed message: %s", error)
            return
        if message is None:
            return
        if self._seconds_of.get(message.head.op, _SLOW_S) < _SLOW_S:
            self._send(peer, self._answer(message))
        else:
            self._slow.put((peer, message))

    def _admits(self, head: Head) -> bool:
        return head.kind is Kind.REQUEST and head.op in self._handlers

    def _refuse(self, peer: bytes, head: Head) -> None:
        if head.kind is not Kind.REQUEST:
            log.warning("dropped a message of kind %s, which is no request", head.kind.name)
            return
        text = f"LookupError: {no_such_operation(head.op, self._handlers)}"
        self._send(
            peer, frames_of(Head(Kind.ERROR, head.request, name=text[:1000]), [], self._config.chunk_bytes)
        )

    def _greet(self, peer: bytes, handle: int) -> None:
        """Note that ``peer`` came, through the connection of file descriptor ``handle``."""
        self._door.passed(handle)
        # A descriptor comes again when its connection has ended: so what is kept of peers is bounded.
        gone = self._peer_on.get(handle)
        self._peer_on[handle] = peer
        if gone is not None and gone in self._assemblers and self._assemblers[gone].is_idle:
            del self._assemblers[gone]

    def _work(self) -> None:
        while (asked := self._slow.get()) is not None:
            if not self._closing.is_set():
                peer, message = asked
                self._replies.append((peer, self._answer(message)))
                self._wake()

    def _answer(self, message: Message) -> list[Frames]:
        request, chunk = message.head.request, self._config.chunk_bytes
        started = time.perf_counter()
        try:
            answer = run_handler(self._handlers, message.head.op, message.head.name, message.arrays)
            frames = frames_of(Head(Kind.REPLY, request), answer, chunk)
        except BaseException as error:  # noqa: BLE001 - the caller's to know, and this thread must go on
            text = f"{type(error).__name__}: {error}"
            frames = frames_of(Head(Kind.ERROR, request, name=text[:1000]), [], chunk)
        took_s, before_s = time.perf_counter() - started, self._seconds_of.get(message.head.op, 0.0)
        self._seconds_of[message.head.op] = max(took_s, 0.5 * before_s)
        return frames

    def _send(self, peer: bytes, messages: list[Frames]) -> None:
        copy_bytes = COPY_BYTES
        for frames in messages:
            # A peer that left has no route, and ROUTER drops what is for it.
            self._router.send(peer, zmq.SNDMORE)
            send_frames(self._router, frames, copy_bytes=copy_bytes)
            copy_bytes = SMALL_BYTES  # chunks follow

    def _wake(self) -> None:
        with self._waker_lock, contextlib.suppress(zmq.Again):  # Again: nobody serves any more
            self._waker.send(b"")


def tune(socket: zmq.Socket[bytes], config: ServeConfig) -> None:
    """Set what calling and serving sockets have in common."""
    socket.setsockopt(zmq.LINGER, 0)
    # Bounded by the calls in flight; a full queue would drop replies silently.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(config.heartbeat_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(config.heartbeat_timeout_s * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)


def run_handler(handlers: Mapping[str, Handler], op: str, name: str, arrays: Sequence[Array]) -> list[Array]:
    """Run the handler of ``op``.

    Raises:
        LookupError: nothing is registered as ``op``.
    """
    handler = handlers.get(op)
    if handler is None:
        raise LookupError(no_such_operation(op, handlers))
    return list(handler(name, arrays))


def no_such_operation(op: str, handlers: Mapping[str, Handler]) -> str:
    """Say that nothing is registered as ``op``, and what is."""
    return f"no operation {op!r} is registered here (there are: {', '.join(sorted(handlers))})"
