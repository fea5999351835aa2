"""The halo exchange against its matrix: values, adjoint, bytes, devices, failures."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.exchange import DeviceExchange, Incoming, Outgoing, row_exchanges
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.strategies.full_graph import halo_exchange
from dglx_dist.strategies.full_graph.halo_exchange import PIECE_BYTES, HaloExchange, add_rows
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer
from tests.helpers import wide
from tests.helpers.ranks import run_ranks, start_ranks

Needs = Mapping[tuple[int, int], Sequence[int]]
"""(rank that needs, rank that holds) -> own rows of the latter, in the order in which they arrive."""


def layer_of(rank: int, own_rows: Sequence[int], needs: Needs) -> HaloLayer:
    """The layer of ``rank`` where rank r holds ``own_rows[r]`` rows; without edges, which nobody reads."""
    receive = tuple((peer, len(rows)) for (to, peer), rows in sorted(needs.items()) if to == rank and rows)
    send = tuple(
        (to, np.array(rows, dtype=np.int64))
        for (to, peer), rows in sorted(needs.items())
        if peer == rank and rows
    )
    first = np.concatenate([[0], np.cumsum(own_rows)])
    halo = [first[peer] + row for (to, peer), rows in sorted(needs.items()) if to == rank for row in rows]
    return HaloLayer(
        own_rows=own_rows[rank],
        targets=0,
        indptr=np.zeros(1, dtype=np.int64),
        indices=np.zeros(0, dtype=np.int64),
        edge_ids=np.zeros(0, dtype=np.int64),
        halo_nodes=np.array(halo, dtype=np.int64),
        receive=receive,
        send=send,
    )


def rows_of(rank: int, own_rows: Sequence[int], needs: Needs) -> Tensor:
    """(num_sources,) which row of all ranks' rows, one after the other, each source of ``rank`` is."""
    layer = layer_of(rank, own_rows, needs)
    first = sum(own_rows[:rank])
    return torch.cat([torch.arange(first, first + own_rows[rank]), torch.from_numpy(layer.halo_nodes)])


def random_needs(own_rows: Sequence[int], share: float, seed: int) -> dict[tuple[int, int], list[int]]:
    """Needs of every rank from every other one: a ``share`` of its rows, in no order."""
    generator = np.random.default_rng(seed)
    return {
        (to, peer): generator.permutation(rows)[: round(share * rows)].tolist()
        for peer, rows in enumerate(own_rows)
        for to in range(len(own_rows))
        if to != peer
    }


WIDTH = 256
PIECE = PIECE_BYTES // (WIDTH * 4)
"""Rows of a piece."""


