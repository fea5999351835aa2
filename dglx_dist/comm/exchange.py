"""Exchange of rows between ranks that expect each other's: one interface over streams, calls and NCCL.

Which one is used where, and the measurement behind it: docs/design/contracts.md, "Exchanges". What a rank
does not expect, or whose size it does not know, is sent by one-sided calls (rpc.py, mailbox.py).
"""

import math
import selectors
import socket
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.comm.codec import RowCodec
from dglx_dist.comm.collectives import barrier, gather_json, report_failed_peers
from dglx_dist.comm.endpoints import open_streams
from dglx_dist.comm.mailbox import Mailbox, OneSidedExchange
from dglx_dist.comm.session import CALL_ALIKE, Session, SessionField
from dglx_dist.comm.trace import NETWORK
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.records import Array


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


def view_bytes(tensor: Tensor) -> memoryview:
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


_ENCODED_ROWS = 1 << 12

Wait: TypeAlias = Callable[..., list[Tensor]]
"""(local work in small steps, done while bytes are in transit; default none) to each incoming message's rows.

Call it once, on the thread that posted. The work yields True if it can continue at once, False if it needs
more of the incoming messages.

PeerError: a peer is dead, silent for the time-out, or at another exchange; it is named. ConfigError: another
thread runs an exchange on streams.
"""


class Exchange(ABC):
    """Sends rows to ranks that expect them, and receives theirs.

    The peers post the same exchanges in the same order. Rows travel in their dtype, or as the codes of a
    :class:`RowCodec`, which are made and read piece by piece while others are in transit.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.waited_s = 0.0
        """Time spent in waiting, with the local work there."""

    def post(
        self,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        name: str,
        *,
        phase: str | None,
        layer: int = 0,
        batch: int | None = None,
        codec: RowCodec | None = None,
    ) -> Wait:
        """Begin to send all of ``outgoing`` and to receive all of ``incoming``.

        Messages without bytes are skipped on both sides. The rows must not change until the end of the wait.

        Args:
            outgoing, incoming: At most one message per peer.
            name: Of the exchange, for errors and traces, equal on both sides; at most 32 bytes, on streams.
            phase, layer: For the ledger; phase None: not counted.
            batch: Number of the mini-batch, for traces.
            codec: Narrower form of the rows, which are in host memory; None: they travel as they are.

        Raises:
            PeerError: a peer is dead, or the session is closed.
        """
        sent = [one for one in outgoing if one.rows.numel()]
        due = codes = [one for one in incoming if one.rows.numel()]
        if codec is not None:
            rank = self.session.topology.rank
            sent = [_encoded(codec, one, (rank << 12 | one.rank) << 36) for one in sent]
            codes = [replace(one, rows=codec.empty(one.rows)) for one in due]
            # Or ranks of other types might read codes as rows.
            name = f"{name}, {codec.bits} bits x {math.prod(codec.row_shape)}"
        for one in sent if phase is not None else ():
            self.session.ledger.add(phase or "", layer, self.session.topology.rank, one.rank, one.rows.nbytes)
        finish = self._post(sent, codes, name, batch)

        def wait(meanwhile: Iterable[bool] = ()) -> list[Tensor]:
            started = time.perf_counter()
            try:
                with report_failed_peers(self.session, name):
                    finish(iter(meanwhile) if codec is None else _decoded(codec, codes, due, iter(meanwhile)))
            finally:
                self.waited_s += time.perf_counter() - started
            return [one.rows for one in incoming]

        return wait

    @abstractmethod
    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        """Post messages with bytes; return what does the work and waits; it raises RuntimeError."""


def _encoded(codec: RowCodec, message: Outgoing, first: int) -> Outgoing:
    codes, starts = codec.empty(message.rows), range(0, len(message.rows), _ENCODED_ROWS)

    def pieces() -> Iterator[Tensor]:
        done = 0
        for rows in message.pieces or (message.rows[at : at + _ENCODED_ROWS] for at in starts):
            piece = codes[done : done + len(rows)]
            codec.encode(rows, piece, first + done)
            done += len(rows)
            yield piece

    return replace(message, rows=codes, pieces=pieces())


def _decoded(
    codec: RowCodec, codes: Sequence[Incoming], due: Sequence[Incoming], work: Iterator[bool]
) -> Iterator[bool]:
    """Fill ``due`` with what has arrived of its ``codes``, beside ``work``, which waits for ``due``."""
    while True:
        progress = False
        for one, part in zip(due, codes, strict=True):
            row_bytes = one.rows.nbytes // len(one.rows)
            done, ready = one.num_arrived // row_bytes, part.num_arrived // codec.row_bytes
            one.rows[done:ready] = codec.decode(part.rows[done:ready])
            one.num_arrived = ready * row_bytes
            progress |= ready > done
        more = next(work, None)
        if more is None and all(one.num_arrived == one.rows.nbytes for one in due):
            return
        yield progress or bool(more)


@final
class DeviceExchange(Exchange):
    """By torch.distributed between the accelerators of ranks. Every rank must construct it.

    Messages leave at once, in the order of the posts, which must be equal on all ranks. Later work on the
    device's current stream waits for the rows; the host does not. Sizes are not compared.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        super().__init__(session)
        self._in_use = threading.Lock()
        with report_failed_peers(session, "opening of connections between accelerators"):
            # Of its own: between the sums of gradients, a message has no place that is equal on all ranks.
            self._group = dist.new_group(timeout=timedelta(seconds=session.timeout_s))
            # All ranks must create the communicator together; later not all of them have messages.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        begin = time.perf_counter()
        with report_failed_peers(self.session, name), self._in_use:
            _fill(outgoing)
            ops = [dist.P2POp(dist.isend, _flat(one.rows), one.rank, self._group) for one in outgoing]
            ops += [dist.P2POp(dist.irecv, _flat(one.rows), one.rank, self._group) for one in incoming]
            posted = dist.batch_isend_irecv(ops) if ops else []

        def finish(work: Iterator[bool]) -> None:
            # What needs no message comes first, beside their transfer.
            while next(work, False):
                pass
            for one in posted:
                one.wait()
            for message in incoming:
                message.num_arrived = message.rows.nbytes
            for _ in work:
                pass
            if self.session.timeline.on:
                self.session.timeline.add(name, NETWORK, begin, time.perf_counter(), batch)

        return finish


