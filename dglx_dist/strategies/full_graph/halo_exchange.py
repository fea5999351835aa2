"""Halo exchange between ranks as an autograd operator with an exact adjoint (docs/strategies/full_graph.md).

Forward sends copies of own rows to peers and appends the rows that peers send. Backward is the transpose: it
sends the gradients of these copies to the ranks that hold the rows, which add them up.
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
from dglx_dist.comm.exchange import CallExchange, Incoming, Outgoing, ReusableBuffer, Wait, row_exchanges
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.feature_fetch import HALVES
from dglx_dist.errors import ConfigError
from dglx_dist.internals.graphs import build_block
from dglx_dist.internals.message_passing import place
from dglx_dist.internals.pytorch import NO_BACKWARD, Copy, current_backward, get_version
from dglx_dist.strategies.full_graph.halo_plan import Cover, HaloLayer

PIECE_BYTES = 256 * 1024
"""Rows are copied and added in pieces of this size while other pieces are in transit."""

_STEP_BYTES = 1 << 20
"""Local rows are copied in steps of this size."""


def gather_rows(h: Tensor, rows: Tensor, out: Tensor) -> Iterator[Tensor]:
    """Copy ``h[rows]`` into ``out`` and yield it, piece by piece.

    ``h`` is (n, ...), ``rows`` (k,) int64, and ``out`` (k, ...) contiguous of the dtype of ``h``, all on one
    device.
    """
    for some, piece in zip(_pieces_like(rows, out), _pieces_like(out, out), strict=True):
        torch.index_select(h, 0, some, out=piece)
        yield piece


def copy_rows(source: Tensor, target: Tensor) -> Iterator[bool]:
    """Copy ``source`` to ``target``, both (n, ...), in steps; yields True after each."""
    step = _rows_in(_STEP_BYTES, source)
    for first in range(0, len(source), step):
        target[first : first + step].copy_(source[first : first + step])
        yield True


def add_rows(total: Tensor, rows: Sequence[Tensor], incoming: Sequence[Incoming]) -> Iterator[bool]:
    """Add received rows to the (n, ...) ``total`` in pieces; yields False while the next one has not arrived.

    ``rows`` are the (k,) distinct int64 rows of each peer's part. Pieces are added round-robin over the
    peers, independent of their arrival, so sums are bit-reproducible.
    """
    per_peer = [
        _add_from_peer(total, some, part)
        for some, part in zip(rows, incoming, strict=True)
        if part.rows.numel()
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


def _add_from_peer(total: Tensor, rows: Tensor, part: Incoming) -> Iterator[bool]:
    needed = 0
    for some, piece in zip(_pieces_like(rows, part.rows), _pieces_like(part.rows, part.rows), strict=True):
        needed += piece.numel() * piece.element_size()
        while part.num_arrived < needed:
            yield False
        # Moved as it is: with another dtype, torch would convert it on the host and wait for its copy.
        total.index_add_(0, some, piece.to(total.device, non_blocking=True).to(total.dtype))
        yield True


def _pieces_like(ids: Tensor, rows: Tensor) -> Iterator[Tensor]:
    step = _rows_in(PIECE_BYTES, rows)
    return (ids[first : first + step] for first in range(0, len(ids), step))


def _rows_in(num_bytes: int, rows: Tensor) -> int:
    """Return how many of the (n, ...) ``rows`` are a piece of ``num_bytes``: all on an accelerator."""
    if not is_on_host(rows):
        return max(len(rows), 1)
    row_bytes = rows.numel() * rows.element_size() // max(len(rows), 1)
    return max(num_bytes // max(row_bytes, 1), 1)


FORWARD, BACKWARD, ONCE = "halo", "halo_gradients", "preload"
"""Ledger phases of forward, backward, and what is exchanged once."""


@final
class HaloExchange:
    """Exchange of the halo rows of layer ``number`` of 1..L. All ranks exchange them in the same order.

    The first one of a session opens connections, so every rank must construct one, even without peers.
    PeerError names a rank that is dead or did not connect within the time-out. Rows that are exchanged in
    every step, and their gradients, travel as ``wire``, through host memory unless that is "same".
    """

    def __init__(self, session: Session, layer: HaloLayer, number: int, wire: WireDtype = "same") -> None:
        self._session, self._exchanges = session, row_exchanges(session)
        self.number, self.wire = number, wire
        self.own_rows, self.num_halo = layer.own_rows, len(layer.halo_nodes)
        self.num_edges = len(layer.edge_ids)
        rows = [torch.from_numpy(rows) for _, rows in layer.send]
        self._sent_rows = {torch.device("cpu"): rows}
        self._sent = [(rank, len(rows)) for rank, rows in layer.send]
        self._num_sent = sum(count for _, count in self._sent)
        self._received = layer.receive
        self.digest = zlib.crc32(np.concatenate([layer.halo_nodes, *(one for _, one in layer.send)]).data)
        self.cover = None if layer.cover is None else CoverExchange(session, layer.cover, self)

    def for_layer(self, number: int) -> HaloExchange:
        """Return the exchange of layer ``number`` with equal structure; row lists are shared."""
        other = copy.copy(self)
        other.number = number
        other.cover = None if self.cover is None else self.cover.for_layer(number)
        return other

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Append the halo rows to the (own_rows, ...) ``h``; the layer's peers must call it too.

        Backward adds the gradients of the peers in a fixed order, 16-bit ones in float32, so the bits do not
        depend on timing. Every peer must run backward. Twice differentiable. Tensors on accelerators are sent
        by NCCL if every rank has its own device, else through host memory. ``h`` is of any dtype, with the
        same trailing shape on all ranks; it is returned itself if this rank has no peers at this layer.

        With ``kept``, the (n_halo, ...) halo that an earlier call returned for the same ``h``, forward sends
        nothing; pass it on all ranks or on none.

        Raises:
            ConfigError: ``h`` or ``kept`` has another number of rows.
            PeerError: a peer is dead, silent, or at another exchange; it is named.
        """
        self._check_rows(h, self.own_rows, "the own rows")
        if kept is not None:
            self._check_rows(kept, self.num_halo, "the halo rows")
        if not self._sent and not self._received:
            return h
        stale: StaleHalos | None = self._exchanges.stale
        if kept is None and stale is not None and torch.is_grad_enabled():
            return cast("Tensor", _AppendLate.apply(self, stale.next_late_rows(self), h))  # type: ignore[no-untyped-call]  # torch leaves it bare
        # -1: no backward pass is running, see torch.autograd.graph.
        if kept is None and self._exchanges.late is not None and current_backward() != NO_BACKWARD:
            raise ConfigError(
                f"layer {self.number} is computed again in backward, where its late halo rows (staleness=1) "
                "are not at hand; use recompute='keep' or 'none'"
            )
        return cast("Tensor", _Append.apply(self, h, kept, False))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def fetch(self, rows: Tensor, out: Tensor | None = None, *, phase: str) -> Tensor:
        """Return only the (n_halo, ...) halo rows, without gradient; for rows that are fetched once and kept.

        ``out`` is their contiguous memory (None: new). Raises as :meth:`exchange`.
        """
        self._check_rows(rows, self.own_rows, "the own rows")
        halo = rows.new_empty((self.num_halo, *rows.shape[1:])) if out is None else out
        self._receive(rows.detach(), halo, phase)
        return halo

    def append(self, h: Tensor, kept: Tensor | None) -> Tensor:
        """Run :meth:`exchange` without gradient, always into new memory."""
        sources = h.new_empty((self.own_rows + self.num_halo, *h.shape[1:]))
        own, halo = sources[: self.own_rows], sources[self.own_rows :]
        if kept is None:
            self._receive(h, halo, FORWARD, own)
        else:
            own.copy_(h)
            halo.copy_(kept)
        return sources

    def return_gradients(self, gradient: Tensor) -> Tensor:
        """Run the adjoint of :meth:`append`, always into new memory.

        Returns the own rows of the (own_rows + n_halo, ...) ``gradient`` plus what the peers send for them.
        """
        gradient = gradient.detach()
        own, halo = gradient[: self.own_rows], gradient[self.own_rows :]
        wider = torch.float32 if gradient.dtype in HALVES else gradient.dtype
        total = torch.empty(own.shape, dtype=wider, device=gradient.device)
        sent = halo.contiguous() if self._is_readable(halo) else copy_to_host([halo])[0]
        received = self._memory(self._exchanges.received, self._num_sent, gradient)
        outgoing, incoming = self.messages(sent, received, BACKWARD)
        adding = add_rows(total, self.rows_on(total.device), incoming)
        self._swap(outgoing, incoming, BACKWARD, chain(copy_rows(own, total), adding))
        return total.to(gradient.dtype)

    def _receive(self, h: Tensor, halo: Tensor, phase: str, own: Tensor | None = None) -> None:
        readable, rows_to = self._is_readable(h), self.rows_on(h.device)
        target = halo if readable else allocate_host_memory(halo.shape, halo)
        if readable:
            sent = self._memory(self._exchanges.sent, self._num_sent, h)
            outgoing, incoming = self.messages(sent, target, phase)
            for message, rows in zip(outgoing, rows_to, strict=True):
                message.pieces = gather_rows(h, rows, message.rows)
        else:
            rows = torch.cat([h[:0], *(h.index_select(0, rows) for rows in rows_to)])
            outgoing, incoming = self.messages(copy_to_host([rows])[0], target, phase)
        self._swap(outgoing, incoming, phase, () if own is None else copy_rows(h, own))
        if not readable:
            halo.copy_(target, non_blocking=True)

    def _swap(
        self, outgoing: list[Outgoing], incoming: list[Incoming], phase: str, meanwhile: Iterable[bool]
    ) -> None:
        # Rows are all in memory of one kind; a rank without peers here sends nothing either way.
        messages: list[Outgoing | Incoming] = [*outgoing, *incoming]
        direct = any(self._is_direct(one.rows) for one in messages)
        exchange = self._exchanges.devices if direct else self._exchanges.streams
        assert exchange is not None
        codec = None
        if self.wire != "same" and phase != ONCE:
            keys = self._session.seed, self._exchanges.step, 2 * self.number + (phase == BACKWARD)
            codec = row_codec(self.wire, messages[0].rows, keys)
        exchange.post(outgoing, incoming, self.describe(phase), phase=phase, layer=self.number, codec=codec)(
            meanwhile
        )

    def describe(self, phase: str) -> str:
        return f"{phase.replace('_', ' ')} of layer {self.number}"

    def counts(self, phase: str) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
        """Return (rank, number of rows) of what is sent, and of what is received."""
        return (self._received, self._sent) if phase == BACKWARD else (self._sent, self._received)

    def messages(self, out: Tensor, into: Tensor, phase: str) -> tuple[list[Outgoing], list[Incoming]]:
        """Return the messages of the rows in ``out``, and those that fill ``into``, peer after peer."""
        to, due = self.counts(phase)
        outgoing = [Outgoing(rank=rank, rows=part) for rank, part in _pieces_of(out, to)]
        return outgoing, [Incoming(rank=rank, rows=part) for rank, part in _pieces_of(into, due)]

    def _memory(self, buffer: ReusableBuffer, num_rows: int, like: Tensor) -> Tensor:
        shape = (num_rows, *like.shape[1:])
        if is_on_host(like):
            return buffer.take(shape, like.dtype)
        return like.new_empty(shape) if self._is_direct(like) else allocate_host_memory(shape, like)

    def rows_on(self, device: torch.device, copy: Copy | None = None) -> list[Tensor]:
        """Return the own rows sent to each peer; copied to a device once, by ``copy`` if that is given."""
        if device not in self._sent_rows:
            copy = copy or (lambda rows: rows.to(device))
            self._sent_rows[device] = [copy(rows) for rows in self._sent_rows[torch.device("cpu")]]
        return self._sent_rows[device]

    def _is_readable(self, rows: Tensor) -> bool:
        return is_on_host(rows) or self._is_direct(rows)

    def _is_direct(self, rows: Tensor) -> bool:
        return self._exchanges.devices is not None and self.wire == "same" and not is_on_host(rows)

    def _check_rows(self, given: Tensor, expected: int, what: str) -> None:
        if given.dim() == 0 or len(given) != expected:
            raise ConfigError(
                f"layer {self.number} exchanges a tensor of shape {tuple(given.shape)}, but this rank has "
                f"{expected} rows there; pass {what}, in the order of the block"
            )


