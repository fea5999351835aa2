"""Halo exchange between ranks as an autograd operator with an exact adjoint (docs/strategies/full_graph.md).

Forward sends copies of own rows to peers and appends the rows that peers send. Backward sends the copies'
gradients back to the ranks that hold the rows. They add up the gradients.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast, final

import numpy as np
import torch
from dgl import ops
from torch import Tensor
from torch.autograd.function import once_differentiable

from dglx_dist.comm.codec import WireDtype, row_codec
from dglx_dist.comm.devices import allocate_host_memory, copy_to_host, is_on_host
from dglx_dist.comm.exchange import (
    MAX_NAME,
    CallExchange,
    Incoming,
    Outgoing,
    ReusableBuffer,
    Wait,
    row_exchanges,
)
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.feature_fetch import HALVES
from dglx_dist.errors import ConfigError
from dglx_dist.internals.graphs import build_block
from dglx_dist.internals.message_passing import place
from dglx_dist.internals.pytorch import NO_BACKWARD, Copy, current_backward, get_version
from dglx_dist.strategies.full_graph.halo_plan import Cover, HaloLayer

PIECE_BYTES = 256 * 1024
"""Piece size in bytes. Rows are copied and added in pieces while other pieces are in transit."""

_STEP_BYTES = 1 << 20
"""Step size in bytes for local copies."""


def gather_rows(h: Tensor, rows: Tensor, out: Tensor) -> Iterator[Tensor]:
    """Copy ``h[rows]`` into ``out`` and yield it, piece by piece.

    ``h`` is (n, ...), ``rows`` is (k,) int64, and ``out`` is (k, ...), contiguous, with the same dtype as
    ``h``. All must be on one device.
    """
    for piece_rows, piece in zip(_cut_like(rows, out), _cut_like(out, out), strict=True):
        torch.index_select(h, 0, piece_rows, out=piece)
        yield piece


def copy_rows(source: Tensor, target: Tensor) -> Iterator[bool]:
    """Copy ``source`` to ``target``, both (n, ...), in steps. Yield True after each step."""
    step_rows = _count_rows_per_piece(_STEP_BYTES, source)
    for start in range(0, len(source), step_rows):
        target[start : start + step_rows].copy_(source[start : start + step_rows])
        yield True


def add_rows(total: Tensor, positions: Sequence[Tensor], messages: Sequence[Incoming]) -> Iterator[bool]:
    """Add the rows in ``messages`` to ``total``, piece by piece, while the iterator is consumed.

    Yields True after a piece was added, and False while the next piece has not arrived. The peers take turns,
    no matter which piece arrives first. So the sums are reproducible bit for bit.

    Args:
        total: (n, ...) sums.
        positions: For each peer, (k,) distinct int64 positions in ``total`` where its rows belong.
        messages: For each peer, (k, ...) rows that may still be arriving.
    """
    peer_iterators = []
    for peer_positions, message in zip(positions, messages, strict=True):
        if message.rows.numel():
            peer_iterators.append(_add_from_peer(total, peer_positions, message))

    while peer_iterators:
        unfinished = []
        for iterator in peer_iterators:
            for is_added in iterator:
                yield is_added
                if is_added:
                    # The next peer takes its turn.
                    unfinished.append(iterator)
                    break
        peer_iterators = unfinished


def _add_from_peer(total: Tensor, positions: Tensor, message: Incoming) -> Iterator[bool]:
    """Add the rows from one peer. Yields like :func:`add_rows`."""
    end_bytes = 0
    pieces = _cut_like(message.rows, message.rows)
    for piece_positions, piece in zip(_cut_like(positions, message.rows), pieces, strict=True):
        end_bytes += piece.numel() * piece.element_size()
        while message.num_arrived < end_bytes:
            yield False
        # Move the piece before its dtype is changed. Otherwise torch would convert it on the host and wait.
        moved_piece = piece.to(total.device, non_blocking=True)
        total.index_add_(0, piece_positions, moved_piece.to(total.dtype))
        yield True


def _cut_like(ids: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Cut the (n, ...) ``ids`` into the pieces in which the (n, ...) ``rows`` are copied and added."""
    piece_rows = _count_rows_per_piece(PIECE_BYTES, rows)
    return (ids[start : start + piece_rows] for start in range(0, len(ids), piece_rows))