def open_devices(session: Session) -> DeviceExchange | None:
    """Return the exchange between the ranks' accelerators; None if not each has its own. Collective."""
    device = session.device
    # A single rank has no process group.
    on_nccl = device.type == "cuda" and dist.is_initialized() and "nccl" in dist.get_backend_config()
    alone = gather_json(on_nccl and session.ranks_of_device == 1, session)
    return DeviceExchange(session, device) if all(alone) else None


DEVICES: SessionField[DeviceExchange | None] = SessionField(open_devices)
"""The exchange for tensors on accelerators, made collectively; None: they are sent through host memory."""


_ADVICE = f"run the same layers on all ranks; {CALL_ALIKE}"
_Arrived: TypeAlias = Mailbox[tuple[float, str, Array]]
"""Time of arrival, name and bytes of each message of one exchange."""


@final
class _Inbox:
    """What has arrived, by sender and number; dropped where nobody can wait for it any more.

    Counted per pair of ranks: no two ranks need to take part in the same exchanges with the others.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._lock = session, threading.Lock()
        self.expected = Counter[int]()
        """Messages that this rank has waited for, by sender."""
        self._sent = Counter[int]()
        self._posted: weakref.WeakValueDictionary[tuple[int, int], _Arrived] = weakref.WeakValueDictionary()
        self._early: dict[tuple[int, int], tuple[float, str, Array]] = {}
        """Of exchanges that this rank has not posted yet."""

    def post(self, receivers: Iterable[int], senders: Iterable[int]) -> tuple[dict[int, int], _Arrived]:
        """Return the number of a new exchange's message to each receiver, and its messages of ``senders``."""
        arrived: _Arrived = Mailbox(self._session, _ADVICE)
        with self._lock:
            for sender in senders:
                key = sender, self.expected[sender]
                self.expected[sender] += 1
                self._posted[key] = arrived
                if key in self._early:
                    arrived.put(0, "", sender, self._early.pop(key))
            numbers = {receiver: self._sent[receiver] for receiver in receivers}
            self._sent.update(numbers.keys())
        return numbers, arrived

    def put(self, number: int, name: str, sender: int, rows: list[Array]) -> None:
        message = time.perf_counter(), name, rows[0]
        with self._lock:
            arrived = self._posted.get((sender, number))
            if arrived is None and number >= self.expected[sender]:
                self._early[sender, number] = message
        if arrived is not None:
            arrived.put(0, "", sender, message)

    def __len__(self) -> int:
        return len(self._posted) + len(self._early)


def _check_bytes(arrays: Sequence[Array]) -> None:
    if len(arrays) != 1 or arrays[0].dtype != np.uint8 or arrays[0].ndim != 1:
        kinds = ", ".join(f"{array.dtype} of shape {array.shape}" for array in arrays)
        raise ValueError(f"a message must be one array of bytes, not {kinds or 'none'}")


