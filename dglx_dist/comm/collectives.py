"""What all ranks do together: sums, gathers, broadcasts, barriers. Counted, and with a time limit.

Every function must be called by all ranks in the same order; on one rank it moves nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.comm.ledger import ring_bytes
from dglx_dist.comm.session import Session
from dglx_dist.errors import PeerError
from dglx_dist.records import Array

_SHOWN = 100
"""Characters of what a rank waits for that others are told and compare with their own."""

CONTROL = "control"
"""Phase under which what is not data is counted."""


def sum_over_ranks(
    tensor: Tensor, session: Session, *, phase: str, layer: int = 0, in_place: bool = False
) -> Tensor:
    """Sum ``tensor`` over all ranks; every rank gets the same bits.

    Counted as a ring all-reduce, 2 (W - 1) / W of its bytes per rank (algorithms 0.4), to the next rank.

    Args:
        tensor: Any shape and dtype, the same on all ranks; carries no gradient through.
        session: Who takes part.
        phase: For the ledger.
        layer: For the ledger.
        in_place: Overwrite ``tensor``, which must be contiguous.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    total = tensor.detach() if in_place else tensor.detach().clone(memory_format=torch.contiguous_format)
    topology = session.topology
    if topology.world_size == 1 or total.numel() == 0:
        return total
    with peers_named(session, f"all-reduce ({phase})"):
        dist.all_reduce(total)
    count_all_reduce(session, phase, total.numel() * total.element_size(), layer)
    return total


def count_all_reduce(session: Session, phase: str, num_bytes: int, layer: int = 0) -> None:
    """Count what this rank sends to the next one in a ring all-reduce of ``num_bytes``: 2 (W-1)/W of them."""
    topology = session.topology
    sent = ring_bytes(num_bytes, topology.world_size, topology.rank)
    session.ledger.add(phase, layer, topology.rank, _next_rank(session), sent)


def gather_int64(values: Sequence[int] | Array, session: Session) -> Array:
    """Collect K whole numbers from every rank.

    Args:
        values: (K,) with the same K on all ranks.
        session: Who takes part.

    Returns:
        (W, K) int64, row r from rank r, on every rank.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    mine = np.ascontiguousarray(values, dtype=np.int64).reshape(-1)
    if session.topology.world_size == 1 or not len(mine):
        return np.broadcast_to(mine, (session.topology.world_size, len(mine))).copy()
    return _gather(torch.from_numpy(mine), session).numpy()


def gather_json(value: object, session: Session) -> list[object]:
    """Collect a JSON value from every rank; (W,) by rank, on every rank.

    Raises:
        TypeError: ``value`` is no JSON value.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    raw = json.dumps(value).encode()
    if session.topology.world_size == 1:
        return [json.loads(raw)]
    sizes = gather_int64([len(raw)], session)[:, 0]
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = _gather(padded, session).numpy()
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def broadcast_json(value: object, session: Session, source: int = 0) -> object:
    """Give the JSON value of rank ``source`` to every rank; what the others pass is ignored.

    Raises:
        TypeError: ``value`` of ``source`` is no JSON value.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    topology = session.topology
    mine = topology.rank == source
    raw = json.dumps(value).encode() if mine or topology.world_size == 1 else b""
    if topology.world_size == 1:
        return json.loads(raw)
    size = int(gather_int64([len(raw)], session)[source, 0])
    buffer = (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8) if mine else torch.empty(size, dtype=torch.uint8)
    )
    with peers_named(session, "broadcast"):
        dist.broadcast(buffer, source)
    for rank in range(topology.world_size) if mine else ():
        session.ledger.add(CONTROL, 0, source, rank, size)
    return json.loads(buffer.numpy().tobytes())


def barrier(session: Session, what: str) -> None:
    """Wait until every rank is here.

    Args:
        session: Who takes part.
        what: What is waited for, for the message.

    Raises:
        PeerError: ranks are missing after the time-out, or dead; they are named.
    """
    if session.store is not None:
        with _doing(session, what):
            session.store.barrier(what, check=lambda missing: session.raise_for_dead(missing, what))


@contextmanager
def peers_named(session: Session, doing: str) -> Iterator[None]:
    """Turn an error of torch.distributed inside the block into a PeerError that names who is to blame.

    Raises:
        PeerError: torch.distributed failed inside the block.
    """
    with _doing(session, doing):
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"{session.describe_failure(doing)} ({error})") from error


@contextmanager
def _doing(session: Session, what: str) -> Iterator[None]:
    """Tell whoever asks what this rank waits for inside the block."""
    before, session.rpc.doing = session.rpc.doing, what[:_SHOWN]
    try:
        yield
    finally:
        session.rpc.doing = before


def _gather(mine: Tensor, session: Session) -> Tensor:
    topology = session.topology
    rows = [torch.empty_like(mine) for _ in range(topology.world_size)]
    with peers_named(session, "all-gather"):
        dist.all_gather(rows, mine)
    size = mine.numel() * mine.element_size()
    session.ledger.add(CONTROL, 0, topology.rank, _next_rank(session), size * (topology.world_size - 1))
    return torch.stack(rows)


def _next_rank(session: Session) -> int:
    return (session.topology.rank + 1) % session.topology.world_size


_OP = "cluster.clock"
_ROUND_TRIPS = 20


@dataclass(frozen=True, kw_only=True)
class Clock:
    """This rank's ``time.perf_counter()`` beside rank 0's."""

    offset_s: float
    """What to add to a time of this rank to have it in rank 0's."""
    error_s: float
    """How wrong ``offset_s`` may be, at the time of measuring: half of the fastest round trip."""


