"""The halo exchange as one operator with an exact adjoint (algorithms 3.1, 3.2).

Forward, a rank sends copies of some of its rows and appends the rows that others send. Backward, the
gradients of those copies go back to the ranks that hold the rows, which add them up: the transpose.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.buffers import bytes_of, is_on_host
from dglx_dist.strategies.granndis.device_wire import Message
from dglx_dist.strategies.granndis.ends import Incoming
from dglx_dist.strategies.granndis.plan import HaloLayer
from dglx_dist.strategies.granndis.row_work import added, copied, gathered
from dglx_dist.strategies.granndis.wire import Outgoing, wire_of

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
