"""Exchange of rows between ranks that expect each other's: one interface over streams, gloo and NCCL.

Which one is used where, and the measurement behind it: docs/design/contracts.md, "Exchanges". What a rank
does not expect, or whose size it does not know, is sent by one-sided calls (rpc.py, mailbox.py).
"""

from __future__ import annotations

import math
import queue
import selectors
import socket
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.comm.collectives import gather_json, peers_named
from dglx_dist.comm.endpoints import open_streams
from dglx_dist.comm.session import Session, SessionField, if_alive
from dglx_dist.comm.trace import NETWORK
from dglx_dist.errors import ConfigError, PeerError


@final
class ReusableBuffer:
    """Host memory for one tensor at a time, of any shape and dtype; grows, never shrinks.

    Page faults of new memory cost more than copying into it. The next :meth:`take` invalidates the last
    tensor.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._bytes.numel():
            # Frees the old memory first, or both would add to the peak.
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(tuple(shape))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor without gradient as its bytes, writable; no copy."""
    return _flat(tensor).numpy().data


@dataclass(kw_only=True)
class Outgoing:
    """A message to ``rank``."""

    rank: int
    rows: Tensor
    """Contiguous."""
    pieces: Iterator[Tensor] | None = None
    """The parts of ``rows``, in order, each filled when it is reached; None: all are filled."""


@dataclass(kw_only=True)
class Incoming:
    """A message from ``rank``."""

    rank: int
    rows: Tensor
    """Contiguous; filled by the exchange."""
    num_arrived: int = 0
    """Bytes received so far."""


@final
class Handle:
    """A posted exchange."""

    def __init__(
        self,
        exchange: Exchange,
        name: str,
        incoming: Sequence[Incoming],
        finish: Callable[[Iterator[bool]], None],
    ) -> None:
        self._exchange, self._name, self._incoming, self._finish = exchange, name, incoming, finish

    def wait(self, meanwhile: Iterable[bool] = ()) -> list[Tensor]:
        """Wait once, on the thread that posted; return the rows of each incoming message.

        Args:
            meanwhile: Local work in small steps, done while bytes are in transit. Yields True if it can
                continue at once, False if it needs more of the incoming messages.

        Raises:
            PeerError: a peer is dead, silent for the time-out, or at another exchange; it is named.
            ConfigError: another thread runs an exchange on streams.
        """
        started = time.perf_counter()
        try:
            with peers_named(self._exchange.session, self._name):
                self._finish(iter(meanwhile))
        finally:
            self._exchange.waited_s += time.perf_counter() - started
        return [one.rows for one in self._incoming]


class Exchange(ABC):
    """Sends rows to ranks that expect them, and receives theirs.

    The peers post the same exchanges in the same order. Rows travel in their dtype; a narrower form would be
    encoded in ``pieces`` and decoded in ``meanwhile``, as halo rows are gathered and added there.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.waited_s = 0.0
        """Time spent in :meth:`Handle.wait`, with the local work there."""

    def post(
        self,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        name: str,
        *,
        phase: str | None,
        layer: int = 0,
        batch: int | None = None,
    ) -> Handle:
        """Begin to send all of ``outgoing`` and to receive all of ``incoming``.

        Messages without bytes are skipped on both sides. The rows must not change until the end of the wait.

        Args:
            outgoing, incoming: At most one message per peer.
            name: Of the exchange, for errors and traces, equal on both sides; at most 32 bytes on streams.
            phase, layer: For the ledger; phase None: not counted.
            batch: Number of the mini-batch, for traces.

        Raises:
            PeerError: torch.distributed failed.
        """
        sent = [one for one in outgoing if one.rows.numel()]
        for one in sent if phase is not None else ():
            num_bytes = one.rows.numel() * one.rows.element_size()
            self.session.ledger.add(phase or "", layer, self.session.topology.rank, one.rank, num_bytes)
        finish = self._post(sent, [one for one in incoming if one.rows.numel()], name, batch)
        return Handle(self, name, incoming, finish)

    @abstractmethod
    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        """Post messages with bytes; return what does the work and waits; it raises RuntimeError."""


@final
class DeviceExchange(Exchange):
    """By torch.distributed between the accelerators of ranks. Every rank must construct it.

    Later work on the device's current stream waits for the rows; the host does not. Sizes are not compared.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        super().__init__(session)
        self._in_use = threading.Lock()
        # All ranks must create the communicator together; later not all of them have messages.
        with peers_named(session, "opening of connections between accelerators"):
            dist.all_reduce(torch.zeros(1, device=device))

    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        def finish(work: Iterator[bool]) -> None:
            with self.session.timeline.span(name, NETWORK, batch), self._in_use:
                _fill(outgoing)
                ops = [dist.P2POp(dist.isend, _flat(one.rows), one.rank) for one in outgoing]
                ops += [dist.P2POp(dist.irecv, _flat(one.rows), one.rank) for one in incoming]
                for posted in dist.batch_isend_irecv(ops) if ops else ():
                    posted.wait()
            for one in incoming:
                one.num_arrived = one.rows.numel() * one.rows.element_size()
            for _ in work:
                pass

        return finish