def _count_rows_per_piece(piece_bytes: int, rows: Tensor) -> int:
    """Return how many of the (n, ...) ``rows`` fit in ``piece_bytes``, or n on an accelerator."""
    if not is_on_host(rows):
        return max(len(rows), 1)
    row_bytes = rows.numel() * rows.element_size() // max(len(rows), 1)
    return max(piece_bytes // max(row_bytes, 1), 1)


FORWARD = "halo"
"""Ledger phase for forward."""
BACKWARD = "halo_gradients"
"""Ledger phase for backward."""
ONCE = "preload"
"""Ledger phase for rows that are exchanged once."""


@final
class HaloExchange:
    """Exchanges the halo rows for layer ``number``, from 1 to L.

    The first exchange in a session opens connections, so every rank must construct one, even without peers.
    All ranks must run their exchanges in the same order. Raises PeerError if a rank is dead or did not
    connect within the time-out.

    Args:
        wire: Format in which each step's rows and gradients are sent. Formats other than "same" go through
            host memory.
        uses_late_rows: Whether the session's option ``staleness`` applies.
    """

    def __init__(
        self,
        session: Session,
        layer: HaloLayer,
        number: int,
        wire: WireDtype = "same",
        *,
        uses_late_rows: bool = True,
    ) -> None:
        self._session = session
        self._uses_late_rows = uses_late_rows
        self._exchanges = row_exchanges(session)
        self.number = number
        self.wire = wire
        self.own_rows = layer.own_rows
        self.num_halo = len(layer.halo_nodes)
        self.num_edges = len(layer.edge_ids)
        self._sent_rows = {torch.device("cpu"): [torch.from_numpy(rows) for _, rows in layer.send]}
        """Positions of the rows that go to each peer, by device."""
        self._sent = [(rank, len(rows)) for rank, rows in layer.send]
        self._num_sent = sum(count for _, count in self._sent)
        self._received = layer.receive
        requests = np.concatenate([layer.halo_nodes, *(peer_rows for _, peer_rows in layer.send)])
        self.digest = zlib.crc32(requests.data)
        """Checksum over the rows that this rank receives and sends."""
        self.cover = None if layer.cover is None else CoverExchange(session, layer.cover, self)

    def for_layer(self, number: int) -> HaloExchange:
        """Return the exchange for another layer with equal structure. Row lists are shared."""
        exchange = copy.copy(self)
        exchange.number = number
        exchange.cover = None if self.cover is None else self.cover.for_layer(number)
        return exchange

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Append the halo rows to the (own_rows, ...) ``h``. The layer's peers must call it too.

        Backward adds the peers' gradients in a fixed order, and 16-bit gradients in float32. So the bits do
        not depend on timing. Every peer must run backward. The operation is twice differentiable.

        Tensors on accelerators are sent by NCCL if every rank has its own device, else through host memory.

        Args:
            h: Own rows, in any dtype. The trailing shape must be equal on all ranks. ``h`` itself is returned
                if this rank has no peers at this layer.
            kept: (n_halo, ...) halo that an earlier call returned for the same ``h``. With it, forward sends
                nothing. Pass it on all ranks or on none.

        Raises:
            ConfigError: ``h`` or ``kept`` has another number of rows.
            PeerError: a peer is dead, silent, or calls another layer. The error has its rank.
        """
        self._check_rows(h, self.own_rows, "the own rows")
        if kept is not None:
            self._check_rows(kept, self.num_halo, "the halo rows")
        if not self._sent and not self._received:
            return h

        stale: StaleHalos | None = self._exchanges.stale
        uses_late_rows = self._uses_late_rows and kept is None
        if uses_late_rows and stale is not None and torch.is_grad_enabled():
            return cast("Tensor", _AppendLate.apply(self, stale.next_late_rows(self), h))  # type: ignore[no-untyped-call]  # torch leaves it bare

        if uses_late_rows and self._exchanges.late is not None and current_backward() != NO_BACKWARD:
            raise ConfigError(
                f"layer {self.number} is computed again in backward, where its late halo rows (staleness=1) "
                "are not available; use recompute='keep' or 'none'"
            )
        return cast("Tensor", _Append.apply(self, h, kept, False))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def fetch(self, rows: Tensor, out: Tensor | None = None, *, phase: str) -> Tensor:
        """Return only the (n_halo, ...) halo rows, without gradient. Use it for rows that are fetched once.

        ``out`` is contiguous memory for the result, by default new memory. For errors see :meth:`exchange`.
        """
        self._check_rows(rows, self.own_rows, "the own rows")
        halo = rows.new_empty((self.num_halo, *rows.shape[1:])) if out is None else out
        self._receive(rows.detach(), halo, phase)
        return halo

    def append(self, h: Tensor, kept: Tensor | None) -> Tensor:
        """Run :meth:`exchange` without gradient, always into new memory."""
        sources = h.new_empty((self.own_rows + self.num_halo, *h.shape[1:]))
        local_rows = sources[: self.own_rows]
        halo = sources[self.own_rows :]
        if kept is None:
            self._receive(h, halo, FORWARD, local_rows)
        else:
            local_rows.copy_(h)
            halo.copy_(kept)
        return sources

    def return_gradients(self, gradient: Tensor) -> Tensor:
        """Send the gradients for halo rows back, and add those that peers send for this rank's rows.

        This is the adjoint to :meth:`append`. ``gradient`` has shape (own_rows + n_halo, ...). The result is
        a new tensor with the (own_rows, ...) sums.
        """
        gradient = gradient.detach()
        local_gradient = gradient[: self.own_rows]
        halo = gradient[self.own_rows :]
        sum_dtype = _choose_sum_dtype(gradient.dtype)
        total = torch.empty(local_gradient.shape, dtype=sum_dtype, device=gradient.device)
        sent = halo.contiguous() if self._is_readable(halo) else copy_to_host([halo])[0]
        received = self._reserve_memory(self._exchanges.received, self._num_sent, gradient)
        outgoing, incoming = self.messages(sent, received, BACKWARD)

        # The two iterators copy and add rows while the messages are on their way.
        copies = copy_rows(local_gradient, total)
        additions = add_rows(total, self.rows_on(total.device), incoming)
        self._swap(outgoing, incoming, BACKWARD, chain(copies, additions))
        return total.to(gradient.dtype)

    def _receive(self, h: Tensor, halo: Tensor, phase: str, local_rows: Tensor | None = None) -> None:
        """Send rows from ``h`` to the peers, and fill ``halo``. Copy ``h`` to ``local_rows`` meanwhile."""
        work: Iterable[bool] = () if local_rows is None else copy_rows(h, local_rows)
        rows_by_peer = self.rows_on(h.device)
        if self._is_readable(h):
            sent = self._reserve_memory(self._exchanges.sent, self._num_sent, h)
            outgoing, incoming = self.messages(sent, halo, phase)
            for message, rows in zip(outgoing, rows_by_peer, strict=True):
                message.pieces = gather_rows(h, rows, message.rows)
            self._swap(outgoing, incoming, phase, work)
            return

        # Rows on the accelerator cross the network from and into host memory. Without peers, h[:0] is sent.
        sent = torch.cat([h[:0], *(h.index_select(0, rows) for rows in rows_by_peer)])
        host_halo = allocate_host_memory(halo.shape, halo)
        outgoing, incoming = self.messages(copy_to_host([sent])[0], host_halo, phase)
        self._swap(outgoing, incoming, phase, work)
        halo.copy_(host_halo, non_blocking=True)

    def _swap(
        self, outgoing: list[Outgoing], incoming: list[Incoming], phase: str, work: Iterable[bool]
    ) -> None:
        """Exchange the messages with the peers, and do ``work`` in the meantime."""
        # All rows are in the same kind of memory, so any message tells whether accelerators send directly.
        messages: list[Outgoing | Incoming] = [*outgoing, *incoming]
        is_direct = any(self._is_direct(message.rows) for message in messages)
        exchange = self._exchanges.devices if is_direct else self._exchanges.streams
        assert exchange is not None

        codec = None
        if self.wire != "same" and phase != ONCE:
            # A layer's forward and backward need different random numbers.
            exchange_number = 2 * self.number + (phase == BACKWARD)
            rounding_key = self._session.seed, self._exchanges.step, exchange_number
            codec = row_codec(self.wire, messages[0].rows, rounding_key)
        name = self.describe(phase)
        if messages:
            # Peers compare the name, so that no rank reads the rows as another dtype or shape.
            rows = messages[0].rows
            row_shape = ",".join(map(str, rows.shape[1:]))
            name = f"{name}, {str(rows.dtype).removeprefix('torch.')}[{row_shape}]"[:MAX_NAME]
        wait = exchange.post(outgoing, incoming, name, phase=phase, layer=self.number, codec=codec)
        wait(work)

    def describe(self, phase: str) -> str:
        return f"{phase.replace('_', ' ')} of layer {self.number}"

    def counts(self, phase: str) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
        """Return (rank, row count) pairs for the sent rows, and for the received rows."""
        return (self._received, self._sent) if phase == BACKWARD else (self._sent, self._received)

    def messages(self, out: Tensor, received: Tensor, phase: str) -> tuple[list[Outgoing], list[Incoming]]:
        """Return the messages that send the rows in ``out`` and those that fill ``received``, by peer."""
        sent_counts, received_counts = self.counts(phase)
        outgoing = [Outgoing(rank=rank, rows=rows) for rank, rows in _cut_by_counts(out, sent_counts)]
        pieces = _cut_by_counts(received, received_counts)
        return outgoing, [Incoming(rank=rank, rows=rows) for rank, rows in pieces]

    def _reserve_memory(self, buffer: ReusableBuffer, num_rows: int, like: Tensor) -> Tensor:
        """Return memory for ``num_rows`` message rows shaped as in ``like``. Host memory is reused."""
        shape = (num_rows, *like.shape[1:])
        if is_on_host(like):
            return buffer.take(shape, like.dtype)
        return like.new_empty(shape) if self._is_direct(like) else allocate_host_memory(shape, like)

    def rows_on(self, device: torch.device, copy: Copy | None = None) -> list[Tensor]:
        """Return the positions for each peer's rows on ``device``. ``copy`` copies them there, once."""
        if device not in self._sent_rows:
            host_rows = self._sent_rows[torch.device("cpu")]
            self._sent_rows[device] = [copy(rows) if copy else rows.to(device) for rows in host_rows]
        return self._sent_rows[device]

    def _is_readable(self, rows: Tensor) -> bool:
        """Return whether ``rows`` can be sent from where they are."""
        return is_on_host(rows) or self._is_direct(rows)

    def _is_direct(self, rows: Tensor) -> bool:
        """Return whether ``rows`` are sent from one accelerator to another."""
        return self._exchanges.devices is not None and self.wire == "same" and not is_on_host(rows)

    def _check_rows(self, tensor: Tensor, expected: int, rows_name: str) -> None:
        if tensor.dim() == 0 or len(tensor) != expected:
            raise ConfigError(
                f"layer {self.number} exchanges a tensor of shape {tuple(tensor.shape)}, but this rank has "
                f"{expected} rows there; pass {rows_name}, in the order of the block"
            )


@final
class CoverExchange:
    """Sums source rows over a layer's in-edges, with the exchange that its :class:`Cover` describes.

    A rank sends partial sums instead of their summands if the sums are fewer rows. Gradients are sent back in
    the same way.
    """

    def __init__(self, session: Session, cover: Cover, uncovered: HaloExchange) -> None:
        num_edges = uncovered.num_edges
        self._rows = HaloExchange(session, cover.layer, uncovered.number, uncovered.wire)
        edges = HaloLayer.from_rows(num_edges, cover.indices, cover.receive_edges, cover.send_edges)
        self._edges = HaloExchange(session, edges, uncovered.number)

        # A partial sum's edge has no weight. Its position comes after all in-edges.
        layer = cover.layer
        positions = torch.from_numpy(np.where(layer.edge_ids < 0, num_edges, layer.edge_ids))
        own_rows = uncovered.own_rows
        partial = build_block(torch.from_numpy(cover.indptr), torch.from_numpy(cover.indices), own_rows)
        num_sources = layer.num_sources
        total = build_block(torch.from_numpy(layer.indptr), torch.from_numpy(layer.indices), num_sources)
        self._graphs = {torch.device("cpu"): (partial, total, positions)}
        self._weights: dict[str, tuple[Tensor, int | None, Tensor]] = {}
        """By name: weights, their version, and the weights for the summands on this rank."""

    def for_layer(self, number: int) -> CoverExchange:
        exchange = copy.copy(self)
        exchange._rows = self._rows.for_layer(number)
        exchange._edges = self._edges.for_layer(number)
        exchange._weights = {}
        return exchange

    def sums(self, h: Tensor, weights: tuple[str, Tensor] | None = None) -> Tensor | None:
        """Sum all ranks' (own_rows, ...) ``h`` over in-edges, times edge weights. Return (targets, ...) sums.

        ``weights`` are a column's name and its values, one number per edge. They are sent once to the ranks
        that use them. The result is None on all ranks if weights are learned, or are computed while
        evaluating without gradient. Then rows must be exchanged instead (attention).
        """
        partial, total, positions = self._graphs_on(h.device)
        if weights is None:
            rows = self._exchange_rows(h, ops.copy_u_sum(partial, h))
            return cast("Tensor", ops.copy_u_sum(total, rows))

        name, edge_weights = weights
        num_weights = math.prod(edge_weights.shape[1:])
        if num_weights != 1 or edge_weights.dim() > h.dim():
            return None
        remote_weights = self._fetch_weights(name, edge_weights)
        if remote_weights is None:
            return None

        rows = self._exchange_rows(h, ops.u_mul_e_sum(partial, h, remote_weights))
        # Weights are already applied to partial sums.
        weight_of_sums = edge_weights.new_ones(1, *edge_weights.shape[1:])
        total_weights = torch.cat([edge_weights, weight_of_sums])[positions]
        return cast("Tensor", ops.u_mul_e_sum(total, rows, total_weights))

    def _exchange_rows(self, h: Tensor, partial_sums: Tensor) -> Tensor:
        rows = torch.cat([h, partial_sums]) if len(partial_sums) else h
        return self._rows.exchange(rows)

    def _fetch_weights(self, name: str, weights: Tensor) -> Tensor | None:
        """Return the weights for the summands on this rank, or None if they may change in each step."""
        # All ranks must decide equally, even ranks without edges. So tensors are compared by identity.
        version = get_version(weights)
        if name in self._weights and version is not None:
            known_weights, known_version, remote_weights = self._weights[name]
            if known_weights is weights and known_version == version:
                return remote_weights
        if weights.requires_grad or not torch.is_grad_enabled():
            return None

        remote_weights = self._edges.fetch(weights, phase=ONCE)
        self._weights[name] = weights, version, remote_weights
        return remote_weights

    def _graphs_on(self, device: torch.device) -> tuple[Any, Any, Tensor]:
        """Return the graphs for partial and for total sums, and the position of each total edge's weight."""
        if device not in self._graphs:
            partial, total, positions = self._graphs[torch.device("cpu")]
            self._graphs[device] = place(partial, device), place(total, device), positions.to(device)
        return self._graphs[device]


@final
class _Append(torch.autograd.Function):
    """Maps (own_rows, ...) to (own_rows + n_halo, ...). With ``is_adjoint`` it maps gradients back."""

    @staticmethod
    def forward(ctx: Any, halo: HaloExchange, rows: Tensor, kept: Tensor | None, is_adjoint: bool) -> Tensor:
        ctx.halo = halo
        ctx.is_adjoint = is_adjoint
        if is_adjoint:
            return halo.return_gradients(rows)
        return halo.append(rows.detach(), kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        result = _Append.apply(ctx.halo, gradient, None, not ctx.is_adjoint)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return None, result, None, None


@final
class _AppendLate(torch.autograd.Function):
    """Like :class:`_Append`, but with halo rows and gradients from the previous epoch."""

    @staticmethod
    def forward(ctx: Any, halo: HaloExchange, late_rows: list[LateRows], h: Tensor) -> Tensor:
        late_halo, late_gradients = late_rows
        ctx.halo = halo
        ctx.late_gradients = late_gradients
        h = h.detach()
        sent = (h.index_select(0, rows) for rows in halo.rows_on(h.device))
        halo_rows = late_halo.swap(sent, halo, FORWARD, h)
        return torch.cat([h, halo_rows.to(h.device)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        halo: HaloExchange = ctx.halo
        own_gradient = gradient[: halo.own_rows]
        halo_gradient = gradient[halo.own_rows :]
        sent_counts, received_counts = halo.counts(BACKWARD)
        sent = (piece for _, piece in _cut_by_counts(halo_gradient, sent_counts))
        received = ctx.late_gradients.swap(sent, halo, BACKWARD, own_gradient)

        total = own_gradient.to(_choose_sum_dtype(own_gradient.dtype), copy=True)
        pieces = _cut_by_counts(received, received_counts)
        for rows, (_, piece) in zip(halo.rows_on(total.device), pieces, strict=True):
            total.index_add_(0, rows, piece.to(total))
        return None, None, total.to(own_gradient.dtype)


def _choose_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    # Half precision would round after each addition.
    return torch.float32 if dtype in HALVES else dtype


@final
class LateRows:
    """Rows that one exchange received in the previous epoch, in host memory, and rows in transit."""

    def __init__(self, exchange: CallExchange) -> None:
        self._exchange = exchange
        self._out = ReusableBuffer()
        self._in = ReusableBuffer()
        self._wait: Wait | None = None
        """Waits for rows in transit. None if there are none."""
        self.rows: Tensor | None = None
        self._received_counts: object = None
        """(rank, row count) pairs for :attr:`rows`. None before the first exchange."""
        self.is_used = False
        """Whether the exchange has run in this epoch."""

    def arrive(self, *, keep: bool = True) -> None:
        """Wait for rows in transit. Without ``keep``, forget them, so that the next exchange is exact."""
        if self._wait is not None:
            wait = self._wait
            # An exchange that fails must not be waited for again.
            self._wait = None
            wait()
            self.rows = self._target
        if not keep:
            self.rows = None

    def swap(self, sent: Iterable[Tensor], halo: HaloExchange, phase: str, like: Tensor) -> Tensor:
        """Send ``sent`` and return the previous epoch's (k, ...) rows, or this epoch's if there are none.

        ``like`` has the dtype and the row width.
        """
        name = halo.describe(phase)
        if self.is_used:
            raise ConfigError(
                f"{name} ran twice in one step; add up the losses and call backward once, or use staleness=0"
            )

        # Rows from other peers, or a different row count, do not fit this exchange.
        sent_counts, received_counts = halo.counts(phase)
        self.arrive(keep=self._received_counts in (None, received_counts))
        self.is_used = True
        self._received_counts = received_counts
        sent_rows = _take_rows(self._out, sent_counts, like)
        self._target = _take_rows(self._in, received_counts, like)
        late_rows = self.rows
        if late_rows is not None and (late_rows.shape, late_rows.dtype) != (self._target.shape, like.dtype):
            self.rows = None  # Rows from another model or precision do not fit, so this exchange is exact.

        outgoing, incoming = halo.messages(sent_rows, self._target, phase)
        for message, rows in zip(outgoing, sent, strict=True):
            message.rows.copy_(rows)
        self._wait = self._exchange.post(outgoing, incoming, name, phase=phase, layer=halo.number)
        if self.rows is None:
            self.arrive()
        return cast("Tensor", self.rows)


def _take_rows(buffer: ReusableBuffer, counts: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
    """Return memory in ``buffer`` for the rows in ``counts``, with the dtype and width of ``like``."""
    num_rows = sum(count for _, count in counts)
    return buffer.take((num_rows, *like.shape[1:]), like.dtype)


_MAX_PASSES = 100
"""Maximum number of forward passes between two weight changes. Each pass keeps its own rows."""


@final
class StaleHalos:
    """Halo rows and gradients that a model uses one epoch late. Construction is collective.

    The first epoch is exact.
    """

    def __init__(self, session: Session) -> None:
        self._exchanges = row_exchanges(session)
        exchange = self._exchanges.late
        if exchange is None:
            exchange = CallExchange(session)
            self._exchanges.late = exchange
        self._late = defaultdict[str, LateRows](lambda: LateRows(exchange))
        self._epoch = -1
        self._passes = 0
        self._calls = Counter[int]()
        """Number of exchanges that each layer has run in this epoch."""

    @contextmanager
    def active(self, epoch: int) -> Iterator[None]:
        """Use late rows inside the ``with`` block, which must be one forward pass."""
        self._passes += 1
        if self._epoch != epoch:
            self._begin_epoch(epoch)
        if self._passes > _MAX_PASSES:
            raise ConfigError(
                f"{_MAX_PASSES} forward passes ran without a change of the weights, which would end an "
                "epoch of staleness=1; change them by an optimizer, or in place under torch.no_grad(), not "
                "by .data"
            )

        outer_stale = self._exchanges.stale
        self._exchanges.stale = self
        try:
            yield
        finally:
            self._exchanges.stale = outer_stale

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._passes = 1
        self._calls = Counter()
        for late in self._late.values():
            # If an exchange did not run, its rows are older than one epoch.
            if not late.is_used:
                late.arrive(keep=False)
            late.is_used = False

    def next_late_rows(self, halo: HaloExchange) -> list[LateRows]:
        """Return late rows and late gradients for the layer's next exchange in this epoch."""
        self._calls[halo.number] += 1
        # The digest differs for another structure, whose rows must not be used, for example after a resume.
        key = f"{halo.number}/{self._calls[halo.number]}/{halo.digest}"
        return [self._late[f"{phase}/{key}"] for phase in (FORWARD, BACKWARD)]

    def state(self) -> dict[str, Tensor]:
        """Wait for rows in transit, and return the rows that the next epoch uses."""
        rows_by_name = {}
        for name, late in self._late.items():
            late.arrive()
            if late.is_used and late.rows is not None:
                rows_by_name[name] = late.rows
        return rows_by_name

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what :meth:`state` returned. With {} the next epoch is exact."""
        # An exchange in transit must end before its rows are dropped.
        self.state()
        self._late.clear()
        self._epoch = -1
        for name, rows in state.items():
            late = self._late[name]
            late.rows = rows
            late.is_used = True


def _cut_by_counts(rows: Tensor, counts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Tensor]]:
    """Cut ``rows`` by ``counts``, which are (rank, row count) pairs. Yield ranks and pieces."""
    pieces = torch.split(rows, [count for _, count in counts])
    return zip((rank for rank, _ in counts), pieces, strict=True)
