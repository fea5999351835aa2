"""Copies and sums of rows in small steps, between which the network is served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dglx_dist.strategies.granndis.buffers import bytes_of, is_on_host
from dglx_dist.strategies.granndis.ends import Incoming

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