@final
class CallExchange(Exchange):
    """By one-sided calls, in host memory; any number in flight, received on the threads that serve calls.

    Those of different objects may overtake each other. Construction is collective. ``span``: name in traces,
    that of each exchange if empty.
    """

    def __init__(self, session: Session, span: str = "") -> None:
        super().__init__(session)
        op, self._span = f"exchange-{session.next_number('exchange')}", span
        self._inbox = _Inbox(session)
        inbox = self._inbox
        self._calls = OneSidedExchange(
            session, op, _ADVICE, _check_bytes, inbox.put, inbox.expected.__getitem__
        )
        barrier(session, f"opening of {op}")

    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        _fill(outgoing)
        begin = time.perf_counter()
        rows_to = {one.rank: [_flat(one.rows).numpy()] for one in outgoing}
        numbers, mailbox = self._inbox.post(rows_to, [one.rank for one in incoming])
        sent = self._calls.submit(numbers, name, rows_to, phase=None)

        def finish(work: Iterator[bool]) -> None:
            # What needs no message comes first, beside their transfer.
            while next(work, False):
                pass
            arrived = mailbox.take(0, "", [one.rank for one in incoming], name)
            for one in incoming:
                _, sent_name, rows = arrived[one.rank]
                one.num_arrived = one.rows.nbytes
                if (len(rows), sent_name) != (one.num_arrived, name):
                    expected = f"{one.num_arrived} bytes of {name!r}"
                    raise _differs(one.rank, f"{len(rows)} bytes of {sent_name!r}", expected)
                _flat(one.rows).numpy()[:] = rows
            for _ in work:
                pass
            for call in sent:
                call.result(call.age_s + self.session.timeout_s)
            if self.session.timeline.on:
                # Rows of a rank that is ahead arrived before this one posted.
                end = max([begin, *(at for at, _, _ in arrived.values())])
                self.session.timeline.add(self._span or name, NETWORK, begin, end, batch)

        return finish


def _fill(outgoing: Sequence[Outgoing]) -> None:
    for one in outgoing:
        for _ in one.pieces or ():
            pass


_MAGIC = b"halo"
_HEADER = struct.Struct("!4sQQ64s")
"""Magic, sequence number of the message to this peer, payload bytes, name."""
_MAX_NAME = 64
_RECEIVE_BYTES = 1 << 20
"""Limit of one read, so that no connection starves the others."""


def send_message(connection: socket.socket, header: bytes, message: Outgoing) -> Iterator[None]:
    """Send ``message`` over a non-blocking connection; yields when that is full. OSError: it broke."""
    # MSG_MORE holds the header back, so that it leaves in one packet with the first rows.
    unsent, flags = memoryview(header), int(socket.MSG_MORE)
    pieces = iter([message.rows]) if message.pieces is None else message.pieces
    while True:
        while unsent:
            try:
                unsent = unsent[connection.send(unsent, flags) :]
            except BlockingIOError:
                yield
        following, flags = next(pieces, None), 0
        if following is None:
            return
        unsent = view_bytes(following)


def receive_message(connection: socket.socket, expected: bytes, message: Incoming) -> Iterator[None]:
    """Receive ``message`` over a non-blocking connection; yields after each read.

    Raises:
        PeerError: its header is not ``expected``: the peer is at another exchange.
        OSError: the connection broke.
    """
    header, read = memoryview(bytearray(_HEADER.size)), 0
    while read < _HEADER.size:
        read += _receive_into(connection, header[read:])
        if read == _HEADER.size:
            _check_same(bytes(header), expected, message.rank)
        yield
    rows = view_bytes(message.rows)
    while True:
        at = message.num_arrived
        message.num_arrived += _receive_into(connection, rows[at : at + _RECEIVE_BYTES])
        if message.num_arrived == len(rows):
            return
        yield


def _receive_into(connection: socket.socket, buffer: memoryview) -> int:
    try:
        received = connection.recv_into(buffer)
    except BlockingIOError:
        return 0
    if not received:
        raise ConnectionResetError("the peer closed it")
    return received


def message_header(number: int, rows: Tensor, name: str) -> bytes:
    """Return the header of message ``number`` to a peer."""
    encoded = name.encode()
    assert len(encoded) <= _MAX_NAME, name
    return _HEADER.pack(_MAGIC, number, rows.nbytes, encoded)


def _check_same(header: bytes, expected: bytes, rank: int) -> None:
    if header == expected:
        return
    magic, number, num_bytes, name = _HEADER.unpack(header)
    _, own_number, own_bytes, own_name = _HEADER.unpack(expected)
    if magic != _MAGIC:
        raise PeerError(
            f"rank {rank} sent {magic!r} instead of a message header; run the same version on all ranks"
        )
    raise _differs(
        rank,
        f"{num_bytes} bytes of {_text(name)!r} (its message {number} to this rank)",
        f"{own_bytes} bytes of {_text(own_name)!r} (message {own_number})",
    )


