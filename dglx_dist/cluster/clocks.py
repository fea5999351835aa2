"""How far apart the clocks of the ranks are, by asking rank 0 the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dglx_dist.cluster.collectives import CONTROL, barrier
from dglx_dist.cluster.session import Session
from dglx_dist.records import Array

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