@final
class CoverExchange:
    """Sums of source rows over the in-edges of a layer, with the exchange of its :class:`Cover`.

    Ranks sum for each other what is fewer rows that way. Gradients take the same way back.
    """

    def __init__(self, session: Session, cover: Cover, uncovered: HaloExchange) -> None:
        num_edges = uncovered.num_edges
        self._rows = HaloExchange(session, cover.layer, uncovered.number, uncovered.wire)
        edges = HaloLayer(
            own_rows=num_edges,
            targets=0,
            indptr=np.zeros(1, np.int64),
            indices=cover.indices[:0],
            edge_ids=cover.indices[:0],
            halo_nodes=cover.indices,
            receive=cover.receive_edges,
            send=cover.send_edges,
        )
        self._edges = HaloExchange(session, edges, uncovered.number)
        numbers = torch.from_numpy(np.where(cover.layer.edge_ids < 0, num_edges, cover.layer.edge_ids))
        partial, total = (
            build_block(torch.from_numpy(one.indptr), torch.from_numpy(one.indices), num_sources)
            for one, num_sources in ((cover, uncovered.own_rows), (cover.layer, cover.layer.num_sources))
        )
        self._graphs = {torch.device("cpu"): (partial, total, numbers)}
        self._weights: dict[str, tuple[Tensor, int | None, Tensor]] = {}

    def for_layer(self, number: int) -> CoverExchange:
        exchange = copy.copy(self)
        exchange._rows, exchange._edges = self._rows.for_layer(number), self._edges.for_layer(number)
        exchange._weights = {}
        return exchange

    def sums(self, h: Tensor, weights: tuple[str, Tensor] | None = None) -> Tensor | None:
        """Return the (targets, ...) sums of the (own_rows, ...) ``h`` of all ranks, times the edge's weight.

        ``weights`` are a column of one number per edge and its name. They are sent to the ranks that use them
        when they are first seen. None, on all ranks: weights that are learned or computed without gradient in
        an evaluation, for which rows are sent (attention).
        """
        partial, total, numbers = self._on(h.device)
        if weights is None:
            return cast("Tensor", ops.copy_u_sum(total, self._exchanged(h, ops.copy_u_sum(partial, h))))
        own = weights[1]
        is_number = own.dim() <= h.dim() and math.prod(own.shape[1:]) == 1
        remote = self._remote(*weights) if is_number else None
        if remote is None:
            return None
        # A partial sum has its weights already.
        own = torch.cat([own, own.new_ones(1, *own.shape[1:])])[numbers]
        rows = self._exchanged(h, ops.u_mul_e_sum(partial, h, remote))
        return cast("Tensor", ops.u_mul_e_sum(total, rows, own))

    def _exchanged(self, h: Tensor, partial: Tensor) -> Tensor:
        return self._rows.exchange(torch.cat([h, partial]) if len(partial) else h)

    def _remote(self, name: str, weights: Tensor) -> Tensor | None:
        # Ranks must agree, also those without edges: by objects, not by addresses.
        known, version, remote = self._weights.get(name, (None, 0, weights))
        if known is weights and version == get_version(weights) is not None:
            return remote
        if weights.requires_grad or not torch.is_grad_enabled():
            return None
        remote = self._edges.fetch(weights, phase=ONCE)
        self._weights[name] = weights, get_version(weights), remote
        return remote

    def _on(self, device: torch.device) -> tuple[Any, Any, Tensor]:
        partial, total, numbers = self._graphs[torch.device("cpu")]
        if device not in self._graphs:
            self._graphs[device] = place(partial, device), place(total, device), numbers.to(device)
        return self._graphs[device]