def open_devices(session: Session) -> DeviceExchange | None:
    """Return the exchange between the ranks' accelerators; None if not each has its own. Collective."""
    device = session.device
    # A single rank has no process group.
    on_nccl = device.type == "cuda" and dist.is_initialized() and "nccl" in dist.get_backend_config()
    uuid = str(torch.cuda.get_device_properties(device).uuid) if on_nccl else ""
    uuids = [str(one) for one in gather_json(uuid, session)]
    if "" in uuids or len(set(uuids)) < len(uuids):
        return None
    return DeviceExchange(session, device)


@final
class GlooExchange(Exchange):
    """By torch.distributed in host memory; any number in flight, waited for by a thread, in their order.

    Exchanges of different tags may overtake each other. Tensors on a GPU go through host memory too: NCCL
    would order all messages on one stream.

    Args:
        tag: Of the messages.
        span: Name in traces.
    """

    def __init__(self, session: Session, *, tag: int, span: str) -> None:
        super().__init__(session)
        self._tag, self._span = tag, span
        self._posted: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        session.before_close.append(if_alive(self.close))

    def close(self) -> None:
        """End the thread once all posted exchanges have completed."""
        self._closed = True
        # Joined, as a thread inside torch must not outlive the process.
        self._posted.put(None)
        if self._thread is not None:
            self._thread.join()

    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        if self._closed:
            raise ConfigError(f"{name} cannot be exchanged: the session is closed; open another one")
        if self._thread is None:
            self._start()
        _fill(outgoing)
        begin, done = time.perf_counter(), Future[None]()
        with peers_named(self.session, name):
            works = [dist.irecv(one.rows, one.rank, tag=self._tag) for one in incoming]
            works += [dist.isend(one.rows, one.rank, tag=self._tag) for one in outgoing]
        timeline, span = self.session.timeline, self._span
        # Each wait behind it ends by the session's time-out, one after the other; this is a last resort.
        limit_s = 4 * self.session.timeout_s

        def end(error: RuntimeError | None) -> None:
            if error is not None:
                done.set_exception(error)
                return
            timeline.add(span, NETWORK, begin, time.perf_counter(), batch)
            done.set_result(None)

        def finish(work: Iterator[bool]) -> None:
            for _ in work:
                pass
            try:
                done.result(limit_s)
            except TimeoutError:
                raise RuntimeError(f"exchange {name!r} made no progress for {limit_s:g} s") from None

        self._posted.put(_Posted(works=works, messages=[*outgoing, *incoming], end=end))
        return finish

    def _start(self) -> None:
        # A daemon: a rank that fails must not wait, at its end, for messages that never come.
        name = f"dglx-{self._span.split()[0]}"
        self._thread = threading.Thread(target=_wait_for, args=(self._posted,), name=name, daemon=True)
        self._thread.start()
        ended = weakref.finalize(self, self._posted.put, None)
        # A thread that is woken at exit would run while the interpreter shuts down.
        ended.atexit = False


@dataclass(frozen=True, kw_only=True)
class _Posted:
    works: list[Any]
    messages: Sequence[Outgoing | Incoming]
    """Kept alive until they are sent and received, even if nobody waits for them."""
    end: Callable[[RuntimeError | None], None]


def _wait_for(queued: queue.SimpleQueue[_Posted | None]) -> None:
    while (posted := queued.get()) is not None:
        problem: RuntimeError | None = None
        try:
            for work in posted.works:
                work.wait()
        except RuntimeError as error:
            problem = error
        posted.end(problem)
        # Or its tensors would live until the next one arrives.
        del posted, problem


