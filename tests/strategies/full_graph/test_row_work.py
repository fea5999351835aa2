"""Copies and sums in pieces: nothing is added before it is there, in an order that no arrival changes."""

from __future__ import annotations

import torch

from dglx_dist.strategies.full_graph.halo_exchange import (
    PIECE_BYTES,
    Incoming,
    added,
    bytes_of,
    copied,
    gathered,
)

WIDTH = 256
PIECE = PIECE_BYTES // (WIDTH * 4)
"""Rows of a piece."""


def test_pieces_together_are_the_rows() -> None:
    h, rows = torch.randn(3 * PIECE, WIDTH), torch.randperm(3 * PIECE)[: 2 * PIECE + 1]
    buffer = torch.empty(len(rows), WIDTH)
    pieces = list(gathered(h, rows, buffer))
    assert [len(piece) for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, WIDTH * 4]
    assert torch.equal(buffer, h[rows])
    assert b"".join(pieces) == bytes_of(h[rows]).tobytes()
    target = torch.empty_like(h)
    assert set(copied(h, target)) == {True}
    assert torch.equal(target, h)


def test_rows_without_columns_and_no_rows() -> None:
    assert list(gathered(torch.empty(3, 0), torch.tensor([2]), torch.empty(1, 0))) == [memoryview(b"")]
    none = torch.empty(0, dtype=torch.int64)
    for part in (torch.empty(0, 4), torch.empty(0, 0)):
        total = torch.zeros(2, part.shape[1])
        assert list(added(total, [none], [part], [Incoming(rank=1, buffer=bytes_of(part))])) == []


def test_sums_have_the_same_bits_whoever_is_first() -> None:
    """Three peers give to the same rows, and 2^24 + 1 - 2^24 is 1 in one order and 0 in another."""
    parts = [torch.full((2 * PIECE, WIDTH), value) for value in (2.0**24, 1.0, -(2.0**24))]
    rows = [torch.arange(2 * PIECE)] * 3
    found = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        total = torch.zeros(2 * PIECE, WIDTH)
        incoming = [Incoming(rank=n, buffer=bytes_of(part)) for n, part in enumerate(parts)]
        work = added(total, rows, parts, incoming)
        assert next(work) is False
        for peer in order:
            if peer == 0:
                # A part of the first piece is not enough.
                incoming[0].num_arrived = PIECE_BYTES - 1
                assert next(work) is False
            incoming[peer].num_arrived = len(incoming[peer].buffer)
            while next(work, False):
                pass
        assert list(work) == []
        found.append(total)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