def test_sums_have_the_same_bits_whoever_is_first() -> None:
    """Three peers give to the same rows, and 2^24 + 1 - 2^24 is 1 in one order and 0 in another."""
    parts = [torch.full((2 * PIECE, WIDTH), value) for value in (2.0**24, 1.0, -(2.0**24))]
    rows = [torch.arange(2 * PIECE)] * 3
    results = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        total = torch.zeros(2 * PIECE, WIDTH)
        incoming = [Incoming(rank=n, rows=part) for n, part in enumerate(parts)]
        work = add_rows(total, rows, incoming)
        assert next(work) is False
        for peer in order:
            if peer == 0:
                # A part of the first piece is not enough.
                incoming[0].num_arrived = PIECE_BYTES - 1
                assert next(work) is False
            incoming[peer].num_arrived = parts[peer].nbytes
            while next(work, False):
                pass
        assert list(work) == []
        results.append(total)
    assert torch.equal(results[0], torch.zeros_like(results[0]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


OWN = (5, 7, 0, 3)
"""Rank 2 has no rows. Servers (0, 0, 1, 1)."""
NEEDS: Needs = {(0, 1): [6, 0, 2], (0, 3): [1], (1, 3): [2, 1], (2, 0): [4], (2, 1): [2], (3, 0): [0, 4]}
"""Rank 2 only receives, rank 0 sends nothing to rank 1; row 2 of rank 1 and row 4 of rank 0 go twice."""


def everything(own_rows: Sequence[int], *width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sum(own_rows), *width, generator=generator, dtype=torch.float64).to(dtype)


def own(x: Tensor, rank: int, own_rows: Sequence[int] = OWN) -> Tensor:
    return x[sum(own_rows[:rank]) : sum(own_rows[: rank + 1])]


class Part(torch.autograd.Function):
    """All ranks' rows -> own rows, inside a function that is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.sizes = sizes
        return own(x, dist.get_rank(), sizes).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Join.apply(gradient, ctx.sizes), None


class Join(torch.autograd.Function):
    """Own rows -> all ranks' rows, on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.sizes = sizes
        total = torch.zeros(sum(sizes), *x.shape[1:], dtype=x.dtype)
        own(total, dist.get_rank(), sizes).copy_(x)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Part.apply(gradient, ctx.sizes), None


def check_values(halo: HaloExchange, rank: int) -> None:
    rows = rows_of(rank, OWN, NEEDS)
    for width in ((3,), (), (2, 4), (0,)):
        x = everything(OWN, *width)
        h = own(x, rank).detach().requires_grad_()
        all_rows = halo.exchange(h)
        assert torch.equal(all_rows, x[rows])
        all_rows.sum().backward()
    for dtype in (torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.uint8):
        x = everything(OWN, 3).mul(10).abs().to(dtype)
        assert torch.equal(halo.exchange(own(x, rank)), x[rows])
    x = everything(OWN, 4, 6).transpose(1, 2)[:, ::2]
    assert torch.equal(halo.exchange(own(x, rank)), x[rows])
    assert torch.equal(halo.fetch(own(x, rank).requires_grad_(), phase="preload"), x[rows][OWN[rank] :])
    out = torch.zeros(halo.num_halo, *x.shape[1:], dtype=x.dtype)
    assert halo.fetch(own(x, rank), out, phase="preload") is out
    assert torch.equal(out, x[rows][OWN[rank] :])
    h = own(x, rank).detach().requires_grad_()
    again = halo.exchange(h, kept=x[rows][OWN[rank] :])
    assert torch.equal(again, x[rows])


def check_gradcheck(halo: HaloExchange) -> None:
    sizes = [len(rows_of(rank, OWN, NEEDS)) for rank in range(len(OWN))]

    def whole(x: Tensor) -> Tensor:
        return Join.apply(halo.exchange(Part.apply(x, OWN)), sizes)

    x = everything(OWN, 2).requires_grad_()
    assert torch.autograd.gradcheck(whole, x)
    assert torch.autograd.gradgradcheck(whole, x, everything(sizes, 2).requires_grad_())


def check_kept(halo: HaloExchange, rank: int) -> None:
    """A halo that is not sent again returns the same gradients."""
    x, rows = everything(OWN, 3), rows_of(rank, OWN, NEEDS)
    h = own(x, rank).clone().requires_grad_()
    y = everything([len(rows)], 3)
    once, again = (
        torch.autograd.grad(halo.exchange(h, kept), h, y)[0] for kept in (None, x[rows][OWN[rank] :])
    )
    assert torch.equal(once, again)


def check_halves_are_added_wide(halo: HaloExchange, rank: int) -> None:
    """1 + 2^-11 + 2^-11 is 1 when half precision rounds twice, and 1 + 2^-10 when it rounds once."""
    for dtype, small in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        h = torch.zeros(OWN[rank], 2, dtype=dtype, requires_grad=True)
        y = torch.full((halo.own_rows + halo.num_halo, 2), small, dtype=dtype)
        y[: OWN[rank]] = 1.0
        (gradient,) = torch.autograd.grad(halo.exchange(h), h, y)
        count = torch.bincount(torch.cat([rows_of(server, OWN, NEEDS) for server in range(len(OWN))]))
        expected = (1 + (own(count, rank) - 1) * small).to(dtype)[:, None].expand(-1, 2)
        assert gradient.dtype == dtype
        assert torch.equal(gradient, expected)


def check_bytes(session: Session, halo: HaloExchange, rank: int) -> None:
    before = session.ledger.snapshot()
    h = own(everything(OWN, 3), rank).clone().requires_grad_()
    halo.exchange(h).sum().backward()
    halo.fetch(h, phase="preload")
    results = {
        (row.phase, row.layer, row.source, row.destination, row.inside): row.num_bytes
        for row in session.ledger.since(before)
    }
    expected = {}
    for (to, peer), rows in NEEDS.items():
        size, inside = len(rows) * 3 * 8, to // 2 == peer // 2
        if peer == rank:
            expected["halo", 2, peer, to, inside] = size
            expected["preload", 2, peer, to, inside] = size
        if to == rank:
            expected["halo_gradients", 2, to, peer, inside] = size
    assert results == expected
    before = session.ledger.snapshot()
    halo.exchange(h, kept=torch.zeros(halo.num_halo, 3, dtype=h.dtype))
    assert session.ledger.since(before) == []


def check_alone(session: Session, rank: int) -> None:
    """A layer without halo is no exchange: the tensor itself, and nothing is waited for."""
    halo = HaloExchange(session, layer_of(rank, OWN, {}), 1)
    if rank == 0:
        h = everything(OWN, 3)[: OWN[0]].requires_grad_()
        assert halo.exchange(h) is h
        assert halo.fetch(h, phase="preload").shape == (0, 3)
    with pytest.raises(
        ConfigError, match=rf"layer 1 exchanges .*\(99, 3\).* this rank has {OWN[rank]} rows there"
    ):
        halo.exchange(torch.zeros(99, 3))


def check_large(session: Session, rank: int) -> None:
    """Several pieces and full socket buffers in both directions at once; the same bits every time."""
    sizes = [40_000, 30_000, 50_000, 20_000]
    needs = random_needs(sizes, 0.7, seed=3)
    halo = HaloExchange(session, layer_of(rank, sizes, needs), 3)
    x = everything(sizes, 16, dtype=torch.float32)
    y = x[rows_of(rank, sizes, needs)] * (rank + 0.1)
    results = []
    for _ in range(2):
        h = own(x, rank, sizes).clone().requires_grad_()
        out = halo.exchange(h)
        assert torch.equal(out, x[rows_of(rank, sizes, needs)])
        out.backward(y)
        assert h.grad is not None
        results.append(h.grad)
    assert torch.equal(*results)
    expected = own(x, rank, sizes) * (rank + 0.1)
    step = halo_exchange.PIECE_BYTES // (16 * 4)
    lanes = [(peer, torch.tensor(needs[peer, rank]).split(step)) for peer in range(4) if peer != rank]
    for turn in range(max(len(lane) for _, lane in lanes)):
        for peer, lane in lanes:
            for rows in lane[turn : turn + 1]:
                expected.index_add_(0, rows, own(x, rank, sizes)[rows] * (peer + 0.1))
    assert torch.equal(results[0], expected)
    assert row_exchanges(session).seconds(reset=True) > 0
    assert row_exchanges(session).seconds() == 0


def check_through_the_host(halo: HaloExchange, rank: int) -> None:
    """Rows on another device pass through reused memory. A second exchange must not change the first."""
    x, rows = everything(OWN, 3), rows_of(rank, OWN, NEEDS)
    with mock.patch.object(halo_exchange, "is_on_host", return_value=False):
        first, second = halo.exchange(own(x, rank)), halo.exchange(own(-x, rank))
    assert torch.equal(first, x[rows])
    assert torch.equal(second, -x[rows])


def check_between_accelerators(session: Session, halo: HaloExchange, rank: int) -> None:
    """Gloo replaces NCCL, with the same messages in the same order."""
    exchanges = row_exchanges(session)
    assert exchanges.devices is None
    devices = DeviceExchange(session, torch.device("cpu"))
    with (
        mock.patch.object(halo_exchange, "is_on_host", return_value=False),
        mock.patch.object(exchanges, "devices", devices),
    ):
        check_values(halo, rank)
        check_kept(halo, rank)
        check_halves_are_added_wide(halo, rank)
        check_bytes(session, halo, rank)
        assert exchanges.seconds() >= devices.waited_s > 0


def on_every_rank() -> None:
    with start_session() as session:
        rank = session.topology.rank
        halo = HaloExchange(session, layer_of(rank, OWN, NEEDS), 2)
        check_values(halo, rank)
        check_gradcheck(halo)
        check_kept(halo, rank)
        check_halves_are_added_wide(halo, rank)
        check_bytes(session, halo, rank)
        check_through_the_host(halo, rank)
        check_between_accelerators(session, halo, rank)
        check_alone(session, rank)
        check_large(session, rank)


def test_exchange_equals_its_matrix() -> None:
    run_ranks(on_every_rank, 4, ranks_per_server=2)


def two_layers(session: Session) -> tuple[HaloExchange, HaloExchange]:
    rank = session.topology.rank
    needs = {(0, 1): [0, 1], (1, 0): [2]}
    return (
        HaloExchange(session, layer_of(rank, [3, 3], needs), 1),
        HaloExchange(session, layer_of(rank, [3, 3], needs), 2),
    )


STREAMS, CALLS = {"DGLX_CURVE": "0"}, {"DGLX_CURVE": "1"}


def in_another(what: str) -> str:
    with start_session(timeout_s=20) as session:
        layers, rank = two_layers(session), session.topology.rank
        with pytest.raises(PeerError) as error:
            layers[rank if what == "order" else 0].exchange(torch.zeros(3, 2 + rank * (what == "width")))
        if os.environ["DGLX_CURVE"] == STREAMS["DGLX_CURVE"]:  # among calls, later ones are whole
            with pytest.raises(PeerError, match="aborted on this rank"):
                layers[0].exchange(torch.zeros(3, 2))
        barrier(session, "both have failed")
        return str(error.value)


@pytest.mark.parametrize(
    ("what", "on_zero", "on_one", "environment"),
    [
        (
            "order",
            r"rank 1 sends 16 bytes of 'halo of layer 2, float32.*' \(its message 1 to this rank\)"
            r".*but this rank expects 16 bytes of 'halo of layer 1, float32.*' \(message 1\)",
            "rank 0 sends 8 bytes of 'halo of layer 1, float32.*'.*Let no branch",
            STREAMS,
        ),
        (
            "order",
            "rank 1 sends 16 bytes of 'halo of layer 2, .*', but this rank expects .* of 'halo of layer 1",
            "rank 0 sends 8 bytes of 'halo of layer 1, float32.*'.*Let no branch",
            CALLS,
        ),
        (
            "width",
            "sends 24 bytes of 'halo of layer 1, float32.*'.*expects 16 bytes",
            "sends 8 bytes.*expects 12 bytes",
            STREAMS,
        ),
    ],
)
def test_another_order_is_reported(what: str, on_zero: str, on_one: str, environment: dict[str, str]) -> None:
    zero, first = run_ranks(in_another, 2, args=(what,), environment=environment)
    assert re.search(on_zero, zero, re.DOTALL)
    assert re.search(on_one, first, re.DOTALL)


def with_a_silent_rank() -> str:
    with start_session(timeout_s=3) as session:
        first, _ = two_layers(session)
        if session.topology.rank == 1:
            time.sleep(5)
            return ""
        started = time.monotonic()
        with pytest.raises(PeerError) as error:
            first.exchange(torch.zeros(3, 2))
        assert time.monotonic() - started < 10
        return str(error.value)


@pytest.mark.wide
def test_silent_rank_is_named() -> None:
    message, _ = run_ranks(with_a_silent_rank, 2, environment=STREAMS)
    assert "made no progress for 3 s on rank 0, which waits for rank 1 on" in message
    assert "rank 1" in message.partition("made no progress")[0]


def dies_on_the_way(pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    yield next(pieces)
    yield next(pieces)
    os.kill(os.getpid(), signal.SIGKILL)


def with_a_dying_rank(backward: bool) -> str:
    """Rank 1 is killed when a part of its rows has left; 0 and 2 need nothing of each other."""
    session = start_session(timeout_s=30)
    rank, sizes = session.topology.rank, [40_000] * 3
    everybody = range(sizes[0])
    needs = {(0, 1): everybody, (1, 0): everybody, (1, 2): everybody, (2, 1): everybody}
    halo = HaloExchange(session, layer_of(rank, sizes, needs), 1)
    h = torch.zeros(sizes[rank], 32, requires_grad=True)
    if rank == 1:
        if backward:
            sources = halo.exchange(h)
        with mock.patch.object(
            halo_exchange,
            "Outgoing",
            lambda rank, rows, pieces=None: Outgoing(
                rank=rank, rows=rows, pieces=dies_on_the_way(iter(rows.split(1000)))
            ),
        ):
            sources.sum().backward() if backward else halo.exchange(h)
    started = time.monotonic()
    with pytest.raises(PeerError) as error:
        halo.exchange(h).sum().backward()
    assert time.monotonic() - started < 20
    with pytest.raises(PeerError, match="aborted on this rank"):
        halo.exchange(h)
    session.close(failed=True)
    return str(error.value)


@pytest.mark.parametrize("backward", [True, *wide(False)])
def test_rank_killed_in_the_middle_is_named_at_once(backward: bool) -> None:
    outcomes = start_ranks(with_a_dying_rank, 3, args=(backward,), environment=STREAMS)
    for rank in (0, 2):
        assert outcomes[rank].error == ""
        assert "rank 1 on" in outcomes[rank].result
        assert "probably dead" in outcomes[rank].result
        assert "halo gradients" in outcomes[rank].result if backward else "halo of" in outcomes[rank].result


def from_two_threads() -> None:
    with start_session(timeout_s=30) as session:
        first, _ = two_layers(session)
        if session.topology.rank == 0:
            thread = threading.Thread(target=first.exchange, args=(torch.zeros(3, 2),))
            thread.start()
            while not row_exchanges(session).streams._in_use.locked():
                time.sleep(0.01)
            with pytest.raises(ConfigError, match="two threads exchange halo rows at the same time"):
                first.exchange(torch.zeros(3, 2))
            barrier(session, "two threads")
            thread.join()
        else:
            barrier(session, "two threads")
            first.exchange(torch.zeros(3, 2))


def test_two_threads_are_refused() -> None:
    run_ranks(from_two_threads, 2, environment=STREAMS)