@final
class _Append(torch.autograd.Function):
    """(own_rows, ...) -> (own_rows + n_halo, ...), or with ``back`` the adjoint of that."""

    @staticmethod
    def forward(ctx: Any, halo: HaloExchange, rows: Tensor, kept: Tensor | None, back: bool) -> Tensor:
        ctx.halo, ctx.back = halo, back
        return halo.return_gradients(rows) if back else halo.append(rows.detach(), kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = _Append.apply(ctx.halo, gradient, None, not ctx.back)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return None, found, None, None


@final
class _AppendLate(torch.autograd.Function):
    """:class:`_Append` with halo rows, and in backward gradients of sent rows, of the epoch before."""

    @staticmethod
    def forward(ctx: Any, halo: HaloExchange, late: list[LateRows], h: Tensor) -> Tensor:
        ctx.halo, ctx.gradients = halo, late[1]
        sent = (h.detach().index_select(0, rows) for rows in halo.rows_on(h.device))
        return torch.cat([h.detach(), late[0].swap(sent, halo, FORWARD, h).to(h.device)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        halo: HaloExchange = ctx.halo
        own, of_halo = gradient[: halo.own_rows], gradient[halo.own_rows :]
        to, due = halo.counts(BACKWARD)
        received = ctx.gradients.swap((part for _, part in _pieces_of(of_halo, to)), halo, BACKWARD, own)
        total = own.to(torch.float32 if own.dtype in HALVES else own.dtype, copy=True)
        for rows, (_, part) in zip(halo.rows_on(own.device), _pieces_of(received, due), strict=True):
            total.index_add_(0, rows, part.to(total))
        return None, None, total.to(own.dtype)


@final
class LateRows:
    """What one exchange received in the epoch before, in host memory, and what is in transit since then."""

    def __init__(self, exchange: CallExchange) -> None:
        self._exchange = exchange
        self._out, self._in = ReusableBuffer(), ReusableBuffer()
        self._wait: Wait | None = None
        self.rows: Tensor | None = None
        self._peers: object = None
        self.is_used = False  # in this epoch

    def arrive(self, *, keep: bool = True) -> None:
        """Wait for what is in transit; unless ``keep``, forget all, so that the next exchange is exact."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
            self.rows = self._target
        self.rows = self.rows if keep else None

    def swap(self, sent: Iterable[Tensor], halo: HaloExchange, phase: str, like: Tensor) -> Tensor:
        """Send ``sent``, and return the (k, ...) rows of the epoch before; of this one if there are none.

        ``like`` has the dtype and the width of the rows.
        """
        name = halo.describe(phase)
        if self.is_used:
            raise ConfigError(f"{name} ran twice; with staleness=1 add up losses and call backward once")
        _, due = halo.counts(phase)
        self.arrive(keep=self._peers in (None, due))
        # They lie where the next ones will be put, when they are waited for.
        self.is_used, self._peers = True, due
        out, self._target = (
            memory.take((sum(count for _, count in counts), *like.shape[1:]), like.dtype)
            for memory, counts in zip((self._out, self._in), halo.counts(phase), strict=True)
        )
        if self.rows is not None and (self.rows.shape, self.rows.dtype) != (self._target.shape, like.dtype):
            self.rows = None  # of another model or precision: this exchange is exact
        outgoing, incoming = halo.messages(out, self._target, phase)
        for message, rows in zip(outgoing, sent, strict=True):
            message.rows.copy_(rows)
        self._wait = self._exchange.post(outgoing, incoming, name, phase=phase, layer=halo.number)
        if self.rows is None:
            self.arrive()
        return cast("Tensor", self.rows)


_MOST_PASSES = 100
"""Forward passes without a change of the weights; each keeps rows of its own."""


@final
class StaleHalos:
    """Halo rows and their gradients that a model uses one epoch late; construction is collective.

    The first epoch is exact.
    """

    def __init__(self, session: Session) -> None:
        self._exchanges = row_exchanges(session)
        exchange = self._exchanges.late = self._exchanges.late or CallExchange(session)
        self._late = defaultdict[str, LateRows](lambda: LateRows(exchange))
        self._epoch, self._passes, self._calls = -1, 0, Counter[int]()

    @contextmanager
    def active(self, epoch: int) -> Iterator[None]:
        """Use them in this block, a forward pass of the model."""
        self._passes += 1
        if self._epoch != epoch:
            self._epoch, self._passes, self._calls = epoch, 1, Counter()
            for one in self._late.values():
                if not one.is_used:
                    one.arrive(keep=False)
                one.is_used = False
        if self._passes > _MOST_PASSES:
            raise ConfigError(
                f"{_MOST_PASSES} forward passes without a change of the weights, which ends an epoch of "
                "staleness=1; change them by an optimizer, or in place under torch.no_grad(), not by .data"
            )
        before, self._exchanges.stale = self._exchanges.stale, self
        try:
            yield
        finally:
            self._exchanges.stale = before

    def next_late_rows(self, halo: HaloExchange) -> list[LateRows]:
        """Return the rows and the gradients of the next exchange of the layer of ``halo`` in this epoch."""
        self._calls[halo.number] += 1
        # Rows of another structure, as before a resume with other options, are not used.
        number = f"{halo.number}/{self._calls[halo.number]}/{halo.digest}"
        return [self._late[f"{phase}/{number}"] for phase in (FORWARD, BACKWARD)]

    def state(self) -> dict[str, Tensor]:
        """Wait for what is in transit, and return what the next epoch uses."""
        for one in self._late.values():
            one.arrive()
        return {name: one.rows for name, one in self._late.items() if one.is_used and one.rows is not None}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue with a :meth:`state`; with {} the next epoch is exact."""
        self.state()
        self._late.clear()
        self._epoch = -1
        for name, rows in state.items():
            self._late[name].rows, self._late[name].is_used = rows, True


def _pieces_of(rows: Tensor, counts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Tensor]]:
    pieces = torch.split(rows, [count for _, count in counts])
    return zip((rank for rank, _ in counts), pieces, strict=True)
