"""The halo exchange as one operator with an exact adjoint (algorithms 3.1, 3.2).

Forward, a rank sends copies of some of its rows and appends the rows that others send. Backward, the
gradients of those copies go back to the ranks that hold the rows, which add them up: the transpose.
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
from dglx_dist.comm.session import Session
from dglx_dist.comm.trace import NETWORK
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.records import Array
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer


@final
class KeptBuffer:
    """Room in the host's memory for one tensor at a time, of any shape and dtype; grows, never shrinks.

    Fresh pages cost more than copying into them. What :meth:`room` gave is void once it is asked again.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._bytes.numel()

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous CPU tensor in the kept memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._bytes.numel():
            # The old one goes first: both together would be the peak.
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(tuple(shape))


def bytes_of(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor without gradient as its bytes, writable; no copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def is_on_host(tensor: Tensor) -> bool:
    """Whether a socket can read and write the memory of ``tensor``."""
    return tensor.device.type == "cpu"


Message = tuple[int, Tensor]
"""A rank, and the contiguous tensor that goes to it or comes from it."""


@final
class DeviceWire:
    """Messages of one rank to and from its peers on their accelerators.

    Args:
        session: The run; every rank must make its one.
        device: Where this rank's tensors are.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        self._session, self._device = session, device
        self._in_use = threading.Lock()
        self._seconds = 0.0
        # A communicator is made by all ranks, and later not all have messages.
        with peers_named(session, "opening of connections between accelerators"):
            dist.all_reduce(torch.zeros(1, device=device))

    def seconds(self, *, reset: bool = False) -> float:
        """Seconds spent in exchanges on the host; what the accelerator waits for is not seen."""
        spent = self._seconds
        if reset:
            self._seconds = 0.0
        return spent

    def swap(self, outgoing: Sequence[Message], incoming: Sequence[Message], name: str) -> None:
        """Send all of ``outgoing`` and receive all of ``incoming``; the peers must call it in the same order.

        Later work on this device's current stream waits for it. What has no bytes is passed over, at both
        ends; sizes are not compared.

        Raises:
            PeerError: torch.distributed failed, or ran into the time-out; who is to blame is named.
        """
        started = time.perf_counter()
        with peers_named(self._session, name), self._session.timeline.span(name, NETWORK), self._in_use:
            ops = [dist.P2POp(dist.isend, _bytes(rows), rank) for rank, rows in outgoing if rows.numel()]
            ops += [dist.P2POp(dist.irecv, _bytes(room), rank) for rank, room in incoming if room.numel()]
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        self._seconds += time.perf_counter() - started


def make_device_wire(session: Session) -> DeviceWire | None:
    """Return the wire between the ranks' accelerators, None where they cannot talk to each other directly.

    Every rank must call it.

    Raises:
        PeerError: a rank is dead or did not come within the time-out; it is named.
    """
    device = session.device
    # One rank alone has no process group to ask.
    on_nccl = device.type == "cuda" and dist.is_initialized() and "nccl" in dist.get_backend_config()
    mine = str(torch.cuda.get_device_properties(device).uuid) if on_nccl else ""
    told = [str(one) for one in gather_json(mine, session)]
    if "" in told or len(set(told)) < len(told):
        return None
    return DeviceWire(session, device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_MAGIC = b"halo"
_HEAD = struct.Struct("!4sQQ32s")
"""Magic, number of the message to this peer, bytes that follow, and what they are."""
_MAX_NAME = 32
_RECEIVE_BYTES = 1 << 20
"""Read at a time, so that no connection keeps the others waiting."""


@final
class Sender:
    """What is still to be sent to one peer."""

    def __init__(self, head: bytes, pieces: Iterator[memoryview]) -> None:
        self._now, self._pieces = memoryview(head), pieces
        self._more = int(socket.MSG_MORE)

    def send(self, connection: socket.socket) -> bool:
        """Send as much as there is room for; return whether that was all."""
        while True:
            while self._now:
                try:
                    sent = connection.send(self._now, self._more)
                except BlockingIOError:
                    return False
                self._now = self._now[sent:]
            # The head waits for the first rows, to leave in one packet with them.
            self._more = 0
            following = next(self._pieces, None)
            if following is None:
                return True
            self._now = following


@final
@dataclass(kw_only=True)
class Incoming:
    """What comes from one peer."""

    rank: int
    room: memoryview
    """Writable; as many bytes as will come."""
    num_arrived: int = 0
    """Bytes at the beginning of ``room`` that are there; grows."""


@final
class Receiver:
    """Fills the room of what comes from one peer."""

    def __init__(self, expected: bytes, incoming: Incoming) -> None:
        self._expected, self._incoming = expected, incoming
        self._head = memoryview(bytearray(len(expected)))
        self._read = 0

    def receive(self, connection: socket.socket, rank: int) -> bool:
        """Take what is there; return whether that was all.

        Raises:
            PeerError: the peer sends something else.
            OSError: the connection broke.
        """
        left = _HEAD.size - self._read
        if left > 0:
            self._read += _receive_into(connection, self._head[self._read :])
            if self._read < _HEAD.size:
                return False
            _check_same(bytes(self._head), self._expected, rank)
            return False
        incoming = self._incoming
        at = incoming.num_arrived
        incoming.num_arrived += _receive_into(connection, incoming.room[at : at + _RECEIVE_BYTES])
        return incoming.num_arrived == len(incoming.room)


@dataclass(kw_only=True)
class End:
    """One connection during one exchange."""

    rank: int
    connection: socket.socket
    sender: Sender | None = None
    receiver: Receiver | None = None

    @property
    def events(self) -> int:
        """What to wait for."""
        write = selectors.EVENT_WRITE if self.sender is not None else 0
        return write | (selectors.EVENT_READ if self.receiver is not None else 0)

    def serve(self, events: int) -> None:
        """Send and receive what can be without waiting."""
        if (
            events & selectors.EVENT_READ
            and self.receiver is not None
            and self.receiver.receive(self.connection, self.rank)
        ):
            self.receiver = None
        if events & selectors.EVENT_WRITE and self.sender is not None and self.sender.send(self.connection):
            self.sender = None


def _receive_into(connection: socket.socket, room: memoryview) -> int:
    try:
        received = connection.recv_into(room)
    except BlockingIOError:
        return 0
    if not received:
        raise ConnectionResetError("it was closed at the other end")
    return received


def head_of(number: int, num_bytes: int, name: str) -> bytes:
    """Return what stands before a message.

    Args:
        number: Of the message to this peer.
        num_bytes: That follow.
        name: What it is, at most 32 bytes.
    """
    encoded = name.encode()
    assert len(encoded) <= _MAX_NAME, name
    return _HEAD.pack(_MAGIC, number, num_bytes, encoded)


def _check_same(head: bytes, expected: bytes, rank: int) -> None:
    if head == expected:
        return
    magic, number, num_bytes, name = _HEAD.unpack(head)
    _, own_number, own_bytes, own_name = _HEAD.unpack(expected)
    if magic != _MAGIC:
        raise PeerError(
            f"rank {rank} sent {magic!r} where a message begins; do all ranks run the same version?"
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
"""Rows are copied and added in pieces of this size, while others are on their way."""

_STEP_BYTES = 1 << 20
"""Rows that go nowhere are copied in steps of this size."""


def gathered(h: Tensor, rows: Tensor, room: Tensor) -> Iterator[memoryview]:
    """Copy ``h[rows]`` into ``room`` piece by piece.

    Args:
        h: (n, ...), of any device.
        rows: (k,) int64 in [0, n), on that device.
        room: (k, ...) contiguous in the host's memory, of the dtype of ``h``.
    """
    if not is_on_host(h):
        room.copy_(h.index_select(0, rows))
        yield bytes_of(room)
        return
    for some, piece in zip(_pieces_like(rows, room), _pieces(room), strict=True):
        torch.index_select(h, 0, some, out=piece)
        yield bytes_of(piece)


def copied(source: Tensor, target: Tensor) -> Iterator[bool]:
    """Copy ``source`` to ``target``, both (n, ...); there is always more to do."""
    step = max(len(source) * _STEP_BYTES // max(source.numel() * source.element_size(), 1), 1)
    for first in range(0, len(source), step):
        target[first : first + step].copy_(source[first : first + step])
        yield True


def added(
    total: Tensor, rows: Sequence[Tensor], parts: Sequence[Tensor], incoming: Sequence[Incoming]
) -> Iterator[bool]:
    """Add rows as they arrive; yields False where the next piece has not.

    The first piece of every peer comes first, then the second of every peer, and so on, whoever is
    ahead: sums have the same bits every time.

    Args:
        total: (n, ...), of any device.
        rows: By peer, (k,) distinct int64 in [0, n), on that device.
        parts: By peer, (k, ...) in the host's memory.
        incoming: By peer, how much of the part is there.
    """
    lanes = [
        _added_of_one(total, *lane) for lane in zip(rows, parts, incoming, strict=True) if lane[0].numel()
    ]
    while lanes:
        left = []
        for lane in lanes:
            ready = next(lane, None)
            while ready is False:
                yield False
                ready = next(lane, None)
            if ready:
                yield True
                left.append(lane)
        lanes = left


def _added_of_one(total: Tensor, rows: Tensor, part: Tensor, incoming: Incoming) -> Iterator[bool]:
    """Add what one peer sends, a piece for each True."""
    needed = 0
    for some, piece in zip(_pieces_like(rows, part), _pieces(part), strict=True):
        needed += piece.numel() * piece.element_size()
        while incoming.num_arrived < needed:
            yield False
        total.index_add_(0, some, piece.to(total.device, total.dtype))
        yield True


def _pieces(rows: Tensor) -> Iterator[Tensor]:
    return _pieces_like(rows, rows)


def _pieces_like(ids: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Split the (k, ...) ``ids`` as the (k, ...) ``rows`` are."""
    row_bytes = rows.numel() * rows.element_size() // max(len(rows), 1)
    step = max(PIECE_BYTES // max(row_bytes, 1), 1)
    return (ids[first : first + step] for first in range(0, len(ids), step))


_KEPT = "halo wire"


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """What goes to one peer."""

    rank: int
    num_bytes: int
    pieces: Iterator[memoryview]
    """Made when there is room to send them; together num_bytes."""


@final
class Wire:
    """The connections of a rank and what an exchange needs beside them. One exchange at a time.

    Args:
        session: The run; every rank must make its first one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._streams: Streams = open_streams(session)
        self.devices = make_device_wire(session)
        """For what lies on accelerators; None: that goes through the host too."""
        self.sent, self.received = KeptBuffer(), KeptBuffer()
        """For the exchange that runs."""
        self._in_use = threading.Lock()
        self._broken = ""
        self._sequence_to: dict[int, int] = {}
        self._sequence_from: dict[int, int] = {}
        self._seconds = 0.0

    def seconds(self, *, reset: bool = False) -> float:
        """Seconds spent in exchanges: what stood still for peers, and own work on what is sent."""
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
        """Send all of ``outgoing`` while all of ``incoming`` arrives.

        What has no bytes is passed over, at both ends. The peers must call it in the same order.

        Args:
            outgoing: At most one for each peer.
            incoming: At most one for each peer.
            name: What is exchanged, at most 32 characters; equal at both ends.
            meanwhile: Own work in small steps, done while bytes are on their way. Yields whether more can be
                done at once; False: not before more of ``incoming`` has arrived.

        Raises:
            PeerError: a peer is dead, silent for the time-out, or is at another exchange; it is named.
            ConfigError: another thread is in an exchange.
        """
        if not self._in_use.acquire(blocking=False):
            raise ConfigError(
                f"two threads exchange halo rows at the same time ({name}), in an order that the ranks "
                "cannot agree on; run the layers of a model on one thread"
            )
        started = time.perf_counter()
        try:
            self._check_whole(name)
            self._broken = name
            with peers_named(self._session, name), self._session.timeline.span(name, NETWORK):
                self._run(self._ends(outgoing, incoming, name), name, iter(meanwhile))
            self._broken = ""
        finally:
            self._seconds += time.perf_counter() - started
            self._in_use.release()

    def _check_whole(self, name: str) -> None:
        if self._broken:
            raise PeerError(
                f"{name} cannot be exchanged: an earlier exchange ({self._broken}) was broken off half-way "
                "on this rank; end the session and start again from the last checkpoint"
            )

    def _ends(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str) -> list[End]:
        """Number the messages and put those of one peer together."""
        ends: dict[int, End] = {}
        for one in outgoing:
            if one.num_bytes:
                head = head_of(_next(self._sequence_to, one.rank), one.num_bytes, name)
                self._end(ends, one.rank).sender = Sender(head, one.pieces)
        for other in incoming:
            if len(other.room):
                head = head_of(_next(self._sequence_from, other.rank), len(other.room), name)
                self._end(ends, other.rank).receiver = Receiver(head, other)
        return list(ends.values())

    def _end(self, ends: dict[int, End], rank: int) -> End:
        if rank not in ends:
            ends[rank] = End(rank=rank, connection=self._streams.to(rank))
        return ends[rank]

    def _run(self, ends: Sequence[End], name: str, work: Iterator[bool]) -> None:
        with selectors.DefaultSelector() as selector:
            waiting, working, idle = 0, True, False
            for end in ends:
                self._serve(end, selectors.EVENT_WRITE)
                if end.events:
                    selector.register(end.connection, end.events, end)
                    waiting += 1
            while waiting or working:
                busy = working and not idle
                ready = selector.select(0 if busy else self._session.timeout_s) if waiting else []
                if not ready and not busy:
                    # Work that still waits when all is there is a bug, and would not end.
                    assert waiting, f"work beside the {name} waits for more than comes"
                    self._name_missing([key.data for key in selector.get_map().values()], name)
                for key, events in ready:
                    waiting -= self._go_on(selector, key, events)
                more = next(work, None) if working else None
                working, idle = more is not None, more is False

    def _go_on(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int) -> bool:
        """Serve one connection; return whether it has nothing left to do."""
        end: End = key.data
        self._serve(end, events)
        if not end.events:
            selector.unregister(end.connection)
        elif end.events != key.events:
            selector.modify(end.connection, end.events, end)
        return not end.events

    def _serve(self, end: End, events: int) -> None:
        try:
            end.serve(events)
        except PeerError:
            raise
        except OSError as error:
            rank = end.rank
            # peers_named says who died or failed first.
            raise RuntimeError(
                f"the connection to rank {rank} on {self._session.hosts[rank]} broke: {error}"
            ) from error

    def _name_missing(self, ends: Sequence[End], name: str) -> None:
        hosts = self._session.hosts
        names = ", ".join(f"rank {end.rank} on {hosts[end.rank]}" for end in ends)
        raise RuntimeError(
            f"nothing moved for {self._session.timeout_s:g} s while rank {self._session.topology.rank} "
            f"waited for {names} in the {name}; look at their output, or raise timeout_s (DGLX_TIMEOUT)"
        )


def wire_of(session: Session) -> Wire:
    """Return the wire of this session; made the first time, when every rank must call it.

    Raises:
        PeerError: a rank is dead or did not connect within the time-out; it is named.
    """
    kept = session.attached.get(_KEPT)
    if isinstance(kept, Wire):
        return kept
    made = session.attached[_KEPT] = Wire(session)
    return made


def _next(numbers: dict[int, int], rank: int) -> int:
    numbers[rank] = numbers.get(rank, 0) + 1
    return numbers[rank]


FORWARD, BACKWARD = "halo", "halo_gradients"
"""The ledger's names of what is sent in forward and in backward."""

_SUMMED_WIDER = (torch.float16, torch.bfloat16)


@final
class HaloExchange:
    """Exchanges the rows of one layer's halo. Ranks must exchange the same layers in the same order.

    The first one of a session opens connections, so every rank must make one, also a rank without peers.

    Args:
        session: The run.
        layer: Who sends which rows to whom.
        number: The layer, l of 1..L, for the ledger and messages.

    Raises:
        PeerError: a rank is dead or did not connect within the time-out; it is named.
    """

    def __init__(self, session: Session, layer: HaloLayer, number: int) -> None:
        self._session, self._wire = session, wire_of(session)
        self.number = number
        self.own_rows, self.num_halo = layer.own_rows, len(layer.halo_nodes)
        _check(layer, session.topology.rank)
        # Plans that were kept on disk are read-only, which torch does not know.
        rows = [torch.from_numpy(np.require(rows, np.int64, ("C", "W"))) for _, rows in layer.send]
        self._sent_rows = {torch.device("cpu"): rows}
        self._sent_to = [rank for rank, _ in layer.send]
        self._sent_at = _bounds([len(rows) for _, rows in layer.send])
        self._received_from = [rank for rank, _ in layer.receive]
        self._received_at = _bounds([count for _, count in layer.receive])

    def at(self, number: int) -> HaloExchange:
        """Return the exchange of the layer ``number``, which is alike; the lists of rows are the same."""
        other = copy.copy(self)
        other.number = number
        return other

    @property
    def num_sources(self) -> int:
        """Own rows and halo together."""
        return self.own_rows + self.num_halo

    @property
    def has_peers(self) -> bool:
        """Whether this rank sends or receives anything."""
        return bool(self._sent_to or self._received_from)

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Append the rows of the halo to this rank's own; the layer's peers must call it too.

        The way back adds what the peers have for a row in an order that the layer and the width give, halves
        in float32, so the bits do not depend on who was first; every peer's backward must come by. May be
        differentiated twice.

        Args:
            h: (own_rows, ...), any dtype; what follows the rows is the same on all ranks. What lies on an
                accelerator goes by NCCL where every rank has one to itself, else through the host's memory.
            kept: (n_halo, ...): the halo as an earlier call returned it for the same ``h``. Forward then
                sends nothing; give it on all ranks or on none.

        Returns:
            (own_rows + n_halo, ...); ``h`` itself where this rank has no peers at this layer.

        Raises:
            ConfigError: ``h`` or ``kept`` has another number of rows.
            PeerError: a peer is dead, silent, or at another exchange; it is named.
        """
        self._check_rows(h, self.own_rows, "its own rows")
        if kept is not None:
            self._check_rows(kept, self.num_halo, "the rows of its halo")
        if not self.has_peers:
            return h
        return cast("Tensor", _Append.apply(self, h, kept))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def fetch(self, rows: Tensor, out: Tensor | None = None, *, phase: str) -> Tensor:
        """Return the halo's rows alone, without a gradient: for rows that are fetched once and kept.

        Args:
            rows: (own_rows, ...), any dtype.
            out: (n_halo, ...) contiguous, to fill, like ``rows`` in all else; None: a new one.
            phase: For the ledger, at most 18 characters.

        Returns:
            (n_halo, ...) on the device of ``rows``.

        Raises:
            ConfigError: there are not as many rows.
            PeerError: a peer is dead, silent, or at another exchange; it is named.
        """
        self._check_rows(rows, self.own_rows, "its own rows")
        halo = rows.new_empty((self.num_halo, *rows.shape[1:])) if out is None else out
        self._receive(rows.detach(), halo, phase)
        return halo

    def append(self, h: Tensor, kept: Tensor | None) -> Tensor:
        """Do :meth:`exchange` without a gradient, always into new memory."""
        sources = h.new_empty((self.num_sources, *h.shape[1:]))
        own, halo = sources[: self.own_rows], sources[self.own_rows :]
        if kept is None:
            self._receive(h, halo, FORWARD, own)
        else:
            own.copy_(h)
            halo.copy_(kept)
        return sources

    def give_back(self, gradient: Tensor) -> Tensor:
        """Do the adjoint of :meth:`append`, always into new memory.

        Args:
            gradient: (own_rows + n_halo, ...).

        Returns:
            (own_rows, ...): the own rows of ``gradient``, and what the peers have for them added.
        """
        gradient = gradient.detach()
        own, halo = gradient[: self.own_rows], gradient[self.own_rows :]
        wider = torch.float32 if gradient.dtype in _SUMMED_WIDER else gradient.dtype
        total = torch.empty(own.shape, dtype=wider, device=gradient.device)
        came_shape = (self._sent_at[-1], *gradient.shape[1:])
        going = self._by_sender(halo.contiguous() if self._is_direct(halo) else halo.cpu().contiguous())
        self._count(BACKWARD, going)
        if self._is_direct(halo):
            parts = self._by_receiver(halo.new_empty(came_shape))
            self._swap_directly(going, parts, BACKWARD)
            total.copy_(own)
            for rows, (_, part) in zip(self._rows_on(total.device), parts, strict=True):
                total.index_add_(0, rows, part.to(wider))
            return total.to(gradient.dtype)
        parts = self._by_receiver(self._wire.received.room(came_shape, gradient.dtype))
        incoming = [Incoming(rank=rank, room=bytes_of(part)) for rank, part in parts]
        adding = added(total, self._rows_on(total.device), [part for _, part in parts], incoming)
        outgoing = [_outgoing(rank, part, iter([bytes_of(part)])) for rank, part in going]
        self._wire.swap(outgoing, incoming, self._name(BACKWARD), chain(copied(own, total), adding))
        return total.to(gradient.dtype)

    def _receive(self, h: Tensor, halo: Tensor, phase: str, own: Tensor | None = None) -> None:
        """Fill ``halo`` with the peers' rows, and ``own`` with ``h`` meanwhile."""
        if self._is_direct(halo):
            rows_of = zip(self._sent_to, self._rows_on(h.device), strict=True)
            going = [(rank, h.index_select(0, rows)) for rank, rows in rows_of]
            self._count(phase, going)
            self._swap_directly(going, self._by_sender(halo), phase)
            if own is not None:
                own.copy_(h)
            return
        on_host = is_on_host(halo)
        landing = halo if on_host else self._wire.received.room(halo.shape, halo.dtype)
        incoming = [Incoming(rank=rank, room=bytes_of(part)) for rank, part in self._by_sender(landing)]
        going = self._by_receiver(self._wire.sent.room((self._sent_at[-1], *h.shape[1:]), h.dtype))
        self._count(phase, going)
        outgoing = [
            _outgoing(rank, part, gathered(h, rows, part))
            for (rank, part), rows in zip(going, self._rows_on(h.device), strict=True)
        ]
        self._wire.swap(outgoing, incoming, self._name(phase), () if own is None else copied(h, own))
        if not on_host:
            halo.copy_(landing)

    def _rows_on(self, device: torch.device) -> list[Tensor]:
        """Return the own rows that go to each peer; brought to a device once."""
        if device not in self._sent_rows:
            self._sent_rows[device] = [rows.to(device) for rows in self._sent_rows[torch.device("cpu")]]
        return self._sent_rows[device]

    def _is_direct(self, rows: Tensor) -> bool:
        """Whether ``rows`` travel from accelerator to accelerator."""
        return self._wire.devices is not None and not is_on_host(rows)

    def _swap_directly(self, going: Sequence[Message], coming: Sequence[Message], phase: str) -> None:
        assert self._wire.devices is not None
        self._wire.devices.swap(going, coming, self._name(phase))

    def _by_sender(self, halo: Tensor) -> list[Message]:
        """Cut the (n_halo, ...) rows at those of each rank that sends them forward."""
        bounds = pairwise(self._received_at)
        return [(rank, halo[a:b]) for rank, (a, b) in zip(self._received_from, bounds, strict=True)]

    def _by_receiver(self, rows: Tensor) -> list[Message]:
        """Cut the rows that go forward to others at those of each rank."""
        bounds = pairwise(self._sent_at)
        return [(rank, rows[a:b]) for rank, (a, b) in zip(self._sent_to, bounds, strict=True)]

    def _count(self, phase: str, going: Sequence[Message]) -> None:
        for rank, rows in going:
            num_bytes = rows.numel() * rows.element_size()
            self._session.ledger.add(phase, self.number, self._session.topology.rank, rank, num_bytes)

    def _name(self, phase: str) -> str:
        return f"{phase.replace('_', ' ')} of layer {self.number}"

    def _check_rows(self, given: Tensor, expected: int, what: str) -> None:
        if given.dim() == 0 or len(given) != expected:
            raise ConfigError(
                f"layer {self.number} exchanges a tensor of shape {tuple(given.shape)}, but this rank has "
                f"{expected} rows there; give {what}, in the order of the block's"
            )


@final
class _Append(torch.autograd.Function):
    """(own_rows, ...) -> (own_rows + n_halo, ...); the adjoint of :class:`_GiveBack`."""

    @staticmethod
    def forward(ctx: Any, halo: HaloExchange, h: Tensor, kept: Tensor | None) -> Tensor:
        ctx.halo = halo
        return halo.append(h.detach(), kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, _GiveBack.apply(ctx.halo, gradient), None  # type: ignore[no-untyped-call]  # torch leaves it bare


@final
class _GiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halo: HaloExchange, gradient: Tensor) -> Tensor:
        ctx.halo = halo
        return halo.give_back(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, _Append.apply(ctx.halo, gradient, None)  # type: ignore[no-untyped-call]  # torch leaves it bare


def _outgoing(rank: int, rows: Tensor, pieces: Iterator[memoryview]) -> Outgoing:
    return Outgoing(rank=rank, num_bytes=rows.numel() * rows.element_size(), pieces=pieces)


def _bounds(counts: Sequence[int]) -> list[int]:
    """Where the rows of each peer begin, and where the last ones end."""
    return [0, *accumulate(counts)]


def _check(layer: HaloLayer, rank: int) -> None:
    """Plans are made by this package: what is wrong here is its own bug."""
    senders, receivers = [peer for peer, _ in layer.receive], [peer for peer, _ in layer.send]
    for peers in (senders, receivers):
        assert rank not in peers, f"rank {rank} exchanges rows with itself"
        assert all(a < b for a, b in pairwise(peers)), f"peers {peers} are not in the order of their ranks"
    assert sum(count for _, count in layer.receive) == len(layer.halo_nodes)
    for peer, rows in layer.send:
        assert _are_distinct(rows, layer.own_rows), f"rows to rank {peer} are not distinct own rows"


def _are_distinct(rows: Array, count: int) -> bool:
    """Whether every row is in [0, count) and none is there twice."""
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        return False
    seen = np.zeros(count, dtype=bool)
    seen[rows] = True
    return int(seen.sum()) == len(rows)