def _differs(rank: int, sent: str, expected: str) -> PeerError:
    return PeerError(
        f"rank {rank} sends {sent} where this rank expects {expected}: the ranks did not run the same layers "
        "in the same order, on rows of the same width and dtype; let no branch of the model depend on the "
        f"rank's data, and {CALL_ALIKE}"
    )


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


_Left: TypeAlias = dict[int, Iterator[None]]
"""Messages to and from one peer that are not done, by the event of the connection that they wait for."""


@final
class StreamExchange(Exchange):
    """Over a connection per pair of ranks, in host memory. Construction is collective.

    Moves nothing before the wait, on whose thread it runs, and one exchange at a time.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._connections = open_streams(session)
        # Also after a failure: the end of a connection stops peers that wait for this rank's rows.
        session.on_close.append(self._close)
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

    def _close(self) -> None:
        while self._connections:
            self._connections.popitem()[1].close()

    def _to(self, rank: int) -> socket.socket:
        if rank not in self._connections:
            raise PeerError(f"there is no connection to rank {rank}: it is this rank, or the session is over")
        return self._connections[rank]

    def _transfers(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str
    ) -> dict[int, _Left]:
        transfers: dict[int, _Left] = defaultdict(dict)
        for sent in outgoing:
            self._numbers_to[sent.rank] += 1
            header = message_header(self._numbers_to[sent.rank], sent.rows, name)
            transfers[sent.rank][selectors.EVENT_WRITE] = send_message(self._to(sent.rank), header, sent)
        for due in incoming:
            self._numbers_from[due.rank] += 1
            header = message_header(self._numbers_from[due.rank], due.rows, name)
            transfers[due.rank][selectors.EVENT_READ] = receive_message(self._to(due.rank), header, due)
        return transfers

    def _run(self, transfers: dict[int, _Left], name: str, work: Iterator[bool]) -> None:
        with selectors.DefaultSelector() as selector:
            waiting, working, idle = 0, True, False
            for rank, left in transfers.items():
                self._move(rank, left, selectors.EVENT_WRITE)
                if left:
                    selector.register(self._to(rank), sum(left), rank)
                    waiting += 1
            while waiting or working:
                busy = working and not idle
                ready = selector.select(0 if busy else self.session.timeout_s) if waiting else []
                if not ready and not busy:
                    # Work that still waits after all messages arrived is a bug and would not end.
                    assert waiting, f"work beside the {name} waits for more bytes than expected"
                    late = ", ".join(self._named(rank) for rank, left in transfers.items() if left)
                    raise RuntimeError(
                        f"exchange {name!r} made no progress for {self.session.timeout_s:g} s on rank "
                        f"{self.session.topology.rank}, which waits for {late}; check their output, or raise "
                        "timeout_s (DGLX_TIMEOUT)"
                    )
                for key, events in ready:
                    left = transfers[key.data]
                    self._move(key.data, left, events)
                    if not left:
                        selector.unregister(key.fileobj)
                        waiting -= 1
                    elif sum(left) != key.events:
                        selector.modify(key.fileobj, sum(left), key.data)
                more = next(work, None) if working else None
                working, idle = more is not None, more is False

    def _move(self, rank: int, left: _Left, events: int) -> None:
        try:
            for event in (selectors.EVENT_READ, selectors.EVENT_WRITE):
                if events & event and event in left and next(left[event], self) is self:
                    del left[event]
        except PeerError:
            raise
        except OSError as error:
            # report_failed_peers reports the rank that died or failed first.
            raise RuntimeError(f"the connection to {self._named(rank)} broke: {error}") from error

    def _named(self, rank: int) -> str:
        return f"rank {rank} on {self.session.hosts[rank]}"


@final
class RowExchanges:
    """Exchanges of rows on the thread of the training loop, and their memory. Construction is collective."""

    def __init__(self, session: Session) -> None:
        mine = session.rpc.credentials
        encrypted = mine is not None and mine.secret_key is not None
        self.streams = CallExchange(session) if encrypted else StreamExchange(session)
        self.devices = DEVICES.get(session)
        self.sent, self.received = ReusableBuffer(), ReusableBuffer()
        """Host memory of the current exchange."""
        self.late: CallExchange | None = None
        """For messages that are in transit until the next step."""
        self.stale: Any = None
        """The halo rows of the model that runs forward, if it uses those of the epoch before."""
        self.step = 0
        """Number of the training step, a key of random rounding."""

    def seconds(self, *, reset: bool = False) -> float:
        """Seconds spent in exchanges, including local copies and sums."""
        used = [one for one in (self.streams, self.devices, self.late) if one is not None]
        spent = sum(one.waited_s for one in used)
        for one in used if reset else ():
            one.waited_s = 0.0
        return spent


row_exchanges = SessionField(RowExchanges).get
"""Returns the exchanges of a session; the first call opens connections and is collective. PeerError: a rank
is dead or did not connect within the time-out; it is named."""
