"""Halo exchange between ranks as an autograd operator with an exact adjoint (docs/strategies/full_graph.md).

Forward sends copies of own rows to peers and appends the rows that peers send. Backward is the transpose: it
sends the gradients of these copies to the ranks that hold the rows, which add them up.
"""

from __future__ import annotations

import copy
import math
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, cast, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.comm.collectives import gather_json, peers_named
from dglx_dist.comm.endpoints import Streams, open_streams
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.comm.trace import NETWORK
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.records import Array
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer


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


def bytes_of(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor without gradient as its bytes, writable; no copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a socket can access the memory of ``tensor``."""
    return tensor.device.type == "cpu"


Message = tuple[int, Tensor]
"""A rank, and the contiguous tensor that is sent to it or received from it."""


@final
class DeviceWire:
    """Point-to-point messages between the accelerators of ranks. Every rank must construct it."""

    def __init__(self, session: Session, device: torch.device) -> None:
        self._session, self._device = session, device
        self._in_use = threading.Lock()
        self._seconds = 0.0
        # All ranks must create the communicator together; later not all of them have messages.
        with peers_named(session, "opening of connections between accelerators"):
            dist.all_reduce(torch.zeros(1, device=device))

    def seconds(self, *, reset: bool = False) -> float:
        """Host seconds spent in exchanges; waiting of the accelerator is not included."""
        spent = self._seconds
        if reset:
            self._seconds = 0.0
        return spent

    def swap(self, outgoing: Sequence[Message], incoming: Sequence[Message], name: str) -> None:
        """Send all of ``outgoing`` and receive all of ``incoming``; the peers must call it in the same order.

        Later work on the device's current stream waits for it. Empty messages are skipped on both sides;
        sizes are not compared.

        Raises:
            PeerError: torch.distributed failed or timed out; the responsible rank is named.
        """
        started = time.perf_counter()
        with peers_named(self._session, name), self._session.timeline.span(name, NETWORK), self._in_use:
            ops = [dist.P2POp(dist.isend, _bytes(rows), rank) for rank, rows in outgoing if rows.numel()]
            ops += [dist.P2POp(dist.irecv, _bytes(rows), rank) for rank, rows in incoming if rows.numel()]
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        self._seconds += time.perf_counter() - started


def make_device_wire(session: Session) -> DeviceWire | None:
    """Return the wire between the ranks' accelerators; None without direct communication. Collective."""
    device = session.device
    # A single rank has no process group.
    on_nccl = device.type == "cuda" and dist.is_initialized() and "nccl" in dist.get_backend_config()
    uuid = str(torch.cuda.get_device_properties(device).uuid) if on_nccl else ""
    uuids = [str(one) for one in gather_json(uuid, session)]
    if "" in uuids or len(set(uuids)) < len(uuids):
        return None
    return DeviceWire(session, device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_MAGIC = b"halo"
_HEADER = struct.Struct("!4sQQ32s")
"""Magic, sequence number of the message to this peer, payload bytes, name."""
_MAX_NAME = 32
_RECEIVE_BYTES = 1 << 20
"""Limit of one read, so that no connection starves the others."""


@final
class Sender:
    """Remaining bytes of a message to one peer."""

    def __init__(self, header: bytes, pieces: Iterator[memoryview]) -> None:
        self._now, self._pieces = memoryview(header), pieces
        self._more = int(socket.MSG_MORE)

    def send(self, connection: socket.socket) -> bool:
        while True:
            while self._now:
                try:
                    sent = connection.send(self._now, self._more)
                except BlockingIOError:
                    return False
                self._now = self._now[sent:]
            # MSG_MORE holds the header back, so that it leaves in one packet with the first rows.
            self._more = 0
            following = next(self._pieces, None)
            if following is None:
                return True
            self._now = following


@final
@dataclass(kw_only=True)
class Incoming:
    """Receive buffer of the message from one peer."""

    rank: int
    buffer: memoryview
    """Writable, of the size of the message."""
    num_arrived: int = 0
    """Bytes received so far."""


@final
class Receiver:
    """Receives the message from one peer."""

    def __init__(self, expected: bytes, incoming: Incoming) -> None:
        self._expected, self._incoming = expected, incoming
        self._header = memoryview(bytearray(len(expected)))
        self._read = 0

    def receive(self, connection: socket.socket, rank: int) -> bool:
        left = _HEADER.size - self._read
        if left > 0:
            self._read += _receive_into(connection, self._header[self._read :])
            if self._read < _HEADER.size:
                return False
            _check_same(bytes(self._header), self._expected, rank)
            return False
        incoming = self._incoming
        at = incoming.num_arrived
        incoming.num_arrived += _receive_into(connection, incoming.buffer[at : at + _RECEIVE_BYTES])
        return incoming.num_arrived == len(incoming.buffer)


@dataclass(kw_only=True)
class PeerTransfer:
    """State of the connection to one peer during one exchange."""

    rank: int
    connection: socket.socket
    sender: Sender | None = None
    receiver: Receiver | None = None

    @property
    def events(self) -> int:
        write = selectors.EVENT_WRITE if self.sender is not None else 0
        return write | (selectors.EVENT_READ if self.receiver is not None else 0)

    def serve(self, events: int) -> None:
        if (
            events & selectors.EVENT_READ
            and self.receiver is not None
            and self.receiver.receive(self.connection, self.rank)
        ):
            self.receiver = None
        if events & selectors.EVENT_WRITE and self.sender is not None and self.sender.send(self.connection):
            self.sender = None


def _receive_into(connection: socket.socket, buffer: memoryview) -> int:
    try:
        received = connection.recv_into(buffer)
    except BlockingIOError:
        return 0
    if not received:
        raise ConnectionResetError("the peer closed it")
    return received


def message_header(number: int, num_bytes: int, name: str) -> bytes:
    """Return the header of message ``number`` to a peer; the name has at most 32 bytes."""
    encoded = name.encode()
    assert len(encoded) <= _MAX_NAME, name
    return _HEADER.pack(_MAGIC, number, num_bytes, encoded)


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


PIECE_BYTES = 256 * 1024
"""Rows are copied and added in pieces of this size while other pieces are in transit."""

_STEP_BYTES = 1 << 20
"""Local rows are copied in steps of this size."""


def gathered(h: Tensor, rows: Tensor, out: Tensor) -> Iterator[memoryview]:
    """Copy ``h[rows]`` into ``out`` and yield its bytes, piece by piece.

    Args:
        h: (n, ...), on any device.
        rows: (k,) int64 in [0, n), on the same device.
        out: (k, ...) contiguous host memory, of the dtype of ``h``.
    """
    if not is_on_host(h):
        out.copy_(h.index_select(0, rows))
        yield bytes_of(out)
        return
    for some, piece in zip(_pieces_like(rows, out), _pieces_like(out, out), strict=True):
        torch.index_select(h, 0, some, out=piece)
        yield bytes_of(piece)


def copied(source: Tensor, target: Tensor) -> Iterator[bool]:
    """Copy ``source`` to ``target``, both (n, ...), in steps; yields True after each."""
    step = max(len(source) * _STEP_BYTES // max(source.numel() * source.element_size(), 1), 1)
    for first in range(0, len(source), step):
        target[first : first + step].copy_(source[first : first + step])
        yield True


def added(
    total: Tensor, rows: Sequence[Tensor], parts: Sequence[Tensor], incoming: Sequence[Incoming]
) -> Iterator[bool]:
    """Add received rows in pieces; yields False while the next piece has not arrived.

    Pieces are added round-robin over the peers, independent of their arrival, so sums are bit-reproducible.

    Args:
        total: (n, ...), on any device.
        rows: By peer, (k,) distinct int64 in [0, n), on the same device.
        parts: By peer, (k, ...) in host memory.
        incoming: By peer, the progress of its part.
    """
    per_peer = [
        _add_from_peer(total, *pieces)
        for pieces in zip(rows, parts, incoming, strict=True)
        if pieces[0].numel()
    ]
    while per_peer:
        left = []
        for pieces in per_peer:
            ready = next(pieces, None)
            while ready is False:
                yield False
                ready = next(pieces, None)
            if ready:
                yield True
                left.append(pieces)
        per_peer = left


def _add_from_peer(total: Tensor, rows: Tensor, part: Tensor, incoming: Incoming) -> Iterator[bool]:
    needed = 0
    for some, piece in zip(_pieces_like(rows, part), _pieces_like(part, part), strict=True):
        needed += piece.numel() * piece.element_size()
        while incoming.num_arrived < needed:
            yield False
        total.index_add_(0, some, piece.to(total.device, total.dtype))
        yield True


def _pieces_like(ids: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Split the (k, ...) ``ids`` at the piece boundaries of the (k, ...) ``rows``."""
    row_bytes = rows.numel() * rows.element_size() // max(len(rows), 1)
    step = max(PIECE_BYTES // max(row_bytes, 1), 1)
    return (ids[first : first + step] for first in range(0, len(ids), step))


_WIRE: SessionField[Wire] = SessionField(lambda session: Wire(session))


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A message to one peer."""

    rank: int
    num_bytes: int
    pieces: Iterator[memoryview]
    """Consumed as the socket takes them; num_bytes in total."""


@final
class Wire:
    """The connections and buffers of a rank. One exchange at a time; construction is collective."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._streams: Streams = open_streams(session)
        self.devices = make_device_wire(session)
        """For tensors on accelerators; None: they are sent through host memory."""
        self.sent, self.received = ReusableBuffer(), ReusableBuffer()
        """Buffers of the current exchange."""
        self._in_use = threading.Lock()
        self._broken = ""
        self._sequence_to: dict[int, int] = {}
        self._sequence_from: dict[int, int] = {}
        self._seconds = 0.0

    def seconds(self, *, reset: bool = False) -> float:
        """Seconds spent in exchanges, including local copies and sums."""
        spent = self._seconds
        if reset:
            self._seconds = 0.0
        return spent + (0.0 if self.devices is None else self.devices.seconds(reset=reset))

    def swap(
        self,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        name: str,
        meanwhile: Iterable[bool] = (),
    ) -> None:
        """Send all of ``outgoing`` and receive all of ``incoming``; the peers must call it in the same order.

        Empty messages are skipped on both sides.

        Args:
            outgoing: At most one message per peer.
            incoming: At most one message per peer.
            name: Of the exchange, at most 32 characters; equal on both sides.
            meanwhile: Local work in small steps, done while bytes are in transit. Yields True if it can
                continue at once, False if it needs more of ``incoming``.

        Raises:
            PeerError: a peer is dead, silent for the time-out, or at another exchange; it is named.
            ConfigError: another thread runs an exchange.
        """
        if not self._in_use.acquire(blocking=False):
            raise ConfigError(
                f"two threads exchange halo rows at the same time ({name}), so the order can differ between "
                "ranks; run the layers of a model on one thread"
            )
        started = time.perf_counter()
        try:
            self._check_not_broken(name)
            self._broken = name
            with peers_named(self._session, name), self._session.timeline.span(name, NETWORK):
                self._run(self._transfers(outgoing, incoming, name), name, iter(meanwhile))
            self._broken = ""
        finally:
            self._seconds += time.perf_counter() - started
            self._in_use.release()

    def _check_not_broken(self, name: str) -> None:
        if self._broken:
            raise PeerError(
                f"{name} cannot be exchanged: an earlier exchange ({self._broken}) was aborted on this rank; "
                "end the session and restart from the last checkpoint"
            )

    def _transfers(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str
    ) -> list[PeerTransfer]:
        transfers: dict[int, PeerTransfer] = {}
        for message in outgoing:
            if message.num_bytes:
                header = message_header(_next(self._sequence_to, message.rank), message.num_bytes, name)
                self._transfer(transfers, message.rank).sender = Sender(header, message.pieces)
        for part in incoming:
            if len(part.buffer):
                header = message_header(_next(self._sequence_from, part.rank), len(part.buffer), name)
                self._transfer(transfers, part.rank).receiver = Receiver(header, part)
        return list(transfers.values())

    def _transfer(self, transfers: dict[int, PeerTransfer], rank: int) -> PeerTransfer:
        if rank not in transfers:
            transfers[rank] = PeerTransfer(rank=rank, connection=self._streams.to(rank))
        return transfers[rank]

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
                ready = selector.select(0 if busy else self._session.timeout_s) if waiting else []
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
            rank = transfer.rank
            # peers_named reports the rank that died or failed first.
            raise RuntimeError(
                f"the connection to rank {rank} on {self._session.hosts[rank]} broke: {error}"
            ) from error

    def _raise_no_progress(self, transfers: Sequence[PeerTransfer], name: str) -> None:
        hosts = self._session.hosts
        names = ", ".join(f"rank {transfer.rank} on {hosts[transfer.rank]}" for transfer in transfers)
        raise RuntimeError(
            f"exchange {name!r} made no progress for {self._session.timeout_s:g} s on rank "
            f"{self._session.topology.rank}, which waits for {names}; check their output, or raise timeout_s "
            "(DGLX_TIMEOUT)"
        )


def wire_of(session: Session) -> Wire:
    """Return the wire of this session; the first call constructs it and is collective.

    Raises:
        PeerError: a rank is dead or did not connect within the time-out; it is named.
    """
    return _WIRE.of(session)


def _next(numbers: dict[int, int], rank: int) -> int:
    numbers[rank] = numbers.get(rank, 0) + 1
    return numbers[rank]


FORWARD, BACKWARD = "halo", "halo_gradients"
"""Ledger phases of forward and backward."""

_SUMMED_WIDER = (torch.float16, torch.bfloat16)


@final
class HaloExchange:
    """Exchange of the halo rows of one layer. Ranks must exchange the same layers in the same order.

    The first one of a session opens connections, so every rank must construct one, even without peers.

    Args:
        session: The run.
        layer: The rows that are sent and received.
        number: The layer, l of 1..L, for the ledger and messages.

    Raises:
        PeerError: a rank is dead or did not connect within the time-out; it is named.
    """

    def __init__(self, session: Session, layer: HaloLayer, number: int) -> None:
        self._session, self._wire = session, wire_of(session)
        self.number = number
        self.own_rows, self.num_halo = layer.own_rows, len(layer.halo_nodes)
        _check_layer(layer, session.topology.rank)
        # Arrays of mapped plans are read-only, which torch does not support.
        rows = [torch.from_numpy(np.require(rows, np.int64, ("C", "W"))) for _, rows in layer.send]
        self._sent_rows = {torch.device("cpu"): rows}
        self._sent_to = [rank for rank, _ in layer.send]
        self._sent_at = _bounds([len(rows) for _, rows in layer.send])
        self._received_from = [rank for rank, _ in layer.receive]
        self._received_at = _bounds([count for _, count in layer.receive])

    def at(self, number: int) -> HaloExchange:
        """Return the exchange of layer ``number`` with equal structure; row lists are shared."""
        other = copy.copy(self)
        other.number = number
        return other

    @property
    def num_sources(self) -> int:
        return self.own_rows + self.num_halo

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Append the halo rows to this rank's own rows; the layer's peers must call it too.

        Backward adds the gradients of the peers in a fixed order, 16-bit ones in float32, so the bits do not
        depend on timing. Every peer must run backward. Twice differentiable.

        Args:
            h: (own_rows, ...), any dtype; the trailing shape is the same on all ranks. Tensors on
                accelerators are sent by NCCL if every rank has its own device, else through host memory.
            kept: (n_halo, ...) halo that an earlier call returned for the same ``h``. Forward then sends
                nothing; pass it on all ranks or on none.

        Returns:
            (own_rows + n_halo, ...); ``h`` itself if this rank has no peers at this layer.

        Raises:
            ConfigError: ``h`` or ``kept`` has another number of rows.
            PeerError: a peer is dead, silent, or at another exchange; it is named.
        """
        self._check_rows(h, self.own_rows, "the own rows")
        if kept is not None:
            self._check_rows(kept, self.num_halo, "the halo rows")
        if not self._sent_to and not self._received_from:
            return h
        return cast("Tensor", _Append.apply(self, h, kept))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def fetch(self, rows: Tensor, out: Tensor | None = None, *, phase: str) -> Tensor:
        """Return only the halo rows, without gradient; for rows that are fetched once and kept.

        Args:
            rows: (own_rows, ...), any dtype.
            out: (n_halo, ...) contiguous output, otherwise like ``rows``; None: a new tensor.
            phase: For the ledger, at most 18 characters.

        Returns:
            (n_halo, ...) on the device of ``rows``.

        Raises:
            ConfigError: ``rows`` has another number of rows.
            PeerError: a peer is dead, silent, or at another exchange; it is named.
        """
        self._check_rows(rows, self.own_rows, "the own rows")
        halo = rows.new_empty((self.num_halo, *rows.shape[1:])) if out is None else out
        self._receive(rows.detach(), halo, phase)
        return halo

    def append(self, h: Tensor, kept: Tensor | None) -> Tensor:
        """Run :meth:`exchange` without gradient, always into new memory."""
        sources = h.new_empty((self.num_sources, *h.shape[1:]))
        own, halo = sources[: self.own_rows], sources[self.own_rows :]
        if kept is None:
            self._receive(h, halo, FORWARD, own)
        else:
            own.copy_(h)
            halo.copy_(kept)
        return sources

    def return_gradients(self, gradient: Tensor) -> Tensor:
        """Run the adjoint of :meth:`append`, always into new memory.

        Args:
            gradient: (own_rows + n_halo, ...).

        Returns:
            (own_rows, ...): the own rows of ``gradient`` plus the gradients that the peers send for them.
        """
        gradient = gradient.detach()
        own, halo = gradient[: self.own_rows], gradient[self.own_rows :]
        wider = torch.float32 if gradient.dtype in _SUMMED_WIDER else gradient.dtype
        total = torch.empty(own.shape, dtype=wider, device=gradient.device)
        received_shape = (self._sent_at[-1], *gradient.shape[1:])
        outgoing_rows = self._by_sender(
            halo.contiguous() if self._is_direct(halo) else halo.cpu().contiguous()
        )
        self._count(BACKWARD, outgoing_rows)
        if self._is_direct(halo):
            parts = self._by_receiver(halo.new_empty(received_shape))
            self._swap_directly(outgoing_rows, parts, BACKWARD)
            total.copy_(own)
            for rows, (_, part) in zip(self._rows_on(total.device), parts, strict=True):
                total.index_add_(0, rows, part.to(wider))
            return total.to(gradient.dtype)
        parts = self._by_receiver(self._wire.received.take(received_shape, gradient.dtype))
        incoming = [Incoming(rank=rank, buffer=bytes_of(part)) for rank, part in parts]
        adding = added(total, self._rows_on(total.device), [part for _, part in parts], incoming)
        outgoing = [_outgoing(rank, part, iter([bytes_of(part)])) for rank, part in outgoing_rows]
        self._wire.swap(outgoing, incoming, self._name(BACKWARD), chain(copied(own, total), adding))
        return total.to(gradient.dtype)

    def _receive(self, h: Tensor, halo: Tensor, phase: str, own: Tensor | None = None) -> None:
        """Fill ``halo`` with the rows of peers and, at the same time, ``own`` with ``h``."""
        if self._is_direct(halo):
            rows_of = zip(self._sent_to, self._rows_on(h.device), strict=True)
            outgoing_rows = [(rank, h.index_select(0, rows)) for rank, rows in rows_of]
            self._count(phase, outgoing_rows)
            self._swap_directly(outgoing_rows, self._by_sender(halo), phase)
            if own is not None:
                own.copy_(h)
            return
        on_host = is_on_host(halo)
        host_halo = halo if on_host else self._wire.received.take(halo.shape, halo.dtype)
        incoming = [Incoming(rank=rank, buffer=bytes_of(part)) for rank, part in self._by_sender(host_halo)]
        outgoing_rows = self._by_receiver(self._wire.sent.take((self._sent_at[-1], *h.shape[1:]), h.dtype))
        self._count(phase, outgoing_rows)
        outgoing = [
            _outgoing(rank, part, gathered(h, rows, part))
            for (rank, part), rows in zip(outgoing_rows, self._rows_on(h.device), strict=True)
        ]
        self._wire.swap(outgoing, incoming, self._name(phase), () if own is None else copied(h, own))
        if not on_host:
            halo.copy_(host_halo)

    def _rows_on(self, device: torch.device) -> list[Tensor]:
        """Return the own rows sent to each peer; copied to a device once."""
        if device not in self._sent_rows:
            self._sent_rows[device] = [rows.to(device) for rows in self._sent_rows[torch.device("cpu")]]
        return self._sent_rows[device]

    def _is_direct(self, rows: Tensor) -> bool:
        return self._wire.devices is not None and not is_on_host(rows)

    def _swap_directly(
        self, outgoing_rows: Sequence[Message], incoming_rows: Sequence[Message], phase: str
    ) -> None:
        assert self._wire.devices is not None
        self._wire.devices.swap(outgoing_rows, incoming_rows, self._name(phase))

    def _by_sender(self, halo: Tensor) -> list[Message]:
        """Split the (n_halo, ...) rows by the rank that sends them in forward."""
        bounds = pairwise(self._received_at)
        return [(rank, halo[a:b]) for rank, (a, b) in zip(self._received_from, bounds, strict=True)]

    def _by_receiver(self, rows: Tensor) -> list[Message]:
        """Split the rows that are sent in forward by the receiving rank."""
        bounds = pairwise(self._sent_at)
        return [(rank, rows[a:b]) for rank, (a, b) in zip(self._sent_to, bounds, strict=True)]

    def _count(self, phase: str, outgoing_rows: Sequence[Message]) -> None:
        for rank, rows in outgoing_rows:
            num_bytes = rows.numel() * rows.element_size()
            self._session.ledger.add(phase, self.number, self._session.topology.rank, rank, num_bytes)

    def _name(self, phase: str) -> str:
        return f"{phase.replace('_', ' ')} of layer {self.number}"

    def _check_rows(self, given: Tensor, expected: int, what: str) -> None:
        if given.dim() == 0 or len(given) != expected:
            raise ConfigError(
                f"layer {self.number} exchanges a tensor of shape {tuple(given.shape)}, but this rank has "
                f"{expected} rows there; pass {what}, in the order of the block"
            )


@final
class _Append(torch.autograd.Function):
    """(own_rows, ...) -> (own_rows + n_halo, ...); the adjoint of :class:`_ReturnGradients`."""

    @staticmethod
    def forward(ctx: Any, halo: HaloExchange, h: Tensor, kept: Tensor | None) -> Tensor:
        ctx.halo = halo
        return halo.append(h.detach(), kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, _ReturnGradients.apply(ctx.halo, gradient), None  # type: ignore[no-untyped-call]  # torch leaves it bare


@final
class _ReturnGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halo: HaloExchange, gradient: Tensor) -> Tensor:
        ctx.halo = halo
        return halo.return_gradients(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, _Append.apply(ctx.halo, gradient, None)  # type: ignore[no-untyped-call]  # torch leaves it bare


def _outgoing(rank: int, rows: Tensor, pieces: Iterator[memoryview]) -> Outgoing:
    return Outgoing(rank=rank, num_bytes=rows.numel() * rows.element_size(), pieces=pieces)


def _bounds(counts: Sequence[int]) -> list[int]:
    """Return the first row of each peer, and the end of the last one."""
    return [0, *accumulate(counts)]


def _check_layer(layer: HaloLayer, rank: int) -> None:
    # Assertions, because plans are made by this package.
    senders, receivers = [peer for peer, _ in layer.receive], [peer for peer, _ in layer.send]
    for peers in (senders, receivers):
        assert rank not in peers, f"rank {rank} exchanges rows with itself"
        assert all(a < b for a, b in pairwise(peers)), f"peers {peers} are not in the order of their ranks"
    assert sum(count for _, count in layer.receive) == len(layer.halo_nodes)
    for peer, rows in layer.send:
        assert _are_distinct_rows(rows, layer.own_rows), f"rows to rank {peer} are not distinct own rows"


def _are_distinct_rows(rows: Array, count: int) -> bool:
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        return False
    seen = np.zeros(count, dtype=bool)
    seen[rows] = True
    return int(seen.sum()) == len(rows)