def _fill(outgoing: Sequence[Outgoing]) -> None:
    for one in outgoing:
        for _ in one.pieces or ():
            pass


_MAGIC = b"halo"
_HEADER = struct.Struct("!4sQQ32s")
"""Magic, sequence number of the message to this peer, payload bytes, name."""
_MAX_NAME = 32
_RECEIVE_BYTES = 1 << 20
"""Limit of one read, so that no connection starves the others."""


@final
class PeerTransfer:
    """The messages to and from one peer in one exchange, over a non-blocking connection."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self._left: dict[int, Iterator[None]] = {}
        """By the event of the connection that it waits for."""

    def send(self, header: bytes, message: Outgoing) -> None:
        """Have :meth:`serve` send ``message``."""
        self._left[selectors.EVENT_WRITE] = self._send(header, message)

    def receive(self, header: bytes, message: Incoming) -> None:
        """Have :meth:`serve` receive ``message``, whose header must be ``header``."""
        self._left[selectors.EVENT_READ] = self._receive(header, message)

    @property
    def events(self) -> int:
        return sum(self._left)

    def serve(self, events: int) -> None:
        """Move what can be moved at once.

        Raises:
            PeerError: the peer is at another exchange.
            OSError: the connection broke.
        """
        for event in (selectors.EVENT_READ, selectors.EVENT_WRITE):
            if events & event and event in self._left and next(self._left[event], self) is self:
                del self._left[event]

    def _send(self, header: bytes, message: Outgoing) -> Iterator[None]:
        # MSG_MORE holds the header back, so that it leaves in one packet with the first rows.
        unsent, flags = memoryview(header), int(socket.MSG_MORE)
        pieces = iter([message.rows]) if message.pieces is None else message.pieces
        while True:
            while unsent:
                try:
                    unsent = unsent[self.connection.send(unsent, flags) :]
                except BlockingIOError:
                    yield
            following, flags = next(pieces, None), 0
            if following is None:
                return
            unsent = bytes_of(following)

    def _receive(self, expected: bytes, message: Incoming) -> Iterator[None]:
        header, read = memoryview(bytearray(_HEADER.size)), 0
        while read < _HEADER.size:
            read += self._receive_into(header[read:])
            if read == _HEADER.size:
                _check_same(bytes(header), expected, self.rank)
            yield
        rows = bytes_of(message.rows)
        while True:
            at = message.num_arrived
            message.num_arrived += self._receive_into(rows[at : at + _RECEIVE_BYTES])
            if message.num_arrived == len(rows):
                return
            yield

    def _receive_into(self, buffer: memoryview) -> int:
        try:
            received = self.connection.recv_into(buffer)
        except BlockingIOError:
            return 0
        if not received:
            raise ConnectionResetError("the peer closed it")
        return received


def message_header(number: int, rows: Tensor, name: str) -> bytes:
    """Return the header of message ``number`` to a peer."""
    encoded = name.encode()
    assert len(encoded) <= _MAX_NAME, name
    return _HEADER.pack(_MAGIC, number, rows.numel() * rows.element_size(), encoded)


def _check_same(header: bytes, expected: bytes, rank: int) -> None:
    if header == expected:
        return
    magic, number, num_bytes, name = _HEADER.unpack(header)
    _, own_number, own_bytes, own_name = _HEADER.unpack(expected)
    if magic != _MAGIC:
        raise PeerError(
            f"rank {rank} sent {magic!r} instead of a message header; run the same version on all ranks"
        )
    raise PeerError(
        f"rank {rank} sends {num_bytes} bytes of {_text(name)!r} (its message {number} to this rank) where "
        f"this rank expects {own_bytes} bytes of {_text(own_name)!r} (message {own_number}): the ranks did "
        "not run the same layers in the same order, on rows of the same width and dtype; let no branch of "
        "the model depend on the rank's data"
    )


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


@final
class StreamExchange(Exchange):
    """Over a connection per pair of ranks, in host memory. Construction is collective.

    Moves nothing before the wait, on whose thread it runs, and one exchange at a time.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._connections = open_streams(session)
        self._numbers_to, self._numbers_from = Counter[int](), Counter[int]()
        self._in_use = threading.Lock()
        self._broken = ""

    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        def finish(work: Iterator[bool]) -> None:
            if not self._in_use.acquire(blocking=False):
                raise ConfigError(
                    f"two threads exchange halo rows at the same time ({name}), so the order can differ "
                    "between ranks; run the layers of a model on one thread"
                )
            try:
                if self._broken:
                    raise PeerError(
                        f"{name} cannot be exchanged: an earlier exchange ({self._broken}) was aborted on "
                        "this rank; end the session and restart from the last checkpoint"
                    )
                self._broken = name
                with self.session.timeline.span(name, NETWORK, batch):
                    self._run(self._transfers(outgoing, incoming, name), name, work)
                self._broken = ""
            finally:
                self._in_use.release()

        return finish

    def _transfers(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str
    ) -> list[PeerTransfer]:
        messages: list[Outgoing | Incoming] = [*outgoing, *incoming]
        ranks = dict.fromkeys(one.rank for one in messages)
        transfers = {rank: PeerTransfer(rank, self._connections.to(rank)) for rank in ranks}
        for sent in outgoing:
            self._numbers_to[sent.rank] += 1
            transfers[sent.rank].send(message_header(self._numbers_to[sent.rank], sent.rows, name), sent)
        for due in incoming:
            self._numbers_from[due.rank] += 1
            transfers[due.rank].receive(message_header(self._numbers_from[due.rank], due.rows, name), due)
        return list(transfers.values())

    def _run(self, transfers: Sequence[PeerTransfer], name: str, work: Iterator[bool]) -> None:
        with selectors.DefaultSelector() as selector:
            waiting, working, idle = 0, True, False
            for transfer in transfers:
                self._serve(transfer, selectors.EVENT_WRITE)
                if transfer.events:
                    selector.register(transfer.connection, transfer.events, transfer)
                    waiting += 1
            while waiting or working:
                busy = working and not idle
                ready = selector.select(0 if busy else self.session.timeout_s) if waiting else []
                if not ready and not busy:
                    # Work that still waits after all messages arrived is a bug and would not end.
                    assert waiting, f"work beside the {name} waits for more bytes than expected"
                    self._raise_no_progress([key.data for key in selector.get_map().values()], name)
                for key, events in ready:
                    waiting -= self._progress_peer(selector, key, events)
                more = next(work, None) if working else None
                working, idle = more is not None, more is False

    def _progress_peer(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int
    ) -> bool:
        """Serve one connection; return whether it is done."""
        transfer: PeerTransfer = key.data
        self._serve(transfer, events)
        if not transfer.events:
            selector.unregister(transfer.connection)
        elif transfer.events != key.events:
            selector.modify(transfer.connection, transfer.events, transfer)
        return not transfer.events

    def _serve(self, transfer: PeerTransfer, events: int) -> None:
        try:
            transfer.serve(events)
        except PeerError:
            raise
        except OSError as error:
            # peers_named reports the rank that died or failed first.
            raise RuntimeError(f"the connection to {self._named(transfer)} broke: {error}") from error

    def _raise_no_progress(self, transfers: Sequence[PeerTransfer], name: str) -> None:
        raise RuntimeError(
            f"exchange {name!r} made no progress for {self.session.timeout_s:g} s on rank "
            f"{self.session.topology.rank}, which waits for {', '.join(map(self._named, transfers))}; check "
            "their output, or raise timeout_s (DGLX_TIMEOUT)"
        )

    def _named(self, transfer: PeerTransfer) -> str:
        return f"rank {transfer.rank} on {self.session.hosts[transfer.rank]}"


@final
class RowExchanges:
    """Exchanges of rows on the thread of the training loop, and their memory. Construction is collective."""

    def __init__(self, session: Session) -> None:
        self.streams = StreamExchange(session)
        self.devices = open_devices(session)
        """For tensors on accelerators; None: they are sent through host memory."""
        self.sent, self.received = ReusableBuffer(), ReusableBuffer()
        """Host memory of the current exchange."""

    def seconds(self, *, reset: bool = False) -> float:
        """Seconds spent in exchanges, including local copies and sums."""
        used = [one for one in (self.streams, self.devices) if one is not None]
        spent = sum(one.waited_s for one in used)
        for one in used if reset else ():
            one.waited_s = 0.0
        return spent


_EXCHANGES: SessionField[RowExchanges] = SessionField(RowExchanges)


def row_exchanges(session: Session) -> RowExchanges:
    """Return the exchanges of this session; the first call opens connections and is collective.

    Raises:
        PeerError: a rank is dead or did not connect within the time-out; it is named.
    """
    return _EXCHANGES.of(session)