def measure_clock(session: Session) -> Clock:
    """Compare this rank's clock with rank 0's; every rank must call it, none twice at a time.

    Of 20 round trips the fastest counts: rank 0 read its clock somewhere within it, so the middle is wrong by
    half of it at most. Clocks of machines then drift apart, usually by less than 10 us a second.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    if session.topology.world_size == 1:
        return Clock(offset_s=0.0, error_s=0.0)
    answers = session.topology.rank == 0
    if answers:
        session.rpc.register(_OP, _tell_time)
    try:
        barrier(session, "comparing clocks")
        clock = Clock(offset_s=0.0, error_s=0.0) if answers else _ask(session)
        barrier(session, "clocks compared")
    finally:
        if answers:
            session.rpc.unregister(_OP)
    return clock


def _ask(session: Session) -> Clock:
    clocks = []
    for _ in range(_ROUND_TRIPS):
        before = time.perf_counter()
        (told,) = session.rpc.call(0, _OP, "", [], phase=CONTROL)
        after = time.perf_counter()
        offset = float(told.reshape(-1)[0]) - (before + after) / 2
        clocks.append(Clock(offset_s=offset, error_s=(after - before) / 2))
    return min(clocks, key=lambda clock: clock.error_s)


def _tell_time(_name: str, _arrays: Sequence[Array]) -> list[Array]:
    return [np.array([time.perf_counter()])]


def raise_for_missing(
    session: Session, missing: Sequence[int], what: str, *, before: str, undone: str, advice: str, late: bool
) -> None:
    """Raise PeerError if one of the ranks ``missing`` at ``what`` failed, is dead, or time is up.

    Args:
        session: The run.
        missing: Ranks from which something has not come; at least one.
        what: What is waited for, for those that are asked.
        before: Before what a rank failed, as "before 'step 1'".
        undone: What those missing did not do, as "sent nothing for 'step 1'".
        advice: What to do about it.
        late: Whether time is up.
    """
    failure = session.store.first_failure() if session.store is not None else None
    if failure is not None and failure[0] in missing:
        raise PeerError(f"rank {failure[0]} failed {before}: {failure[1]}")
    session.raise_for_dead(list(missing), what)
    if late:
        names = ", ".join(f"rank {rank} on {session.hosts[rank]}" for rank in missing)
        raise PeerError(
            f"{names} {undone} within {session.timeout_s:g} s ({session.describe_failure(what)}); {advice}, "
            "or raise timeout_s (DGLX_TIMEOUT)"
        )
