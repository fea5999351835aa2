"""The halo exchange as one operator with an exact adjoint (algorithms 3.1, 3.2).

Forward, a rank sends copies of some of its rows and appends the rows that others send. Backward, the
gradients of those copies go back to the ranks that hold the rows, which add them up: the transpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.buffers import bytes_of, is_on_host
from dglx_dist.strategies.granndis.plan import HaloLayer
from dglx_dist.strategies.granndis.wire import Incoming, Outgoing, wire_of

FORWARD, BACKWARD = "halo", "halo_gradients"
"""The ledger's names of what is sent in forward and in backward."""

_PIECE_BYTES = 256 * 1024
"""Rows are copied to be sent in pieces of this size, so that one is on its way while the next is copied."""

_STEP_BYTES = 1 << 20
"""Rows are copied on this rank in steps of this size."""

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
        self._sent_rows = [
            (rank, torch.from_numpy(np.require(rows, np.int64, ("C", "W")))) for rank, rows in layer.send
        ]
        self._sent_at = _bounds([len(rows) for _, rows in layer.send])
        self._received_from = [rank for rank, _ in layer.receive]
        self._received_at = _bounds([count for _, count in layer.receive])

    @property
    def num_sources(self) -> int:
        """Own rows and halo together."""
        return self.own_rows + self.num_halo

    @property
    def has_peers(self) -> bool:
        """Whether this rank sends or receives anything."""
        return bool(self._sent_rows or self._received_from)

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Append the rows of the halo to this rank's own; the layer's peers must call it too.

        The way back adds what the peers have for a row in the order of their ranks, halves in float32, so the
        bits do not depend on who was first; every peer's backward must come by. May be differentiated twice.

        Args:
            h: (own_rows, ...), any dtype; what follows the rows is the same on all ranks. What lies on an
                accelerator goes through the host's memory.
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

    def fetch(self, rows: Tensor, phase: str) -> Tensor:
        """Return the halo's rows alone, without a gradient: for rows that are fetched once and kept.

        Args:
            rows: (own_rows, ...), any dtype.
            phase: For the ledger, at most 18 characters.

        Returns:
            (n_halo, ...) on the device of ``rows``.

        Raises:
            ConfigError: there are not as many rows.
            PeerError: a peer is dead, silent, or at another exchange; it is named.
        """
        self._check_rows(rows, self.own_rows, "its own rows")
        halo = rows.new_empty((self.num_halo, *rows.shape[1:]))
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
        halo = gradient[self.own_rows :].cpu().contiguous()
        outgoing = [
            self._outgoing(rank, halo[first:last], BACKWARD)
            for rank, (first, last) in zip(self._received_from, pairwise(self._received_at), strict=True)
        ]
        came = self._wire.received.room((self._sent_at[-1], *gradient.shape[1:]), gradient.dtype)
        parts = [came[first:last] for first, last in pairwise(self._sent_at)]
        incoming = [
            Incoming(rank=rank, room=bytes_of(part))
            for (rank, _), part in zip(self._sent_rows, parts, strict=True)
        ]
        own = gradient[: self.own_rows]
        wider = torch.float32 if gradient.dtype in _SUMMED_WIDER else gradient.dtype
        total = torch.empty(own.shape, dtype=wider, device=gradient.device)
        self._wire.swap(outgoing, incoming, self._name(BACKWARD), _copied(own, total))
        for (_, rows), part in zip(self._sent_rows, parts, strict=True):
            total.index_add_(0, rows.to(total.device), part.to(total.device, wider))
        return total.to(gradient.dtype)

    def _receive(self, h: Tensor, halo: Tensor, phase: str, own: Tensor | None = None) -> None:
        """Fill ``halo`` with the peers' rows, and ``own`` with ``h`` meanwhile."""
        on_host = is_on_host(halo)
        landing = halo if on_host else self._wire.received.room(halo.shape, halo.dtype)
        incoming = [
            Incoming(rank=rank, room=bytes_of(landing[first:last]))
            for rank, (first, last) in zip(self._received_from, pairwise(self._received_at), strict=True)
        ]
        room = self._wire.sent.room((self._sent_at[-1], *h.shape[1:]), h.dtype)
        outgoing = [
            self._outgoing(rank, room[first:last], phase, (h, rows))
            for (rank, rows), (first, last) in zip(self._sent_rows, pairwise(self._sent_at), strict=True)
        ]
        self._wire.swap(outgoing, incoming, self._name(phase), () if own is None else _copied(h, own))
        if not on_host:
            halo.copy_(landing)

    def _outgoing(
        self, rank: int, room: Tensor, phase: str, source: tuple[Tensor, Tensor] | None = None
    ) -> Outgoing:
        """Count and describe what goes to ``rank``: ``room``, filled from ``source`` (h, rows) if given."""
        num_bytes = room.numel() * room.element_size()
        self._session.ledger.add(phase, self.number, self._session.topology.rank, rank, num_bytes)
        pieces = iter([bytes_of(room)]) if source is None else _gathered(*source, room)
        return Outgoing(rank=rank, num_bytes=num_bytes, pieces=pieces)

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


def _gathered(h: Tensor, rows: Tensor, room: Tensor) -> Iterator[memoryview]:
    """Copy ``h[rows]`` into ``room`` piece by piece."""
    if not is_on_host(h):
        room.copy_(h.index_select(0, rows.to(h.device)))
        yield bytes_of(room)
        return
    row_bytes = room.numel() * room.element_size() // max(len(rows), 1)
    step = max(_PIECE_BYTES // max(row_bytes, 1), 1)
    for first in range(0, len(rows), step):
        piece = room[first : first + step]
        torch.index_select(h, 0, rows[first : first + step], out=piece)
        yield bytes_of(piece)


def _copied(source: Tensor, target: Tensor) -> Iterator[None]:
    """Copy ``source`` to ``target`` in steps short enough for the network to be served between them."""
    step = max(len(source) * _STEP_BYTES // max(source.numel() * source.element_size(), 1), 1)
    for first in range(0, len(source), step):
        target[first : first + step].copy_(source[first : first + step])
        yield


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
