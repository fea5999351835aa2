"""The serving side of one-sided calls: one thread that owns the socket, a few that run handlers."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, final

import zmq
from zmq.utils.monitor import recv_monitor_message

from dglx_dist.cluster.auth import Credentials, answer_door, open_door
from dglx_dist.cluster.framing import Assembler, Frames, Message, frames_of, send_frames
from dglx_dist.cluster.network import endpoint_of
from dglx_dist.cluster.wire import Head, Kind, WireError
from dglx_dist.records import Array

Handler: TypeAlias = Callable[[str, Sequence[Array]], Sequence[Array]]
"""(name, arrays) -> arrays, called from any thread, several at a time; the answer is sent without a copy."""

log = logging.getLogger(__name__)

_SLOW_S = 2e-3
"""An operation that took longer of late runs on a thread of the pool, any other on the serving thread,
which saves two thread switches; one never seen before counts as slow."""

_BURST = 64
"""Requests taken in a row before looking at anything else."""


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
        self._credentials, self._handlers, self._config = credentials, handlers, config
        self._door = open_door(context)
        self._router = context.socket(zmq.ROUTER)
        credentials.guard(self._router)
        tune(self._router, config)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._router.setsockopt(zmq.IPV6, int(":" in address))
        port = self._router.bind_to_random_port(endpoint_of(address, 0).rsplit(":", 1)[0])
        self.endpoint = endpoint_of(address, port)
        self._assemblers: dict[bytes, Assembler] = {}
        self._replies: deque[tuple[bytes, list[Frames]]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Event()
        self._strangers: dict[int, str] = {}
        self._seconds_of: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(config.num_workers, thread_name_prefix="dglx-handler")
        self._thread = threading.Thread(target=self._serve, name="dglx-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; running handlers are waited for, replies not yet sent are dropped."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._door, self._monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll())
            if self._door in ready:
                answer_door(self._door, self._credentials)
            if self._router in ready:
                self._receive_all()
            if self._monitor in ready:
                self._watch_door()
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            while self._replies:
                self._send(*self._replies.popleft())
        self._router.disable_monitor()
        for source in (self._monitor, self._router, self._door):
            source.close(0)

    def _receive_all(self) -> None:
        for _ in range(_BURST):
            self._receive()
            if not int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return

    def _receive(self) -> None:
        peer = self._router.recv()
        assembler = self._assemblers.get(peer) or self._welcome(peer)
        try:
            message = assembler.read(self._router)
        except WireError as error:
            log.warning("dropped a malformed message: %s", error)
            return
        if message is None:
            return
        if message.head.kind is not Kind.REQUEST:
            log.warning("dropped a message of kind %s, which is no request", message.head.kind.name)
            return
        if self._seconds_of.get(message.head.op, _SLOW_S) < _SLOW_S:
            self._send(peer, self._answer(message))
        else:
            self._pool.submit(self._answer_later, peer, message)

    def _answer_later(self, peer: bytes, message: Message) -> None:
        self._replies.append((peer, self._answer(message)))
        self._wake()

    def _answer(self, message: Message) -> list[Frames]:
        request, chunk = message.head.request, self._config.chunk_bytes
        started = time.perf_counter()
        try:
            answer = run_handler(self._handlers, message.head.op, message.head.name, message.arrays)
            frames = frames_of(Head(Kind.REPLY, request), answer, chunk)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is the caller's to know
            text = f"{type(error).__name__}: {error}"
            frames = frames_of(Head(Kind.ERROR, request, name=text[:1000]), [], chunk)
        took_s, before_s = time.perf_counter() - started, self._seconds_of.get(message.head.op, 0.0)
        self._seconds_of[message.head.op] = max(took_s, 0.9 * before_s)
        return frames

    def _send(self, peer: bytes, messages: list[Frames]) -> None:
        for frames in messages:
            # A peer that left has no route, and ROUTER drops what is for it.
            self._router.send(peer, zmq.SNDMORE)
            send_frames(self._router, frames)

    def _welcome(self, peer: bytes) -> Assembler:
        # Only who passed the handshake can get a message through.
        self._assemblers[peer] = assembler = Assembler(self._passed)
        return assembler

    def _passed(self, handle: int) -> None:
        self._strangers.pop(handle, None)

    def _watch_door(self) -> None:
        """Log connections that end before the handshake: something else than a rank was there."""
        event = recv_monitor_message(self._monitor)
        handle = int(event["value"])
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._strangers[handle] = _peer_name(handle)
        elif event["event"] == zmq.EVENT_DISCONNECTED and handle in self._strangers:
            address = self._strangers.pop(handle)
            log.warning("refused a connection from %s: it does not speak this job's protocol", address)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"\0")


def _peer_name(handle: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as copy:
        host, port, *_ = copy.getpeername()
        return f"{host}:{port}"
    return "an address that is gone"


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
        raise LookupError(
            f"no operation {op!r} is registered here (there are: {', '.join(sorted(handlers))})"
        )
    return list(handler(name, arrays))
