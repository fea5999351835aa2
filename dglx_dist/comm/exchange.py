"""Exchange rows between ranks that expect them: one interface over streams, calls and NCCL.

docs/development/contracts.md, "Exchanges", lists where each kind of exchange is used, with measurements.
Unexpected messages, and messages with an unknown size, are sent by one-sided calls (rpc.py, mailbox.py).
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.comm.codec import RowCodec
from dglx_dist.comm.collectives import barrier, gather_json, report_failed_peers
from dglx_dist.comm.endpoints import open_streams
from dglx_dist.comm.mailbox import Mailbox, OneSidedExchange
from dglx_dist.comm.session import CALL_ALIKE_REMEDY, Session, SessionField
from dglx_dist.comm.trace import NETWORK
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.records import Array


@final
class ReusableBuffer:
    """Host memory for one tensor at a time, with any shape and dtype. It grows and never shrinks.

    Page faults in new memory cost more than copying into it. The next :meth:`take` reuses the memory.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._bytes.numel():
            # Free the old memory before the allocation, so that the peak does not include both.
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(tuple(shape))


def _as_bytes(tensor: Tensor) -> Tensor:
    # If one number is expanded to a tensor, the tensor counts as contiguous, but has the stride 0.
    return tensor.reshape(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def view_bytes(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor without gradient as its writable bytes, without a copy."""
    return _as_bytes(tensor).numpy().data


@dataclass(kw_only=True)
class Outgoing:
    """A message to ``rank``."""

    rank: int
    rows: Tensor
    """Contiguous rows."""
    pieces: Iterator[Tensor] | None = None
    """Slices of ``rows`` in order, each filled when the iterator yields it. None if ``rows`` are filled."""


@dataclass(kw_only=True)
class Incoming:
    """A message from ``rank``."""

    rank: int
    rows: Tensor
    """Contiguous rows, which the exchange fills."""
    num_arrived: int = 0
    """Bytes received so far."""


_ENCODED_ROWS = 1 << 12

Wait: TypeAlias = Callable[..., list[Tensor]]
"""Function that waits, and returns each incoming message's rows.

Its argument is an iterator over local work in small steps, which is done while bytes are in transit. The work
yields True if it can continue at once, and False if it needs more incoming messages. Call the function once,
on the thread that posted.

The function raises PeerError, which names the peer, if a peer is dead, silent for too long, or at another
exchange. It raises ConfigError if another thread runs an exchange on streams.
"""


class Exchange(ABC):
    """Sends rows to ranks that expect them, and receives rows from them.

    The peers post the same exchanges in the same order. Rows travel in their dtype, or as :class:`RowCodec`
    codes, which are encoded and decoded piece by piece while others are in transit.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.waited_s = 0.0
        """Seconds in wait functions, including their local work."""

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
        """Begin to send all ``outgoing`` and to receive all ``incoming`` messages.

        Both sides skip messages without bytes. The rows must not change until the wait function returns.

        Args:
            outgoing, incoming: Messages, at most one per peer.
            name: The exchange's name for errors and traces, equal on both sides. At most 32 bytes on streams.
            phase, layer: Keys in the traffic ledger. Without a phase, nothing is counted.
            batch: Number of the mini-batch, for traces.
            codec: Codec for the rows, which must be in host memory. None sends the rows unchanged.

        Raises:
            PeerError: If a peer is dead, or the session is closed.
        """
        own_rank = self.session.topology.rank
        messages = [message for message in outgoing if message.rows.numel()]
        expected = [message for message in incoming if message.rows.numel()]
        transfers = expected
        if codec is not None:
            # Random rounding is keyed by the row number, so each pair of ranks needs its own range.
            messages = [
                _encode(codec, message, (own_rank << 12 | message.rank) << 36) for message in messages
            ]
            transfers = [replace(message, rows=codec.empty(message.rows)) for message in expected]
            # The name contains the code size. Otherwise ranks with other dtypes might read codes as rows.
            name = f"{name}, {codec.bits} bits x {math.prod(codec.row_shape)}"

        if phase is not None:
            for message in messages:
                self.session.ledger.add(phase, layer, own_rank, message.rank, message.rows.nbytes)
        finish = self._post(messages, transfers, name, batch)

        def wait(meanwhile: Iterable[bool] = ()) -> list[Tensor]:
            start_s = time.perf_counter()
            work = iter(meanwhile)
            if codec is not None:
                work = _decode_arrived(codec, transfers, expected, work)
            try:
                with report_failed_peers(self.session, name):
                    finish(work)
            finally:
                self.waited_s += time.perf_counter() - start_s
            return [message.rows for message in incoming]

        return wait

    @abstractmethod
    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        """Post messages with bytes. Return a function that works and waits, and may raise RuntimeError."""


def _encode(codec: RowCodec, message: Outgoing, row_offset: int) -> Outgoing:
    """Return ``message`` with codes instead of rows. Rows are encoded piece by piece while they are sent."""
    codes = codec.empty(message.rows)
    pieces = message.pieces or iter(torch.split(message.rows, _ENCODED_ROWS))

    def encode_pieces() -> Iterator[Tensor]:
        start = 0
        for rows in pieces:
            piece = codes[start : start + len(rows)]
            codec.encode(rows, piece, row_offset + start)
            start += len(rows)
            yield piece

    return replace(message, rows=codes, pieces=encode_pieces())


def _decode_arrived(
    codec: RowCodec, transfers: Sequence[Incoming], expected: Sequence[Incoming], work: Iterator[bool]
) -> Iterator[bool]:
    """Decode the codes that arrived in ``transfers`` into ``expected``, in turn with steps of ``work``.

    Yields True if the next step can be done at once, as ``work`` does.
    """
    while True:
        has_progress = False
        for message, transfer in zip(expected, transfers, strict=True):
            row_bytes = message.rows.nbytes // len(message.rows)
            start = message.num_arrived // row_bytes
            end = transfer.num_arrived // codec.row_bytes
            message.rows[start:end] = codec.decode(transfer.rows[start:end])
            message.num_arrived = end * row_bytes
            if end > start:
                has_progress = True

        can_work = next(work, None)
        is_complete = all(message.num_arrived == message.rows.nbytes for message in expected)
        if can_work is None and is_complete:
            return
        yield has_progress or bool(can_work)


@final
class DeviceExchange(Exchange):
    """Exchanges rows between the ranks' accelerators by torch.distributed. Every rank must construct it.

    Messages are sent at once, in the order in which they are posted, which must be equal on all ranks. Later
    work on the device's current stream waits for the rows, but the host does not. Sizes are not compared.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        super().__init__(session)
        self._in_use = threading.Lock()
        with report_failed_peers(session, "opening connections between accelerators"):
            # Messages need their own group, because they are not ordered with the gradient sums.
            self._group = dist.new_group(timeout=timedelta(seconds=session.timeout_s))
            # All ranks must create the communicator together. Later, only some send messages.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        begin_s = time.perf_counter()
        with report_failed_peers(self.session, name), self._in_use:
            _fill_pieces(outgoing)
            ops = []
            for message in outgoing:
                ops.append(dist.P2POp(dist.isend, _as_bytes(message.rows), message.rank, self._group))
            for due in incoming:
                ops.append(dist.P2POp(dist.irecv, _as_bytes(due.rows), due.rank, self._group))
            requests = dist.batch_isend_irecv(ops) if ops else []

        def finish(work: Iterator[bool]) -> None:
            _do_independent_work(work)
            for request in requests:
                request.wait()
            # All rows have arrived, so the remaining work does not wait any more.
            for message in incoming:
                message.num_arrived = message.rows.nbytes
            for _ in work:
                pass
            if self.session.timeline.on:
                self.session.timeline.add(name, NETWORK, begin_s, time.perf_counter(), batch)

        return finish


def _do_independent_work(work: Iterator[bool]) -> None:
    """Do the steps in ``work`` that need no more rows, while the messages travel."""
    while next(work, False):
        pass


def open_devices(session: Session) -> DeviceExchange | None:
    """Return the exchange between accelerators, or None if ranks share one or have none. Collective."""
    device = session.device
    # A single rank has no process group.
    uses_gpu = device.type == "cuda" and dist.is_initialized()
    uses_nccl = uses_gpu and "nccl" in dist.get_backend_config()
    has_own_device = gather_json(uses_nccl and session.ranks_of_device == 1, session)
    return DeviceExchange(session, device) if all(has_own_device) else None


DEVICES: SessionField[DeviceExchange | None] = SessionField(open_devices)
"""Exchange for tensors on accelerators, opened collectively. None means that they go through host memory."""


_ADVICE = f"run the same layers on all ranks; {CALL_ALIKE_REMEDY}"
_Arrived: TypeAlias = Mailbox[tuple[float, str, Array]]
"""Arrival time, name and bytes of each message in one exchange."""


@final
class _Inbox:
    """Received messages by sender and number. They are dropped when nobody can wait for them any more.

    Messages are numbered per pair of ranks, because two ranks may have exchanges with others.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self.expected = Counter[int]()
        """Messages that this rank has waited for, by sender."""
        self._sent = Counter[int]()
        # A mailbox exists until its wait function is dropped.
        self._posted: weakref.WeakValueDictionary[tuple[int, int], _Arrived]
        self._posted = weakref.WeakValueDictionary()
        self._early: dict[tuple[int, int], tuple[float, str, Array]] = {}
        """Messages that arrived for exchanges that this rank has not posted yet."""

    def post(self, receivers: Iterable[int], senders: Iterable[int]) -> tuple[dict[int, int], _Arrived]:
        """Start an exchange. Return its message number for each receiver, and its mailbox."""
        mailbox: _Arrived = Mailbox(self._session, _ADVICE)
        with self._lock:
            for sender in senders:
                key = sender, self.expected[sender]
                self.expected[sender] += 1
                self._posted[key] = mailbox
                if key in self._early:
                    mailbox.put(0, "", sender, self._early.pop(key))

            numbers = {receiver: self._sent[receiver] for receiver in receivers}
            self._sent.update(numbers.keys())
        return numbers, mailbox

    def put(self, number: int, name: str, sender: int, rows: list[Array]) -> None:
        message = time.perf_counter(), name, rows[0]
        with self._lock:
            mailbox = self._posted.get((sender, number))
            if mailbox is None and number >= self.expected[sender]:
                self._early[sender, number] = message
        if mailbox is not None:
            mailbox.put(0, "", sender, message)

    def __len__(self) -> int:
        return len(self._posted) + len(self._early)


def _check_bytes(arrays: Sequence[Array]) -> None:
    if len(arrays) != 1 or arrays[0].dtype != np.uint8 or arrays[0].ndim != 1:
        descriptions = ", ".join(f"{array.dtype} of shape {array.shape}" for array in arrays)
        raise ValueError(f"a message must be one array of bytes, not {descriptions or 'none'}")


@final
class CallExchange(Exchange):
    """Exchanges rows by one-sided calls, in host memory. Several exchanges may be in flight.

    Messages are received on the threads that serve calls. Exchanges on different objects may overtake each
    other. The constructor is collective. ``span`` is the name in traces. The default is the exchange's name.
    """

    def __init__(self, session: Session, span: str = "") -> None:
        super().__init__(session)
        op = f"exchange-{session.next_number('exchange')}"
        self._span = span
        self._inbox = _Inbox(session)
        inbox = self._inbox
        get_round = inbox.expected.__getitem__
        self._calls = OneSidedExchange(session, op, _ADVICE, _check_bytes, inbox.put, get_round)
        barrier(session, f"opening of {op}")

    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        _fill_pieces(outgoing)
        begin_s = time.perf_counter()
        senders = [message.rank for message in incoming]
        rows_of_receiver = {message.rank: [_as_bytes(message.rows).numpy()] for message in outgoing}
        numbers, mailbox = self._inbox.post(rows_of_receiver, senders)
        calls = self._calls.submit(numbers, name, rows_of_receiver, phase=None)

        def finish(work: Iterator[bool]) -> None:
            _do_independent_work(work)
            arrived = mailbox.take(0, "", senders, name)
            for message in incoming:
                _, sent_name, rows = arrived[message.rank]
                num_bytes = message.rows.nbytes
                if len(rows) != num_bytes or sent_name != name:
                    sent = f"{len(rows)} bytes of {sent_name!r}"
                    raise _make_order_error(message.rank, sent, f"{num_bytes} bytes of {name!r}")
                _as_bytes(message.rows).numpy()[:] = rows
                message.num_arrived = num_bytes

            # All rows have arrived, so the remaining work does not wait any more.
            for _ in work:
                pass
            for call in calls:
                call.result(call.age_s + self.session.timeout_s)

            if self.session.timeline.on:
                # Rows may have arrived before ``begin_s``, if their sender was faster than this rank.
                arrivals_s = [arrival_s for arrival_s, _, _ in arrived.values()]
                end_s = max([begin_s, *arrivals_s])
                self.session.timeline.add(self._span or name, NETWORK, begin_s, end_s, batch)

        return finish


def _fill_pieces(outgoing: Sequence[Outgoing]) -> None:
    """Fill the rows in messages that are filled piece by piece."""
    for message in outgoing:
        for _ in message.pieces or ():
            pass


_MAGIC = b"halo"
_HEADER = struct.Struct("!4sQQ64s")
"""Magic, the message's number in the sequence to this peer, payload size in bytes, name."""
MAX_NAME = 64
_RECEIVE_BYTES = 1 << 20
"""Maximum bytes per read, so that no connection starves the others."""


def send_message(connection: socket.socket, header: bytes, message: Outgoing) -> Iterator[None]:
    """Send ``message`` over a non-blocking connection.

    Yields when the connection is full. Raises OSError if the connection breaks.
    """
    # With MSG_MORE, the kernel sends the header in one packet with the first rows.
    unsent = memoryview(header)
    flags = int(socket.MSG_MORE)
    pieces = iter([message.rows]) if message.pieces is None else message.pieces
    while True:
        while unsent:
            try:
                num_sent = connection.send(unsent, flags)
                unsent = unsent[num_sent:]
            except BlockingIOError:
                yield

        piece = next(pieces, None)
        if piece is None:
            return
        unsent = view_bytes(piece)
        flags = 0


def receive_message(connection: socket.socket, expected_header: bytes, message: Incoming) -> Iterator[None]:
    """Receive ``message`` over a non-blocking connection. Yield whenever more bytes have to arrive.

    Raises PeerError if the peer's header is not ``expected_header``. The peer then takes part in a
    different exchange. Raises OSError if the connection breaks.
    """
    header = memoryview(bytearray(_HEADER.size))
    num_read = 0
    while num_read < _HEADER.size:
        num_read += _receive_into(connection, header[num_read:])
        if num_read == _HEADER.size:
            _check_header(bytes(header), expected_header, message.rank)
        yield

    rows = view_bytes(message.rows)
    while True:
        start = message.num_arrived
        message.num_arrived += _receive_into(connection, rows[start : start + _RECEIVE_BYTES])
        if message.num_arrived == len(rows):
            return
        yield


def _receive_into(connection: socket.socket, buffer: memoryview) -> int:
    """Read into ``buffer`` and return how many bytes were read, or 0 if none have arrived."""
    try:
        num_bytes = connection.recv_into(buffer)
    except BlockingIOError:
        return 0
    if not num_bytes:
        raise ConnectionResetError("the peer closed the connection")
    return num_bytes


def message_header(number: int, rows: Tensor, name: str) -> bytes:
    encoded = name.encode()
    assert len(encoded) <= MAX_NAME, name
    return _HEADER.pack(_MAGIC, number, rows.nbytes, encoded)


def _check_header(header: bytes, expected: bytes, rank: int) -> None:
    if header == expected:
        return

    magic, number, num_bytes, name = _HEADER.unpack(header)
    _, expected_number, expected_bytes, expected_name = _HEADER.unpack(expected)
    if magic != _MAGIC:
        raise PeerError(f"rank {rank} sent {magic!r} instead of a header. Run the same version on all ranks.")
    raise _make_order_error(
        rank,
        f"{num_bytes} bytes of {_decode_name(name)!r} (its message {number} to this rank)",
        f"{expected_bytes} bytes of {_decode_name(expected_name)!r} (message {expected_number})",
    )


def _make_order_error(rank: int, sent: str, expected: str) -> PeerError:
    return PeerError(
        f"rank {rank} sends {sent}, but this rank expects {expected}. The ranks did not run the same layers "
        "in the same order, on rows of the same width and dtype. Let no branch of the model depend on the "
        f"rank's data, and {CALL_ALIKE_REMEDY}."
    )


def _decode_name(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


_FINISHED = object()
_Transfers: TypeAlias = dict[int, Iterator[None]]
"""Unfinished messages to and from one peer, by the connection event that each message waits for."""


@final
class StreamExchange(Exchange):
    """Exchanges rows over a connection per pair of ranks, in host memory. The constructor is collective.

    Rows are sent and received in the wait function, on the thread that calls it, one exchange at a time.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._connections = open_streams(session)
        # A failed rank closes its connections, too. Peers that wait for its rows then stop waiting.
        session.on_close.append(self._close)
        self._numbers_to = Counter[int]()
        self._numbers_from = Counter[int]()
        self._in_use = threading.Lock()
        self._aborted = ""

    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str, batch: int | None
    ) -> Callable[[Iterator[bool]], None]:
        def finish(work: Iterator[bool]) -> None:
            if not self._in_use.acquire(blocking=False):
                raise ConfigError(
                    f"two threads exchange halo rows at the same time ({name}), so their order can differ "
                    "between ranks. Run the layers of a model on one thread."
                )

            try:
                if self._aborted:
                    raise PeerError(
                        f"{name} cannot be exchanged: an earlier exchange ({self._aborted}) was aborted on "
                        "this rank. End the session and restart from the last checkpoint."
                    )

                # Reset the name only after success, because a broken exchange leaves bytes on connections.
                self._aborted = name
                with self.session.timeline.span(name, NETWORK, batch):
                    transfers = self._start_transfers(outgoing, incoming, name)
                    self._run_transfers(transfers, name, work)
                self._aborted = ""
            finally:
                self._in_use.release()

        return finish

    def _close(self) -> None:
        while self._connections:
            _, connection = self._connections.popitem()
            connection.close()

    def _get_connection(self, rank: int) -> socket.socket:
        if rank not in self._connections:
            raise PeerError(f"there is no connection to rank {rank}: it is this rank, or the session ended")
        return self._connections[rank]

    def _start_transfers(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str
    ) -> dict[int, _Transfers]:
        """Return the transfers to and from each rank, by rank and ``selectors`` event.

        The call numbers the messages, so every rank must make its exchanges in the same order.
        """
        transfers: dict[int, _Transfers] = defaultdict(dict)
        for message in outgoing:
            rank = message.rank
            self._numbers_to[rank] += 1
            header = message_header(self._numbers_to[rank], message.rows, name)
            transfer = send_message(self._get_connection(rank), header, message)
            transfers[rank][selectors.EVENT_WRITE] = transfer

        for due in incoming:
            rank = due.rank
            self._numbers_from[rank] += 1
            header = message_header(self._numbers_from[rank], due.rows, name)
            transfer = receive_message(self._get_connection(rank), header, due)
            transfers[rank][selectors.EVENT_READ] = transfer
        return transfers

    def _run_transfers(self, transfers: dict[int, _Transfers], name: str, work: Iterator[bool]) -> None:
        """Send and receive until all transfers and all ``work`` are done.

        ``work`` computes a piece at each ``next``, which returns False if it waits for rows. Raises
        RuntimeError if nothing moves within the session's time-out.
        """
        with selectors.DefaultSelector() as selector:
            for rank, unfinished in transfers.items():
                self._continue_transfers(rank, unfinished, selectors.EVENT_WRITE)
                if unfinished:
                    selector.register(self._get_connection(rank), sum(unfinished), rank)

            num_waiting = len(selector.get_map())
            can_work: bool | None = True
            while num_waiting or can_work is not None:
                # Do not wait for the network while there is work that needs no more rows.
                limit_s = 0 if can_work else self.session.timeout_s
                ready = selector.select(limit_s) if num_waiting else []
                if not ready and not can_work:
                    self._raise_without_progress(transfers, name)

                for key, events in ready:
                    unfinished = transfers[key.data]
                    self._continue_transfers(key.data, unfinished, events)
                    if not unfinished:
                        selector.unregister(key.fileobj)
                        num_waiting -= 1
                    elif sum(unfinished) != key.events:
                        selector.modify(key.fileobj, sum(unfinished), key.data)

                can_work = next(work, None)

    def _raise_without_progress(self, transfers: Mapping[int, _Transfers], name: str) -> NoReturn:
        late = [self._describe_rank(rank) for rank, unfinished in transfers.items() if unfinished]
        # If all messages have arrived and the work still waits, it would wait forever.
        assert late, f"work beside the {name} waits for more bytes than expected"
        raise RuntimeError(
            f"exchange {name!r} made no progress for {self.session.timeout_s:g} s on rank "
            f"{self.session.topology.rank}, which waits for {', '.join(late)}. Check their output, or raise "
            "timeout_s (DGLX_TIMEOUT)."
        )

    def _continue_transfers(self, rank: int, unfinished: _Transfers, events: int) -> None:
        """Continue the transfers with ``rank`` that wait for ``events``. Remove finished transfers."""
        try:
            for event in (selectors.EVENT_READ, selectors.EVENT_WRITE):
                if not events & event or event not in unfinished:
                    continue
                if next(unfinished[event], _FINISHED) is _FINISHED:
                    del unfinished[event]
        except PeerError:
            raise
        except OSError as error:
            # The caller runs inside report_failed_peers, which names the rank that failed first.
            raise RuntimeError(f"the connection to {self._describe_rank(rank)} broke: {error}") from error

    def _describe_rank(self, rank: int) -> str:
        return f"rank {rank} on {self.session.hosts[rank]}"


@final
class RowExchanges:
    """Row exchanges on the training loop's thread, and their memory.

    The constructor is collective.
    """

    def __init__(self, session: Session) -> None:
        credentials = session.rpc.credentials
        encrypted = credentials is not None and credentials.secret_key is not None
        self.streams = CallExchange(session) if encrypted else StreamExchange(session)
        self.devices = DEVICES.get(session)
        self.sent = ReusableBuffer()
        """Host memory for the rows that the current exchange sends."""
        self.received = ReusableBuffer()
        """Host memory for the rows that it receives."""
        self.late: CallExchange | None = None
        """Exchange for messages that are in transit until the next step."""
        self.stale: Any = None
        """Halo rows for the model that runs forward, if it uses the previous epoch's rows."""
        self.step = 0
        """Number of the training step, which keys random rounding."""

    def seconds(self, *, reset: bool = False) -> float:
        """Return the seconds that all exchanges have waited since the last ``reset``."""
        total_s = 0.0
        for exchange in (self.streams, self.devices, self.late):
            if exchange is None:
                continue
            total_s += exchange.waited_s
            if reset:
                exchange.waited_s = 0.0
        return total_s


row_exchanges = SessionField(RowExchanges).get
"""Return a session's exchanges. The first call opens connections and is collective. It raises PeerError if a
rank is dead or did not connect within the time limit.
"""
